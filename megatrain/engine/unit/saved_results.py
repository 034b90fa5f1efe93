"""Results of attention and matmuls that a forward saves for its recompute.

A recompute repeats its forward exactly, so it can read the results of kernels instead of computing them again. An
attention call has three results: the output, the logsumexp that the backward needs, and the random state. A matmul with
a bound weight has one result. All other operations run again. Autograd computes the gradients as usual.

The recompute matches calls by order and arguments, and runs all calls that differ or were not saved. Only results of
fused attention kernels are saved. Eager attention, the math kernel and attention with dropout run again.

docs/decisions/0027-saving-attention-alone.md, docs/decisions/0081-results-of-products.md
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.engine.device.attention import AttentionCall
from megatrain.engine.device.work import NOT_SAVABLE, SavableResults, Work
from megatrain.engine.unit.unneeded import ProductFunction, WeightProducts
from tiered.units import round_up

#: Results have the same alignment as new tensors, because alignment affects which code a kernel uses.
_ALIGNMENT_BYTES = 512
#: Size of two random state scalars on a GPU. Fake kernels return them on another device, so the trace adds the size.
_RANDOM_STATE_BYTES = 2 * _ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class _ResultView:
    """Position, shape and strides of a result in a block."""

    start: int
    nbytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def view(self, block: Tensor) -> Tensor:
        flat = block[self.start : self.start + self.nbytes].view(self.dtype)
        return flat.as_strided(self.shape, self.strides)


@dataclass(frozen=True, slots=True)
class _SavedCall:
    """Saved call of an operator: its signature, and for each result either the value or its place in the block."""

    signature: Any
    results: tuple[Any, ...]
    is_tuple: bool


class SavedResults:
    """Results of one run of a unit, saved in one block. Not thread-safe.

    The number and lengths of attention calls can depend on data, so results are saved only until the block is full.

    Args:
        attention_nbytes: Bytes at the start of the block that are reserved for attention; None for the whole block.
        with_products: Whether to save results of matmuls in the remaining bytes.
    """

    def __init__(self, attention_nbytes: int | None = None, *, with_products: bool = False) -> None:
        self._attention_nbytes, self._with_products = attention_nbytes, with_products
        self._calls: list[_SavedCall | None] = []

    def save_calls(self, block: Tensor, owners: Mapping[int, str]) -> AbstractContextManager[Any]:
        """Return a context that saves results. The forward runs in this context.

        Args:
            block: Block on the compute device, uint8 [N].
            owners: Names of the bound weights whose matmul results can be saved, by id of the weight.
        """
        self._calls = []
        stop = block.numel() if self._attention_nbytes is None else self._attention_nbytes
        attention_range = _BlockRange(block, 0, stop)
        product_range = attention_range if self._attention_nbytes is None else _BlockRange(block, stop, block.numel())

        def save_call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            results = func(*args, **kwargs)
            block_range = product_range if isinstance(results, Tensor) else attention_range
            self._calls.append(block_range.save(_signature((func, args, dict(kwargs))), results))
            return results

        return _route_calls(save_call, owners if self._with_products else {})

    def replay_calls(self, block: Tensor, owners: Mapping[int, str]) -> AbstractContextManager[Any]:
        """Return a context that replays results for the recompute. ``block`` must outlive the recompute's graph."""
        calls: Iterator[_SavedCall | None] = iter(self._calls)

        def replay_call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            call = next(calls, None)
            if call is None or call.signature != _signature((func, args, dict(kwargs))):
                return func(*args, **kwargs)
            # Use `.data`, which aliases the block without being a view. Autograd treats it like the operator's result.
            results = tuple(item.view(block).data if isinstance(item, _ResultView) else item for item in call.results)
            return results if call.is_tuple else results[0]

        return _route_calls(replay_call, owners if self._with_products else {})


class _BlockRange:
    """Byte range of a block, which is filled with results from ``start`` to ``stop``."""

    def __init__(self, block: Tensor, start: int, stop: int) -> None:
        self._block, self._used_bytes, self._stop = block, start, stop

    def save(self, signature: Any, result: Any) -> _SavedCall | None:
        """Save the results of a call. Return None if the results do not fit, or if their memory has gaps."""
        results = (result,) if isinstance(result, Tensor) else result
        block, offset, entries = self._block, self._used_bytes, list[Any]()
        for item in results:
            if not _is_stored(item, block.device):
                entries.append(item.detach() if isinstance(item, Tensor) else item)
                continue
            view = _ResultView(offset, item.numel() * item.element_size(), tuple(item.shape), item.stride(), item.dtype)
            offset += round_up(view.nbytes, _ALIGNMENT_BYTES)
            if offset > self._stop or not _is_dense(item):
                return None
            entries.append(view)
        for view, item in zip(entries, results, strict=True):
            if isinstance(view, _ResultView):
                view.view(block).copy_(item)
        self._used_bytes = offset
        return _SavedCall(signature, tuple(entries), not isinstance(result, Tensor))


