"""Keys of transformers' TrainingArguments, which LLaMA-Factory, TRL and Axolotl share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatrain.config.aliases import OPTIMIZERS_WITH_KEY
from megatrain.config.json_schema import leaf_schema
from megatrain.config.keys import known_keys
from megatrain.translate.draft import Draft, Rule, ignored, is_file, lost, mapping, path, same, unneeded
from megatrain.translate.source import TranslationError, read_mapping

PLANNER = "where bytes live, and when they move, the planner decides from [tiers]: see `megatrain-tier plan`"
ONE_DEVICE = "one device trains here"
RECOMPUTED = "every layer is recomputed once in the backward"
SPEED = "changes the speed, not the results"
_NO_REMOTE_CODE = "code in a model folder is never run"

_OPTIMIZERS = {
    "adamw": ("adamw", "paged_adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused",
              "adamw_anyprecision", "paged_adamw_32bit", "adamw_torch_xla", "adam", "deepspeed_adam", "fused"),
    "lion": ("lion", "lion_32bit", "paged_lion_32bit", "lion_pytorch"),
    "adafactor": ("adafactor",),
    "sgd": ("sgd",),
    "muon": ("muon",),
}  # fmt: skip
_OPTIMIZER_OF = {theirs: ours for ours, names in _OPTIMIZERS.items() for theirs in names}
#: Optimizers with states of 8 or 4 bits -> the same arithmetic with whole ones.
_QUANTIZED = {
    "adamw_8bit": "adamw",
    "adamw_bnb_8bit": "adamw",
    "paged_adamw_8bit": "adamw",
    "adamw_torch_8bit": "adamw",
    "adamw_torch_4bit": "adamw",
    "lion_8bit": "lion",
    "paged_lion_8bit": "lion",
}


def optimizer(draft: Draft, theirs: str, value: Any) -> None:
    """Translate the name of an optimizer."""
    name = str(value).lower()
    if name in _OPTIMIZER_OF:
        draft.put("optimizer.optim", _OPTIMIZER_OF[name], theirs)
    elif name in _QUANTIZED:
        draft.put(
            "optimizer.optim", _QUANTIZED[name], theirs, f"{value} there: its state is kept in full precision here"
        )
    else:
        draft.lose(theirs, f"optimizers here: {', '.join(leaf_schema('optimizer.optim')['enum'])}", value)


def warmup_ratio(draft: Draft, theirs: str, value: Any) -> None:
    """Translate a share of all steps; a number of steps beats it, as in transformers."""
    if "optimizer.warmup_steps" not in draft.entries:
        draft.put("optimizer.warmup_steps", value, theirs)


def warmup_steps(draft: Draft, theirs: str, value: Any) -> None:
    """Translate a number of steps; 0 leaves the word to a ratio, as in transformers."""
    if value or "optimizer.warmup_steps" not in draft.entries:
        draft.put("optimizer.warmup_steps", value, theirs)


def half_precision(draft: Draft, theirs: str, value: Any) -> None:
    """Translate bf16 and fp16."""
    if value is True or value in ("true", "auto", "full"):
        note = "float16 there, which needs loss scaling" if theirs.endswith("fp16") and value is True else ""
        if theirs.endswith("bf16") or note:
            draft.put("precision.compute_dtype", "bfloat16", theirs, note)


def loaded_dtype(draft: Draft, theirs: str, value: Any) -> None:
    """Translate the dtype a model is loaded in: it says what is computed in, nothing of the weights that are kept."""
    name = str(value).removeprefix("torch.")
    if name in ("bfloat16", "float16", "bf16", "fp16", "half"):
        if "precision.compute_dtype" not in draft.entries:
            draft.put("precision.compute_dtype", "bfloat16", theirs, "the weights themselves keep 32 bits")
    else:
        draft.drop(theirs, "weights are kept in 32 bits whatever their files have", value)


def attention(draft: Draft, theirs: str, value: Any) -> None:
    """Translate the name of an attention kernel."""
    name = {"fa2": "flash_attention_2", "disabled": "eager", "flash_attn_2": "flash_attention_2"}.get(str(value), value)
    if name in leaf_schema("model.attn_implementation")["enum"]:
        if name != "auto":
            draft.put("model.attn_implementation", name, theirs)
    else:
        draft.lose(theirs, "auto takes sdpa where the model supports it", value)


def reports(draft: Draft, theirs: str, value: Any) -> None:
    """Translate where figures go. Ours are always in metrics.jsonl."""
    names = [name for name in (value if isinstance(value, list) else [value]) if name not in ("none", "all")]
    kind = leaf_schema("logging.report_to")
    allowed: list[str] = kind.get("items", {}).get("enum", []) or next(
        (part["items"]["enum"] for part in kind.get("anyOf", ()) if "items" in part), []
    )
    kept = [name for name in names if name in allowed]
    if kept:
        draft.put("logging.report_to", ["jsonl", *(name for name in kept if name != "jsonl")], theirs)
    for name in names:
        if name not in allowed:
            draft.lose(theirs, "figures go to output_dir/metrics.jsonl", name)


def resume(draft: Draft, theirs: str, value: Any) -> None:
    """Translate what a run starts from: a run here continues by itself; other tools' checkpoints are not read."""
    if isinstance(value, str):
        draft.lose(theirs, "checkpoints of other tools are not read: give its exported model as the model", value)
    else:
        draft.drop(theirs, "a run continues by itself where output_dir holds checkpoints", value)


