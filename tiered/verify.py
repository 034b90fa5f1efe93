"""Contents at rest in files, compared with the checksums of what was written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiered.block import CopyState
from tiered.checksums import pieces
from tiered.contents import read_contents
from tiered.copies import Block
from tiered.errors import CorruptBlockError
from tiered.grants import Grants
from tiered.movement import Movement
from tiered.tiers.files import HomeFiles, place_of


def verify_at_rest(movement: Movement, grants: Grants, keys: Sequence[str] | None = None) -> int:
    """Read the files of blocks whose newest bytes are at home, compare them, and return the bytes compared.

    Left out: blocks with newer bytes in a faster tier, those whose home is memory, and those without checksums
    (``verify="off"`` and not committed since). Writers of a block wait while it is read. Call from any thread.

    Args:
        keys: which blocks; default all.

    Raises:
        CorruptBlockError: the first difference, with its file and range.
        BlockNotFoundError: a key names no block.
        TransferError: a file cannot be read, or is gone.
        GenerationError: a file cannot be read, or is gone.
    """
    with movement.changed:
        grants.check_open()
        chosen = list(movement.blocks.values()) if keys is None else [grants.block(key) for key in keys]
    return sum(_verify(movement, block) for block in chosen)


def _verify(movement: Movement, block: Block) -> int:
    with movement.changed:
        slot = block.home.slot
        is_there = movement.blocks.get(block.spec.key) is block and block.home.state is CopyState.CLEAN
        if not is_there or slot is None or not isinstance(slot.resource, HomeFiles) or block.writer is not None:
            return 0
        home, expected = slot.resource, slot.resource.checksums
        if expected is None:
            return 0
        block.home.readers += 1  # nobody changes or frees it meanwhile
    try:
        tier: Any = movement.tiers[block.spec.home]
        found = read_contents(Path(tier.paths[0], "live", block.spec.key), block.spec)
    finally:
        with movement.changed:
            block.home.readers -= 1
            movement.changed.notify_all()
    check_pieces(home, block.spec.nbytes, expected, found)
    return block.spec.nbytes


def check_pieces(home: HomeFiles, nbytes: int, expected: Sequence[str], found: Sequence[str]) -> None:
    """Raise ``CorruptBlockError`` naming the files and the range of the first piece whose checksum differs."""
    assert len(expected) == len(list(pieces(nbytes))), (home.key, nbytes, expected)
    for number, (start, stop) in enumerate(pieces(nbytes)):
        actual = found[number] if number < len(found) else "none"
        if actual != expected[number]:
            raise CorruptBlockError(home.key, expected[number], actual, place=place_of(home, start, stop))
