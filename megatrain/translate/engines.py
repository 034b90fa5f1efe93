"""Files in sections: DeepSpeed's JSON and MegaTrain's YAML. Where bytes live is left to the planner."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatrain.base.other_tools import KEYS, PLANNER, Fate
from megatrain.translate.draft import Draft, Rule, choice, mapping
from megatrain.translate.trainers import attention, loaded_dtype, nvme_paths, optimizer, reports

#: Optimizers of which one process must have whole matrices.
_OF_WHOLE_MATRICES = ("adafactor",)
_SCHEDULES = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}

#: The version whose defaults are written into a translation.
DEEPSPEED_VERSION = "0.19.6"
#: Parameters of optimizers that have no key here: the value that is the same here, and what another value means.
_PARAMETERS: Mapping[str, tuple[Any, str]] = {
    "adam_w_mode": (True, "weight decay is decoupled from the gradient here, as in AdamW"),
    "bias_correction": (True, "the moments are always corrected for their start here"),
    "fp32_optimizer_states": (True, "see optimizer.state_dtype"),
    "torch_adam": (None, "the update rule is the same; only the kernel differs"),
}


def translate_deepspeed(draft: Draft) -> None:
    """Fill a draft from a config of DeepSpeed, which names no model and no data: the user has to fill them in."""
    values = draft.source.values
    unneeded = {name for name, key in KEYS["deepspeed"].items() if key.fate is Fate.UNNEEDED}
    for path, value in list(values.unread(unneeded)):
        if value == "auto":
            draft.lose(path, "the arguments of Hugging Face's Trainer decide it, which are not in this file", value)
    draft.fill_in("task", "sft", 'or "pretrain"')
    draft.fill_in("output_dir", "outputs/first", "folder of the run")
    draft.fill_in_model()
    draft.fill_in_data()
    draft.translate_keys({}, {name: value for name, value in values.items() if value != "auto"})
    if values.get("gradient_clipping") is None:
        note = "DeepSpeed's default since 0.19.3; write 0 for older versions, which do not clip"
        draft.put("optimizer.max_grad_norm", 1.0, note=note)
    nvme_paths(draft, values)
    _deepspeed_batch(draft)
    _deepspeed_optimizer(draft)
    _deepspeed_schedule(draft)
    for name in ("bf16", "fp16"):
        table = values.get(name)
        if isinstance(table, Mapping) and table.get("enabled") is True:
            note = "float16 there, which needs loss scaling" if name == "fp16" else ""
            draft.put("precision.compute_dtype", "bfloat16", f"{name}.enabled", note)
        for key in mapping(table):
            if name == "fp16" and key != "enabled":
                draft.drop(f"fp16.{key}", "bfloat16 needs no loss scaling")
    if not any(mapping(values.get(name)).get("enabled") in (True, "auto") for name in ("bf16", "fp16")):
        draft.put("precision.compute_dtype", "float32", note="DeepSpeed's default; bfloat16 is faster")
    for name in ("wandb", "tensorboard"):
        table = values.get(name)
        if isinstance(table, Mapping) and table.get("enabled") is True:
            reports(draft, name, [name])
            if name == "wandb" and table.get("project"):
                draft.put("logging.project", table["project"], "wandb.project")


def put_processes(draft: Draft, number: int, num_hosts: int = 1) -> None:
    """Write how many processes train, where several can; else one does, with the same rows.

    Args:
        draft: With the task and the optimizer.
        number: Of all machines.
        num_hosts: Machines.
    """
    key = "distributed.processes"
    optim, task = draft.entries.get("optimizer.optim"), draft.entries.get("task")
    if task is not None and task.value == "dpo":
        draft.lose(key, "preferences are trained by one process here", number)
    elif optim is not None and optim.value in _OF_WHOLE_MATRICES:
        draft.lose(key, f"{optim.value} is of one process here", number)
    elif num_hosts > 1:
        why = (
            f"each machine starts its own: torchrun --nnodes {num_hosts} --nproc-per-node {max(1, number // num_hosts)}"
        )
        draft.lose(key, f"{why} ... -m megatrain_tier_cli run CONFIG", number)
    else:
        draft.put(key, number, note="one for each GPU of this machine; 1: the same rows on one")


def _deepspeed_batch(draft: Draft) -> None:
    """Derive the micro-batch or the accumulation from train_batch_size, their product."""
    values = draft.source.values
    rows, micro = values.get("train_batch_size"), values.get("train_micro_batch_size_per_gpu")
    accumulation = values.get("gradient_accumulation_steps")
    if not isinstance(rows, int):
        return
    if isinstance(micro, int) and micro > 0:
        number = max(1, rows // micro)
        if accumulation != number:
            draft.put("training.gradient_accumulation_steps", number, "train_batch_size", f"{rows} rows of all devices")
        if isinstance(accumulation, int) and accumulation > 0 and (processes := number // accumulation) > 1:
            put_processes(draft, processes)
    elif isinstance(accumulation, int) and accumulation > 0:
        draft.put("training.per_device_train_batch_size", max(1, rows // accumulation), "train_batch_size")
    else:
        draft.put("training.per_device_train_batch_size", rows, "train_batch_size", "all rows of a step")


def _deepspeed_optimizer(draft: Draft) -> None:
    table = mapping(draft.source.values.get("optimizer"))
    parameters = mapping(table.get("params"))
    if "type" in table:
        optimizer(draft, "optimizer.type", table["type"])
    for name in parameters:
        value, theirs = parameters.get(name), f"optimizer.params.{name}"
        if value in (None, "auto"):
            continue
        if name == "betas" and isinstance(value, list) and len(value) == 2:
            if value[0] != "auto":
                draft.put("optimizer.adam_beta1", value[0], theirs)
                draft.put("optimizer.adam_beta2", value[1], theirs)
        elif (known := KEYS["deepspeed"].get(theirs)) is not None:
            draft.put(known.ours, value, theirs)
        else:
            same, why = _PARAMETERS.get(name, (None, "nothing like it here"))
            if value is not same:
                draft.lose(theirs, why, value)
    if "type" in table:
        draft.default({"optimizer.adam_beta2": 0.999, "optimizer.weight_decay": 0.0})
        if "lr" not in parameters and "adam" in str(table["type"]).lower():
            draft.default({"optimizer.learning_rate": 1e-3})
    elif "optimizer" not in draft.source.values:
        draft.lose("optimizer", "the program makes it, which is not in this file; here [optimizer] describes it")


def _deepspeed_schedule(draft: Draft) -> None:
    table = mapping(draft.source.values.get("scheduler"))
    parameters = mapping(table.get("params"))
    kind = table.get("type")
    if kind is None:
        note = "DeepSpeed's default without a scheduler; a Trainer takes its own arguments"
        draft.put("optimizer.lr_scheduler_type", "constant", note=note)
        return
    if not isinstance(kind, str) or kind not in _SCHEDULES:
        draft.lose("scheduler.type", f"here: {', '.join(_SCHEDULES.values())}, and others of transformers", kind)
        return
    draft.put("optimizer.lr_scheduler_type", _SCHEDULES[kind], "scheduler.type")
    for ours, name, usual in (
        ("optimizer.warmup_steps", "warmup_num_steps", 1000),
        ("training.max_steps", "total_num_steps", None),
    ):
        if (number := _given(parameters, name, usual)) is not None:
            draft.put(ours, number, f"scheduler.params.{name}")
    # WarmupLR without a peak takes the optimizer's rate.
    peak = _given(parameters, "warmup_max_lr", 1e-3 if kind == "WarmupDecayLR" else None)
    if peak is not None and kind != "WarmupCosineLR":
        note = "" if "warmup_max_lr" in parameters else f"the default of {kind}, which overrides the optimizer's lr"
        draft.put("optimizer.learning_rate", peak, "scheduler.params.warmup_max_lr", note)
    others: tuple[tuple[str, Any, Any, str], ...] = (
        ("warmup_min_lr", 0, 0, "a warm-up begins at 0"),
        ("warmup_min_ratio", 0, 0, "a warm-up begins at 0"),
        ("warmup_type", "log", "linear", "a warm-up rises linearly"),
        ("cos_min_ratio", 1e-4 if kind == "WarmupCosineLR" else 0, 0, "the cosine falls to 0"),
    )
    for name, default, same, why in others:
        value = _given(parameters, name, default)
        if value is not None and value != same:
            given = "" if name in parameters else f" (the default of {kind})"
            draft.lose(f"scheduler.params.{name}", f"{why} here{given}", value)


def _given(parameters: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return a parameter; the default if the file has none, None if the Trainer or null decides it."""
    value = parameters.get(name, default)
    return None if value == "auto" else value


