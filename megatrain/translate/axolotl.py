"""Axolotl: flat YAML with a list of data sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatrain.config.keys import known_keys
from megatrain.translate import common
from megatrain.translate.draft import Draft, Rule, apply, choice, ignored, listed, lost, mapping, path, same, unneeded

_OTHER_TRAINING = ("lora", "qlora", "llama-adapter")
_IGNORED = (
    "adapter", "load_in_8bit", "load_in_4bit", "rl", "datasets", "test_datasets", "pretraining_dataset",
    "train_on_inputs", "roles_to_train", "strict", "lora_r", "lora_alpha", "lora_dropout", "lora_target_linear",
    "lora_target_modules", "lora_fan_in_fan_out", "lora_modules_to_save", "cosine_min_lr_ratio", "saves_per_epoch",
    "wandb_entity", "wandb_watch", "wandb_name", "wandb_log_model", "wandb_run_id", "wandb_project",
    "flash_attention", "sdp_attention", "eager_attention", "xformers_attention", "chat_template_jinja", "debug",
    "peft_use_dora",
)  # fmt: skip
_UNNEEDED = {
    common.PLANNER: ("experimental_skip_move_to_device", "gpu_memory_limit", "layer_offloading"),
    common.SPEED: (
        "chunked_cross_entropy", "cut_cross_entropy", "liger_rope", "liger_rms_norm", "liger_glu_activation",
        "liger_layer_norm", "liger_fused_linear_cross_entropy", "liger_cross_entropy", "dataset_processes",
        "flash_attn_cross_entropy", "flash_attn_rms_norm", "flash_attn_fuse_qkv", "flash_attn_fuse_mlp", "plugins",
        "unsloth_cross_entropy_loss", "dataloader_num_workers", "sample_packing_group_size", "sample_packing_bin_size",
        "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "use_kernels", "experts_implementation",
    ),
    "transformers finds the classes in config.json": (
        "model_type", "tokenizer_type", "is_llama_derived_model", "is_mistral_derived_model", "is_falcon_derived_model",
        "is_qwen_derived_model", "tokenizer_use_fast", "tokenizer_legacy", "processor_type", "base_model_config",
    ),
    "eval sets are packed as the training data is": ("eval_sample_packing",),
    "end-of-turn tokens are found in the chat template, and trained": ("eot_tokens", "train_on_eos", "train_on_eot"),
    "checkpoints are always whole": ("save_first_step",),
}  # fmt: skip
_OVERLONG = {"drop": "drop", "truncate": "truncate", "raise": "error"}

RULES: dict[str, Rule] = {
    **common.RULES,
    **dict.fromkeys(_IGNORED, ignored),
    **{name: unneeded(why) for why, names in _UNNEEDED.items() for name in names},
    "base_model": path("model.model_name_or_path"),
    "revision_of_model": common.model_revision,
    "tokenizer_config": path("model.tokenizer_name_or_path"),
    "sequence_len": same("data.max_length"),
    "excess_length_strategy": choice("data.overlong", _OVERLONG, "see data.overlong"),
    "sample_packing": same("data.packing"),
    "micro_batch_size": same("training.per_device_train_batch_size"),
    "batch_size": lost("rows of a step are micro_batch_size x gradient_accumulation_steps"),
    "eval_batch_size": same("evaluation.per_device_eval_batch_size"),
    "num_epochs": same("training.num_train_epochs"),
    "optimizer": common.optimizer,
    "lr_scheduler": same("optimizer.lr_scheduler_type"),
    "val_set_size": common.held_out_rows,
    "unfrozen_parameters": lost("name those that stay as they are in model.freeze"),
    "special_tokens": lost("write them into the tokenizer's files"),
    "tokens": lost("add them to the tokenizer and the model first"),
    "evals_per_epoch": lost("write a number of steps into evaluation.eval_steps"),
    "early_stopping_patience": lost("a run ends after its steps"),
    "loss_watchdog_threshold": lost("a NaN ends the run: optimizer.nonfinite"),
    "loss_watchdog_patience": ignored,
    "lr_groups": lost("see [[optimizer.groups]]"),
    "embedding_lr": lost("see [[optimizer.groups]]"),
    "loraplus_lr_ratio": ignored,
}
_DEFAULTS: dict[str, Any] = {
    **common.DEFAULTS,
    "data.max_length": 512,
    "data.packing": False,
    "training.per_device_train_batch_size": 1,
    "training.num_train_epochs": 1.0,
    "optimizer.lr_scheduler_type": "cosine",
    "optimizer.warmup_steps": 0.03,
}
#: First part of a data set's type -> our format.
_FORMATS = {
    "alpaca": "alpaca",
    "sharegpt": "sharegpt",
    "chat_template": "messages",
    "completion": "text",
    "pretrain": "text",
    "gpteacher": "alpaca",
}
_FIELDS = {
    "field_instruction": "instruction",
    "field_input": "input",
    "field_output": "output",
    "field_system": "system",
    "field_tools": "tools",
}


def translate(draft: Draft) -> None:
    """Fill a draft.

    Raises:
        TranslationError: it asks for LoRA, quantized weights or reinforcement learning.
    """
    values = draft.source.values
    _refuse_other_training(draft)
    sources = _sources(draft, "datasets")
    plain = [
        source for source in listed(values.get("pretraining_dataset")) if isinstance(source, str | Mapping) and source
    ]
    is_pretraining = bool(plain) or (bool(sources) and all(_format(source) == "text" for source in sources))
    draft.put("task", "pretrain" if is_pretraining else "sft", "pretraining_dataset" if plain else "")
    apply(draft, RULES, values)
    _combined_keys(draft)
    if not is_pretraining:
        theirs = "train_on_inputs" if "train_on_inputs" in values else ""
        draft.put("data.train_on", "all" if values.get("train_on_inputs") else "assistant", theirs)
    for number, source in enumerate(plain or sources):
        _dataset(draft, f"data.train.{number}", source, f"datasets[{number}]")
    for number, source in enumerate(_sources(draft, "test_datasets")):
        _dataset(draft, f"data.eval.{number}", source, f"test_datasets[{number}]")
    if not plain and not sources:
        draft.fill_in("data.train.0.path", "data/train.jsonl", "a file, glob or folder, or the hub name of a data set")
    if "output_dir" not in draft.entries:
        draft.put_path("output_dir", "./model-out", note="Axolotl's default")
    common.fill_defaults(draft, _DEFAULTS)


def _refuse_other_training(draft: Draft) -> None:
    values = draft.source.values
    if adapter := values.get("adapter"):
        raise draft.refuse(
            f"adapter: {adapter} is not supported: here all parameters are trained, those of model.freeze excepted",
            "Remove the key from that file to translate it as full training",
        )
    for name in ("load_in_4bit", "load_in_8bit", "gptq"):
        if values.get(name):
            raise draft.refuse(f"{name}: quantized weights cannot be trained in full precision", "Remove it")
    if kind := values.get("rl") or values.get("reward_model") or values.get("process_reward_model"):
        name = str(kind).upper() if isinstance(kind, str) else "reward model training"
        raise draft.refuse(f"{name} is not supported here", 'There are "sft" and "pretrain"')


def _sources(draft: Draft, name: str) -> list[Mapping[str, Any]]:
    """Return the data sets of a list; what is none is lost."""
    found = listed(draft.source.values.get(name))
    for source in found:
        if not isinstance(source, Mapping):
            draft.lose(name, "a data set has a path and a type", source)
    return [source for source in found if isinstance(source, Mapping)]


def _combined_keys(draft: Draft) -> None:
    """Translate what several of their keys say together."""
    values = draft.source.values
    if values.get("cosine_min_lr_ratio"):
        draft.put("optimizer.lr_scheduler_type", "cosine_with_min_lr", "cosine_min_lr_ratio")
        draft.put("optimizer.lr_scheduler_kwargs.min_lr_rate", values["cosine_min_lr_ratio"], "cosine_min_lr_ratio")
    if values.get("saves_per_epoch") == 1:
        draft.put("checkpoint.save_strategy", "epoch", "saves_per_epoch")
    elif values.get("saves_per_epoch"):
        draft.lose("saves_per_epoch", "write a number of steps into checkpoint.save_steps", values["saves_per_epoch"])
    for name, ours in (
        ("flash_attention", "flash_attention_2"),
        ("sdp_attention", "sdpa"),
        ("eager_attention", "eager"),
    ):
        if values.get(name):
            draft.put("model.attn_implementation", ours, name)
    if values.get("wandb_project"):
        common.reports(draft, "wandb_project", ["wandb"])
        if "logging.project" in known_keys():
            draft.put("logging.project", values["wandb_project"], "wandb_project")
    if values.get("wandb_name"):
        draft.put("run_name", str(values["wandb_name"]), "wandb_name")
    if values.get("chat_template_jinja"):
        common.chat_template(draft, "chat_template_jinja", values["chat_template_jinja"])
    roles = listed(values.get("roles_to_train"))
    if roles and roles not in (["assistant"], ["gpt"], ["assistant", "gpt"], ["gpt", "assistant"]):
        draft.lose("roles_to_train", "see data.train_on", roles)


def _format(source: Any) -> str | None:
    """Return our format of a data set, None for a type that has none."""
    kind = source.get("type", "") if isinstance(source, Mapping) else "pretrain"
    if isinstance(kind, Mapping):
        return "alpaca"
    return _FORMATS.get(str(kind or "alpaca").partition(":")[0].split(".")[0].removesuffix("_w_system"))


def _dataset(draft: Draft, key: str, source: Any, theirs: str) -> None:
    """Translate one data set; one that is only a name is a hub data set of plain text."""
    fields: Mapping[str, Any] = source if isinstance(source, Mapping) else {"path": source, "type": "pretrain"}
    _dataset_path(draft, key, fields, theirs)
    if fields.get("name"):
        draft.put(f"{key}.subset", fields["name"], f"{theirs}.name")
    if split := fields.get("split"):
        name, bracket, part = str(split).partition("[")
        draft.put(f"{key}.split", name, f"{theirs}.split")
        if bracket:
            draft.lose(f"{theirs}.split", "a part of a split: see data.train.N.max_samples", f"[{part}")
    kind = fields.get("type")
    ours = _format(fields) if "text_column" not in fields else "text"
    if ours is None:
        draft.lose(f"{theirs}.type", "the format is seen from the rows; see data.train.N.format and columns", kind)
    else:
        is_sharegpt = ours == "messages" and _role_field(fields) == "from"
        draft.put(f"{key}.format", "sharegpt" if is_sharegpt else ours, f"{theirs}.type")
        _columns(draft, key, fields, theirs, "sharegpt" if is_sharegpt else ours)
    looked_at = {
        "path", "data_files", "ds_type", "name", "split", "type", "field", "text_column", "field_messages",
        "message_field_role", "message_field_content", "message_property_mappings", "conversation", "chat_template",
        "field_human", "field_model", "trust_remote_code", "roles", "train_on_eos", "roles_to_train", *_FIELDS,
    }  # fmt: skip
    for name, value in fields.items():
        if name not in looked_at and value not in (None, False, "", [], {}):
            draft.lose(f"{theirs}.{name}", "nothing like it here", value)


def _dataset_path(draft: Draft, key: str, fields: Mapping[str, Any], theirs: str) -> None:
    files = [str(file) for file in listed(fields.get("data_files"))]
    where = str(fields.get("path") or "")
    if files and where in ("json", "csv", "parquet", "arrow", "text"):
        where, theirs = files[0], f"{theirs}.data_files"
        if len(files) > 1:
            draft.lose(theirs, "write a glob, or one [[data.train]] each", files[1:])
    elif files:
        draft.lose(f"{theirs}.data_files", "give the path of the files", files)
    if where:
        draft.put_path(f"{key}.path", where, theirs)
    else:
        draft.fill_in(f"{key}.path", "data/train.jsonl", f"{theirs} has no path")


def _role_field(fields: Mapping[str, Any]) -> str:
    named = mapping(fields.get("message_property_mappings"))
    return str(fields.get("message_field_role") or named.get("role") or "role")


def _columns(draft: Draft, key: str, fields: Mapping[str, Any], theirs: str, ours: str) -> None:
    named = mapping(fields.get("message_property_mappings"))
    content = str(fields.get("message_field_content") or named.get("content") or "content")
    if ours in ("messages", "sharegpt"):
        usual = "messages" if ours == "messages" else "conversations"
        name = str(fields.get("field_messages") or ("conversations" if ours == "sharegpt" else "messages"))
        wanted = {usual: name, "role": _role_field(fields), "content": content}
        known = {usual: usual, "role": "role", "content": "content"}
        if ours == "sharegpt":
            known |= {"role": "from", "content": "value"}
            wanted |= {} if fields.get("type") == "chat_template" else {"role": "from", "content": "value"}
    elif ours == "text":
        wanted = {"text": str(fields.get("field") or fields.get("text_column") or "text")}
        known = {"text": "text"}
    else:
        inner = fields["type"] if isinstance(fields.get("type"), Mapping) else fields
        wanted = {our: str(inner[name]) for name, our in _FIELDS.items() if inner.get(name)}
        known = {name: name for name in wanted}
        for name in ("format", "no_input_format", "system_format", "system_prompt"):
            if isinstance(fields.get("type"), Mapping) and inner.get(name):
                draft.lose(f"{theirs}.type.{name}", "the model's chat template is used", inner[name])
    for name, column in wanted.items():
        if known[name] != column:
            draft.put(f"{key}.columns.{name}", column, theirs)
