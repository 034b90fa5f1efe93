"""The resources of a step are those between its start and its end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatrain import open_store
from megatrain.training import step_report
from megatrain.training.step_report import StepMeter


def test_a_step_uses_what_changed_since_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = [100.0]
    monkeypatch.setattr(step_report, "time", SimpleNamespace(perf_counter=lambda: clock_s[0]))
    engine: Any = SimpleNamespace(moved_bytes={"ram->gpu": 40}, moving_s={"ram->gpu": 0.5})
    with open_store(ram="1MiB") as store:
        meter = StepMeter(SimpleNamespace(), store, engine, steps_per_epoch=1, first_step=0)  # type: ignore[arg-type]
        clock_s[0] = 110.0
        meter.start()
        clock_s[0] = 112.5
        first = meter.stop()
        engine.moved_bytes, engine.moving_s = {"ram->gpu": 100}, {"ram->gpu": 2.0}
        meter.start()
        clock_s[0] = 116.5
        second = meter.stop()
    assert (first.step_s, second.step_s) == (2.5, 4.0)
    assert (first.link_bytes["ram->gpu"], second.link_bytes["ram->gpu"]) == (40, 60)
    assert (first.link_busy_s["ram->gpu"], second.link_busy_s["ram->gpu"]) == (0.5, 1.5)