def deepspeed(draft: Draft, theirs: str, value: Any) -> None:
    """Take the drive out of a DeepSpeed config; the rest the planner decides."""
    draft.drop(theirs, PLANNER, value)
    values = value if isinstance(value, dict) else _find_deepspeed(draft, str(value))
    nvme_paths(draft, values, f"{theirs}: ")


def _find_deepspeed(draft: Draft, name: str) -> Mapping[str, Any]:
    for folder in (draft.base, draft.source.path.parent):
        if is_file(folder / name):
            try:
                return read_mapping(folder / name)
            except TranslationError:
                break
    return {}


def nvme_paths(draft: Draft, values: Mapping[str, Any], prefix: str = "") -> None:
    """Put the folder of ``nvme_path`` into ``[[tiers.nvme]]``."""
    zero = mapping(values.get("zero_optimization"))
    for block in ("offload_optimizer", "offload_param"):
        table = mapping(zero.get(block))
        if table.get("device") == "nvme" and isinstance(table.get("nvme_path"), str):
            draft.put_path("tiers.nvme.0.path", table["nvme_path"], f"{prefix}{block}.nvme_path")
            draft.put("tiers.nvme.0.size", "auto", note="all that is free but a margin")
            return


def save_strategy(draft: Draft, theirs: str, value: Any) -> None:
    """Translate when to save."""
    if value == "best":
        draft.lose(theirs, "checkpoints are kept by their age", value)
    else:
        draft.put("checkpoint.save_strategy", "no" if value is False else value, theirs)


def eval_strategy(draft: Draft, theirs: str, value: Any) -> None:
    """Translate when to evaluate; YAML reads a bare no as false."""
    name = "no" if value is False else value
    if name != "no" or "evaluation.eval_strategy" in known_keys():
        draft.put("evaluation.eval_strategy", name, theirs)


def held_out_rows(draft: Draft, theirs: str, value: Any) -> None:
    """Translate how many rows are kept apart."""
    if value:
        draft.put("data.val_size", value, theirs)


def evaluation_without_rows(draft: Draft) -> None:
    """Take out when to evaluate, where there are no rows to evaluate on."""
    if any(key.startswith("data.eval.") or key == "data.val_size" for key in draft.entries):
        return
    for key in [key for key in draft.entries if key.startswith("evaluation.")]:
        entry = draft.entries.pop(key)
        if entry.theirs and entry.value not in ("no", False):
            draft.lose(entry.theirs, "there are no rows to evaluate on: name them in [[data.eval]]", entry.value)


def save_total_limit(draft: Draft, theirs: str, value: Any) -> None:
    """Translate how many checkpoints are kept."""
    draft.put("checkpoint.save_total_limit", value, theirs)


def chat_template(draft: Draft, theirs: str, value: Any) -> None:
    """Translate a template: a file is taken, the text of one has to become a file."""
    text = str(value)
    if text.endswith((".jinja", ".jinja2", ".j2")) and is_file(Path(draft.base, text)):
        draft.put("model.chat_template", text, theirs, is_path=True)
    elif "{%" in text or "{{" in text:
        short = text.strip().splitlines()[0][:40]
        draft.lose(theirs, "write it into a file, and model.chat_template = that file", f"{short} ...")
    elif text not in ("tokenizer_default", "default"):
        draft.drop(theirs, "the model's own template is used: look at it with `megatrain-tier data preview`", value)


def model_revision(draft: Draft, theirs: str, value: Any) -> None:
    """Translate a revision; that of a folder is what it holds."""
    if value != "main":
        draft.put("model.model_revision", value, theirs)


def compile_backend(draft: Draft, theirs: str, value: Any) -> None:
    """Translate the compiler of layers; of others than those of torch itself nothing is known."""
    if value in leaf_schema("model.compile_backend")["enum"]:
        draft.put("model.compile_backend", value, theirs)
    elif value is not None:
        lost('there are "inductor", "aot_eager" and "eager"')(draft, theirs, value)


def hub_model(draft: Draft, theirs: str, value: Any) -> None:
    """Note what only matters where models are uploaded."""
    lost("nothing is uploaded: upload output_dir/final with your own tools")(draft, theirs, value)


