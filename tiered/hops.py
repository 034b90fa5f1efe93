"""The hops between tiers by which a copy comes and goes."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

from tiered.schedule import Access

if TYPE_CHECKING:
    from tiered.records import Block


def route(order: Sequence[str], src: str, dst: str, direct: Container[tuple[str, str]] = ()) -> list[tuple[str, str]]:
    """Return the links that a copy takes: from each tier the one that goes furthest. Plans use the same rule.

    Args:
        order: names of the tiers, fast to slow.
        direct: pairs of tiers with a link between them; neighbours need not be named.
    """
    here, end = order.index(src), order.index(dst)
    step = 1 if end > here else -1
    links = []
    while here != end:
        onward = (there for there in range(end, here, -step) if (order[here], order[there]) in direct)
        there = next(onward, here + step)
        links.append((order[here], order[there]))
        here = there
    return links


def stops(order: Sequence[str], block: Block, access: Access, direct: Container[tuple[str, str]] = ()) -> Sequence[str]:
    """Return the tiers between a block's home and an access in which it has or will have a copy on its way.

    Args:
        order: names of the tiers, fast to slow.
    """
    between = [src for src, _ in route(order, block.spec.home, access.tier, direct)[1:]]
    target = block.copies.get(access.tier)
    if access.mode == "r" and target is not None and target.state.is_valid:  # it came by, and will not go back
        return [name for name in between if name in block.copies and block.copies[name].slot is not None]
    return between
