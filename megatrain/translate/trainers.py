"""Flat YAML around transformers' TrainingArguments: LLaMA-Factory, Axolotl and TRL.

First the rules that they share, then for each tool what it refuses, how its keys combine, and its data sets.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatrain.base.other_tools import PLANNER, QUANTIZED
from megatrain.config.keys import KEYS, leaf_schema, used_if
from megatrain.translate.draft import (
    Draft,
    Rule,
    TranslationError,
    choice,
    is_file,
    listed,
    mapping,
    read_mapping,
)
from megatrain.translate.templates import compared

_OPTIMIZERS = {
    "adamw": ("adamw", "paged_adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused",
              "adamw_anyprecision", "paged_adamw_32bit", "adamw_torch_xla", "adam", "deepspeed_adam", "fused"),
    "lion": ("lion", "lion_32bit", "paged_lion_32bit", "lion_pytorch"),
    "adafactor": ("adafactor",),
    "sgd": ("sgd",),
    "muon": ("muon",),
}  # fmt: skip
_OPTIMIZER_OF = {theirs: ours for ours, names in _OPTIMIZERS.items() for theirs in names}
#: Optimizers with moments of 8 bits, all in blocks of 256.
_QUANTIZED = {
    "adamw_8bit": "adamw",
    "adamw_bnb_8bit": "adamw",
    "paged_adamw_8bit": "adamw",
    "adamw_torch_8bit": "adamw",
    "lion_8bit": "lion",
    "paged_lion_8bit": "lion",
}


def optimizer(draft: Draft, theirs: str, value: Any) -> None:
    """Translate the name of an optimizer."""
    name = str(value).lower()
    if name in _OPTIMIZER_OF:
        draft.put("optimizer.optim", _OPTIMIZER_OF[name], theirs)
    elif name in _QUANTIZED:
        draft.put("optimizer.optim", _QUANTIZED[name], theirs)
        draft.put("optimizer.state_dtype", "int8", theirs)
    elif name == "adamw_torch_4bit":
        draft.put("optimizer.optim", "adamw", theirs)
        draft.put("optimizer.state_dtype", "int8", theirs, f"{value} there: the least here are 8 bits")
    else:
        draft.lose(theirs, f"optimizers here: {', '.join(leaf_schema('optimizer.optim')['enum'])}", value)


def warmup_ratio(draft: Draft, theirs: str, value: Any) -> None:
    """Translate the warm-up as a share of all steps; a number of steps takes precedence, as in transformers."""
    if "optimizer.warmup_steps" not in draft.entries:
        draft.put("optimizer.warmup_steps", value, theirs)


def warmup_steps(draft: Draft, theirs: str, value: Any) -> None:
    """Translate the number of warm-up steps; with 0 the ratio counts, as in transformers."""
    if value or "optimizer.warmup_steps" not in draft.entries:
        draft.put("optimizer.warmup_steps", value, theirs)


def half_precision(draft: Draft, theirs: str, value: Any) -> None:
    """Translate bf16 and fp16."""
    if value is True or value in ("true", "auto", "full"):
        note = "float16 there, which needs loss scaling" if theirs.endswith("fp16") and value is True else ""
        if theirs.endswith("bf16") or note:
            draft.put("precision.compute_dtype", "bfloat16", theirs, note)


def loaded_dtype(draft: Draft, theirs: str, value: Any) -> None:
    """Translate the dtype a model is loaded in into the compute dtype; the master weights stay float32."""
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
    """Translate where metrics are reported to, beside metrics.jsonl and the targets that other keys have set."""
    names = [name for name in (value if isinstance(value, list) else [value]) if name not in ("none", "all")]
    kind = leaf_schema("logging.report_to")
    allowed: list[str] = kind.get("items", {}).get("enum", []) or next(
        (part["items"]["enum"] for part in kind.get("anyOf", ()) if "items" in part), []
    )
    kept = [name for name in names if name in allowed]
    if kept:
        before = draft.entries.get("logging.report_to")
        targets = dict.fromkeys(["jsonl", *(before.value if before else ()), *kept])
        draft.put("logging.report_to", list(targets), theirs)
    for name in names:
        if name not in allowed:
            draft.lose(theirs, "figures go to output_dir/metrics.jsonl", name)


def resume(draft: Draft, theirs: str, value: Any) -> None:
    """Translate what a run resumes from; checkpoints of other tools cannot be read."""
    if isinstance(value, str):
        draft.lose(theirs, "checkpoints of other tools are not read: give its exported model as the model", value)
    else:
        draft.drop(theirs, "a run continues by itself where output_dir holds checkpoints", value)


def deepspeed(draft: Draft, theirs: str, value: Any) -> None:
    """Take the NVMe folder from a DeepSpeed config; the planner decides the rest."""
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
    draft.put("evaluation.eval_strategy", "no" if value is False else value, theirs)


def held_out_rows(draft: Draft, theirs: str, value: Any) -> None:
    """Translate the size of the held-out split."""
    if value:
        draft.put("data.val_size", value, theirs)


def drop_evaluation_without_rows(draft: Draft) -> None:
    """Take out the evaluation schedule of a config without evaluation rows."""
    if any(key.startswith("data.eval.") or key == "data.val_size" for key in draft.entries):
        return
    for key in [key for key in draft.entries if key.startswith("evaluation.")]:
        entry = draft.entries.pop(key)
        if entry.theirs and entry.value not in ("no", False):
            draft.lose(entry.theirs, "there are no rows to evaluate on: name them in [[data.eval]]", entry.value)


def chat_template(draft: Draft, theirs: str, value: Any) -> None:
    """Translate a chat template: a file is taken over, inline text has to be written into one."""
    text = str(value)
    if text.endswith((".jinja", ".jinja2", ".j2")) and is_file(Path(draft.base, text)):
        draft.put("model.chat_template", text, theirs, is_path=True)
    elif "{%" in text or "{{" in text:
        short = text.strip().splitlines()[0][:40]
        draft.lose(theirs, "write it into a file, and model.chat_template = that file", f"{short} ...")
    elif text not in ("tokenizer_default", "default"):
        draft.drop(theirs, "the model's own template is used: look at it with `megatrain-tier data preview`", value)


def model_revision(draft: Draft, theirs: str, value: Any) -> None:
    """Translate a revision; main is the default."""
    if value != "main":
        draft.put("model.revision", value, theirs)


def compile_backend(draft: Draft, theirs: str, value: Any) -> None:
    """Translate the backend of torch.compile."""
    if value in leaf_schema("model.compile_backend")["enum"]:
        draft.put("model.compile_backend", value, theirs)
    else:
        draft.lose_if_on(theirs, 'there are "inductor", "aot_eager" and "eager"', value)


_cpu = choice("device", {True: "cpu", False: None}, "see device")
#: Rules of the keys that the three share.
_SHARED_RULES: dict[str, Rule] = {
    "optim": optimizer,
    "warmup_steps": warmup_steps,
    "warmup_ratio": warmup_ratio,
    "bf16": half_precision,
    "fp16": half_precision,
    "torch_dtype": loaded_dtype,
    "dtype": loaded_dtype,
    "use_cpu": _cpu,
    "no_cuda": _cpu,
    "attn_implementation": attention,
    "torch_compile_backend": compile_backend,
    "report_to": reports,
    "resume_from_checkpoint": resume,
    "deepspeed": deepspeed,
    "save_strategy": save_strategy,
    "eval_strategy": eval_strategy,
    "evaluation_strategy": eval_strategy,
    "model_revision": model_revision,
    "chat_template": chat_template,
    "chat_template_path": chat_template,
}

#: transformers' defaults.
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


#: Globs of the parameters that transformers' Trainer leaves out of weight decay, embeddings not among them.
DECAY_EXCLUDE = ("*bias*", "*norm*")


def fill_defaults(draft: Draft, defaults: Mapping[str, Any]) -> None:
    """Write down the tool's defaults that have an effect.

    As in transformers, weight decay applies to embeddings, but not to biases and norms.
    """
    chosen = {key: entry.value for key, entry in draft.entries.items()}
    unused = {
        key
        for key in defaults
        if any(chosen.get(other, KEYS[other]["default"]) not in values for other, values in used_if(key).items())
    }
    num_steps = chosen.get("training.max_steps")
    if isinstance(num_steps, int) and num_steps > 0:
        unused.add("training.num_train_epochs")
    draft.default({key: value for key, value in defaults.items() if key not in unused})
    decay = draft.entries.get("optimizer.weight_decay")
    if decay is not None and decay.value:
        draft.put("optimizer.weight_decay_exclude", list(DECAY_EXCLUDE), note=f"as in {draft.source.title}")


def _put_lora(draft: Draft, names: Mapping[str, str], defaults: Mapping[str, Any]) -> None:
    """Fill ``[lora]`` of a draft.

    Args:
        names: our key in ``[lora]`` -> theirs.
        defaults: what their tool takes by default, by our key.
    """
    values = draft.source.values
    theirs = names.get("adapter_name_or_path", "")
    if folder := values.get(theirs):
        paths = [part.strip() for part in str(folder).split(",")] if not isinstance(folder, list) else folder
        draft.put_path("lora.adapter_name_or_path", paths[-1], theirs)
        if len(paths) > 1:
            draft.lose(theirs, "adapters are not stacked: merge the others into the model first", paths[:-1])
        names = {ours: name for ours, name in names.items() if ours == "lora_dropout"}  # it has its own settings
        defaults = {}
    for ours, name in names.items():
        value = values.get(name)
        if ours in _LORA_LISTS and isinstance(value, str) and value != "all-linear":
            value = [part.strip() for part in value.split(",") if part.strip()]
        if ours == "target_modules" and value in (["all"], True):
            value = "all-linear"
        if value is not None and value is not False and value != []:
            draft.put(f"lora.{ours}", value, name)
    for ours, value in defaults.items():
        if f"lora.{ours}" not in draft.entries:
            draft.put(f"lora.{ours}", value, note=f"{draft.source.title}'s default")


def _keep_precision(draft: Draft, *names: str) -> None:
    """List what quantizes the model under the adapters as lost: it is streamed as it is in its folder."""
    for name in names:
        if draft.source.values.get(name):
            why = "the model under the adapters keeps the precision of its folder, as it is streamed; for QLoRA"
            draft.lose(name, f"{why} {QUANTIZED}", draft.source.values[name])


_LORA_LISTS = ("target_modules", "modules_to_save", "target_parameters")


def _refuse_quantized(draft: Draft, *names: str) -> None:
    for name in names:
        if draft.source.values.get(name):
            raise draft.refuse(f"{name}: quantized weights cannot be trained in full precision", "Remove it")


_OUR_TASKS = 'There are "sft", "pretrain" and "dpo"'

# Preferences, whose losses have nearly the same names everywhere.

LOSSES = ("sigmoid", "hinge", "ipo", "robust", "kto", "cpo", "orpo", "simpo")
_PREFERENCE_DEFAULTS: dict[str, Any] = {"preference.beta": 0.1}


def _put_preference(draft: Draft, loss: Any, theirs: str, names: Mapping[str, str]) -> None:
    """Fill ``task`` and ``[preference]``.

    Args:
        draft: Of the translation.
        loss: Their name of the loss.
        theirs: The key that says it.
        names: Their key -> ours in ``[preference]``; the first of several that is there counts.
    """
    values = draft.source.values
    if loss not in LOSSES:
        raise draft.refuse(f"the loss `{loss}` of preferences is not supported here", f"There are {', '.join(LOSSES)}")
    draft.put("task", "dpo", theirs)
    draft.put("preference.loss_type", loss, theirs)
    for name, ours in names.items():
        if values.get(name) is not None and f"preference.{ours}" not in draft.entries:
            used = _LOSSES_WITH.get(ours, LOSSES)
            if loss in used:
                draft.put(f"preference.{ours}", values[name], name)
            else:
                draft.drop(name, f"the loss {loss} has no such term", values[name])
    draft.entries.pop("data.packing", None)  # each answer has a row of its own
    draft.entries.pop("data.train_on", None)
    draft.entries.pop("lora.lora_dropout", None)
    draft.default(_PREFERENCE_DEFAULTS)


#: Keys of ``[preference]`` that not all losses have.
_LOSSES_WITH = {
    "label_smoothing": ("sigmoid", "robust", "cpo", "simpo"),
    "simpo_gamma": ("simpo",),
    "rpo_alpha": ("sigmoid", "hinge", "ipo", "robust", "cpo", "orpo", "simpo"),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}

# LLaMA-Factory: data sets by their names in dataset_info.json.

_STAGES = {"sft": "sft", "pt": "pretrain", "dpo": "dpo", "kto": "dpo"}
_OTHER_STAGES = {"ppo": "PPO", "rm": "reward model training", "orpo": "ORPO"}
_PREFERENCE_NAMES = {
    "pref_beta": "beta",
    "pref_ftx": "rpo_alpha",
    "dpo_label_smoothing": "label_smoothing",
    "simpo_gamma": "simpo_gamma",
    "kto_chosen_weight": "desirable_weight",
    "kto_rejected_weight": "undesirable_weight",
}
_PREFERRED = {"chosen": "chosen", "rejected": "rejected", "kto_tag": "kto_tag"}
#: Columns of dataset_info.json -> ours.
_ALPACA = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "history": "history",
    "system": "system",
    "tools": "tools",
    "images": "images",
    **_PREFERRED,
}
_CHAT = {"system": "system", "tools": "tools", "images": "images", **_PREFERRED}


def named_template(draft: Draft, theirs: str, value: Any) -> None:
    """List a chat template that is named: the one of the model's folder is used in its place."""
    if draft.source.values.get("stage") == "pt":
        draft.drop(theirs, "plain text has no chat template", value)
        return
    why, is_same = compared(str(value), draft.base / str(draft.source.values.get("model_name_or_path", "")))
    (draft.drop if is_same else draft.lose)(theirs, why, value)


