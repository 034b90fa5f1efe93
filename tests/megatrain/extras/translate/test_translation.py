"""Realistic configs of other tools are translated value by value, and the results load."""

from __future__ import annotations

import contextlib
import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megatrain.base.other_tools import KEYS as TABLES
from megatrain.base.other_tools import Row, Tool
from megatrain.config import load_config
from megatrain.config.schema import RunConfig
from megatrain.extras.translate.draft import OmittedKey, Translation
from megatrain.extras.translate.read import TranslationError
from megatrain.extras.translate.translate import format_omitted_key, translate_file

#: One folder for each case, with another tool's file ``theirs`` and its expected translation ``ours.toml``.
WHOLE = Path(__file__).parent / "whole"
INFO = json.loads((WHOLE / "llama_factory_full/data/dataset_info.json").read_text())
TRL = (WHOLE / "trl_sft/theirs.yaml").read_text()


@pytest.mark.parametrize("case", sorted(folder.name for folder in WHOLE.iterdir()))
def test_every_line_of_a_translation(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All values, comments and omitted keys are compared, so a change in a rule changes one of the expected files."""
    monkeypatch.chdir(WHOLE / case)
    (theirs,) = Path().glob("theirs.*")
    translated = translate_file(theirs).toml.replace(str(WHOLE / case), "WORKING_FOLDER")
    assert translated == Path("ours.toml").read_text(encoding="utf-8")
    load_config("ours.toml")


def translate(folder: Path, text: str | dict[str, Any], name: str = "") -> tuple[Translation, RunConfig]:
    """Write another tool's config to a folder and translate it. Return the translation and the loaded result."""
    path = folder / (name or ("theirs.json" if isinstance(text, dict) else "theirs.yaml"))
    path.write_text(json.dumps(text) if isinstance(text, dict) else text, encoding="utf-8")
    translation = translate_file(path, folder=folder, base=folder)
    out = folder / "ours.toml"
    out.write_text(translation.toml, encoding="utf-8")
    assert translation.toml.isascii()
    return translation, load_config(out).config


def lost(translation: Translation) -> set[str]:
    return {left.tool_key for left in translation.lost_keys}


def unneeded(translation: Translation) -> set[str]:
    return {left.tool_key for left in translation.unneeded_keys}


@pytest.mark.parametrize(
    ("lines", "optim", "state_dtype"),
    [
        ("use_muon: true", "muon", "float32"),
        ("use_muon: true\noptim: adamw_8bit", "muon", "float32"),
        ("optim: adamw_8bit\nuse_muon: false", "adamw", "int8"),
    ],
)
def test_llama_factory_muon(tmp_path: Path, lines: str, optim: str, state_dtype: str) -> None:
    text = f"model_name_or_path: a/b\nfinetuning_type: full\ndataset: x\noutput_dir: o\n{lines}\n"
    translation, config = translate(tmp_path, text)
    assert (config.optimizer.optim, config.optimizer.state_dtype) == (optim, state_dtype)
    assert config.optimizer.muon_adjust_lr == "match_rms_adamw" and not lost(translation)


@pytest.mark.parametrize(
    ("line", "task", "train_on", "packing"),
    [
        ("stage: sft", "sft", "assistant", False),
        ("stage: sft\ntrain_on_prompt: true\nneat_packing: true", "sft", "all", True),
        ("stage: sft\npacking: true", "sft", "assistant", True),
        ("stage: pt", "pretrain", "all", "concat"),
        ("stage: pt\nneat_packing: true", "pretrain", "all", True),
        ("stage: pt\npacking: false", "pretrain", "all", False),
    ],
)
def test_llama_factory_masks_and_packing(tmp_path: Path, line: str, task: str, train_on: str, packing: object) -> None:
    text = f"model_name_or_path: a/b\nfinetuning_type: full\ndataset: x\noutput_dir: o\n{line}\n"
    _, config = translate(tmp_path, text)
    assert (config.task, config.data.train_on, config.data.packing) == (task, train_on, packing)
    assert (config.data.max_length, config.optimizer.learning_rate) == (2048, 5e-5)
    assert (config.optimizer.lr_scheduler_type, config.training.num_train_epochs) == ("linear", 3.0)


EVALUATION = "eval_strategy: steps\neval_steps: 50\nper_device_eval_batch_size: 2\n"


def test_rows_to_evaluate_on(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    info = {**INFO, "hub": {"hf_hub_url": "org/hub", "subset": "en"}}
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    text = f"model_name_or_path: a/b\nfinetuning_type: full\ndataset: chats\noutput_dir: o\n{EVALUATION}"
    _, config = translate(tmp_path, f"{text}eval_dataset: questions,hub\n")
    assert (config.evaluation.eval_strategy, config.evaluation.eval_steps) == ("steps", 50)
    questions, hub = config.data.eval
    assert (questions.name, questions.format, hub.name, hub.subset) == ("questions", "alpaca", "hub", "en")
    _, config = translate(tmp_path, f"{text}val_size: 0.1\n")
    assert (config.data.val_size, config.evaluation.eval_strategy, config.evaluation.eval_steps) == (0.1, "steps", 50)
    translation, config = translate(tmp_path, f"{text}val_size: 0.0\n")
    assert {"eval_strategy", "eval_steps", "per_device_eval_batch_size"} <= lost(translation)
    assert (config.data.val_size, config.evaluation.eval_strategy) == (None, "no")
    text = f"model_name_or_path: a/b\ndataset_name: c/d\ndataset_config: en\ndataset_test_split: test\n{EVALUATION}"
    _, config = translate(tmp_path, text)
    assert (config.data.eval[0].split, config.data.eval[0].subset, config.data.train[0].subset) == ("test", "en", "en")
    text = "base_model: a/b\nlearning_rate: 1\ntest_datasets: [{path: e.jsonl, type: alpaca}]\neval_steps: 7\n"
    _, config = translate(tmp_path, text)
    assert (config.data.eval[0].path, config.evaluation.eval_steps) == (str(tmp_path / "e.jsonl"), 7)


@pytest.mark.parametrize(
    ("sources", "task", "format_", "columns"),
    [
        ("datasets: [{path: a/b, type: completion, field: body}]", "pretrain", "text", {"text": "body"}),
        ("pretraining_dataset: {path: a/b, name: en, text_column: doc}", "pretrain", "text", {"text": "doc"}),
        ("pretraining_dataset: [a/b]", "pretrain", "text", {}),
        ("datasets: [{path: a/b, type: sharegpt}]", "sft", "sharegpt", {}),
        ("datasets: [{path: a/b, type: chat_template}]", "sft", "messages", {}),
        ("datasets: [{path: a/b, type: alpaca_w_system.load}]", "sft", "alpaca", {}),
        ("datasets: [{path: a/b, type: oasst}]", "sft", "auto", {}),
        (
            "datasets: [{path: a/b, type: chat_template, field_messages: turns, message_field_role: who}]",
            "sft", "messages", {"messages": "turns", "role": "who"},
        ),
    ],
)  # fmt: skip
def test_axolotl_data(tmp_path: Path, sources: str, task: str, format_: str, columns: dict[str, str]) -> None:
    _, config = translate(tmp_path, f"base_model: x/y\nlearning_rate: 1e-4\n{sources}\n")
    source = config.data.train[0]
    assert (config.task, source.format, dict(source.columns)) == (task, format_, columns)
    assert (config.data.max_length, config.data.packing) == (512, False)
    assert config.optimizer.lr_scheduler_type == "cosine"


@pytest.mark.parametrize(
    ("line", "train_on"),
    [("assistant_only_loss: true", "assistant"), ("completion_only_loss: true", "completion"), ("seed: 1", "all")],
)
def test_trl_masks(tmp_path: Path, line: str, train_on: str) -> None:
    text = f"model_name_or_path: a/b\ndataset_name: c/d\ndataset_text_field: body\noutput_dir: o\n{line}\n"
    _, config = translate(tmp_path, text)
    assert config.data.train_on == train_on
    assert (config.optimizer.learning_rate, config.data.max_length) == (2e-5, 1024)
    assert dict(config.data.train[0].columns) == {"text": "body"}


@pytest.mark.parametrize(
    ("values", "batch"),
    [
        ({"train_batch_size": 32}, (32, 1)),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 4}, (8, 4)),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}, (4, 4)),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}, (8, 1)),
    ],
)
def test_deepspeed_batches(tmp_path: Path, values: dict[str, Any], batch: tuple[int, int]) -> None:
    _, config = translate(tmp_path, {"zero_optimization": {"stage": 2}, **values})
    assert (config.training.per_device_train_batch_size, config.training.gradient_accumulation_steps) == batch