_MEGATRAIN_SECTIONS = ("model", "dataset", "training", "optimizer", "logging")
_MEGATRAIN_RULES: dict[str, Rule] = {
    "model.dtype": loaded_dtype,
    "model.attn_implementation": attention,
    "training.train_on_prompt": choice("data.train_on", {True: "all", False: None}, "see data.train_on"),
    "optimizer.type": optimizer,
}
_MEGATRAIN_DEFAULTS: dict[str, Any] = {
    "data.max_length": 1024,
    "training.per_device_train_batch_size": 96,
    "training.max_steps": 100,
    "optimizer.learning_rate": 1e-5,
    "optimizer.weight_decay": 0.01,
    "optimizer.adam_beta2": 0.999,
}


def translate_megatrain(draft: Draft) -> None:
    """Fill a draft from a file of MegaTrain.

    Raises:
        TranslationError: A section is not a mapping.
    """
    values = draft.source.values
    for name, section in values.items():
        if section is not None and not isinstance(section, Mapping):
            raise draft.refuse(f"`{name}` must hold names with values")
    draft.put("task", "sft")
    name = str(mapping(values.get("model")).get("name") or "model").rstrip("/").rpartition("/")[2]
    draft.put_path("output_dir", f"outputs/{name}", note="MegaTrain saves nothing")
    for name in _MEGATRAIN_SECTIONS:
        draft.translate_keys(_MEGATRAIN_RULES, values.get(name) or {}, f"{name}.")
    for name, section in values.items():
        if name == "memory":
            draft.drop("memory", PLANNER, section)
        elif name not in _MEGATRAIN_SECTIONS:
            draft.lose(name, "nothing like it here", section)
    draft.fill_in_model()
    _megatrain_data(draft)
    _unwritten_behaviour(draft)
    draft.default(_MEGATRAIN_DEFAULTS)


