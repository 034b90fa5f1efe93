"""Forwards of unmodified models that stop at every unit call.

Each micro-batch's forward runs in its own greenlet. The units' `forward` are stubs, which `forward.py` installs. A stub
switches to the engine with the call's arguments and sleeps. The engine runs the unit, with its weights bound, and
switches back with the result. The model's code sees one ordinary call. So all micro-batches can wait at the same unit
while its weights are in memory once.

Greenlets switch stacks, not threads. So each switch explicitly swaps grad mode, autocast and random state.
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

from megatrain.engine.state import RandomStates, ThreadModes

__all__ = ["SuspendedForward", "UnitCall", "is_suspendable", "suspend"]


@dataclass(slots=True)
class UnitCall:
    """Unit call that a suspended forward waits for.

    Attributes:
        collector: The forward's active output recorders (key -> list), if any.
    """

    unit_index: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    collector: dict[str, list[Any]] | None


class SuspendedForward:
    """One micro-batch's forward.

    Args:
        function: Runs the forward, given this object. Every unit call inside reaches `suspend`.
        random: Random state of the compute device, swapped at every switch.
        mirror: Mode that is active while the model's code runs, and not while the engine runs; None for no mirror.

    Attributes:
        call: Unit call that it waits for; None after the end.
        result: Return value of the function, after the end.
        modes: Grad mode and autocast at the point of suspension.
        random_state: State of its stream at the point of suspension. The engine advances it when it runs the unit.
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
        self._mirror, self._enters_mirror = mirror, True
        self.call: UnitCall | None = None
        self.result: Any = None
        self._random = random
        self._device_type = device.type
        self.modes = ThreadModes.current(device.type)
        random.seed(seed)
        self.random_state = random.get()
        self._bindings: list[tuple[dict[str, Any], str, Any, Any]] = []
        self._greenlet = greenlet.greenlet(function)
        self._places: dict[int, tuple[weakref.ref[Tensor], int, tuple[int, int]]] = {}

    def start(self) -> None:
        """Run to the first unit call."""
        self._switch(lambda: self._greenlet.switch(self))

    def resume(self, result: Callable[[], Any]) -> None:
        """Return the result of the pending call and run to the next one.

        Args:
            result: Makes the result; called inside the forward, under its modes and its random state.
        """
        self.call = None
        self._switch(lambda: self._greenlet.switch(result))

    def close(self) -> None:
        """Abandon a forward that is still suspended."""
        if self._greenlet and not self._greenlet.dead:
            self._switch(self._greenlet.throw)

    def note_place(self, tensor: Tensor, place: tuple[int, int]) -> None:
        """Record the visit's input, (visit, index), that has a copy of a tensor."""
        self._places[id(tensor)] = weakref.ref(tensor), tensor._version, place

    def place_of(self, tensor: Tensor) -> tuple[int, int] | None:
        """Return the recorded place of a tensor that has not changed since; None for other tensors."""
        found = self._places.get(id(tensor))
        if found is None or found[0]() is not tensor or found[1] != tensor._version:
            return None
        return found[2]

    def bind(self, target: dict[str, Any], key: str, value: Any) -> None:
        """Put `value` into `target` while this forward runs, and only then. Called inside the forward."""
        self._bindings.append((target, key, value, target[key]))
        target[key] = value

    def _switch(self, switch: Callable[[], Any]) -> None:
        outer = ThreadModes.current(self._device_type)
        self.modes.restore()
        self._random.set(self.random_state)
        for target, key, value, _ in self._bindings:
            target[key] = value
        if self._mirror is not None and self._enters_mirror:
            self._mirror.__enter__()
        try:
            given = switch()
        finally:
            self._leave_mirror()
            for target, key, _, original in self._bindings:
                target[key] = original
            self.modes = ThreadModes.current(self._device_type)
            self.random_state = self._random.get()
            outer.restore()  # last, because the code before reads the forward's modes
        if self._greenlet.dead:
            self.result = given
        else:
            assert isinstance(given, UnitCall), type(given)
            self.call = given

    def _leave_mirror(self) -> None:
        if self._mirror is None:
            return
        # A forward that reads a weight waits inside of a function that the mirror handles. Torch has removed the mirror
        # during this function, and restores it when the function returns, in the forward.
        self._enters_mirror = _get_current_function_mode() is self._mirror  # type: ignore[no-untyped-call]
        if self._enters_mirror:
            self._mirror.__exit__(None, None, None)


def suspend(call: UnitCall) -> Any:
    """Switch to the engine with a unit call, and return its result. Called inside a `SuspendedForward`."""
    parent = greenlet.getcurrent().parent
    assert parent is not None, "a unit was called outside of a suspended forward"
    result: Callable[[], Any] = parent.switch(call)
    del call  # frees the tensors of the arguments before the result is made
    return result()


def is_suspendable() -> bool:
    """Return whether the code runs inside a `SuspendedForward`."""
    return greenlet.getcurrent().parent is not None
