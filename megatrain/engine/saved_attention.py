"""Attention's results, saved in a forward for the recompute, which takes them instead of computing attention again.

A recompute repeats its forward exactly, so the kernel would give the same results for the same inputs. What a forward
saves is what the kernel returned: the output, the logarithms of sums that its backward needs, and its random state.
Queries, keys and values are computed again, and the backward is the kernel's own.

Calls are matched by their order, and by what they were called with: one that differs, or was not saved, is computed.
Only kernels that leave their scores out of memory are saved; all others (eager attention, the math kernel, any dropout,
whose draws a recompute must repeat) are run again as before. docs/decisions/0027-saving-attention-alone.md
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.engine.attention import AttentionCall
from megatrain.engine.work import NO_WORK
from tiered.units import round_up

__all__ = ["AttentionResults", "AttentionSizes"]

#: Results begin at multiples of this, as new tensors do: kernels choose by alignment.
_ALIGNMENT_BYTES = 512
#: A kernel may return random states on a GPU that its fake one has elsewhere: room for two scalars.
_RANDOM_STATE_BYTES = 2 * _ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class _ResultView:
    """Where in a block a result lies, and its layout there."""

    start: int
    nbytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def in_room(self, room: Tensor) -> Tensor:
        flat = room[self.start : self.start + self.nbytes].view(self.dtype)
        return flat.as_strided(self.shape, self.strides)


@dataclass(frozen=True, slots=True)
class _SavedCall:
    """A call of an operator: what it was called with, without contents, and its results or their places."""

    signature: Any
    results: tuple[Any, ...]


class AttentionResults:
    """The results of the attention calls in one run of a unit, saved in the bytes of one block.

    As many calls as fit are saved: how many there are, and how long, may depend on the data. Used by one thread.
    """

    def __init__(self) -> None:
        self._calls: list[_SavedCall | None] = []
        self._used_bytes = 0

    def saving(self, room: Tensor) -> AbstractContextManager[Any]:
        """Return the context of the first run.

        Args:
            room: bytes on the compute device, uint8 [N].
        """
        self._calls, self._used_bytes = [], 0

        def call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            results = func(*args, **kwargs)
            self._calls.append(self._saved(room, _signature((func, args, dict(kwargs))), results))
            return results

        return _AttentionKernelMode(call)

    def answering(self, room: Tensor) -> AbstractContextManager[Any]:
        """Return the context of the recompute: the results are views of ``room``, which has to outlive its graph."""
        calls: Iterator[_SavedCall | None] = iter(self._calls)

        def call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            saved = next(calls, None)
            if saved is None or saved.signature != _signature((func, args, dict(kwargs))):
                return func(*args, **kwargs)
            # `.data` is an alias that is no view: autograd takes it for what the operator made.
            return tuple(item.in_room(room).data if isinstance(item, _ResultView) else item for item in saved.results)

        return _AttentionKernelMode(call)

    def _saved(self, room: Tensor, signature: Any, results: tuple[Any, ...]) -> _SavedCall | None:
        """Copy the results of a call into the room; None: they do not fit, or their layout has gaps."""
        at, found = self._used_bytes, list[Any]()
        for item in results:
            if not _takes_room(item, room.device):
                found.append(item.detach() if isinstance(item, Tensor) else item)
                continue
            place = _ResultView(at, item.numel() * item.element_size(), tuple(item.shape), item.stride(), item.dtype)
            at += round_up(place.nbytes, _ALIGNMENT_BYTES)
            if at > room.numel() or not _is_dense(item):
                return None
            found.append(place)
        for place, item in zip(found, results, strict=True):
            if isinstance(place, _ResultView):
                place.in_room(room).copy_(item)
        self._used_bytes = at
        return _SavedCall(signature, tuple(found))


class AttentionSizes:
    """Measures what a run of a unit would save, for a trace.

    Attributes:
        nbytes: bytes of all results, each where it would lie.
        work: work of all calls.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.work = NO_WORK

    def measuring(self) -> AbstractContextManager[Any]:
        """Return the context of the run."""

        def call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            results = func(*args, **kwargs)
            attention = AttentionCall.of(func, args, kwargs)
            assert attention is not None, func
            device = results[0].device
            held = [item for item in results if _takes_room(item, device)]
            if all(_is_dense(item) for item in held):
                sizes = (item.numel() * item.element_size() for item in held)
                self.nbytes += sum(round_up(nbytes, _ALIGNMENT_BYTES) for nbytes in sizes)
                self.nbytes += _RANDOM_STATE_BYTES * (device.type == "cuda")
                self.work += attention.work
            return results

        return _AttentionKernelMode(call)


_Call = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]


class _AttentionKernelMode(TorchFunctionMode):
    """Gives the attention kernels that run inside to ``call``.

    Operators are only looked at inside of attention: where all operators of a layer pass through Python, some of
    torch's take other ways, and every one costs time.
    """

    def __init__(self, call: _Call) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.scaled_dot_product_attention or isinstance(func, OpOverloadPacket | OpOverload):
            with _Kernels(self._call):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives forwards of fused attention kernels to ``call``."""

    def __init__(self, call: _Call) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._call = call

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        attention = AttentionCall.of(func, args, kwargs or {})
        if attention is None or attention.is_backward or attention.has_dropout:
            return func(*args, **(kwargs or {}))
        return self._call(func, args, kwargs or {})


def _takes_room(item: Any, device: torch.device) -> bool:
    """Return whether a result lies in the block; numbers, empty tensors and those of the host are held as they are."""
    return isinstance(item, Tensor) and item.numel() > 0 and item.device == device


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor lie in a row, in whatever order."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _signature(value: Any) -> Any:
    """Return what a call was made with, without the contents of tensors."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(_signature(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _signature(item)) for name, item in value.items())
    return value