#: Case -> part of a ds_config, keys that are listed as lost, and the translated values.
DEEPSPEED_GAPS: dict[str, tuple[dict[str, Any], set[str], dict[str, Any]]] = {
    "decay coupled with the gradient": (
        {"optimizer": {"type": "Adam", "params": {"lr": 1e-4, "adam_w_mode": False, "bias_correction": False}}},
        {"optimizer.params.adam_w_mode", "optimizer.params.bias_correction"},
        # Defaults of DeepSpeed 0.19.6: a constant rate without a scheduler, float32 without bf16, and clipping at 1.
        {
            "optimizer.learning_rate": 1e-4, "optimizer.lr_scheduler_type": "constant", "optimizer.max_grad_norm": 1.0,
            "precision.compute_dtype": "float32",
        },
    ),
    "as AdamW": (
        {"optimizer": {"type": "Adam", "params": {"lr": 1e-4, "adam_w_mode": True, "bias_correction": True}}},
        set(),
        {"optimizer.optim": "adamw", "optimizer.weight_decay": 0.0},
    ),
    "cosine": (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {"total_num_steps": 10, "warmup_num_steps": 2, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.2},
            },
        },
        {f"scheduler.params.{name}" for name in ("warmup_min_ratio", "cos_min_ratio", "warmup_type")},
        {"optimizer.lr_scheduler_type": "cosine", "optimizer.warmup_steps": 2, "optimizer.learning_rate": 1e-4},
    ),
    "cosine with DeepSpeed's defaults": (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {"total_num_steps": 10, "warmup_num_steps": 2, "warmup_min_ratio": 0},
            },
        },
        {f"scheduler.params.{name}" for name in ("cos_min_ratio", "warmup_type")},
        {"optimizer.lr_scheduler_type": "cosine", "optimizer.warmup_steps": 2},
    ),
    "linear warm-up": (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear", "warmup_max_lr": None}},
        },
        set(),
        {"optimizer.lr_scheduler_type": "constant_with_warmup", "optimizer.warmup_steps": 1000,
         "optimizer.learning_rate": 1e-4},
    ),
    "auto": (
        {"gradient_clipping": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": None}}},
        {"gradient_clipping", "optimizer.params.lr"},
        {},
    ),
    "unknown keys": (
        {
            "gradient_clipping": 0.0,
            "bf16": {"enabled": True, "immediate_grad_update": True},
            "fp16": {"enabled": False, "loss_scale": 4},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}, "legacy_fusion": True},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear", "new": [1]}, "other": 1},
        },
        {"bf16.immediate_grad_update", "optimizer.legacy_fusion", "scheduler.params.new", "scheduler.other"},
        {"optimizer.max_grad_norm": 0.0, "precision.compute_dtype": "bfloat16"},
    ),
    "without optimizer": ({"bf16": {"enabled": True}}, {"optimizer"}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", DEEPSPEED_GAPS)
def test_every_key_of_deepspeed_is_translated_or_listed(tmp_path: Path, case: str) -> None:
    values, gaps, ours = DEEPSPEED_GAPS[case]
    translation, _ = translate(tmp_path, {"train_micro_batch_size_per_gpu": 2, **values})
    assert lost(translation) == gaps
    assert {key: translation.entries[key].value for key in ours} == ours


def test_a_nested_table_is_not_translated_because_one_key_is(tmp_path: Path) -> None:
    """If only some keys of an Axolotl data source have equivalents, each of the other keys is listed as lost."""
    text = "base_model: a/b\ndatasets: [{path: c/d, type: completion, field: body, preprocess_shards: 3, shards: 2}]\n"
    translation, config = translate(tmp_path, text)
    assert dict(config.data.train[0].columns) == {"text": "body"}
    named = [left.tool_key for left in translation.lost_keys]
    assert sorted(named) == ["datasets[0].preprocess_shards", "datasets[0].shards"], "each key has one answer"


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "bf16", "fp16", "optimizer"])
def test_a_section_of_deepspeed_that_is_no_table_is_listed(tmp_path: Path, name: str) -> None:
    translation, _ = translate(tmp_path, {"train_micro_batch_size_per_gpu": 2, name: True})
    assert name in lost(translation)


