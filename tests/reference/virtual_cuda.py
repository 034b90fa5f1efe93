"""A CUDA device in software: tensors that say ``cuda``, whose kernels run as late as they may.

What a test with host memory in the place of the GPU's cannot see, this device refuses, as a real one would: an
operation that mixes tensors of host and device, host code that takes the address of device memory, and, with
``torch.cuda.set_sync_debug_mode("error")``, an operation that makes the host wait. Kernels and copies are queued on
the current stream, as by ``reference.lazy_device``, and run when the host waits for something behind them: a copy
that did not wait for its kernel moves what was there before.

The arithmetic is the CPU's. Not covered: memory freed on one stream and handed out on another, kernels with atomics,
what libraries take inside of a kernel, and the speed of anything.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import _get_current_function_mode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from reference.lazy_device import DEVICE, LazyDevice, LazyEvent, LazyStream

aten = torch.ops.aten

#: How torch's C++ code knows such a tensor. No kernel of torch is registered for it, so that none can run by mistake.
_INSIDE = torch.device("lazy", 0)
_NUM_DEVICE_TYPES, _LAZY, _META = 24, 13, 14
_FLASH = 1  # what `_fused_sdp_choice` calls it
#: The host needs their result at once.
_LOOKS = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.item.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.repeat_interleave.Tensor,
}
#: Views by a mark on the tensor, which ours do not carry: made at once.
_MADE = {aten._conj.default: aten._conj_physical.default, aten._neg_view.default: aten.neg.default}
#: May have tensors of the host among their arguments, which torch copies to the device.
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


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
            device=_INSIDE,
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
        """Nothing is needed: kernels that are queued hold their memory."""

    def data_ptr(self) -> int:
        assert self.allocation.device.tells_addresses, "host code took the address of device memory"
        return self.memory.data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"VirtualTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Reached where modes are off: torch does that while it makes tensors of another class."""
        owner = next(leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, VirtualTensor))
        return owner.allocation.device.launch_op(func, args, kwargs or {})


