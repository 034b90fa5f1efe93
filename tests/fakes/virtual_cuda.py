"""A software CUDA device: its tensors report ``cuda``, and its kernels run as late as possible.

A test with host memory instead of GPU memory misses some errors. Like a real device, this device raises an error if an
operation mixes host and device tensors. It also does so if host code takes the address of device memory or, with
``torch.cuda.set_sync_debug_mode("error")``, if an operation makes the host wait. Kernels and copies are queued on the
current stream, as in ``fakes.lazy_device``, and run only when the host waits for them or for later work. A copy that
does not wait for the kernel that writes its source therefore moves stale bytes.

Freed memory can be reused immediately, as in torch's caching allocator. The device raises an error if work that is
queued on the memory could then race (``fakes.virtual_tensor.ReusedMemory``).

The CPU does the arithmetic. The device does not simulate atomics, speed, or memory that libraries allocate inside
kernels.
"""

from __future__ import annotations

import gc
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fakes.lazy_device import LazyDevice, LazyEvent, LazyStream
from fakes.virtual_tensor import (
    Allocation,
    ReusedMemory,
    VirtualTensor,
    is_ours,
    leaves,
    like,
    map_leaves,
    memories,
    on_host,
    result_on_meta,
    without_modes,
)
from fakes.virtual_torch import attention, class_of, register_lazy_device_guard, tensor_of, to

aten = torch.ops.aten

_ILLEGAL_ADDRESS, _ALREADY_REGISTERED, _NOT_REGISTERED = 700, 712, 713

