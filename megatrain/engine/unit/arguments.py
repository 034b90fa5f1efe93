"""Arguments and results of a unit call, split into structure and tensors so that the call can be repeated.

Every run gets fresh containers, built from the structure. Tensors are de-duplicated by identity. Key-value caches are
dropped, because training does not use caches and a recompute would append to them a second time.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatrain.base.errors import UnsupportedModelError


def tree_map(value: Any, leaf: Callable[[Any], Any], container: Callable[[Any], Any | None] | None = None) -> Any:
    """Rebuild nested lists, tuples and mappings, and replace all other values by the results of `leaf`.

    Args:
        container: Function that returns a replacement for a list or mapping, or None to rebuild it.
    """
    if isinstance(value, _CONTAINERS):
        if container is not None and (ready := container(value)) is not None:
            return ready
        if type(value) is dict:
            return {key: tree_map(item, leaf, container) for key, item in value.items()}
        if type(value) is list:
            return [tree_map(item, leaf, container) for item in value]
        rebuilt = copy.copy(value)  # keeps the class, e.g. ModelOutput, and its attributes
        items = enumerate(value) if isinstance(value, list) else value.items()
        for key, item in list(items):
            rebuilt[key] = tree_map(item, leaf, container)
        return rebuilt
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        parts = [tree_map(item, leaf, container) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return leaf(value)


_CONTAINERS = (list, dict, UserDict)  # transformers shares keys and values between layers in a UserDict


@dataclass(frozen=True, slots=True)
class _TensorAt:
    """Reference to tensor number `index` of a captured call."""

    index: int


@dataclass(frozen=True, slots=True)
class _OutputAt:
    """Reference to differentiable output number `index` of a unit."""

    index: int


@dataclass(frozen=True, slots=True)
class _ContainerAt:
    """Reference to container number `index` of a captured call."""

    index: int


@dataclass
class RebuiltArguments:
    """Fresh arguments for one run of a unit, with shallow copies that show which containers the run changes."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    containers: list[Any]
    tensor_index: dict[int, int]
    before: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.before = [copy.copy(container) for container in self.containers]

    def mutated(self) -> dict[int, Any]:
        """Return the containers that the unit has changed, by number."""
        changed: dict[int, Any] = {}
        for index, (container, old) in enumerate(zip(self.containers, self.before, strict=True)):
            if not isinstance(container, list):
                same = list(container) == list(old) and all(container[key] is old[key] for key in old)
            else:
                same = len(container) == len(old) and all(a is b for a, b in zip(container, old, strict=True))
            if not same:
                changed[index] = container
        return changed


class _Rebuilder:
    """Builder of the containers for one run. A class, because mutually recursive closures would keep tensors alive."""

    def __init__(self, tensors: Sequence[Tensor | None], originals: Sequence[Any], contents: Sequence[Any]) -> None:
        self._tensors, self._originals, self._contents = tensors, originals, contents
        self._made: dict[int, Any] = {}

    def leaf(self, value: Any) -> Any:
        if isinstance(value, _TensorAt):
            return self._tensors[value.index]
        return self.container(value.index) if isinstance(value, _ContainerAt) else value

    def container(self, number: int) -> Any:
        if number not in self._made:
            fresh = self._made[number] = copy.copy(self._originals[number])
            if isinstance(fresh, list):
                fresh[:] = [tree_map(item, self.leaf) for item in self._contents[number]]
            else:
                for key, item in self._contents[number]:
                    fresh[key] = tree_map(item, self.leaf)
        return self._made[number]


