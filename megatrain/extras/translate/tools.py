"""Translation rules of each tool: unsupported kinds of training, combined keys, data sets and defaults."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatrain.base.other_tools import Tool
from megatrain.extras.translate.command_lines import count
from megatrain.extras.translate.conversions import (
    fill_defaults,
    nvme_path,
    put_columns,
    put_images,
    put_lora,
    put_preference,
    put_source,
    refuse_quantized,
    report_to,
    translate_keys,
)
from megatrain.extras.translate.draft import NO_EQUIVALENT, Section, Translation, as_list, as_mapping, as_number
from megatrain.extras.translate.read import TranslationError, read_mapping
from megatrain.extras.translate.templates import compare_template

_OUR_TASKS = 'It translates "sft", "pretrain" and "dpo". For a reward model: megatrain-tier init --task reward'
_OWN_TEMPLATE = "the model's chat template is used"

#: Defaults of transformers.
_SHARED_DEFAULTS: dict[str, Any] = {
    "training.per_device_train_batch_size": 8,
    "training.num_train_epochs": 3.0,
    "optimizer.learning_rate": 5e-5,
    "optimizer.weight_decay": 0.0,
    "optimizer.adam_beta2": 0.999,
    "optimizer.lr_scheduler_type": "linear",
    "optimizer.warmup_steps": 0.0,
    "checkpoint.save_steps": 500,
}
_LLAMA_FACTORY_DEFAULTS: dict[str, Any] = {**_SHARED_DEFAULTS, "data.max_length": 2048}
_AXOLOTL_DEFAULTS: dict[str, Any] = {
    **_SHARED_DEFAULTS,
    "data.max_length": 512,
    "data.packing": False,
    "training.per_device_train_batch_size": 1,
    "training.num_train_epochs": 1.0,
    "optimizer.lr_scheduler_type": "cosine",
    "optimizer.warmup_steps": 0.03,
}
_TRL_DEFAULTS: dict[str, Any] = {
    **_SHARED_DEFAULTS,
    "data.max_length": 1024,
    "data.packing": False,
    "optimizer.learning_rate": 2e-5,
}
_MEGATRAIN_DEFAULTS: dict[str, Any] = {
    "data.max_length": 1024,
    "training.per_device_train_batch_size": 96,
    "training.max_steps": 100,
    "optimizer.learning_rate": 1e-5,
    "optimizer.weight_decay": 0.01,
    "optimizer.adam_beta2": 0.999,
}


# LLaMA-Factory: its config contains names of data sets, which dataset_info.json defines.

_STAGES = {"sft": "sft", "pt": "pretrain", "dpo": "dpo", "kto": "dpo"}
_OTHER_STAGES = {"ppo": "PPO", "rm": "reward model training", "orpo": "ORPO"}
_CHAT_COLUMNS = {name: name for name in ("system", "tools", "images", "chosen", "rejected", "kto_tag")}
#: Fields by column in dataset_info.json.
_ALPACA_COLUMNS = {
    **_CHAT_COLUMNS,
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "history": "history",
}


def _llama_factory(draft: Translation) -> None:
    """Fill a draft from a LLaMA-Factory config."""
    stage, kind = draft.get("stage", "sft"), draft.get("finetuning_type", "lora")
    if not isinstance(stage, str) or stage not in _STAGES:
        name = _OTHER_STAGES.get(str(stage), f"stage: {stage}")
        raise draft.refuse(f"{name} is not supported by `import`", _OUR_TASKS)
    if kind not in ("full", "lora"):
        raise draft.refuse(f"finetuning_type: {kind} is not supported here", 'Supported: "full" and "lora"')
    if kind == "full":
        refuse_quantized(draft, "quantization_bit")
    task = _STAGES[stage]
    if task != "dpo":
        draft.put("task", task, "stage")
    if (template := draft.get("template")) is not None:
        _named_template(draft, template, has_template=task != "pretrain")
    translate_keys(draft, draft.source.values)
    if draft.get("use_muon"):  # overrides `optim`, which always has a default
        draft.entries.pop("optimizer.state_dtype", None)
        draft.put("optimizer.optim", "muon", "use_muon")
    if kind == "lora":
        rank = as_number(draft.get("lora_rank", 8), "lora.r")
        alpha = 2 * rank if isinstance(rank, int) else 16
        defaults = {"lora.r": 8, "lora.lora_alpha": alpha, "lora.target_modules": "all-linear"}
        put_lora(draft, defaults, "quantization_bit")
        if draft.get("create_new_adapter"):
            draft.omit("create_new_adapter", "merge the adapter first: megatrain-tier export --merge")
    draft.fill_in_model()
    if stage == "kto":
        put_preference(draft, "kto", "stage")
    elif task == "dpo":
        put_preference(draft, draft.get("pref_loss", "sigmoid"), "pref_loss")
    else:
        _packing(draft, is_pretraining=task == "pretrain")
    if task == "sft":
        _train_on(draft)
    info, folder = _dataset_info(draft)
    limit = _row_limit(draft) if draft.get("dataset") or draft.get("eval_dataset") else None
    _named_datasets(draft, "data.train", "dataset", info, folder, limit)
    _named_datasets(draft, "data.eval", "eval_dataset", info, folder, limit)
    _llama_factory_images(draft, info)
    fill_defaults(draft, _LLAMA_FACTORY_DEFAULTS)


def _named_template(draft: Translation, name: Any, *, has_template: bool) -> None:
    """List a named chat template as not needed or lost, because the template in the model's folder is used."""
    if not has_template:
        draft.drop("template", "plain text has no chat template", name)
        return
    reason, is_same = compare_template(str(name), draft.base / str(draft.get("model_name_or_path", "")))
    (draft.drop if is_same else draft.omit)("template", reason, name)


