"""Tensors on a software CUDA device (``fakes.virtual_cuda``), and helpers for operations on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fakes.lazy_device import DEVICE, LazyStream

if TYPE_CHECKING:
    from fakes.virtual_cuda import VirtualCuda

aten = torch.ops.aten

#: Device type that torch's C++ code sees. torch has no kernels for this type, so none can run by mistake.
INSIDE = torch.device("lazy", 0)


class VirtualTensor(Tensor):
    """Tensor on the device. ``memory`` is a host tensor that has the contents once all pending kernels have run."""

    memory: Tensor
    allocation: Allocation

    @staticmethod
    def __new__(cls, memory: Tensor, allocation: Allocation) -> VirtualTensor:
        made: VirtualTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            memory.size(),
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            layout=memory.layout,
            device=INSIDE,
        )
        made.memory, made.allocation = memory, allocation
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def get_device(self) -> int:
        return 0

    def record_stream(self, stream: Any) -> None:
        """Mark the memory as used on ``stream``. After it is freed, its reuse waits for the work queued there."""
        self.allocation.recorded.add(stream)

    def data_ptr(self) -> int:
        assert self.allocation.device.allows_addresses, "host code took the address of device memory"
        return self.memory.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of ``memory``, which views share. torch would give each wrapper tensor its own storage."""
        return self.memory.untyped_storage()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def tolist(self) -> Any:
        """Return the values as nested lists. torch copies tensors to the host internally, but not tensor subclasses.

        Function modes can still override the call. They recognize it by the name of the inner function.
        """

        def tolist(tensor: Tensor) -> Any:
            return tensor.cpu().tolist()

        is_watched = torch._C._is_torch_function_mode_enabled()
        return torch.overrides.handle_torch_function(tolist, (self,), self) if is_watched else tolist(self)

    def __getitem__(self, index: Any) -> Any:
        """Index the tensor. As in torch, lists in the index become tensors, and the host waits while they are copied.

        This class overrides the method, because replacing ``Tensor.__getitem__`` would have lasting effects. CPython
        would treat ``Tensor`` as a sequence, and ``torch.tensor`` would ask a 0-dimensional tensor for its length.
        """
        # Active modes take precedence, and call this method again.
        if torch._C._is_torch_function_mode_enabled():
            return torch.overrides.handle_torch_function(_getitem, (self,), self, index)
        return _getitem(self, index)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"VirtualTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run operations while no mode is active: torch disables modes while it creates tensors of a subclass."""
        owner = next(leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, VirtualTensor))
        return owner.allocation.device.launch_op(func, args, kwargs or {})


def _getitem(tensor: VirtualTensor, index: Any) -> Any:
    if isinstance(index, tuple):
        index = tuple(torch.tensor(part) if isinstance(part, list) else part for part in index)
    return Tensor.__getitem__(tensor, index)


_getitem.__name__ = "__getitem__"  # modes recognize the function by this name


class Allocation:
    """Device memory that lives as long as any tensor in it.

    Attributes:
        stream: Stream on which the memory was allocated. Once freed, the memory can serve later requests on that
            stream.
        uses: By stream, the number of work items up to the last kernel or copy that uses the memory.
        recorded: Streams passed to ``record_stream``. The allocator waits for them before it reuses the memory.
        first: Number of work items on ``stream`` that may still access the memory for a previous owner.
    """

    def __init__(self, device: VirtualCuda, nbytes: int) -> None:
        self.device, self.nbytes = device, 0
        self.stream = device.current_stream()
        self.uses: dict[LazyStream, int] = {}
        self.recorded: set[LazyStream] = set()
        self.first = device.memory.hand_out(self.stream, nbytes)
        device.count(nbytes)
        self.nbytes = nbytes

    def __del__(self) -> None:
        self.device.count(-self.nbytes)
        if self.nbytes:
            self.device.memory.record_freed_memory(self)


