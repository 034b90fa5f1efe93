"""A training run schedules its steps again after each evaluation and each checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.base.observer import Observers
from megatrain.config import load_config
from megatrain.training.open_run import OpenRun
from megatrain.training.trainer import Trainer
from processes.saved_run import SavedRun


def test_steps_are_scheduled_until_the_next_checkpoint(
    untrained: SavedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduled: list[tuple[int, int]] = []
    schedule_steps = OpenRun.schedule_steps

    def spy(run: OpenRun, first_step: int, num_steps: int) -> None:
        scheduled.append((first_step, num_steps))
        schedule_steps(run, first_step, num_steps)

    monkeypatch.setattr(OpenRun, "schedule_steps", spy)
    path = untrained.copy(tmp_path / "run").write_config(steps=5)  # saves after every second step and at the end
    Trainer(load_config(path).config, observer=Observers([])).train()
    assert scheduled == [(0, 2), (2, 2), (4, 1), (5, 0)]
