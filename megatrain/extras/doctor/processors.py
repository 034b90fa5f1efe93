"""Measurements of CPU kernels, GPU kernels and buses."""

from __future__ import annotations

import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from megatrain.api import (
    AdamW,
    GradientAccumulator,
    KernelThreads,
    Segment,
    Update,
    available_ram_bytes,
)
from megatrain.optim.threads import cut
from megatrain.trace.counting import CountingMode
from tiered.errors import install_command
from tiered.ext import HostSlab
from tiered.units import MiB

_FLOAT_BYTES = 4
_MIN_REPEATS = 3
#: Numbers of tokens in the timed products. The layer's width is half this number; its MLP is three times as wide.
_PRODUCT_TOKENS = (512, 1024, 2048, 4096, 8192)
_DTYPES = (torch.float32, torch.bfloat16)
#: Sizes for attention and for the other operators of a layer, as in a micro-batch of a small model.
_HEADS, _ROW_TOKENS, _HEAD_WIDTH = 8, 1024, 64
_TOKENS, _WIDTH = 2048, 1024


@dataclass(frozen=True, slots=True)
class ProcessorResult:
    """Highest rates of several runs with ``num_threads`` threads.

    Attributes:
        ram_update: Bytes per second, as in `megatrain.machine.profiles.MachineProfile`.
        adamw_params: Parameters per second, by dtype of the weights.
    """

    num_threads: int
    ram_update: float
    adamw_params: Mapping[str, float]


def measure_processor(*, span_bytes: int, seconds: float, threads: KernelThreads | None = None) -> ProcessorResult:
    """Measure additions in RAM and the AdamW kernels of the CPU.

    Args:
        span_bytes: Bytes of RAM to use, far more than the CPU's caches. Limited to an eighth of the free RAM.
        seconds: Approximate time of each of the three measurements.
        threads: Threads of the kernels; default: one per usable CPU, as in a run.
    """
    kernel_threads = threads or KernelThreads()
    num_elements = min(span_bytes, available_ram_bytes() // 8) // (4 * _FLOAT_BYTES)
    try:
        with _allocate_arrays(num_elements) as (weight, m, v, gradient):
            for array in (weight, m, gradient):
                array.uniform_(-1.0, 1.0)
            v.uniform_(0.0, 1.0)
            nbytes = num_elements * _FLOAT_BYTES
            ram_update = 3 * nbytes / _best_s(lambda: _add(weight, gradient, kernel_threads), seconds)
            adamw = {
                dtype: num_elements / _best_s(update, seconds)
                for dtype, update in _make_updates(weight, m, v, gradient, kernel_threads).items()
            }
    finally:
        if threads is None:
            kernel_threads.close()
    return ProcessorResult(kernel_threads.num_threads, ram_update, adamw)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _split_rates(rates: Mapping[str, tuple[float, float]]) -> tuple[dict[str, float], dict[str, float]]:
    return {dtype: rate for dtype, (rate, _) in rates.items()}, {dtype: rate for dtype, (_, rate) in rates.items()}


def layer_rates(
    device: torch.device, dtype: torch.dtype, seconds: float, synchronize: Callable[[], None] | None = None
) -> tuple[float, float]:
    """Return the FLOP/s of causal attention, and the bytes per second of operators without matrix products.

    Both rates cover two forwards and one backward, like a step with recompute. Attention counts the token pairs of a
    causal kernel. The other operators are a norm, a gate and a sum; each allocates its result.

    Args:
        synchronize: As in ``product_flops_per_s``.
    """
    shape = (_HEADS, _ROW_TOKENS, _HEAD_WIDTH)
    queries, keys, values = (torch.randn(1, *shape, device=device).to(dtype).requires_grad_() for _ in range(3))
    stream, gate, up = (torch.randn(_TOKENS, _WIDTH, device=device).to(dtype).requires_grad_() for _ in range(3))

    def attention() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)

    def other_operators() -> torch.Tensor:
        values = stream.float()
        normed = (values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)
        return stream + torch.nn.functional.silu(gate) * up * normed

    rates: list[float] = []
    for forward, inputs in ((attention, (queries, keys, values)), (other_operators, (stream, gate, up))):
        ones = torch.ones_like(forward())

        def work(
            forward: Callable[[], torch.Tensor] = forward,
            inputs: tuple[torch.Tensor, ...] = inputs,
            ones: torch.Tensor = ones,
        ) -> None:
            with torch.no_grad():
                forward()
            torch.autograd.grad(forward(), inputs, ones)
            if synchronize is not None:
                synchronize()

        with CountingMode() as counts:
            work()
        counted = counts.work
        amount = counted.attention_flops - counted.skipped_flops or counted.moved_nbytes
        rates.append(amount / _best_s(work, seconds / 3))
    return rates[0], rates[1]


