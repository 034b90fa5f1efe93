"""Detection of layers that repeat an earlier layer, so that the trace need not run their backward.

A large model has a hundred layers. Their backwards, each with a recompute, take most of a trace's time. No config says
which layers are equal, because model code can treat any layer differently. The trace therefore runs every layer's
forward, and compares its operators, arguments and results with earlier forwards. Tensors are compared by origin (a
weight, a buffer, an argument, an earlier operator), shape, strides and dtype, and numbers by value. If these records,
the autograd graphs and the incoming gradients are equal, so are the backwards. The trace then copies the counts of the
earlier backward. Layers with guessed values always run their backward.

docs/decisions/0087-layers-that-are-alike-are-traced-once.md
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatrain.base.errors import UnsupportedModelError
from megatrain.engine.device.work import Work
from megatrain.engine.unit.arguments import tree_map
from megatrain.trace.counting import CountingMode, tensors_in
from megatrain.trace.visit_counts import RecomputeCounts

if TYPE_CHECKING:
    from megatrain.engine.unit.bound_unit import BoundUnit
    from megatrain.models.graph import Unit

#: Types that are compared by type and value.
_PLAIN_TYPES = (int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True, slots=True)
class CountedBackward:
    """Counts of a backward that the trace has run.

    Attributes:
        work: Work of all operators, including the recompute.
        peak_nbytes: Peak memory in addition to the bytes in use at the start.
        allocators: Functions that allocate the input gradients; None for an input without a gradient.
    """

    unit: Unit
    work: Work
    peak_nbytes: int
    allocators: tuple[Callable[[], Tensor] | None, ...]
    recompute: RecomputeCounts


def gradient_allocators(
    gradients: Sequence[Tensor | None], num_earlier: int, counts: CountingMode
) -> tuple[Callable[[], Tensor] | None, ...] | None:
    """Return functions that allocate tensors like the input gradients; None if gradients share memory or are not new.

    Args:
        num_earlier: Number of storages created before the backward.
    """
    storages = set[int]()
    for tensor in gradients:
        if tensor is None:
            continue
        index, storage = counts.storage_index(tensor), tensor.untyped_storage()
        is_whole = tensor.is_contiguous() and storage.nbytes() == tensor.numel() * tensor.element_size()
        if index is None or index < num_earlier or storage._cdata in storages or not is_whole:
            return None
        storages.add(storage._cdata)
    return tuple(
        None if gradient is None else partial(torch.empty, gradient.shape, dtype=gradient.dtype, device=gradient.device)
        for gradient in gradients
    )


class RepeatedLayers:
    """Records of the forwards in a trace, and the counts of the corresponding backwards."""

    def __init__(self, counts: CountingMode) -> None:
        self._counts = counts
        self._kinds: dict[Hashable, int] = {}  # record of a forward (can be megabytes in size) -> number
        self._forwards: dict[int, int] = {}
        self._backwards: dict[Hashable, CountedBackward] = {}
        self._creators: dict[int, str] = {}  # number of a storage -> layer whose forward created it

    def forward(self, bound: BoundUnit, visit: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a unit's forward. If the unit is a layer, record the forward."""
        counts, unit = self._counts, bound.unit
        if not unit.is_layer or unit.part is not None:
            return forward(*args, **kwargs)
        record = _CallRecord(counts, self._creators, counts.num_storages)
        for index, (_, leaf) in enumerate(bound.leaves()):
            record.name(leaf, "weight", index)
        for name, buffer in unit.module.named_buffers():
            record.name(buffer, "buffer", name)
        for index, tensor in enumerate(inputs := tensors_in((args, kwargs))):
            record.name(tensor, "argument", index)
        record.add("begins with", tuple(inputs), {}, None)
        num_guesses = counts.num_guesses
        assert counts.recorder is None, "a layer is nested in a layer"
        counts.recorder = record.add
        try:
            result = forward(*args, **kwargs)
        finally:
            counts.recorder = None
        record.add("ends with", (), {}, result)
        self._creators.update(dict.fromkeys(range(record.num_earlier, counts.num_storages), unit.name))
        if counts.num_guesses == num_guesses and record.is_complete:
            classes = tuple((name, type(module)) for name, module in unit.module.named_modules())
            description = (classes, tuple(record.entries), _autograd_graph(result))
            self._forwards[visit] = self._kinds.setdefault(description, len(self._kinds))
        return result

    def key(self, visit: int, gradients: Sequence[Tensor | None]) -> Hashable:
        """Return a key that is the same for equal backwards, or None if the visit's backward must run."""
        forward = self._forwards.pop(visit, None)
        if forward is None:
            return None
        record = _CallRecord(self._counts, {}, self._counts.num_storages)
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                record.name(gradient, "gradient", index)
        record.add("arriving", tuple(gradients), {}, None)
        return forward, tuple(record.entries)

    def find(self, key: Hashable) -> CountedBackward | None:
        """Return the earlier backward with this key, if any."""
        return self._backwards.get(key)

    def store(self, key: Hashable, backward: CountedBackward) -> None:
        """Store the counts of a backward under its key."""
        self._backwards[key] = backward


