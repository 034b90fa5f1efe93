"""``megatrain-tier config``: show, schema, diff, explain."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from processes.saved_run import command_group

TEXT = """task = "sft"
output_dir = "out"
[model]
model_name_or_path = "org/model"
[[data.train]]
path = "one.jsonl"
[optimizer]
learning_rate = 2e-5
"""


def call(*words: object) -> Result:
    return CliRunner().invoke(command_group(), ["config", *map(str, words)])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(TEXT)
    return path


def test_show_prints_a_config_that_loads_again(config: Path) -> None:
    result = call("show", config)
    assert result.exit_code == 0, result.output
    values = tomllib.loads(result.stdout)
    assert (values["optimizer"]["learning_rate"], values["optimizer"]["optim"]) == (2e-5, "adamw")
    again = config.with_name("again.toml")
    again.write_text(result.stdout)
    assert call("show", again).stdout == result.stdout


def test_show_origin(config: Path) -> None:
    result = call("show", config, "--origin", "--set", "seed=7")
    lines = {line.split(" = ")[0]: line.rpartition("# ")[2] for line in result.stdout.splitlines() if " = " in line}
    assert lines["learning_rate"] == f"{config}:8"
    assert (lines["seed"], lines["optim"]) == ("--set", "default")
    assert tomllib.loads(result.stdout)["seed"] == 7, "origins are comments"
    values = json.loads(call("show", config, "--json").stdout)
    assert values["origins"]["optimizer.learning_rate"] == f"{config}:8"
    assert values["values"]["optimizer"]["learning_rate"] == 2e-5


def test_schema(tmp_path: Path) -> None:
    result = call("schema")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["properties"]["data"]["properties"]["max_length"]["minimum"] == 2
    assert call("schema", "-o", tmp_path / "s.json").exit_code == 0
    assert (tmp_path / "s.json").read_text() == result.stdout
    missing = call("schema", "-o", tmp_path / "nowhere/s.json")
    assert missing.exit_code == 1 and "No such file" in missing.stderr


def test_diff(config: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text(TEXT.replace("2e-5", "3e-5").replace("one.jsonl", "two.jsonl") + '[tiers.ram]\nsize = "2GiB"\n')
    result = call("diff", config, other)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "alters results",
        "  optimizer.learning_rate: 2e-05 -> 3e-05",
        "alters results if the data or the model differs",
        f'  data.train.0.path: "{tmp_path}/one.jsonl" -> "{tmp_path}/two.jsonl"',
        "does not alter results",
        '  tiers.ram.size: "auto" -> "2GiB"',
    ]
    values = json.loads(call("diff", config, other, "--json").stdout)
    assert values["altering"] == [{"key": "optimizer.learning_rate", "before": 2e-5, "now": 3e-5}]
    assert call("diff", config, config).stdout == "no differences\n"


def test_explain(config: Path) -> None:
    result = call("explain", "cutoff_len")
    assert result.exit_code == 0
    assert "LLaMA-Factory's name; here: data.max_length" in result.stdout
    assert "max_seq_len in MegaTrain" in result.stdout and "default  1024" in result.stdout
    assert "--allow-config-change" in result.stdout
    values = json.loads(call("explain", "tiers.nvme", "--json").stdout)
    assert {key["key"] for key in values["keys"]} >= {"tiers.nvme.path", "tiers.nvme.size"}
    for name in ("load_in_4bit", "quantization_bit"):
        answer = call("explain", name)
        assert answer.exit_code == 0 and "name a folder that is already quantized" in answer.stdout
    table = call("explain", "lora").stdout
    assert table.startswith("lora.r ") and "QLoRA" in table
    assert table.count("--allow-config-change") == 1, "common facts are printed once"
    unknown = call("explain", "learning_rat")
    assert unknown.exit_code == 2 and "Did you mean optimizer.learning_rate?" in unknown.stderr


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("show", "nowhere.toml"), 2, "there is no such file"),
        (("diff", "nowhere.toml", "nowhere.toml"), 2, "there is no such file"),
        (("explain",), 2, "Missing argument"),
        (("show",), 2, "Missing argument"),
    ],
)
def test_usage(words: tuple[str, ...], code: int, message: str) -> None:
    result = call(*words)
    assert result.exit_code == code and message in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('task = "grpo"', "megatrain.hf.offloaded(GRPOTrainer)"),
        (
            'task = "sft"\n[evaluation]\neval_steps = 0.5',
            "a share of all steps, which transformers takes. Write a number",
        ),
        ('run_name = "C:\\Users\\x"', r"single quotes: 'C:\Users'"),
        (
            'device = "cpu"\n[tiers.ram]\nsize = "1GiB"',
            "it only changes another config. Apply it: megatrain-tier run",
        ),
    ],
)
def test_messages_suggest_the_intended_key(tmp_path: Path, lines: str, message: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(lines + "\n")
    result = CliRunner().invoke(command_group(), ["check", str(path)])
    assert result.exit_code == 2 and message in " ".join(result.stdout.split()), result.output


def test_a_tracker_is_explained_as_a_value() -> None:
    result = CliRunner().invoke(command_group(), ["config", "explain", "wandb"])
    assert result.stdout.startswith('`wandb` is a value: write report_to = ["jsonl", "wandb"]'), result.output
    assert '"mlflow"' in result.stdout and '"trackio"' in result.stdout
