"""The tape of a step: every lease in order, and what becomes of the copy when it ends. Compiled once.

The engine executes it, the simulator replays it in virtual time, and planned traffic is a sum over it. So what is
planned is what moves: there is one place that decides whether a copy is fetched, kept, written back or dropped.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatrain.engine.program import Phase, Stays, StepProgram
    from tiered import Mode, TieredStore


class Release(enum.Enum):
    """What becomes of a copy when its lease ends."""

    STAY = "stay"  # it is the home copy
    KEEP = "keep"  # pinned until its next use, so that it does not cross a link twice
    EVICT = "evict"  # dropped, after it was written back where it changed
    DISCARD = "discard"  # its contents are dead: dropped, never written back


@dataclass(frozen=True, slots=True)
class Access:
    """One use of a block, as the program has it.

    Attributes:
        tick: position in the step.
        mode: of the lease.
        tier: where it is used.
        is_last: its contents are dead afterwards.
        is_kept: its copy waits in ``tier`` for the next use.
    """

    tick: int
    mode: Mode
    tier: str
    is_last: bool
    is_kept: bool


@dataclass(frozen=True, slots=True)
class Kept:
    """A copy away from home that waits for its next use. ``is_newer``: home does not have its contents."""

    tier: str
    is_newer: bool


@dataclass(frozen=True, slots=True)
class Use:
    """One lease of a block, with all that it moves.

    Attributes:
        was_kept: the copy waited here for this use.
        fetches: the contents come from home.
        release: what follows.
        writes_back: the contents go home when the lease ends.
    """

    key: str
    mode: Mode
    was_kept: bool
    fetches: bool
    release: Release
    writes_back: bool


def follow(key: str, accesses: Sequence[Access], home: str, kept: Kept | None = None) -> tuple[list[Use], Kept | None]:
    """Follow the copy of one block through its uses in a step. This is the one rule of what moves.

    Args:
        accesses: in order.
        home: tier of the block.
        kept: the copy that an earlier step left for the first use.

    Returns:
        A use for every access, and the copy that waits when the step is over.
    """
    uses = []
    for access in accesses:
        if access.tier == home:
            # A copy that waits elsewhere would be stale after a write, and none is planned beside a use at home.
            assert kept is None, (key, access, kept)
            uses.append(Use(key, access.mode, False, False, Release.DISCARD if access.is_last else Release.STAY, False))
            continue
        was_kept = kept is not None
        assert kept is None or kept.tier == access.tier, (key, access, kept)
        is_newer = access.mode != "r" or (kept is not None and kept.is_newer)
        # Contents that are dead are neither kept nor written back, whatever else was planned for the copy.
        release = Release.DISCARD if access.is_last else Release.KEEP if access.is_kept else Release.EVICT
        fetches = access.mode != "w" and not was_kept
        uses.append(Use(key, access.mode, was_kept, fetches, release, is_newer and release is Release.EVICT))
        kept = Kept(access.tier, is_newer) if release is Release.KEEP else None
    return uses, kept


@dataclass(frozen=True, slots=True)
class Op:
    """One tick of a step.

    Attributes:
        tick: its position in the step, by which the schedule knows it.
        phase: what runs; see ``Tick``.
        visit: what runs; see ``Tick``.
        tier: where its blocks are used.
        held: leased together for the whole tick.
        passing: leased one after the other within it.
    """

    tick: int
    phase: Phase
    visit: int
    tier: str
    held: tuple[Use, ...]
    passing: tuple[Use, ...]

    @property
    def uses(self) -> tuple[Use, ...]:
        """All leases of the tick, in order."""
        return (*self.held, *self.passing)


@dataclass(frozen=True, slots=True)
class Tape:
    """The ops of a step in order. ``kept``: copies that wait for the next step when it is over."""

    ops: tuple[Op, ...]
    kept: Mapping[str, Kept] = field(default_factory=dict)

    def transfers(self, homes: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
        """Yield (key, source, destination) of everything that the tape moves between tiers, in order."""
        for op in self.ops:
            for use in op.uses:
                if use.fetches:
                    yield use.key, homes[use.key], op.tier
                if use.writes_back:
                    yield use.key, op.tier, homes[use.key]


def compile_step(
    program: StepProgram,
    homes: Mapping[str, str],
    stays: Stays,
    *,
    updates: bool = True,
    passes: bool = True,
    kept: Mapping[str, Kept] | None = None,
) -> Tape:
    """Return the tape of one step.

    Args:
        homes: of the placement.
        stays: of the placement.
        updates: with the ticks that finish the step before.
        passes: with its own, forward and backward.
        kept: copies that the tape before left.
    """
    chosen = program.chosen_ticks(updates=updates, passes=passes)
    tiers = {number: program.tier_of(tick, homes) for number, tick in chosen.items()}
    accesses: dict[str, list[Access]] = {}
    for number, tick in chosen.items():
        for key, mode in (*tick.held, *tick.passing):
            stop = stays.get((number, key))
            # A stay into the next step: only updates can be left of that, and they come right after the passes.
            is_kept = stop is not None and (stop in chosen if stop > number else passes)
            accesses.setdefault(key, []).append(Access(number, mode, tiers[number], key in tick.spent, is_kept))
    waiting = dict(kept or {})
    uses: dict[tuple[int, str], Use] = {}
    for key, of_key in accesses.items():
        found, last = follow(key, of_key, homes[key], waiting.pop(key, None))
        if last is not None:
            waiting[key] = last
        uses.update(((access.tick, key), use) for access, use in zip(of_key, found, strict=True))
    ops = (
        Op(
            number,
            tick.phase,
            tick.visit,
            tiers[number],
            tuple(uses[number, key] for key, _ in tick.held),
            tuple(uses[number, key] for key, _ in tick.passing),
        )
        for number, tick in chosen.items()
    )
    return Tape(tuple(ops), waiting)


class TapeStore:
    """Carries out on a store what the tape says of copies. Used by the thread that runs the step.

    Args:
        homes: block key -> tier.
    """

    def __init__(self, store: TieredStore, homes: Mapping[str, str]) -> None:
        self._store, self._homes = store, homes
        self._kept: dict[str, str] = {}  # key -> tier in which its copy is pinned

    def leased(self, uses: Iterable[Use]) -> None:
        """Note that leases were given: copies that waited for them are pinned no longer."""
        for use in uses:
            if use.was_kept:
                self._store.unpin(use.key, self._kept.pop(use.key))

    def released(self, use: Use, tier: str) -> None:
        """Let go of a copy after its lease, as the tape says.

        Args:
            tier: of the op.
        """
        key = use.key
        if use.release is Release.DISCARD:
            self._store.discard(key)
        elif use.release is not Release.STAY:
            passed_ram = tier == "gpu" and self._homes[key] == "nvme" and not self._store.is_linked("nvme", "gpu")
            if passed_ram and not use.was_kept:
                # The middle copy first: with it still there, the prefetcher could bring the next use from it. One that
                # waited has none: what is in RAM then was fetched for a use there.
                self._store.evict(key, "ram")
            if use.release is Release.KEEP:
                # Pinned, so that nothing else decides about it and its room is counted as taken.
                self._store.pin(key, tier)
                self._kept[key] = tier
            else:
                self._store.evict(key, tier)

    def evict_kept(self) -> None:
        """Let go of all copies that wait for a use that will not come."""
        for key, tier in self._kept.items():
            self._store.unpin(key, tier)
            self._store.evict(key, tier)
        self._kept.clear()
