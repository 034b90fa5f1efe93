"""Records that ranks exchange at the end of a step, so that all ranks take the same next action."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Agreed", "StepRecord"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """State of one rank after a step.

    Attributes:
        stops: Whether the rank has received a signal to end the run.
        saves: Whether the rank has received a signal to save a checkpoint, or one is due by its clock.
        is_hung_up: Whether the terminal of the rank was closed.
        is_paused: Whether the rank was waiting for space on a drive.
        step_s: Seconds of the step.
        tier_used_bytes: Bytes of slots in use after the step, by tier.
        stall_s: Seconds that the step waited, by cause.
        link_bytes: Bytes moved during the step, by link (``"ram->nvme"``, ``"ram->ranks"``).
        written_bytes: Bytes written during the step, by path on a drive.
        rss_bytes: Resident memory of the process.
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
        """Return the rank's measurements for ``StepMetrics.ranks``."""
        values = asdict(self)
        return {name: value for name, value in values.items() if name not in ("stops", "saves", "is_hung_up")}


@dataclass(frozen=True, slots=True)
class Agreed:
    """Action of all ranks after a step, derived from the records of all ranks.

    Attributes:
        stops: Whether the run ends after this step.
        saves: Whether the run is saved after this step.
        is_hung_up: Whether the terminal of a rank was closed.
    """

    stops: bool = False
    saves: bool = False
    is_hung_up: bool = False

    @classmethod
    def of(cls, records: Sequence[StepRecord]) -> Agreed:
        """Return the action of all ranks. A request to one rank applies to all."""
        return cls(
            stops=any(record.stops for record in records),
            saves=any(record.saves for record in records),
            is_hung_up=any(record.is_hung_up for record in records),
        )