def _autograd_graph(result: Any) -> Hashable:
    """Describe a result's autograd graph by the class of each node and the nodes to which its gradients go."""
    node_ids: dict[Any, int] = {}
    edges: list[Hashable] = []

    def node_id(node: Any) -> int:
        if node not in node_ids:
            node_ids[node] = len(node_ids)
            pending.append(node)
        return node_ids[node]

    pending: list[Any] = []
    tree_map(result, lambda item: node_id(item.grad_fn) if isinstance(item, Tensor) and item.grad_fn else None)
    while pending:
        node = pending.pop()
        next_nodes = tuple((-1 if child is None else node_id(child), index) for child, index in node.next_functions)
        edges.append((node_ids[node], type(node), next_nodes))
    return tuple(edges)


class _NotComparableError(Exception):
    """Error for an object that cannot be compared."""


@dataclass(slots=True)
class _CallRecord:
    """Record of executed operators that can be compared with other records.

    Attributes:
        creators: Layer whose forward created a storage, by number of the storage.
        num_earlier: Number of storages created before the record.
        entries: Descriptions of the operators, in order.
        is_complete: Whether all operators could be described.
    """

    counts: CountingMode
    creators: Mapping[int, str]
    num_earlier: int
    entries: list[Hashable] = field(default_factory=list)
    is_complete: bool = True
    _names: dict[int, tuple[Hashable, ...]] = field(default_factory=dict)  # storage -> names
    _starts: dict[int, int] = field(default_factory=dict)  # storage -> offset of the first named tensor in it

    def name(self, tensor: Tensor, kind: str, label: Hashable) -> None:
        """Assign a name to the memory of a tensor that exists before the recorded operators and outlives them."""
        with torch._C.DisableTorchFunction():
            key = tensor.untyped_storage()._cdata
            self._names[key] = (*self._names.get(key, ()), (kind, label))
            self._starts.setdefault(key, int(tensor.storage_offset()))

    def add(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record an operator, its arguments and its result."""
        if not self.is_complete:
            return
        # Hide these operations from modes that observe how a model uses weights or masks.
        with torch._C.DisableTorchFunction():
            try:
                self.entries.append((operation, self._describe(args), self._describe(kwargs), self._describe(result)))
            except _NotComparableError:
                self.is_complete = False

    def _describe(self, value: Any) -> Hashable:
        if isinstance(value, Tensor):
            key = value.untyped_storage()._cdata
            # Use relative offsets, because layers can use different rows of the same tensor.
            start = value.storage_offset() - self._starts.get(key, 0)
            return (self._origin(value, key), start, value.shape, value.stride(), value.dtype, value.requires_grad)
        if isinstance(value, _PLAIN_TYPES):
            return (type(value), value)
        if isinstance(value, list | tuple):
            return (type(value), *(self._describe(item) for item in value))
        if isinstance(value, Mapping):
            return (type(value), *((key, self._describe(item)) for key, item in value.items()))
        if isinstance(value, Work):
            return value
        raise _NotComparableError

    def _origin(self, tensor: Tensor, key: int) -> Hashable:
        if (names := self._names.get(key)) is not None:
            return names
        index = self.counts.storage_index(tensor)
        if index is not None and index >= self.num_earlier:
            return index - self.num_earlier
        # Memory from outside the record may be freed before the trace ends, so only its storage number identifies it.
        if index is None:
            raise _NotComparableError
        if tensor.requires_grad and index in self.creators:  # without a gradient, it can be a shared table
            raise UnsupportedModelError(
                self.counts.current_unit,
                f"its forward reads a tensor of {self.creators[index]} that is not an argument and can be out of date",
            )
        return ("number", index)