def _packing(draft: Translation, *, is_pretraining: bool) -> None:
    packing, is_neat = draft.get("packing"), draft.get("neat_packing", False)
    is_packed = bool(is_neat) or (is_pretraining if packing is None else bool(packing))
    tool_key = "neat_packing" if is_neat else "packing" if packing is not None else ""
    is_concat = is_packed and is_pretraining and not is_neat
    note = "" if tool_key else "LLaMA-Factory's default"
    if is_packed and not is_neat and not is_concat:
        note = "documents never attend to each other here"
    draft.put("data.packing", "concat" if is_concat else is_packed, tool_key, note)


def _train_on(draft: Translation) -> None:
    on_prompt = draft.get("train_on_prompt")
    if not on_prompt and draft.get("mask_history"):
        draft.put("data.train_on", "last_assistant", "mask_history")
    else:
        tool_key = "train_on_prompt" if on_prompt is not None else ""
        draft.put("data.train_on", "all" if on_prompt else "assistant", tool_key)


def _dataset_info(draft: Translation) -> tuple[Mapping[str, Any], Path]:
    """Return ``dataset_info.json`` and its folder, from the working directory or a folder above the config."""
    name = draft.get("dataset_dir", "data")
    if not isinstance(name, str):
        draft.omit("dataset_dir", "write the path of a folder", name)
        return {}, draft.base / "data"
    for parent in (draft.base, *draft.source.path.resolve().parents[:4]):
        try:
            return read_mapping(parent / name / "dataset_info.json"), parent / name
        except (TranslationError, ValueError):  # ValueError if the name contains a zero byte
            continue
    return {}, draft.base / name


def _names(value: Any) -> list[str]:
    """Return the names in a list or in comma-separated text."""
    items = value if isinstance(value, list) else str(value or "").split(",")
    return [str(name).strip() for name in items if str(name).strip()]


def _row_limit(draft: Translation) -> int | None:
    """Return the maximum number of rows per data set, or list an invalid value as lost."""
    value = draft.get("max_samples")
    limit = count(as_number(value, "data.train.0.max_samples"))
    if limit is None:
        draft.omit_if_on("max_samples", "write a whole number above 0", value)
    return limit


def _named_datasets(
    draft: Translation, config_key: str, tool_key: str, info: Mapping[str, Any], folder: Path, limit: int | None
) -> None:
    names = _names(draft.get(tool_key))
    if not names and tool_key == "dataset":
        draft.fill_in_data()
    for index, name in enumerate(names):
        key, entry = f"{config_key}.{index}", info.get(name)
        if isinstance(entry, dict):
            _dataset_of_info(draft, key, name, entry, folder, f"{tool_key} {name}")
        elif info:
            draft.fill_in(f"{key}.path", f"data/{name}.json", f"`{name}` is not in {folder / 'dataset_info.json'}")
        else:
            draft.fill_in(f"{key}.path", f"data/{name}.json", f"file_name of `{name}` in dataset_info.json")
        previous = draft.entries.get(f"{key}.max_samples")
        if limit is not None and (previous is None or limit < (count(previous.value) or math.inf)):
            draft.put(f"{key}.max_samples", limit, "max_samples")