def product_flops_per_s(
    device: torch.device,
    dtype: torch.dtype,
    seconds: float,
    synchronize: Callable[[], None] | None = None,
    *,
    sums_bytes_per_s: float = math.inf,
) -> float:
    """Return the FLOP/s of a layer's matrix products, at the largest size that takes at most a tenth of ``seconds``.

    Six products are timed: for a projection and for a matrix of the MLP, the forward, the input gradient, and the
    weight gradient with its addition to an fp32 sum. The inputs are random, because a processor draws less power with
    constant inputs and is up to an eighth faster.

    Args:
        synchronize: Function that waits for the device; None if products are synchronous.
        sums_bytes_per_s: Rate of the additions in bytes per second, used to subtract their time.
    """
    rate = 0.0
    for num_tokens in _PRODUCT_TOKENS:
        width = num_tokens // 2
        outputs = {"projection": width, "mlp": 3 * width}
        inputs = _random_tensor(num_tokens, width, device, dtype)
        weights = {name: _random_tensor(size, width, device, dtype) for name, size in outputs.items()}
        gradients = {name: _random_tensor(num_tokens, size, device, dtype) for name, size in outputs.items()}
        sums = {name: torch.zeros(size, width, device=device) for name, size in outputs.items()}
        accumulator = GradientAccumulator(sums, set(sums))

        def multiply(
            inputs: torch.Tensor = inputs,
            weights: Mapping[str, torch.Tensor] = weights,
            gradients: Mapping[str, torch.Tensor] = gradients,
            accumulator: GradientAccumulator = accumulator,
        ) -> None:
            for name, weight in weights.items():
                torch.mm(inputs, weight.t())
                torch.mm(gradients[name], weight)
                accumulator.add_product(name, gradients[name].t(), inputs)
            if synchronize is not None:
                synchronize()

        flops = 3 * 2 * num_tokens * width * sum(outputs.values())
        product_s = _best_s(multiply, seconds / 3)
        sums_s = 2 * sum(total.numel() * total.element_size() for total in sums.values()) / sums_bytes_per_s
        rate = flops / max(product_s - sums_s, product_s / 2)
        if 8 * product_s > seconds / 10:
            break
    return rate