def test_unneeded_deepspeed_section_may_be_auto(tmp_path: Path) -> None:
    translation, _ = translate(tmp_path, {"train_micro_batch_size_per_gpu": 2, "zero_optimization": "auto"})
    assert "zero_optimization" in unneeded(translation)


@pytest.mark.parametrize(
    ("values", "gaps", "rows"),
    [
        ({"train_batch_size": "8", "scheduler": "WarmupLR"}, {"scheduler"}, (8, 1)),
        ({"train_batch_size": "hm", "scheduler": {"type": "WarmupLR", "params": 3}},
         {"train_batch_size", "scheduler.params", "scheduler.params.warmup_type"}, (8, 1)),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": "hm"}, {"train_micro_batch_size_per_gpu"}, (8, 1)),
        ({"train_batch_size": "8", "train_micro_batch_size_per_gpu": "2"}, set(), (2, 4)),
        ({"train_batch_size": 8, "wandb": {"enabled": "hm"}}, {"wandb.enabled"}, (8, 1)),
    ],
)  # fmt: skip
def test_deepspeed_values_of_the_wrong_kind(
    tmp_path: Path, values: dict[str, Any], gaps: set[str], rows: tuple[int, int]
) -> None:
    translation, config = translate(tmp_path, {"zero_optimization": {"stage": 2}, **values})
    assert lost(translation) - {"optimizer"} == gaps
    assert (config.training.per_device_train_batch_size, config.training.gradient_accumulation_steps) == rows


@pytest.mark.parametrize(
    ("text", "gaps"),
    [
        ("base_model: a/b\ndatasets: [{path: a/b, type: alpaca, foo: 3}, text]\n", {"datasets[0].foo", "datasets[1]"}),
        ("base_model: a/b\ndatasets: text\n", {"datasets"}),
        ("base_model: a/b\ndatasets: [{path: a, type: chat_template, message_property_mappings: 3}]\n",
         {"datasets[0].message_property_mappings"}),
        ("base_model: a/b\nlr_scheduler_kwargs: 0\ncosine_min_lr_ratio: 0.1\n", {"lr_scheduler_kwargs"}),
        ("base_model: a/b\nwarmup_steps: 5\nwarmup_ratio: text\n", {"warmup_ratio"}),
        ("model_name_or_path: a\nmax_length: 8\ndatasets: [{id: a/b, foo: 3}, text]\n",
         {"datasets[0].foo", "datasets[1]"}),
        ("model_name_or_path: a\nmax_length: 8\ndataset_mixture: 3\n", {"dataset_mixture"}),
        ("model_name_or_path: a\nmax_length: 8\ndataset_mixture: {datasets: [text]}\n",
         {"dataset_mixture.datasets[0]"}),
        ("model_name_or_path: a\nmax_length: 8\ndataset_name: b/c\ndataset_config: 3\ndataset_mixer: text\n",
         {"dataset_config", "dataset_mixer"}),
        ("model_name_or_path: a\nmax_length: 8\nbeta: 1\nloss_weights: [2]\n", {"loss_weights"}),
        ("model_name_or_path: a\nstage: sft\ndataset: x\nmax_samples: text\ndataset_dir: [x]\n",
         {"max_samples", "dataset_dir"}),
    ],
)  # fmt: skip
def test_invalid_value_is_lost_without_hiding_others(tmp_path: Path, text: str, gaps: set[str]) -> None:
    translation, _ = translate(tmp_path, text)
    assert lost(translation) == gaps