def _dataset_of_info(
    draft: Translation, key: str, name: str, entry: Mapping[str, Any], folder: Path, tool_key: str
) -> None:
    is_preference = "preference.loss_type" in draft.entries
    if entry.get("ranking") and not is_preference:
        raise draft.refuse(f"the data set `{name}` contains preferences, which stage: sft does not train on")
    if isinstance(entry.get("file_name"), str):
        file = folder / entry["file_name"]
        draft.put(f"{key}.path", os.path.relpath(file, draft.base), tool_key, is_path=True)
    elif isinstance(entry.get("hf_hub_url"), str):
        draft.put(f"{key}.path", entry["hf_hub_url"], tool_key, "on the hub")
    else:
        draft.fill_in(f"{key}.path", f"data/{name}.json", f"`{name}` has neither a file nor a hub name")
    if key.startswith("data.eval."):
        draft.put(f"{key}.name", name, tool_key)
    for field, config_key in {"subset": "subset", "split": "split", "num_samples": "max_samples"}.items():
        if entry.get(field):
            draft.put(f"{key}.{config_key}", entry[field], f"{tool_key}: {field}")
    columns, tags = as_mapping(entry.get("columns")), as_mapping(entry.get("tags"))
    is_chat = entry.get("formatting", "alpaca") != "alpaca"
    role, content = tags.get("role_tag", "from"), tags.get("content_tag")
    is_messages = is_chat and role == "role"
    format_ = "messages" if is_messages else "sharegpt" if is_chat else "alpaca"
    draft.put(f"{key}.format", "preference" if is_preference else format_, f"{tool_key}: formatting")
    chat_columns = {**_CHAT_COLUMNS, "messages": "messages" if is_messages else "conversations"}
    field_names = chat_columns if is_chat else _ALPACA_COLUMNS
    for field, column in columns.items():
        if field not in field_names:
            draft.omit(f"{tool_key}: columns.{field}", NO_EQUIVALENT, column)
    fields = {name: (columns.get(field), name, f"{tool_key}: columns.{field}") for field, name in field_names.items()}
    if is_chat:
        fields["role"] = (role, "role" if is_messages else "from", f"{tool_key}: tags.role_tag")
        fields["content"] = (content, "content" if is_messages else "value", f"{tool_key}: tags.content_tag")
    put_columns(draft, key, fields)


def _llama_factory_images(draft: Translation, info: Mapping[str, Any]) -> None:
    """Set ``model.images`` if a data set has an image column."""
    towers = {name: draft.get(name) for name in ("freeze_vision_tower", "freeze_multi_modal_projector")}
    names = [*_names(draft.get("dataset")), *_names(draft.get("eval_dataset"))]
    if not any(as_mapping(as_mapping(info.get(name)).get("columns")).get("images") for name in names):
        for name, value in towers.items():
            if value is not None:
                draft.drop(name, "no data set has images", value)
        return
    unfrozen = [name for name, value in towers.items() if value is False]
    put_images(draft, "trained" if unfrozen else "frozen", unfrozen[0] if unfrozen else "freeze_vision_tower")
    if len(unfrozen) == 1:
        draft.omit(unfrozen[0], "tower and projector are both trained; freeze the other one with model.freeze", False)
    if draft.get("freeze_language_model"):
        draft.omit("freeze_language_model", "list its parameters in model.freeze", True)
    if folder := draft.get("media_dir"):
        draft.omit("media_dir", "image paths are relative to the file with the rows", folder)


# Axolotl: its config has a list of data sets.

_AXOLOTL_RL = (None, "dpo", "ipo", "kto", "orpo", "simpo")
#: Row format by the first part of a data set's type.
_FORMATS = {
    "alpaca": "alpaca",
    "sharegpt": "sharegpt",
    "chat_template": "messages",
    "completion": "text",
    "pretrain": "text",
    "gpteacher": "alpaca",
}
#: For each field, the data set's key that sets the name of its column.
_PREFERENCE_FIELDS = {
    name: f"field_{name}" for name in ("prompt", "messages", "chosen", "rejected", "completion", "label", "system")
}
_ALPACA_FIELDS = {name: f"field_{name}" for name in ("instruction", "input", "output", "system", "tools")}


def _axolotl(draft: Translation) -> None:
    """Fill a draft from an Axolotl config."""
    adapter, rl = draft.get("adapter"), draft.get("rl")
    _refuse_axolotl(draft, adapter, rl)
    plain_sources = _axolotl_sources(draft, "pretraining_dataset")
    sources = plain_sources or _axolotl_sources(draft, "datasets")
    has_texts = bool(sources) and all(_axolotl_format(source) == "text" for source in sources)
    is_pretraining = not rl and (bool(plain_sources) or has_texts)
    if not rl:
        draft.put("task", "pretrain" if is_pretraining else "sft", "pretraining_dataset" if plain_sources else "")
    translate_keys(draft, draft.source.values)
    if adapter:
        put_lora(draft, {"lora.r": 8}, "load_in_4bit", "load_in_8bit")
        if draft.get("lora_target_linear") and "lora.adapter_name_or_path" not in draft.entries:
            draft.put("lora.target_modules", "all-linear", "lora_target_linear")
    _axolotl_combinations(draft)
    if draft.get("processor_type"):
        put_images(draft, "trained", "processor_type")
    if rl:
        put_preference(draft, "sigmoid" if rl == "dpo" else str(rl), "rl")
    elif not is_pretraining:
        on_inputs = draft.get("train_on_inputs")
        tool_key = "" if on_inputs is None else "train_on_inputs"
        draft.put("data.train_on", "all" if on_inputs else "assistant", tool_key)
    for index, source in enumerate(sources):
        _axolotl_dataset(draft, f"data.train.{index}", source)
    for index, source in enumerate(_axolotl_sources(draft, "test_datasets")):
        _axolotl_dataset(draft, f"data.eval.{index}", source)
    if not sources:
        draft.fill_in_data()
    if "output_dir" not in draft.entries:
        draft.put_path("output_dir", "./model-out", note="Axolotl's default")
    fill_defaults(draft, _AXOLOTL_DEFAULTS)


