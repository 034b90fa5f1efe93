"""Signum (Bernstein et al., 2018) as an optimizer of megatrain-tier, in one file outside the package.

Each weight moves by a fixed amount against the sign of its momentum. Master and momentum take 8 bytes per parameter.
A package registers the optimizer in its ``pyproject.toml``::

    [project.entry-points."megatrain.optimizers"]
    signum = "signum:Signum"

A config then uses it: ``optim = "custom"``, ``custom_optimizer = "signum"``, ``optim_args = { momentum = 0.95 }``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from megatrain.base.precision import decode, encode
from megatrain.optim.base import FORMATS, Format, Segment, StateKind, Update, master_kinds


class Signum:
    """Signum, as an implementation of ``megatrain.optim.base.Optimizer``. An instance holds only settings."""

    def __init__(self, momentum: float = 0.9) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum = {momentum}: it must be at least 0 and below 1")
        self.momentum = momentum

    def state_kinds(self, split_master: bool) -> tuple[StateKind, ...]:
        """Return the state kinds of the master, and one fp32 moment per element in the same layout."""
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
        """Do nothing: this optimizer compiles no kernels."""
