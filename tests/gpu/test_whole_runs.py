"""The commands plan, run, status, export and doctor on a GPU.

Results are the same for every GPU tier size, and after a run is stopped or killed and then resumed.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from processes import warm
from processes.saved_run import NVME, ROOT, SavedRun, end, make_run

LAUNCHER = ROOT / "tests" / "fakes" / "on_virtual_gpu.py"
STEPS = 4
EVALUATION = '[[data.eval]]\npath = "data.txt"\n[evaluation]\neval_steps = 2\n'
SAMPLES = "predict_with_generate = true\nmax_predict_samples = 3\nmax_new_tokens = 5\n"
ALL_ON_DRIVE = "".join(f'{kind} = ["nvme"]\n' for kind in ("weights", "optimizer", "activations", "gradients"))
#: Name -> (placement, size of the GPU tier). A size of "" means all free memory.
SIZES = {
    "all that there is": ("", ""),
    "a part streams": ("", "2MiB"),
    "state on a drive": ('optimizer = ["nvme"]', "4MiB"),
    "all on a drive": (ALL_ON_DRIVE, "4MiB"),
}

pytestmark = pytest.mark.usefixtures("virtual")


def tables(placement: str, gpu: str) -> dict[str, Any]:
    size = f'[tiers.gpu]\nsize = "{gpu}"\n' if gpu else ""
    more = f"{EVALUATION}{size}{NVME if placement else ''}"
    return {"device": "cuda", "dtype": "bfloat16", "steps": STEPS, "placement": placement, "more": more}


def result(run: SavedRun) -> tuple[list[float], list[float], str]:
    """Return training losses, held-out losses, and a digest of the exported weights."""
    rows = [json.loads(line) for line in (run.out / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "event" not in row]
    held_out = [row["loss"] for row in rows if row.get("event") == "evaluation"]
    return losses, held_out, hashlib.sha256((run.out / "final" / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    return make_run(tmp_path_factory.mktemp("whole") / "made")


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return {}


def completed(model: SavedRun, folder: Path, size: str) -> tuple[SavedRun, Any]:
    run = model.copy(folder)
    done = run.run(**tables(*SIZES[size]))
    assert done.exit_code == 0, done.output
    return run, result(run)


@pytest.mark.slow  # test_evaluations_continue_rows_as_on_a_cpu and tests/pairs run the same command
@pytest.mark.parametrize("size", SIZES)
def test_losses_and_weights_are_the_same_at_every_size(
    size: str, model: SavedRun, tmp_path: Path, results: dict[str, Any]
) -> None:
    run, results[size] = completed(model, tmp_path / "run", size)
    losses, held_out, _ = results[size]
    assert len(losses) == STEPS and len(held_out) == 2
    first = next(iter(results.values()))
    assert results[size] == first
    summary = json.loads((run.out / "summary.json").read_text())["ends"][-1]
    links = summary["link_bytes"]
    assert (links.get("nvme->ram", 0) > 0) == (size in ("state on a drive", "all on a drive")), summary
    assert size == "all that there is" or links["gpu->ram"] > 0 < links["ram->gpu"], summary
    used = {place for link, nbytes in links.items() if nbytes for place in link.split("->")}
    peaks, capacities = summary["tier_peak_bytes"], summary["tier_capacity_bytes"]
    assert all(int(tier in used) <= peaks[tier] <= most for tier, most in capacities.items()), summary


@pytest.mark.slow
def test_stopped_run_matches_an_uninterrupted_run(model: SavedRun, tmp_path: Path, results: dict[str, Any]) -> None:
    size = "a part streams"
    for other in (size, "all that there is"):
        if other not in results:
            results[other] = completed(model, tmp_path / other, other)[1]
    assert results[size] == results["all that there is"]
    run = model.copy(tmp_path / "run")
    for steps in (2, STEPS):
        done = run.run("--max-steps", str(steps), **tables(*SIZES[size]))
        assert done.exit_code == 0, done.output
    losses, held_out, digest = results[size]
    again = result(run)
    assert again[0] == losses and again[1][-1] == held_out[-1] and again[2] == digest
    for words in (("status", run.out), ("plan", run.folder / "run.toml"), ("export", run.out, run.folder / "model2")):
        done = run.call(*words)
        assert done.exit_code == 0, done.output
    assert "done" in run.call("status", run.out).output


@pytest.fixture(scope="module")
def sampled_on_cpu(model: SavedRun, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return the continuations of held-out rows that a run on the CPU generated."""
    run = model.copy(tmp_path_factory.mktemp("on_cpu") / "run")
    done = run.run(steps=2, more=f"{EVALUATION}{SAMPLES}")
    assert done.exit_code == 0, done.output
    return samples(run)


