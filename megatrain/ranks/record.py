"""Records that ranks exchange at the end of a step, so that all ranks take the same action next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Agreed", "StepRecord"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """State of one rank after a step.

    Attributes:
        stops: Whether the rank received a signal to end the run.
        saves: Whether the rank received a signal to save a checkpoint, or a checkpoint is due according to its clock.
        is_hung_up: Whether the rank's terminal was closed.
        is_paused: Whether the rank waited for space on a drive.
        step_s: Duration of the step in seconds.
        tier_used_bytes: Bytes of slots in use after the step, by tier.
        stall_s: Seconds that the step waited, by cause.
        link_bytes: Bytes moved during the step, by link (``"ram->nvme"``, ``"ram->ranks"``).
        written_bytes: Bytes written during the step, by a path on the drive.
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
        """Return the rank's measurements, for ``StepMetrics.ranks``."""
        values = asdict(self)
        return {name: value for name, value in values.items() if name not in ("stops", "saves", "is_hung_up")}


@dataclass(frozen=True, slots=True)
class Agreed:
    """Action that all ranks take after a step. It is derived from the records of all ranks.

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
        """Return the action of all ranks. If one rank requests an action, all ranks take it."""
        return cls(
            stops=any(record.stops for record in records),
            saves=any(record.saves for record in records),
            is_hung_up=any(record.is_hung_up for record in records),
        )
