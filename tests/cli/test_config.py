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


def test_explain_prints_all_facts_about_a_key() -> None:
    assert (
        call("explain", "cutoff_len").stdout
        == """\
That is LLaMA-Factory's name; here: data.max_length

data.max_length
  Maximum tokens in a row of a micro-batch.
  values   whole number at least 2
  default  1024
  alters   results: continuing a checkpoint with another value requires --allow-config-change
  called   max_length in TRL (the same name)
           cutoff_len in LLaMA-Factory
           max_seq_len in MegaTrain
           sequence_len in Axolotl
           max_seq_length in TRL
           block_size in transformers
           seq_len in torchtitan
  write    [data]
           max_length = 1024
"""
    )
    assert (
        call("explain", "tiers.ram").stdout
        == """\
tiers.ram.size
  RAM for blocks: "110GiB", "90%" or "auto" (measured, cgroup-aware).
  values   "auto", a share such as "90%" or text such as "110GiB"
  default  "auto"
  alters   no results: the value can change between starts of a run
  write    [tiers.ram]
           size = "110GiB"

tiers.ram.pinned
  Pinned part of the tier; auto: all of it if CUDA exists.
  values   "auto", a share such as "90%" or text such as "110GiB"
  default  "auto"
  alters   no results: the value can change between starts of a run
  write    [tiers.ram]
           pinned = "110GiB"
"""
    )


def test_explain_prints_a_table_of_more_than_four_keys() -> None:
    assert len(call("explain", "optimizer.groups").stdout.split("\n\n")) == 4
    assert (
        call("explain", "tiers.nvme").stdout
        == """\
tiers.nvme.path  a path; default required
  Folder for training state on this drive; it is created. It also contains parts of checkpoints:
  deleting it destroys them.
tiers.nvme.size  "auto", a share such as "90%" or text such as "110GiB"; default "auto"
  Space of the tier: "300GiB", "50%" or "auto" (of the free space).
tiers.nvme.mount_point  a path; default see above
  Mount point of the drive, e.g. "/mnt/nvme0". Runs are refused while nothing is mounted there, so
  that blocks never fill another drive. Default: not checked.
tiers.nvme.rate  text such as "2.0GB/s"; default see above
  Rate that weights the drive in stripes, e.g. "2.0GB/s". Default: the rate from doctor, or equal
  weights.
tiers.nvme.max_written  text such as "110GiB"; default see above
  Stop before all runs together have written more than this to the folder, e.g. "200TB". Default: no
  limit.
Details of one key: megatrain-tier config explain KEY
"""
    )


@pytest.mark.parametrize(
    ("table", "subject"),
    [("training", "All keys except recompute alter"), ("preference", "All keys alter")],
)
def test_explained_table_ends_with_the_effect_on_results(table: str, subject: str) -> None:
    end = call("explain", table).stdout.split("\n\n")[-1]
    assert " ".join(end.split()) == (
        f"{subject} results: continuing a checkpoint with another value requires --allow-config-change. Details of one "
        "key: megatrain-tier config explain KEY"
    )


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
