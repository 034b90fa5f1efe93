"""An object tier behind the drives of a run: the tier of the example, added where a run makes its tiers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from megatrain.plan import attempts, budgets, forward, tiers, together
from megatrain.plan.placement import TierBudget
from megatrain.training import resolve
from oracles.example_files import module
from tiered import KiB

NAME = "objects"


@contextmanager
def objects_tier(url: str, capacity_bytes: int) -> Iterator[None]:
    """Give every run an object tier, slower than all others.

    Args:
        url: As fsspec takes it.
        capacity_bytes: Size of the tier for all processes together.
    """
    names, known, make = budgets.tier_names, budgets.tier_budgets, tiers._make_tier

    def tier_budgets(run: Any, *arguments: Any) -> dict[str, TierBudget]:
        size = capacity_bytes // run.world.local_size
        tier = TierBudget(NAME, size, lambda n: n, links=budgets.both_ways("ram", NAME), is_addressable=False)
        return {**known(run, *arguments), NAME: tier}

    def make_tier(plan: Any, budget: TierBudget, *arguments: Any) -> Any:
        if budget.name == NAME:
            return module.ObjectStoreTier(url, budget.capacity_bytes, name=NAME, part_bytes=48 * KiB)
        return make(plan, budget, *arguments)

    with (
        mock.patch.object(resolve, "tier_names", lambda *arguments: [*names(*arguments), NAME]),
        mock.patch.object(attempts, "tier_budgets", tier_budgets),
        mock.patch.object(forward, "tier_budgets", tier_budgets),
        mock.patch.object(together, "tier_budgets", tier_budgets),
        mock.patch.object(tiers, "_make_tier", make_tier),
    ):
        yield
