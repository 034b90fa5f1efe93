"""Forwards of unmodified models that are suspended at every unit call.

Each micro-batch's forward runs in a separate greenlet. `stub_units` replaces each unit's `forward` with a stub. The
stub passes the arguments of the call to the engine and suspends the greenlet. The engine binds the weights, runs the
unit and resumes the greenlet with the result. Model code sees an ordinary call. All micro-batches can therefore wait at
the same unit and share its weights.

All greenlets run on one thread, so each switch explicitly swaps grad mode, autocast and random state.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import greenlet
import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode

from megatrain.engine.unit.state import RandomStates, ThreadModes


@dataclass(slots=True)
class UnitCall:
    """Call to a unit, at which a forward is suspended.

    Attributes:
        collector: Lists of the forward's active output recorders, by key; None if there are none.
    """

    unit_index: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    collector: dict[str, list[Any]] | None


class SuspendedForward:
    """Forward of one micro-batch, suspended at unit calls.

    Args:
        function: Function that runs the forward, given this object. Its unit calls must call `suspend`.
        random: Random states of the CPU and the compute device, which every switch swaps.
        mirror: Mode that is active only while model code runs; None for no mirror.

    Attributes:
        call: Unit call at which the forward is suspended; None after the end.
        result: Return value of the function; None before the end.
        modes: Grad mode and autocast when the forward was suspended.
        random_state: Random state when the forward was suspended. The caller advances it by running the unit.
    """

    def __init__(
        self,
        micro_batch: int,
        function: Callable[[SuspendedForward], Any],
        random: RandomStates,
        device: torch.device,
        seed: int,
        mirror: AbstractContextManager[Any] | None = None,
    ) -> None:
        self.micro_batch = micro_batch
        self._mirror, self._should_enter_mirror = mirror, True
        self.call: UnitCall | None = None
        self.result: Any = None
        self._random = random
        self._device_type = device.type
        self.modes = ThreadModes.current(device.type)
        random.seed(seed)
        self.random_state = random.get()
        self._bindings: list[tuple[dict[str, Any], str, Any, Any]] = []
        self._greenlet = greenlet.greenlet(function)
        self._locations: dict[int, tuple[weakref.ref[Tensor], int, tuple[int, int]]] = {}

    def start(self) -> None:
        """Run the forward until its first unit call, or to its end."""
        self._switch(lambda: self._greenlet.switch(self))

    def resume(self, result: Callable[[], Any]) -> None:
        """Return a result from the pending call, and run to the next call.

        Args:
            result: Function that builds the result. It runs with the modes and random state of the forward.
        """
        self.call = None
        self._switch(lambda: self._greenlet.switch(result))

    def close(self) -> None:
        """Abandon a forward that is still suspended."""
        if self._greenlet and not self._greenlet.dead:
            self._switch(self._greenlet.throw)

    def record_location(self, tensor: Tensor, location: tuple[int, int]) -> None:
        """Record that a tensor has been saved as the input with the given (visit, index)."""
        self._locations[id(tensor)] = weakref.ref(tensor), tensor._version, location

    def find_location(self, tensor: Tensor) -> tuple[int, int] | None:
        """Return the recorded location of a tensor, or None if none was recorded or the tensor has since changed."""
        record = self._locations.get(id(tensor))
        if record is None or record[0]() is not tensor or record[1] != tensor._version:
            return None
        return record[2]

    def bind(self, target: dict[str, Any], key: str, value: Any) -> None:
        """Set ``target[key]`` to ``value`` while this forward runs, and restore it while the forward is suspended."""
        self._bindings.append((target, key, value, target[key]))
        target[key] = value

    def _switch(self, switch: Callable[[], Any]) -> None:
        outer_modes = ThreadModes.current(self._device_type)
        self.modes.restore()
        self._random.set(self.random_state)
        for target, key, value, _ in self._bindings:
            target[key] = value
        if self._mirror is not None and self._should_enter_mirror:
            self._mirror.__enter__()
        try:
            outcome = switch()
        finally:
            self._leave_mirror()
            for target, key, _, original in self._bindings:
                target[key] = original
            self.modes = ThreadModes.current(self._device_type)
            self.random_state = self._random.get()
            outer_modes.restore()  # must come last, because the lines above need the forward's modes
        if self._greenlet.dead:
            self.result = outcome
        else:
            assert isinstance(outcome, UnitCall), type(outcome)
            self.call = outcome

    def _leave_mirror(self) -> None:
        if self._mirror is None:
            return
        # If a forward reads a weight, it is suspended within a function that the mirror handles. torch deactivates the
        # mirror during this function and reactivates it when the function returns, so do not exit the mirror here.
        self._should_enter_mirror = _get_current_function_mode() is self._mirror  # type: ignore[no-untyped-call]
        if self._should_enter_mirror:
            self._mirror.__exit__(None, None, None)


def suspend(call: UnitCall) -> Any:
    """Suspend the current `SuspendedForward` at a unit call, and return the result that `resume` provides."""
    parent = greenlet.getcurrent().parent
    assert parent is not None, "a unit was called outside of a suspended forward"
    result: Callable[[], Any] = parent.switch(call)
    del call  # frees the arguments before the result is built
    return result()


def is_suspendable() -> bool:
    """Return whether the calling code runs within a `SuspendedForward`."""
    return greenlet.getcurrent().parent is not None
