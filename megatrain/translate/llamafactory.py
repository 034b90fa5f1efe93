"""LLaMA-Factory: flat YAML, data sets by their names in ``dataset_info.json``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatrain.translate import common
from megatrain.translate.draft import Draft, Rule, apply, ignored, lost, mapping, path, same, unneeded

_STAGES = {"sft": "sft", "pt": "pretrain"}
_OTHER_STAGES = {"dpo": "DPO", "kto": "KTO", "ppo": "PPO", "rm": "reward model training", "orpo": "ORPO"}
#: Its name of a column -> ours.
_ALPACA = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "history": "history",
    "system": "system",
    "tools": "tools",
}
_CHAT = {"system": "system", "tools": "tools"}

RULES: dict[str, Rule] = {
    **common.RULES,
    **dict.fromkeys(
        (
            "stage", "finetuning_type", "dataset", "eval_dataset", "dataset_dir", "train_on_prompt", "mask_history",
            "packing", "neat_packing", "max_samples", "media_dir",
        ),
        ignored,
    ),
    "model_name_or_path": path("model.model_name_or_path"),
    "cutoff_len": same("data.max_length"),
    "flash_attn": common.attention,
    "attn": common.attention,
    "val_size": common.held_out_rows,
    "template": unneeded(
        "the model's own chat template is used: look at it with `megatrain-tier data preview`"
    ),
    "pure_bf16": common.half_precision,
    "upcast_layernorm": unneeded("weights keep 32 bits"),
    "upcast_lmhead_output": unneeded("the loss is computed in float32"),
    "use_unsloth": unneeded(common.SPEED),
    "tokenized_path": unneeded("tokens are cached by their contents, see data.cache_dir"),
    "rope_scaling": lost("write rope_parameters into config.json of the model"),
    "streaming": unneeded("tokens are read from files, never held in RAM as a whole"),
    "buffer_size": ignored,
    "cache_dir": unneeded("models are folders on this machine"),
    "hf_hub_token": ignored,
    "ray_run_name": ignored,
    "swanlab_project": ignored,
    "interleave_probs": lost("data.train.N.weight says how often the rows of a source are used in an epoch"),
    "mix_strategy": lost("sources are put together and shuffled; data.train.N.weight changes the shares"),
    "freeze_vision_tower": unneeded("what reads images is never trained"),
    "freeze_multi_modal_projector": unneeded("what reads images is never trained"),
    "image_max_pixels": unneeded("text models only"),
    "video_max_pixels": unneeded("text models only"),
    **dict.fromkeys(
        ("use_galore", "use_badam", "use_apollo", "use_adam_mini", "use_muon"), lost("see optimizer.optim")
    ),
}  # fmt: skip
_DEFAULTS: dict[str, Any] = {**common.DEFAULTS, "data.max_length": 2048}


def translate(draft: Draft) -> None:
    """Fill a draft.

    Raises:
        TranslationError: it asks for LoRA, for preferences, or for another kind of training that is not done here.
    """
    values = draft.source.values
    _refuse_other_training(draft)
    is_pretraining = values.get("stage") == "pt"
    draft.put("task", "pretrain" if is_pretraining else "sft", "stage")
    apply(draft, RULES, {name: value for name, value in values.items() if not name.startswith(("lora_", "generating"))})
    if "model.model_name_or_path" not in draft.entries:
        draft.fill_in("model.model_name_or_path", "path/to/model", "a Hugging Face folder")
    _packing(draft, is_pretraining)
    if not is_pretraining:
        _train_on(draft)
    info, folder = _dataset_info(draft)
    _datasets(draft, "data.train", values.get("dataset"), info, folder)
    if values.get("eval_dataset"):
        _datasets(draft, "data.eval", values["eval_dataset"], info, folder)
    common.fill_defaults(draft, _DEFAULTS)


def _refuse_other_training(draft: Draft) -> None:
    values = draft.source.values
    stage = values.get("stage", "sft")
    if not isinstance(stage, str) or stage not in _STAGES:
        kind = _OTHER_STAGES.get(str(stage), f"stage: {stage}")
        raise draft.refuse(f"{kind} is not supported here", 'There are "sft" and "pretrain"')
    kind = values.get("finetuning_type", "lora")
    if kind != "full":
        said = f"finetuning_type: {kind}" if "finetuning_type" in values else "LLaMA-Factory's default is LoRA, which"
        raise draft.refuse(
            f"{said} is not supported: here all parameters are trained, those of model.freeze excepted",
            "Write finetuning_type: full into that file to translate it as full training",
        )
    if values.get("quantization_bit"):
        raise draft.refuse("quantization_bit: quantized weights cannot be trained in full precision", "Remove it")


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
    """Return ``dataset_info.json`` and its folder, searched from the current folder and from the config's upward."""
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


def _datasets(draft: Draft, ours: str, names: Any, info: Mapping[str, Any], folder: Path) -> None:
    theirs = "dataset" if ours == "data.train" else "eval_dataset"
    several = names if isinstance(names, list) else str(names or "").split(",")
    found = [str(name).strip() for name in several if str(name).strip()]
    if not found and ours == "data.train":
        draft.fill_in("data.train.0.path", "data/train.jsonl", "a file, glob or folder, or the hub name of a data set")
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
    if entry.get("ranking"):
        raise draft.refuse(f"the data set `{name}` holds preferences, which are not trained on here")
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
    draft.put(
        f"{key}.format", ("messages" if is_messages else "sharegpt") if is_chat else "alpaca", f"{where}: formatting"
    )
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
