"""Takes an optimizer's state out of its store, so that another optimizer can have the parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.embed.groups import TieredGroup
from megatrain.embed.stores import ledger_of

if TYPE_CHECKING:
    from megatrain.embed.optimizer import TieredOptimizer

__all__ = ["release"]


def release(optimizer: TieredOptimizer) -> None:
    """Make the updates that are due, then forget the optimizer's state; it cannot be used afterwards.

    Generations that were committed keep what they have.
    """
    optimizer.finish_updates()
    optimizer.zero_grad()
    ledger = ledger_of(optimizer.store)
    for group in optimizer.groups:
        if isinstance(group, TieredGroup):
            group.weights.before_use = group.weights.after_change = None
            assert group.weights.gradients is not None, group.layout.name
            group.weights.gradients.before_add = None
        elif group.gradients is not None:
            group.gradients.close()
        ledger.unregister(optimizer.store, *group.keys.values())
    optimizer.groups.clear()
    ledger.optimizers.discard(optimizer)
    optimizer.threads.close()
    ledger.num_changes += 1