_LLAMA_FACTORY_RULES: dict[str, Rule] = {
    **_SHARED_RULES,
    "template": named_template,
    "flash_attn": attention,
    "attn": attention,
    "val_size": held_out_rows,
    "pure_bf16": half_precision,
}
_LLAMA_FACTORY_DEFAULTS: dict[str, Any] = {**_SHARED_DEFAULTS, "data.max_length": 2048}


def translate_llama_factory(draft: Draft) -> None:
    """Fill a draft from a file of LLaMA-Factory.

    Raises:
        TranslationError: It asks for preference training or anything else that is not supported here.
    """
    values = draft.source.values
    _refuse_stages(draft)
    is_pretraining, is_preference = values.get("stage") == "pt", _STAGES[values.get("stage", "sft")] == "dpo"
    if not is_preference:
        draft.put("task", "pretrain" if is_pretraining else "sft", "stage")
    has_lora = values.get("finetuning_type", "lora") == "lora"
    trained = {
        name: value
        for name, value in values.items()
        if not name.startswith("generating") and (has_lora or not name.startswith("lora_"))
    }
    draft.translate_keys(_LLAMA_FACTORY_RULES, trained)
    if values.get("use_muon"):  # counts more than `optim`, whose default is always there
        draft.entries.pop("optimizer.state_dtype", None)
        draft.put("optimizer.optim", "muon", "use_muon")
    if has_lora:
        _llama_factory_lora(draft)
    draft.fill_in_model()
    if not is_preference:
        _packing(draft, is_pretraining)
    if is_preference:
        is_kto = values.get("stage") == "kto"
        _put_preference(
            draft,
            "kto" if is_kto else values.get("pref_loss", "sigmoid"),
            "stage" if is_kto else "pref_loss",
            _PREFERENCE_NAMES,
        )
    elif not is_pretraining:
        _train_on(draft)
    info, folder = _dataset_info(draft)
    _named_datasets(draft, "data.train", values.get("dataset"), info, folder)
    if values.get("eval_dataset"):
        _named_datasets(draft, "data.eval", values["eval_dataset"], info, folder)
    _llama_factory_images(draft, info)
    fill_defaults(draft, _LLAMA_FACTORY_DEFAULTS)


