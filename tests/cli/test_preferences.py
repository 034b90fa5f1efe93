"""Preference training on the command line: previews, checks, one message for each mistake, and a complete run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from processes.saved_run import QUICKSTART, command_group

CONFIG = """task = "dpo"
output_dir = "out"
device = "cpu"
[model]
model_name_or_path = "model"
train_from_scratch = true
[data]
max_length = 32
cache_dir = "none"
[[data.train]]
path = "rows.jsonl"
[training]
per_device_train_batch_size = 2
max_steps = 2
[optimizer]
warmup_steps = 0
[checkpoint]
save_strategy = "no"
[tiers.ram]
size = "128MiB"
"""
PAIRS = [{"prompt": f"{n}?\n", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(4)]
JUDGED = [{"prompt": f"{n}?\n", "completion": f"answer {n}", "label": n > 1} for n in range(4)]


def call(*words: object) -> Result:
    result = CliRunner().invoke(command_group(), [*map(str, words)])
    assert "Traceback" not in result.output
    return result


@pytest.fixture
def config(tmp_path: Path) -> Path:
    shutil.copytree(QUICKSTART / "model", tmp_path / "model")
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    write(path, PAIRS)
    return path


def write(config: Path, rows: list[dict[str, Any]]) -> None:
    (config.parent / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_preview_shows_chosen_and_rejected_answers(config: Path) -> None:
    shown = call("data", "preview", config, "-n", "1")
    assert shown.exit_code == 0, shown.output
    assert "row 1  chosen" in shown.stdout and "row 1  rejected" in shown.stdout
    assert "0?\n[[good 0" in shown.stdout and "0?\n[[bad 0" in shown.stdout
    write(config, JUDGED)
    judged = call("data", "preview", config, "-n", "1", "--set", "preference.loss_type=kto")
    assert judged.exit_code == 0 and "row 1  a bad answer" in judged.stdout
    stats = call("data", "stats", config, "--set", "preference.loss_type=kto")
    assert stats.exit_code == 0 and "8 documents" in stats.stdout


def test_check_counts_examples(config: Path) -> None:
    found = call("check", config)
    assert found.exit_code == 0, found.output
    assert "4 pairs for sigmoid" in found.stdout and "scores all 8 answers once" in found.stdout
    write(config, [row | {"label": True} for row in JUDGED])
    found = call("check", config, "--set", "preference.loss_type=kto")
    assert "4 good and 0 bad answers for kto" in found.stdout and "all answers have the same label" in found.stdout


ASKED = {"role": "user", "content": "Who?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("Ahab.", "Bob."))
WRONG = {
    "a column is missing": ([{"prompt": "a", "chosen": "b"}], "no field `rejected`; the row has `prompt`, `chosen`"),
    "the same answers": ([PAIRS[0] | {"rejected": "good 0"}], "`chosen` and `rejected` are the same"),
    "no prefix": (
        [{"prompt": "Why?", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}],
        "`prompt` is not what `chosen` and `rejected` begin with",
    ),
    "label is no boolean": ([JUDGED[0] | {"label": 1}], "must be true or false; this is a number"),
    "single answers": (
        JUDGED,
        'only one answer, with a label, but the loss compares two answers. Set loss_type = "kto"',
    ),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("command", ["run", "check"])
def test_invalid_preference_rows_are_reported(config: Path, name: str, command: str) -> None:
    rows, message = WRONG[name]
    write(config, rows)
    result = call(command, config)
    assert result.exit_code == 4 and message in " ".join(result.output.split())
    assert not (config.parent / "out").exists()


def test_dpo_run_reports_preference_metrics(config: Path) -> None:
    done = call("run", config)
    assert done.exit_code == 0, done.output
    assert "accuracy" in done.output and "margin" in done.output
    lines = [json.loads(line) for line in (config.parent / "out/metrics.jsonl").read_text().splitlines()]
    assert {"rewards/accuracies", "logps/chosen"} <= set(lines[0]["preferences"])
    report = call("report", config.parent / "out")
    assert report.exit_code == 0 and "answers accuracy" in report.stdout
    assert call("report", config.parent / "out", "--html", config.parent / "page.html").exit_code == 0
    fresh = call("status", config.parent / "out")
    assert fresh.exit_code == 0, fresh.output
