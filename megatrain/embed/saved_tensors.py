"""Placeholders in the graph for tensors that autograd saves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor


class SavedTensor(ABC):
    """Placeholder in the graph for a tensor that autograd saved."""

    __slots__ = ()

    @abstractmethod
    def unpack(self) -> Tensor:
        """Return the tensor with its saved values."""


def saving(pack: Callable[[Tensor], SavedTensor]) -> torch.autograd.graph.saved_tensors_hooks:
    """Return hooks that save each tensor as the placeholder that ``pack`` returns."""
    return torch.autograd.graph.saved_tensors_hooks(pack, methodcaller("unpack"))


OuterHooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def outer_hooks() -> OuterHooks | None:
    """Return the innermost installed saved-tensor hooks, which are the only ones that autograd calls."""
    hooks: OuterHooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


class Delegated(SavedTensor):
    """A saved tensor that the next outer hooks have packed."""

    __slots__ = ("_packed", "_unpack")

    def __init__(self, hooks: OuterHooks, tensor: Tensor) -> None:
        self._packed, self._unpack = hooks[0](tensor), hooks[1]

    def unpack(self) -> Tensor:
        return self._unpack(self._packed)


class Versioned(SavedTensor):
    """A saved tensor with a version check, because autograd does not check tensors that a hook packs.

    Args:
        probe: Tensor that shares the version counter of ``tensor``.
    """

    __slots__ = ("_probe", "_version")
    saved_inside = "the forward of an offloaded module"

    def __init__(self, tensor: Tensor, probe: Tensor) -> None:
        self._probe = probe
        self._version = None if tensor.is_inference() else tensor._version

    def check_version(self) -> None:
        """Raise ``RuntimeError`` if the tensor was modified in place since it was saved."""
        if self._version is not None and self._probe._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{self._describe()} is at version {self._probe._version}; expected version {self._version} instead. "
                f"It was saved inside {self.saved_inside}; torch.autograd.set_detect_anomaly(True) shows where"
            )

    def _describe(self) -> str:
        return f"[{self._probe.type()} {list(self._probe.shape)}]"


class KeptInMemory(Versioned):
    """A tensor that stays in memory, detached because a saved output must not reference the node that saves it."""

    __slots__ = ()

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor, tensor.detach())

    def unpack(self) -> Tensor:
        self.check_version()
        return self._probe