def _refuse_stages(draft: Draft) -> None:
    values = draft.source.values
    stage = values.get("stage", "sft")
    if not isinstance(stage, str) or stage not in _STAGES:
        kind = _OTHER_STAGES.get(str(stage), f"stage: {stage}")
        raise draft.refuse(f"{kind} is not supported here", _OUR_TASKS)
    kind = values.get("finetuning_type", "lora")
    if kind not in ("full", "lora"):
        raise draft.refuse(f"finetuning_type: {kind} is not supported here", 'There are "full" and "lora"')
    if kind == "full":
        _refuse_quantized(draft, "quantization_bit")


def _llama_factory_lora(draft: Draft) -> None:
    values = draft.source.values
    rank = values.get("lora_rank", 8)
    alpha = 2 * rank if isinstance(rank, int) else 16
    names = {
        "adapter_name_or_path": "adapter_name_or_path",
        "r": "lora_rank",
        "lora_alpha": "lora_alpha",
        "lora_dropout": "lora_dropout",
        "target_modules": "lora_target",
        "target_parameters": "lora_parameters",
        "modules_to_save": "additional_target",
        "use_rslora": "use_rslora",
        "use_dora": "use_dora",
    }
    _put_lora(draft, names, {"r": 8, "lora_alpha": alpha, "target_modules": "all-linear"})
    if values.get("create_new_adapter"):
        draft.lose("create_new_adapter", "merge the adapter first: megatrain-tier export --merge")
    _keep_precision(draft, "quantization_bit")


