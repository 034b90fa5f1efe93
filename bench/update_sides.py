"""The sides of `optimizer.py`: functions without arguments that update all parameters, in the same memory."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from megatrain.base.precision import encode
from megatrain.optim.adafactor import Adafactor
from megatrain.optim.base import Optimizer, Segment, Update
from megatrain.optim.clip import squared_norm
from megatrain.optim.elementwise import SGD, AdamW, Lion
from megatrain.optim.threads import KernelThreads, cut

#: Bytes per parameter in a `Block`, and in the largest temporary tensors (for the fp64 norm, and for foreach).
MEMORY_BYTES, TEMPORARY_BYTES = 24, 12
LR, WEIGHT_DECAY, EPS, CLIP, BETAS = 1e-6, 0.1, 1e-8, 0.5, (0.9, 0.95)
COLUMNS = 1024


@dataclass(frozen=True)
class Side:
    """Timed function of one side.

    Attributes:
        name: Dotted name in the printed rows.
        bytes_per_parameter: Bytes per parameter that a single pass over the arrays reads and writes.
        ceiling: Name of the ceiling that reads and writes the same arrays, or "".
        call: Function that updates all parameters once.
    """

    name: str
    bytes_per_parameter: float
    call: Callable[[], object]
    ceiling: str = ""


@dataclass(frozen=True)
class Block:
    """Masters, state and gradients of a block of parameters in every format, as 1-D CPU tensors."""

    weight: Tensor
    m: Tensor
    v: Tensor
    grad: Tensor
    high: Tensor
    low: Tensor
    grad16: Tensor
    accumulated16: Tensor

    def bits(self, name: str) -> np.ndarray[Any, Any]:
        """Return a view of a tensor's memory as unsigned integers."""
        tensor: Tensor = getattr(self, name)
        return np.asarray(tensor.view(torch.uint32 if tensor.dtype.itemsize == 4 else torch.uint16).numpy())


def make_blocks(num_parameters: int, num_blocks: int) -> list[Block]:
    """Return blocks of `num_parameters` parameters each."""
    total, generator = num_parameters * num_blocks, torch.Generator().manual_seed(0)
    weight = torch.empty(total).normal_(0, 0.02, generator=generator)
    grad = torch.empty(total).normal_(0, 1e-3, generator=generator)
    high, low = torch.empty(total, dtype=torch.bfloat16), torch.empty(total, dtype=torch.int16)
    encode(weight, high, low)
    m, v = torch.zeros(total), torch.full((total,), 1e-6)
    whole = (weight, m, v, grad, high, low, grad.to(torch.bfloat16), torch.zeros(total, dtype=torch.bfloat16))
    starts = range(0, total, num_parameters)
    return [Block(*(tensor[start : start + num_parameters] for tensor in whole)) for start in starts]


