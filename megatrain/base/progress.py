"""A run's current activity, for the live view and ``status.json``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from megatrain.base.observer import StoredRecord

__all__ = ["Activity", "ActivitySnapshot", "PendingSave"]


@dataclass(frozen=True, slots=True)
class ActivitySnapshot(StoredRecord):
    """Activity of a run at one moment.

    Attributes:
        doing: ``"step"``, or another activity, e.g. ``"loading weights"``.
        phase: Phase of a step or an evaluation, e.g. ``"backward"``.
        unit: Part of the model, e.g. ``"model.layers.11"``.
        part: Number of finished parts of the activity.
        num_parts: Number of parts. 0 if unknown.
        micro_batch: Current micro-batch, counted from 1. 0 between micro-batches.
        num_micro_batches: Number of micro-batches in a step.
        seconds: Time since the activity began.
        notice: Message that stays visible, e.g. that the run is stopping.
        done_bytes: Bytes that the activity (e.g. loading) has moved so far.
        num_bytes: Total bytes of the activity. 0 if not measured in bytes.
        saved_bytes: Bytes of a checkpoint written so far. Checkpoints are written concurrently with other activities.
        checkpoint_bytes: Size of this checkpoint. 0 if no checkpoint is being written.
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
    done_bytes: int = 0
    num_bytes: int = 0
    saved_bytes: int = 0
    checkpoint_bytes: int = 0


class PendingSave(Protocol):
    """Protocol for a checkpoint that is being written. ``Commit`` implements it."""

    @property
    def is_done(self) -> bool: ...

    @property
    def done_bytes(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...


class Activity:
    """Counters that the training thread sets, and that any thread can read without locks.

    Setting a counter is a plain assignment and never synchronizes with the device, which may still be executing queued
    work. A reader can see a new value of one counter together with an old value of another counter.

    Attributes:
        is_watched: Whether a live view is open, which then shows each new ``notice``.
        notice: See ``ActivitySnapshot``. Set by ``RunSignals``.
        micro_batch: See ``ActivitySnapshot``. Set by the engine.
        saving: Latest checkpoint whose write has begun. Set by the saver.
        is_paused: Function that returns whether the run waits for space on a drive. Set when the run has a store.
    """

    def __init__(self) -> None:
        self.is_watched = False
        self.notice = ""
        self.micro_batch = 0
        self.saving: PendingSave | None = None
        self.is_paused: Callable[[], bool] = lambda: False
        self._name, self._phase, self._unit = "", "", ""
        self._done_bytes = self._num_bytes = 0
        self._part = self._num_parts = self._num_micro_batches = 0
        self._start_s = time.monotonic()

    def begin(self, activity: str, *, num_parts: int = 0, num_micro_batches: int = 0, num_bytes: int = 0) -> None:
        """Begin a new activity. Pass ``num_bytes`` if it is measured in bytes."""
        self._done_bytes, self._num_bytes = 0, num_bytes
        self._phase, self._unit, self._part, self.micro_batch = "", "", 0, 0
        self._name, self._num_parts, self._num_micro_batches = activity, num_parts, num_micro_batches
        self._start_s = time.monotonic()

    def begin_part(self, part: int, phase: str = "", unit: str = "", num_parts: int | None = None) -> None:
        """Begin a part of the activity, after ``part`` finished parts."""
        self._part, self._phase, self._unit, self.micro_batch = part, phase, unit, 0
        if num_parts is not None:
            self._num_parts = num_parts

    def add_bytes(self, nbytes: int) -> None:
        """Add to the bytes that the activity has moved."""
        self._done_bytes += nbytes

    def set_bytes(self, done_bytes: int, num_bytes: int) -> None:
        """Set the bytes moved so far and the total bytes of the activity."""
        self._done_bytes, self._num_bytes = done_bytes, num_bytes

    def snapshot(self) -> ActivitySnapshot:
        """Return the current activity."""
        save = self.saving
        is_saving = save is not None and not save.is_done
        return ActivitySnapshot(
            self._name,
            self._phase,
            self._unit,
            self._part,
            self._num_parts,
            self.micro_batch,
            self._num_micro_batches,
            time.monotonic() - self._start_s,
            self.notice,
            min(self._done_bytes, self._num_bytes),
            self._num_bytes,
            save.done_bytes if save is not None and is_saving else 0,
            save.num_bytes if save is not None and is_saving else 0,
        )
