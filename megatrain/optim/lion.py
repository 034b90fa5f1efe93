"""Lion (evolved sign momentum) on the CPU: AdamW's masters with one state instead of two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatrain.optim.base import Segment, StateKind, Update
from megatrain.optim.elementwise import ElementwiseOptimizer
from megatrain.optim.threads import KernelThreads

__all__ = ["Lion", "LionConfig"]

_STATE = (StateKind("m", torch.float32),)


@dataclass(frozen=True, slots=True)
class LionConfig:
    """Settings of Lion that do not change during a run.

    Attributes:
        lr: Base learning rate. Every element moves by it, so it is 3 to 10 times smaller than AdamW's.
        beta1: Weight of the momentum in the direction, at least 0 and below 1.
        beta2: Decay of the momentum, at least 0 and below 1.
        weight_decay: Decoupled decay of the parameters that decay; 3 to 10 times larger than AdamW's.
    """

    lr: float = 1e-5
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        assert 0 <= self.beta1 < 1 and 0 <= self.beta2 < 1, (self.beta1, self.beta2)
        assert self.lr >= 0 and self.weight_decay >= 0, (self.lr, self.weight_decay)


class Lion(ElementwiseOptimizer):
    """Lion over flat CPU blocks; see `megatrain.optim.base.Optimizer` for the contract. 8 bytes per parameter.

    From Chen et al., Symbolic Discovery of Optimization Algorithms (2023), algorithm 2. Each element goes through these
    operations, each one rounded to fp32::

        g = grad * grad_scale
        w = w * (1 - lr * weight_decay)
        w = w - lr * sign(m * beta1 + g * (1 - beta1))
        m = m * beta2 + g * (1 - beta2)

    The sign of zero, and of NaN, is zero.

    Args:
        config: Settings.
        threads: Threads to compute on; None makes a set with one thread per usable CPU.
    """

    kernel_name = "lion"

    def __init__(self, config: LionConfig, threads: KernelThreads | None = None) -> None:
        super().__init__(threads)
        self.config = config

    @property
    def state(self) -> tuple[StateKind, ...]:
        """`m`, in fp32."""
        return _STATE

    def scalars(self, segment: Segment, update: Update) -> tuple[Any, ...]:
        """Return `(grad_scale, decay, beta1, 1 - beta1, beta2, 1 - beta2, lr)`."""
        config, lr = self.config, update.lr * segment.lr_scale
        scalars = (
            update.grad_scale,
            1.0 - lr * segment.weight_decay,
            config.beta1,
            1.0 - config.beta1,
            config.beta2,
            1.0 - config.beta2,
            lr,
        )
        return tuple(np.float32(scalar) for scalar in scalars)
