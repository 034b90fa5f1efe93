"""Copies of scalars and inputs between host and compute device, with one host sync at the end of a step.

`Staging` copies inputs to the device through pinned memory. `read_numbers` reads all scalars of a step at once. When
model code reads values of integer inputs (for example, to check a mask for padding), `HostMirror` uses host copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from tiered.ext import HostSlab
from tiered.units import MiB, round_up

Name = TypeVar("Name")

_ALIGNMENT_BYTES = 64


class Staging:
    """Pinned memory through which a step's micro-batches are copied to the device. Not thread-safe.

    The memory grows to the size of the largest step, rounded up to a power of two (at least 1 MiB) to avoid frequent
    reallocation. It needs a few bytes per token and, like the micro-batches, is not part of the RAM tier.

    Args:
        make_slab: Function that allocates pinned memory with at least the given number of bytes.
    """

    def __init__(self, device: torch.device, make_slab: Callable[[int], HostSlab] | None = None) -> None:
        self._device = device
        self._is_staged = device.type == "cuda"
        self._make_slab = make_slab or (lambda nbytes: HostSlab(nbytes, pin=True))
        self._slab: HostSlab | None = None
        self._copy_event: Any = None  # event that follows the copies from the slab

    def upload(self, tensors: Mapping[Name, Tensor]) -> dict[Name, Tensor]:
        """Copy host tensors to the compute device without a host sync. Use the copies only on the current stream.

        The next call waits for these copies before it reuses the pinned memory. Usually they have finished by then.
        """
        if not self._is_staged:
            return {name: tensor.to(self._device) for name, tensor in tensors.items()}
        starts, need_bytes = _offsets(tensors)
        slab = self._reserve_slab(need_bytes)
        device_tensors: dict[Name, Tensor] = {}
        for name, tensor in tensors.items():
            nbytes = tensor.numel() * tensor.element_size()
            staging_view = slab.tensor[starts[name] : starts[name] + nbytes].view(tensor.dtype).view(tensor.shape)
            staging_view.copy_(tensor)
            device_tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            device_tensors[name].copy_(staging_view, non_blocking=True)
        self._copy_event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copy_event.record()
        return device_tensors

    def _reserve_slab(self, need_bytes: int) -> HostSlab:
        if self._copy_event is not None:
            # Wait, because an interrupted step has no sync at its end, so the device may still be reading the slab.
            self._copy_event.synchronize()
        if self._slab is None or self._slab.nbytes < need_bytes:
            if self._slab is not None:
                self._slab.close()
            self._slab = self._make_slab(max(MiB, 1 << (need_bytes - 1).bit_length()))
        return self._slab


def _offsets(tensors: Mapping[Name, Tensor]) -> tuple[dict[Name, int], int]:
    starts: dict[Name, int] = {}
    end = 0
    for name, tensor in tensors.items():
        starts[name] = end
        end += round_up(tensor.numel() * tensor.element_size(), _ALIGNMENT_BYTES)
    return starts, max(end, 1)


def copy_to_host(tensor: Tensor) -> tuple[Tensor, Any]:
    """Queue a copy of a device tensor to the host. Return the copy and an event that marks its arrival."""
    host_copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host_copy.copy_(tensor, non_blocking=True)
    # Use a blocking event, so that a waiting host sleeps and does not wait for work that is queued after the copy.
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return host_copy, event


class PendingScalars:
    """Scalars that are being transferred to the host in double precision. All device scalars share one copy.

    Args:
        values: Numbers, and one-element tensors of any float dtype; all tensors are on one device.
    """

    def __init__(self, values: Sequence[Tensor | float]) -> None:
        self._values = values
        self._stacked: Tensor | None = None
        self._arrival: Any = None
        scalars = [value for value in values if isinstance(value, Tensor)]
        if not scalars:
            return
        self._stacked = torch.stack([scalar.detach().reshape(()).to(torch.float64) for scalar in scalars])
        if self._stacked.is_cuda:
            self._stacked, self._arrival = copy_to_host(self._stacked)

    def read(self) -> list[float]:
        """Wait for the numbers and return them. Only this method synchronizes the host."""
        if self._arrival is not None:
            self._arrival.synchronize()
        numbers = iter(() if self._stacked is None else self._stacked.tolist())
        return [float(next(numbers)) if isinstance(value, Tensor) else float(value) for value in self._values]


def read_numbers(values: Sequence[Tensor | float]) -> list[float]:
    """Return scalars in double precision. All device scalars share one copy and one host sync; see `PendingScalars`."""
    return PendingScalars(values).read()


#: Operations that the mirror repeats on the host. They depend only on their arguments and are exact for integers.
#: Results of all other operations are not mirrored, so reading such a result synchronizes the host.
_EXACT_OPERATION_NAMES = """
    __add__ __and__ __eq__ __ge__ __getitem__ __gt__ __invert__ __le__ __lt__ __ne__ __or__ __radd__
    __rsub__ __sub__ add all amax amin any bitwise_and bitwise_not bitwise_or bool clone contiguous
    cumsum detach diff eq expand flatten ge gt int le logical_and logical_not logical_or long lt max
    min ne reshape squeeze sub sum to unsqueeze view
