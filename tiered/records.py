"""Records of the store: blocks, their copies in tiers, and leases."""

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
    """One copy of one block in one tier. The store's lock guards all fields.

    Attributes:
        readers: number of read leases and transfers that read this copy.
        num_waiters: number of ``acquire`` calls that wait for this copy. Unless it is 0, the copy is not evicted.
        last_use: counter value of the last use or arrival.
        leased_at: tick of the last lease.
        transfer: latest transfer that filled or drained the copy, in progress or ended.
        prefetched: whether a prefetch fetched the copy and nothing has used it yet.
        drop_when_clean: whether the copy is evicted as soon as it is clean and unused.
    """

    __slots__ = (
        "drop_when_clean",
        "is_home",
        "last_use",
        "leased_at",
        "num_waiters",
        "pins",
        "prefetched",
        "readers",
        "slot",
        "state",
        "tier",
        "transfer",
    )

    def __init__(self, tier: str, *, is_home: bool) -> None:
        self.tier = tier
        self.is_home = is_home
        self.state = CopyState.STALE if is_home else CopyState.ABSENT
        self.slot: Slot | None = None
        self.readers = 0
        self.pins = 0
        self.num_waiters = 0
        self.last_use = -1
        self.leased_at: int | None = None
        self.prefetched = False
        self.drop_when_clean = False
        self.transfer: Transfer | None = None

    @property
    def slot_bytes(self) -> int:
        return 0 if self.slot is None else self.slot.slot_bytes

    def move(self, state: CopyState) -> None:
        """Change the state. All state changes use this method."""
        assert (self.state, state) in LEGAL_MOVES, f"illegal move {self.state.name} -> {state.name} in {self.tier}"
        self.state = state


class Block:
    """A registered block, with its spec, its writer, and its copies by tier. The store's lock guards all fields."""

    __slots__ = ("copies", "num_transfers", "slot_bytes", "spec", "version", "writer")

    def __init__(self, spec: BlockSpec) -> None:
        self.spec = spec
        self.copies: dict[str, Copy] = {spec.home: Copy(spec.home, is_home=True)}
        self.writer: Lease | None = None
        self.num_transfers = 0  # transfers in progress, over all copies
        self.version = 0  # number of write leases released and snapshots adopted so far
        self.slot_bytes: dict[str, int] = {}  # cached slot sizes, by tier

    def copy_in(self, tier: str) -> Copy:
        """Return the copy in a tier, creating a record in state ABSENT if there is none."""
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
        """Return the copy whose bytes are newer than the home copy, or None."""
        for copy in self.copies.values():
            if copy.state in (CopyState.DIRTY, CopyState.DRAINING):
                return copy
        return None


#: ``thread_id`` of leases that belong to a commit in progress, which will release them.
NO_THREAD = -1


class _Returner(Protocol):
    def return_leases(self, leases: Sequence[Lease], *, abandoned: bool, stream: Any) -> None: ...


class Lease:
    """Right to use one copy of one block in place. Use it as a context manager, or call ``release`` once.

    During the lease, the store does not evict the copy and no other lease changes it. A ``w`` or ``rw`` lease excludes
    all other leases on the block's copies. An exception inside the ``with`` block of a ``w`` lease abandons the lease.
    If torch writes to the tensor of an ``r`` lease, ``release`` raises ``LeaseError``.

    Attributes:
        tensor: contiguous view of the slot with the block's shape and dtype, on the tier's device. Do not use the view
            after the release, because the slot may then hold another block.
        version: version of the block's contents when the lease was granted. Each released write lease increases it.
    """

    __slots__ = (
        "_block",
        "_copy",
        "_leasing",
        "_released",
        "_write_count",
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
        # ``data`` gives the view its own counter of in-place writes. Without it, all views of the slot share one
        # counter.
        self.tensor = tensor.data if mode == "r" else tensor
        self._write_count = _num_writes(self.tensor) if mode == "r" else 0
        self.thread_id = threading.get_ident()

    @property
    def is_released(self) -> bool:
        """Whether the lease was released or abandoned."""
        return self._released

    def release(self, stream: Any = None) -> None:
        """End the lease. After a ``w`` or ``rw`` lease, the copy is the block's newest version.

        Args:
            stream: on a device tier, the stream whose queued kernels still use the tensor (default: the current one).
                The store does not reuse the slot before these kernels have finished. The host does not wait.

        Raises:
            LeaseError: the lease was released before, or torch wrote to the tensor of an ``r`` lease.
        """
        _end([self], abandoned=False, stream=stream)

    def abandon(self) -> None:
        """End a ``w`` lease and discard its writes.

        Raises:
            LeaseError: the mode is not ``w``, or the lease was released before.
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
        """Explain in an error why a released lease has no tensor. Python calls this for missing attributes."""
        if name == "tensor":
            text = f"lease on '{self.key}' in tier '{self.tier}' was released: acquire the block again for its tensor"
            raise LeaseError(text)
        raise AttributeError(f"'Lease' object has no attribute '{name}'")

    def __copy__(self) -> Lease:
        raise LeaseError("a lease cannot be copied: acquire the block again")


class LeaseGroup(Sequence[Lease]):
    """Leases that are granted and released together. Index the group by position, or call ``group.of(key)``."""

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
        """Release every lease in the group."""
        _end(self._leases, abandoned=False, stream=stream)

    def __enter__(self) -> LeaseGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        open_leases = [lease for lease in self._leases if not lease._released]
        _end(open_leases, abandoned=kind is not None, stream=None)


def _end(leases: Sequence[Lease], *, abandoned: bool, stream: Any) -> None:
    """End several leases of one store; see ``Lease.release`` and ``Lease.abandon``.

    Raises:
        LeaseError: a lease was already released (no lease is changed), or torch wrote to the tensor of an ``r`` lease
            (all leases have ended).
    """
    for lease in leases:
        if lease._released:
            raise LeaseError(f"lease on '{lease.key}' in tier '{lease.tier}' was released before")
    if not leases:
        return
    for lease in leases:
        lease._released = True
    leases[0]._leasing.return_leases(leases, abandoned=abandoned, stream=stream)
    offenders = [lease for lease in leases if lease.mode == "r" and _num_writes(lease.tensor) != lease._write_count]
    for lease in leases:
        del lease.tensor
    if offenders and not abandoned:
        keys = ", ".join(f"'{lease.key}'" for lease in offenders)
        raise LeaseError(
            f"the tensor of a read lease was changed in place: {keys}. The change is in memory and may be lost; "
            "write the block again under a lease of mode 'rw' or 'w'"
        )


def _num_writes(tensor: torch.Tensor) -> int:
    """Return torch's count of in-place writes to a tensor. Inference tensors have no count, so return 0 for them."""
    return 0 if tensor.is_inference() else tensor._version
