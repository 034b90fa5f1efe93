"""Tape of a step: every lease in order, and what happens to each copy after its lease.

`compile_step` derives the tape from a program and a placement. The engine executes the tape, the simulator replays it
on a virtual clock, and the planner adds up its traffic. Planned and actual traffic are equal unless leases are
skipped, because only `follow` decides whether a copy is fetched, pinned, written back or dropped.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatrain.engine.program.step_program import ModelPhase, NextUses, Phase, StepProgram
    from tiered import Mode, TieredStore


class Release(enum.Enum):
    """Action on a copy when its lease ends."""

    HOME = "home"  # the copy is at home and stays there
    PIN = "pin"  # the copy stays until its next use, which then needs no fetch
    EVICT = "evict"  # the copy is written back if it changed, then dropped
    DISCARD = "discard"  # the copy is dropped without a write-back, because no later use reads it


@dataclass(frozen=True, slots=True)
class BlockUse:
    """One use of a block in a program.

    Attributes:
        is_last: Whether no later use reads the contents.
        is_pinned: Whether the copy stays in ``tier`` until the next use.
    """

    tick: int
    mode: Mode
    tier: str
    is_last: bool
    is_pinned: bool


@dataclass(frozen=True, slots=True)
class PinnedCopy:
    """Copy that is pinned in a tier other than its home, until its next use.

    Attributes:
        is_newer: Whether the copy has changed since it was fetched. If so, the home has old contents.
    """

    tier: str
    is_newer: bool


@dataclass(frozen=True, slots=True)
class Use:
    """One lease of a block, and the transfers that it causes.

    Attributes:
        was_pinned: Whether an earlier use left the copy pinned.
        needs_fetch: Whether the lease first fetches the contents from home.
        release: Action on the copy when the lease ends.
        needs_write_back: Whether the contents are written back to home after the lease.
    """

    key: str
    mode: Mode
    was_pinned: bool
    needs_fetch: bool
    release: Release
    needs_write_back: bool


def follow(
    key: str, accesses: Sequence[BlockUse], home: str, pinned: PinnedCopy | None = None
) -> tuple[list[Use], PinnedCopy | None]:
    """Determine the transfers of one block in a step. Only this function decides which bytes move.

    Args:
        pinned: Copy that an earlier step left pinned, if any.

    Returns:
        One use per access, and the copy that is still pinned after the step.
    """
    uses = []
    for access in accesses:
        if access.tier == home:
            # A write at home would make a pinned copy stale, so placements never pin a copy across a use at home.
            assert pinned is None, (key, access, pinned)
            release = Release.DISCARD if access.is_last else Release.HOME
            uses.append(Use(key, access.mode, False, False, release, False))
            continue
        was_pinned = pinned is not None
        assert pinned is None or pinned.tier == access.tier, (key, access, pinned)
        is_newer = access.mode != "r" or (pinned is not None and pinned.is_newer)
        # After its last use, a copy is neither pinned nor written back, even if the placement pins it.
        release = Release.DISCARD if access.is_last else Release.PIN if access.is_pinned else Release.EVICT
        fetches = access.mode != "w" and not was_pinned
        uses.append(Use(key, access.mode, was_pinned, fetches, release, is_newer and release is Release.EVICT))
        pinned = PinnedCopy(access.tier, is_newer) if release is Release.PIN else None
    return uses, pinned


@dataclass(frozen=True, slots=True)
class Op:
    """One tick of a step, with its leases and the transfers that they cause.

    Attributes:
        tick: Position in the step.
        held: Uses leased together for the whole tick.
        passing: Groups leased one at a time within the tick; empty for an update with all parts at home.
        bytes_outside: Bytes moved in addition to blocks, by link: by collectives, and for Muon's matrices.
    """

    tick: int
    phase: Phase
    visit: int
    tier: str
    held: tuple[Use, ...]
    passing: tuple[tuple[Use, ...], ...]
    served_phase: ModelPhase | None = None
    bytes_outside: Mapping[str, int] = field(default_factory=dict)

    @property
    def uses(self) -> tuple[Use, ...]:
        """All uses of the tick, in lease order."""
        return (*self.held, *(use for group in self.passing for use in group))


@dataclass(frozen=True, slots=True)
class Tape:
    """Ops of a step, in order, with the copies that stay pinned after the step.

    Attributes:
        pinned: Copies that stay pinned for the next step, by key.
    """

    ops: tuple[Op, ...]
    pinned: Mapping[str, PinnedCopy] = field(default_factory=dict)

    def transfers(self, homes: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
        """Yield (key, source tier, destination tier) for all transfers, in order."""
        for op in self.ops:
            for use in op.uses:
                if use.needs_fetch:
                    yield use.key, homes[use.key], op.tier
                if use.needs_write_back:
                    yield use.key, op.tier, homes[use.key]


def compile_step(
    program: StepProgram,
    homes: Mapping[str, str],
    stays: NextUses,
    *,
    updates: bool = True,
    passes: bool = True,
    pinned: Mapping[str, PinnedCopy] | None = None,
) -> Tape:
    """Compile the tape of one step.

    Args:
        stays: Copies that stay pinned until their next use.
        updates: Whether to include the deferred updates, which finish the previous step.
        passes: Whether to include all other ticks.
        pinned: Copies that the previous tape left pinned.
    """
    ticks = program.select_ticks(updates=updates, passes=passes)
    tiers = {index: program.tick_tier(tick, homes) for index, tick in ticks.items()}
    accesses: dict[str, list[BlockUse]] = {}
    for index, tick in ticks.items():
        for key, mode in tick.uses:
            stop = stays.get((index, key))
            # Pin for the next step only if this tape has passes. The tape after the last step has only updates.
            is_pinned = stop is not None and (stop in ticks if stop > index else passes)
            accesses.setdefault(key, []).append(BlockUse(index, mode, tiers[index], key in tick.spent, is_pinned))
    pinned_copies = dict(pinned or {})
    uses: dict[tuple[int, str], Use] = {}
    for key, key_accesses in accesses.items():
        key_uses, last_copy = follow(key, key_accesses, homes[key], pinned_copies.pop(key, None))
        if last_copy is not None:
            pinned_copies[key] = last_copy
        uses.update(((access.tick, key), use) for access, use in zip(key_accesses, key_uses, strict=True))
    ops: list[Op] = []
    for index, tick in ticks.items():
        held_uses = tuple(uses[index, key] for key, _ in tick.held)
        groups = tuple(tuple(uses[index, key] for key, _ in group) for group in tick.passing)
        if tick.phase == "update" and all(homes[key] == tiers[index] for key, _ in tick.uses):
            held_uses, groups = (*held_uses, *chain.from_iterable(groups)), ()  # parts at home can be leased together
        bytes_outside = program.bytes_outside_blocks(index)
        ops.append(Op(index, tick.phase, tick.visit, tiers[index], held_uses, groups, tick.served_phase, bytes_outside))
    return Tape(tuple(ops), pinned_copies)


class TapeStore:
    """Executor of a tape's pins, evictions and discards on a store. Used by the thread that runs the step."""

    def __init__(self, store: TieredStore, homes: Mapping[str, str]) -> None:
        self._store, self._homes = store, homes
        self._pinned: dict[str, str] = {}  # key -> tier of its pinned copy

    def unpin_copies(self, uses: Iterable[Use]) -> None:
        """Unpin the copies that were pinned for these uses. Call this within the leases, which protect the copies."""
        for use in uses:
            if use.was_pinned:
                self._store.unpin(use.key, self._pinned.pop(use.key))

    def skip_lease(self, use: Use, tier: str) -> None:
        """Skip a planned lease. A prefetched copy is kept if the tape pins the copy, and otherwise evicted.

        A skipped lease fetches nothing. If the tape pins the copy, its slot is pinned, with or without contents. The
        next use then either finds a prefetched copy or fetches the block. Traffic therefore never exceeds the plan.
        """
        assert use.mode == "r", use
        if use.release is Release.HOME:
            return
        if use.release is Release.PIN:
            if use.key not in self._pinned:
                self._store.pin(use.key, tier)
                self._pinned[use.key] = tier
            return
        if use.key in self._pinned:
            self._store.unpin(use.key, self._pinned.pop(use.key))
        for name in (tier, *self._store.tiers_between(self._homes[use.key], tier)):
            self._store.evict(use.key, name)

    def release_copies(self, uses: Sequence[Use], tier: str) -> None:
        """Pin, evict or discard copies as the tape specifies. Call this after the leases have ended."""
        # Skip blocks at home first. The discards of a layer's gradients are then adjacent and need one call.
        released_uses = (use for use in uses if use.release is not Release.HOME)
        for release, group in groupby(released_uses, lambda use: use.release):
            if release is Release.DISCARD:
                self._store.discard(*(use.key for use in group))
            else:
                for use in group:
                    self._keep_or_evict(use, tier)

    def _keep_or_evict(self, use: Use, tier: str) -> None:
        """Pin or evict a copy outside of the block's home."""
        key = use.key
        if not use.was_pinned:
            # Evict the copies that the fetch left in intermediate tiers, because a later fetch must start at home, as
            # planned. For a pinned copy, this has already happened: later copies in RAM are for uses in RAM.
            for name in self._store.tiers_between(self._homes[key], tier):
                self._store.evict(key, name)
        if use.release is Release.PIN:
            # The pin also protects the slot: the store does not evict it, and counts its bytes as used.
            self._store.pin(key, tier)
            self._pinned[key] = tier
        else:
            self._store.evict(key, tier)

    def evict_pinned(self) -> None:
        """Evict all pinned copies, because their next uses are cancelled."""
        for key, tier in self._pinned.items():
            self._store.unpin(key, tier)
            self._store.evict(key, tier)
        self._pinned.clear()