def test_lora_rank_given_as_a_string_sets_the_default_alpha(tmp_path: Path) -> None:
    _, config = translate(tmp_path, 'model_name_or_path: a\nstage: sft\nlora_rank: "32"\n')
    assert (config.lora.r, config.lora.lora_alpha) == (32, 64)


WRONG_KINDS: tuple[Any, ...] = ("hm", "8", 3, 0.5, [7, "x"], {"inner": 3}, True)
#: Tool -> a config that makes the translation read the keys that have their own rules.
FULL: dict[Tool, dict[str, Any]] = {
    "llamafactory": {"model_name_or_path": "a/b", "stage": "dpo", "dataset": "x", "output_dir": "o", "warmup_steps": 3},
    "axolotl": {"base_model": "a/b", "adapter": "lora", "rl": "dpo", "datasets": [{"path": "a/b", "type": "alpaca"}],
                "wandb_project": "x", "warmup_steps": 3},
    "trl": {"model_name_or_path": "a/b", "use_peft": True, "dataset_name": "c/d", "beta": 0.1, "warmup_ratio": 0.5},
    "deepspeed": {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8,
                  "scheduler": {"type": "WarmupLR", "params": {}}, "wandb": {"enabled": True}, "tensorboard": {}},
    "megatrain": {"model": {"name": "a"}, "dataset": {"path": "b"}, "training": {}},
}  # fmt: skip
#: Nested keys of DeepSpeed that have their own translation rules.
INSIDE = [
    "optimizer", "optimizer.params", "scheduler.type", "scheduler.params", "scheduler.params.warmup_num_steps",
    "scheduler.params.total_num_steps", "scheduler.params.warmup_max_lr", "scheduler.params.warmup_type", "bf16",
    "fp16", "wandb.enabled", "wandb.project", "tensorboard.enabled",
]  # fmt: skip
#: Keys that name a folder for another key, switch a table on, or add to the value of another key.
SWITCHES = {"use_peft", "dataset_dir", "use_wandb", "use_tensorboard"}


@pytest.mark.parametrize("tool", FULL)
def test_no_value_of_the_wrong_kind_is_silently_dropped(tmp_path: Path, tool: Tool) -> None:
    """Each key is translated or listed, unless its value means this project's default or the file is refused."""
    rows = TABLES[tool]
    path = tmp_path / "theirs.json"
    is_nested = tool in ("deepspeed", "megatrain")
    for number, key in enumerate([*rows, *(INSIDE if tool == "deepspeed" else ())]):
        if key in SWITCHES or ("." in key and not is_nested):
            continue
        is_simple = key in rows and rows[key].conversion in ("copy", "path", "choice", "lost", "unneeded")
        kinds = WRONG_KINDS[number % 7 :][:1] if is_simple and not is_nested else WRONG_KINDS
        for value in kinds:
            values = copy.deepcopy(FULL[tool])
            *above, last = key.split(".")
            at = values
            for part in above:
                at = at.setdefault(part, {})
            at[last] = value
            path.write_text(json.dumps(values))
            try:
                found = translate_file(path, tool, base=tmp_path)
            except TranslationError:
                continue
            names = [entry.tool_key for entry in found.entries.values()]
            names += [left.tool_key for left in (*found.lost_keys, *found.unneeded_keys)]
            names += [entry.note for entry in found.placeholders.values()] if key.endswith("dataset") else []
            means_the_same = key in rows and is_same(rows[key], value)
            assert means_the_same or any(is_about(name, key, value) for name in names), (key, value)


def is_about(name: str, key: str, value: Any) -> bool:
    """Return whether a name in the result refers to a key, a table around it, a key inside it, or its value."""
    inside = name.startswith((f"{key}.", f"{key}[")) or key.startswith(f"{name}.")
    first = value[0] if isinstance(value, list) else value
    return name == key or (bool(name) and inside) or f"`{first}`" in name


def is_same(row: Row, value: Any) -> bool:
    """Return whether a value of the other tool's key means this project's default."""
    return isinstance(value, str | bool | int | float) and row.choices.get(value, "") is None


@pytest.mark.parametrize("order", [1, -1])
def test_warmup_ratio_is_used_if_warmup_steps_is_zero(tmp_path: Path, order: int) -> None:
    """Transformers ignores ``warmup_steps: 0``, whichever of the two keys comes first in the file."""
    lines = ["warmup_steps: 0", "warmup_ratio: 0.1"][::order]
    _, config = translate(tmp_path, "\n".join(["base_model: a/b", "learning_rate: 1e-4", *lines]))
    assert config.optimizer.warmup_steps == 0.1