def _refuse_axolotl(draft: Translation, adapter: Any, rl: Any) -> None:
    if adapter not in (None, "", "lora", "qlora"):
        raise draft.refuse(f"adapter: {adapter} is not supported here", 'Supported: "lora" and "qlora"')
    refuse_quantized(draft, *(() if adapter else ("load_in_4bit", "load_in_8bit")), "gptq")
    if kind := (rl not in _AXOLOTL_RL and rl) or draft.get("reward_model") or draft.get("process_reward_model"):
        name = str(kind).upper() if isinstance(kind, str) else "reward model training"
        raise draft.refuse(f"{name} is not supported by `import`", _OUR_TASKS)


def _axolotl_sources(draft: Translation, name: str) -> list[Section]:
    """Return the data sets of a key, and list all other values in it as lost."""
    is_plain = name == "pretraining_dataset"  # its rows are plain text, and its value can be just a hub name
    sources = []
    for path, source in _members(draft.get(name), name):
        if is_plain and isinstance(source, str) and source:
            draft.answered.add(path)
            sources.append(Section(draft, path, {"type": "pretrain", "path": source}))
        elif not isinstance(source, Mapping):
            draft.omit_if_on(path, "a data set has a path and a type", source)
        elif source:
            sources.append(Section(draft, path, {"type": "pretrain", **source} if is_plain else source))
    return sources


def _members(value: Any, path: str) -> list[tuple[str, Any]]:
    """Return (path, value) of each member of a list, or of a single value."""
    return [(f"{path}[{i}]", item) for i, item in enumerate(value)] if isinstance(value, list) else [(path, value)]


def _axolotl_combinations(draft: Translation) -> None:
    """Translate keys that depend on each other, or that set the same config key."""
    if rate := draft.get("cosine_min_lr_ratio"):
        draft.put("optimizer.lr_scheduler_type", "cosine_with_min_lr", "cosine_min_lr_ratio")
        if previous := draft.entries.pop("optimizer.lr_scheduler_kwargs", None):
            draft.omit(previous.tool_key, "cosine_min_lr_ratio takes precedence", previous.value)
        draft.put("optimizer.lr_scheduler_kwargs.min_lr_rate", rate, "cosine_min_lr_ratio")
    if project := draft.get("wandb_project"):
        report_to(draft, "wandb_project", ["wandb"])
        if previous := draft.entries.get("logging.project"):
            draft.omit(previous.tool_key, "wandb_project sets the same key", previous.value)
        draft.put("logging.project", project, "wandb_project")
    if name := draft.get("wandb_name"):
        draft.put("run_name", str(name), "wandb_name")
    roles = as_list(draft.get("roles_to_train"))
    if roles and roles not in (["assistant"], ["gpt"], ["assistant", "gpt"], ["gpt", "assistant"]):
        draft.omit("roles_to_train", "see data.train_on", roles)


def _axolotl_format(fields: Section) -> str | None:
    """Return the row format of a data set, or None if its type is unknown."""
    kind = fields.get("type")
    if fields.get("text_column"):
        return "text"
    if isinstance(kind, Mapping):
        return "alpaca"
    name = str(kind or "alpaca").partition(":")[0].split(".")[0].removesuffix("_w_system")
    config_key = _FORMATS.get(name)
    return "sharegpt" if config_key == "messages" and _role_column(fields) == "from" else config_key


def _role_column(fields: Section) -> str:
    return str(fields.get("message_field_role") or fields.section("message_property_mappings").get("role") or "role")


