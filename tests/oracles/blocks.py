"""Optimizer blocks with random and special values, and comparisons of device updates with the host kernel."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatrain.base.precision import decode, encode
from megatrain.optim.average import WeightAverage
from megatrain.optim.base import Optimizer, Segment, Update, master_kinds
from megatrain.optim.elementwise import SGD, AdamW, ElementwiseOptimizer, Lion
from megatrain.optim.threads import KernelThreads
from oracles.adamw import split

#: Zero, denormal, small, ordinary and large numbers whose squares stay finite in fp32.
FINITE = np.array([0.0, -0.0, 1e-45, -1e-45, 1e-40, -1e-40, 1.17e-38, 1e-20, 1.0, -3.0, 1e15, -1e18], dtype=np.float32)
#: All numbers of ``FINITE``, and huge numbers, infinities and NaN.
EVERYTHING = np.concatenate([FINITE, np.array([3e38, -3e38, np.inf, -np.inf, np.nan], dtype=np.float32)])
PALETTES = {"normal": np.empty(0, np.float32), "finite": FINITE, "everything": EVERYTHING}


def random_array(generator: np.random.Generator, size: int, palette: str = "normal") -> NDArray[np.float32]:
    """Return normally distributed numbers. If the palette is not empty, its numbers replace about half of them."""
    array = generator.standard_normal(size).astype(np.float32)
    choices = PALETTES[palette]
    return np.where(generator.random(size) < 0.5, generator.choice(choices, size), array) if choices.size else array


def master_blocks(master: NDArray[np.float32], split_master: bool) -> dict[str, Tensor]:
    """Return the block of a master, or the two blocks of a split master, by name."""
    fp32 = torch.from_numpy(master.copy())
    if not split_master:
        return {"weight": fp32}
    high, low = torch.empty(fp32.numel(), dtype=torch.bfloat16), torch.empty(fp32.numel(), dtype=torch.int16)
    encode(fp32, high, low)
    return {"weight": high, "low": low}


def master_of(blocks: dict[str, Tensor]) -> NDArray[np.float32]:
    """Return the fp32 master that the blocks store."""
    if "low" not in blocks:
        return np.asarray(blocks["weight"].numpy())
    master = torch.empty(blocks["weight"].numel())
    decode(blocks["weight"], blocks["low"], master)
    return np.asarray(master.numpy())


def gradient_block(grad: NDArray[np.float32], dtype: torch.dtype) -> tuple[Tensor, NDArray[np.float32]]:
    """Return a gradient block with this dtype, and the block's values in fp32."""
    block = torch.from_numpy(grad.copy()).to(dtype)
    return block, np.asarray(block.float().numpy())


def same_bits(left: NDArray[np.float32], right: NDArray[np.float32]) -> bool:
    """Return whether all bits are equal. NaNs count as equal, because their payloads depend on the processor."""
    both_nan = np.isnan(left) & np.isnan(right)
    return bool(((left.view(np.uint32) == right.view(np.uint32)) | both_nan).all())


def alike(left: Tensor, right: Tensor) -> bool:
    if left.dtype == torch.uint8:
        return torch.equal(left, right)
    return same_bits(np.asarray(left.float().numpy()), np.asarray(right.float().numpy()))


