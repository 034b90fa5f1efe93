"""``megatrain-tier import``: what is printed, what is written, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from megatrain.config import load_config
from processes.saved_run import command_group

TEXT = "base_model: org/model\ndatasets: [{path: d.jsonl, type: alpaca}]\nlearning_rate: 1e-4\nrope_theta: 5\n"


def call(*words: object) -> Result:
    return CliRunner().invoke(command_group(), ["import", *map(str, words)])


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "theirs.yaml"
    path.write_text(TEXT)
    return path


def test_toml_on_stdout_and_the_rest_on_stderr(source: Path, tmp_path: Path) -> None:
    result = call(source)
    assert result.exit_code == 0, result.output
    (tmp_path / "ours.toml").write_text(result.stdout)
    assert load_config(tmp_path / "ours.toml").config.optimizer.learning_rate == 1e-4
    assert "no equivalent here:\n  rope_theta = 5: nothing like it here" in result.stderr
    assert "to fill in" not in result.stderr


def test_a_file_is_written_once(source: Path, tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    out = tmp_path / "configs/ours.toml"
    result = call(source, "-o", out)
    assert result.exit_code == 0 and result.stdout == ""
    assert f"written to {out}" in result.stderr and f"next: megatrain-tier check {out}" in result.stderr
    assert load_config(out).config.output_dir == tmp_path / "model-out", "relative to where the tool was started"
    before = out.read_text()
    again = call(source, "-o", out)
    assert again.exit_code == 2 and "is there already" in again.stderr
    assert out.read_text() == before


def test_json(source: Path) -> None:
    values = json.loads(call(source, "--json").stdout)
    assert (values["tool"], values["out"]) == ("axolotl", None)
    assert values["no_equivalent"] == [{"key": "rope_theta", "value": 5, "why": "nothing like it here"}]
    assert values["values"]["optimizer.learning_rate"]["value"] == 1e-4
    assert "learning_rate = 0.0001" in values["toml"]


def test_what_is_to_be_filled_in(tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}, "gradient_clipping": 1.0}))
    result = call(path)
    assert result.exit_code == 0
    assert "to fill in:" in result.stderr and "model.model_name_or_path: a Hugging Face folder" in result.stderr
    assert "# FILL IN: a Hugging Face folder" in result.stdout


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("x: [", (), "this is not YAML"),
        ("x: 1", (), "whose config is this"),
        ("base_model: a\nrl: dpo\n", (), "DPO is not supported"),
        (TEXT, ("--from", "nemo"), "'nemo' is not one of"),
        (TEXT, ("-o", "nowhere/ours.toml"), "there is no such folder"),
    ],
)
def test_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("theirs.yaml").write_text(text)
    result = call("theirs.yaml", *words)
    assert result.exit_code == 2 and message in result.stderr
    assert "Traceback" not in result.output and os.listdir() == ["theirs.yaml"]
    missing = call("nowhere.yaml")
    assert missing.exit_code == 2 and "no such file" in missing.stderr