def chain_calls(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """Return a function that runs all calls in order, block by block as in a step."""

    def call() -> None:
        for each in calls:
            each()

    return call


_LOOP = {"nogil": True, "cache": False, "fastmath": False, "error_model": "numpy"}


@njit(**_LOOP)  # type: ignore[untyped-decorator]
def _ceiling_whole(weight: Any, m: Any, v: Any, grad: Any) -> None:
    """Read four arrays and write three. A second call restores the memory."""
    for i in range(grad.size):
        mask = np.uint32(grad[i])
        new_weight, new_m, new_v = weight[i] ^ mask, m[i] ^ mask, v[i] ^ mask
        weight[i], m[i], v[i] = new_weight, new_m, new_v


@njit(**_LOOP)  # type: ignore[untyped-decorator]
def _ceiling_split(high: Any, low: Any, m: Any, v: Any, grad: Any) -> None:
    """Read five arrays and write four. A second call restores the memory."""
    for i in range(grad.size):
        mask = np.uint32(grad[i])
        new_high, new_low = high[i] ^ np.uint16(1), low[i] ^ np.uint16(1)
        new_m, new_v = m[i] ^ mask, v[i] ^ mask
        high[i], low[i], m[i], v[i] = new_high, new_low, new_m, new_v


def ceilings(blocks: Sequence[Block], threads: KernelThreads) -> Iterator[Side]:
    """Yield a loop for each memory layout of the AdamW kernel. The loop only moves data, on the kernel's threads."""
    for name, kernel, arrays in (
        ("fp32", _ceiling_whole, ("weight", "m", "v")),
        ("split", _ceiling_split, ("high", "low", "m", "v")),
    ):
        for suffix, grad, nbytes in (("", "grad", 28), ("_bf16grad", "grad16", 26)):
            flats = [[block.bits(array) for array in (*arrays, grad)] for block in blocks]
            call = chain_calls([partial(_run_cut, kernel, each, threads) for each in flats])
            yield Side(f"ceiling.{name}{suffix}", nbytes, call)


def _run_cut(kernel: Callable[..., None], flats: list[np.ndarray[Any, Any]], threads: KernelThreads) -> None:
    threads.run(partial(kernel, *(flat[start:stop] for flat in flats)) for start, stop in cut(0, flats[0].size))


def ours(blocks: Sequence[Block], threads: KernelThreads) -> Iterator[Side]:
    """Yield our optimizers: AdamW in every format (once also with the norm), the other optimizers on split masters."""
    adamw = AdamW(*BETAS, EPS, threads=threads)
    for name in ("fp32", "split"):
        for suffix, grad, nbytes in (("", "grad", 28), ("_bf16grad", "grad16", 26)):
            call = chain_calls([_update(adamw, block, name, grad) for block in blocks])
            yield Side(f"ours.{name}{suffix}", nbytes, call, f"ceiling.{name}{suffix}")
    updates = [_update(adamw, block, "split", "grad16") for block in blocks]
    norms = [partial(squared_norm, block.grad16, threads) for block in blocks]
    yield Side("ours.norm_and_split_bf16grad", 28, chain_calls([*norms, *updates]))
    others: tuple[Optimizer, ...] = (
        Lion(threads=threads),
        SGD(threads=threads),
        Adafactor(threads=threads),
    )
    for optimizer in others:
        call = chain_calls([_update(optimizer, block, "split", "grad") for block in blocks])
        yield Side(f"ours.{type(optimizer).__name__.lower()}.split", 20, call)


def _update(optimizer: Optimizer, block: Block, master: str, grad: str) -> Callable[[], None]:
    n = block.weight.numel()
    tensors = {"weight": block.high, "low": block.low} if master == "split" else {"weight": block.weight}
    tensors |= {"m": block.m, "v": block.v}
    shape: tuple[int, ...] = (n,)
    if isinstance(optimizer, Adafactor):
        shape = (n // COLUMNS, COLUMNS)
        tensors["v"] = torch.zeros(sum(shape))
    segments = (Segment(0, n, WEIGHT_DECAY, shape=shape, state_starts={"v": 0}),)
    update = Update(step=10, lr=LR, grad_scale=CLIP)
    return partial(optimizer.update, tensors, getattr(block, grad), segments, update)


def torch_adamw(blocks: Sequence[Block], kind: str) -> torch.optim.AdamW:
    """Return torch's AdamW for the tensors of our blocks. `kind` is "fused" or "foreach"."""
    parameters = [_parameter(block.weight, block.grad) for block in blocks]
    made = torch.optim.AdamW(parameters, LR, BETAS, EPS, WEIGHT_DECAY, **{kind: True})  # type: ignore[arg-type]
    for parameter, block in zip(parameters, blocks, strict=True):
        made.state[parameter] = {"step": torch.tensor(10.0), "exp_avg": block.m, "exp_avg_sq": block.v}
    return made


def _parameter(weight: Tensor, grad: Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(weight)
    parameter.grad = grad
    return parameter


def peers(blocks: Sequence[Block]) -> Iterator[Side]:
    """Yield torch's and DeepSpeed's AdamW. ``torch.set_num_threads`` sets the number of threads for both."""
    yield Side("torch.fused.fp32", 28, torch_adamw(blocks, "fused").step)
    yield Side("torch.foreach.fp32", 28, torch_adamw(blocks, "foreach").step)
    for name, weight, grad, nbytes in (("fp32", "weight", "grad", 28), ("bf16", "high", "grad16", 22)):
        step = _deepspeed(blocks, weight, grad)
        if step is not None:
            yield Side(f"deepspeed.{name}", nbytes, step)


def _deepspeed(blocks: Sequence[Block], weight: str, grad: str) -> Callable[[], object] | None:
    """Return the step function of DeepSpeedCPUAdam, or None if DeepSpeed is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        return None
    adam = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    parameters = [_parameter(getattr(block, weight), getattr(block, grad)) for block in blocks]
    made = adam(parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, adamw_mode=True)
    for parameter, block in zip(parameters, blocks, strict=True):
        made.state[parameter] = {"step": 10, "exp_avg": block.m, "exp_avg_sq": block.v}
    step: Callable[[], object] = made.step
    return step


def chains(blocks: Sequence[Block]) -> Iterator[Side]:
    """Yield the chains of update operations that trainers run, in plain torch.

    For the GPU-assisted chain, the norm and the upcast run on the GPU and are not measured. The host scales, updates
    and rounds to bf16. In the host chain, the host also copies the bf16 gradient to an accumulator, upcasts it, and
    computes its norm in fp64, as in ZeRO-3. The bytes per parameter count a single pass over the arrays.
    """
    adam = torch_adamw(blocks, "fused")

    def scale_update_round() -> None:
        for block in blocks:  # clip coefficient; 1.0 leaves the gradient unchanged for the other sides
            block.grad.mul_(1.0)
        adam.step()
        for block in blocks:
            block.high.copy_(block.weight)

    def host() -> None:
        for block in blocks:
            block.accumulated16.copy_(block.grad16)
        for block in blocks:
            block.grad.copy_(block.accumulated16)
        for block in blocks:
            block.accumulated16.double().norm(2)
        scale_update_round()

    yield Side("chain.gpu_assisted", 28, scale_update_round)
    yield Side("chain.host", 28, host)
