"""Global state of torch that is saved per micro-batch: random state, grad mode, autocast.

A recompute is bit-identical to its forward only if the global state is the same. Code that runs twice (a unit, a tiled
MLP, a head in pieces) therefore saves the state in the first run and restores it in the second.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._guards import detect_fake_mode


def micro_batch_seed(seed: int, micro_batch: int) -> int:
    """Return the seed of a micro-batch's random stream. Nearby arguments give unrelated seeds."""
    bits = (seed * 0x9E3779B97F4A7C15 + (micro_batch + 1) * 0xBF58476D1CE4E5B9) % 2**64
    bits = ((bits ^ (bits >> 31)) * 0x94D049BB133111EB) % 2**64
    return (bits ^ (bits >> 29)) % 2**63


def _is_fake() -> bool:
    """Return whether the running code computes on fake tensors."""
    return detect_fake_mode() is not None


class RandomStates:
    """Random states of the CPU and of one compute device.

    With fake tensors (in a trace), all methods do nothing, because no random numbers are drawn.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def seed(self, seed: int) -> None:
        """Seed the random streams of the CPU and the device."""
        if not _is_fake():
            torch.default_generator.manual_seed(seed)
            if self._device.type != "cpu":
                torch.get_device_module(self._device).manual_seed(seed)

    def get(self) -> tuple[Tensor, ...]:
        """Return the current random state."""
        if _is_fake():
            return ()
        states: tuple[Tensor, ...] = (torch.default_generator.get_state(),)
        if self._device.type != "cpu":
            states += (torch.get_device_module(self._device).get_rng_state(self._device),)
        return states

    def set(self, states: tuple[Tensor, ...]) -> None:
        """Set the random state to a state that `get` has returned."""
        if states:
            torch.default_generator.set_state(states[0])
            if len(states) > 1:
                torch.get_device_module(self._device).set_rng_state(states[1], self._device)

    @contextmanager
    def swap_in(self, states: tuple[Tensor, ...]) -> Iterator[None]:
        """Set the random state within the context, and restore the current state on exit."""
        previous = self.get()
        self.set(states)
        try:
            yield
        finally:
            self.set(previous)


@dataclass(frozen=True, slots=True)
class ThreadModes:
    """Grad mode and autocast of the current thread."""

    grad_enabled: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cache_enabled: bool

    @classmethod
    def current(cls, device_type: str) -> ThreadModes:
        """Return the current modes of the CPU and of one device type."""
        device_types = dict.fromkeys(("cpu", device_type))
        autocast = tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in device_types)
        return cls(torch.is_grad_enabled(), autocast, torch.is_autocast_cache_enabled())

    def restore(self) -> None:
        """Apply these modes to the current thread."""
        torch.set_grad_enabled(self.grad_enabled)
        for device_type, is_enabled, dtype in self.autocast:
            torch.set_autocast_enabled(device_type, is_enabled)
            torch.set_autocast_dtype(device_type, dtype)
        torch.set_autocast_cache_enabled(self.cache_enabled)

    @contextmanager
    def apply(self, *, cache_enabled: bool | None = None) -> Iterator[None]:
        """Set these modes within the context, and restore the previous modes on exit.

        Args:
            cache_enabled: Whether autocast caches cast weights; None for the setting in these modes.
        """
        previous = ThreadModes.current(self.autocast[-1][0])
        self.restore()
        if cache_enabled is not None:
            torch.set_autocast_cache_enabled(cache_enabled)
        try:
            yield
        finally:
            previous.restore()


def without_saved_tensors() -> AbstractContextManager[None]:
    """Return a context in which autograd saves no tensors, for code that the backward recomputes.

    Use this context instead of `no_grad`, because attention selects its kernel by `requires_grad`. If the recompute
    used a different kernel, its results could round differently and change a router's choice.
    """
    hooks: AbstractContextManager[None] = torch.autograd.graph.saved_tensors_hooks(_drop, _unpack_dropped)
    return hooks


def _drop(tensor: Tensor) -> None:
    return None


def _unpack_dropped(_: object) -> Tensor:
    raise AssertionError("a first run saves no tensors; use the graph of its recompute")
