"""Work of torch operators: FLOPs, moved bytes and kernel launches, and the work that a recompute can avoid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs, memory traffic and kernel launches of some operators.

    Attributes:
        product_flops: FLOPs of matmuls and convolutions.
        attention_flops: FLOPs of fused attention kernels, for all pairs of tokens.
        skipped_flops: Portion of ``attention_flops`` that causal kernels skip.
        moved_nbytes: Bytes that all other operators read and write.
        launches: Number of operators that compute values. On a GPU, each operator launches at least one kernel.
    """

    product_flops: int = 0
    attention_flops: int = 0
    skipped_flops: int = 0
    moved_nbytes: int = 0
    launches: int = 0

    @property
    def flops(self) -> int:
        """FLOPs including skipped FLOPs of causal kernels, as in published kernel benchmarks."""
        return self.product_flops + self.attention_flops

    @property
    def computed_flops(self) -> int:
        """FLOPs without skipped FLOPs of causal kernels."""
        return self.flops - self.skipped_flops

    def __add__(self, other: Work) -> Work:
        return Work(
            self.product_flops + other.product_flops,
            self.attention_flops + other.attention_flops,
            self.skipped_flops + other.skipped_flops,
            self.moved_nbytes + other.moved_nbytes,
            self.launches + other.launches,
        )

    def __sub__(self, other: Work) -> Work:
        return self + Work(
            -other.product_flops,
            -other.attention_flops,
            -other.skipped_flops,
            -other.moved_nbytes,
            -other.launches,
        )

    def scale(self, share: float) -> Work:
        """Return the work for a fraction of the tokens. The number of launches stays the same."""
        return Work(
            round(self.product_flops * share),
            round(self.attention_flops * share),
            round(self.skipped_flops * share),
            round(self.moved_nbytes * share),
            self.launches,
        )


NO_WORK = Work()


@dataclass(frozen=True, slots=True)
class SavableResults:
    """Size of a visit's savable results, and the work that the recompute avoids if they are saved.

    Attributes:
        nbytes: Size of the block that stores one micro-batch's results.
    """

    nbytes: int = 0
    work: Work = NO_WORK

    @property
    def copy_work(self) -> Work:
        """Work needed to copy the results to the block."""
        return Work(moved_nbytes=2 * self.nbytes)


NOT_SAVABLE = SavableResults()


@dataclass(frozen=True, slots=True)
class SkippedProducts:
    """Matmuls that a visit's recompute skips.

    Attributes:
        weights: Names of the weights whose matmuls are skipped.
        work: Work of the skipped matmuls, minus the work of filling their results with NaN.
    """

    weights: frozenset[str] = frozenset()
    work: Work = NO_WORK


NO_PRODUCTS = SkippedProducts()

_ATEN = torch.ops.aten
#: Operators that allocate memory without writing it.
_ALLOCATORS = frozenset({_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided})
#: Operators that fill their result with a constant. They read only the shape of their input.
_FILL = frozenset({_ATEN.zeros_like, _ATEN.ones_like, _ATEN.full_like, _ATEN.new_zeros, _ATEN.new_ones, _ATEN.new_full})
#: Operators that overwrite a tensor without reading it.
_OVERWRITES = frozenset({_ATEN.copy_, _ATEN.fill_, _ATEN.zero_, _ATEN.uniform_, _ATEN.normal_})
#: Operators that read only the elements of the source that they return.
_LOOK_UPS = frozenset({_ATEN.embedding, _ATEN.index, _ATEN.index_select, _ATEN.gather})
#: Operators that read and write only the elements that they change.
_PUTS = frozenset({_ATEN.index_add_, _ATEN.index_put_, _ATEN.index_copy_, _ATEN.scatter_, _ATEN.scatter_add_})


def moved_nbytes(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int | None:
    """Return how many bytes a torch operator reads and writes, or None if it launches no kernel.

    Counts each input and each result once. For an expanded tensor, counts the elements in memory. Ignores caches, which
    is correct for tensors that are larger than the cache.
    """
    packet = getattr(func, "_overloadpacket", None)
    if packet in _ALLOCATORS:
        return None
    results = _tensors((result,))
    inputs = _tensors((*args, *kwargs.values()))
    if not results and not inputs:
        return None
    if not _is_mutable(func):
        storages = {tensor.untyped_storage()._cdata for tensor in inputs}
        results = [tensor for tensor in results if tensor.untyped_storage()._cdata not in storages]
        if not results:  # views and metadata move no bytes
            return None
        if packet in _FILL:
            inputs = []
        elif packet in _LOOK_UPS:
            inputs = [*results, *inputs[1:]]
        return sum(map(_nbytes, inputs)) + sum(map(_nbytes, results))
    if packet in _PUTS:
        return 3 * max(map(_nbytes, inputs[1:]), default=0)
    changed_ids = {id(tensor) for tensor in results}
    if packet in _OVERWRITES or "out" in kwargs:
        inputs = [tensor for tensor in inputs if id(tensor) not in changed_ids]
    return sum(map(_nbytes, inputs)) + sum(map(_nbytes, results))


def _is_mutable(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _nbytes(tensor: Tensor) -> int:
    nbytes = tensor.numel() * tensor.element_size()
    return min(nbytes, tensor.untyped_storage().nbytes())


def _tensors(values: tuple[Any, ...]) -> list[Tensor]:
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors.extend(_tensors(tuple(value)))
    return tensors
