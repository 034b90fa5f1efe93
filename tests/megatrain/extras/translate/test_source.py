"""Reading other tools' files: the tool is detected, and files that are not a config of any tool are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.base.other_tools import Tool
from megatrain.extras.translate.read import TranslationError, read_mapping, read_source


def write(folder: Path, text: str, name: str = "config.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "tool"),
    [
        ("model_name_or_path: a/b\nstage: sft\nfinetuning_type: full\n", "llamafactory"),
        ("model_name_or_path: a/b\ndataset: x\noutput_dir: o\n", "llamafactory"),
        ("base_model: a/b\ndatasets: []\n", "axolotl"),
        ("model_name_or_path: a/b\ndataset_name: c/d\n", "trl"),
        ("model_name_or_path: a/b\nmax_seq_length: 5\n", "trl"),
        ("zero_optimization: {stage: 3}\n", "deepspeed"),
        ("model: {name: a}\ndataset: {path: b}\ntraining: {}\n", "megatrain"),
    ],
)
def test_source_tool_is_detected(tmp_path: Path, text: str, tool: Tool) -> None:
    assert read_source(write(tmp_path, text)).tool == tool


@pytest.mark.parametrize(
    ("name", "first_line"), [("train.sh", ""), ("train", "#!/bin/bash\n"), ("a.sh", "#!/bin/sh\n")]
)
def test_script_is_known_by_its_suffix_or_first_line(tmp_path: Path, name: str, first_line: str) -> None:
    source = read_source(write(tmp_path, f"{first_line}trl sft --model_name_or_path a/b --dataset_name c/d\n", name))
    assert (source.tool, source.values["model_name_or_path"]) == ("trl", "a/b")


def test_only_line_ends_separate_the_lines_of_a_script(tmp_path: Path) -> None:
    """Other Unicode line separators and form feeds in a quoted value stay as they are."""
    path = tmp_path / "train.sh"
    path.write_bytes("trl sft --run_name 'a\u2028b\x0cc\r\nd' \\\r\n --seed 5 --model_name_or_path a/b\r\n".encode())
    values = {"run_name": "a\u2028b\x0cc\nd", "seed": 5, "model_name_or_path": "a/b"}
    assert read_source(path).values == values


def test_source_tool_can_be_given(tmp_path: Path) -> None:
    source = read_source(write(tmp_path, "base_model: a\n"), "trl")
    assert (source.tool, source.title) == ("trl", "TRL")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "x: [1\ny: 2\n", r"line 2: invalid YAML"),
        ("a.yaml", "- 1\n- 2\n", "does not map names to values"),
        ("a.yaml", "3: x\n", "does not map names to values"),
        ("a.yaml", "", "does not map names to values"),
        ("a.yaml", "a: 2020-13-45\n", "cannot be parsed"),
        ("a.json", '{"a": 1,}', "line 1: invalid JSON"),
        ("a.json", "[1]", "does not map names to values"),
        ("a.yaml", "x: 1\n", "unknown tool.*Pass --from llamafactory"),
        ("a.yaml", "compute_environment: LOCAL_MACHINE\n", "launch config of accelerate"),
        ("a.json", '{"base_model": ' + "[" * 100 + "1" + "]" * 100 + "}", "more than 100 tables or lists are nested"),
        ("a.toml", "task: x\n", "a TOML file"),
        ("a.yaml", 'base_model: "\\ud800"\n', "half a character"),
        ("a.yaml", "base_model: x\nmax_steps: .inf\n", "non-finite"),
        ("a.yaml", "a: !!python/object/apply:os.system ['true']\n", "invalid YAML"),
    ],
)
def test_invalid_source_configs_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = write(tmp_path, text, name)
    with pytest.raises(TranslationError, match=message) as caught:
        read_source(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TranslationError, match="no such file"):
        read_mapping(tmp_path / "nowhere.yaml")
    with pytest.raises(TranslationError, match="cannot be read"):
        read_mapping(tmp_path)
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TranslationError, match="not UTF-8"):
        read_mapping(tmp_path / "a.yaml")


def test_aliases_of_aliases_are_limited(tmp_path: Path) -> None:
    path = tmp_path / "bomb.yml"
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    path.write_text("\n".join(lines))
    with pytest.raises(TranslationError, match=r"bomb\.yml: line 6: .*aliases expand to more than 1000000 values"):
        read_mapping(path)
    path.write_text("\n".join(lines[:3]) + "\nb: {<<: &c {d: 1}, e: *a0}\nf: *c")
    assert read_mapping(path)["b"] == {"d": 1, "e": ["x"] * 10} and len(read_mapping(path)["a2"]) == 10
    path.write_text("a: &a [*a]")
    with pytest.raises(TranslationError, match=r"bomb\.yml"):
        read_mapping(path)


def test_a_file_without_end_is_refused() -> None:
    with pytest.raises(TranslationError, match=r"/dev/zero: the file has more than 16777216 bytes"):
        read_mapping(Path("/dev/zero"))