def _axolotl_dataset(draft: Translation, key: str, fields: Section) -> None:
    put_source(draft, key, fields)
    tool_key, kind, inner = f"{fields.path}.type", fields.get("type"), fields.section("type")
    if "preference.loss_type" in draft.entries:
        draft.put(f"{key}.format", "preference", tool_key)
        columns = {field: inner.get(name) or fields.get(name) for field, name in _PREFERENCE_FIELDS.items()}
        put_columns(draft, key, {field: (column, field, fields.path) for field, column in columns.items()})
        templates = [name for name in inner.values if name not in _PREFERENCE_FIELDS.values()]
    else:
        format_ = _axolotl_format(fields)
        if format_ is None:
            draft.omit(tool_key, "the format is detected from the rows; see data.train.N.format and columns", kind)
            return
        draft.put(f"{key}.format", format_, tool_key)
        columns = _axolotl_columns(fields, format_)
        put_columns(draft, key, {field: (column, *names, fields.path) for field, (column, *names) in columns.items()})
        templates = ["format", "no_input_format", "system_format", "system_prompt"]
    for name in templates:
        if value := inner.get(name):
            draft.omit(f"{tool_key}.{name}", _OWN_TEMPLATE, value)


def _axolotl_columns(fields: Section, format_: str) -> dict[str, tuple[Any, str]]:
    """Return (column in the rows, default name) of each field of a format."""
    if format_ == "text":
        return {"text": (fields.get("field") or fields.get("text_column"), "text")}
    if format_ == "alpaca":
        inner = fields.section("type") if isinstance(fields.values.get("type"), Mapping) else fields
        return {config_key: (inner.get(name), config_key) for config_key, name in _ALPACA_FIELDS.items()}
    mappings = fields.section("message_property_mappings")
    content = fields.get("message_field_content") or mappings.get("content")
    if format_ == "messages":
        return {
            "messages": (fields.get("field_messages"), "messages"),
            "role": (_role_column(fields), "role"),
            "content": (content, "content"),
        }
    # The type "sharegpt" has fixed column names for role and content.
    is_template = fields.get("type") == "chat_template"
    return {
        "conversations": (fields.get("field_messages"), "conversations"),
        "role": (_role_column(fields) if is_template else "from", "from"),
        "content": ((content or "content") if is_template else "value", "value"),
    }


# TRL commands such as `trl sft`, and recipes that use them.

#: Unsupported TRL trainers, by a key that only this trainer has.
_OTHER_TRAINERS = {
    "num_generations": "GRPO",
    "reward_funcs": "GRPO",
    "reward_model_path": "PPO",
}
#: Task that each preference key implies if no command determines the task.
_TRL_PREFERENCES = {
    "desirable_weight": "kto",
    "undesirable_weight": "kto",
    "simpo_gamma": "cpo",
    "cpo_alpha": "cpo",
    "beta": "dpo",
    "max_prompt_length": "dpo",
    "max_completion_length": "dpo",
    "rpo_alpha": "dpo",
    "precompute_ref_log_probs": "dpo",
}
_COLUMNS = ("messages", "prompt", "completion", "text")


def _trl(draft: Translation) -> None:
    """Fill a draft from the options of a TRL command or recipe."""
    values, task = draft.source.values, draft.source.line.task
    _refuse_trl(draft, task)
    kind = task or next((kind for name, kind in _TRL_PREFERENCES.items() if name in values), "sft")
    translate_keys(draft, values)
    if draft.get("use_peft"):
        defaults = {"lora.r": 16, "lora.lora_alpha": 32, "lora.lora_dropout": 0.05}
        put_lora(draft, defaults, "load_in_4bit", "load_in_8bit")
    draft.fill_in_model()
    if "output_dir" not in draft.entries:
        draft.put_path("output_dir", "trainer_output", note="TRL's default")
    if kind == "sft":
        draft.put("task", "sft")
        _trl_sft(draft)
    else:
        _trl_preference(draft, kind)
    _trl_datasets(draft)
    fill_defaults(draft, _TRL_DEFAULTS if kind == "sft" else {**_TRL_DEFAULTS, "optimizer.learning_rate": 1e-6})


def _refuse_trl(draft: Translation, task: str) -> None:
    if not draft.get("use_peft"):
        refuse_quantized(draft, "load_in_4bit", "load_in_8bit")
    for name, kind in _OTHER_TRAINERS.items():
        if draft.get(name) is not None:
            raise draft.refuse(f"`{name}` belongs to {kind}, which is not supported by `import`", _OUR_TASKS)
    if task == "sft" and "beta" in draft.source.values:
        raise draft.refuse("`beta` belongs to preference training, not to trl sft", "Write trl dpo")


def _trl_sft(draft: Translation) -> None:
    if (loss := draft.get("loss_type")) is not None:
        draft.omit("loss_type", "the loss is the cross-entropy of the trained tokens", loss)
    if draft.get("assistant_only_loss"):
        draft.put("data.train_on", "assistant", "assistant_only_loss")
    elif on_completion := draft.get("completion_only_loss"):
        draft.put("data.train_on", "completion", "completion_only_loss")
    else:
        tool_key = "" if on_completion is None else "completion_only_loss"
        note = 'TRL\'s default for messages; "assistant" trains only on the answers'
        draft.put("data.train_on", "all", tool_key, note)