def _llama_factory_images(draft: Draft, info: Mapping[str, Any]) -> None:
    """Say that rows have images, where one of the data sets has a column of them."""
    values = draft.source.values
    towers = ("freeze_vision_tower", "freeze_multi_modal_projector")
    names = [str(name).strip() for key in ("dataset", "eval_dataset") for name in _names(values.get(key))]
    has_images = any(mapping(mapping(info.get(name)).get("columns")).get("images") for name in names)
    if not has_images:
        for name in towers:
            if name in values:
                draft.drop(name, "no data set has images", values[name])
        return
    trained = [name for name in towers if values.get(name) is False]
    put_images(draft, "trained" if trained else "frozen", trained[0] if trained else "freeze_vision_tower")
    if len(trained) == 1:
        draft.lose(trained[0], "tower and projector are trained both: name what stays in model.freeze", False)
    if values.get("freeze_language_model"):
        draft.lose("freeze_language_model", "name its parameters in model.freeze", True)
    if values.get("media_dir"):
        draft.lose("media_dir", "paths of images are relative to the file with the rows", values["media_dir"])


def put_images(draft: Draft, images: str, theirs: str) -> None:
    """Say that rows have images. Adapters are those of the language model; others may adapt the vision tower too."""
    if images == "trained" and any(key.startswith("lora.") for key in draft.entries):
        draft.lose(theirs, "the vision tower gets no adapters: it is frozen, or, as model.images says, trained whole")
        images = "frozen"
    draft.put("model.images", images, theirs if theirs in draft.source.values else "", "the data has images")


def _names(value: Any) -> list[Any]:
    return value.split(",") if isinstance(value, str) else listed(value)


def _packing(draft: Draft, is_pretraining: bool) -> None:
    values = draft.source.values
    packing, neat = values.get("packing"), values.get("neat_packing", False)
    is_packed = bool(neat) or (is_pretraining if packing is None else bool(packing))
    theirs = "neat_packing" if neat else "packing" if packing is not None else ""
    joins = is_packed and is_pretraining and not neat
    note = "documents never attend to each other here" if is_packed and not neat and not joins else ""
    draft.put(
        "data.packing", "concat" if joins else is_packed, theirs, note or ("" if theirs else "LLaMA-Factory's default")
    )


