"""Forwards that stop at every unit call.

Each micro-batch's forward is a greenlet: Hugging Face's code runs untouched until it calls a unit, whose stub hands
the call to the engine and sleeps. Grad mode, autocast and random state belong to the forward, not to the thread, so
they change hands with every switch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import greenlet
import torch
from torch import Tensor

__all__ = ["RandomStates", "SuspendedForward", "ThreadModes", "UnitCall", "micro_batch_seed", "suspend"]


def micro_batch_seed(seed: int, micro_batch: int) -> int:
    """Return the seed of one micro-batch's random stream; different for every pair, the same on every machine."""
    mixed = (seed * 0x9E3779B97F4A7C15 + (micro_batch + 1) * 0xBF58476D1CE4E5B9) % 2**64
    mixed = ((mixed ^ (mixed >> 31)) * 0x94D049BB133111EB) % 2**64
    return (mixed ^ (mixed >> 29)) % 2**63


class RandomStates:
    """Reads and writes the random state of the CPU and of one compute device.

    Args:
        device: Compute device.
        enabled: False where nothing is really computed (a trace): all methods do nothing.
    """

    def __init__(self, device: torch.device, *, enabled: bool = True) -> None:
        self._device = device
        self._enabled = enabled

    def seed(self, seed: int) -> None:
        """Start a stream."""
        if self._enabled:
            torch.default_generator.manual_seed(seed)
            if self._device.type != "cpu":
                torch.get_device_module(self._device).manual_seed(seed)

    def get(self) -> tuple[Tensor, ...]:
        """Return where the current stream stands."""
        if not self._enabled:
            return ()
        states: tuple[Tensor, ...] = (torch.default_generator.get_state(),)
        if self._device.type != "cpu":
            states += (torch.get_device_module(self._device).get_rng_state(self._device),)
        return states

    def set(self, states: tuple[Tensor, ...]) -> None:
        """Continue a stream from where `get` found it."""
        if states:
            torch.default_generator.set_state(states[0])
            if len(states) > 1:
                torch.get_device_module(self._device).set_rng_state(states[1], self._device)


@dataclass(frozen=True, slots=True)
class ThreadModes:
    """Grad mode and autocast of the current thread."""

    grad_enabled: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cache_enabled: bool

    @classmethod
    def current(cls, device_type: str) -> ThreadModes:
        """Read them, for the CPU and one device type."""
        kinds = dict.fromkeys(("cpu", device_type))
        autocast = tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds)
        return cls(torch.is_grad_enabled(), autocast, torch.is_autocast_cache_enabled())

    def restore(self) -> None:
        """Write them."""
        torch.set_grad_enabled(self.grad_enabled)
        for kind, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.cache_enabled)


@dataclass(slots=True)
class UnitCall:
    """A unit call that a suspended forward waits for.

    Attributes:
        unit_index: Which unit.
        args: Positional arguments.
        kwargs: Keyword arguments.
        collector: The forward's active output recorders (key -> list), if any.
    """

    unit_index: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    collector: dict[str, list[Any]] | None


class SuspendedForward:
    """One micro-batch's forward.

    Args:
        micro_batch: Number of the micro-batch in the step.
        function: Runs the forward, given this object; every unit call inside reaches `suspend`.
        random: Whose state is switched.
        seed: Seed of the forward's random stream.
        mirror: Entered while the forward's own code runs, not while the engine does; None: nothing.

    Attributes:
        call: The unit call it waits for, None once finished.
        result: What the function returned, once finished.
        modes: Grad mode and autocast at the point of suspension.
        random_state: Its stream at the point of suspension; the engine moves it on.
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
        self._mirror = mirror or nullcontext()
        self.call: UnitCall | None = None
        self.result: Any = None
        self._random = random
        self._device_type = device.type
        self.modes = ThreadModes.current(device.type)
        random.seed(seed)
        self.random_state = random.get()
        self._bindings: list[tuple[dict[str, Any], str, Any, Any]] = []
        self._greenlet = greenlet.greenlet(function)

    def start(self) -> None:
        """Run to the first unit call."""
        self._switch(lambda: self._greenlet.switch(self))

    def resume(self, result: Callable[[], Any]) -> None:
        """Hand over the result of the pending call and run to the next one. `result` is evaluated inside."""
        self.call = None
        self._switch(lambda: self._greenlet.switch(result))

    def close(self) -> None:
        """Abandon a forward that is still suspended."""
        if self._greenlet and not self._greenlet.dead:
            self._switch(self._greenlet.throw)

    def bind(self, target: dict[str, Any], key: str, value: Any) -> None:
        """Put `value` into `target` whenever this forward runs, and only then. Called inside the forward."""
        self._bindings.append((target, key, value, target[key]))
        target[key] = value

    def _switch(self, switch: Callable[[], Any]) -> None:
        outer = ThreadModes.current(self._device_type)
        self.modes.restore()
        self._random.set(self.random_state)
        for target, key, value, _ in self._bindings:
            target[key] = value
        try:
            with self._mirror:
                given = switch()
        finally:
            for target, key, _, original in self._bindings:
                target[key] = original
            self.modes = ThreadModes.current(self._device_type)
            self.random_state = self._random.get()
            outer.restore()
        if self._greenlet.dead:
            self.result = given
        else:
            assert isinstance(given, UnitCall), type(given)
            self.call = given


def suspend(call: UnitCall) -> Any:
    """Give a unit call to the engine and sleep until its result is there. Called inside a `SuspendedForward`."""
    parent = greenlet.getcurrent().parent
    assert parent is not None, "a unit was called outside of a suspended forward"
    result: Callable[[], Any] = parent.switch(call)
    del call
    return result()
