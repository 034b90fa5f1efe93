"""Routes that copies take between tiers. The store and the plan share them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tiered.schedule import Access

if TYPE_CHECKING:
    from tiered.records import Block


@dataclass(frozen=True)
class Routes:
    """Graph of tiers and links, which gives the route of a copy from one tier to another.

    Attributes:
        links: Pairs (source, destination), one for each direction of a link. Among the shortest routes, the links that
            come first here win.
    """

    links: tuple[tuple[str, str], ...] = ()
    _found: dict[tuple[str, str], tuple[tuple[str, str], ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def between(self, src: str, dst: str) -> tuple[tuple[str, str], ...]:
        """Return the links of the shortest route, empty within one tier.

        Raises:
            ValueError: no links lead there.
        """
        if (src, dst) not in self._found:
            self._found[src, dst] = self._search(src, dst)
        return self._found[src, dst]

    def passed(self, src: str, dst: str) -> tuple[str, ...]:
        """Return the tiers that a copy passes between its two ends."""
        return tuple(here for here, _ in self.between(src, dst)[1:])

    def is_far(self, src: str, dst: str) -> bool:
        """Return whether a copy passes more than one tier on its way; False if no way leads there."""
        try:
            return len(self.between(src, dst)) > 2
        except ValueError:
            return False

    def _search(self, src: str, dst: str) -> tuple[tuple[str, str], ...]:
        ways: dict[str, tuple[tuple[str, str], ...]] = {src: ()}
        reached = [src]
        for here in reached:  # grows: the nearest tiers come first
            for link in self.links:
                if link[0] == here and link[1] not in ways:
                    ways[link[1]] = (*ways[here], link)
                    reached.append(link[1])
        if dst not in ways:
            raise ValueError(f"no links lead from tier '{src}' to tier '{dst}'")
        return ways[dst]


def stops(routes: Routes, block: Block, access: Access) -> Sequence[str]:
    """Return the tiers between a block's home and an access in which it has, or will have, a copy on the way."""
    between = routes.passed(block.spec.home, access.tier)
    target = block.copies.get(access.tier)
    if access.mode == "r" and target is not None and target.state.is_valid:  # it has passed them; reads change nothing
        return [name for name in between if name in block.copies and block.copies[name].slot is not None]
    return between
