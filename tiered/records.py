"""The records of the store: blocks, their copies in tiers, and the leases on them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from tiered.block import LEGAL_MOVES, BlockSpec, CopyState
from tiered.errors import LeaseError
from tiered.schedule import Mode

if TYPE_CHECKING:
    import torch

    from tiered.tiers.base import Slot
    from tiered.transfer import Transfer


class Copy:
    """One copy of one block in one tier. All fields are guarded by the store's lock.

    Attributes:
        readers: read leases plus transfers that read from this copy.
        pins: number of pins.
        wanted: number of acquires that wait for this copy; it is not evicted meanwhile.
        last_use: order of its last use or arrival.
        leased_at: tick in which it was leased last.
        transfer: transfer that fills or drains it, while in progress; afterwards the last fill.
        prefetched: brought by the prefetcher and not used yet.
        drop_when_clean: evict once drained.
    """

    __slots__ = (
        "drop_when_clean",
        "is_home",
        "last_use",
        "leased_at",
        "pins",
        "prefetched",
        "readers",
        "slot",
        "state",
        "tier",
        "transfer",
        "wanted",
    )

    def __init__(self, tier: str, *, is_home: bool) -> None:
        self.tier = tier
        self.is_home = is_home
        self.state = CopyState.STALE if is_home else CopyState.ABSENT
        self.slot: Slot | None = None
        self.readers = 0
        self.pins = 0
        self.wanted = 0
        self.last_use = -1
        self.leased_at: int | None = None
        self.prefetched = False
        self.drop_when_clean = False
        self.transfer: Transfer | None = None

    @property
    def slot_bytes(self) -> int:
        return 0 if self.slot is None else self.slot.slot_bytes

    def move(self, state: CopyState) -> None:
        """Change state. Every change of every copy uses this method."""
        assert (self.state, state) in LEGAL_MOVES, f"illegal move {self.state.name} -> {state.name} in {self.tier}"
        self.state = state


class Block:
    """A registered block: its spec, its copies by tier, its writer. All fields are guarded by the store's lock."""

    __slots__ = ("copies", "num_transfers", "slot_bytes", "spec", "version", "writer")

    def __init__(self, spec: BlockSpec) -> None:
        self.spec = spec
        self.copies: dict[str, Copy] = {spec.home: Copy(spec.home, is_home=True)}
        self.writer: Lease | None = None
        self.num_transfers = 0  # movements in progress, of any copy
        self.version = 0  # counts released writes
        self.slot_bytes: dict[str, int] = {}  # by tier, cached

    def copy_in(self, tier: str) -> Copy:
        """Return the copy record for a tier (ABSENT if it never held one)."""
        copy = self.copies.get(tier)
        if copy is None:
            copy = self.copies[tier] = Copy(tier, is_home=False)
        return copy

    @property
    def home(self) -> Copy:
        return self.copies[self.spec.home]

    @property
    def has_contents(self) -> bool:
        return any(copy.state.is_valid for copy in self.copies.values())

    @property
    def num_readers(self) -> int:
        if len(self.copies) == 1:
            return self.home.readers
        return sum([copy.readers for copy in self.copies.values()])

    def newest(self) -> Copy | None:
        """Return the copy that holds bytes newer than home's, or None."""
        for copy in self.copies.values():
            if copy.state in (CopyState.DIRTY, CopyState.DRAINING):
                return copy
        return None


#: ``thread_id`` of a lease held by a commit in progress, which ends by itself.
NO_THREAD = -1


class _Returner(Protocol):
    def return_leases(self, leases: Sequence[Lease], *, abandoned: bool, stream: Any) -> None: ...


