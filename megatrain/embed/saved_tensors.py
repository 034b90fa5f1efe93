"""Placeholders that the autograd graph stores instead of saved tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor


class SavedTensor(ABC):
    """Placeholder that the graph stores instead of a saved tensor."""

    __slots__ = ()

    @abstractmethod
    def unpack(self) -> Tensor:
        """Return the tensor with its saved values."""


def make_saving_hooks(pack: Callable[[Tensor], SavedTensor]) -> torch.autograd.graph.saved_tensors_hooks:
    """Return saved-tensor hooks that replace each tensor with the placeholder that ``pack`` returns."""
    return torch.autograd.graph.saved_tensors_hooks(pack, methodcaller("unpack"))


OuterHooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def outer_hooks() -> OuterHooks | None:
    """Return the saved-tensor hooks that were installed last. Autograd calls only these hooks."""
    hooks: OuterHooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


class OuterSavedTensor(SavedTensor):
    """A saved tensor that was packed by the outer hooks."""

    __slots__ = ("_packed", "_unpack")

    def __init__(self, hooks: OuterHooks, tensor: Tensor) -> None:
        self._packed, self._unpack = hooks[0](tensor), hooks[1]

    def unpack(self) -> Tensor:
        return self._unpack(self._packed)


class VersionedTensor(SavedTensor):
    """A saved tensor with a version check. Autograd does not check tensors that a hook has packed.

    Args:
        probe: Tensor that shares the version counter of ``tensor``.
    """

    __slots__ = ("_probe", "_version")
    context_name = "the forward of an offloaded module"

    def __init__(self, tensor: Tensor, probe: Tensor) -> None:
        self._probe = probe
        self._version = None if tensor.is_inference() else tensor._version

    def check_version(self) -> None:
        """Raise ``RuntimeError`` if the tensor was modified in place since it was saved."""
        if self._version is not None and self._probe._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{self._describe()} is at version {self._probe._version}; expected version {self._version} instead. "
                f"It was saved inside {self.context_name}; torch.autograd.set_detect_anomaly(True) shows where"
            )

    def _describe(self) -> str:
        return f"[{self._probe.type()} {list(self._probe.shape)}]"


class KeptTensor(VersionedTensor):
    """A tensor that stays in memory, detached so that a node that saves its own output forms no reference cycle."""

    __slots__ = ()

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor, tensor.detach())

    def unpack(self) -> Tensor:
        self.check_version()
        return self._probe
