"""Tensors of a CUDA device in software (``fakes.virtual_cuda``), and what is asked of operations on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fakes.lazy_device import DEVICE, LazyStream

if TYPE_CHECKING:
    from fakes.virtual_cuda import VirtualCuda

aten = torch.ops.aten

#: How torch's C++ code knows such a tensor. No kernel of torch is registered for it, so that none can run by mistake.
INSIDE = torch.device("lazy", 0)


class VirtualTensor(Tensor):
    """A tensor of the device. ``memory`` is where its contents are once the kernels that make them have run."""

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
        """Keep its memory from being handed on before what is queued on a stream when it is freed has run."""
        self.allocation.recorded.add(stream)

    def data_ptr(self) -> int:
        assert self.allocation.device.tells_addresses, "host code took the address of device memory"
        return self.memory.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return what views of the same memory have in common; a wrapper of its own has a storage of its own."""
        return self.memory.untyped_storage()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def tolist(self) -> Any:
        """Copy it to the host first, which torch does inside, but not of a tensor of another class.

        As any function of torch it may be answered by a mode, which knows it by name.
        """

        def tolist(tensor: Tensor) -> Any:
            return tensor.cpu().tolist()

        is_watched = torch._C._is_torch_function_mode_enabled()
        return torch.overrides.handle_torch_function(tolist, (self,), self) if is_watched else tolist(self)

    def __getitem__(self, index: Any) -> Any:
        """Index it: torch makes tensors of lists inside, and copies them to the device while the host waits.

        Of this class alone: a class whose ``__getitem__`` was once replaced counts as a sequence to CPython ever after,
        and ``torch.tensor`` then asks a tensor without dimensions for its length.
        """
        # A mode is asked first, as it would be: it then calls this again.
        if torch._C._is_torch_function_mode_enabled():
            return torch.overrides.handle_torch_function(_getitem, (self,), self, index)
        return _getitem(self, index)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"VirtualTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Reached where modes are off: torch does that while it makes tensors of another class."""
        owner = next(leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, VirtualTensor))
        return owner.allocation.device.launch_op(func, args, kwargs or {})


def _getitem(tensor: VirtualTensor, index: Any) -> Any:
    if isinstance(index, tuple):
        index = tuple(torch.tensor(part) if isinstance(part, list) else part for part in index)
    return Tensor.__getitem__(tensor, index)


_getitem.__name__ = "__getitem__"  # modes go by it


class Allocation:
    """Bytes of the device that live as long as a tensor in them.

    Attributes:
        stream: for which they were allocated: what is freed is handed on to the next who asks on that stream.
        uses: by stream, so much of its work comes before the end of the last kernel or copy that was queued on them.
        recorded: streams that the allocator itself waits for.
        first: so much work of ``stream`` may still read or write the bytes for whoever had them before.
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
            self.device.memory.take_back(self)


class ReusedMemory:
    """What torch's caching allocator does with freed memory: hands it on at once, to the stream that it was for.

    It does not look at what other streams have queued on it. So whoever asks next for no more bytes may get any that
    were freed on the stream before, and that is refused here where kernels could meet in them: work of another stream
    that the asking one is not behind, or a first use on a stream that is not behind those who had them before.
    """

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._freed: dict[LazyStream, dict[int, dict[LazyStream, int]]] = {}  # stream -> size -> last uses

    def take_back(self, allocation: Allocation) -> None:
        """Note what is queued on memory that is freed."""
        with self._lock:
            found = self._freed.setdefault(allocation.stream, {}).setdefault(allocation.nbytes, {})
            for stream, stop in allocation.uses.items():
                if stream not in allocation.recorded:
                    found[stream] = max(stop, found.get(stream, 0))

    def hand_out(self, stream: LazyStream, nbytes: int) -> int:
        """Return ``Allocation.first`` of memory for a stream. Raises ``AssertionError``: another is at work in it."""
        if not nbytes:
            return 0
        with self._lock:
            fitting = [uses for size, uses in self._freed.get(stream, {}).items() if size >= nbytes]
            for uses in fitting:
                assert all(stream.is_behind(other, stop) for other, stop in uses.items()), (
                    f"{nbytes} bytes are handed out on a stream while another has work queued on them: it was not "
                    "waited for before they were freed"
                )
            return max((uses.get(stream, 0) for uses in fitting), default=0)

    def use(self, allocation: Allocation, stream: LazyStream) -> None:
        """Note a kernel or a copy that is queued next. Raises ``AssertionError``: the bytes are not yet its own."""
        with self._lock:
            assert stream.is_behind(allocation.stream, allocation.first), (
                f"{allocation.nbytes} bytes are used on a stream that did not wait for the one they were allocated on, "
                "which has work queued for whoever had them before"
            )
            allocation.uses[stream] = len(stream.work) + 1


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """Return a value, or what an operation takes or returns of values, changed; torch's own trees are slow."""
    if isinstance(value, tuple | list):
        return type(value)([map_leaves(change, item) for item in value])
    if isinstance(value, dict):
        return {name: map_leaves(change, item) for name, item in value.items()}
    return change(value)


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        yield from leaves(tuple(value.values()))
    else:
        yield value


def is_ours(device: Any) -> bool:
    return device is not None and torch.device(device).type in ("cuda", "lazy")


def memories(values: Any) -> Any:
    return map_leaves(lambda value: value.memory if isinstance(value, VirtualTensor) else value, values)


def on_host(kwargs: Any) -> Any:
    """Return the keywords of a factory for a tensor of the host."""
    kept = {name: value for name, value in kwargs.items() if name not in ("pin_memory", "layout")}
    return kept | ({"device": "cpu"} if is_ours(kwargs.get("device")) else {})


_shapes: dict[Any, Any] = {}


def result_on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result's shapes: no kernel runs for that, as none would on a GPU."""
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
        if func is aten.native_layer_norm.default:  # the CPU's means are what the weights are, a GPU's fp32
            dtype = (args[0] if args[2] is None else args[2]).dtype
            return found[0], found[1].to(dtype), found[2].to(dtype)
        return found


def like(shape: Tensor) -> Tensor:
    with _disable_current_modes():  # type: ignore[no-untyped-call]
        return torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)


def without_modes(kernel: Callable[[], Any]) -> Callable[[], None]:
    """Return a kernel that runs on the host as it is, whatever the thread that runs it is in the middle of."""

    def run() -> None:
        with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():  # type: ignore[no-untyped-call]
            kernel()

    return run