def _train_on(draft: Draft) -> None:
    values = draft.source.values
    if values.get("train_on_prompt"):
        draft.put("data.train_on", "all", "train_on_prompt")
    elif values.get("mask_history"):
        draft.put("data.train_on", "last_assistant", "mask_history")
    else:
        draft.put("data.train_on", "assistant", "train_on_prompt" if "train_on_prompt" in values else "")


def _dataset_info(draft: Draft) -> tuple[Mapping[str, Any], Path]:
    """Find ``dataset_info.json``, from the current folder and from the config's upward; return it and its folder."""
    name = draft.source.values.get("dataset_dir", "data")
    folders = [draft.base, *draft.source.path.resolve().parents[:4]]
    for folder in [parent / name for parent in folders] if isinstance(name, str) else []:
        try:
            info = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(info, dict):
            return info, folder
    return {}, draft.base / (name if isinstance(name, str) else "data")


def _named_datasets(draft: Draft, ours: str, names: Any, info: Mapping[str, Any], folder: Path) -> None:
    theirs = "dataset" if ours == "data.train" else "eval_dataset"
    several = names if isinstance(names, list) else str(names or "").split(",")
    found = [str(name).strip() for name in several if str(name).strip()]
    if not found and ours == "data.train":
        draft.fill_in_data()
    for number, name in enumerate(found):
        key, entry = f"{ours}.{number}", info.get(name)
        if isinstance(entry, dict):
            _from_info(draft, key, name, entry, folder, theirs)
        elif info:
            draft.fill_in(f"{key}.path", f"data/{name}.json", f"`{name}` is not in {folder / 'dataset_info.json'}")
        else:
            draft.fill_in(f"{key}.path", f"data/{name}.json", f"file_name of `{name}` in dataset_info.json")
        limit, own = draft.source.values.get("max_samples"), draft.entries.get(f"{key}.max_samples")
        if isinstance(limit, int) and limit and (own is None or limit < own.value):
            draft.put(f"{key}.max_samples", limit, "max_samples")


def _from_info(draft: Draft, key: str, name: str, entry: Mapping[str, Any], folder: Path, theirs: str) -> None:
    where = f"{theirs} {name}"
    is_preference = "preference.loss_type" in draft.entries
    if entry.get("ranking") and not is_preference:
        raise draft.refuse(f"the data set `{name}` holds preferences, which stage: sft does not train on")
    if isinstance(entry.get("file_name"), str):
        file = folder / entry["file_name"]
        draft.put(f"{key}.path", os.path.relpath(file, draft.base), where, is_path=True)
    elif isinstance(entry.get("hf_hub_url"), str):
        draft.put(f"{key}.path", entry["hf_hub_url"], where, "on the hub")
    else:
        draft.fill_in(f"{key}.path", f"data/{name}.json", f"`{name}` is in no file and not on the hub")
    if key.startswith("data.eval."):
        draft.put(f"{key}.name", name, where)
    for their_key, ours in (
        ("subset", f"{key}.subset"),
        ("split", f"{key}.split"),
        ("num_samples", f"{key}.max_samples"),
    ):
        if entry.get(their_key):
            draft.put(ours, entry[their_key], f"{where}: {their_key}")
    columns, tags = mapping(entry.get("columns")), mapping(entry.get("tags"))
    is_chat = entry.get("formatting", "alpaca") != "alpaca"
    is_messages = is_chat and tags.get("role_tag", "from") == "role"
    ours_format = ("messages" if is_messages else "sharegpt") if is_chat else "alpaca"
    draft.put(f"{key}.format", "preference" if is_preference else ours_format, f"{where}: formatting")
    known = {**_CHAT, "messages": "messages" if is_messages else "conversations"} if is_chat else _ALPACA
    for theirs_column, column in columns.items():
        if theirs_column not in known:
            draft.lose(f"{where}: columns.{theirs_column}", "nothing like it here", column)
        elif column and known[theirs_column] != column:
            draft.put(f"{key}.columns.{known[theirs_column]}", column, f"{where}: columns.{theirs_column}")
    for tag, usual in (
        ("role_tag", "role" if is_messages else "from"),
        ("content_tag", "content" if is_messages else "value"),
    ):
        if is_chat and tags.get(tag, usual) != usual:
            draft.put(f"{key}.columns.{tag.removesuffix('_tag')}", tags[tag], f"{where}: tags.{tag}")


# Axolotl: a list of data sets.

_OVERLONG = {"drop": "drop", "truncate": "truncate", "raise": "error"}


def _report_to(target: str) -> Rule:
    """Return the rule of a switch that reports to ``target``."""

    def rule(draft: Draft, theirs: str, value: Any) -> None:
        if value is True:
            reports(draft, theirs, target)
        else:
            draft.lose_if_on(theirs, "see logging.report_to", value)

    return rule