"""
_EXACT_OPERATIONS = frozenset(_EXACT_OPERATION_NAMES.split())
#: Operations that create a tensor from numbers.
_CONSTRUCTORS = frozenset({"arange", "full", "ones", "zeros"})
#: Operations that read a tensor's values.
_READ_OPERATIONS = frozenset({"__bool__", "__contains__", "__index__", "__int__", "item", "tolist"})
_NOT_MIRRORED = object()


class HostMirror(TorchFunctionMode):
    """Host mirror of integer tensors, which avoids host syncs when model code reads their values.

    While the mirror is active, torch functions on mirrored tensors also run on the host copies, and reads return values
    from the host copies. Tensors that are changed in place are not mirrored, nor are results larger than the largest
    input, such as [B, 1, S, S] masks. Reading such a tensor synchronizes the host and returns the same values.

    Used by one thread, which enters and exits the mirror when it switches between a model's forward and the engine.

    Attributes:
        num_answers: Number of reads answered from host copies.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_answers = 0
        self._max_elements = 0
        self._mirrored = WeakIdKeyDictionary()  # device tensor -> (host tensor, version of the device tensor)
        self._lists: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}  # device copies of index lists

    def register(self, tensor: Tensor, host: Tensor) -> None:
        """Register a host tensor as the mirror of a device tensor. The host tensor must not change afterwards."""
        if not _is_exact(tensor):
            return
        self._max_elements = max(self._max_elements, host.numel())
        self._mirrored[tensor] = (host, tensor._version)

    def forget(self) -> None:
        """Drop all registered host copies."""
        self._mirrored = WeakIdKeyDictionary()
        self._max_elements = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if not self._max_elements or name not in _HANDLED_OPERATIONS:
            return func(*args, **kwargs)
        if name in _READ_OPERATIONS:
            host = self._host_version(args[0])
            if not isinstance(host, Tensor) or any(isinstance(arg, Tensor) for arg in args[1:]):
                return func(*args, **kwargs)
            self.num_answers += 1
            return _read(name, host, func, args[1:])
        if name == "__getitem__" and isinstance(args[0], Tensor) and args[0] in self._mirrored:
            args = (args[0], self._with_device_lists(args[0].device, args[1]))
        result = func(*args, **kwargs)
        self._mirror(func, name, args, kwargs, result)
        return result

    def _mirror(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        if not isinstance(result, Tensor) or not _is_exact(result) or result.numel() > self._max_elements:
            return
        if any(result is arg for arg in args):
            return  # `to` can return its argument, which keeps its mirror
        if name in _CONSTRUCTORS and ("out" in kwargs or "device" not in kwargs):
            return
        host_args = [self._host_version(arg) for arg in args]
        host_kwargs = {key: self._host_version(value) for key, value in kwargs.items()}
        if any(value is _NOT_MIRRORED for value in (*host_args, *host_kwargs.values())):
            return
        if name not in _CONSTRUCTORS and not any(isinstance(value, Tensor) for value in host_args):
            return
        with torch._C.DisableTorchFunction():
            self._mirrored[result] = (func(*host_args, **host_kwargs), result._version)

    def _with_device_lists(self, device: torch.device, index: Any) -> Any:
        """Replace lists in an index with cached device tensors, because torch would copy each list with a host sync."""
        if not isinstance(index, tuple):
            return index
        return tuple(self._device_list(device, part) if _is_list_of_int(part) else part for part in index)

    def _device_list(self, device: torch.device, indexes: list[int]) -> Tensor:
        key = device, tuple(indexes)
        if key not in self._lists:
            self._lists[key] = torch.tensor(indexes, device=device)
        self.register(self._lists[key], torch.tensor(indexes))
        return self._lists[key]

    def _host_version(self, value: Any) -> Any:
        """Return the host version of an operation's argument, or `_NOT_MIRRORED`."""
        if isinstance(value, Tensor):
            if value not in self._mirrored:
                return _NOT_MIRRORED
            host, version = self._mirrored[value]
            return host if version == value._version else _NOT_MIRRORED
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if isinstance(value, tuple | list):
            return self._host_versions(value)
        if isinstance(value, str):
            return "cpu"  # strings in these operations are device names
        if isinstance(value, slice) and any(isinstance(part, Tensor) for part in (value.start, value.stop, value.step)):
            return _NOT_MIRRORED
        return value

    def _host_versions(self, values: Iterable[Any]) -> Any:
        items = [self._host_version(value) for value in values]
        if any(item is _NOT_MIRRORED for item in items):
            return _NOT_MIRRORED
        return tuple(items) if isinstance(values, tuple) else items


_HANDLED_OPERATIONS = _EXACT_OPERATIONS | _CONSTRUCTORS | _READ_OPERATIONS


def _is_list_of_int(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _is_exact(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not (tensor.is_floating_point() or tensor.is_complex())


def _read(name: str, host: Tensor, func: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
    """Return the result of a read on the host tensor. Uses numpy, so that tests do not count a device read."""
    values = host.numpy()
    if name == "tolist":
        return values.tolist()
    if name == "__contains__":
        return bool((values == operands[0]).any())
    if values.size != 1:
        return func(host, *operands)  # raises the same error as on the device
    value = values.item()
    return value if name == "item" else bool(value) if name == "__bool__" else int(value)
