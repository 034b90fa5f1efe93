"""MegaTrain: nested YAML. Its memory section is what the planner replaces."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatrain.translate import common
from megatrain.translate.draft import Draft, Rule, apply, choice, ignored, lost, mapping, path, same, unneeded

_MODEL: dict[str, Rule] = {
    "name": path("model.model_name_or_path"),
    "dtype": common.loaded_dtype,
    "attn_implementation": common.attention,
    "trust_remote_code": lost("code in a model folder is never run"),
    "device": unneeded("one CUDA device is used where there is one: CUDA_VISIBLE_DEVICES chooses which"),
    "devices": lost("one device trains here"),
}
_DATASET: dict[str, Rule] = {
    **dict.fromkeys(("name", "path", "dataset_dir", "query_field", "response_field"), ignored),
    "max_seq_len": same("data.max_length"),
    "num_workers": unneeded(common.SPEED),
    "system_prompt": lost("write it into the rows"),
}
_TRAINING: dict[str, Rule] = {
    "batch_size": same("training.per_device_train_batch_size"),
    "gradient_accumulation_steps": same("training.gradient_accumulation_steps"),
    "num_steps": same("training.max_steps"),
    "learning_rate": same("optimizer.learning_rate"),
    "weight_decay": same("optimizer.weight_decay"),
    "max_grad_norm": same("optimizer.max_grad_norm"),
    "seed": same("seed"),
    "train_on_prompt": choice("data.train_on", {True: "all", False: None}, "see data.train_on"),
}
_OPTIMIZER: dict[str, Rule] = {
    "type": common.optimizer,
    "beta1": same("optimizer.adam_beta1"),
    "beta2": same("optimizer.adam_beta2"),
    "eps": same("optimizer.adam_epsilon"),
}
_LOGGING: dict[str, Rule] = {
    "log_interval": same("logging.logging_steps"),
    "enable_timing": unneeded("every step is timed"),
}
#: What it does where its file says nothing.
_DEFAULTS: dict[str, Any] = {
    "data.max_length": 1024,
    "training.per_device_train_batch_size": 96,
    "training.max_steps": 100,
    "optimizer.learning_rate": 1e-5,
    "optimizer.weight_decay": 0.01,
    "optimizer.adam_beta2": 0.999,
}


def translate(draft: Draft) -> None:
    """Fill a draft.

    Raises:
        TranslationError: a section is no mapping.
    """
    sections = {
        "model": _MODEL,
        "dataset": _DATASET,
        "training": _TRAINING,
        "optimizer": _OPTIMIZER,
        "logging": _LOGGING,
    }
    values = draft.source.values
    for name, section in values.items():
        if section is not None and not isinstance(section, Mapping):
            raise draft.refuse(f"`{name}` must hold names with values")
    draft.put("task", "sft")
    name = str(mapping(values.get("model")).get("name") or "model").rstrip("/").rpartition("/")[2]
    draft.put_path("output_dir", f"outputs/{name}", note="MegaTrain saves nothing")
    for name, rules in sections.items():
        apply(draft, rules, values.get(name) or {}, f"{name}.")
    for name, section in values.items():
        if name == "memory":
            draft.drop("memory", common.PLANNER, section)
        elif name not in sections:
            draft.lose(name, "nothing like it here", section)
    if "model.model_name_or_path" not in draft.entries:
        draft.fill_in("model.model_name_or_path", "path/to/model", "a Hugging Face folder")
    _data(draft)
    _what_it_does(draft)
    draft.default(_DEFAULTS)


def _data(draft: Draft) -> None:
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
        draft.fill_in("data.train.0.path", "data/train.jsonl", "a file, glob or folder, or the hub name of a data set")


def _what_it_does(draft: Draft) -> None:
    """Write down what MegaTrain has no keys for, and what would be different here."""
    note = "as MegaTrain trains"
    if "data.train_on" not in draft.entries:
        draft.put("data.train_on", "last_assistant", note=f"{note}; assistant trains on all answers")
    draft.put("data.packing", False, note=f"{note}, which pads every row; true is faster")
    draft.put("optimizer.lr_scheduler_type", "constant", note=note)
    draft.put("optimizer.weight_decay_exclude", [], note=f"{note}: norms and biases decay too")
