"""TRL: flat YAML of ``trl sft`` and of the recipes that are made with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatrain.translate import common
from megatrain.translate.draft import Draft, Rule, apply, ignored, listed, lost, path, same, unneeded

#: Keys that only other trainers of TRL have -> what they train.
_OTHER_TRAINING = {
    "beta": "preference training (DPO, KTO, ORPO)",
    "max_prompt_length": "preference training (DPO, KTO, ORPO)",
    "num_generations": "GRPO",
    "reward_funcs": "GRPO",
    "reward_model_path": "PPO",
    "max_completion_length": "preference training or GRPO",
}
_IGNORED = (
    "use_peft", "load_in_4bit", "load_in_8bit", "dataset_name", "dataset_config", "dataset_train_split",
    "dataset_test_split", "dataset_text_field", "dataset_mixture", "dataset_mixer", "dataset_splits", "datasets",
    "dataset_configs", "completion_only_loss", "assistant_only_loss", "lora_r", "lora_alpha", "lora_dropout",
    "lora_target_modules", "lora_task_type", "lora_modules_to_save", "streaming", "dataset_streaming",
)  # fmt: skip

RULES: dict[str, Rule] = {
    **common.RULES,
    **dict.fromkeys(_IGNORED, ignored),
    "model_name_or_path": path("model.model_name_or_path"),
    "max_length": same("data.max_length"),
    "max_seq_length": same("data.max_length"),
    "packing": same("data.packing"),
    "packing_strategy": unneeded("documents are packed best fit, and never attend to each other"),
    "eval_packing": unneeded("eval sets are packed as the training data is"),
    "eos_token": lost("write it into the tokenizer's files"),
    "pad_token": unneeded("padding is never attended to or trained"),
    "dataset_kwargs": lost("see [[data.train]]"),
    "dataset_batch_size": unneeded(common.SPEED),
    "loss_type": lost("the loss is the cross-entropy of the trained tokens"),
    "model_init_kwargs": lost("see [model] and [precision]"),
}
_COLUMNS = ("messages", "prompt", "completion", "text")
_DEFAULTS: dict[str, Any] = {
    **common.DEFAULTS,
    "data.max_length": 1024,
    "data.packing": False,
    "optimizer.learning_rate": 2e-5,
}


def translate(draft: Draft) -> None:
    """Fill a draft.

    Raises:
        TranslationError: it asks for LoRA, quantized weights, or is of another trainer than SFTTrainer.
    """
    values = draft.source.values
    _refuse_other_training(draft)
    draft.put("task", "sft")
    apply(draft, RULES, values)
    if "model.model_name_or_path" not in draft.entries:
        draft.fill_in("model.model_name_or_path", "path/to/model", "a Hugging Face folder")
    if "output_dir" not in draft.entries:
        draft.put_path("output_dir", "trainer_output", note="TRL's default")
    if values.get("assistant_only_loss"):
        draft.put("data.train_on", "assistant", "assistant_only_loss")
    elif values.get("completion_only_loss"):
        draft.put("data.train_on", "completion", "completion_only_loss")
    else:
        note = 'TRL\'s default for messages; "assistant" trains on the answers only'
        draft.put("data.train_on", "all", "completion_only_loss" if "completion_only_loss" in values else "", note)
    _datasets(draft)
    common.fill_defaults(draft, _DEFAULTS)


def _refuse_other_training(draft: Draft) -> None:
    values = draft.source.values
    if values.get("use_peft"):
        raise draft.refuse(
            "use_peft (LoRA) is not supported: here all parameters are trained, those of model.freeze excepted",
            "Remove the key from that file to translate it as full training",
        )
    for name in ("load_in_4bit", "load_in_8bit"):
        if values.get(name):
            raise draft.refuse(f"{name}: quantized weights cannot be trained in full precision", "Remove it")
    for name, kind in _OTHER_TRAINING.items():
        if values.get(name) is not None:
            raise draft.refuse(f"`{name}` is of {kind}, which is not supported here", 'There are "sft" and "pretrain"')


def _datasets(draft: Draft) -> None:
    values = draft.source.values
    mixture = values.get("dataset_mixture") or values.get("datasets")
    inner = mixture.get("datasets") if isinstance(mixture, Mapping) else mixture
    sources = [source for source in listed(inner) if isinstance(source, Mapping)]
    if mixture and not sources:
        draft.lose("datasets", "a data set has an id or a path", mixture)
    for number, source in enumerate(sources):
        _dataset(draft, f"data.train.{number}", source, f"datasets[{number}]")
    if isinstance(mixture, Mapping) and mixture.get("test_split_size"):
        common.held_out_rows(draft, "dataset_mixture.test_split_size", mixture["test_split_size"])
    mixer = values.get("dataset_mixer")
    if not sources and isinstance(mixer, Mapping):
        for number, (name, weight) in enumerate(mixer.items()):
            _dataset(draft, f"data.train.{number}", {"id": str(name), "weight": weight}, f"dataset_mixer.{name}")
        sources = list(mixer)
    if not sources and values.get("dataset_name"):
        sources = [values["dataset_name"]]
        found = {"id": values["dataset_name"], "config": values.get("dataset_config")}
        found["split"] = values.get("dataset_train_split")
        _dataset(draft, "data.train.0", found, "dataset_name")
        if values.get("dataset_test_split") and values.get("eval_strategy", "no") not in ("no", False):
            _dataset(draft, "data.eval.0", {**found, "split": values["dataset_test_split"]}, "dataset_test_split")
    if not sources:
        draft.fill_in("data.train.0.path", "data/train.jsonl", "a file, glob or folder, or the hub name of a data set")
    column = values.get("dataset_text_field")
    if column and column != "text":
        for number in range(len(sources)):
            draft.put(f"data.train.{number}.columns.text", column, "dataset_text_field")


def _dataset(draft: Draft, key: str, source: Mapping[str, Any], theirs: str) -> None:
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