def cut_segments(cuts: Sequence[int], size: int) -> list[Segment]:
    """Return segments split at `cuts`. Neighbors alternately share only the weight decay or only the learning rate."""
    bounds = sorted({0, size, *cuts})
    return [
        Segment(start, stop, weight_decay=0.1 * (index // 2 % 2), lr_scale=1.0 + (index + 1) // 2)
        for index, (start, stop) in enumerate(itertools.pairwise(bounds))
    ]


def update_on(
    optimizer: Optimizer,
    num_threads: int,
    blocks: dict[str, Tensor],
    gradient: Tensor,
    segments: Sequence[Segment],
    update: Update,
) -> None:
    """Run an update with a given number of kernel threads, then stop the threads."""
    threads = KernelThreads(num_threads)
    optimizer.threads = threads  # type: ignore[attr-defined]
    optimizer.update(blocks, gradient, segments, update)
    threads.close()


def changed_halves(optimizer: Optimizer, device: str = "cpu", shape: tuple[int, ...] = ()) -> list[str]:
    """Update split masters with a learning rate of 0, and return the names of the halves whose bits changed.

    The masters combine every finite high half with extreme low halves and low halves near a rounding tie. Random
    masters would rarely hit a tie.

    Args:
        shape: Shape of the parameter with the 65,536 masters. Vectors and matrices may have different kernels.
    """
    size, changed = 1 << 16, []
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        patterns = ((np.arange(size, dtype=np.uint32) << 16) + np.uint32(low)).view(np.float32)
        masters = np.where(np.isfinite(patterns), patterns, np.float32(0.0))
        high, rest = split(masters)
        expected = {"weight": torch.from_numpy(high.view(np.int16)), "low": torch.from_numpy(rest)}
        state = {kind.name: torch.zeros(size, device=device) for kind in optimizer.state_kinds(True)[2:]}
        halves = {name: half.to(device, copy=True) for name, half in expected.items()}
        blocks = {**state, "weight": halves["weight"].view(torch.bfloat16), "low": halves["low"]}
        segment = Segment(0, size, 0.1, shape=shape, state_starts={"v": 0})
        optimizer.update(blocks, torch.zeros(size, device=device), [segment], Update(step=1, lr=0.0))
        changed += [
            f"{name} of {low:#06x}" for name, half in halves.items() if not torch.equal(half.cpu(), expected[name])
        ]
    return changed


HOSTS: dict[str, ElementwiseOptimizer] = {
    "adamw": AdamW(threads=KernelThreads(1)),
    "lion": Lion(threads=KernelThreads(1)),
    "sgd": SGD(threads=KernelThreads(1)),
    "sgd, nesterov": SGD(nesterov=True, threads=KernelThreads(1)),
    "sgd without momentum": SGD(momentum=0.0, threads=KernelThreads(1)),
}
#: Optimizers with moments smaller than fp32.
SMALL_HOSTS: dict[str, ElementwiseOptimizer] = {
    f"{kind.__name__.lower()}, {dtype}": kind(threads=KernelThreads(1), state_dtype=dtype, seed=5)
    for kind in (AdamW, Lion, SGD)
    for dtype in ("bfloat16", "int8")
}
#: (number of elements, segment bounds). The cases cover one and several kernel programs, bounds inside a program, and
#: segments that start at unaligned elements.
SHAPES: tuple[tuple[int, tuple[int, ...]], ...] = (
    (1, ()),
    (15, (7,)),
    (1024, ()),
    (5003, (16, 1040, 1041, 3000)),
)
#: (number of elements, segment bounds) for 8-bit moments, which need segments that start at multiples of 256.
SHAPES_OF_BLOCKS = ((1, ()), (257, ()), (5003, (256, 1024, 3072)))
GRAD_SCALES = (1.0, 0.37, 1e-30)


def differing_blocks(
    host: ElementwiseOptimizer | WeightAverage,
    on_device: Optimizer,
    device: str,
    *,
    size: int,
    cuts: Sequence[int],
    split_master: bool,
    grad_dtype: torch.dtype,
    palette: str,
    grad_scale: float,
) -> list[str]:
    """Run three updates on the device and on the host, and return the names of blocks whose bits differ."""
    generator = np.random.default_rng(size)
    blocks = master_blocks(random_array(generator, size, palette), split_master)
    kinds = host.state_kinds(split_master)[len(master_kinds(split_master)) :]
    for kind in kinds:
        state = random_array(generator, kind.elements_for(size), palette)
        if kind.dtype == torch.uint8:
            blocks[kind.name] = torch.from_numpy(generator.integers(0, 256, state.size, np.uint8))
        else:
            is_positive = kind.name not in ("m", "ema")
            blocks[kind.name] = torch.from_numpy(np.abs(state) if is_positive else state).to(kind.dtype)
    copies = {name: block.to(device, copy=True) for name, block in blocks.items()}
    for step in (1, 2, 1000):
        gradient, _ = gradient_block(random_array(generator, size, palette), grad_dtype)
        update = Update(step=step, lr=1e-3, grad_scale=grad_scale)
        segments = [replace(segment, name=f"w{segment.start}") for segment in cut_segments(cuts, size)]
        host.update(blocks, gradient, segments, update)
        with np.errstate(all="ignore"):  # numpy would warn in Triton's interpreter
            on_device.update(copies, gradient.to(device), segments, update)
    results = {name: copy.cpu() for name, copy in copies.items()}
    states = [kind.name for kind in kinds]
    differing = [name for name in states if not alike(blocks[name], results[name])]
    return differing if same_bits(master_of(blocks), master_of(results)) else ["master", *differing]