def _megatrain_data(draft: Draft) -> None:
    """Translate the data set: one of prompts and answers, or a name in dataset_info.json."""
    table = mapping(draft.source.values.get("dataset"))
    if table.get("path"):
        draft.put_path("data.train.0.path", table["path"], "dataset.path")
        columns = {
            "prompt": table.get("query_field") or "query",
            "completion": table.get("response_field") or "response",
        }
        for ours, theirs in columns.items():
            draft.put(
                f"data.train.0.columns.{ours}", theirs, f"dataset.{'query' if ours == 'prompt' else 'response'}_field"
            )
    elif table.get("name"):
        folder = Path(str(table.get("dataset_dir") or "data"))
        draft.fill_in(
            "data.train.0.path",
            str(folder / f"{table['name']}.json"),
            f"file_name of `{table['name']}` in {folder / 'dataset_info.json'}",
        )
    else:
        draft.fill_in_data()


def _unwritten_behaviour(draft: Draft) -> None:
    """Write down what MegaTrain does without a key for it, and what would be different here."""
    note = "as MegaTrain trains"
    if "data.train_on" not in draft.entries:
        draft.put("data.train_on", "last_assistant", note=f"{note}; assistant trains on all answers")
    draft.put("data.packing", False, note=f"{note}, which pads every row; true is faster")
    draft.put("optimizer.lr_scheduler_type", "constant", note=note)
    draft.put("optimizer.weight_decay_exclude", [], note=f"{note}: norms and biases decay too")
