"""Plain reimplementation of Lion and SGD. numpy rounds every operation to the dtype of its arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


def lion_step(
    weight: Array,
    m: Array,
    grad: Array,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    grad_scale: float = 1.0,
) -> tuple[Array, Array]:
    """Return the new `(weight, m)` as in algorithm 2 of "Symbolic Discovery of Optimization Algorithms" (2023).

    In the paper: `update = beta1 * m + (1 - beta1) * g; w = w - lr * (sign(update) + weight_decay * w);
    m = beta2 * m + (1 - beta2) * g`. The sign of NaN is zero, as in torch.
    """
    one = np.float32
    g = grad * one(grad_scale)
    kept = m * one(beta1)
    added = g * one(1.0 - beta1)
    direction = kept + added
    sign = np.where(np.isnan(direction), one(0.0), np.sign(direction)).astype(np.float32)
    decayed = weight * one(1.0 - lr * weight_decay)
    kept = m * one(beta2)
    added = g * one(1.0 - beta2)
    return decayed - sign * one(lr), kept + added


def sgd_step(
    weight: Array,
    m: Array | None,
    grad: Array,
    *,
    lr: float,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    grad_scale: float = 1.0,
) -> tuple[Array, Array | None]:
    """Return the new `(weight, m)` as in `torch.optim.SGD` without dampening, with the decay added to the gradient."""
    one = np.float32
    scaled = grad * one(grad_scale)
    pull = weight * one(weight_decay)
    direction = scaled + pull
    if m is not None:
        kept = m * one(momentum)
        m = kept + direction
        direction = direction + m * one(momentum) if nesterov else m
    return weight - direction * one(lr), m


class PlainLion:
    """Lion as a minimal torch optimizer, for complete training runs.

    Args:
        groups: Parameter groups as in `torch.optim`, with `params` and `weight_decay`.
        lr: Learning rate. Tests may change it in `param_groups` between steps.
        betas: Weight of the momentum in the update direction, and decay rate of the momentum.
    """

    def __init__(self, groups: list[dict[str, object]], *, lr: float, betas: tuple[float, float]) -> None:
        import torch

        self._torch, self._betas = torch, betas
        self.param_groups = [{**group, "lr": lr} for group in groups]
        self._momenta: dict[object, object] = {}

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        torch, (beta1, beta2) = self._torch, self._betas
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    m = self._momenta.setdefault(p, torch.zeros_like(p))
                    update = (beta1 * m + (1 - beta1) * p.grad).sign()
                    p -= group["lr"] * (update + group["weight_decay"] * p)
                    m.mul_(beta2).add_(p.grad, alpha=1 - beta2)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None."""
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None
