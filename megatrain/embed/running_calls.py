"""Running forwards of an offloaded module. A forward holds weights until it ends, even if an interrupt ends it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from types import FrameType

import torch

from megatrain.embed.partition import OffloadError
from megatrain.embed.weights import WeightBlock, release_all

#: Name of torch's function that runs a forward and its hooks.
_FORWARD_FUNCTION = "_call_impl"


@dataclass(slots=True)
class Call:
    """A running forward of a unit or module, or a running ``gathered``. ``end`` releases its blocks and hooks.

    Attributes:
        owner: Unit hooks or module to which the forward belongs.
        frame: Frame in which torch's function runs the hooks.
        outer_error: Exception that was being handled when the call began. Any other exception was raised by the call.
    """

    owner: object = None
    frame: FrameType | None = None
    held: list[WeightBlock] = field(default_factory=list)
    hooks: torch.autograd.graph.saved_tensors_hooks | None = None
    outer_error: BaseException | None = field(default_factory=lambda: sys.exc_info()[1])
    thread_id: int = field(default_factory=threading.get_ident)

    def hold(self, block: WeightBlock) -> None:
        """Hold a block until the call ends."""
        block.hold()
        self.held.append(block)

    def install_hooks(self, hooks: torch.autograd.graph.saved_tensors_hooks) -> None:
        """Apply saved-tensor hooks to later operations until the call ends."""
        self.hooks = hooks
        hooks.__enter__()

    def has_ended(self, live_frames: Container[FrameType | None]) -> bool:
        """Return whether the call began in this thread, but its frame has left the thread's stack, ``live_frames``."""
        return self.thread_id == threading.get_ident() and self.frame not in live_frames

    def end(self, *, is_failing: bool = False) -> None:
        """Uninstall the hooks and release all blocks."""
        if self.hooks is not None:
            self.hooks.__exit__()
        error = sys.exc_info()[1]
        release_all(self.held, is_failing=is_failing or (error is not None and error is not self.outer_error))


class Calls:
    """Running forwards of an offloaded module and its units, innermost last. Used by one thread at a time."""

    def __init__(self) -> None:
        self._running: list[Call] = []

    def __bool__(self) -> bool:
        return bool(self._running)

    def begin(self, owner: object) -> Call:
        """Record a forward before its code can fail, because torch runs the hooks even after a failed forward.

        Raises:
            OffloadError: torch.jit is tracing the forward. A trace would record the addresses of slots that are reused
                later.
        """
        if torch._C._get_tracing_state() is not None:
            raise OffloadError(
                "torch.jit.trace does not support modules whose weights are in a tiered store. Save the weights with "
                "save_pretrained(folder) or state_dict(), and trace an ordinary module that loads them"
            )
        call = Call(owner, _find_forward_frame())
        self._running.append(call)
        return call

    def end(self, owner: object) -> None:
        """End the innermost forward if it belongs to ``owner``. A failed hook may not have recorded its forward."""
        if self._running and self._running[-1].owner is owner:
            self._running.pop().end()

    def find_innermost(self, owner: object) -> Call | None:
        """Return the innermost running forward of an owner."""
        return next((call for call in reversed(self._running) if call.owner is owner), None)

    def end_aborted(self) -> None:
        """End forwards that an interrupt has aborted, because torch runs no hooks after an interrupt.

        This covers only the calling thread, because interrupts reach only the main thread. Other threads' frames cannot
        be read safely: before Python 3.12, ``sys._current_frames`` deadlocks if a garbage collection inside it frees
        tensors.
        """
        if self._running:
            live_frames = set(_iter_frames())
            while self._running and self._running[-1].has_ended(live_frames):
                self._running.pop().end(is_failing=True)


def _find_forward_frame() -> FrameType | None:
    return next((frame for frame in _iter_frames() if frame.f_code.co_name == _FORWARD_FUNCTION), None)


def _iter_frames() -> Iterator[FrameType]:
    """Yield the stack frames of the calling thread."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back