class ReusedMemory:
    """Model of torch's caching allocator, which immediately reuses freed memory on the stream that allocated it.

    The allocator ignores work on other streams. A later request on the same stream can get any freed memory of at least
    its size. This class raises an error if kernels could then race, which can happen in two ways. First, another stream
    has work queued on the memory, and the requesting stream does not wait for it. Second, the new owner uses the memory
    on a stream that does not wait for the previous owners' work.
    """

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        #: Stream -> (size, last use by this stream) of its freed memory, without pairs that another pair exceeds.
        self._own_uses: dict[LazyStream, list[tuple[int, int]]] = {}
        #: Stream -> (size of its freed memory, another stream that used it) -> last use by the other stream.
        self._other_uses: dict[LazyStream, dict[tuple[int, LazyStream], int]] = {}

    def record_freed_memory(self, allocation: Allocation) -> None:
        """Record which queued work still uses memory that is being freed."""
        nbytes = allocation.nbytes
        with self._lock:
            own = self._own_uses.setdefault(allocation.stream, [])
            others = self._other_uses.setdefault(allocation.stream, {})
            for stream, stop in allocation.uses.items():
                if stream in allocation.recorded:
                    continue
                if stream is not allocation.stream:
                    others[nbytes, stream] = max(stop, others.get((nbytes, stream), 0))
                elif not any(size >= nbytes and last >= stop for size, last in own):
                    own[:] = [(size, last) for size, last in own if size > nbytes or last > stop]
                    own.append((nbytes, stop))

    def hand_out(self, stream: LazyStream, nbytes: int) -> int:
        """Return ``Allocation.first`` for a request.

        Raises ``AssertionError`` if work on another stream may still use the memory.
        """
        if not nbytes:
            return 0
        with self._lock:
            others = self._other_uses.get(stream, {})
            for size, other in [each for each in others if each[0] >= nbytes]:
                assert stream.is_behind(other, others[size, other]), (
                    f"{nbytes} bytes are handed out on a stream while another has work queued on them: it was not "
                    "waited for before they were freed"
                )
                del others[size, other]  # a stream stays behind
            return max((last for size, last in self._own_uses.get(stream, []) if size >= nbytes), default=0)

    def use(self, allocation: Allocation, stream: LazyStream) -> None:
        """Record that the next work on ``stream`` uses an allocation.

        Raises ``AssertionError`` if a previous owner's work may still use the memory.
        """
        with self._lock:
            assert stream.is_behind(allocation.stream, allocation.first), (
                f"{allocation.nbytes} bytes are used on a stream that did not wait for the one they were allocated on, "
                "which has work queued for their previous owner"
            )
            allocation.uses[stream] = len(stream.work) + 1


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """Apply ``change`` to all leaves of nested tuples, lists and dicts. torch's pytree functions are too slow."""
    if isinstance(value, tuple | list):
        return type(value)([map_leaves(change, item) for item in value])
    if isinstance(value, dict):
        return {name: map_leaves(change, item) for name, item in value.items()}
    return change(value)


def leaves(value: Any) -> Sequence[Any]:
    """Return the leaves of nested tuples, lists and dicts."""
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in leaves(item)]
    if isinstance(value, dict):
        return leaves(tuple(value.values()))
    return (value,)


def is_ours(device: Any) -> bool:
    return device is not None and torch.device(device).type in ("cuda", "lazy")


def memories(values: Any) -> Any:
    return map_leaves(lambda value: value.memory if isinstance(value, VirtualTensor) else value, values)


def on_host(kwargs: Any) -> Any:
    """Return a factory function's keyword arguments, changed to make a host tensor."""
    kept = {name: value for name, value in kwargs.items() if name not in ("pin_memory", "layout")}
    return kept | ({"device": "cpu"} if is_ours(kwargs.get("device")) else {})


_shapes: dict[Any, Any] = {}


def result_on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """Return an operation's result as meta tensors, without running a kernel. Results are cached."""
    key = func, _key(args), _key(kwargs)
    if key not in _shapes:
        _shapes[key] = _compute_on_meta(func, args, kwargs)
    return _shapes[key]


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, tuple | list):
        return tuple(_key(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _key(item)) for name, item in value.items())
    return type(value), value


def _compute_on_meta(func: Any, args: Any, kwargs: Any) -> Any:

    def shape(value: Any) -> Any:
        return value.to("meta") if isinstance(value, Tensor) else value

    kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    if is_ours(kwargs.get("device")) or (kwargs.get("device") is None and not args):
        kwargs["device"] = "meta"
    with _disable_current_modes():  # type: ignore[no-untyped-call]
        found = func(*map_leaves(shape, memories(args)), **map_leaves(shape, memories(kwargs)))
        if func is aten.native_layer_norm.default:  # the CPU kernel returns statistics in the weights' dtype
            dtype = (args[0] if args[2] is None else args[2]).dtype
            return found[0], found[1].to(dtype), found[2].to(dtype)
        return found


def like(shape: Tensor) -> Tensor:
    with _disable_current_modes():  # type: ignore[no-untyped-call]
        return torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)


def without_modes(kernel: Callable[[], Any]) -> Callable[[], None]:
    """Return a kernel that runs on the host with all modes disabled, even if the running thread has active modes."""

    def run() -> None:
        with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():  # type: ignore[no-untyped-call]
            kernel()

    return run
