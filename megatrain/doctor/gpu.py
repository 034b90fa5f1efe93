"""The GPU, its link to RAM, and whether drives could reach it past RAM (GPUDirect Storage)."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from megatrain.doctor.processor import matmul_flops_per_s
from tiered.memory.slab import HostSlab
from tiered.units import MiB

_COPY_BYTES = 256 * MiB
_NUM_COPIES = 8


@dataclass(frozen=True, slots=True)
class GpuResult:
    """What one CUDA device did.

    Attributes:
        h2d: bytes per second from and to RAM.
        d2h: bytes per second from and to RAM.
        is_pinned: that RAM could be page-locked.
        matmul_flops: dtype -> FLOP/s.
        update: bytes per second of an addition in place, in its own memory.
    """

    name: str
    memory_bytes: int
    is_pinned: bool
    h2d: float
    d2h: float
    matmul_flops: Mapping[str, float]
    update: float | None = None


@dataclass(frozen=True, slots=True)
class GdsResult:
    """What GPUDirect Storage needs: ``missing`` names it, empty where all is there."""

    has_kvikio: bool
    has_driver: bool
    missing: tuple[str, ...]


def measure_gpu(*, seconds: float) -> GpuResult | None:
    """Measure the current CUDA device; None where there is none.

    Args:
        seconds: about how long each matrix product is repeated.
    """
    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    slab = HostSlab(_COPY_BYTES, pin=True)
    try:
        host = slab.tensor
        buffer = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
        flops = {
            str(dtype).removeprefix("torch."): matmul_flops_per_s(
                device, dtype, seconds, lambda: torch.cuda.synchronize(device)
            )
            for dtype in (torch.float32, torch.bfloat16)
        }
        return GpuResult(
            name=torch.cuda.get_device_name(device),
            memory_bytes=torch.cuda.mem_get_info(device)[1],
            is_pinned=slab.is_pinned,
            h2d=_copy_rate(buffer, host),
            d2h=_copy_rate(host, buffer),
            matmul_flops=flops,
            update=_update_rate(buffer),
        )
    finally:
        torch.cuda.synchronize(device)
        slab.close()


def _copy_rate(target: torch.Tensor, source: torch.Tensor) -> float:
    return target.numel() / _median_s(lambda: target.copy_(source, non_blocking=True))


def _update_rate(buffer: torch.Tensor) -> float:
    """Return the bytes per second of two reads and a write per element, as an optimizer streams its blocks."""
    total, addend = buffer.zero_().view(torch.float32).chunk(2)
    return 3 * total.numel() * total.itemsize / _median_s(lambda: total.add_(addend))


def _median_s(work: Callable[[], object]) -> float:
    times: list[float] = []
    for number in range(_NUM_COPIES + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
        if number:  # the first one may set the link up
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def check_gds(proc: Path = Path("/proc"), run: Path = Path("/run")) -> GdsResult:
    """Return what of GPUDirect Storage is there. Imports nothing: kvikio is only looked for."""
    has_kvikio = importlib.util.find_spec("kvikio") is not None
    has_driver = (proc / "driver" / "nvidia-fs").exists()
    missing = []
    if not has_kvikio:
        missing.append("the package kvikio (pip install 'megatrain-tier[gds]')")
    if not has_driver:
        missing.append("the kernel module nvidia-fs (package nvidia-fs or nvidia-gds, then modprobe nvidia-fs)")
    if not (run / "udev").exists():
        missing.append("/run/udev, by which cuFile finds the drive behind a path (in a container: mount it)")
    return GdsResult(has_kvikio, has_driver, tuple(missing))