def _trl_preference(draft: Translation, kind: str) -> None:
    """Fill ``[preference]`` from the keys of DPOTrainer, KTOTrainer, ORPOTrainer or CPOTrainer."""
    loss_type = draft.get("loss_type")
    types = [str(name) for name in as_list(loss_type)] or [{"kto": "kto", "orpo": "orpo"}.get(kind, "sigmoid")]
    weights = as_list(draft.get("loss_weights")) or [1.0] * len(types)
    losses = [name for name in types if name != "sft"]
    if len(losses) != 1 or len(weights) != len(types):
        raise draft.refuse(f"several losses at once ({', '.join(types)}) are not supported here", "Keep one, and sft")
    loss = losses[0]
    if kind == "cpo" and loss not in ("sigmoid", "simpo"):
        text = f"the loss `{loss}` of CPOTrainer is not supported here"
        raise draft.refuse(text, 'Supported: loss_type "sigmoid" and "simpo"')
    factors = [as_number(weight, "preference.beta") for weight in weights]
    if not all(isinstance(name, int | float) and name is not True and 0 < name < 1e300 for name in factors):
        raise draft.refuse(f"loss_weights must be numbers above 0, not {weights}")
    factor_by_loss = dict(zip(types, factors, strict=True))
    is_cpo = kind == "cpo" and loss == "sigmoid"
    put_preference(draft, "cpo" if is_cpo else loss, draft.source.line.task if loss_type is None else "loss_type")
    if "sft" in factor_by_loss:
        if previous := draft.entries.get("preference.rpo_alpha"):
            draft.omit(previous.tool_key, "loss_weights sets the same key", previous.value)
        draft.put("preference.rpo_alpha", factor_by_loss["sft"] / factor_by_loss[loss], "loss_weights")
    elif factors != [1.0]:
        draft.omit("loss_weights", "a single loss has the weight 1", weights)
    if kind == "cpo" and draft.get("cpo_alpha") is None:
        draft.put("preference.rpo_alpha", 1.0, note="TRL's default of cpo_alpha")


def _trl_datasets(draft: Translation) -> None:
    """Translate the data sets, from the first key that is set: mixture, list, names with weights, or one name."""
    tool_key = "dataset_mixture" if draft.get("dataset_mixture") else "datasets"
    mixture, mixer = draft.get(tool_key), draft.peek("dataset_mixer")
    members = draft.get(f"{tool_key}.datasets") if isinstance(mixture, Mapping) else mixture
    path = f"{tool_key}.datasets" if isinstance(mixture, Mapping) else tool_key
    sources = []
    for member_path, source in _members(members, path):
        if isinstance(source, Mapping):
            sources.append(Section(draft, member_path, source))
        else:
            draft.omit_if_on(member_path, "a data set has an id or a path", source)
    if isinstance(mixture, Mapping) and (size := draft.get(f"{tool_key}.test_split_size")):
        draft.put("data.val_size", size, f"{tool_key}.test_split_size")
    if not sources and isinstance(mixer, Mapping):
        draft.answered.add("dataset_mixer")
        sources = [
            Section(draft, f"dataset_mixer.{name}", {"id": str(name), "weight": weight})
            for name, weight in mixer.items()
        ]
    if not sources and (name := draft.get("dataset_name")):
        values = {"id": name, "config": draft.peek("dataset_config"), "split": draft.peek("dataset_train_split")}
        paths = {"config": "dataset_config", "split": "dataset_train_split"}
        sources = [Section(draft, "dataset_name", values, paths)]
        test_split = draft.get("dataset_test_split")
        if test_split and draft.get("eval_strategy", "no") not in ("no", False):
            paths = {**paths, "split": "dataset_test_split"}
            section = Section(draft, "dataset_test_split", {**values, "split": test_split}, paths)
            _trl_dataset(draft, "data.eval.0", section)
        elif test_split:
            draft.drop("dataset_test_split", "eval_strategy is no", test_split)
    column = draft.get("dataset_text_field") if sources else None
    for index, section in enumerate(sources):
        _trl_dataset(draft, f"data.train.{index}", section)
        put_columns(draft, f"data.train.{index}", {"text": (column, "text", "dataset_text_field")})
    if not sources:
        draft.fill_in_data()


def _trl_dataset(draft: Translation, key: str, fields: Section) -> None:
    put_source(draft, key, fields)
    weight, columns = fields.get("weight"), fields.get("columns")
    if weight not in (None, 1):
        draft.put(f"{key}.weight", weight, f"{fields.path}.weight")
    unused = [name for name in columns if name not in _COLUMNS] if isinstance(columns, list) else []
    if unused:
        draft.omit(f"{fields.path}.columns", "the format does not use these columns", unused)


