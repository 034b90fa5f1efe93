"""Helpers for training runs on a GPU, or on a software device if there is no GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fakes.lazy_device import DEVICE
from fakes.virtual_cuda import VirtualCuda
from fakes.virtual_tensor import VirtualTensor, without_modes
from megatrain.engine.device import device_kernels
from megatrain.engine.program.visit_trace import VisitTrace
from megatrain.engine.unit import bound_unit
from megatrain.engine.unit.absent_weights import AbsentWeight, absent_weight
from megatrain.optim import by_tier, clip
from megatrain.optim.base import FORMATS, Format, Segment, Update
from megatrain.optim.elementwise import ElementwiseOptimizer
from megatrain.optim.kernels import NORM_BLOCK_ELEMENTS
from megatrain.optim.on_device import DeviceKernelError, UpdateGroup
from megatrain.plan import forward, stepping, traced
from megatrain.trace.trace import trace_generation, trace_visits
from oracles.tiered_run import config_text
from oracles.traces import is_keeping, keeping
from tiered import MiB
from tiered.links import unified

GPU_TIER_BYTES = 64 * MiB


@contextmanager
def virtual_gpu(total_bytes: int = 1 << 30, *, is_integrated: bool = False) -> Iterator[VirtualCuda]:
    """Make ``device = "cuda"`` select a software device of this size throughout the program.

    An integrated device shares the host's memory, and computes in place on the slots of ``tiered.ext.UnifiedTier``.
    """
    device = VirtualCuda(total_bytes, is_integrated=is_integrated)
    trace = keeping(_trace_on_cpu) if is_keeping(traced.trace_visits) else _trace_on_cpu
    patches = [
        # Trace on the CPU, whose kernels the software device uses. If torch was built without CUDA, fake tensors on
        # "cuda" crash the process. The software device's dispatch mode would also allocate memory for a trace's fake
        # tensors.
        mock.patch.object(traced, "trace_visits", trace),
        mock.patch.object(forward, "trace_generation", _trace_generation_on_cpu),
        # torch's C++ code creates this tensor, and does not know the software device.
        mock.patch.object(bound_unit, "absent_weight", _absent_weight_on_cpu),
        mock.patch.object(AbsentWeight, "device", property(lambda weight: DEVICE), create=True),
        mock.patch.object(traced, "has_liger_kernels", return_value=False),  # these kernels only run on a GPU
        mock.patch.object(traced, "device_optimizer", lambda optimizer, _: QueuedOptimizer(optimizer, device)),
        mock.patch.object(by_tier, "device_optimizer", lambda optimizer, _: QueuedOptimizer(optimizer, device)),
        mock.patch.object(unified, "device_view", device.view_of_host),
        mock.patch.object(by_tier, "host_view", lambda tensor: tensor.memory),
        mock.patch.object(clip, "device_partials", lambda gradient: _queued_partials(gradient, device)),
        mock.patch.object(clip, "concat_device_partials", lambda parts: _queued_partials_of(parts, device)),
        mock.patch.object(clip, "sum_partials", lambda partials: _queued_sum(partials, device)),
        mock.patch.object(stepping, "warm_up_norm"),
        # Not a Mock, because a Mock would keep all call arguments in memory.
        mock.patch.object(device_kernels, "are_usable", _without_kernels),
    ]
    with device.in_place(), ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield device


_CPU = torch.device("cpu")


def _trace_on_cpu(*args: Any, device: Any, **options: Any) -> VisitTrace:
    return trace_visits(*args, device=_CPU, **options)


def _trace_generation_on_cpu(*args: Any, device: Any, **options: Any) -> tuple[VisitTrace, dict[int, int]]:
    return trace_generation(*args, device=_CPU, **options)


def _absent_weight_on_cpu(parameter: Tensor, device: torch.device) -> AbsentWeight:
    return absent_weight(parameter, _CPU)


def _without_kernels(tensor: Tensor) -> bool:
    return False


def _queued_partials(gradient: Any, device: VirtualCuda) -> Any:
    """Queue the partial sums of squares on the stream, like the Triton kernel. They are bit-identical to the host's."""
    count = -(-gradient.numel() // NORM_BLOCK_ELEMENTS)
    partials: Any = torch.zeros(count, dtype=torch.float64, device=DEVICE)
    to, of = partials.memory, gradient.memory
    device.note_use(partials, gradient)
    device.launch(lambda: to.copy_(torch.tensor(clip._host_partials(of, None), dtype=torch.float64)))
    return partials


def _queued_partials_of(parts: Sequence[Any], device: VirtualCuda) -> Any:
    return torch.cat([_queued_partials(part, device) for part in parts])


def _queued_sum(partials: Any, device: VirtualCuda) -> Any:
    total: Any = torch.zeros((), dtype=torch.float64, device=DEVICE)
    to, of = total.memory, partials.memory
    device.note_use(total, partials)
    device.launch(lambda: to.fill_(clip._sum_in_order(of.tolist())))
    return total


class QueuedOptimizer:
    """Optimizer that queues updates on the stream, like a Triton kernel. Results are bit-identical to the host's."""

    def __init__(self, host: Any, device: VirtualCuda) -> None:
        updating = getattr(host, "inner", host)
        if not isinstance(updating, ElementwiseOptimizer):
            raise DeviceKernelError(f"{type(updating).__name__} has no GPU kernel")
        self._host, self._device = host, device
        self.state_kinds = host.state_kinds

    def update(
        self, blocks: Mapping[str, Tensor], gradient: Tensor, segments: Sequence[Segment], update: Update
    ) -> None:
        assert all(isinstance(tensor, VirtualTensor) for tensor in (*blocks.values(), gradient))
        memories = {name: tensor.memory for name, tensor in blocks.items()}  # type: ignore[attr-defined]
        memory, segments = gradient.memory, tuple(segments)  # type: ignore[attr-defined]
        self._device.note_use(list(blocks.values()), gradient)
        decision = None if update.decision is None else update.decision.memory  # type: ignore[attr-defined]

        def kernel() -> None:
            if decision is None or decision[1]:
                scale = update.grad_scale if decision is None else float(decision[0])
                self._host.update(memories, memory, segments, replace(update, grad_scale=scale, decision=None))

        self._device.launch(without_modes(kernel))

    def addresses(self, tensors: Iterable[Tensor]) -> Sequence[int]:
        return [tensor.memory.data_ptr() for tensor in tensors]  # type: ignore[attr-defined]

    def make_tables(self, groups: Sequence[UpdateGroup]) -> Sequence[UpdateGroup]:
        return groups

    def update_by_tables(self, tables: Sequence[UpdateGroup], update: Update) -> None:
        for blocks, gradient, segments in tables:
            self.update(blocks, gradient, segments, update)

    def warm_up(self, formats: Iterable[Format] = FORMATS) -> None:
        self._host.warm_up(formats)


def gpu_config_text(folder: Path, model: Path, *, gpu_bytes: int = GPU_TIER_BYTES, **tables: Any) -> str:
    """Return the result of ``config_text`` with a GPU tier of ``gpu_bytes``."""
    return config_text(folder, model, device="cuda", gpu=f"{gpu_bytes}B", **tables)


@contextmanager
def deterministic() -> Iterator[None]:
    """Make torch use deterministic kernels, so that any difference comes from placement.

    CUBLAS_WORKSPACE_CONFIG must be set before the first use of cuBLAS, as in ``tests/gpu/conftest.py``.
    """
    settings: Any = torch.utils.deterministic  # Any, because no type stub has the attribute that is set below
    fills = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = fills
        torch.use_deterministic_algorithms(False)


@contextmanager
def no_waits_allowed() -> Iterator[None]:
    """Make torch raise an error if an operation synchronizes the host with the GPU."""
    try:
        with warnings.catch_warnings():
            # torch warns once per process, after it has set the mode. Tests turn warnings into errors, so ignore this
            # warning.
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
