"""What a run is doing at this moment, for those who watch it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Activity", "Moment"]


@dataclass(frozen=True, slots=True)
class Moment:
    """What a run was doing when somebody looked.

    Attributes:
        doing: ``"step"``, or what else is done, e.g. ``"loading weights"``.
        phase: of a step or an evaluation, e.g. ``"backward"`` and ``"model.layers.11"``.
        unit: of a step or an evaluation, e.g. ``"backward"`` and ``"model.layers.11"``.
        part: how much of it is done; 0 of 0: not known.
        num_parts: how much of it is done; 0 of 0: not known.
        micro_batch: likewise, from 1.
        num_micro_batches: likewise, from 1.
        seconds: since it began.
        notice: what a person should read until it is over, e.g. that the run is stopping.
    """

    doing: str = ""
    phase: str = ""
    unit: str = ""
    part: int = 0
    num_parts: int = 0
    micro_batch: int = 0
    num_micro_batches: int = 0
    seconds: float = 0.0
    notice: str = ""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Moment:
        """Return the moment that ``dataclasses.asdict`` gave; what is missing or unknown is left out."""
        default = cls()
        known = {name: type(getattr(default, name))(values[name]) for name in cls.__slots__ if name in values}
        return cls(**known)


class Activity:
    """Counters that the thread which runs sets, and any other may read.

    Setting an attribute is all that they cost: nobody is woken, nothing waits, and no device is asked, so that a device
    may still be computing what was queued before. A reader may see one counter newer than another.

    Attributes:
        is_watched: whether somebody shows ``notice`` to a person soon after it is set.
        notice: see ``Moment``.
        micro_batch: see ``Moment``; set by the engine.
    """

    def __init__(self) -> None:
        self.is_watched = False
        self.notice = ""
        self.micro_batch = 0
        self._doing, self._phase, self._unit = "", "", ""
        self._part = self._num_parts = self._num_micro_batches = 0
        self._start_s = time.monotonic()

    def begin(self, doing: str, *, num_parts: int = 0, num_micro_batches: int = 0) -> None:
        """Something else is done from now on."""
        self._phase, self._unit, self._part, self.micro_batch = "", "", 0, 0
        self._doing, self._num_parts, self._num_micro_batches = doing, num_parts, num_micro_batches
        self._start_s = time.monotonic()

    def come_to(self, part: int, phase: str = "", unit: str = "", num_parts: int | None = None) -> None:
        """``part`` parts are done, and this is the next."""
        self._part, self._phase, self._unit, self.micro_batch = part, phase, unit, 0
        if num_parts is not None:
            self._num_parts = num_parts

    def look(self) -> Moment:
        """Return what is being done now."""
        return Moment(
            self._doing,
            self._phase,
            self._unit,
            self._part,
            self._num_parts,
            self.micro_batch,
            self._num_micro_batches,
            time.monotonic() - self._start_s,
            self.notice,
        )
