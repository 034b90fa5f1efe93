"""What a link is: moves bytes between the slots of two tiers, in the background."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from tiered.tiers.base import Slot, Tier
from tiered.transfer import Transfer


@dataclass(frozen=True, slots=True)
class LinkUsage:
    """Counters of one direction of one link since it was made.

    Attributes:
        num_bytes: contents moved (not padding).
        busy_s: wall seconds with at least one transfer under way.
        inflight_bytes: bytes under way now.
        num_transfers: finished transfers.
        path: the way they took.
    """

    num_bytes: int
    busy_s: float
    inflight_bytes: int
    num_transfers: int
    path: str


@runtime_checkable
class Link(Protocol):
    """Moves bytes one way, ``src`` tier to ``dst`` tier. ``submit`` never blocks on the copy itself."""

    src: str
    dst: str

    @property
    def path(self) -> str:
        """Return which way bytes take now: "host", "cuda", "posix-direct", "kvikio-gds" ..."""
        ...

    def submit(self, src_slot: Slot, dst_slot: Slot, nbytes: int) -> Transfer:
        """Start copying the first ``nbytes`` and return at once; the transfer finishes on a link thread.

        The caller keeps both slots untouched until the transfer is done. Errors end up in the transfer
        as ``TransferError``; they are never raised here.
        """
        ...

    def usage(self) -> LinkUsage: ...

    def close(self) -> None:
        """Finish what is under way and stop the threads, which may be shared: with the last link then. Idempotent."""
        ...


@runtime_checkable
class LinkedTier(Protocol):
    """A tier that brings its own links: any tier may have this method, and ``default_links`` asks it."""

    def links_with(self, neighbour: Tier) -> Sequence[Link] | None:
        """Return two links, one each way between this tier and ``neighbour``; None if no way is known.

        Starts no thread and touches no device: links do so with their first transfer.
        """
        ...
