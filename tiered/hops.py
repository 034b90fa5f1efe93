"""Routes that copies take between tiers. The store and the plan use the same routes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tiered.schedule import Access

if TYPE_CHECKING:
    from tiered.records import Block


@dataclass(frozen=True)
class Routes:
    """Shortest routes between pairs of tiers over the links.

    Attributes:
        links: (source, destination) pairs, one for each direction of a link. If several routes are equally short,
            earlier links take precedence.
    """

    links: tuple[tuple[str, str], ...] = ()
    _cache: dict[tuple[str, str], tuple[tuple[str, str], ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def between(self, src: str, dst: str) -> tuple[tuple[str, str], ...]:
        """Return the links of the shortest route, or an empty tuple if ``src`` is ``dst``.

        Raises:
            ValueError: no route exists.
        """
        if (src, dst) not in self._cache:
            self._cache[src, dst] = self._search(src, dst)
        return self._cache[src, dst]

    def tiers_between(self, src: str, dst: str) -> tuple[str, ...]:
        """Return the intermediate tiers on the route from ``src`` to ``dst``."""
        return tuple(tier for tier, _ in self.between(src, dst)[1:])

    def is_far(self, src: str, dst: str) -> bool:
        """Return whether a route exists and has more than one intermediate tier."""
        try:
            return len(self.between(src, dst)) > 2
        except ValueError:
            return False

    def _search(self, src: str, dst: str) -> tuple[tuple[str, str], ...]:
        paths: dict[str, tuple[tuple[str, str], ...]] = {src: ()}
        queue = [src]
        for tier in queue:  # The list grows during the loop, in breadth-first order.
            for link in self.links:
                if link[0] == tier and link[1] not in paths:
                    paths[link[1]] = (*paths[tier], link)
                    queue.append(link[1])
        if dst not in paths:
            raise ValueError(f"no links lead from tier '{src}' to tier '{dst}'")
        return paths[dst]


def intermediate_tiers(routes: Routes, block: Block, access: Access) -> Sequence[str]:
    """Return the tiers between a block's home and ``access.tier`` that have, or will get, a copy of the block."""
    tiers = routes.tiers_between(block.spec.home, access.tier)
    target = block.copies.get(access.tier)
    # A valid copy that is only read does not move again, so only the existing copies count.
    if access.mode == "r" and target is not None and target.state.is_valid:
        return [name for name in tiers if name in block.copies and block.copies[name].slot is not None]
    return tiers