class ResultSizes:
    """Sizes of the results that a run of a unit can save, measured in a trace.

    Args:
        count_flops: Function that returns the FLOPs of a call, given the operator, its arguments and its result.
    """

    def __init__(
        self, owners: Mapping[int, str], count_flops: Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], int]
    ) -> None:
        self._owners, self._count_flops = owners, count_flops
        self.attention = NOT_SAVABLE
        self._products: dict[str, SavableResults] = {}  # weight's name -> results of its matmuls

    def measure(self) -> AbstractContextManager[Any]:
        """Return a context in which the results of a run are measured."""

        def measure_call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            results = func(*args, **kwargs)
            attention = AttentionCall.from_operator(func, args, kwargs)
            assert attention is not None, func
            device = results[0].device
            stored = [item for item in results if _is_stored(item, device)]
            if all(_is_dense(item) for item in stored):
                nbytes = sum(_stored_nbytes(item) for item in stored)
                nbytes += _RANDOM_STATE_BYTES * (device.type == "cuda")
                self.attention = _add_savable(self.attention, SavableResults(nbytes, attention.work))
            return results

        def measure_product(owner: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            result = func(*args, **kwargs)
            if _is_stored(result, result.device) and _is_dense(result):
                work = Work(product_flops=self._count_flops(func, args, kwargs, result), launches=1)
                savable = SavableResults(_stored_nbytes(result), work)
                self._products[owner] = _add_savable(self._products.get(owner, NOT_SAVABLE), savable)
            return result

        return _route_calls(measure_call, self._owners, measure_product)

    def results(self, skipped_weights: Container[str]) -> SavableResults:
        """Return the total of attention results and matmul results, without matmuls with ``skipped_weights``."""
        total = self.attention
        for owner, product in self._products.items():
            if owner not in skipped_weights:
                total = _add_savable(total, product)
        return total


def _add_savable(a: SavableResults, b: SavableResults) -> SavableResults:
    return SavableResults(a.nbytes + b.nbytes, a.work + b.work)


def _stored_nbytes(item: Tensor) -> int:
    return round_up(item.numel() * item.element_size(), _ALIGNMENT_BYTES)


_Call = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]


@contextmanager
def _route_calls(call: _Call, owners: Mapping[int, str], product: ProductFunction | None = None) -> Iterator[None]:
    """Route attention kernels to ``call``, and matmuls with weights to ``product`` (by default also ``call``)."""

    def drop_owner(owner: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return call(func, args, kwargs)

    with _AttentionKernelMode(call):
        if not owners:
            yield
            return
        with WeightProducts(owners, product or drop_owner):
            yield


class _AttentionKernelMode(TorchFunctionMode):
    """Mode that routes attention kernels to ``call``.

    Only operators within attention are dispatched through Python. Dispatching all operators of a layer would slow down
    each of them, and would make torch use different code paths for some of them.
    """

    def __init__(self, call: _Call) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.scaled_dot_product_attention or isinstance(func, OpOverloadPacket | OpOverload):
            with _AttentionKernels(self._call):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _AttentionKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that routes forward calls of fused attention kernels to ``call``."""

    def __init__(self, call: _Call) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._call = call

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        attention = AttentionCall.from_operator(func, args, kwargs or {})
        if attention is None or attention.is_backward or attention.has_dropout:
            return func(*args, **(kwargs or {}))
        return self._call(func, args, kwargs or {})


def _is_stored(item: Any, device: torch.device) -> bool:
    """Return whether a result is stored in the block. Numbers, empty tensors and host tensors are not."""
    return isinstance(item, Tensor) and item.numel() > 0 and item.device == device


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements fill a contiguous range of memory, in any order."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _signature(value: Any) -> Any:
    """Return a call's arguments, with each tensor replaced by its shape, strides, dtype and device."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(_signature(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _signature(item)) for name, item in value.items())
    return value