def test_null_means_the_default_of_the_source_tool(tmp_path: Path) -> None:
    _, config = translate(tmp_path, "model_name_or_path: a\nstage: null\nfinetuning_type: null\ncutoff_len: 8\n")
    assert config.task == "sft" and config.lora.is_on


def test_a_table_of_pretraining_data_without_a_type_is_plain_text(tmp_path: Path) -> None:
    text = "base_model: a/b\nlearning_rate: 1e-4\npretraining_dataset: [{path: c/d, split: train}]\n"
    translation, config = translate(tmp_path, text)
    assert (config.task, config.data.train[0].format, lost(translation)) == ("pretrain", "text", set())


def test_first_of_several_trl_data_files_becomes_the_path(tmp_path: Path) -> None:
    text = "model_name_or_path: a\nmax_length: 8\ndatasets: [{path: json, data_files: [one.jsonl, two.jsonl]}]\n"
    translation, config = translate(tmp_path, text)
    assert Path(config.data.train[0].path).name == "one.jsonl"
    assert lost(translation) == {"datasets[0].data_files"}, "the second file"


LORA: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "LLaMA-Factory": (
        "model_name_or_path: a\noutput_dir: o\nfinetuning_type: lora\nlora_rank: 16\nlora_target: all\nuse_dora: true\n"
        "additional_target: lm_head,norm\nquantization_bit: 4\npissa_init: true\n",
        {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", "modules_to_save": ("lm_head", "norm"),
         "use_dora": True},
        ["pissa_init", "quantization_bit"],
    ),
    "LLaMA-Factory's default": (
        "model_name_or_path: a\noutput_dir: o\nstage: sft\ncutoff_len: 5\nlora_target: q_proj,v_proj\nlora_alpha: 4\n",
        {"r": 8, "lora_alpha": 4.0, "target_modules": ("q_proj", "v_proj")},
        [],
    ),
    "LLaMA-Factory, an adapter": (
        "model_name_or_path: a\noutput_dir: o\nstage: sft\nlora_rank: 16\nadapter_name_or_path: x,y\n"
        "lora_dropout: 0.1\n",
        {"adapter_name_or_path": "y", "lora_dropout": 0.1, "r": 0},
        ["adapter_name_or_path"],
    ),
    "Axolotl": (
        "base_model: a\nadapter: qlora\nload_in_4bit: true\nlora_r: 32\nlora_alpha: 16\nlora_dropout: 0.05\n"
        "lora_target_linear: true\nlora_modules_to_save: [embed_tokens, lm_head]\n",
        {"r": 32, "lora_alpha": 16.0, "lora_dropout": 0.05, "target_modules": "all-linear",
         "modules_to_save": ("embed_tokens", "lm_head")},
        ["load_in_4bit"],
    ),
    "TRL": (
        "model_name_or_path: a\ndataset_name: b\nuse_peft: true\nlora_r: 4\nlora_target_modules: [q_proj, k_proj]\n",
        {"r": 4, "lora_alpha": 32.0, "lora_dropout": 0.05, "target_modules": ("q_proj", "k_proj")},
        [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", list(LORA))
def test_lora(tmp_path: Path, case: str) -> None:
    text, expected, gone = LORA[case]
    (tmp_path / "theirs.yaml").write_text(text)
    translation, config = translate(tmp_path, yaml.safe_load(text))
    found = config.lora.model_dump()
    shown = {key: Path(found[key]).name if key == "adapter_name_or_path" else found[key] for key in expected}
    assert shown == expected and config.lora.is_on
    assert sorted(lost(translation)) == gone


REFUSED = {
    "freeze": (
        "model_name_or_path: a\nfinetuning_type: freeze\n",
        r'^[^ ]+/theirs\.yaml: finetuning_type: freeze is not supported here\. Supported: "full" and "lora"$',
    ),
    "PPO": ("model_name_or_path: a\nstage: ppo\nfinetuning_type: full\n", "PPO is not supported"),
    "a loss": ("model_name_or_path: a\nstage: dpo\nfinetuning_type: full\npref_loss: kto_pair\n", "`kto_pair`"),
    "quantized": ("stage: sft\nfinetuning_type: full\nquantization_bit: 4\n", "quantized weights"),
    "adapter": ("base_model: a\nadapter: llama-adapter\n", "adapter: llama-adapter is not supported"),
    "4 bit": ("base_model: a\nload_in_4bit: true\n", "load_in_4bit"),
    "rl": ("base_model: a\nrl: grpo\n", "GRPO is not supported"),
    "reward model": ("base_model: a\nreward_model: true\n", "reward model training is not supported"),
    "TRL, two losses": ("model_name_or_path: a\ndataset_name: b\nbeta: 0.1\nloss_type: [ipo, hinge]\n", "several"),
    "TRL CPO": (
        "model_name_or_path: a\ndataset_name: b\ncpo_alpha: 0.1\nloss_type: ipo\n",
        "the loss `ipo` of CPOTrainer is not supported",
    ),
    "TRL, a weight in words": (
        "model_name_or_path: a\ndataset_name: b\nloss_type: [sigmoid, sft]\nloss_weights: [a, 1]\nbeta: 0.1\n",
        "loss_weights must be numbers above 0",
    ),
    "TRL, a weight of zero": (
        "model_name_or_path: a\ndataset_name: b\nloss_type: [sigmoid, sft]\nloss_weights: [0, 1]\nbeta: 0.1\n",
        "loss_weights must be numbers above 0",
    ),
    "an unknown home folder": ("base_model: a\noutput_dir: ~no_such_user/x\n", "output_dir: .* cannot be a path"),
    "a name that is too long": (
        f"base_model: {'x' * 300}\n", rf'base_model: "{"x" * 60}" cannot be a path on this machine$',
    ),
    "TRL GRPO": ("model_name_or_path: a\ndataset_name: b\nnum_generations: 8\n", "GRPO"),
    "a section is no mapping": ("model: {name: a}\ndataset: {path: b}\ntraining: 3\n", "`training` must map"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(REFUSED))
def test_untranslatable_settings_are_refused_with_a_reason(tmp_path: Path, case: str) -> None:
    text, message = REFUSED[case]
    with pytest.raises(TranslationError, match=message) as caught:
        translate(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path / 'theirs.yaml'}: ")


def test_preferences_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(INFO))
    with pytest.raises(TranslationError, match="`better` contains preferences"):
        translate(tmp_path, "model_name_or_path: a\nstage: sft\nfinetuning_type: full\ndataset: better\n")


PREFERENCES = {
    "LLaMA-Factory": (
        "model_name_or_path: a\nstage: dpo\nfinetuning_type: full\ndataset: better\noutput_dir: o\n"
        "pref_loss: simpo\npref_beta: 2.0\nsimpo_gamma: 0.7\npref_ftx: 0.1\n",
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.7, "rpo_alpha": 0.1},
    ),
    "LLaMA-Factory, KTO": (
        "model_name_or_path: a\nstage: kto\nfinetuning_type: full\ndataset: better\noutput_dir: o\n"
        "kto_chosen_weight: 1.5\n",
        {"loss_type": "kto", "desirable_weight": 1.5},
    ),
    "Axolotl": (
        "base_model: a\nrl: ipo\nrl_beta: 0.3\nsequence_len: 64\ndatasets:\n  - path: b.jsonl\n"
        "    type: chat_template.default\n    field_messages: talk\n    field_chosen: good\n",
        {"loss_type": "ipo", "beta": 0.3},
    ),
    "TRL": (
        "model_name_or_path: a\ndataset_name: b/c\nbeta: 0.2\nloss_type: [sigmoid, sft]\nloss_weights: [2.0, 1.0]\n"
        "precompute_ref_log_probs: true\n",
        {"loss_type": "sigmoid", "beta": 0.2, "rpo_alpha": 0.5},
    ),
    "TRL, KTO": (
        "model_name_or_path: a\ndataset_name: b/c\nundesirable_weight: 0.5\n",
        {"loss_type": "kto", "undesirable_weight": 0.5},
    ),
}


@pytest.mark.parametrize("case", list(PREFERENCES))
def test_preferences(tmp_path: Path, case: str) -> None:
    text, expected = PREFERENCES[case]
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(INFO))
    translation, config = translate(tmp_path, yaml.safe_load(text))
    assert config.task == "dpo" and config.data.packing is False and lost(translation) == set()
    assert config.preference.model_dump() == config.preference.model_copy(update=expected).model_dump()
    (source,) = config.data.train
    assert source.format in ("auto", "preference")
    if case == "Axolotl":
        assert source.columns == {"messages": "talk", "chosen": "good"}


