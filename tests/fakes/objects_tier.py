"""Adds the object store tier of ``examples/extend`` to runs, as a tier that is slower than the drives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from megatrain.plan import run_tiers
from megatrain.plan.placement import TierBudget
from oracles.example_files import module
from tiered import KiB

NAME = "objects"


class ObjectsTier(run_tiers.RunTier):
    """Object store tier that is slower than all other tiers.

    Args:
        url: URL in fsspec's format.
        capacity_bytes: Total size of the tier in bytes, divided equally among the processes of a host.
    """

    name = NAME

    def __init__(self, url: str, capacity_bytes: int) -> None:
        self._url, self._capacity_bytes = url, capacity_bytes

    def budget(self, run: Any, workspace: int) -> TierBudget:
        size = self._capacity_bytes // run.world.local_size
        return TierBudget(NAME, size, lambda n: n, links=run_tiers.link_pair("ram", NAME), is_addressable=False)

    def make(self, plan: Any, budget: TierBudget, on_notice: Any) -> Any:
        return module.ObjectStoreTier(self._url, budget.capacity_bytes, name=NAME, part_bytes=48 * KiB)


@contextmanager
def objects_tier(url: str, capacity_bytes: int) -> Iterator[None]:
    """Add an object tier to every run within the context. The arguments are passed to `ObjectsTier`."""
    with mock.patch.object(run_tiers, "RUN_TIERS", (*run_tiers.RUN_TIERS, ObjectsTier(url, capacity_bytes))):
        yield
