"""Runs the example configs as a user would, but with fewer steps. transformers can load the results."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from processes import warm

ROOT = Path(__file__).parents[1]
PROGRAM = "import sys; from {package}.main import main; main()"


def run_example(name: str, folder: Path, *options: str, command: str = "run") -> subprocess.CompletedProcess[str]:
    """Run a command on a copy of an example and a link to its data, so that nothing is written to the repository."""
    config = folder / name
    if not config.exists():
        shutil.copy(ROOT / "examples" / name, config)
        shutil.copytree(ROOT / "examples/recipes", folder / "recipes", dirs_exist_ok=True)
    if not (folder / "quickstart").exists():
        (folder / "quickstart").symlink_to(ROOT / "examples" / "quickstart")
    try:
        import megatrain_tier_cli  # noqa: F401

        package = "megatrain_tier_cli"
    except ImportError:  # the project is not installed
        package = "cli"
    words = [sys.executable, "-c", PROGRAM.format(package=package), command, str(config), *options]
    return warm.run(words, cwd=ROOT, timeout=280)


def check_folder(final: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(final)
    tokenizer = AutoTokenizer.from_pretrained(final)
    ids = tokenizer("Call me Ishmael.", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.isfinite(model(ids).logits).all()


def test_tiny_example_trains_and_its_final_folder_loads(tmp_path: Path) -> None:
    done = run_example("01_tiny.toml", tmp_path, "--max-steps", "12")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    lines = [json.loads(line) for line in (tmp_path / "outputs/tiny/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "event" not in line]
    assert len(steps) == 12
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3
    assert 0 < steps[-1]["tier_used_bytes"]["ram"] <= steps[-1]["tier_capacity_bytes"]["ram"]
    check_folder(tmp_path / "outputs/tiny/final")
    said = run_example("outputs/tiny/final", tmp_path, "-p", "Call me", "--max-new-tokens", "4", command="generate")
    assert said.returncode == 0 and json.loads(said.stdout)["prompt"] == "Call me", said.stdout + said.stderr


def test_a_teacher_scores_rows_and_its_student_trains(tmp_path: Path) -> None:
    teacher = run_example("01_tiny.toml", tmp_path, "--max-steps", "6")
    assert teacher.returncode == 0, teacher.stdout + teacher.stderr
    scored = run_example("05_teacher.toml", tmp_path, "--json", command="score")
    assert scored.returncode == 0, scored.stdout + scored.stderr
    summary = json.loads(scored.stdout.splitlines()[-1])
    assert summary["num_rows_done"] == summary["num_rows"] and summary["link_bytes"] == summary["planned_bytes"]
    taught = run_example("06_distill.toml", tmp_path, "--max-steps", "3")
    assert taught.returncode == 0, taught.stdout + taught.stderr
    check_folder(tmp_path / "outputs/distill/final")


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_guide_configs_train(tmp_path: Path) -> None:
    """Train with Muon, best-model selection and samples; with 8-bit moments and averaging; and on preferences."""
    options = [f"-c{tmp_path}/recipes/{name}.toml" for name in ("muon", "best_model")]
    best = run_example(
        "01_tiny.toml", tmp_path, *options, "--max-steps=4", "--set=eval_steps=2", "--set=warmup_steps=1"
    )
    assert best.returncode == 0, best.stdout + best.stderr
    lines = metrics_of(tmp_path / "outputs/best_model")
    evaluations = [line for line in lines if line.get("event") == "evaluation"]
    assert [(line["step"], len(line["samples"])) for line in evaluations] == [(2, 2), (4, 2)]
    assert evaluations[-1]["loss"] < evaluations[0]["loss"]
    check_folder(tmp_path / "outputs/best_model/final")
    options = [f"-c{tmp_path}/recipes/{name}.toml" for name in ("small_states", "average")]
    small = run_example("01_tiny.toml", tmp_path, *options, "--max-steps=4", "--set=warmup_steps=1")
    assert small.returncode == 0, small.stdout + small.stderr
    lines = metrics_of(tmp_path / "outputs/average")
    steps = [line for line in lines if "event" not in line]
    assert len(steps) == 4 and steps[-1]["loss"] < steps[0]["loss"]
    assert [line["name"] for line in lines if line.get("event") == "evaluation"] == ["loomings", "loomings_average"]
    assert json.loads((tmp_path / "outputs/average/final/export.json").read_text())["ema"]
    words = ("data.val_size=4", "predict_with_generate=true", "max_predict_samples=2", "max_new_tokens=16")
    preferred = run_example("03_dpo.toml", tmp_path, "--max-steps=3", *(f"--set={word}" for word in words))
    assert preferred.returncode == 0, preferred.stdout + preferred.stderr
    lines = metrics_of(tmp_path / "outputs/dpo")
    steps = [line for line in lines if "event" not in line]
    (samples,) = (line["samples"] for line in lines if line.get("event") == "evaluation")
    rows = [json.loads(line) for line in (ROOT / "examples/quickstart/preferences.jsonl").read_text().splitlines()]
    for sample in samples:
        (row,) = (row for row in rows if row["prompt"].strip() == sample["prompt"].strip())
        assert row["chosen"].strip().startswith(sample["reference"].strip()[:12])
    assert steps[0]["loss"] == pytest.approx(0.6931, abs=1e-3) and steps[-1]["preferences"]
    check_folder(tmp_path / "outputs/dpo/final")


#: Overrides for examples whose model is not in the repository. They select a model and a chat template that are.
AT_HAND = (
    f"model_name_or_path={ROOT}/examples/quickstart/model",
    "train_from_scratch=true",
    f"chat_template={ROOT}/tests/data/chat_templates/chatml.jinja",
)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("01_tiny.toml", ()),
        ("03_dpo.toml", ()),
        ("04_reward.toml", ()),
        ("quickstart.toml", AT_HAND),
        ("02_sft.toml", AT_HAND),
    ],
)
def test_an_example_is_checked_without_a_warning(name: str, changes: tuple[str, ...], tmp_path: Path) -> None:
    done = run_example(name, tmp_path, "--json", *(f"--set={change}" for change in changes), command="check")
    found = json.loads(done.stdout)["findings"]
    assert done.returncode == 0, done.stdout + done.stderr
    assert [each for each in found if each["severity"] == "warning"] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quickstart.toml", "02_sft.toml"])
def test_smollm2_trains(name: str, tmp_path: Path) -> None:
    if not (ROOT / "examples/quickstart/smollm2-135m/config.json").is_file():
        pytest.skip("python examples/fetch_smollm2.py makes the model folder")
    done = run_example(name, tmp_path, "--max-steps", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    check_folder(next((tmp_path / "outputs").glob("*/final")))
