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
    """Rebuild nested lists, tuples and mappings, and replace all other values with the results of `leaf`.

    Args:
        container: Function that returns a replacement for a list or mapping, or None to rebuild it.
    """
    if isinstance(value, _CONTAINERS):
        if container is not None and (replacement := container(value)) is not None:
            return replacement
        if type(value) is dict:
            return {key: tree_map(item, leaf, container) for key, item in value.items()}
        if type(value) is list:
            return [tree_map(item, leaf, container) for item in value]
        result = copy.copy(value)  # keeps the class, e.g. ModelOutput, and its attributes
        items = enumerate(value) if isinstance(value, list) else value.items()
        for key, item in list(items):
            result[key] = tree_map(item, leaf, container)
        return result
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        parts = [tree_map(item, leaf, container) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return leaf(value)


_CONTAINERS = (list, dict, UserDict)  # transformers shares keys and values between layers in a UserDict


@dataclass(frozen=True, slots=True)
class _TensorRef:
    """Reference to tensor number `index` of a captured call."""

    index: int


@dataclass(frozen=True, slots=True)
class _OutputRef:
    """Reference to differentiable output number `index` of a unit."""

    index: int


@dataclass(frozen=True, slots=True)
class _ContainerRef:
    """Reference to container number `index` of a captured call."""

    index: int


@dataclass
class RebuiltArguments:
    """Fresh arguments for one run of a unit, with shallow copies that show which containers the run changes."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    containers: list[Any]
    tensor_indexes: dict[int, int]
    snapshots: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.snapshots = [copy.copy(container) for container in self.containers]

    def changed_containers(self) -> dict[int, Any]:
        """Return the containers that the unit has changed, by number."""
        changes: dict[int, Any] = {}
        for index, (container, prior) in enumerate(zip(self.containers, self.snapshots, strict=True)):
            if not isinstance(container, list):
                is_same = list(container) == list(prior) and all(container[key] is prior[key] for key in prior)
            else:
                is_same = len(container) == len(prior) and all(a is b for a, b in zip(container, prior, strict=True))
            if not is_same:
                changes[index] = container
        return changes


class _Rebuilder:
    """Builder of containers for one run. Recursive closures would form a cycle that keeps tensors alive."""

    def __init__(self, tensors: Sequence[Tensor | None], originals: Sequence[Any], contents: Sequence[Any]) -> None:
        self._tensors, self._originals, self._contents = tensors, originals, contents
        self._built: dict[int, Any] = {}

    def leaf(self, value: Any) -> Any:
        if isinstance(value, _TensorRef):
            return self._tensors[value.index]
        return self.container(value.index) if isinstance(value, _ContainerRef) else value

    def container(self, index: int) -> Any:
        if index not in self._built:
            new_container = self._built[index] = copy.copy(self._originals[index])
            if isinstance(new_container, list):
                new_container[:] = [tree_map(item, self.leaf) for item in self._contents[index]]
            else:
                for key, item in self._contents[index]:
                    new_container[key] = tree_map(item, self.leaf)
        return self._built[index]


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
        self._opaque_values: list[Any] = []
        self._tensor_indexes: dict[int, int] = {}
        self._container_indexes: dict[int, int] = {}
        self._contents: list[Any] = []
        self._args = tree_map(tuple(args), self._on_leaf, self._on_container)
        self._kwargs = {key: tree_map(value, self._on_leaf, self._on_container) for key, value in kwargs.items()}
        self.check_opaque()
        hidden_states = args[0] if args else kwargs.get("hidden_states")
        self.activations = tuple(
            index
            for index, tensor in enumerate(self.tensors)
            if tensor is not None and tensor.is_floating_point() and (tensor.requires_grad or tensor is hidden_states)
        )

    def _on_leaf(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            index = self._tensor_indexes.get(id(value))
            if index is None:
                if value.is_meta:
                    raise UnsupportedModelError(
                        self._unit_name, "its input was computed from a weight outside of the weight's own module"
                    )
                index = self._tensor_indexes[id(value)] = len(self.tensors)
                self.tensors.append(value)
            return _TensorRef(index)
        if _is_cache(value):
            return None
        if hasattr(value, "__dict__") and not callable(value):
            self._opaque_values.append(value)
        return value

    def check_opaque(self) -> None:
        """Raise an error if an argument is an object of unknown type that contains differentiable tensors."""
        for value in self._opaque_values:
            for name, item in vars(value).items():
                if has_differentiable(item):
                    raise UnsupportedModelError(
                        self._unit_name,
                        f"its argument is a {type(value).__name__} whose attribute '{name}' needs a gradient; only "
                        "tensors and lists, tuples and dictionaries of them can be passed between layers",
                    )

    def _on_container(self, value: Any) -> Any:
        index = self._container_indexes.get(id(value))
        if index is None:
            index = self._container_indexes[id(value)] = len(self.originals)
            self.originals.append(value)
            self._contents.append(None)
            # The index was assigned above, because these calls assign indexes to the nested containers.
            if isinstance(value, list):
                content: Any = [tree_map(item, self._on_leaf, self._on_container) for item in value]
            else:
                content = [(key, tree_map(item, self._on_leaf, self._on_container)) for key, item in value.items()]
            self._contents[index] = content
        return _ContainerRef(index)

    def rebuild(self, tensors: Sequence[Tensor | None]) -> RebuiltArguments:
        """Return fresh arguments with `tensors` instead of the captured tensors."""
        rebuilder = _Rebuilder(tensors, self.originals, self._contents)
        args = tree_map(self._args, rebuilder.leaf)
        kwargs = {key: tree_map(value, rebuilder.leaf) for key, value in self._kwargs.items()}
        containers = [rebuilder.container(i) for i in range(len(self.originals))]
        indexes = {id(tensor): i for i, tensor in enumerate(tensors) if tensor is not None}
        return RebuiltArguments(args, kwargs, containers, indexes)

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

    def __init__(self, value: Any, arguments: RebuiltArguments, records: Mapping[str, list[Any]]) -> None:
        self.outputs: list[Tensor] = []
        self._output_indexes: dict[int, int] = {}
        self._arguments = arguments
        self._container_indexes = {id(container): index for index, container in enumerate(arguments.containers)}
        self._value = tree_map(value, self._on_leaf, self._on_container)
        self._changed_containers = {
            index: (
                [tree_map(item, self._on_leaf, self._on_container) for item in container]
                if isinstance(container, list)
                else {key: tree_map(item, self._on_leaf, self._on_container) for key, item in container.items()}
            )
            for index, container in arguments.changed_containers().items()
        }
        self._records = {
            key: [tree_map(i, self._on_leaf, self._on_container) for i in items] for key, items in records.items()
        }
        del self._arguments

    def _on_leaf(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None if _is_cache(value) else value
        if (index := self._arguments.tensor_indexes.get(id(value))) is not None:
            return _TensorRef(index)
        if not value.requires_grad:
            return value
        index = self._output_indexes.get(id(value))
        if index is None:
            index = self._output_indexes[id(value)] = len(self.outputs)
            self.outputs.append(value)
        return _OutputRef(index)

    def _on_container(self, value: Any) -> Any:
        index = self._container_indexes.get(id(value))
        return None if index is None else _ContainerRef(index)

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

        def resolve(value: Any) -> Any:
            if isinstance(value, _OutputRef):
                return outputs[value.index]
            if isinstance(value, _TensorRef):
                return inputs[value.index]
            return originals[value.index] if isinstance(value, _ContainerRef) else value

        for index, content in self._changed_containers.items():
            new_content = tree_map(content, resolve)
            originals[index].clear()
            if isinstance(new_content, dict):
                originals[index].update(new_content)
            else:
                originals[index].extend(new_content)
        if collector is not None:
            for key, items in self._records.items():
                collector[key].extend(tree_map(items, resolve))
        return tree_map(self._value, resolve)


def has_differentiable(value: Any) -> bool:
    """Return whether nested containers contain a tensor that requires grad."""
    requires_grad = False

    def check(leaf: Any) -> None:
        nonlocal requires_grad
        requires_grad = requires_grad or (isinstance(leaf, Tensor) and leaf.requires_grad)

    tree_map(value, check)
    return requires_grad


def _is_cache(value: Any) -> bool:
    if value is None or isinstance(value, torch.Tensor | int | float | str):
        return False
    from transformers.cache_utils import Cache

    return isinstance(value, Cache)
