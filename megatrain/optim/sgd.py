"""Stochastic gradient descent with momentum on the CPU, as in `torch.optim.SGD`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatrain.optim.base import Segment, StateKind, Update
from megatrain.optim.elementwise import ElementwiseOptimizer
from megatrain.optim.threads import KernelThreads

__all__ = ["SGD", "SGDConfig"]

_STATE = (StateKind("m", torch.float32),)


@dataclass(frozen=True, slots=True)
class SGDConfig:
    """Settings of SGD that do not change during a run.

    Attributes:
        lr: Base learning rate, the one that a schedule scales.
        momentum: Decay of the sum of gradients, at least 0 and below 1; 0 keeps no state.
        nesterov: Step along the gradient plus the decayed sum instead of along the sum. Needs momentum.
        weight_decay: Added to the gradient, times the weight: not decoupled.
    """

    lr: float = 1e-3
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        assert 0 <= self.momentum < 1, self.momentum
        assert self.momentum > 0 or not self.nesterov, (self.momentum, self.nesterov)
        assert self.lr >= 0 and self.weight_decay >= 0, (self.lr, self.weight_decay)


class SGD(ElementwiseOptimizer):
    """SGD over flat CPU blocks; see `megatrain.optim.base.Optimizer` for the contract. 4 or 8 bytes per parameter.

    Each element goes through these operations, each one rounded to fp32, as in `torch.optim.SGD` without dampening::

        g = grad * grad_scale + w * weight_decay
        m = m * momentum + g
        w = w - m * lr                      # with nesterov: w - (g + m * momentum) * lr

    torch's own kernels fuse some products and sums, so they may differ from this by the last bit of an operation.

    Args:
        config: Settings.
        threads: Threads to compute on; None makes a set with one thread per usable CPU.
    """

    kernel_name = "sgd"

    def __init__(self, config: SGDConfig, threads: KernelThreads | None = None) -> None:
        super().__init__(threads)
        self.config = config

    @property
    def state(self) -> tuple[StateKind, ...]:
        """`m`, in fp32; nothing without momentum."""
        return _STATE if self.config.momentum else ()

    @property
    def num_state_arguments(self) -> int:
        return 1

    def scalars(self, segment: Segment, update: Update) -> tuple[Any, ...]:
        """Return `(grad_scale, decay, momentum, lr, nesterov)`."""
        config = self.config
        scalars = (update.grad_scale, segment.weight_decay, config.momentum, update.lr * segment.lr_scale)
        return (*(np.float32(scalar) for scalar in scalars), config.nesterov)
