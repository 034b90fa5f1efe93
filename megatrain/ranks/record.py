"""What ranks tell each other at the end of a step, so that all do the same next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Agreed", "StepRecord"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One rank after a step.

    Attributes:
        stops: a signal asks this rank for the end of the run.
        saves: a signal asks this rank for a checkpoint, or it is due by this rank's clock.
        is_hung_up: its terminal was closed.
        is_paused: it waited for space on a drive when it wrote this.
        step_s: seconds of the step.
        tier_used_bytes: tier -> bytes of slots in use after the step.
        stall_s: cause -> seconds that the step waited for it.
        link_bytes: ``"ram->nvme"``, ``"ram->ranks"`` -> bytes moved during the step.
        written_bytes: path on a drive -> bytes written to it during the step.
        rss_bytes: resident memory of the process.
    """

    stops: bool
    saves: bool
    is_hung_up: bool = False
    is_paused: bool = False
    step_s: float = 0.0
    tier_used_bytes: Mapping[str, int] = field(default_factory=dict)
    stall_s: Mapping[str, float] = field(default_factory=dict)
    link_bytes: Mapping[str, int] = field(default_factory=dict)
    written_bytes: Mapping[str, int] = field(default_factory=dict)
    rss_bytes: int = 0

    def figures(self) -> dict[str, Any]:
        """Return what ``StepMetrics.ranks`` has of it."""
        values = asdict(self)
        return {name: value for name, value in values.items() if name not in ("stops", "saves", "is_hung_up")}


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks do after a step: the same, as it follows from the records of all.

    Attributes:
        stops: the run ends after this step.
        saves: it is saved after this step.
        is_hung_up: the terminal of a rank was closed.
    """

    stops: bool = False
    saves: bool = False
    is_hung_up: bool = False

    @classmethod
    def of(cls, records: Sequence[StepRecord]) -> Agreed:
        """Return what follows from the records: what one rank is asked for, all do."""
        return cls(
            stops=any(record.stops for record in records),
            saves=any(record.saves for record in records),
            is_hung_up=any(record.is_hung_up for record in records),
        )