_SAME = {
    **{name: name for name in ("run_name", "seed", "data_seed", "full_determinism")},
    **{
        name: f"training.{name}"
        for name in (
            "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps",
            "label_smoothing_factor", "neftune_noise_alpha",
        )
    },
    **{
        name: f"optimizer.{name}"
        for name in (
            "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm",
            "lr_scheduler_type", "lr_scheduler_kwargs",
        )
    },
    "torch_compile": "model.compile",
    "use_liger_kernel": "model.use_liger_kernel",
    "enable_liger_kernel": "model.use_liger_kernel",
    "save_steps": "checkpoint.save_steps",
    "logging_steps": "logging.logging_steps",
    "project": "logging.project",
    **{name: f"evaluation.{name}" for name in ("eval_steps", "per_device_eval_batch_size", "eval_on_start")},
}  # fmt: skip
_UNNEEDED = {
    PLANNER: ("fsdp", "fsdp_config", "fsdp_version", "low_cpu_mem_usage", "device_map", "max_memory"),
    RECOMPUTED: (
        "gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_checkpointing",
        "activation_checkpointing_kwargs", "activation_offloading", "disable_gradient_checkpointing",
        "use_reentrant_gc", "use_unsloth_gc",
    ),
    ONE_DEVICE: (
        "ddp_timeout", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_backend",
        "local_rank", "average_tokens_across_devices", "parallelism_config", "accelerator_config", "split_batches",
    ),
    SPEED: (
        "tf32", "liger_kernel_config", "dataloader_num_workers",
        "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor",
        "auto_find_batch_size", "torch_empty_cache_steps", "torch_compile_mode",
        "dataset_num_proc", "preprocessing_num_workers", "preprocessing_batch_size",
    ),
    "tokens are cached by their contents: the cache is never stale": ("overwrite_cache", "dataset_prepared_path"),
    "nothing saved is overwritten": ("overwrite_output_dir",),
    "checkpoints are whole, and the trained model is always written as safetensors": (
        "save_safetensors", "save_only_model",
    ),
    "a terminal shows the progress, a file gets lines": (
        "disable_tqdm", "log_level", "log_level_replica", "logging_strategy", "logging_first_step", "plot_loss",
        "logging_dir", "include_num_input_tokens_seen", "include_tokens_per_second", "skip_memory_metrics",
        "log_on_each_node", "logging_nan_inf_filter",
    ),
    "batches hold what the model reads": ("remove_unused_columns", "dataloader_drop_last"),
    "rows are packed, or padded to data.max_length": (
        "group_by_length", "train_sampling_strategy", "pad_to_sequence_len", "padding_free", "pad_to_multiple_of",
    ),
    "training is what `run` does": ("do_train", "use_cache", "ignore_pad_token_for_loss"),
}  # fmt: skip

#: Key of TrainingArguments -> what becomes of it.
RULES: dict[str, Rule] = {
    **{theirs: same(ours) for theirs, ours in _SAME.items()},
    **{name: unneeded(why) for why, names in _UNNEEDED.items() for name in names},
    "output_dir": path("output_dir"),
    "optim": optimizer,
    "warmup_steps": warmup_steps,
    "warmup_ratio": warmup_ratio,
    "bf16": half_precision,
    "fp16": half_precision,
    "torch_dtype": loaded_dtype,
    "dtype": loaded_dtype,
    "attn_implementation": attention,
    "torch_compile_backend": compile_backend,
    "report_to": reports,
    "resume_from_checkpoint": resume,
    "deepspeed": deepspeed,
    "save_strategy": save_strategy,
    "save_total_limit": save_total_limit,
    "eval_strategy": eval_strategy,
    "evaluation_strategy": eval_strategy,
    "do_eval": ignored,
    "model_revision": model_revision,
    "trust_remote_code": lost(_NO_REMOTE_CODE),
    "chat_template": chat_template,
    "chat_template_path": chat_template,
    "load_best_model_at_end": lost("checkpoints are kept by their age"),
    "metric_for_best_model": ignored,
    "greater_is_better": ignored,
    "push_to_hub": hub_model,
    "hub_model_id": hub_model,
    "hub_strategy": ignored,
    "hub_token": ignored,
    "hub_private_repo": ignored,
}

#: What transformers does where a file says nothing.
DEFAULTS: dict[str, Any] = {
    "training.per_device_train_batch_size": 8,
    "training.num_train_epochs": 3.0,
    "optimizer.learning_rate": 5e-5,
    "optimizer.weight_decay": 0.0,
    "optimizer.adam_beta2": 0.999,
    "optimizer.lr_scheduler_type": "linear",
    "optimizer.warmup_steps": 0.0,
    "checkpoint.save_steps": 500,
}


def fill_defaults(draft: Draft, defaults: Mapping[str, Any]) -> None:
    """Write down what the tool does where its file says nothing, as far as it has an effect.

    Embeddings decay, as transformers does it; biases and norms do not, in both.
    """
    chosen = {key: entry.value for key, entry in draft.entries.items()}
    unused = set()
    if chosen.get("checkpoint.save_strategy", "steps") != "steps":
        unused.add("checkpoint.save_steps")
    if str(chosen.get("optimizer.optim", "adamw")) not in OPTIMIZERS_WITH_KEY["adam_beta2"]:
        unused.add("optimizer.adam_beta2")
    num_steps = chosen.get("training.max_steps")
    if isinstance(num_steps, int) and num_steps > 0:
        unused.add("training.num_train_epochs")
    draft.default({key: value for key, value in defaults.items() if key not in unused})
    decay = draft.entries.get("optimizer.weight_decay")
    if decay is not None and decay.value:
        draft.put("optimizer.weight_decay_exclude", ["*.bias", "*norm*"], note=f"as in {draft.source.title}")
