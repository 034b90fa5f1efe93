"""A check in torch's optimizers: ordinary optimizers must not update offloaded parameters."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatrain.embed.optimizer import TieredOptimizer
from megatrain.embed.partition import OffloadError
from megatrain.embed.weights import block_of


@functools.cache
def refuse_foreign_optimizers() -> None:
    """Make ordinary optimizers raise an error for offloaded parameters, whose gradients they cannot see."""

    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if isinstance(optimizer, TieredOptimizer):
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if (block := block_of(parameter)) is not None:
                    raise OffloadError(
                        f"{type(optimizer).__name__} cannot update {block.name_of(parameter)}, whose gradient is in "
                        "the store. Use megatrain.TieredAdamW(model.parameters(), ...)"
                    )

    register_optimizer_step_pre_hook(check)