class CapturedArguments:
    """Captured arguments of one micro-batch's call to a unit.

    Attributes:
        tensors: Distinct tensors in the arguments; None for a tensor that is stored in a block.
        activations: Positions of the activations in ``tensors``: hidden states, and all tensors that require grad.

    Raises:
        UnsupportedModelError: If an argument is an object of unknown type that contains differentiable tensors.
    """

    def __init__(self, unit_name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._unit_name = unit_name
        self.tensors: list[Tensor | None] = []
        self.originals: list[Any] = []
        self._opaque: list[Any] = []
        self._tensor_numbers: dict[int, int] = {}
        self._container_numbers: dict[int, int] = {}
        self._contents: list[Any] = []
        self._args = tree_map(tuple(args), self._leaf, self._container)
        self._kwargs = {key: tree_map(value, self._leaf, self._container) for key, value in kwargs.items()}
        self.check_opaque()
        stream = args[0] if args else kwargs.get("hidden_states")
        self.activations = tuple(
            index
            for index, tensor in enumerate(self.tensors)
            if tensor is not None and tensor.is_floating_point() and (tensor.requires_grad or tensor is stream)
        )

    def _leaf(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            number = self._tensor_numbers.get(id(value))
            if number is None:
                if value.is_meta:
                    raise UnsupportedModelError(
                        self._unit_name, "its input was computed from a weight outside of the weight's own module"
                    )
                number = self._tensor_numbers[id(value)] = len(self.tensors)
                self.tensors.append(value)
            return _TensorAt(number)
        if _is_cache(value):
            return None
        if hasattr(value, "__dict__") and not callable(value):
            self._opaque.append(value)
        return value

    def check_opaque(self) -> None:
        """Raise an error if an argument is an object of unknown type that contains differentiable tensors."""
        for value in self._opaque:
            for name, item in vars(value).items():
                if has_differentiable(item):
                    raise UnsupportedModelError(
                        self._unit_name,
                        f"its argument is a {type(value).__name__} whose attribute '{name}' needs a gradient; only "
                        "tensors and lists, tuples and dictionaries of them can be passed between layers",
                    )

    def _container(self, value: Any) -> Any:
        number = self._container_numbers.get(id(value))
        if number is None:
            number = self._container_numbers[id(value)] = len(self.originals)
            self.originals.append(value)
            self._contents.append(None)
            # These calls also number the nested containers.
            if isinstance(value, list):
                content: Any = [tree_map(item, self._leaf, self._container) for item in value]
            else:
                content = [(key, tree_map(item, self._leaf, self._container)) for key, item in value.items()]
            self._contents[number] = content
        return _ContainerAt(number)

    def rebuild(self, tensors: Sequence[Tensor | None]) -> RebuiltArguments:
        """Return fresh arguments with `tensors` instead of the captured tensors."""
        rebuilder = _Rebuilder(tensors, self.originals, self._contents)
        args = tree_map(self._args, rebuilder.leaf)
        kwargs = {key: tree_map(value, rebuilder.leaf) for key, value in self._kwargs.items()}
        containers = [rebuilder.container(number) for number in range(len(self.originals))]
        index = {id(tensor): number for number, tensor in enumerate(tensors) if tensor is not None}
        return RebuiltArguments(args, kwargs, containers, index)

    def forget_contents(self) -> None:
        """Drop the references to the contents of the caller's containers, which `rebuild` does not need."""
        self.originals = [copy.copy(original) for original in self.originals]
        for original in self.originals:
            original.clear()


class CapturedResult:
    """Result of one run of a unit: the return value, changed containers, and values from output recorders.

    Attributes:
        outputs: Distinct differentiable tensors in the result, attached to the unit's graph.
    """

    def __init__(self, value: Any, rebuilt: RebuiltArguments, records: Mapping[str, list[Any]]) -> None:
        self.outputs: list[Tensor] = []
        self._numbers: dict[int, int] = {}
        self._rebuilt = rebuilt
        self._containers = {id(container): number for number, container in enumerate(rebuilt.containers)}
        self._value = tree_map(value, self._leaf, self._container)
        self._mutated = {
            number: (
                [tree_map(item, self._leaf, self._container) for item in container]
                if isinstance(container, list)
                else {key: tree_map(item, self._leaf, self._container) for key, item in container.items()}
            )
            for number, container in rebuilt.mutated().items()
        }
        self._records = {
            key: [tree_map(i, self._leaf, self._container) for i in items] for key, items in records.items()
        }
        del self._rebuilt

    def _leaf(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None if _is_cache(value) else value
        if (number := self._rebuilt.tensor_index.get(id(value))) is not None:
            return _TensorAt(number)
        if not value.requires_grad:
            return value
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self.outputs)
            self.outputs.append(value)
        return _OutputAt(number)

    def _container(self, value: Any) -> Any:
        number = self._containers.get(id(value))
        return None if number is None else _ContainerAt(number)

    def deliver(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor | None],
        originals: Sequence[Any],
        collector: dict[str, list[Any]] | None,
    ) -> Any:
        """Return the unit's result with tensors of the outer graph. Update the caller's containers and recorders.

        Args:
            outputs: Tensors of the outer graph that replace `self.outputs`.
            inputs: The caller's tensors that replace the captured tensors.
        """

        def leaf(value: Any) -> Any:
            if isinstance(value, _OutputAt):
                return outputs[value.index]
            if isinstance(value, _TensorAt):
                return inputs[value.index]
            return originals[value.index] if isinstance(value, _ContainerAt) else value

        for number, content in self._mutated.items():
            fresh = tree_map(content, leaf)
            originals[number].clear()
            if isinstance(fresh, dict):
                originals[number].update(fresh)
            else:
                originals[number].extend(fresh)
        if collector is not None:
            for key, items in self._records.items():
                collector[key].extend(tree_map(items, leaf))
        return tree_map(self._value, leaf)


def has_differentiable(value: Any) -> bool:
    """Return whether nested containers contain a tensor that requires grad."""
    found = False

    def check(leaf: Any) -> None:
        nonlocal found
        found = found or (isinstance(leaf, Tensor) and leaf.requires_grad)

    tree_map(value, check)
    return found


def _is_cache(value: Any) -> bool:
    if value is None or isinstance(value, torch.Tensor | int | float | str):
        return False
    from transformers.cache_utils import Cache

    return isinstance(value, Cache)
