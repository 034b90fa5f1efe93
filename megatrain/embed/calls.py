"""Forwards that are running: what they hold, and those that an interrupt has ended without a word."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING

from megatrain.embed.saved import WeightHooks
from megatrain.embed.weights import let_go

if TYPE_CHECKING:
    from megatrain.embed.saved import BackwardWindow
    from megatrain.embed.weights import WeightBlock

__all__ = ["Call", "Calls"]

#: Where torch calls the hooks of a forward.
_CALLER = "_call_impl"


@dataclass(slots=True)
class Call:
    """One forward of a unit or of a whole module, or one ``gathered``: what it holds, how its graph saves weights.

    Attributes:
        owner: whose forward.
        frame: of torch's code that calls the hooks.
        outer_error: one that was being handled when it began: only another one is its own.
        thread_id: of the thread that runs it.
    """

    owner: object = None
    frame: FrameType | None = None
    held: list[WeightBlock] = field(default_factory=list)
    hooks: WeightHooks | None = None
    outer_error: BaseException | None = field(default_factory=lambda: sys.exc_info()[1])
    thread_id: int = field(default_factory=threading.get_ident)

    def hold(self, block: WeightBlock) -> None:
        """Hold a block until the end."""
        block.hold()
        self.held.append(block)

    def enter(self, window: BackwardWindow) -> None:
        """Let weights be saved by name."""
        self.hooks = WeightHooks(window)
        self.hooks.enter()

    def end(self, *, is_failing: bool = False) -> None:
        """Let go of everything."""
        if self.hooks is not None:
            self.hooks.leave()
        error = sys.exc_info()[1]
        let_go(self.held, is_failing=is_failing or (error is not None and error is not self.outer_error))


class Calls:
    """The forwards of a tiered module and of its units that are running, the innermost last. One thread at a time."""

    def __init__(self) -> None:
        self._running: list[Call] = []

    def __bool__(self) -> bool:
        return bool(self._running)

    def begin(self, owner: object) -> Call:
        """Note a forward, before anything of it can fail: torch calls the hooks after it in any case."""
        call = Call(owner, _caller())
        self._running.append(call)
        return call

    def end(self, owner: object) -> None:
        """End the innermost forward, if it is the owner's: its hook may not have had its turn, where another failed."""
        if self._running and self._running[-1].owner is owner:
            self._running.pop().end()

    def innermost_of(self, owner: object) -> Call | None:
        """Return the last forward of an owner."""
        return next((call for call in reversed(self._running) if call.owner is owner), None)

    def drop_dead(self) -> None:
        """End forwards that an interrupt has ended: for those torch calls no hooks.

        Only those of the calling thread: an interrupt comes to the main thread alone. The frames of other threads are
        not looked at: before Python 3.12, a garbage collection inside ``sys._current_frames`` deadlocks when it frees
        tensors.
        """
        if self._running:
            alive = set(_frames())
            while self._running and _has_ended(self._running[-1], alive):
                self._running.pop().end(is_failing=True)


def _has_ended(call: Call, alive: set[FrameType | None]) -> bool:
    return call.thread_id == threading.get_ident() and call.frame not in alive


def _caller() -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != _CALLER:
        frame = frame.f_back
    return frame


def _frames() -> Iterator[FrameType | None]:
    """Yield what runs now in the calling thread."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back
