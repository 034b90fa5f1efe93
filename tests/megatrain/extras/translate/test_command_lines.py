"""Parsed command lines, readers and small conversions of `import`, compared as a whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.extras.translate import read
from megatrain.extras.translate.command_lines import CommandLine, find_command_line, parse_words
from megatrain.extras.translate.draft import as_list, as_number
from megatrain.extras.translate.read import TranslationError, can_be_path, read_command_line, read_mapping, read_source
from megatrain.extras.translate.templates import compare_template, read_template

M = {"model_name_or_path": "m"}
#: Command line -> fields of the result that differ from one process without a launcher; None if it trains nothing.
LINES: dict[str, dict[str, Any] | None] = {
    "trl sft --model_name_or_path m": {"tool": "trl", "task": "sft", "values": M},
    "/usr/bin/trl dpo c.yaml": {"tool": "trl", "task": "dpo", "config": Path("c.yaml")},
    "trl grpo --config c.yaml --beta 0.5": {
        "tool": "trl", "task": "grpo", "config": Path("c.yaml"), "values": {"beta": 0.5},
    },
    "trl chat --model_name_or_path m": None,
    "trl sft --num_processes 2 --num_machines 3 --accelerate_config a.yaml --model_name_or_path m": {
        "tool": "trl", "task": "sft", "values": M, "num_processes": 2, "num_hosts": 3,
        "launch_options": {"num_processes": 2, "num_machines": 3, "accelerate_config": "a.yaml"},
    },
    "env A=1 llamafactory-cli train c.json lr=1e-3 seed=7": {
        "tool": "llamafactory", "config": Path("c.json"), "values": {"lr": 1e-3, "seed": 7},
    },
    "lmf train c.yml": {"tool": "llamafactory", "config": Path("c.yml")},
    "llamafactory-cli webui --port 3": None,
    "axolotl c.yaml": {"tool": "axolotl", "config": Path("c.yaml")},
    "axolotl preprocess c.yaml": None,
    "python3.11 -u -W ignore.py train.py": None,
    "python -u train.py --model_name_or_path m": {"values": M},
    "python train.txt --model_name_or_path m": None,
    "python": None,
    "python -m axolotl.cli.train c.yaml": {"tool": "axolotl", "config": Path("c.yaml")},
    "python -m trl.scripts.kto --model_name_or_path m": {"tool": "trl", "task": "kto", "values": M},
    "python src/LLaMA_Factory/train.py --model_name_or_path m": {"tool": "llamafactory", "values": M},
    "python -m accelerate.commands.launch --num_processes 4 sft.py --model_name_or_path m": {
        "tool": "trl", "task": "sft", "launcher": "accelerate", "num_processes": 4, "values": M,
        "launch_options": {"num_processes": 4},
    },
    "python -m deepspeed.launcher.runner --num_gpus 3 --num_nodes 2 t.py --model_name_or_path m": {
        "launcher": "deepspeed", "num_processes": 6, "num_hosts": 2, "values": M,
        "launch_options": {"num_gpus": 3, "num_nodes": 2},
    },
    "accelerate config --x 1": None,
    "accelerate launch --num_machines 2 --num_processes 8 --module pkg.dpo --model_name_or_path m": {
        "tool": "trl", "task": "dpo", "launcher": "accelerate", "num_processes": 8, "num_hosts": 2, "values": M,
        "launch_options": {"num_machines": 2, "num_processes": 8},
    },
    "accelerate launch -m": None,
    "torchrun --nproc_per_node gpu --nnodes=2 t.py --model_name_or_path m": {
        "launcher": "torchrun", "num_processes": None, "num_hosts": 2, "values": M,
        "launch_options": {"nproc_per_node": "gpu", "nnodes": 2},
    },
    "torchrun --nproc_per_node 2 --no_python trl sft --model_name_or_path m": {
        "tool": "trl", "task": "sft", "launcher": "torchrun", "num_processes": 2, "values": M,
        "launch_options": {"nproc_per_node": 2, "python": False},
    },
    "torchrun trl": None,
    "make all": None,
    "python t.py --a -1 --b -2.5e-3 .5 --c --no_d --no_cuda --e= --f=x=y --g-h TRUE Null [1,2] {x --i 1. +3 - --j 1e": {
        "values": {
            "a": -1, "b": [-0.0025, 0.5], "c": True, "d": False, "no_cuda": True, "e": "", "f": "x=y",
            "g_h": [True, None, [1, 2], "{x"], "i": [1.0, 3, "-"], "j": "1e",
        },
    },
    "python t.py --config c.yaml": {"config": Path("c.yaml")},
    "python t.py c.yaml --a 1": {"config": Path("c.yaml"), "values": {"a": 1}},
    "python t.py": None,
}  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_every_field_of_a_command_line(line: str) -> None:
    fields = LINES[line]
    words = line.split()
    assert parse_words(words) == (None if fields is None else CommandLine(words, **{"num_processes": 1, **fields}))


SCRIPT = r"""
A=1; B=2
read -r X < file
NAME=base
export EMPTY=
declare -x WORDS="--a 1 --b"
LIST=(--c "2 3")
LIST+=(
  --d  # a comment
)
NAME+=-large
trl sft --model_name_or_path ${NAME} $WORDS x "${LIST[@]}" --e ${EMPTY:-none given} --f ${EMPTY-y} --g '$NAME' &>>log
trl dpo --model_name_or_path m --a $(date) --b `date` --c $((1+2)) --d $1 --e ${NAME%x} --f ${NOWHERE} --g ok 2>err
"""


def test_variables_of_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOWHERE", raising=False)
    line, others = find_command_line(SCRIPT)
    assert line is not None
    assert line.values == {
        "model_name_or_path": "base-large", "a": 1, "b": "x", "c": "2 3", "d": True, "e": [None, "given"], "f": True,
        "g": "$NAME",
    }  # fmt: skip
    assert others == ["trl dpo --model_name_or_path m"]
    line, _ = find_command_line(SCRIPT.replace("trl sft", "echo"))
    assert line is not None and line.unknown == ["a", "b", "c", "d", "e", "f"]
    assert line.values == {"model_name_or_path": "m", "g": "ok"}
    monkeypatch.setenv("NOWHERE", "here")
    line, _ = find_command_line(SCRIPT.replace("trl sft", "echo"))
    assert line is not None and line.values == {"model_name_or_path": "m", "f": "here", "g": "ok"}


def test_first_supported_training_of_a_script_is_chosen() -> None:
    text = "trl grpo --model_name_or_path a && trl sft --model_name_or_path b; trl chat --x 1 | trl dpo --beta 1"
    line, others = find_command_line(text)
    assert line is not None and line.values == {"model_name_or_path": "b"}
    assert others == ["trl grpo --model_name_or_path a", "trl dpo --beta 1"]
    line, others = find_command_line("trl grpo --model_name_or_path a")
    assert line is not None and (line.task, others) == ("grpo", [])
    assert find_command_line("python eval.py --model a\necho trl") == (None, [])


def test_launch_config_sets_unknown_numbers_of_processes(tmp_path: Path) -> None:
    path = tmp_path / "launch.yaml"
    path.write_text("num_processes: 6\nnum_machines: 3\n")
    start = ["accelerate", "launch", "--config_file", str(path)]
    for more, expected in (([], (6, 3)), (["--num_processes", "4"], (4, 1)), (["--num_machines", "2"], (6, 3))):
        line = read_command_line([*start, *more, "sft.py", "--model_name_or_path", "m"]).line
        assert (line.num_processes, line.num_hosts) == expected
    path.write_text("num_processes: 0\n")
    line = read_command_line([*start, "--num_machines", "2", "sft.py", "--model_name_or_path", "m"]).line
    assert (line.num_processes, line.num_hosts) == (None, 2)
    words = ["trl", "sft", "--accelerate_config", str(tmp_path / "launch.yaml"), "--model_name_or_path", "m"]
    path.write_text("num_processes: 5\n")
    assert read_command_line(words).line.num_processes == 5


@pytest.mark.parametrize(
    ("name", "text", "tool"),
    [
        ("a.yaml", "train_micro_batch_size_per_gpu: 1", "deepspeed"),
        ("a.yaml", "zero_allow_untested_optimizer: true\nbase_model: x", "deepspeed"),
        ("a.yaml", "base_model: x\nstage: sft", "axolotl"),
        ("a.yaml", "cutoff_len: 3", "llamafactory"),
        ("a.yaml", "dataset: x", "llamafactory"),
        ("a.yaml", "dataset: [x]\nmodel_name_or_path: a\ndatasets: 1", "trl"),
        ("a.yaml", "model: {}\ndataset: {}\ntraining: 1", "megatrain"),
        ("a.sh", "python t.py --model_name_or_path m --x 1", "trl"),
        ("a.sh", "python t.py --model_name_or_path m --template x", "llamafactory"),
        ("a.BASH", "python t.py --model_name_or_path m --base_model x --dataset_name y", "trl"),
        ("a.yaml", "distributed_type: NO", "launch config of accelerate"),
        ("a.yaml", "model: {}\ndataset: {}", "unknown tool"),
        ("a.yaml", "dataset_name: x", "unknown tool"),
        ("a.yaml", "model_name_or_path: x", "unknown tool"),
    ],
)
def test_tool_is_detected_from_few_keys(tmp_path: Path, name: str, text: str, tool: str) -> None:
    (tmp_path / name).write_text(text)
    if " " not in tool:
        assert read_source(tmp_path / name).tool == tool
        return
    with pytest.raises(TranslationError, match=tool):
        read_source(tmp_path / name)


def test_limits_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": ' + "[" * 99 + "1" + "]" * 99 + "}")
    read_mapping(path)
    path.write_text('{"a": ' + "[" * 100 + "1" + "]" * 100 + "}")
    with pytest.raises(TranslationError, match="more than 100"):
        read_mapping(path)
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: b\rc: [d, e]\r\nf: {g: *x}".replace(b"*x", b"h"))
    assert read_mapping(path) == {"a": "b", "c": ["d", "e"], "f": {"g": "h"}}
    monkeypatch.setattr(read, "_MAX_YAML_VALUES", 11)
    monkeypatch.setattr(read, "_MAX_CONFIG_BYTES", len(path.read_bytes()))
    read_mapping(path)
    monkeypatch.setattr(read, "_MAX_YAML_VALUES", 10)
    with pytest.raises(TranslationError, match="more than 10 values"):
        read_mapping(path)
    monkeypatch.setattr(read, "_MAX_CONFIG_BYTES", len(path.read_bytes()) - 1)
    with pytest.raises(TranslationError, match="bytes, too many"):
        read_mapping(path)


def test_texts_that_can_be_paths(tmp_path: Path) -> None:
    texts = ["missing", ".", "a/b", "~", "x" * 300, "\0", "~no_such_user/x"]
    assert [can_be_path(tmp_path, text) for text in texts] == [True, True, True, True, False, False, False]
    (tmp_path / "file").touch()
    assert (read.exists(tmp_path / "file"), read.is_file(tmp_path / "file"), read.is_file(tmp_path)) == (
        True,
        True,
        False,
    )
    assert not read.exists(tmp_path / "none") and not read.exists(Path("\0")) and not read.is_file(Path("\0"))


@pytest.mark.parametrize(
    ("value", "key", "number"),
    [
        ("1e-5", "optimizer.learning_rate", 1e-5), ("8", "training.max_steps", 8), ("8.0", "data.max_length", 8),
        ("8.5", "data.max_length", 8.5), ("nan", "optimizer.learning_rate", "nan"), ("x", "data.max_length", "x"),
        ("inf", "data.max_length", "inf"), ("7", "run_name", "7"), (3, "run_name", 3), (True, "data.max_length", True),
        ("2", "data.train.0.max_samples", 2), ("2", "data.nothing", "2"),
    ],
)  # fmt: skip
def test_text_of_a_number(value: Any, key: str, number: Any) -> None:
    found = as_number(value, key)
    assert found == number and type(found) is type(number)


def test_values_as_a_list() -> None:
    assert [as_list(value) for value in (None, "a", ["b"], [], 0)] == [[], ["a"], ["b"], [], [0]]


def test_templates_of_a_folder_are_joined(tmp_path: Path) -> None:
    assert compare_template("qwen", tmp_path)[1] is False and read_template(tmp_path) == ""
    named = [{"name": "default", "template": "one"}, {"name": "tools", "template": "[INST]"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    (tmp_path / "chat_template.jinja").write_text("<|user|>")
    assert read_template(tmp_path) == "one[INST]<|user|>"
    names = {"llama2_zh": True, "Mistral_small": True, "glm4": True, "llama3": False, "llama": False, "gpt_oss": False}
    assert {name: compare_template(name, tmp_path)[1] for name in names} == names
    (tmp_path / "chat_template.jinja").unlink()
    for text in ('{"chat_template": null}', "[]", "{"):
        (tmp_path / "tokenizer_config.json").write_text(text)
        assert read_template(tmp_path) == ""