def _random_tensor(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(rows, columns, device=device, dtype=dtype).uniform_(-1.0, 1.0)


@contextmanager
def _allocate_arrays(num_elements: int) -> Iterator[list[torch.Tensor]]:
    """Yield four fp32 arrays in the same kind of host memory as the RAM tier."""
    slabs: list[HostSlab] = []
    try:
        # If an allocation fails, extend() has already added the earlier slabs, so they are closed below.
        slabs.extend(HostSlab(num_elements * _FLOAT_BYTES) for _ in range(4))
        yield [slab.tensor.view(torch.float32)[:num_elements] for slab in slabs]
    finally:
        for slab in slabs:
            slab.close()


def _add(total: torch.Tensor, addend: torch.Tensor, threads: KernelThreads) -> None:
    from megatrain.optim.kernels import add_in_place

    sums, addends = total.numpy(), addend.numpy()
    threads.run(partial(add_in_place, sums[start:stop], addends[start:stop]) for start, stop in cut(0, sums.size))


def _make_updates(
    weight: torch.Tensor, m: torch.Tensor, v: torch.Tensor, gradient: torch.Tensor, threads: KernelThreads
) -> dict[str, Callable[[], None]]:
    """Return functions that run an AdamW step over the arrays, by dtype of the weight block."""
    optimizer = AdamW(threads=threads)
    segments = (Segment(0, gradient.numel(), 0.1),)
    halves = weight.view(torch.int16).chunk(2)  # both forms of the master use the same memory
    split_blocks = {"weight": halves[0].view(torch.bfloat16), "low": halves[1], "m": m, "v": v}
    fp32_blocks = {"weight": weight, "m": m, "v": v}
    step = Update(step=1, lr=1e-5)
    return {
        "float32": lambda: optimizer.update(fp32_blocks, gradient, segments, step),
        "bfloat16": lambda: optimizer.update(split_blocks, gradient, segments, step),
    }


def _best_s(work: Callable[[], object], seconds: float) -> float:
    """Return the minimum seconds of several runs, after a warm-up run that may compile or allocate.

    The minimum is more stable than the median, because other load on the machine can only make runs longer.
    """
    work()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < _MIN_REPEATS or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


_COPY_BYTES = 256 * MiB
_NUM_COPIES = 8


@dataclass(frozen=True, slots=True)
class GpuResult:
    """Measurements of one CUDA device.

    Attributes:
        h2d: Bytes per second from RAM to the device.
        d2h: Bytes per second from the device to RAM.
        is_pinned: Whether the RAM of the copies was pinned.
        matmul_flops: FLOP/s of matrix products, by dtype.
        update: Bytes per second of an in-place addition in device memory.
        attention_flops: FLOP/s of attention by dtype; see `layer_rates`.
        elementwise: Bytes per second of other operators by dtype; see `layer_rates`.
    """

    name: str
    memory_bytes: int
    is_pinned: bool
    h2d: float
    d2h: float
    matmul_flops: Mapping[str, float]
    update: float | None = None
    attention_flops: Mapping[str, float] = field(default_factory=dict)
    elementwise: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GdsResult:
    """Requirements of GPUDirect Storage. ``missing`` describes the requirements that are not met."""

    has_kvikio: bool
    has_driver: bool
    missing: tuple[str, ...]


def measure_gpu(*, seconds: float) -> GpuResult | None:
    """Return measurements of the current CUDA device, or None without a CUDA device.

    Args:
        seconds: Approximate time of each measurement of products or layers.
    """
    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    slab = HostSlab(_COPY_BYTES, pin=True)
    try:
        host = slab.tensor.random_(0, 256)  # random bytes, because a link may compress its data
        buffer = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
        layers = {
            _dtype_name(dtype): layer_rates(device, dtype, seconds, lambda: torch.cuda.synchronize(device))
            for dtype in _DTYPES
        }
        attention, elementwise = _split_rates(layers)
        flops = {
            _dtype_name(dtype): product_flops_per_s(
                device,
                dtype,
                seconds,
                lambda: torch.cuda.synchronize(device),
                sums_bytes_per_s=elementwise[_dtype_name(dtype)],
            )
            for dtype in _DTYPES
        }
        return GpuResult(
            name=torch.cuda.get_device_name(device),
            memory_bytes=torch.cuda.mem_get_info(device)[1],
            is_pinned=slab.is_pinned,
            h2d=_copy_rate(buffer, host),
            d2h=_copy_rate(host, buffer),
            matmul_flops=flops,
            update=_update_rate(buffer),
            attention_flops=attention,
            elementwise=elementwise,
        )
    finally:
        torch.cuda.synchronize(device)
        slab.close()


def _copy_rate(target: torch.Tensor, source: torch.Tensor) -> float:
    return target.numel() / _median_s(lambda: target.copy_(source, non_blocking=True))


def _update_rate(buffer: torch.Tensor) -> float:
    """Return the bytes per second of an addition that, like an optimizer, reads two elements and writes one."""
    total, addend = buffer.view(torch.float32).uniform_(-1.0, 1.0).chunk(2)
    return 3 * total.numel() * total.itemsize / _median_s(lambda: total.add_(addend))


def _median_s(work: Callable[[], object]) -> float:
    times: list[float] = []
    for index in range(_NUM_COPIES + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
        if index:  # skip the first copy, which may initialize the link
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def check_gds(proc: Path = Path("/proc"), run: Path = Path("/run")) -> GdsResult:
    """Check the requirements of GPUDirect Storage, without importing kvikio."""
    has_kvikio = importlib.util.find_spec("kvikio") is not None
    has_driver = (proc / "driver" / "nvidia-fs").exists()
    missing = []
    if not has_kvikio:
        missing.append(f"the package kvikio ({install_command('gds')}, then pip install --no-deps kvikio-cu13)")
    if not has_driver:
        missing.append("the kernel module nvidia-fs (package nvidia-fs or nvidia-gds, then modprobe nvidia-fs)")
    if not (run / "udev").exists():
        missing.append("/run/udev, which cuFile needs to find the drive of a path (in a container: mount it)")
    return GdsResult(has_kvikio, has_driver, tuple(missing))
