"""DeepSpeed: JSON beside a training script. Batch, optimizer and schedule are taken; the rest the planner decides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatrain.translate import common
from megatrain.translate.draft import Draft, Rule, apply, ignored, lost, mapping, same, unneeded

_SCHEDULES = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_UNNEEDED = {
    common.PLANNER: ("zero_optimization", "aio", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    common.RECOMPUTED: ("activation_checkpointing",),
    common.ONE_DEVICE: (
        "communication_data_type", "prescale_gradients", "gradient_predivide_factor", "sparse_gradients",
        "comms_config", "comms_logger", "tensor_parallel", "hybrid_engine",
    ),
    "the gradients are summed in float32": ("data_types",),
    "every run writes metrics.jsonl; [profile] writes timelines": (
        "wall_clock_breakdown", "flops_profiler", "monitor_config", "dump_state", "csv_monitor", "memory_breakdown",
    ),
    "checkpoints are verified, and open with any tiers": ("checkpoint", "elasticity", "autotuning"),
}  # fmt: skip

RULES: dict[str, Rule] = {
    **{name: unneeded(why) for why, names in _UNNEEDED.items() for name in names},
    **dict.fromkeys(("optimizer", "scheduler", "bf16", "fp16", "train_batch_size", "wandb", "tensorboard"), ignored),
    "train_micro_batch_size_per_gpu": same("training.per_device_train_batch_size"),
    "gradient_accumulation_steps": same("training.gradient_accumulation_steps"),
    "gradient_clipping": same("optimizer.max_grad_norm"),
    "steps_per_print": same("logging.logging_steps"),
    "seed": same("seed"),
    "compression_training": lost("all parameters are trained in full precision"),
    "data_efficiency": lost("see [data]"),
    "curriculum_learning": lost("see [data]"),
    "amp": lost("see precision.compute_dtype"),
}
_OPTIMIZER: dict[str, str] = {
    "lr": "optimizer.learning_rate",
    "weight_decay": "optimizer.weight_decay",
    "eps": "optimizer.adam_epsilon",
    "momentum": "optimizer.sgd_momentum",
    "nesterov": "optimizer.sgd_nesterov",
}


def translate(draft: Draft) -> None:
    """Fill a draft. It names no model and no data: those are to be filled in."""
    values = draft.source.values
    draft.fill_in("task", "sft", 'or "pretrain"')
    draft.fill_in("output_dir", "outputs/first", "folder of the run")
    draft.fill_in("model.model_name_or_path", "path/to/model", "a Hugging Face folder")
    draft.fill_in("data.train.0.path", "data/train.jsonl", "a file, glob or folder, or the hub name of a data set")
    apply(draft, RULES, {name: value for name, value in values.items() if value != "auto"})
    common.nvme_paths(draft, values)
    _batch(draft)
    _optimizer(draft)
    _schedule(draft)
    for name in ("bf16", "fp16"):
        table = values.get(name)
        if isinstance(table, Mapping) and table.get("enabled") is True:
            note = "float16 there, which needs loss scaling" if name == "fp16" else ""
            draft.put("precision.compute_dtype", "bfloat16", f"{name}.enabled", note)
    for name in ("wandb", "tensorboard"):
        table = values.get(name)
        if isinstance(table, Mapping) and table.get("enabled") is True:
            common.reports(draft, name, [name])


def _batch(draft: Draft) -> None:
    """Make micro-batch and accumulation of the rows of a step, of which two say the third."""
    values = draft.source.values
    rows, micro = values.get("train_batch_size"), values.get("train_micro_batch_size_per_gpu")
    accumulation = values.get("gradient_accumulation_steps")
    if not isinstance(rows, int):
        return
    if isinstance(micro, int) and micro > 0:
        number = max(1, rows // micro)
        if accumulation != number:
            draft.put("training.gradient_accumulation_steps", number, "train_batch_size", f"{rows} rows of one device")
    elif isinstance(accumulation, int) and accumulation > 0:
        draft.put("training.per_device_train_batch_size", max(1, rows // accumulation), "train_batch_size")
    else:
        draft.put("training.per_device_train_batch_size", rows, "train_batch_size", "all rows of a step")


def _optimizer(draft: Draft) -> None:
    table = mapping(draft.source.values.get("optimizer"))
    parameters = mapping(table.get("params"))
    if "type" in table:
        common.optimizer(draft, "optimizer.type", table["type"])
    for name, value in parameters.items():
        if value in (None, "auto") or name in ("torch_adam", "adam_w_mode", "bias_correction", "fp32_optimizer_states"):
            continue
        if name == "betas" and isinstance(value, list) and len(value) == 2:
            if value[0] != "auto":
                draft.put("optimizer.adam_beta1", value[0], "optimizer.params.betas")
                draft.put("optimizer.adam_beta2", value[1], "optimizer.params.betas")
        elif name in _OPTIMIZER:
            draft.put(_OPTIMIZER[name], value, f"optimizer.params.{name}")
        else:
            draft.lose(f"optimizer.params.{name}", "nothing like it here", value)
    if "type" in table:
        draft.default({"optimizer.adam_beta2": 0.999, "optimizer.weight_decay": 0.0})


def _schedule(draft: Draft) -> None:
    table = mapping(draft.source.values.get("scheduler"))
    parameters = mapping(table.get("params"))
    kind = table.get("type")
    if kind is None:
        return
    if not isinstance(kind, str) or kind not in _SCHEDULES:
        draft.lose("scheduler.type", f"here: {', '.join(_SCHEDULES.values())}, and others of transformers", kind)
        return
    draft.put("optimizer.lr_scheduler_type", _SCHEDULES[kind], "scheduler.type")
    draft.put(
        "optimizer.warmup_steps", _given(parameters, "warmup_num_steps", 1000), "scheduler.params.warmup_num_steps"
    )
    if _given(parameters, "total_num_steps", None) is not None:
        draft.put("training.max_steps", parameters["total_num_steps"], "scheduler.params.total_num_steps")
    peak = _given(parameters, "warmup_max_lr", None)
    if peak is not None:
        draft.put("optimizer.learning_rate", peak, "scheduler.params.warmup_max_lr")
    if _given(parameters, "warmup_min_lr", 0):
        draft.lose("scheduler.params.warmup_min_lr", "a warm-up begins at 0", parameters["warmup_min_lr"])


def _given(parameters: Mapping[str, Any], name: str, default: Any) -> Any:
    value = parameters.get(name, default)
    return default if value == "auto" else value
