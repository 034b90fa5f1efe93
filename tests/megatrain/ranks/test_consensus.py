"""A stop or save request to one rank applies to all ranks. A single process obeys its signals immediately."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain.ranks.record import Consensus, StepRecord
from megatrain.run.signals import RunSignals

FIGURES = StepRecord(is_paused=True, step_s=0.5)


class Group:
    """Group of ranks that gathers this rank's value and the values that a test puts into ``others``."""

    def __init__(self, *, is_single: bool, is_first: bool = True) -> None:
        self.world = SimpleNamespace(is_single=is_single, is_first=is_first)
        self.others: list[Any] = []

    def gather(self, own: Any) -> list[Any]:
        return [own, *self.others]


def consensus_of(group: Group) -> tuple[Consensus, RunSignals]:
    signals = RunSignals(stops_after_step=True)
    requests = lambda: StepRecord(signals.stop_requested, signals.save_requested, signals.is_hung_up)  # noqa: E731
    return Consensus(group, requests), signals  # type: ignore[arg-type]


def test_single_process_reads_its_signals() -> None:
    consensus, signals = consensus_of(Group(is_single=True))
    assert consensus.gather_records(FIGURES, is_due=True) == ()
    assert not consensus.must_stop and not consensus.must_save_now
    assert consensus.is_due(True) and not consensus.is_due(False)
    signals.stop_requested = signals.save_requested = signals.is_hung_up = True
    assert consensus.must_stop and consensus.must_save_now and consensus.is_hung_up and consensus.agree_to_stop()


def test_ranks_stop_once_all_know_of_the_request() -> None:
    group = Group(is_single=False)
    consensus, signals = consensus_of(group)
    signals.stop_requested = True
    assert not consensus.must_stop  # the others do not know yet
    records = consensus.gather_records(FIGURES, is_due=False)
    assert consensus.must_stop and [each.is_paused for each in records] == [True] and records[0].step_s == 0.5
    other, _ = consensus_of(Group(is_single=False))
    assert not other.agree_to_stop()
    group.others = [True]
    late, _ = consensus_of(group)
    assert late.agree_to_stop() and late.must_stop


def test_figures_of_a_rank_are_recorded_without_its_requests() -> None:
    record = StepRecord(True, True, True, True, 0.5, {"ram": 3}, {"fetch": 0.25}, {"ram->nvme": 7}, {"/drive": 9}, 11)
    assert record.figures() == {
        "is_paused": True,
        "step_s": 0.5,
        "tier_used_bytes": {"ram": 3},
        "stall_s": {"fetch": 0.25},
        "link_bytes": {"ram->nvme": 7},
        "written_bytes": {"/drive": 9},
        "rss_bytes": 11,
    }


@pytest.mark.parametrize("name", ["stop_requested", "save_requested", "is_hung_up"])
@pytest.mark.parametrize("is_own", [True, False])
def test_a_request_to_any_rank_concerns_only_itself(name: str, is_own: bool) -> None:
    group = Group(is_single=False)
    consensus, signals = consensus_of(group)
    setattr(signals, name, is_own)
    group.others = [StepRecord(**{name: not is_own}), StepRecord()]
    records = consensus.gather_records(FIGURES, is_due=False)
    assert records == [replace(FIGURES, **{name: is_own}), *group.others]
    found = {
        "stop_requested": consensus.must_stop,
        "save_requested": consensus.is_due(False),
        "is_hung_up": consensus.is_hung_up,
    }
    assert found == {key: key == name for key in found} and not consensus.must_save_now
    setattr(signals, name, False)
    group.others = [False, False]
    assert consensus.agree_to_stop() == (name == "stop_requested")


@pytest.mark.parametrize("is_first", [True, False])
def test_first_rank_decides_when_a_checkpoint_is_due(is_first: bool) -> None:
    consensus, signals = consensus_of(Group(is_single=False, is_first=is_first))
    consensus.gather_records(FIGURES, is_due=True)
    assert consensus.is_due(not is_first) == is_first
    signals.save_requested = True
    consensus.gather_records(FIGURES, is_due=False)
    assert consensus.is_due(False) and not consensus.must_save_now