def samples(run: SavedRun) -> list[Any]:
    rows = [json.loads(line) for line in (run.out / "metrics.jsonl").read_text().splitlines()]
    return [row["samples"] for row in rows if row.get("event") == "evaluation"]


@pytest.mark.parametrize("size", list(reversed(SIZES)))
def test_evaluations_continue_rows_as_on_a_cpu(
    size: str, model: SavedRun, tmp_path: Path, sampled_on_cpu: list[Any]
) -> None:
    run = model.copy(tmp_path / "run")
    values = tables(*SIZES[size]) | {"dtype": "float32", "steps": 2}
    values["more"] = values["more"].replace(EVALUATION, f"{EVALUATION}{SAMPLES}")
    done = run.run(**values)
    assert done.exit_code == 0, done.output
    assert len(sampled_on_cpu) == 1 and len(sampled_on_cpu[0]) == 3
    assert all(sample["generated"] for sample in sampled_on_cpu[0])
    assert samples(run) == sampled_on_cpu


@pytest.mark.slow
def test_averages_are_evaluated_alike_at_every_size(model: SavedRun, tmp_path: Path) -> None:
    """Depending on the GPU tier's size, the average is computed and rounded on the device or on the host."""
    found = []
    for number, size in enumerate(SIZES):
        run = model.copy(tmp_path / str(number))
        values = tables(*SIZES[size])
        values["more"] = values["more"].replace("eval_steps = 2\n", 'eval_steps = 2\nweights = "both"\n')
        done = run.run("--set", "optimizer.ema_decay=0.5", **values)
        assert done.exit_code == 0, done.output
        found.append(result(run))
    held_out = found[0][1]
    assert len(held_out) == 4 and held_out[-1] != held_out[-2]
    assert all(each == found[0] for each in found)


@pytest.mark.slow
def test_killed_process_resumes_from_its_checkpoint(
    model: SavedRun, tmp_path: Path, virtual: Any, results: dict[str, Any]
) -> None:
    size = "state on a drive"
    if size not in results:
        results[size] = completed(model, tmp_path / "whole", size)[1]
    run = model.copy(tmp_path / "run")
    config = run.write_config(**tables(*SIZES[size]))
    launcher = [] if virtual is None else [str(LAUNCHER)]
    command = [sys.executable, *launcher, "-m", "cli", "run", str(config)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}
    pipe = subprocess.PIPE
    process = warm.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment)
    try:
        assert process.stdout is not None
        seen = []
        for line in process.stdout:
            seen.append(line)
            if line.startswith("saved"):
                process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "".join(seen)
    finally:
        end(process)
    done = warm.run(command, cwd=ROOT, env=environment, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "continu" in done.stdout + done.stderr
    assert result(run)[2] == results[size][2]


@pytest.mark.slow
def test_doctor_measures_the_gpu(model: SavedRun, tmp_path: Path) -> None:
    done = model.call("doctor", "--quick", "--json", tmp_path)
    assert done.exit_code == 0, done.output
    seen = json.loads(done.stdout)
    assert seen["gpu"]["h2d"] > 0 < seen["gpu"]["matmul_flops"]["bfloat16"]