_AXOLOTL_RULES: dict[str, Rule] = {
    **_SHARED_RULES,
    "revision_of_model": model_revision,
    "excess_length_strategy": choice("data.overlong", _OVERLONG, "see data.overlong"),
    "optimizer": optimizer,
    "val_set_size": held_out_rows,
    "auto_resume_from_checkpoints": resume,
    "use_wandb": _report_to("wandb"),
    "use_tensorboard": _report_to("tensorboard"),
}
_AXOLOTL_DEFAULTS: dict[str, Any] = {
    **_SHARED_DEFAULTS,
    "data.max_length": 512,
    "data.packing": False,
    "training.per_device_train_batch_size": 1,
    "training.num_train_epochs": 1.0,
    "optimizer.lr_scheduler_type": "cosine",
    "optimizer.warmup_steps": 0.03,
}
_AXOLOTL_RL = (None, "dpo", "ipo", "kto", "orpo", "simpo")
_AXOLOTL_PREFERENCES = {
    "rl_beta": "beta",
    "dpo_beta": "beta",
    "orpo_alpha": "beta",
    "dpo_label_smoothing": "label_smoothing",
    "rpo_alpha": "rpo_alpha",
    "cpo_alpha": "rpo_alpha",
    "simpo_gamma": "simpo_gamma",
    "kto_desirable_weight": "desirable_weight",
    "kto_undesirable_weight": "undesirable_weight",
}
_PREFERENCE_FIELDS = {
    "field_prompt": "prompt",
    "field_messages": "messages",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
    "field_completion": "completion",
    "field_label": "label",
    "field_system": "system",
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


def translate_axolotl(draft: Draft) -> None:
    """Fill a draft from a file of Axolotl.

    Raises:
        TranslationError: It asks for other adapters than LoRA, for quantized weights or reinforcement learning.
    """
    values = draft.source.values
    _refuse_adapters(draft)
    sources = _sources(draft, "datasets")
    plain = [
        source for source in listed(values.get("pretraining_dataset")) if isinstance(source, str | Mapping) and source
    ]
    is_pretraining = bool(plain) or (bool(sources) and all(_format(source) == "text" for source in sources))
    is_preference = bool(values.get("rl"))
    if is_preference:
        is_pretraining = False
    else:
        draft.put("task", "pretrain" if is_pretraining else "sft", "pretraining_dataset" if plain else "")
    draft.translate_keys(_AXOLOTL_RULES, values)
    if values.get("adapter"):
        _axolotl_lora(draft)
    _axolotl_combinations(draft)
    if values.get("processor_type"):
        put_images(draft, "trained", "processor_type")
    if is_preference:
        kind = str(values["rl"])
        _put_preference(draft, "sigmoid" if kind == "dpo" else kind, "rl", _AXOLOTL_PREFERENCES)
    elif not is_pretraining:
        theirs = "train_on_inputs" if "train_on_inputs" in values else ""
        draft.put("data.train_on", "all" if values.get("train_on_inputs") else "assistant", theirs)
    for number, source in enumerate(plain or sources):
        _axolotl_dataset(draft, f"data.train.{number}", source, f"datasets[{number}]")
    for number, source in enumerate(_sources(draft, "test_datasets")):
        _axolotl_dataset(draft, f"data.eval.{number}", source, f"test_datasets[{number}]")
    if not plain and not sources:
        draft.fill_in_data()
    if "output_dir" not in draft.entries:
        draft.put_path("output_dir", "./model-out", note="Axolotl's default")
    fill_defaults(draft, _AXOLOTL_DEFAULTS)


def _axolotl_lora(draft: Draft) -> None:
    names = {
        "adapter_name_or_path": "lora_model_dir",
        "r": "lora_r",
        "lora_alpha": "lora_alpha",
        "lora_dropout": "lora_dropout",
        "target_modules": "lora_target_modules",
        "target_parameters": "lora_target_parameters",
        "modules_to_save": "lora_modules_to_save",
        "layers_to_transform": "peft_layers_to_transform",
        "init_lora_weights": "peft_init_lora_weights",
        "use_rslora": "peft_use_rslora",
        "use_dora": "peft_use_dora",
    }
    _put_lora(draft, names, {"r": 8})
    if draft.source.values.get("lora_target_linear") and "lora.adapter_name_or_path" not in draft.entries:
        draft.put("lora.target_modules", "all-linear", "lora_target_linear")
    _keep_precision(draft, "load_in_4bit", "load_in_8bit")


def _refuse_adapters(draft: Draft) -> None:
    values = draft.source.values
    adapter = values.get("adapter")
    if adapter not in (None, "", "lora", "qlora"):
        raise draft.refuse(f"adapter: {adapter} is not supported here", 'There are "lora" and "qlora"')
    if not adapter:
        _refuse_quantized(draft, "load_in_4bit", "load_in_8bit")
    _refuse_quantized(draft, "gptq")
    rl = values.get("rl")
    if kind := (rl not in _AXOLOTL_RL and rl) or values.get("reward_model") or values.get("process_reward_model"):
        name = str(kind).upper() if isinstance(kind, str) else "reward model training"
        raise draft.refuse(f"{name} is not supported here", _OUR_TASKS)


def _sources(draft: Draft, name: str) -> list[Mapping[str, Any]]:
    """Return the data sets in a list, and list everything else in it as lost."""
    found = listed(draft.source.values.get(name))
    for source in found:
        if not isinstance(source, Mapping):
            draft.lose(name, "a data set has a path and a type", source)
    return [source for source in found if isinstance(source, Mapping)]


def _axolotl_combinations(draft: Draft) -> None:
    """Translate keys that depend on each other, or that share one key of ours."""
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
        reports(draft, "wandb_project", ["wandb"])
        draft.put("logging.project", values["wandb_project"], "wandb_project")
    if values.get("wandb_name"):
        draft.put("run_name", str(values["wandb_name"]), "wandb_name")
    if values.get("chat_template_jinja"):
        chat_template(draft, "chat_template_jinja", values["chat_template_jinja"])
    roles = listed(values.get("roles_to_train"))
    if roles and roles not in (["assistant"], ["gpt"], ["assistant", "gpt"], ["gpt", "assistant"]):
        draft.lose("roles_to_train", "see data.train_on", roles)


def _format(source: Any) -> str | None:
    """Return our format of a data set, None for an unknown type."""
    kind = source.get("type", "") if isinstance(source, Mapping) else "pretrain"
    if isinstance(kind, Mapping):
        return "alpaca"
    return _FORMATS.get(str(kind or "alpaca").partition(":")[0].split(".")[0].removesuffix("_w_system"))


def _axolotl_dataset(draft: Draft, key: str, source: Any, theirs: str) -> None:
    """Translate one data set; a bare name is plain text on the hub."""
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
    if "preference.loss_type" in draft.entries:
        draft.put(f"{key}.format", "preference", f"{theirs}.type")
        for name, ours_column in _PREFERENCE_FIELDS.items():
            column = mapping(kind).get(name) or fields.get(name)
            if column and column != ours_column:
                draft.put(f"{key}.columns.{ours_column}", str(column), theirs)
        for name, value in mapping(kind).items():
            if name not in _PREFERENCE_FIELDS and value:
                draft.lose(f"{theirs}.type.{name}", "the model's chat template is used", value)
        return
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


# TRL: `trl sft`, and the recipes that are made with it.

#: Keys that only other trainers of TRL have -> what they train.
_OTHER_TRAINERS = {
    "num_generations": "GRPO",
    "reward_funcs": "GRPO",
    "reward_model_path": "PPO",
}
#: Keys of preference training, by what it is.
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
_TRL_PREFERENCE_NAMES = {
    "beta": "beta",
    "label_smoothing": "label_smoothing",
    "rpo_alpha": "rpo_alpha",
    "cpo_alpha": "rpo_alpha",
    "simpo_gamma": "simpo_gamma",
    "desirable_weight": "desirable_weight",
    "undesirable_weight": "undesirable_weight",
}
_COLUMNS = ("messages", "prompt", "completion", "text")
_TRL_DEFAULTS: dict[str, Any] = {
    **_SHARED_DEFAULTS,
    "data.max_length": 1024,
    "data.packing": False,
    "optimizer.learning_rate": 2e-5,
}


def translate_trl(draft: Draft) -> None:
    """Fill a draft from a file of TRL.

    Raises:
        TranslationError: It asks for quantized weights, or belongs to another trainer than SFTTrainer.
    """
    values = draft.source.values
    _refuse_other_trainers(draft)
    kind = draft.source.task or next((kind for name, kind in _TRL_PREFERENCES.items() if name in values), "sft")
    if kind == "sft":
        draft.put("task", "sft")
        if values.get("loss_type") is not None:
            draft.lose("loss_type", "the loss is the cross-entropy of the trained tokens", values["loss_type"])
    draft.translate_keys(_SHARED_RULES, values)
    if values.get("use_peft"):
        names = {name: name for name in ("lora_alpha", "lora_dropout", "use_rslora", "use_dora")}
        names |= {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"}
        names |= {"target_parameters": "lora_target_parameters"}
        _put_lora(draft, names, {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05})
        _keep_precision(draft, "load_in_4bit", "load_in_8bit")
    draft.fill_in_model()
    if "output_dir" not in draft.entries:
        draft.put_path("output_dir", "trainer_output", note="TRL's default")
    if kind != "sft":
        _trl_preference(draft, kind)
    elif values.get("assistant_only_loss"):
        draft.put("data.train_on", "assistant", "assistant_only_loss")
    elif values.get("completion_only_loss"):
        draft.put("data.train_on", "completion", "completion_only_loss")
    else:
        note = 'TRL\'s default for messages; "assistant" trains on the answers only'
        draft.put("data.train_on", "all", "completion_only_loss" if "completion_only_loss" in values else "", note)
    _trl_datasets(draft)
    changed = {} if kind == "sft" else {"optimizer.learning_rate": 1e-6}
    fill_defaults(draft, {**_TRL_DEFAULTS, **changed})


def _trl_preference(draft: Draft, kind: str) -> None:
    """Fill ``[preference]`` from keys of DPOTrainer, KTOTrainer, ORPOTrainer or CPOTrainer."""
    values = draft.source.values
    default = {"kto": "kto", "orpo": "orpo"}.get(kind, "sigmoid")
    named = [str(each) for each in listed(values.get("loss_type"))] or [default]
    weights = listed(values.get("loss_weights")) or [1.0] * len(named)
    main = [each for each in named if each != "sft"]
    if len(main) != 1 or len(weights) != len(named):
        raise draft.refuse(f"several losses at once ({', '.join(named)}) are not supported here", "Keep one, and sft")
    loss = main[0]
    if kind == "cpo":
        if loss not in ("sigmoid", "simpo"):
            text = f"the loss `{loss}` of CPOTrainer is not supported here"
            raise draft.refuse(text, 'There are loss_type: "sigmoid" and "simpo" of it')
        loss = "cpo" if loss == "sigmoid" else loss
    _put_preference(draft, loss, "loss_type" if "loss_type" in values else draft.source.task, _TRL_PREFERENCE_NAMES)
    by_name = dict(zip(named, weights, strict=True))
    if "sft" in by_name:
        draft.put("preference.rpo_alpha", float(by_name["sft"]) / float(by_name[main[0]]), "loss_weights")
    if kind == "cpo" and "cpo_alpha" not in values:
        draft.put("preference.rpo_alpha", 1.0, note="TRL's default of cpo_alpha")


def _refuse_other_trainers(draft: Draft) -> None:
    values = draft.source.values
    if not values.get("use_peft"):
        _refuse_quantized(draft, "load_in_4bit", "load_in_8bit")
    for name, kind in _OTHER_TRAINERS.items():
        if values.get(name) is not None:
            raise draft.refuse(f"`{name}` is of {kind}, which is not supported here", _OUR_TASKS)
    if draft.source.task == "sft" and "beta" in values:
        raise draft.refuse("`beta` is of preference training, and trl sft is none", "Write trl dpo")


def _trl_datasets(draft: Draft) -> None:
    values = draft.source.values
    mixture = values.get("dataset_mixture") or values.get("datasets")
    inner = mixture.get("datasets") if isinstance(mixture, Mapping) else mixture
    sources = [source for source in listed(inner) if isinstance(source, Mapping)]
    if mixture and not sources:
        draft.lose("datasets", "a data set has an id or a path", mixture)
    for number, source in enumerate(sources):
        _trl_dataset(draft, f"data.train.{number}", source, f"datasets[{number}]")
    if isinstance(mixture, Mapping) and mixture.get("test_split_size"):
        held_out_rows(draft, "dataset_mixture.test_split_size", mixture["test_split_size"])
    mixer = values.get("dataset_mixer")
    if not sources and isinstance(mixer, Mapping):
        for number, (name, weight) in enumerate(mixer.items()):
            _trl_dataset(draft, f"data.train.{number}", {"id": str(name), "weight": weight}, f"dataset_mixer.{name}")
        sources = list(mixer)
    if not sources and values.get("dataset_name"):
        sources = [values["dataset_name"]]
        found = {"id": values["dataset_name"], "config": values.get("dataset_config")}
        found["split"] = values.get("dataset_train_split")
        _trl_dataset(draft, "data.train.0", found, "dataset_name")
        if values.get("dataset_test_split") and values.get("eval_strategy", "no") not in ("no", False):
            _trl_dataset(draft, "data.eval.0", {**found, "split": values["dataset_test_split"]}, "dataset_test_split")
    if not sources:
        draft.fill_in_data()
    column = values.get("dataset_text_field")
    if column and column != "text":
        for number in range(len(sources)):
            draft.put(f"data.train.{number}.columns.text", column, "dataset_text_field")


def _trl_dataset(draft: Draft, key: str, source: Mapping[str, Any], theirs: str) -> None:
    files = source.get("data_files")
    where = source.get("id") or source.get("path")
    if isinstance(files, str) and where in ("json", "csv", "parquet", "arrow", "text", None):
        where = files
    elif files:
        draft.lose(f"{theirs}.data_files", "give the path of the files", files)
    if where:
        draft.put_path(f"{key}.path", where, theirs)
    else:
        draft.fill_in(f"{key}.path", "data/train.jsonl", f"{theirs} names no data")
    subset = f"{key}.subset"
    for their_key, ours in (("config", subset), ("name", subset), ("split", f"{key}.split")):
        value = source.get(their_key)
        if value and value != "default":
            draft.put(ours, value, f"{theirs}.{their_key}")
    if source.get("weight") not in (None, 1, 1.0):
        draft.put(f"{key}.weight", source["weight"], f"{theirs}.weight")
    columns = source.get("columns")
    others = [name for name in columns if name not in _COLUMNS] if isinstance(columns, list) else []
    if others:
        draft.lose(f"{theirs}.columns", "columns that the format does not have are not read", others)
