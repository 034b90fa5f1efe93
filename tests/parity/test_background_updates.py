"""Host updates overlap with the computation of other layers on a device. No layer starts before its update ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatrain.engine.step import StepEngine
from megatrain.engine.tape.access import StoreAccess
from megatrain.engine.tape.updates import Updater
from oracles.tiered_run import TieredRun, config_text, run_config

NUM_STEPS = 3
#: All layers except the last are updated on the host and fetched for their forward.
TABLES = {"gpu": "5MiB", "nvme": 0}


def run(folder: Path, model: Path, **tables: Any) -> TieredRun:
    folder.mkdir()
    return run_config(config_text(folder, model, **tables), folder, num_steps=NUM_STEPS)


class DelayedMiddleUpdates:
    """Patch that delays each update of a middle layer until 20 ms after the model leases another unit's weights.

    Attributes:
        continued_during_delay: For each delayed update, whether the model continued during the delay.
        threads: Names of the threads that ran updates on the host.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.continued_during_delay: list[bool] = []
        self.threads: set[str] = set()
        self._leased = threading.Event()
        update, weights, run_updates = Updater.update, StoreAccess.weights, StoreAccess.run_updates

        def delayed_update(updater: Updater, index: int, part: int, tier: str, *args: Any) -> None:
            if tier == "ram":
                self.threads.add(threading.current_thread().name)
                if index == 3:
                    self.continued_during_delay.append(self._leased.wait(20))
                    time.sleep(0.02)
            update(updater, index, part, tier, *args)

        @contextmanager
        def noted(access: StoreAccess, unit: Any, visit: int) -> Iterator[Mapping[str, Any]]:
            with weights(access, unit, visit) as tensors:
                self._leased.set()
                yield tensors
            self._leased.clear()

        def run_remaining_updates(access: StoreAccess, *args: Any) -> None:
            self._leased.set()  # no layer runs during these updates
            run_updates(access, *args)

        monkeypatch.setattr(Updater, "update", delayed_update)
        monkeypatch.setattr(StoreAccess, "run_updates", run_remaining_updates)
        monkeypatch.setattr(StoreAccess, "weights", noted)


def test_layers_overlap_updates_of_other_layers_bit_identically(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(tmp_path / "ram", tiny_model, nvme=0)
    beside = DelayedMiddleUpdates(monkeypatch)
    result = run(tmp_path / "gpu", tiny_model, **TABLES)
    assert beside.continued_during_delay == [True] * NUM_STEPS
    assert len(beside.threads) == 1 and threading.main_thread().name not in beside.threads
    result.assert_same(expected)
    assert result.moved is not None
    moved = {link: stats.num_bytes for link, stats in result.moved.links.items()}
    assert moved == result.plan.placement.run_traffic_bytes(NUM_STEPS)


def test_host_layers_update_sequentially(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()
    update = Updater.update
    monkeypatch.setattr(
        Updater, "update", lambda *args: (threads.add(threading.current_thread().name), update(*args))[1]
    )
    run(tmp_path / "ram", tiny_model, nvme=0)
    assert threads == {threading.main_thread().name}


def test_failed_update_ends_the_step_and_all_other_updates(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = Updater.update
    running: list[int] = []
    left: list[int] = []

    def broken(updater: Updater, index: int, *args: Any) -> None:
        if index == 1:
            raise ArithmeticError("no update of this layer")
        running.append(index)
        time.sleep(0.02)
        update(updater, index, *args)
        running.remove(index)

    step = StepEngine.step

    def watched(engine: StepEngine, *args: Any, **named: Any) -> Any:
        try:
            return step(engine, *args, **named)
        finally:
            left.extend(running)

    monkeypatch.setattr(Updater, "update", broken)
    monkeypatch.setattr(StepEngine, "step", watched)
    with pytest.raises(ArithmeticError, match="no update of this layer"):
        run(tmp_path / "gpu", tiny_model, **TABLES)
    assert not left


def test_failing_step_waits_for_running_updates(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update, begin = Updater.update, StoreAccess.begin
    begun, ended, seen = threading.Event(), threading.Event(), []

    def slow(updater: Updater, index: int, *args: Any) -> None:
        begun.set()
        time.sleep(0.1)
        update(updater, index, *args)
        ended.set()

    def stopped(access: StoreAccess, phase: str, visit: int) -> None:
        begin(access, phase, visit)  # type: ignore[arg-type]
        if begun.is_set():
            ended.clear()
            raise KeyboardInterrupt

    step = StepEngine.step

    def watched(engine: StepEngine, *args: Any, **named: Any) -> Any:
        try:
            return step(engine, *args, **named)
        except KeyboardInterrupt:
            seen.append(ended.is_set())
            raise

    monkeypatch.setattr(Updater, "update", slow)
    monkeypatch.setattr(StoreAccess, "begin", stopped)
    monkeypatch.setattr(StepEngine, "step", watched)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "gpu", tiny_model, **TABLES)
    assert seen == [True]