def test_unsupported_values_are_removed_and_listed(tmp_path: Path) -> None:
    text = TRL + "attn_implementation: flash_attention_3\nsave_steps: 0.25\noptim: galore_adamw\nwarmup_steps: 2.5\n"
    translation, config = translate(tmp_path, text)
    assert {"attn_implementation", "save_steps", "optim", "warmup_steps"} <= lost(translation)
    assert config.optimizer.optim == "adamw"
    listed = translation.toml.split("config_version")[0]
    for left in translation.lost_keys:
        assert format_omitted_key(left) in listed
        assert len(format_omitted_key(left)) < 400
    values = translation.to_json()
    assert {left["key"] for left in values["no_equivalent"]} == lost(translation)
    assert values["values"]["optimizer.learning_rate"]["value"] == 2e-5


@pytest.mark.parametrize(
    ("value", "reason", "line"),
    [
        ("x" * 58, "why", f'key = "{"x" * 58}": why'),
        ("x" * 59, "why", "key = ...: why"),
        (None, "why", "key: why"),
        (0, "a \u2028 line\n and  a \x7f", "key = 0: a ? line and a ?"),
        ({"a": [1, None]}, "", 'key = {"a": [1, null]}: '),
    ],
)
def test_line_of_an_omitted_key(value: Any, reason: str, line: str) -> None:
    """Values of more than 60 characters are left out. The line is printable ASCII."""
    assert format_omitted_key(OmittedKey("key", value, reason)) == line.strip()


