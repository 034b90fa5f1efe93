"""Agreement of all ranks after each step: if one rank receives a request to stop or save, all ranks do so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from megatrain.ranks.group import RankGroup

__all__ = ["Consensus", "StepRecord"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """State of one rank after a step.

    Attributes:
        stop_requested: Whether the rank received a signal to end the run.
        save_requested: Whether the rank received a signal to save or, on rank 0, a checkpoint is due.
        is_hung_up: Whether the rank's terminal was closed.
        is_paused: Whether the rank waited during the step for free space on a drive.
        tier_used_bytes: Bytes of slots in use after the step, by tier.
        stall_s: Seconds that the step waited, by cause.
        link_bytes: Bytes moved during the step, by link (``"ram->nvme"``, ``"ram->ranks"``).
        written_bytes: Bytes written during the step, by path of the drive.
    """

    stop_requested: bool = False
    save_requested: bool = False
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
        requests = ("stop_requested", "save_requested", "is_hung_up")
        return {name: value for name, value in asdict(self).items() if name not in requests}


class Consensus:
    """Decision on whether a run stops or saves after a step, which is the same on all ranks.

    A single process uses its current requests. Several ranks use the records that were gathered after the last step, so
    that all ranks make the same decision.

    Args:
        requests: Function that returns a record of the requests that this process received as signals.
    """

    def __init__(self, group: RankGroup, requests: Callable[[], StepRecord]) -> None:
        self._group, self._requests, self._decision = group, requests, StepRecord()

    @property
    def must_stop(self) -> bool:
        """Whether the run ends after the current step."""
        return self._requests().stop_requested if self._group.world.is_single else self._decision.stop_requested

    @property
    def is_hung_up(self) -> bool:
        """Whether the terminal of any rank was closed."""
        return self._requests().is_hung_up or self._decision.is_hung_up

    @property
    def must_save_now(self) -> bool:
        """Whether a single process must save because of a signal, even after the last step."""
        return self._group.world.is_single and self._requests().save_requested

    def is_due(self, is_due_locally: bool) -> bool:
        """Return whether a checkpoint is due. Several ranks use their records, because their clocks may disagree."""
        return is_due_locally if self._group.world.is_single else self._decision.save_requested

    def agree_to_stop(self) -> bool:
        """Return whether the run must end because any rank received a stop request. This is a collective."""
        if not self._group.world.is_single:
            requested = self._decision.stop_requested or self._requests().stop_requested
            self._decision = replace(self._decision, stop_requested=any(self._group.gather(requested)))
        return self.must_stop

    def gather_records(self, figures: StepRecord, *, is_due: bool) -> Sequence[StepRecord]:
        """Gather and return all ranks' records after a step, or none for a single process. This is a collective.

        ``is_due`` states whether the config requests a checkpoint. Only rank 0's value is used.
        """
        if self._group.world.is_single:
            return ()
        requests = self._requests()
        save = requests.save_requested or (self._group.world.is_first and is_due)
        record = replace(figures, stop_requested=requests.stop_requested, save_requested=save)
        records = self._group.gather(replace(record, is_hung_up=requests.is_hung_up))
        self._decision = StepRecord(
            stop_requested=any(record.stop_requested for record in records),
            save_requested=any(record.save_requested for record in records),
            is_hung_up=any(record.is_hung_up for record in records),
        )
        return records