class Allocation:
    """Bytes of the device that live as long as a tensor in them."""

    def __init__(self, device: VirtualCuda, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        device.count(nbytes)

    def __del__(self) -> None:
        self.device.count(-self.nbytes)


class VirtualCuda(LazyDevice):
    """One CUDA device, while ``in_place`` is entered.

    Args:
        total_bytes: Of its memory, as ``mem_get_info`` tells.

    Attributes:
        allocated_bytes: Of live tensors. peak_bytes: The most there were.
        waits: Operations that made the host wait, by name.
        tells_addresses: Tests may ask tensors where they are; nobody else has use for that.
    """

    def __init__(self, total_bytes: int = 1 << 30) -> None:
        super().__init__()
        self.total_bytes = total_bytes
        self.allocated_bytes = self.peak_bytes = 0
        self.waits: list[str] = []
        self.tells_addresses = False
        self._forbids_waits = False
        self._random = [0, 0]  # seed, number of draws
        self._locked_pages: dict[int, int] = {}  # address -> bytes
        self._mode = threading.local()

    # -- what torch.cuda is asked ------------------------------------------------------------------------------

    @contextmanager
    def in_place(self) -> Iterator[VirtualCuda]:
        """Put it in the place of torch's device, in this thread and in those that start from now on."""
        _give_tensors_a_guard()
        _device_constructors()  # remembers, once for the whole process, torch's functions and not those below
        device, run = self, threading.Thread.run

        def run_with_device(thread: threading.Thread) -> None:
            with _Dispatch(device):
                run(thread)

        with ExitStack() as stack:
            stack.enter_context(mock.patch.multiple(torch.cuda, **self._functions()))
            stack.enter_context(mock.patch.object(threading.Thread, "run", run_with_device))
            stack.enter_context(mock.patch.object(Tensor, "to", _to))
            stack.enter_context(mock.patch.object(Tensor, "__getitem__", _getitem))
            stack.enter_context(mock.patch.object(Tensor, "pin_memory", lambda host: self.page_locked(host.clone())))
            stack.enter_context(mock.patch.object(Tensor, "is_pinned", self.is_page_locked))
            stack.enter_context(mock.patch.object(torch, "tensor", _tensor))
            stack.enter_context(mock.patch.object(functional, "scaled_dot_product_attention", _attention))
            stack.enter_context(_Dispatch(self))
            yield self
            self.synchronize()
            gc.collect()  # page-locked memory in cycles asks for the device when it goes

    def _functions(self) -> dict[str, Any]:
        properties = SimpleNamespace(
            total_memory=self.total_bytes, multi_processor_count=1, name="virtual", major=9, minor=0
        )
        return {
            "Stream": _class_of(self.stream),
            "Event": _class_of(self.event),
            "stream": self.use,
            "current_stream": self.current_stream,
            "default_stream": lambda device=None: self.default,
            "empty_cache": self._trim,
            "synchronize": lambda device=None: self.synchronize(),
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "is_current_stream_capturing": lambda: False,
            "_lazy_init": lambda: None,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "set_device": lambda device: None,
            "get_device_name": lambda device=None: "virtual",
            "get_device_properties": lambda device=None: properties,
            "get_device_capability": lambda device=None: (9, 0),
            "mem_get_info": lambda device=None: (self.total_bytes - self.allocated_bytes, self.total_bytes),
            "memory_allocated": lambda device=None: self.allocated_bytes,
            "max_memory_allocated": lambda device=None: self.peak_bytes,
            "max_memory_reserved": lambda device=None: self.peak_bytes,
            "reset_peak_memory_stats": lambda device=None: setattr(self, "peak_bytes", self.allocated_bytes),
            "memory_stats": lambda device=None: self._memory_stats(),
            "cudart": lambda: SimpleNamespace(cudaHostRegister=self._lock_pages, cudaHostUnregister=self._unlock_pages),
            "manual_seed": self._seed,
            "manual_seed_all": self._seed,
            "get_rng_state": lambda device=None: torch.tensor(self._random).view(torch.uint8).clone(),
            "set_rng_state": lambda state, device=None: self._set_random(state),
            "set_sync_debug_mode": lambda mode: setattr(self, "_forbids_waits", mode == "error"),
        }

    def event(self, **options: Any) -> LazyEvent:
        return _TimedEvent(self)

    @contextmanager
    def use(self, stream: LazyStream) -> Iterator[None]:
        before, self._current.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._current.stream = before

    def _memory_stats(self) -> dict[str, int]:
        zero = dict.fromkeys(("segment.all.allocated", "num_ooms", "num_alloc_retries"), 0)
        names = ("allocated_bytes.all.current", "reserved_bytes.all.current")
        return zero | dict.fromkeys(names, self.allocated_bytes) | {"allocated_bytes.all.peak": self.peak_bytes}

    def count(self, nbytes: int) -> None:
        """Add bytes to those of live tensors."""
        with self.lock:
            self.allocated_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def _seed(self, seed: int) -> None:
        self._random = [int(seed), 0]

    def _set_random(self, state: Tensor) -> None:
        self._random = state.view(torch.int64).tolist()

    def draw(self) -> int:
        """Return the seed of the next kernel with random numbers; in the order of launches, as Philox counters are."""
        self._random[1] += 1
        return hash(tuple(self._random)) & 0x7FFFFFFFFFFF

    # -- page-locked memory ------------------------------------------------------------------------------------

    def _lock_pages(self, address: int, nbytes: int, flags: int) -> int:
        self._locked_pages[address] = nbytes
        return 0

    def _unlock_pages(self, address: int) -> int:
        self._locked_pages.pop(address, None)  # of an earlier device, if it is not there: garbage goes late
        return 0

    def is_page_locked(self, tensor: Tensor) -> bool:
        """Return whether copies of this host tensor need no staging."""
        if isinstance(tensor, VirtualTensor):
            return False
        address = tensor.data_ptr()
        return any(start <= address < start + nbytes for start, nbytes in list(self._locked_pages.items()))

    def page_locked(self, tensor: Tensor) -> Tensor:
        """Page-lock a new host tensor for as long as the device is there; return it."""
        self._locked_pages[tensor.data_ptr()] = max(tensor.nbytes, 1)
        tensor._keeps = self  # type: ignore[attr-defined]
        return tensor

    # -- operations --------------------------------------------------------------------------------------------

    def tensor(self, memory: Tensor, allocation: Allocation | None = None) -> VirtualTensor:
        """Return a device tensor: a new one, or a view into an allocation."""
        return VirtualTensor(memory, allocation or Allocation(self, memory.untyped_storage().nbytes()))

    def wait(self, name: str) -> None:
        """Let the host wait until the current stream has done its work."""
        if self._forbids_waits:
            raise RuntimeError(f"called a synchronizing CUDA operation: {name}")
        self.waits.append(name)
        self.current_stream().synchronize()

    def launch_op(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Do what an operation does with tensors of the device, at once or by a kernel on the current stream."""
        if func is aten.copy_.default:
            return self._copy(*args, **kwargs)
        if func is aten._to_copy.default:
            return self._to_copy(*args, **kwargs)
        if func in _LOOKS or self._looks_at_mask(func, args):
            self.wait(str(func))
            return self._wrap_new(self._run(func, args, kwargs))
        func = _MADE.get(func, func)
        args, kwargs = self._from_host(func, args), dict(kwargs)
        if func.is_view:
            return self._view(func, args, kwargs)
        if func._schema.is_mutable:
            return self._mutate(func, args, kwargs)
        return self._compute(func, args, kwargs)

    def _looks_at_mask(self, func: Any, args: Any) -> bool:
        if func.overloadpacket.__name__ not in _INDEXING:
            return False
        return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])

    def _from_host(self, func: Any, args: Any) -> Any:
        """Return the arguments with what torch lets live on the host replaced by its value now; refuse the rest."""

        def check(value: Any) -> Any:
            if not isinstance(value, Tensor) or isinstance(value, VirtualTensor):
                return value
            if value.dim() and func.overloadpacket.__name__ in _INDEXING:
                self.wait(f"{func} with an index of the host")
            elif value.dim():
                raise RuntimeError(f"{func}: Expected all tensors to be on the same device, but found cuda:0 and cpu!")
            return value.clone()

        return _map(check, args)

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = self._run(func, args, kwargs)
        allocation = args[0].allocation
        return _map(lambda made: self.tensor(made, allocation) if isinstance(made, Tensor) else made, result)

    def _mutate(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._queue(func, args, kwargs, into=())
        written = [
            kwargs[argument.name] if argument.kwarg_only else args[position]
            for position, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        returned = written[: len(func._schema.returns)]
        return None if not returned else returned[0] if len(returned) == 1 else tuple(returned)

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            shapes = _result_on_meta(func, args, kwargs)
        except (RuntimeError, NotImplementedError):  # torch knows no shape without values, or not for this dtype
            self.current_stream().synchronize()
            return self._wrap_new(self._run(func, args, kwargs))
        made = _map(lambda t: self.tensor(_like(t)) if isinstance(t, Tensor) else t, shapes)
        self._queue(func, args, kwargs, into=[t for t in _leaves(made) if isinstance(t, Tensor)])
        return made

    def _queue(self, func: Any, args: Any, kwargs: Any, into: Sequence[VirtualTensor]) -> None:
        args, kwargs = _memories(args), _memories(kwargs)
        targets = [target.memory for target in into]
        seed = self.draw() if torch.Tag.nondeterministic_seeded in func.tags else None

        def kernel() -> None:
            result = self._run(func, args, kwargs, seed)
            if targets:
                found = [value for value in _leaves(result) if isinstance(value, Tensor)]
                for target, value in zip(targets, found, strict=True):
                    target.copy_(value)

        self.launch(_without_modes(kernel))

    def _run(self, func: Any, args: Any, kwargs: Any, seed: int | None = None) -> Any:
        with _disable_current_modes(), torch.no_grad():  # type: ignore[no-untyped-call]
            args, kwargs = _memories(args), _on_host(_memories(kwargs))
            if func is aten.histc.default and not args[0].is_floating_point():  # CUDA counts integers, the CPU does not
                return func(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
            if seed is None:
                return func(*args, **kwargs)
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)
                return func(*args, **kwargs)

    def _wrap_new(self, result: Any) -> Any:
        return _map(lambda made: self.tensor(made) if isinstance(made, Tensor) else made, result)

    def create(self, func: Any, args: Any, kwargs: Any) -> VirtualTensor:
        """Make a tensor of the device from numbers."""
        if func is aten.empty.memory_format or func is aten.empty_strided.default:
            return self.tensor(self._run(func, args, kwargs))
        made: VirtualTensor = self._compute(func, args, kwargs)
        return made

    # -- copies ------------------------------------------------------------------------------------------------

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if isinstance(target, VirtualTensor) and isinstance(source, VirtualTensor):
            self._queue(aten.copy_.default, (target, source), {}, into=())
            return target
        host = source if isinstance(target, VirtualTensor) else target
        to, come = (value.memory if isinstance(value, VirtualTensor) else value for value in (target, source))
        if host.dim() == 0 and host is source:
            come = source.clone()  # a number in the kernel's arguments
        elif not (non_blocking and self.is_page_locked(host)):
            self.wait("copy_ of memory that is not page-locked, or that blocks")
            with _disable_current_modes(), torch.no_grad():  # type: ignore[no-untyped-call]
                to.copy_(come)
            return target
        self.launch(_without_modes(lambda: to.copy_(come)))
        return target

    def _to_copy(self, source: Tensor, *, device: Any = None, non_blocking: bool = False, **options: Any) -> Tensor:
        goes_up = isinstance(source, VirtualTensor) if device is None else _is_ours(device)
        if goes_up and isinstance(source, VirtualTensor):
            copied: Tensor = self._compute(aten._to_copy.default, (source,), options)
            return copied
        options.pop("pin_memory", None)
        memory = source.memory if isinstance(source, VirtualTensor) else source
        with _disable_current_modes():  # type: ignore[no-untyped-call]
            like = aten._to_copy.default(memory.to("meta"), **options)
            host = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        if goes_up:  # the conversion runs on the device
            made = self.tensor(torch.empty_like(host))
            self._copy(made, source, non_blocking)
            return made
        self._copy(host, source, non_blocking)
        return host


class _TimedEvent(LazyEvent):
    def elapsed_time(self, end: LazyEvent) -> float:
        return 1.0


class _Dispatch(TorchDispatchMode):
    """Sends every operation with a device tensor, and every new tensor of the device, to the device."""

    def __init__(self, device: VirtualCuda) -> None:
        super().__init__()
        self._virtual = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(leaf, VirtualTensor) for leaf in _leaves((args, kwargs))):
            return self._virtual.launch_op(func, args, kwargs)
        if _is_ours(kwargs.get("device")):
            if func is aten._to_copy.default:
                return self._virtual.launch_op(func, args, kwargs)
            return self._virtual.create(func, args, kwargs)
        if kwargs.get("pin_memory"):
            return self._virtual.page_locked(func(*args, **{**kwargs, "pin_memory": False}))
        return func(*args, **kwargs)


def _class_of(make: Callable[..., Any]) -> type:
    """Return a class whose instances something else makes: annotations need a class."""
    return type("Made", (), {"__new__": lambda cls, *args, **kwargs: make(*args, **kwargs)})


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    """Return a value, or what an operation takes or returns of values, changed; torch's own trees are slow."""
    if isinstance(value, tuple | list):
        return type(value)([_map(change, item) for item in value])
    if isinstance(value, dict):
        return {name: _map(change, item) for name, item in value.items()}
    return change(value)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves(tuple(value.values()))
    else:
        yield value


def _is_ours(device: Any) -> bool:
    return device is not None and torch.device(device).type in ("cuda", "lazy")


_torch_to = Tensor.to


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Stand for ``Tensor.to``, which asks the guard of "cuda" for its number unless it is there."""

    def numbered(value: Any) -> Any:
        is_ours = isinstance(value, str | torch.device) and _is_ours(value)
        return DEVICE if is_ours else value

    args, kwargs = _map(numbered, args), _map(numbered, kwargs)
    wanted = [value for value in (*args, *kwargs.values()) if value == DEVICE]
    if wanted and isinstance(tensor, VirtualTensor) and not kwargs.get("copy"):
        rest = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype | torch.memory_format)]
        return _torch_to(tensor, *rest) if rest else tensor
    return _torch_to(tensor, *args, **kwargs)


_torch_attention = functional.scaled_dot_product_attention


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Stand for sdpa, which chooses a kernel by device and knows none for ours: take the one of the CPU."""
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale}
    with _disable_current_modes():  # type: ignore[no-untyped-call]
        inputs = _memories((query, key, value, attn_mask))
        choice = torch._fused_sdp_choice(*inputs, dropout_p, enable_gqa=enable_gqa, **options)
    if choice != _FLASH or not isinstance(query, VirtualTensor):
        return _torch_attention(query, key, value, attn_mask, dropout_p, enable_gqa=enable_gqa, **options)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
    kernel = aten._scaled_dot_product_flash_attention_for_cpu
    result: Tensor = kernel(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return result


_to.__name__ = "to"  # function modes are handed what they find under the name of the method that was called
_torch_getitem = Tensor.__getitem__


def _getitem(tensor: Tensor, index: Any) -> Tensor:
    """Stand for indexing: torch makes tensors of lists inside, and copies them to the device while the host waits."""
    # A function mode is asked first, as it would be: it then calls this again.
    if isinstance(tensor, VirtualTensor) and isinstance(index, tuple) and _get_current_function_mode() is None:
        index = tuple(_torch_tensor(part) if isinstance(part, list) else part for part in index)
    return _torch_getitem(tensor, index)


_getitem.__name__ = "__getitem__"
_torch_tensor = torch.tensor


def _tensor(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
    """Stand for ``torch.tensor``, for the same reason."""
    made = _torch_tensor(data, **kwargs)
    return made if device is None else made.to(device)


def _memories(values: Any) -> Any:
    return _map(lambda value: value.memory if isinstance(value, VirtualTensor) else value, values)


def _on_host(kwargs: Any) -> Any:
    """Return the keywords of a factory for a tensor of the host."""
    kept = {name: value for name, value in kwargs.items() if name not in ("pin_memory", "layout")}
    return kept | ({"device": "cpu"} if _is_ours(kwargs.get("device")) else {})


_shapes: dict[Any, Any] = {}


def _result_on_meta(func: Any, args: Any, kwargs: Any) -> Any:
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
    if _is_ours(kwargs.get("device")) or (kwargs.get("device") is None and not args):
        kwargs["device"] = "meta"
    with _disable_current_modes():  # type: ignore[no-untyped-call]
        found = func(*_map(shape, _memories(args)), **_map(shape, _memories(kwargs)))
        if func is aten.native_layer_norm.default:  # the CPU's means are what the weights are, a GPU's fp32
            dtype = (args[0] if args[2] is None else args[2]).dtype
            return found[0], found[1].to(dtype), found[2].to(dtype)
        return found


def _like(shape: Tensor) -> Tensor:
    with _disable_current_modes():  # type: ignore[no-untyped-call]
        return torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)


def _without_modes(kernel: Callable[[], Any]) -> Callable[[], None]:
    """Return a kernel that runs on the host as it is, whatever the thread that runs it is in the middle of."""

    def run() -> None:
        with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():  # type: ignore[no-untyped-call]
            kernel()

    return run


@functools.cache
def _give_tensors_a_guard() -> None:
    """Let autograd take our tensors: it asks the guard of a device type for its streams, and "lazy" has no guard.

    The guard of meta tensors, which does nothing, serves. The registry is an array of pointers by device type.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    registry = (ctypes.c_void_p * _NUM_DEVICE_TYPES).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    registry[_LAZY] = registry[_LAZY] or registry[_META]