def test_paths_are_relative_to_the_config_folder(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "models/base").mkdir(parents=True)
    path = tmp_path / "theirs.yaml"
    path.write_text(
        "base_model: models/base\nlearning_rate: 1\ndatasets: [{path: ./d.jsonl, type: alpaca}]\noutput_dir: o\n"
    )
    translation = translate_file(path, folder=tmp_path / "configs", base=tmp_path)
    out = tmp_path / "configs/ours.toml"
    out.write_text(translation.toml)
    config = load_config(out).config
    assert config.model.model_name_or_path == str(tmp_path / "models/base")
    assert (config.output_dir, config.data.train[0].path) == (tmp_path / "o", str(tmp_path / "d.jsonl"))


def test_many_sources_stay_in_order(tmp_path: Path) -> None:
    sources = ", ".join(f"{{path: org/set{number}, type: alpaca}}" for number in range(12))
    _, config = translate(tmp_path, f"base_model: a/b\nlearning_rate: 1e-4\ndatasets: [{sources}]\n")
    assert [source.path for source in config.data.train] == [f"org/set{number}" for number in range(12)]


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 10**6), st.floats(allow_nan=False), st.text(max_size=8),
    st.lists(st.text(max_size=4), max_size=2), st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)  # fmt: skip
HOSTILE = st.sampled_from(
    ["~no_such_user/x", "x" * 300, "\0", "1e400", "nan", "[", "{{", ["sigmoid", "sft"], [0, 1], [["a"], 1], ["a", {}],
     [{"path": "a/b", "foo": 3}, "text"], {"datasets": 3}, {"": {"": []}}, {"enabled": "text"}, 10**30, 1e308, "dpo"]
)  # fmt: skip
TOOLS: dict[str, Tool] = {
    "theirs.yaml": "llamafactory", "ax.yaml": "axolotl", "trl.yaml": "trl", "ds.json": "deepspeed",
    "mt.yaml": "megatrain",
}  # fmt: skip
KEYS = {
    "theirs.yaml": [
        "output_dir", "learning_rate", "optim", "warmup_ratio", "bf16", "report_to", "save_steps", "dataset", "packing",
        "cutoff_len", "max_samples", "val_size", "eval_strategy", "deepspeed", "lr_scheduler_type", "save_strategy",
        "stage", "flash_attn", "chat_template", "dataset_dir", "eval_dataset", "logging_steps",
    ],
    "ax.yaml": [
        "output_dir", "datasets", "sequence_len", "optimizer", "lr_scheduler", "val_set_size", "sample_packing",
        "cosine_min_lr_ratio", "pretraining_dataset", "chat_template", "roles_to_train", "test_datasets",
    ],
    "trl.yaml": ["dataset_name", "datasets", "dataset_mixture", "max_length", "lr_scheduler_kwargs", "packing", "seed"],
    "ds.json": ["optimizer", "scheduler", "train_batch_size", "gradient_clipping", "bf16", "fp16", "zero_optimization"],
    "mt.yaml": ["model", "dataset", "training", "optimizer", "logging", "memory", "more"],
}  # fmt: skip
STARTS: dict[str, dict[str, Any]] = {
    "theirs.yaml": {"model_name_or_path": "a/b", "stage": "sft", "finetuning_type": "full", "output_dir": "o"},
    "ax.yaml": {"base_model": "a/b"},
    "trl.yaml": {"model_name_or_path": "a/b", "max_length": 64},
    "ds.json": {"zero_optimization": {}},
    "mt.yaml": {"model": {"name": "a"}, "dataset": {"path": "b"}, "training": {}},
}


@given(st.data())
def test_any_values_give_a_valid_config_or_a_one_line_error(data: st.DataObject) -> None:
    """No value leads to a traceback or to a translated file that does not load."""
    name = data.draw(st.sampled_from(sorted(KEYS)))
    keys = st.sampled_from([*KEYS[name], *(key for key in TABLES[TOOLS[name]] if "." not in key)])
    values = {**STARTS[name], **data.draw(st.dictionaries(keys, VALUES | HOSTILE, max_size=4))}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        path = folder / name
        path.write_text(json.dumps(values, ensure_ascii=False))
        out = folder / "out.toml"
        with contextlib.suppress(TranslationError):
            out.write_text(translate_file(path, base=folder).toml)
            assert load_config(out).config is not None


def nodes(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path to every value in a tree except the root."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for name, child in children for place in ((*path, name), *nodes(child, (*path, name)))]


REAL: dict[str, Any] = {
    name: yaml.safe_load(next((WHOLE / case).glob("theirs.*")).read_text())
    for name, case in {
        "theirs.yaml": "llama_factory_full", "ax.yaml": "axolotl_full", "trl.yaml": "trl_sft",
        "ds.json": "deepspeed_linear", "mt.yaml": "megatrain_path",
    }.items()
}  # fmt: skip


@given(st.data())
def test_one_arbitrary_value_in_a_real_config_is_handled(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(REAL)))
    values = copy.deepcopy(REAL[name])
    *above, last = data.draw(st.sampled_from(nodes(values)))
    at = values
    for part in above:
        at = at[part]
    at[last] = data.draw(VALUES)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        (folder / name).write_text(json.dumps(values, ensure_ascii=False))
        out = folder / "out.toml"
        with contextlib.suppress(TranslationError):
            out.write_text(translate_file(folder / name, base=folder).toml)
            assert load_config(out).config is not None


