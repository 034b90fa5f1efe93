"""AdamW with decoupled weight decay on the CPU, the one arithmetic of every placement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatrain.optim.base import Segment, StateKind, Update
from megatrain.optim.elementwise import ElementwiseOptimizer
from megatrain.optim.threads import KernelThreads

__all__ = ["AdamW", "AdamWConfig"]

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


class AdamW(ElementwiseOptimizer):
    """AdamW over flat CPU blocks; see `megatrain.optim.base.Optimizer` for the contract. 12 bytes per parameter.

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

    kernel_name = "adamw"

    def __init__(self, config: AdamWConfig, threads: KernelThreads | None = None) -> None:
        super().__init__(threads)
        self.config = config

    @property
    def state(self) -> tuple[StateKind, ...]:
        """`m` and `v`, in fp32."""
        return _STATE

    def scalars(self, segment: Segment, update: Update) -> tuple[Any, ...]:
        """Return `(grad_scale, decay, 1 - beta1, beta2, 1 - beta2, sqrt(1 - beta2**step), eps, step_size)`."""
        config, lr = self.config, update.lr * segment.lr_scale
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