#: Operations whose result the host needs immediately, so the host waits for them.
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
#: For these views, torch only sets a flag on the tensor. ``VirtualTensor`` has no such flags, so compute the result.
_MADE = {aten._conj.default: aten._conj_physical.default, aten._neg_view.default: aten.neg.default}
#: Half-precision matrix products with an fp32 result -> the same operation for fp32 matrices.
_SUMMED_IN_FP32 = {aten.mm.dtype_out: aten.mm.out, aten.addmm.dtype_out: aten.addmm.out}
#: Products that torch computes with cuBLAS. They are deterministic only with the workspace settings in ``_CONFIGS``.
_CUBLAS_PRODUCTS = {aten.mm.default, aten.bmm.default, aten.baddbmm.default}
_CONFIGS = (":4096:8", ":16:8")
#: Operations that accept host tensors as indexes. torch copies such tensors to the device.
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class VirtualCuda(LazyDevice):
    """CUDA device that replaces torch's in the context ``in_place``.

    Args:
        total_bytes: Size of the device memory, as ``mem_get_info`` reports it.
        is_integrated: Whether the device has no separate memory, and computes in pinned host memory without copies.

    Attributes:
        allocated_bytes: Size of all live tensors.
        peak_bytes: Maximum of ``allocated_bytes`` so far.
        others_bytes: Size of the device memory that other programs use.
        num_calls: Number of calls from the host to the device.
        last_call: Value of ``num_calls`` at which the device fails, or None. All later calls also fail, as after an
            illegal memory access or a hardware fault.
        waits: Names of operations that made the host wait.
        allows_addresses: Whether code may read tensor addresses. Only tests set this, because the program must not.
    """

    def __init__(self, total_bytes: int = 1 << 30, *, is_integrated: bool = False) -> None:
        super().__init__()
        self.total_bytes, self.is_integrated = total_bytes, is_integrated
        self.memory = ReusedMemory(self.lock)
        self.allocated_bytes = self.peak_bytes = self.others_bytes = 0
        self.num_calls = 0
        self.last_call: int | None = None
        self.waits: list[str] = []
        self.allows_addresses = False
        self._forbids_waits = self._has_warned_of_mode = False
        self._random = [0, 0]  # seed, number of draws
        self._locked_pages: dict[int, int] = {}  # address -> bytes
        self._registered: set[int] = set()  # addresses of memory that cudaHostRegister page-locked
        self._cublas_is_repeatable: bool | None = None
        self._last_error = threading.local()
        self._mode = threading.local()

    # -- queries of torch.cuda ---------------------------------------------------------------------------------

    @contextmanager
    def in_place(self) -> Iterator[VirtualCuda]:
        """Replace torch's CUDA device, in this thread and in threads that start within the context."""
        register_lazy_device_guard()
        _device_constructors()  # caches torch's functions for the process, before they are replaced below
        device, run = self, threading.Thread.run

        def run_with_device(thread: threading.Thread) -> None:
            with _Dispatch(device):
                run(thread)

        with ExitStack() as stack:
            stack.enter_context(mock.patch.multiple(torch.cuda, **self._functions()))
            stack.enter_context(mock.patch.object(threading.Thread, "run", run_with_device))
            stack.enter_context(mock.patch.object(Tensor, "to", to))
            stack.enter_context(mock.patch.object(Tensor, "pin_memory", lambda host: self.page_locked(host.clone())))
            stack.enter_context(mock.patch.object(Tensor, "is_pinned", self.is_page_locked))
            stack.enter_context(mock.patch.object(torch, "tensor", tensor_of))
            stack.enter_context(mock.patch.object(functional, "scaled_dot_product_attention", attention))
            stack.enter_context(_Dispatch(self))
            yield self
            self.synchronize()
            gc.collect()  # frees page-locked memory in reference cycles now, because freeing it calls the device

    def _functions(self) -> dict[str, Any]:
        properties = SimpleNamespace(
            total_memory=self.total_bytes, multi_processor_count=1, name="virtual", major=9, minor=0,
            is_integrated=int(self.is_integrated),
        )  # fmt: skip
        return {
            "Stream": class_of(self.stream),
            "Event": class_of(self.event),
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
            "mem_get_info": lambda device=None: (self._free_bytes(), self.total_bytes),
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
            "set_sync_debug_mode": self._set_sync_debug_mode,
        }

    def _set_sync_debug_mode(self, mode: str) -> None:
        self._forbids_waits = mode == "error"
        if not self._has_warned_of_mode:  # like torch, warn once, after setting the mode
            self._has_warned_of_mode = True
            warnings.warn("Synchronization debug mode is a prototype feature and does not yet detect all", stacklevel=2)

    def check(self) -> None:
        self.num_calls += 1
        if self._has_failed():
            hint = "CUDA kernel errors might be asynchronously reported at some other API call"
            raise torch.AcceleratorError(f"CUDA error: an illegal memory access was encountered\n{hint}")

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
        names = ("allocated_bytes.all.current", "requested_bytes.all.current", "reserved_bytes.all.current")
        return zero | dict.fromkeys(names, self.allocated_bytes) | {"allocated_bytes.all.peak": self.peak_bytes}

    def count(self, nbytes: int) -> None:
        """Add ``nbytes`` to the size of live tensors. Raises ``OutOfMemoryError`` with torch's message."""
        with self.lock:
            if nbytes > max(0, self._free_bytes()):
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {nbytes} bytes. GPU 0 has a total capacity of "
                    f"{self.total_bytes} bytes of which {self._free_bytes()} bytes is free. If reserved but "
                    "unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True"
                )
            self.allocated_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def _free_bytes(self) -> int:
        return self.total_bytes - self.allocated_bytes - self.others_bytes

    def _seed(self, seed: int) -> None:
        self._random = [int(seed), 0]

    def _set_random(self, state: Tensor) -> None:
        self._random = state.view(torch.int64).tolist()

    def draw(self) -> int:
        """Return a seed for the next kernel with random numbers. Like Philox counters, seeds follow launch order."""
        self._random[1] += 1
        return hash(tuple(self._random)) & 0x7FFFFFFFFFFF

    # -- page-locked memory ------------------------------------------------------------------------------------

    def _lock_pages(self, address: int, nbytes: int, flags: int) -> int:
        if self._has_failed():
            return self._fail(_ILLEGAL_ADDRESS)
        if address in self._registered:
            return self._fail(_ALREADY_REGISTERED)
        self._registered.add(address)
        self._locked_pages[address] = nbytes
        return 0

    def _unlock_pages(self, address: int) -> int:
        if self._has_failed():
            return self._fail(_ILLEGAL_ADDRESS)
        if address not in self._registered:
            return self._fail(_NOT_REGISTERED)
        self._registered.remove(address)
        del self._locked_pages[address]
        return 0

    def _fail(self, number: int) -> int:
        self._last_error.number = number
        return number

    def _has_failed(self) -> bool:
        return self.last_call is not None and self.num_calls >= self.last_call

    def is_page_locked(self, tensor: Tensor) -> bool:
        """Return whether this host tensor is page-locked, so that copies need no staging."""
        if isinstance(tensor, VirtualTensor):
            return False
        address = tensor.data_ptr()
        # Another thread or a finalizer can release pages meanwhile: `copy` is atomic, `list(items())` is not.
        return any(start <= address < start + nbytes for start, nbytes in self._locked_pages.copy().items())

    def page_locked(self, tensor: Tensor) -> Tensor:
        """Page-lock a new host tensor for the lifetime of the device, and return the tensor."""
        self._locked_pages[tensor.data_ptr()] = max(tensor.nbytes, 1)
        tensor._keeps = self  # type: ignore[attr-defined]
        return tensor

    # -- operations --------------------------------------------------------------------------------------------

    def tensor(self, memory: Tensor, allocation: Allocation | None = None) -> VirtualTensor:
        """Return a device tensor with the contents of ``memory``. If ``allocation`` is None, make a new allocation."""
        return VirtualTensor(memory, allocation or Allocation(self, memory.untyped_storage().nbytes()))

    def view_of_host(self, memory: Tensor, device: Any) -> Tensor:
        """Return a device tensor that shares host memory. Replaces ``tiered.links.unified.device_view``."""
        assert not memory.numel() or self.is_page_locked(memory), "the device cannot reach memory that is not pinned"
        return self.tensor(memory, Allocation(self, 0))

    def wait(self, name: str) -> None:
        """Block the host until the current stream has finished, or raise an error if waits are forbidden.

        ``name`` is the operation that causes the wait.
        """
        if self._forbids_waits:
            raise RuntimeError(f"called a synchronizing CUDA operation: {name}")
        self.waits.append(name)
        self.current_stream().synchronize()

    def launch_op(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on device tensors, immediately or as a kernel on the current stream."""
        if func is aten.copy_.default:
            return self._copy(*args, **kwargs)
        if func is aten._to_copy.default:
            return self._to_copy(*args, **kwargs)
        # In a trace, outputs of megatrain's operators have their maximum size. At run time, the host waits for the
        # actual size.
        if func in _LOOKS or func.namespace == "megatrain" or self._looks_at_mask(func, args):
            self.wait(str(func))
            return self._wrap_new(self._run(func, args, kwargs))
        if func in _SUMMED_IN_FP32:
            return self._multiply_half(_SUMMED_IN_FP32[func], args, kwargs)
        func = _MADE.get(func, func)
        args, kwargs = self._from_host(func, args), dict(kwargs)
        if func.is_view:
            return self._view(func, args, kwargs)
        if func._schema.is_mutable:
            return self._mutate(func, args, kwargs)
        return self._compute(func, args, kwargs)

    def note_use(self, *values: Any) -> None:
        """Record that the next work on the current stream reads or writes these tensors."""
        stream = self.current_stream()
        for value in leaves(values):
            if isinstance(value, VirtualTensor):
                self.memory.use(value.allocation, stream)

    def _multiply_half(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Multiply half-precision matrices with an fp32 result.

        The CPU has no kernel for this, so convert the inputs first.
        """
        *args, out_dtype = args
        assert out_dtype == torch.float32, out_dtype
        wide = [self.launch_op(aten._to_copy.default, (arg,), {"dtype": torch.float32}) for arg in args]
        return self.launch_op(func, tuple(wide), kwargs)

    def _looks_at_mask(self, func: Any, args: Any) -> bool:
        if func.overloadpacket.__name__ not in _INDEXING:
            return False
        return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])

    def _from_host(self, func: Any, args: Any) -> Any:
        """Replace permitted host tensors in the arguments with clones of their current values.

        Reject other host tensors.
        """

        def check(value: Any) -> Any:
            if not isinstance(value, Tensor) or isinstance(value, VirtualTensor):
                return value
            if value.dim() and func.overloadpacket.__name__ in _INDEXING:
                self.wait(f"{func} with an index of the host")
            elif value.dim():
                raise RuntimeError(f"{func}: Expected all tensors to be on the same device, but found cuda:0 and cpu!")
            return value.clone()

        return map_leaves(check, args)

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = self._run(func, args, kwargs)
        allocation = args[0].allocation
        return map_leaves(lambda made: self.tensor(made, allocation) if isinstance(made, Tensor) else made, result)

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
            shapes = result_on_meta(func, args, kwargs)
        except (RuntimeError, NotImplementedError):  # shape depends on values, or meta tensors lack the dtype
            self.current_stream().synchronize()
            return self._wrap_new(self._run(func, args, kwargs))
        made = map_leaves(lambda t: self.tensor(like(t)) if isinstance(t, Tensor) else t, shapes)
        self._queue(func, args, kwargs, into=[t for t in leaves(made) if isinstance(t, Tensor)])
        return made

    def _raise_last_error(self) -> None:
        """Raise this thread's last CUDA runtime error, if any.

        At a kernel launch, torch reports errors from earlier calls.
        """
        number, self._last_error.number = getattr(self._last_error, "number", 0), 0
        if number:
            raise RuntimeError(f"CUDA error: {number}")

    def _check_cublas(self) -> None:
        """Check that deterministic mode has a suitable cuBLAS setting.

        Like torch, read the setting at the first product. Later changes have no effect.
        """
        if self._cublas_is_repeatable is None:
            self._cublas_is_repeatable = os.environ.get("CUBLAS_WORKSPACE_CONFIG") in _CONFIGS
        if torch.get_deterministic_debug_mode() == 2 and not self._cublas_is_repeatable:
            raise RuntimeError(
                "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or ..., but "
                "this operation is not deterministic because it uses CuBLAS and you have CUDA >= 10.2. To enable "
                "deterministic behavior in this case, you must set an environment variable before running your PyTorch "
                "application: CUBLAS_WORKSPACE_CONFIG=:4096:8 or CUBLAS_WORKSPACE_CONFIG=:16:8."
            )

    def _queue(self, func: Any, args: Any, kwargs: Any, into: Sequence[VirtualTensor]) -> None:
        self._raise_last_error()
        self.note_use(args, kwargs, into)
        if func in _CUBLAS_PRODUCTS:
            self._check_cublas()
        args, kwargs = memories(args), on_host(memories(kwargs))
        targets = [target.memory for target in into]
        seed = self.draw() if torch.Tag.nondeterministic_seeded in func.tags else None

        def kernel() -> None:
            result = _call(func, args, kwargs, seed)
            if targets:
                found = [value for value in leaves(result) if isinstance(value, Tensor)]
                for target, value in zip(targets, found, strict=True):
                    target.copy_(value)

        self.launch(without_modes(kernel))

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        with _disable_current_modes(), torch.no_grad():  # type: ignore[no-untyped-call]
            return _call(func, memories(args), on_host(memories(kwargs)))

    def _wrap_new(self, result: Any) -> Any:
        return map_leaves(lambda made: self.tensor(made) if isinstance(made, Tensor) else made, result)

    def create(self, func: Any, args: Any, kwargs: Any) -> VirtualTensor:
        """Run a factory function such as ``torch.zeros``, and return the new device tensor."""
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
            come = source.clone()  # passed to the kernel by value
        elif not (non_blocking and self.is_page_locked(host)):
            self.wait("copy_ of memory that is not page-locked, or that blocks")
            with _disable_current_modes(), torch.no_grad():  # type: ignore[no-untyped-call]
                to.copy_(come)
            return target
        self.note_use(target, source)
        self.launch(without_modes(lambda: to.copy_(come)))
        return target

    def _to_copy(self, source: Tensor, *, device: Any = None, non_blocking: bool = False, **options: Any) -> Tensor:
        goes_up = isinstance(source, VirtualTensor) if device is None else is_ours(device)
        if goes_up and isinstance(source, VirtualTensor):
            copied: Tensor = self._compute(aten._to_copy.default, (source,), options)
            return copied
        options.pop("pin_memory", None)
        memory = source.memory if isinstance(source, VirtualTensor) else source
        with _disable_current_modes():  # type: ignore[no-untyped-call]
            shape = aten._to_copy.default(memory.to("meta"), **options)
            host = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)
        if goes_up:  # the dtype conversion runs on the device
            made = self.tensor(torch.empty_like(host))
            self._copy(made, source, non_blocking)
            return made
        self._copy(host, source, non_blocking)
        return host


def _call(func: Any, args: Any, kwargs: Any, seed: int | None = None) -> Any:
    """Run an operation on host tensors, with a seeded generator if ``seed`` is given."""
    if func is aten.histc.default and not args[0].is_floating_point():  # the CPU kernel accepts only floats
        return func(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
    if seed is None:
        return func(*args, **kwargs)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return func(*args, **kwargs)


class _TimedEvent(LazyEvent):
    def elapsed_time(self, end: LazyEvent) -> float:
        return 1.0


class _Dispatch(TorchDispatchMode):
    """Mode that forwards operations to the device if they use or create device tensors."""

    def __init__(self, device: VirtualCuda) -> None:
        super().__init__()
        self._virtual = device

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, because this mode implements a device. A user's mode would only observe operations."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(leaf, VirtualTensor) for leaf in leaves((args, kwargs))):
            return self._virtual.launch_op(func, args, kwargs)
        if is_ours(kwargs.get("device")):
            if func is aten._to_copy.default:
                return self._virtual.launch_op(func, args, kwargs)
            return self._virtual.create(func, args, kwargs)
        if kwargs.get("pin_memory"):
            return self._virtual.page_locked(func(*args, **{**kwargs, "pin_memory": False}))
        return func(*args, **kwargs)