# DeepSpeed: its JSON config contains neither model nor data.

_SCHEDULES = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}

#: DeepSpeed version whose defaults a translation contains.
DEEPSPEED_VERSION = "0.19.6"


def _deepspeed(draft: Translation) -> None:
    """Fill a draft from a DeepSpeed config. Such a config has no model and no data, so the user must add them."""
    draft.fill_in("task", "sft", 'or "pretrain"')
    draft.fill_in("output_dir", "outputs/first", "folder of the run")
    draft.fill_in_model()
    draft.fill_in_data()
    draft.omit_auto("the arguments of Hugging Face's Trainer set it, but this file does not contain them")
    translate_keys(draft, draft.source.values)
    if draft.get("gradient_clipping") is None:
        note = "DeepSpeed's default since 0.19.3; write 0 for older versions, which do not clip"
        draft.put("optimizer.max_grad_norm", 1.0, note=note)
    nvme_path(draft, draft.source.values)
    _deepspeed_batch(draft)
    _deepspeed_optimizer(draft)
    _deepspeed_schedule(draft)
    if not any(draft.get(f"{name}.enabled") in (True, "auto") for name in ("bf16", "fp16")):
        draft.put("precision.compute_dtype", "float32", note="DeepSpeed's default; bfloat16 is faster")
    for name in ("wandb", "tensorboard"):
        is_on = draft.get(f"{name}.enabled")
        if is_on is not True:
            draft.omit_if_on(f"{name}.enabled", "see logging.report_to", is_on)
        else:
            report_to(draft, name, [name])
            if name == "wandb" and (project := draft.get("wandb.project")):
                draft.put("logging.project", project, "wandb.project")


def put_processes(draft: Translation, num_processes: int, num_hosts: int = 1) -> None:
    """Set the number of processes if several processes can train. Otherwise, one process trains the same rows.

    Args:
        draft: Translation that already contains task and optimizer.
        num_processes: Total number of processes on all machines.
    """
    key = "distributed.processes"
    optim, task = draft.entries.get("optimizer.optim"), draft.entries.get("task")
    if task is not None and task.value == "dpo":
        draft.omit(key, "preference training uses one process here", num_processes)
    elif optim is not None and optim.value in ("adafactor", "muon"):  # these need whole matrices in one process
        draft.omit(key, f"{optim.value} uses one process here", num_processes)
    elif num_hosts > 1:
        start = f"torchrun --nnodes {num_hosts} --nproc-per-node 1 ... -m megatrain run CONFIG"
        draft.omit(key, f"start one process on each machine: {start}; or all processes on one machine", num_processes)
    else:
        draft.put(key, num_processes, note="one for each GPU of this machine; with 1, one process trains the same rows")


def _deepspeed_batch(draft: Translation) -> None:
    """Derive the micro-batch size or the accumulation steps from train_batch_size, which is their product."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    rows, micro_batch, accumulation = (_deepspeed_count(draft, name) for name in names)
    if rows is None:
        return
    if micro_batch is not None:
        steps = max(1, rows // micro_batch)
        if accumulation != steps:
            draft.put("training.gradient_accumulation_steps", steps, "train_batch_size", f"{rows} rows on all devices")
        if accumulation is not None and steps % accumulation:
            draft.omit("gradient_accumulation_steps", "train_batch_size is not a multiple of it", accumulation)
        elif accumulation is not None and (processes := steps // accumulation) > 1:
            put_processes(draft, processes)
    elif accumulation is not None:
        draft.put("training.per_device_train_batch_size", max(1, rows // accumulation), "train_batch_size")
    else:
        draft.put("training.per_device_train_batch_size", rows, "train_batch_size", "all rows of a step")


def _deepspeed_count(draft: Translation, tool_key: str) -> int | None:
    """Return a whole number above 0, which may be given as text, or list an invalid value as lost."""
    value = draft.get(tool_key)
    number = as_number(value, "training.per_device_train_batch_size")
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if value not in (None, "auto") and count(number) is None:
        draft.entries = {config_key: entry for config_key, entry in draft.entries.items() if entry.tool_key != tool_key}
        draft.omit(tool_key, "write a whole number above 0", value)
    return count(number)


def _deepspeed_optimizer(draft: Translation) -> None:
    """Set the defaults of DeepSpeed's optimizer."""
    table = as_mapping(draft.get("optimizer"))
    if "type" in table:
        draft.default({"optimizer.adam_beta2": 0.999, "optimizer.weight_decay": 0.0})
        if "lr" not in as_mapping(table.get("params")) and "adam" in str(table["type"]).lower():
            draft.default({"optimizer.learning_rate": 1e-3})
    elif "optimizer" not in draft.source.values:
        draft.omit("optimizer", "the training program creates the optimizer; configure it in [optimizer]")


