"""Signum (Bernstein et al., 2018) as an optimizer of megatrain-tier, in one file outside of the package.

Each weight takes a step of one length along the sign of its momentum: 8 bytes per parameter. A package names it in its
``pyproject.toml``::

    [project.entry-points."megatrain.optimizers"]
    signum = "signum:Signum"

and a config uses it: ``optim = "custom"``, ``custom_optimizer = "signum"``, ``optim_args = { momentum = 0.95 }``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from megatrain.base.precision import decode, encode
from megatrain.optim.base import FORMATS, Format, Segment, StateKind, Update, master_kinds


class Signum:
    """See ``megatrain.optim.base.Optimizer`` for the contract. An object holds settings only."""

    def __init__(self, momentum: float = 0.9) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum = {momentum}: it must be at least 0 and below 1")
        self.momentum = momentum

    def state_kinds(self, split_master: bool) -> tuple[StateKind, ...]:
        """Return the master, and one moment per element at the same place."""
        return (*master_kinds(split_master), StateKind("m", torch.float32))

    def update(
        self, blocks: Mapping[str, Tensor], gradient: Tensor, segments: Sequence[Segment], update: Update
    ) -> None:
        """Apply one step in place."""
        for segment in segments:
            inside = slice(segment.start, segment.stop)
            lr = update.lr * segment.lr_scale
            moment = blocks["m"][inside]
            moment.mul_(self.momentum).add_(gradient[inside].float() * update.grad_scale, alpha=1 - self.momentum)
            weight = blocks["weight"][inside]
            master = weight
            if "low" in blocks:  # a bf16 weight and the lower half of its fp32 master
                master = torch.empty(moment.numel())
                decode(weight, blocks["low"][inside], master)
            master.mul_(1 - lr * segment.weight_decay).sub_(moment.sign(), alpha=lr)
            if "low" in blocks:
                encode(master, weight, blocks["low"][inside])

    def warm_up(self, formats: Iterable[Format] = FORMATS) -> None:
        """Nothing is compiled."""
