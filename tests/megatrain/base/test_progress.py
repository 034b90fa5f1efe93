"""Progress of a live run: the engine's counters, the status file, the recorded losses and the console lines."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.base.observer import RunInfo, StepMetrics
from megatrain.base.progress import Activity, ActivitySnapshot
from megatrain.checkpoint.state import NUM_LOSSES, RunState
from megatrain.config import load_config
from megatrain.plan.planner import plan_run
from megatrain.run.folder import RunFolder
from megatrain.run.status import StatusWriter, read_status
from megatrain.training.resolve import resolve
from megatrain.training.trainer import Trainer
from oracles.run_state import make_state
from oracles.tiered_run import EXAMPLES, config_text, make_loader
from processes.saved_run import SavedRun, make_run


class Recorded(Activity):
    """Activity that records a snapshot whenever ``micro_batch`` is set."""

    def __init__(self) -> None:
        self.seen: list[ActivitySnapshot] = []
        super().__init__()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "micro_batch" and hasattr(self, "_start_s"):
            self.seen.append(replace(self.snapshot(), seconds=0.0))


@pytest.mark.parametrize("order", ["layer", "micro_batch"])
def test_engine_reports_every_tick_and_micro_batch(order: str, tmp_path: Path) -> None:
    text = config_text(tmp_path, EXAMPLES / "quickstart/model", nvme=0, advanced=f'micro_batch_order = "{order}"')
    (tmp_path / "run.toml").write_text(text.replace("[model]\n", "[model]\ntrain_from_scratch = true\n"))
    config = load_config(tmp_path / "run.toml").config
    plan = plan_run(resolve(config))
    activity = Recorded()
    with Trainer(config, plan=plan, activity=activity).open() as trainer:
        trainer.load()
        assert activity.snapshot().doing == "making random weights"
        engine, loader = trainer.make_engine(1), make_loader(config, plan)
        activity.begin("step", num_parts=len(plan.program.ticks), num_micro_batches=3)
        activity.seen.clear()
        engine.step(next(loader).micro_batches, step_index=0, lr=0.0)
    seen = [moment for moment in activity.seen if moment.phase]
    parts = [moment.part for moment in seen]
    assert parts == sorted(parts) and parts[-1] == len(plan.program.ticks) - 1
    assert [*dict.fromkeys(moment.phase for moment in seen)] == ["forward", "head", "backward"]
    for phase in ("forward", "backward"):
        units = {moment.unit for moment in seen if moment.phase == phase}
        assert {f"model.layers.{number}" for number in range(4)} <= units
        numbers = [m.micro_batch for m in seen if (m.phase, m.unit) == (phase, "model.layers.2") and m.micro_batch]
        assert [*dict.fromkeys(numbers)] == [1, 2, 3], numbers
    assert {moment.micro_batch for moment in seen if moment.phase == "head"} >= {1, 2, 3}


def wait_for(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def fail_while_training(folder: Path) -> None:
    with RunFolder(folder) as run, StatusWriter(run.path, exit_code_of=lambda error: 4) as status:
        status.set_state("training")
        raise ValueError("broken")


def test_status_file_is_updated_during_a_step(tmp_path: Path) -> None:
    """The status file shows the current unit during a step. A failed run leaves its exit code there."""
    activity = Activity()

    def doing() -> Any:
        status = read_status(tmp_path / "out")
        return None if status is None else status.activity.get("unit")

    (tmp_path / "out").mkdir()
    with RunFolder(tmp_path / "out") as folder:
        with StatusWriter(folder.path, activity=activity) as writer:
            writer.on_start(RunInfo("r", "sft", "cpu", tmp_path, 9, 128))
            for unit in ("a", "b"):
                activity.begin_part(1, "forward", unit)
                wait_for(lambda unit=unit: doing() == unit)
        activity.begin_part(1, "forward", "late")
    status = read_status(tmp_path / "out")
    assert status is not None and status.exit_code is None
    with pytest.raises(ValueError, match="broken"):
        fail_while_training(tmp_path / "out")
    status = read_status(tmp_path / "out")
    assert status is not None and (status.state, status.exit_code, status.activity) == ("failed", 4, {})


def test_moments_and_metrics_survive_the_status_file() -> None:
    moment = ActivitySnapshot("step", "forward", "model.layers.1", 3, 10, 2, 4, 1.5, "stopping")
    assert ActivitySnapshot.from_json(json.loads(json.dumps({**asdict(moment), "newer": 1}))) == moment
    metrics = StepMetrics(
        step=1, max_steps=9, epoch=0.5, loss=float("inf"), grad_norm=0.5, lr=1e-5, num_real_tokens=100,
        num_trained_tokens=50, step_s=0.5, eta_s=4.0, tier_used_bytes={"ram": 10}, warmup_steps=3,
    )  # fmt: skip
    assert StepMetrics.from_json(json.loads(json.dumps(metrics.to_json()))) == metrics


def test_first_and_last_mean_losses_survive_checkpoints() -> None:
    state = make_state()
    means: dict[int, Any] = {}
    for step in range(1, 31):
        state = replace(state.with_loss(float(step)), step=step)
        state = RunState.from_meta(json.loads(json.dumps(state.to_meta())), where="here")
        means[step] = state.mean_losses
    assert means[1] == (1.0, 1.0, 1) and means[3] == (1.0, 3.0, 1) and means[5] == (1.5, 4.5, 2)
    assert means[30] == (5.5, 25.5, NUM_LOSSES) and (state.first_loss, state.last_loss) == (1.0, 30.0)
    old = state.to_meta()
    del old["first_losses"], old["last_losses"]
    state = RunState.from_meta(old, where="here")
    assert state.mean_losses is None and state.with_loss(7.0).mean_losses is None


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    return make_run(tmp_path_factory.mktemp("run") / "w")


def test_warm_up_from_zero_is_reported(run: SavedRun) -> None:
    options = ("--set", "lr_scheduler_type=linear", "--set", "warmup_steps=2")
    result = run.run(*options, steps=6)
    assert result.exit_code == 0, result.output
    words = "warm-up: the learning rate rises from 0 to 0.001 over 2 steps; the first step does not change the weights"
    assert words in result.stdout
    rates = [line.split(" | lr ")[1].split(" | ")[0] for line in result.stdout.splitlines() if " | lr " in line]
    assert rates == ["0 (warm-up 1/2)", "5.0e-04 (warm-up 2/2)", "1.0e-03", "7.5e-04", "5.0e-04", "2.5e-04"]
    assert "means of the first and last 3 steps" in result.stdout
    assert " | eta 0 s" in result.stdout
    result = run.run(out="constant", steps=2)
    assert "warm-up" not in result.stdout
