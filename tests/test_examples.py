"""The example configs as a user runs them, shortened; what they write opens in transformers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from processes import warm

ROOT = Path(__file__).parents[1]
PROGRAM = "import sys; from {package}.main import main; main()"


def run_example(name: str, folder: Path, *options: str, command: str = "run") -> subprocess.CompletedProcess[str]:
    """Run (or check) a copy of the example next to its data, so that nothing is written into the repository."""
    config = folder / name
    shutil.copy(ROOT / "examples" / name, config)
    if not (folder / "quickstart").exists():
        (folder / "quickstart").symlink_to(ROOT / "examples" / "quickstart")
    try:
        import megatrain_tier_cli  # noqa: F401

        package = "megatrain_tier_cli"
    except ImportError:  # not installed: the command's own folder
        package = "cli"
    words = [sys.executable, "-c", PROGRAM.format(package=package), command, str(config), *options]
    return warm.run(words, cwd=ROOT, timeout=280)


def check_folder(final: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(final)
    tokenizer = AutoTokenizer.from_pretrained(final)
    ids = tokenizer("Call me Ishmael.", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.isfinite(model(ids).logits).all()


def test_tiny_trains_and_teaches_and_its_folder_opens(tmp_path: Path) -> None:
    done = run_example("tiny.toml", tmp_path, "--max-steps", "12")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    lines = [json.loads(line) for line in (tmp_path / "outputs/tiny/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "event" not in line]
    assert len(steps) == 12
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3
    assert steps[-1]["tier_used_bytes"]["ram"] <= steps[-1]["tier_capacity_bytes"]["ram"]
    check_folder(tmp_path / "outputs/tiny/final")
    scored = run_example("teacher.toml", tmp_path, "--json", command="score")
    assert scored.returncode == 0, scored.stdout + scored.stderr
    summary = json.loads(scored.stdout.splitlines()[-1])
    assert summary["num_rows_done"] == summary["num_rows"] and summary["link_bytes"] == summary["planned_bytes"]
    taught = run_example("distill.toml", tmp_path, "--max-steps", "3")
    assert taught.returncode == 0, taught.stdout + taught.stderr
    check_folder(tmp_path / "outputs/distill/final")


#: Where the example's model is not at hand, its config is checked with the one that is.
AT_HAND = (
    f"model_name_or_path={ROOT}/examples/quickstart/model",
    "train_from_scratch=true",
    f"chat_template={ROOT}/tests/data/chat_templates/chatml.jinja",
)


@pytest.mark.parametrize(
    ("name", "changes"), [("tiny.toml", ()), ("dpo.toml", ()), ("quickstart.toml", AT_HAND), ("sft.toml", AT_HAND)]
)
def test_an_example_is_checked_without_a_warning(name: str, changes: tuple[str, ...], tmp_path: Path) -> None:
    done = run_example(name, tmp_path, "--json", *(f"--set={change}" for change in changes), command="check")
    found = json.loads(done.stdout)["findings"]
    assert done.returncode == 0, done.stdout + done.stderr
    assert [each for each in found if each["severity"] == "warning"] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quickstart.toml", "sft.toml"])
def test_smollm2_trains(name: str, tmp_path: Path) -> None:
    if not (ROOT / "examples/quickstart/smollm2-135m/config.json").is_file():
        pytest.skip("python examples/fetch_smollm2.py makes the model folder")
    done = run_example(name, tmp_path, "--max-steps", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    check_folder(next((tmp_path / "outputs").glob("*/final")))