class Lease:
    """One copy of one block, held still. Use it as a context manager, or call ``release`` once.

    The copy is neither evicted nor changed by others while the lease lives. A ``w`` or ``rw`` lease is
    exclusive over all copies of the block. Leaving the ``with`` block of a ``w`` lease by an exception abandons it.
    A write by torch through the tensor of an ``r`` lease raises ``LeaseError`` at its release.

    Attributes:
        tensor: exactly the block's shape and dtype, contiguous, a view of the slot (no copy), on the tier's device. Not
            usable after release: the slot may then hold another block.
        version: number of writes released before this lease was granted.
    """

    __slots__ = (
        "_block",
        "_copy",
        "_leasing",
        "_released",
        "_writes",
        "key",
        "mode",
        "tensor",
        "thread_id",
        "tier",
        "version",
    )

    def __init__(self, leasing: _Returner, block: Block, copy: Copy, mode: Mode, tensor: torch.Tensor) -> None:
        self._leasing, self._block, self._copy = leasing, block, copy
        self._released = False
        self.key, self.tier, self.mode, self.version = block.spec.key, copy.tier, mode, block.version
        # `data` has a separate count of in-place writes; other views of the slot share one.
        self.tensor = tensor.data if mode == "r" else tensor
        self._writes = _num_writes(self.tensor) if mode == "r" else 0
        self.thread_id = threading.get_ident()

    @property
    def is_released(self) -> bool:
        """Return whether the lease was given back."""
        return self._released

    def release(self, stream: Any = None) -> None:
        """Give the copy back; after a ``w`` or ``rw`` lease its bytes are the block's newest contents.

        Args:
            stream: on a device tier, the stream whose queued work still uses the tensor (default: the current one). The
                slot is not reused before that work is done; the host does not wait.

        Raises:
            LeaseError: released before, or the tensor of an ``r`` lease was written.
        """
        _end([self], abandoned=False, stream=stream)

    def abandon(self) -> None:
        """Give a ``w`` lease back without contents: its writes are dropped.

        Raises:
            LeaseError: not a ``w`` lease, or released before.
        """
        if self.mode != "w":
            raise LeaseError(f"lease on '{self.key}' has mode '{self.mode}'; only a 'w' lease can be abandoned")
        _end([self], abandoned=True, stream=None)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._released:
            _end([self], abandoned=kind is not None, stream=None)

    def __getattr__(self, name: str) -> Any:
        """Explain why a released lease has no tensor; called only for missing attributes."""
        if name == "tensor":
            text = f"lease on '{self.key}' in tier '{self.tier}' was released: acquire the block again for its tensor"
            raise LeaseError(text)
        raise AttributeError(f"'Lease' object has no attribute '{name}'")

    def __copy__(self) -> Lease:
        raise LeaseError("a lease cannot be copied: acquire the block again")


class LeaseGroup(Sequence[Lease]):
    """Leases granted together and released together. Index by position, or by key with ``group.of(key)``."""

    def __init__(self, leases: Sequence[Lease]) -> None:
        self._leases = tuple(leases)

    def of(self, key: str) -> Lease:
        for lease in self._leases:
            if lease.key == key:
                return lease
        raise KeyError(key)

    def __getitem__(self, index: Any) -> Any:
        return self._leases[index]

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases)

    def release(self, stream: Any = None) -> None:
        """Release every lease of the group."""
        _end(self._leases, abandoned=False, stream=stream)

    def __enter__(self) -> LeaseGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = [lease for lease in self._leases if not lease._released]
        _end(left, abandoned=kind is not None, stream=None)


def _end(leases: Sequence[Lease], *, abandoned: bool, stream: Any) -> None:
    """Give leases of one store back together; see ``Lease.release`` and ``Lease.abandon``.

    Raises:
        LeaseError: one of them was released before; the others are as they were. Or the tensor of an ``r`` lease was
            written: all leases have ended then.
    """
    for lease in leases:
        if lease._released:
            raise LeaseError(f"lease on '{lease.key}' in tier '{lease.tier}' was released before")
    if not leases:
        return
    for lease in leases:
        lease._released = True
    leases[0]._leasing.return_leases(leases, abandoned=abandoned, stream=stream)
    written = [each for each in leases if each.mode == "r" and _num_writes(each.tensor) != each._writes]
    for lease in leases:
        del lease.tensor
    if written and not abandoned:
        keys = ", ".join(f"'{lease.key}'" for lease in written)
        raise LeaseError(
            f"the tensor of a read lease was changed in place: {keys}. The change is in memory and may be lost; "
            "write the block again under a lease of mode 'rw' or 'w'"
        )


def _num_writes(tensor: torch.Tensor) -> int:
    """Return torch's count of in-place writes to a tensor, or 0 if it keeps none."""
    return 0 if tensor.is_inference() else tensor._version
