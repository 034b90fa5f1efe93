"""AdamW with decoupled weight decay on the CPU, the one arithmetic of every placement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatrain.optim.base import Segment, StateKind, Update, master_kinds
from megatrain.optim.threads import KernelThreads, cut

__all__ = ["AdamW", "AdamWConfig", "adamw_scalars"]

_STATE = (StateKind("m", torch.float32), StateKind("v", torch.float32))


@dataclass(frozen=True, slots=True)
class AdamWConfig:
    """Settings of AdamW that do not change during a run.

    Attributes:
        lr: Base learning rate, the one that a schedule scales.
        beta1: Decay of the mean of gradients, at least 0 and below 1.
        beta2: Decay of the mean of squared gradients, at least 0 and below 1.
        eps: Added to the denominator.
        weight_decay: Decoupled decay of the parameters that decay.
    """

    lr: float = 1e-5
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        assert 0 <= self.beta1 < 1 and 0 <= self.beta2 < 1, (self.beta1, self.beta2)
        assert self.lr >= 0 and self.eps >= 0 and self.weight_decay >= 0, (self.lr, self.eps, self.weight_decay)


def adamw_scalars(config: AdamWConfig, segment: Segment, update: Update) -> tuple[np.float32, ...]:
    """Return the kernels' scalars for one segment: computed in fp64, rounded to fp32 once.

    Returns:
        `(grad_scale, decay, 1 - beta1, beta2, 1 - beta2, sqrt(1 - beta2**step), eps, step_size)`.
    """
    assert update.step >= 1, update.step
    lr = update.lr * segment.lr_scale
    scalars = (
        update.grad_scale,
        1.0 - lr * segment.weight_decay,
        1.0 - config.beta1,
        config.beta2,
        1.0 - config.beta2,
        (1.0 - config.beta2**update.step) ** 0.5,
        config.eps,
        lr / (1.0 - config.beta1**update.step),
    )
    return tuple(np.float32(scalar) for scalar in scalars)


class AdamW:
    """AdamW over flat CPU blocks; see `megatrain.optim.base.Optimizer` for the contract.

    Each element goes through these operations, each one rounded to fp32, as in `torch.optim.AdamW` (foreach=False)::

        g = grad * grad_scale
        w = w * (1 - lr * weight_decay)
        m = m + (g - m) * (1 - beta1)
        v = v * beta2 + ((1 - beta2) * g) * g
        w = w - ((lr / (1 - beta1**step)) * m) / (sqrt(v) / sqrt(1 - beta2**step) + eps)

    torch's own kernels fuse some products and sums, so they may differ from this by the last bit of an operation.

    Args:
        config: Settings.
        threads: Threads to compute on; None makes a set with one thread per usable CPU.
    """

    def __init__(self, config: AdamWConfig, threads: KernelThreads | None = None) -> None:
        self.config = config
        self.threads = KernelThreads() if threads is None else threads

    def state_kinds(self, split_master: bool) -> tuple[StateKind, ...]:
        """Return the master, `m` and `v`: 12 bytes per parameter, split or not."""
        return (*master_kinds(split_master), *_STATE)

    def update(
        self, blocks: Mapping[str, Tensor], gradient: Tensor, segments: Sequence[Segment], update: Update
    ) -> None:
        """Apply one step in place; see `megatrain.optim.base.Optimizer.update`."""
        split_master = "low" in blocks
        flats = [_flat(blocks, kind, gradient.numel()) for kind in self.state_kinds(split_master)]
        flats.append(_flat({"gradient": gradient}, StateKind("gradient", torch.float32), gradient.numel()))
        self.threads.run(self._calls(_kernel(split_master), flats, segments, update))

    def warm_up(self) -> None:
        """Compile or load both kernels."""
        for split_master in (False, True):
            blocks = {kind.name: torch.zeros(1, dtype=kind.dtype) for kind in self.state_kinds(split_master)}
            self.update(blocks, torch.zeros(1), (Segment(0, 1, 0.0),), Update(step=1, lr=0.0))

    def _calls(
        self,
        kernel: Callable[..., None],
        flats: Sequence[np.ndarray[Any, Any]],
        segments: Sequence[Segment],
        update: Update,
    ) -> Iterator[Callable[[], None]]:
        num_elements = flats[-1].size
        for segment in segments:
            assert 0 <= segment.start <= segment.stop <= num_elements, (segment, num_elements)
            scalars = adamw_scalars(self.config, segment, update)
            for start, stop in cut(segment.start, segment.stop):
                yield partial(kernel, *(flat[start:stop] for flat in flats), *scalars)


def _flat(blocks: Mapping[str, Tensor], kind: StateKind, num_elements: int) -> np.ndarray[Any, Any]:
    """Return the block's memory as numpy; bf16, which numpy lacks, as its 16 bits."""
    tensor = blocks[kind.name].detach()
    assert tensor.dtype == kind.dtype, (kind, tensor.dtype)
    assert tensor.device.type == "cpu", (kind, tensor.device)
    assert tensor.dim() == 1 and tensor.is_contiguous(), (kind, tuple(tensor.shape), tensor.stride())
    assert tensor.numel() == num_elements, (kind, tensor.numel(), num_elements)
    if kind.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    return tensor.numpy()


def _kernel(split_master: bool) -> Callable[..., None]:
    from megatrain.optim import kernels  # numba takes half a second to import: only a run that updates pays it

    kernel: Callable[..., None] = kernels.update_split_master if split_master else kernels.update_master
    return kernel