def _deepspeed_schedule(draft: Translation) -> None:
    kind, parameters = draft.section("scheduler").get("type"), draft.section("scheduler.params")
    if kind is None:
        note = "DeepSpeed's default without a scheduler; a Trainer uses its own arguments"
        draft.put("optimizer.lr_scheduler_type", "constant", note=note)
        return
    if not isinstance(kind, str) or kind not in _SCHEDULES:
        draft.omit("scheduler.type", f"use {', '.join(_SCHEDULES.values())} or other schedules of transformers", kind)
        return

    def get_parameter(name: str, default: Any) -> Any:
        """Return a parameter, its default if the file lacks it, or None if its value is "auto" or null."""
        value = parameters.get(name) if name in parameters.values else default
        return None if value == "auto" else value

    draft.put("optimizer.lr_scheduler_type", _SCHEDULES[kind], "scheduler.type")
    for config_key, name, fallback in (
        ("optimizer.warmup_steps", "warmup_num_steps", 1000),
        ("training.max_steps", "total_num_steps", None),
    ):
        if (parameter := get_parameter(name, fallback)) is not None:
            draft.put(config_key, parameter, f"scheduler.params.{name}")
    # WarmupLR without warmup_max_lr uses the optimizer's learning rate.
    has_peak = kind != "WarmupCosineLR"
    peak = get_parameter("warmup_max_lr", 1e-3 if kind == "WarmupDecayLR" else None) if has_peak else None
    if peak is not None:
        is_given = "warmup_max_lr" in parameters.values
        note = "" if is_given else f"the default of {kind}, which overrides the optimizer's lr"
        draft.put("optimizer.learning_rate", peak, "scheduler.params.warmup_max_lr", note)
    unsupported: tuple[tuple[str, Any, Any, str], ...] = (
        ("warmup_min_lr", 0, 0, "a warm-up begins at 0"),
        ("warmup_min_ratio", 0, 0, "a warm-up begins at 0"),
        ("warmup_type", "log", "linear", "a warm-up rises linearly"),
        ("cos_min_ratio", 1e-4 if kind == "WarmupCosineLR" else 0, 0, "the cosine falls to 0"),
    )
    for name, default, supported, reason in unsupported:
        value = get_parameter(name, default)
        if value is not None and value != supported:
            origin = "" if name in parameters.values else f" (the default of {kind})"
            draft.omit(f"scheduler.params.{name}", f"{reason} here{origin}", value)


# MegaTrain: its YAML config has sections.


def _megatrain(draft: Translation) -> None:
    """Fill a draft from a MegaTrain config, and set the keys that describe MegaTrain's fixed behavior."""
    for name, section in draft.source.values.items():
        if section is not None and not isinstance(section, Mapping):
            raise draft.refuse(f"`{name}` must map names to values")
    draft.put("task", "sft")
    name = str(draft.get("model.name") or "model").rstrip("/").rpartition("/")[2]
    draft.put_path("output_dir", f"outputs/{name}", note="MegaTrain saves nothing")
    translate_keys(draft, draft.source.values)
    draft.fill_in_model()
    if path := draft.get("dataset.path"):
        draft.put_path("data.train.0.path", path, "dataset.path")
        for config_key, field in {"prompt": "query", "completion": "response"}.items():
            column = draft.get(f"dataset.{field}_field") or field
            draft.put(f"data.train.0.columns.{config_key}", column, f"dataset.{field}_field")
    elif name := draft.get("dataset.name"):
        folder = Path(str(draft.get("dataset.dataset_dir") or "data"))
        note = f"file_name of `{name}` in {folder / 'dataset_info.json'}"
        draft.fill_in("data.train.0.path", str(folder / f"{name}.json"), note)
    else:
        draft.fill_in_data()
    note = "as in MegaTrain"
    if "data.train_on" not in draft.entries:
        draft.put("data.train_on", "last_assistant", note=f"{note}; assistant trains on all answers")
    draft.put("data.packing", False, note=f"{note}, which pads every row; true is faster")
    draft.put("optimizer.lr_scheduler_type", "constant", note=note)
    draft.put("optimizer.weight_decay_exclude", [], note=f"{note}: norms and biases decay too")
    draft.default(_MEGATRAIN_DEFAULTS)


TOOLS: Mapping[Tool, Callable[[Translation], None]] = {
    "llamafactory": _llama_factory,
    "axolotl": _axolotl,
    "trl": _trl,
    "deepspeed": _deepspeed,
    "megatrain": _megatrain,
}
