"""RAM bandwidth, the optimizer's kernel beside it, and matrix products: what this machine's processors do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from megatrain.optim.adamw import AdamW, AdamWConfig
from megatrain.optim.base import Segment, Update
from megatrain.optim.threads import KernelThreads, cut
from megatrain.plan.machine import available_ram_bytes
from tiered.memory.slab import HostSlab

#: Bytes of RAM that an update of a parameter touches: master, m and v read and written, the gradient read.
ADAMW_BYTES_PER_PARAM = 2 * 12 + 4

_FLOAT_BYTES = 4
_MIN_REPEATS = 3
_MATMUL_SIZES = (512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True)
class ProcessorResult:
    """Bytes, parameters and FLOPs per second, the best of several runs; all with ``num_threads`` threads.

    Attributes:
        ram_read: as in `megatrain.plan.profile.MachineProfile`.
        ram_copy: as in `megatrain.plan.profile.MachineProfile`.
        ram_update: as in `megatrain.plan.profile.MachineProfile`.
        adamw_params: dtype of the weights -> parameters per second.
        matmul_flops: dtype -> FLOP/s on the CPU.
    """

    num_threads: int
    ram_read: float
    ram_copy: float
    ram_update: float
    adamw_params: Mapping[str, float]
    matmul_flops: Mapping[str, float]

    def adamw_share(self, dtype: str) -> float:
        """Return the kernel's bytes per second as a share of the most that RAM gave to any of the three."""
        return self.adamw_params[dtype] * ADAMW_BYTES_PER_PARAM / max(self.ram_read, self.ram_copy, self.ram_update)


def measure_processor(*, span_bytes: int, seconds: float, threads: KernelThreads | None = None) -> ProcessorResult:
    """Measure RAM, the AdamW kernels and matrix products of the CPU.

    Args:
        span_bytes: RAM to work on, far more than the processor's caches; an eighth of what is free at most.
        seconds: about how long each of the seven measurements takes.
        threads: of the kernels; default: one per usable CPU, as in a run.
    """
    kernel_threads = threads or KernelThreads()
    num_elements = min(span_bytes, available_ram_bytes() // 8) // (4 * _FLOAT_BYTES)
    try:
        with _arrays(num_elements) as (weight, m, v, gradient):
            for array in (weight, m, gradient):
                array.uniform_(-1.0, 1.0)
            v.uniform_(0.0, 1.0)
            nbytes = num_elements * _FLOAT_BYTES
            ram_read = 2 * nbytes / _best_s(lambda: torch.dot(weight, m), seconds)
            ram_copy = 2 * nbytes / _best_s(lambda: _copy(m, weight, kernel_threads), seconds)
            ram_update = 3 * nbytes / _best_s(lambda: _add(weight, gradient, kernel_threads), seconds)
            adamw = {
                dtype: num_elements / _best_s(update, seconds)
                for dtype, update in _updates(weight, m, v, gradient, kernel_threads).items()
            }
    finally:
        if threads is None:
            kernel_threads.close()
    flops = {
        str(dtype).removeprefix("torch."): matmul_flops_per_s(torch.device("cpu"), dtype, seconds)
        for dtype in (torch.float32, torch.bfloat16)
    }
    return ProcessorResult(kernel_threads.num_threads, ram_read, ram_copy, ram_update, adamw, flops)


def matmul_flops_per_s(
    device: torch.device, dtype: torch.dtype, seconds: float, synchronize: Callable[[], None] | None = None
) -> float:
    """Return the rate of square matrix products, of the largest size that a tenth of the time does.

    Args:
        synchronize: waits for the device; None where products are done when they return.
    """
    rate = 0.0
    for size in _MATMUL_SIZES:
        left, right = torch.ones(2, size, size, device=device, dtype=dtype).unbind()
        product = torch.empty(size, size, device=device, dtype=dtype)

        def multiply(left: torch.Tensor = left, right: torch.Tensor = right, out: torch.Tensor = product) -> None:
            torch.mm(left, right, out=out)
            if synchronize is not None:
                synchronize()

        rate = max(rate, 2 * size**3 / _best_s(multiply, seconds / 3))
        if 2 * (2 * size) ** 3 / rate > seconds / 10:
            break
    return rate


@contextmanager
def _arrays(num_elements: int) -> Iterator[list[torch.Tensor]]:
    """Yield four fp32 arrays in memory like that of the RAM tier."""
    slabs: list[HostSlab] = []
    try:
        slabs.extend(HostSlab(num_elements * _FLOAT_BYTES) for _ in range(4))  # those before a failure are kept, too
        yield [slab.tensor.view(torch.float32)[:num_elements] for slab in slabs]
    finally:
        for slab in slabs:
            slab.close()


def _copy(target: torch.Tensor, source: torch.Tensor, threads: KernelThreads) -> None:
    to, of = target.numpy(), source.numpy()
    threads.run(partial(np.copyto, to[start:stop], of[start:stop]) for start, stop in cut(0, to.size))


def _add(total: torch.Tensor, addend: torch.Tensor, threads: KernelThreads) -> None:
    from megatrain.optim.kernels import add_in_place

    to, of = total.numpy(), addend.numpy()
    threads.run(partial(add_in_place, to[start:stop], of[start:stop]) for start, stop in cut(0, to.size))


def _updates(
    weight: torch.Tensor, m: torch.Tensor, v: torch.Tensor, gradient: torch.Tensor, threads: KernelThreads
) -> dict[str, Callable[[], None]]:
    """Return an AdamW step over the arrays, by dtype of the weight block."""
    optimizer = AdamW(AdamWConfig(), threads)
    segments = (Segment(0, gradient.numel(), 0.1),)
    halves = weight.view(torch.int16).chunk(2)  # the same bytes hold either form of the master
    split = {"weight": halves[0].view(torch.bfloat16), "low": halves[1], "m": m, "v": v}
    whole = {"weight": weight, "m": m, "v": v}
    now = Update(step=1, lr=1e-5)
    return {
        "float32": lambda: optimizer.update(whole, gradient, segments, now),
        "bfloat16": lambda: optimizer.update(split, gradient, segments, now),
    }


def _best_s(work: Callable[[], object], seconds: float) -> float:
    """Return the least time of some runs, after a first one, which may compile or make room.

    Not the median: what else runs on the machine makes some of them longer, nothing makes them shorter.
    """
    work()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < _MIN_REPEATS or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
