"""Which tiers a copy passes: GPU -> RAM -> NVMe and back, or straight where a link goes past the tiers between."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from tiered.block import CopyState
from tiered.copies import Block, Copy
from tiered.links.base import Link
from tiered.schedule import Access
from tiered.transfer import Transfer


def route(order: Sequence[str], src: str, dst: str, direct: Container[tuple[str, str]] = ()) -> list[tuple[str, str]]:
    """Return the links that a copy takes: the direct one, else neighbour by neighbour. Plans use the same rule.

    Args:
        order: names of the tiers, fast to slow.
        direct: pairs of tiers with a link between them; neighbours need not be named.
    """
    if (src, dst) in direct:
        return [(src, dst)]
    a, b = order.index(src), order.index(dst)
    step = 1 if b > a else -1
    return [(order[i], order[i + step]) for i in range(a, b, step)]


def stops(order: Sequence[str], block: Block, access: Access) -> Sequence[str]:
    """Return the tiers between a block's home and an access in which it has or will have a copy on its way.

    Args:
        order: names of the tiers, fast to slow.
    """
    first, last = sorted((order.index(access.tier), order.index(block.spec.home)))
    between = order[first + 1 : last]
    target = block.copies.get(access.tier)
    if access.mode == "r" and target is not None and target.state.is_valid:  # it came by, and will not go back
        return [name for name in between if name in block.copies and block.copies[name].slot is not None]
    return between


def submit_two_hops(links: Mapping[tuple[str, str], Link], block: Block, copy: Copy, middle: Copy) -> Transfer:
    """Start writing ``copy`` to the block's home by way of ``middle``; call it with the store's lock held.

    Args:
        links: by (source, destination).
        middle: has a slot, and the newest bytes already if its state is valid.

    Returns:
        One transfer that ends with the second hop.
    """
    assert copy.slot is not None and middle.slot is not None
    nbytes, home = block.spec.nbytes, block.home
    whole = Transfer(copy.tier, home.tier, nbytes, "staged")
    middle.readers += 1

    def second_hop(first: Transfer | None) -> None:
        if first is not None and first.error is not None:
            whole.finish(first.error)
            return
        assert middle.slot is not None and home.slot is not None
        last = links[middle.tier, home.tier].submit(middle.slot, home.slot, nbytes)
        last.add_done_callback(lambda done: whole.finish(done.error))

    if middle.state.is_valid:
        second_hop(None)
    else:
        middle.move(CopyState.FILLING)
        middle.transfer = whole
        links[copy.tier, middle.tier].submit(copy.slot, middle.slot, nbytes).add_done_callback(second_hop)
    return whole
