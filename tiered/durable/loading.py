"""Blocks of a store filled from a committed generation: by links where the files are in place, else by reading."""

from __future__ import annotations

from tiered.block import CopyState
from tiered.durable.arrays import read_files
from tiered.durable.manifest import generation_name
from tiered.durable.ownership import StoreIdentity
from tiered.durable.reader import GenerationReader
from tiered.errors import CapacityError, GenerationError
from tiered.leasing import Leasing
from tiered.movement import Movement
from tiered.records import Block
from tiered.tiers.layout import HomeFiles, dtype_name, files_of


class Loader:
    """Fills blocks of one store from one generation of its directory.

    Args:
        reader: of the generation.
        identity: of the store; files are adopted only from its own snapshots.
    """

    def __init__(self, movement: Movement, leasing: Leasing, reader: GenerationReader, identity: StoreIdentity) -> None:
        self._movement = movement
        self._leasing = leasing
        self._reader = reader
        self._identity = identity

    def check_registered(self) -> None:
        """Raise ``GenerationError`` unless the durable blocks of the store are those of the generation."""
        reader = self._reader
        where = f"generation {reader.generation} in '{reader.path}'"
        advice = "it is of another model, or of other settings"
        with self._movement.changed:
            specs = {block.spec.key: block.spec for block in self._movement.blocks.values() if block.spec.durable}
        for key, spec in specs.items():
            record, here = reader.blocks.get(key), f"{spec.shape} of {dtype_name(spec.dtype)}"
            if record is None:
                raise GenerationError(f"{where} has no block '{key}', which is {here} here: {advice}")
            if (record.shape, record.dtype) != (spec.shape, dtype_name(spec.dtype)):
                there = f"{record.shape} of {record.dtype}"
                raise GenerationError(f"block '{key}' is {there} in {where}, and {here} here: {advice}")
        for key, record in reader.blocks.items():
            if key not in specs:
                raise GenerationError(
                    f"{where} has a block '{key}', {record.shape} of {record.dtype}, and here is none: {advice}"
                )

    def fill(self, key: str) -> None:
        """Give a registered block the verified contents that it has in the generation; what it held is dropped.

        Raises:
            GenerationError: a part is missing.
            CorruptBlockError: damaged bytes.
            TransferError: a drive refused.
            LeaseError: the block is leased.
        """
        self._reader.spec(key)  # whether the record makes sense
        self._leasing.discard([key])
        block = self._movement.blocks[key]
        if not self._adopt(block):
            self._read_into_place(block)

    def _adopt(self, block: Block) -> bool:
        """Take the snapshot's files for the home slot: no byte moves. False if its tier does not have them."""
        movement, slot = self._movement, block.home.slot
        tier = movement.durable_tiers.get(block.spec.home)
        if tier is None:
            return False
        assert slot is not None, block.spec
        with movement.changed:
            old_bytes = slot.slot_bytes
            block.home.move(CopyState.FILLING)
            block.num_transfers += 1  # nobody else changes it meanwhile
        is_adopted = False
        try:
            name = generation_name(self._reader.generation)
            tier.snapshots.adopt(slot, name, self._identity, lambda files: self._check(block, files))
            tier.describe(slot, block.spec.shape, block.spec.dtype)  # never a document that was damaged there
            home = files_of(slot)
            home.checksums, home.is_flushed = self._reader.blocks[block.spec.key].xxh3_64, True
            is_adopted = True
        except (GenerationError, CapacityError):  # not all on these paths, or cut so that it does not fit: read it
            pass
        finally:
            with movement.changed:
                movement.home_bytes[block.spec.home] += slot.slot_bytes - old_bytes
                block.num_transfers -= 1
                block.home.move(CopyState.CLEAN if is_adopted else CopyState.STALE)
                block.version += is_adopted
                movement.changed.notify_all()
        return is_adopted

    def _check(self, block: Block, home: HomeFiles) -> None:
        nbytes = block.spec.nbytes
        files = [(file.path, file.offset, min(file.nbytes, nbytes - file.offset)) for file in home.files]
        self._reader.check(block.spec.key, files, read_files(files, block.spec))

    def _read_into_place(self, block: Block) -> None:
        key, home = block.spec.key, block.spec.home
        tier = nearest_addressable(self._movement, home)
        with self._leasing.acquire(key, tier, "w") as lease:
            self._reader.read(key, lease.tensor)
        if tier != home and not block.copy_in(tier).pins:
            self._leasing.evict(key, tier)  # so that all blocks pass through a tier that holds a few


def nearest_addressable(movement: Movement, home: str) -> str:
    """Return the tier nearest to ``home``, on the fast side, that a lease can be in."""
    names = movement.order[: movement.order.index(home) + 1]
    return next(name for name in reversed(names) if movement.tiers[name].device is not None)