@pytest.mark.parametrize(
    ("tool", "text", "output_dir"),
    [
        ("llamafactory", "stage: sft\nfinetuning_type: full\n", "outputs/first"),
        ("trl", "max_length: 8\n", "trainer_output"),
        ("deepspeed", "zero_optimization: {}\n", "outputs/first"),
        ("megatrain", "dataset: {max_seq_len: 4}\ntraining: {}\n", "outputs/model"),
    ],
)
def test_missing_model_data_and_folder_become_placeholders_or_defaults(
    tmp_path: Path, tool: Tool, text: str, output_dir: str
) -> None:
    (tmp_path / "theirs.yaml").write_text(text)
    translation = translate_file(tmp_path / "theirs.yaml", tool, base=tmp_path)
    assert translation.entries["output_dir"].value == output_dir
    found = {(key, entry.value, entry.note) for key, entry in translation.placeholders.items()}
    folder = {("output_dir", "outputs/first", "folder of the run")} if output_dir == "outputs/first" else set()
    task = {("task", "sft", 'or "pretrain"')} if tool == "deepspeed" else set()
    assert found == {
        ("model.model_name_or_path", "path/to/model", "a Hugging Face folder"),
        ("data.train.0.path", "data/train.jsonl", "a file, glob or folder, or the hub name of a data set"),
        *folder,
        *task,
    }


def test_images_of_llama_factory_and_axolotl(tmp_path: Path) -> None:
    info = {"whales": {"file_name": "whales.json", "formatting": "sharegpt", "columns": {"images": "pictures"}}}
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    (tmp_path / "data/whales.json").write_text("[]")
    text = "stage: sft\noutput_dir: out\nmodel_name_or_path: m\nfinetuning_type: full\n"
    text += "dataset: whales\ndataset_dir: data\n"
    _, config = translate(tmp_path, text)
    assert config.model.images == "frozen"
    assert dict(config.data.train[0].columns) == {"images": "pictures"}
    translation, config = translate(
        tmp_path, f"{text}freeze_vision_tower: false\nfreeze_multi_modal_projector: false\n"
    )
    assert config.model.images == "trained" and not lost(translation)
    translation, config = translate(tmp_path, f"{text}freeze_vision_tower: false\nmedia_dir: elsewhere\n")
    assert config.model.images == "trained" and {"freeze_vision_tower", "media_dir"} <= lost(translation)
    of_lora = text.replace("full", "lora")
    translation, config = translate(tmp_path, of_lora)
    assert config.model.images == "frozen" and config.lora.is_on and not lost(translation)
    translation, config = translate(tmp_path, f"{of_lora}freeze_vision_tower: false\n")
    assert config.model.images == "frozen" and "freeze_vision_tower" in lost(translation)
    _, config = translate(
        tmp_path,
        "base_model: m\noutput_dir: out\nprocessor_type: AutoProcessor\ndatasets:\n  - path: data/whales.json\n",
    )
    assert config.model.images == "trained"


@pytest.mark.parametrize(
    ("name", "own", "said", "is_lost"),
    [
        ("llama3", "<|start_header_id|>{{ role }}", "which also writes <|start_header_id|>", False),
        ("qwen3_nothink", "<|im_start|>{{ role }}", "which also writes <|im_start|>", False),
        ("alpaca", "<|im_start|>{{ role }}", "which differs, because it does not contain ### Instruction", True),
        ("llama3", "", "no chat template, which chats need; write it into a .jinja file", True),
        ("a_template_of_mine", "<|im_start|>{{ role }}", "a different template changes every text", True),
    ],
)
def test_template_is_compared_with_the_model_template(
    tmp_path: Path, name: str, own: str, said: str, is_lost: bool
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/tokenizer_config.json").write_text(json.dumps({"chat_template": own} if own else {}))
    (tmp_path / "chats.jsonl").write_text('{"messages": []}')
    text = f"model_name_or_path: model\ntemplate: {name}\nstage: %s\ndataset: chats\nfinetuning_type: full\n"
    (tmp_path / "their.yaml").write_text(text % "sft")
    translation = translate_file(tmp_path / "their.yaml", base=tmp_path)
    omitted_keys = translation.lost_keys if is_lost else translation.unneeded_keys
    (left,) = [left for left in omitted_keys if left.tool_key == "template"]
    assert said in left.reason and left.value == name
    (tmp_path / "their.yaml").write_text(text % "pt")
    assert "template" in unneeded(translate_file(tmp_path / "their.yaml", base=tmp_path)), "plain text has none"


def test_quantization_key_suggests_a_quantized_model_folder(tmp_path: Path) -> None:
    text = "model_name_or_path: org/m\nstage: sft\nquantization_bit: 4\ndataset: chats\nfinetuning_type: lora\n"
    (tmp_path / "their.yaml").write_text(text)
    (left,) = [key for key in translate_file(tmp_path / "their.yaml").lost_keys if key.tool_key == "quantization_bit"]
    assert "name a folder that is already quantized" in left.reason


def test_default_lora_rank_and_alpha_match_llama_factory(tmp_path: Path) -> None:
    """LLaMA-Factory uses rank 8 and ``lora_alpha`` of twice the rank if the config has neither."""
    _, config = translate(tmp_path, "model_name_or_path: a\nstage: sft\nfinetuning_type: lora\n")
    assert config.lora is not None and (config.lora.r, config.lora.lora_alpha) == (8, 16)
