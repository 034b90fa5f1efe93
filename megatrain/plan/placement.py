"""Placement of blocks: homes, residents of GPU memory, copies that stay, and the resulting traffic."""

from __future__ import annotations

import bisect
import heapq
import math
from collections import ChainMap, Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import median_low
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatrain.checkpoint.table import MIN_GENERATIONS
from megatrain.engine.program import DURABLE_KINDS, KINDS, BlockPlan, Kind, Stays, StepProgram
from megatrain.engine.tape import BlockUse, Tape, compile_step, follow
from tiered import Mode
from tiered.ext import Routes
from tiered.units import format_size

#: Kind of blocks -> allowed home tiers, preferred first. ``in place``: for weights read from the model's folder.
Homes = Mapping[Kind | Literal["in place"], Sequence[str]]


@dataclass(frozen=True, slots=True)
class PlacementSpec:
    """Allowed homes for each kind of block.

    Attributes:
        homes: Kind -> allowed home tiers of its blocks, preferred first.
        residents: Kinds whose blocks may have their home in the compute tier if that tier is not RAM.
    """

    homes: Homes
    residents: frozenset[Kind]


class Traffic:
    """Counter of the block bytes that each link ``"src->dst"`` moves.

    Args:
        routes: Links between the tiers.
        homes: Block key -> tier.
        stays: Copies that wait for their next use.
    """

    def __init__(self, program: StepProgram, routes: Routes, homes: Mapping[str, str], stays: Stays) -> None:
        self._program, self._routes, self._homes = program, routes, homes
        self._first = compile_step(program, homes, stays, updates=False)
        self._step = compile_step(program, homes, stays, pinned=self._first.pinned)
        if (pinned := self._step.pinned) != self._first.pinned:
            self._step = compile_step(program, homes, stays, pinned=pinned)
        self._last = compile_step(program, homes, stays, passes=False, pinned=pinned)

    def of_first_step(self) -> dict[str, int]:
        """Return the bytes that a first step moves: no copies are waiting and no updates are due."""
        return self._count(self._first)

    def of_step(self, counts: Callable[[str], bool] | None = None) -> dict[str, int]:
        """Return the bytes that a step between the first and the last moves.

        Args:
            counts: Filter of blocks by key. All blocks count by default.
        """
        return self._count(self._step, counts)

    def num_transfers(self, tier: str, counts: Callable[[str], bool] | None = None) -> int:
        """Return the number of block copies that a middle step moves into a tier or out of it."""
        transfers = self._step.transfers(self._homes)
        return sum(tier in (src, dst) and (counts is None or counts(key)) for key, src, dst in transfers)

    def of_last_updates(self) -> dict[str, int]:
        """Return the bytes of the updates after the last step, including the final write-backs to the homes."""
        moved = self._count(self._last)
        for key, pinned in self._last.pinned.items():
            if pinned.is_newer:
                self._add(moved, key, pinned.tier, self._homes[key])
        return moved

    def _count(self, tape: Tape, counts: Callable[[str], bool] | None = None) -> dict[str, int]:
        moved = {f"{src}->{dst}": 0 for src, dst in self._routes.links}
        for key, src, dst in tape.transfers(self._homes):
            if counts is None or counts(key):
                self._add(moved, key, src, dst)
        if not self._program.sharding.shards.are_whole:
            moved.update(dict.fromkeys(self._program.links_between_ranks(), 0))
        for op in tape.ops:
            for link, nbytes in op.bytes_outside.items():
                moved[link] += nbytes
        return moved

    def _add(self, moved: dict[str, int], key: str, src: str, dst: str) -> None:
        for a, b in self._routes.between(src, dst):
            moved[f"{a}->{b}"] += self._program.blocks[key].nbytes


@dataclass(frozen=True, slots=True)
class Stay:
    """A copy of ``key`` that stays in ``tier`` from one use to the next.

    Attributes:
        start: Tick of the first use.
        stop: Tick of the next use; not greater than ``start`` if it falls in the next step.
        between: Ticks between the uses, where the copy takes extra memory.
        ends: The ticks ``start`` and ``stop``, if the copy takes extra memory there.
        nbytes: Bytes of its slot.
    """

    key: str
    tier: str
    start: int
    stop: int
    between: tuple[range, ...]
    ends: tuple[int, ...]
    nbytes: int

    @property
    def num_held(self) -> int:
        """The number of ticks at which the copy takes extra memory."""
        return sum(map(len, self.between)) + len(self.ends)

    @property
    def held(self) -> Iterator[int]:
        """The ticks at which the copy takes extra memory."""
        return chain(*self.between, self.ends)

    def fits(self, left: Sequence[int]) -> bool:
        """Return whether the copy fits into ``left``, the free bytes at every tick."""
        if any(left[end] < self.nbytes for end in self.ends):
            return False
        return all(min(left[each.start : each.stop]) >= self.nbytes for each in self.between)


def choose_stays(
    program: StepProgram,
    homes: Mapping[str, str],
    slot_bytes: Mapping[str, Callable[[int], int]],
    room: Mapping[str, Sequence[int]],
    buffers: Mapping[str, BufferRoom] | None = None,
) -> Stays:
    """Return the stays that fit; those that take memory for the fewest ticks are chosen first.

    Args:
        slot_bytes: Tier -> function from content bytes to slot bytes.
        room: Tier -> free bytes for stays at every tick.
        buffers: Tier -> buffers that must still fit. Updated for each chosen stay.
    """
    left = {tier: list(by_tick) for tier, by_tick in room.items()}
    chosen: dict[tuple[int, str], int] = {}
    for stay in sorted(_possible(program, homes, slot_bytes), key=lambda stay: (stay.num_held, stay.start)):
        if not stay.fits(left[stay.tier]):
            continue
        if buffers is None or stay.tier not in buffers or buffers[stay.tier].add(stay, len(program.ticks)):
            for tick in stay.held:
                left[stay.tier][tick] -= stay.nbytes
            chosen[stay.start, stay.key] = stay.stop
    return chosen


def _possible(
    program: StepProgram, homes: Mapping[str, str], slot_bytes: Mapping[str, Callable[[int], int]]
) -> Iterator[Stay]:
    length = len(program.ticks)
    for key, uses in _uses(program).items():
        for (start, _), (stop, mode) in zip(uses, uses[1:] + uses[:1], strict=True):
            tick, following = program.ticks[start], program.ticks[stop]
            tier = program.tier_of(tick, homes)
            if start == stop or homes[key] == tier or tier != program.tier_of(following, homes):
                continue
            if key in tick.spent or mode == "w":  # dead by then, or not read
                continue
            between = [range(start + 1, stop)] if stop > start else [range(start + 1, length), range(stop)]
            # A working set has only one of the groups that pass through a tick, but all copies that stay.
            ends = [end for end in (start, stop) if key not in dict(program.ticks[end].held)]
            nbytes = slot_bytes[tier](program.blocks[key].nbytes)
            yield Stay(key, tier, start, stop, tuple(each for each in between if each), tuple(ends), nbytes)


def _uses(program: StepProgram) -> dict[str, list[tuple[int, str]]]:
    uses: dict[str, list[tuple[int, str]]] = {}
    for number, tick in enumerate(program.ticks):
        for key, mode in tick.uses:
            uses.setdefault(key, []).append((number, mode))
    return uses


@dataclass(slots=True)
class TickCopies:
    """The copies of one tick in a tier: key -> bytes of its slot.

    Attributes:
        held: Copies held for the whole tick, or staying until a later tick.
        passing: Groups leased one after the other.
    """

    held: dict[str, int]
    passing: list[dict[str, int]]


class CopyWindows:
    """Counter of the buffers that a number of consecutive ticks needs, wrapping into the next step.

    Held copies all exist together. The count includes one passing group per tick, so that the next group arrives while
    one is in use.
    """

    def __init__(self, copies: Sequence[TickCopies]) -> None:
        self._num_ticks = len(copies)
        in_group = Counter[int]()
        kinds: dict[tuple[bool, int], int] = {}  # (passes, size) -> number
        last: dict[tuple[bool, str], int] = {}
        uses: list[tuple[int, int, int]] = []  # tick, tick of the last use of the same copy, kind
        keys: list[tuple[bool, str]] = []
        for number, of_tick in enumerate(copies):
            for passes, group in ((False, of_tick.held), *((True, group) for group in of_tick.passing)):
                for key, size in group.items():
                    kind = kinds.setdefault((passes, size), len(kinds))
                    uses.append((number, last.get((passes, key), _NEVER), kind))
                    keys.append((passes, key))
                    last[passes, key] = number
            for group in of_tick.passing:
                for size, count in Counter(group.values()).items():
                    in_group[size] = max(in_group[size], count)
        ticks, before, kind_of_use = np.array(uses, dtype=np.int64).reshape(-1, 3).T
        # Append a second step: its first uses follow the last uses of the first step.
        afresh = np.array([last[key] for key in keys], dtype=np.int64)
        again = np.where(before == _NEVER, afresh, before + self._num_ticks)
        self._ticks = np.concatenate([ticks, ticks + self._num_ticks])
        self._before = np.concatenate([before, again])
        self._kinds = np.concatenate([kind_of_use, kind_of_use])
        self._in_group, self._kind_of = in_group, kinds

    def counts(self, num_ticks: int) -> dict[int, NDArray[np.int64]]:
        """Return size -> number of buffers that ``num_ticks`` ticks need, for every first tick."""
        # A use counts in the windows that begin after the previous use of its copy: there it is the first.
        first = np.maximum(np.maximum(self._before + 1, self._ticks - num_ticks + 1), 0)
        stop = np.minimum(self._ticks + 1, self._num_ticks)
        counted = first < stop
        changes = np.zeros((len(self._kind_of), self._num_ticks + 1), dtype=np.int64)
        np.add.at(changes, (self._kinds[counted], first[counted]), 1)
        np.subtract.at(changes, (self._kinds[counted], stop[counted]), 1)
        present = changes.cumsum(axis=1)[:, :-1]
        found: dict[int, NDArray[np.int64]] = {}
        for (passes, size), kind in self._kind_of.items():
            of_kind = np.minimum(present[kind], num_ticks * self._in_group[size]) if passes else present[kind]
            found[size] = found[size] + of_kind if size in found else of_kind
        return found

    def most(self, num_ticks: int) -> dict[int, int]:
        """Return size -> the largest number of buffers that any ``num_ticks`` consecutive ticks need."""
        return {size: int(counts.max()) for size, counts in self.counts(num_ticks).items()}


_NEVER = -(1 << 40)


#: Share of the compute tier that stays free of buffers for more than two ticks. Layers may allocate more memory
#: than the trace recorded.
_UNMADE_SHARE = 0.05


def _pairs_with(ticks: Iterable[int], num_ticks: int) -> set[int]:
    """Return the first ticks of all pairs of consecutive ticks that contain one of ``ticks``."""
    return {(number - before) % num_ticks for number in ticks for before in (0, 1)}


class BufferRoom:
    """Memory for the copies of any two consecutive ticks, with separate buffers for each size.

    Args:
        copies: Copies of every tick.
    """

    def __init__(self, copies: Sequence[TickCopies], room_bytes: int) -> None:
        counts = CopyWindows(copies).counts(2)
        self._counts: dict[int, list[int]] = {size: of_windows.tolist() for size, of_windows in counts.items()}
        self._most: dict[int, int] = {size: max(counts) for size, counts in self._counts.items()}
        self._left_bytes = room_bytes - sum(size * count for size, count in self._most.items())

    @property
    def missing_bytes(self) -> int:
        """Bytes by which the buffers exceed the memory; 0 if they fit."""
        return max(0, -self._left_bytes)

    def add(self, stay: Stay, num_ticks: int) -> bool:
        """Add a copy that stays if its buffer fits. Return whether it was added."""
        used = {stay.start, stay.stop} - {*stay.held}  # ticks whose counts already include the copy
        windows = _pairs_with(stay.held, num_ticks) - _pairs_with(used, num_ticks)
        counts = self._counts.setdefault(stay.nbytes, [0] * num_ticks)
        before = self._most.get(stay.nbytes, 0)
        most = max([before, *(counts[number] + 1 for number in windows)])
        if (most - before) * stay.nbytes > self._left_bytes:
            return False
        for number in windows:
            counts[number] += 1
        self._most[stay.nbytes] = most
        self._left_bytes -= (most - before) * stay.nbytes
        return True


_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class Residency:
    """Rules for homes in the compute tier if that tier is not RAM.

    Attributes:
        kinds: Kinds of blocks that may have their home there.
        bus_s_per_byte: Seconds per byte moved between it and RAM. 1 without measured rates, so that bytes decide.
        host_update_s_per_element: Seconds per weight updated in RAM. 0 without measured rates.
    """

    kinds: frozenset[Kind]
    bus_s_per_byte: float = 1.0
    host_update_s_per_element: float = 0.0


@dataclass(frozen=True, slots=True)
class _PlacementCandidate:
    """Blocks that move together. If two save equally much per byte, the one with the lower ``rank`` goes first."""

    keys: tuple[str, ...]
    rank: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """Inputs to the cost of a candidate other than the tiers' rates.

    Attributes:
        keys: Blocks whose homes affect the cost: the candidate's blocks and their groups.
        alike: Number shared by candidates whose costs are equal if the homes of ``keys``, in order, are equal.
    """

    keys: tuple[str, ...]
    alike: int


class ResidentChooser:
    """Greedy choice of residents of the compute tier.

    Args:
        slot_bytes: Function from content bytes to slot bytes of that tier.
    """

    def __init__(self, program: StepProgram, residency: Residency, slot_bytes: Callable[[int], int]) -> None:
        self._program, self._residency, self._slot_bytes = program, residency, slot_bytes
        self._tier = program.compute_tier
        #: A gradient that shares its block is in several groups, and its moves depend on all of them.
        self._groups: dict[str, list[tuple[str, ...]]] = {}
        self._moves: dict[tuple[str, str, tuple[str, ...]], int] = {}
        self._uses: dict[str, list[tuple[int, Mode]]] = {key: [] for key in program.blocks}
        #: Tier of every tick with the current homes. A gradient that shares its block has hundreds of uses.
        self._tiers_now = [self._tier] * len(program.ticks)
        self._tiers_now_of: dict[str, tuple[str, ...]] = {}  # key -> tiers of its uses, computed on demand
        #: Key -> updates whose tier depends on its home.
        self._deciding: dict[str, list[int]] = {}
        for number, tick in enumerate(program.ticks):
            for key, mode in tick.uses:
                self._uses[key].append((number, mode))
                if tick.phase == "update":
                    self._deciding.setdefault(key, []).append(number)
            if tick.phase == "update":
                group = tuple(key for key, _ in tick.uses)
                for key in group:
                    self._groups.setdefault(key, []).append(group)
        self._candidates = [
            candidate
            for candidate in (*self._of_groups(), *self._of_blocks())
            if all(program.blocks[key].kind in residency.kinds for key in candidate.keys)
        ]
        self._of_key: dict[str, list[int]] = {}
        for number, candidate in enumerate(self._candidates):
            for key in candidate.keys:
                self._of_key.setdefault(key, []).append(number)
        #: By candidate. Layers of a model are alike, so only a few costs are computed.
        self._surroundings: dict[int, _Surroundings | None] = {}
        self._numbers_of_patterns: dict[Hashable, int] = {}
        self._patterns: dict[tuple[str, ...], int] = {}
        self._costs: dict[tuple[int, tuple[str, ...]], float] = {}

    def _of_groups(self) -> Iterator[_PlacementCandidate]:
        """Yield the groups that the compute tier can update, with their gradient and without."""
        if not self._program.updates.in_compute_tier:
            return
        updates = [tick for tick in self._program.ticks if tick.phase == "update"]
        for number, tick in enumerate(updates):
            # Spread residents over the model: a resident layer leaves time to fetch the next one.
            rank = (-1.0, number * _GOLDEN % 1.0)
            keys = tuple(key for key, _ in tick.uses)
            yield _PlacementCandidate(keys, rank)
            yield _PlacementCandidate(tuple(key for key in keys if key not in tick.spent), rank)

    def _of_blocks(self) -> Iterator[_PlacementCandidate]:
        wholes: dict[str, list[BlockPlan]] = {}
        for block in self._program.blocks.values():
            wholes.setdefault(block.whole, []).append(block)
        for number, parts in enumerate(wholes.values()):
            yield _PlacementCandidate(tuple(part.key for part in parts), (KINDS.index(parts[0].kind), number))

    def everything(self) -> Sequence[str]:
        """Return all blocks if every kind may be resident, so that a step needs no copies; else nothing."""
        return list(self._program.blocks) if len(self._residency.kinds) == len(KINDS) else ()

    def choose(
        self,
        homes: Mapping[str, str],
        try_move: Callable[[Sequence[str]], bool],
        is_needed: Callable[[], bool] | None = None,
    ) -> None:
        """Move blocks, those that save most per byte first.

        Args:
            homes: Block key -> tier; ``try_move`` changes it.
            try_move: Makes the compute tier the home of blocks. Returns False if they do not fit.
            is_needed: If given, blocks move as long as it returns True, even if that costs time.
        """
        self._tiers_now = [self._program.tier_of(tick, homes) for tick in self._program.ticks]
        self._tiers_now_of.clear()
        queue: list[tuple[float, tuple[float, ...], int]] = []
        self._push(queue, range(len(self._candidates)), homes)
        while queue and (is_needed is None or is_needed()):
            cost, _, number = heapq.heappop(queue)
            if is_needed is None and cost >= 0:
                return
            keys = self._left(number, homes)
            if not keys or self._cost_of(number, keys, homes) != cost:  # stale: its group moved and was queued again
                continue
            if try_move(keys):
                self._follow(keys, homes)
                self._push(queue, self._affected_candidates(keys, homes), homes)

    def _follow(self, keys: Sequence[str], homes: Mapping[str, str]) -> None:
        """Update the tiers of ticks after blocks have moved."""
        for tick, tier in self._tiers_with(keys, homes).items():
            if self._tiers_now[tick] != tier:
                self._tiers_now[tick] = tier
                for key, _ in self._program.ticks[tick].uses:
                    self._tiers_now_of.pop(key, None)

    def _push(
        self, queue: list[tuple[float, tuple[float, ...], int]], numbers: Sequence[int], homes: Mapping[str, str]
    ) -> None:
        for number in numbers:
            keys = self._left(number, homes)
            if keys:
                heapq.heappush(queue, (self._cost_of(number, keys, homes), self._candidates[number].rank, number))

    def _left(self, number: int, homes: Mapping[str, str]) -> tuple[str, ...]:
        return tuple(key for key in self._candidates[number].keys if homes[key] != self._tier)

    def _affected_candidates(self, keys: Sequence[str], homes: Mapping[str, str]) -> Sequence[int]:
        """Return the candidates whose cost may have changed after blocks of their groups have moved."""
        groups = {id(group): group for key in keys for group in self._groups.get(key, ((key,),))}
        related = {key for group in groups.values() for key in group}
        # A shared block that is already resident moves as before for the other blocks.
        related -= {key for key in related if self._is_shared(key) and homes[key] == self._tier}
        return sorted({number for key in related for number in self._of_key.get(key, ())})

    def _is_shared(self, key: str) -> bool:
        return len(self._groups.get(key, ())) > 1

    def _linked_blocks(self, key: str) -> tuple[str, ...]:
        """Return the blocks whose moves depend on the home of one block: its group, or itself if it is shared."""
        return (key,) if self._is_shared(key) else self._groups.get(key, ((key,),))[0]

    def _cost_of(self, number: int, keys: Sequence[str], homes: Mapping[str, str]) -> float:
        """Return the cost of the blocks of a candidate that still have to move, computed once for all alike."""
        if number not in self._surroundings:
            self._surroundings[number] = self._look_around(self._candidates[number])
        around = self._surroundings[number]
        if around is None:
            return self._cost(keys, homes)
        known = around.alike, tuple(map(homes.__getitem__, around.keys))
        cost = self._costs.get(known)
        if cost is None:
            cost = self._costs[known] = self._cost(keys, homes)
        return cost

    def _look_around(self, candidate: _PlacementCandidate) -> _Surroundings | None:
        """Return the inputs to a candidate's cost, or None if a shared block makes it depend on several groups."""
        keys = tuple(dict.fromkeys(other for key in candidate.keys for other in self._linked_blocks(key)))
        if any(self._is_shared(key) for key in keys):
            return None
        own = frozenset(candidate.keys)
        pattern = self._pattern_of(keys), tuple(place for place, key in enumerate(keys) if key in own)
        return _Surroundings(keys, self._numbers_of_patterns.setdefault(pattern, len(self._numbers_of_patterns)))

    def _pattern_of(self, keys: tuple[str, ...]) -> int:
        """Return a number that is equal for two key sequences whose blocks match in size and use, one by one."""
        if keys not in self._patterns:
            wholes = dict[str, int]()
            pattern = tuple(
                (
                    wholes.setdefault(block.whole, len(wholes)),
                    block.nbytes,
                    block.num_elements,
                    block.kind,
                    block.key in self._groups,
                    self._use_pattern(block.key),
                )
                for block in map(self._program.blocks.__getitem__, keys)
            )
            self._patterns[keys] = self._numbers_of_patterns.setdefault(pattern, len(self._numbers_of_patterns))
        return self._patterns[keys]

    def _use_pattern(self, key: str) -> tuple[Hashable, ...]:
        """Return how a block is used: everything except homes that its moves depend on."""
        pattern, before = [], -1
        for number, mode in self._uses[key]:
            tick = self._program.ticks[number]
            is_update = tick.phase == "update"
            is_streamed = is_update and tick.visit in self._program.updates.streamed
            pattern.append((mode, number == before + 1, is_update, is_streamed, key in tick.spent))
            before = number
        return tuple(pattern)

    def _cost(self, keys: Sequence[str], homes: Mapping[str, str]) -> float:
        """Return the extra seconds of a step per byte if blocks move; negative if the move saves time."""
        related = tuple(dict.fromkeys(other for key in keys for other in self._linked_blocks(key)))
        after = ChainMap(dict.fromkeys(keys, self._tier), homes)  # type: ignore[arg-type]
        loads = self._load(related, after, self._tiers_with(keys, after)), self._load(related, homes, {})
        more = [a - b for a, b in zip(*loads, strict=True)]
        more_s = more[0] * self._residency.bus_s_per_byte + more[1] * self._residency.host_update_s_per_element
        return more_s / max(1, sum(self._slot_bytes(self._program.blocks[key].nbytes) for key in keys))

    def _tiers_with(self, keys: Sequence[str], homes: Mapping[str, str]) -> dict[int, str]:
        """Return the tiers of the ticks that depend on the homes of these blocks."""
        ticks = {number for key in keys for number in self._deciding.get(key, ())}
        return {number: self._program.tier_of(self._program.ticks[number], homes) for number in ticks}

    def _load(self, keys: Sequence[str], homes: Mapping[str, str], tiers: Mapping[int, str]) -> tuple[int, int]:
        """Return the bytes that these blocks move over the bus in a step, and the elements updated in RAM.

        Args:
            keys: Block keys.
            homes: Block key -> tier.
            tiers: Tick -> tier, for ticks whose tier changes.
        """
        moved, num_moves = 0, dict[tuple[str, str], int]()  # parts of a whole are used alike
        for key in keys:
            block, home = self._program.blocks[key], homes[key]
            if (block.whole, home) not in num_moves:
                num_moves[block.whole, home] = self._num_moves(key, home, tiers)
            moved += block.nbytes * num_moves[block.whole, home]
        updated = 0
        for key in keys:
            block = self._program.blocks[key]
            if block.kind == "weights" and key in self._groups:
                tick = next(n for n, mode in self._uses[key] if mode == "rw")
                updated += block.num_elements * (tiers.get(tick, self._tiers_now[tick]) != self._tier)
        return moved, updated

    def _num_moves(self, key: str, home: str, tiers: Mapping[int, str]) -> int:
        """Return how often a block crosses the bus in a step. Between two adjacent ticks its copy stays."""
        of_uses = self._tiers_now_of.get(key)
        if of_uses is None:
            of_uses = self._tiers_now_of[key] = tuple(self._tiers_now[number] for number, _ in self._uses[key])
        if any(self._tiers_now[number] != tier for number, tier in tiers.items()):
            uses = zip(self._uses[key], of_uses, strict=True)
            of_uses = tuple(tiers.get(number, tier) for (number, _), tier in uses)
        known = key, home, of_uses
        if known not in self._moves:
            self._moves[known] = self._count_moves(*known)
        return self._moves[known]

    def _count_moves(self, key: str, home: str, tiers: Sequence[str]) -> int:
        program, uses = self._program, self._uses[key]
        accesses = []
        for n, (number, mode) in enumerate(uses):
            is_last = key in program.ticks[number].spent
            follows = n + 1 < len(uses) and uses[n + 1][0] == number + 1
            is_pinned = follows and uses[n + 1][1] != "w" and tiers[n + 1] == tiers[n] and not is_last
            accesses.append(BlockUse(number, mode, tiers[n], is_last, is_pinned))
        found, _ = follow(key, accesses, home)
        # Transfers between RAM and a drive do not cross the bus.
        lives_there = home == self._tier
        crosses = [lives_there != (tier == self._tier) for tier in tiers]
        return sum(use.fetches + use.writes_back for use, does in zip(found, crosses, strict=True) if does)


#: Function from content bytes to slot bytes of a tier.
SlotBytes = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change of the config that reduces a run's need.

    Attributes:
        fits: Whether the tier has this capacity. Always True for a drive to be added.
    """

    change: str
    tier: str
    need_bytes: int
    fits: bool

    def __str__(self) -> str:
        if self.tier == "nvme" and self.fits:
            return f"{self.change} of {format_size(self.need_bytes)} for this run: fits"
        return f"{self.change}: {self.tier} needs {format_size(self.need_bytes)}, {'fits' if self.fits else 'too much'}"


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A tier that is too small for a run.

    Attributes:
        need_bytes: The smallest sufficient capacity.
        remedies: Changes of the config that reduce the need.
        message: Replacement for the default message, which names the tier and its bytes. Unused if empty.
    """

    tier: str
    need_bytes: int
    have_bytes: int
    advice: str
    remedies: Sequence[Remedy] = ()
    message: str = ""

    def __str__(self) -> str:
        message = self.message or (
            f"does not fit: tier '{self.tier}' has {self.have_bytes} bytes ({format_size(self.have_bytes)}), "
            f"this run needs at least {self.need_bytes} ({format_size(self.need_bytes)})"
        )
        return f"{message}. {self.advice}"


class DoesNotFitError(Exception):
    """The run does not fit its tiers. Raised before anything is allocated.

    Attributes:
        tier: The tier that is too small.
        need_bytes: The smallest sufficient capacity.
        remedies: Changes of the config that reduce the need.
    """

    def __init__(self, shortfall: Shortfall) -> None:
        self.shortfall = shortfall
        self.tier, self.remedies = shortfall.tier, shortfall.remedies
        self.need_bytes, self.have_bytes = shortfall.need_bytes, shortfall.have_bytes
        super().__init__(str(shortfall))


_Found = TypeVar("_Found")


def fitting(found: _Found | Shortfall) -> _Found:
    """Return ``found``, which must not be a shortfall.

    Raises:
        DoesNotFitError: a tier is too small.
    """
    if isinstance(found, Shortfall):
        raise DoesNotFitError(found)
    return found


@dataclass(frozen=True, slots=True)
class TierBudget:
    """The planner's budget for a tier: its capacity, its slot rounding, and its other contents.

    Attributes:
        workspace_bytes: Bytes outside blocks.
        generations: Number of committed sets of its durable blocks, in addition to the live set.
        filling_bytes: Bytes to load or save the weights of one layout, in addition to the durable blocks.
        residency: Rules for homes in the compute tier if that tier is not RAM.
        links: Pairs (source, destination) of its links with faster tiers, one for each direction.
        is_addressable: Whether blocks can be used in place; otherwise they are copied to other tiers for use.
        is_read_only: Whether blocks at home there exist from the start and are never written.
        is_durable: Whether it keeps its part of checkpoints. Other tiers write their part to ``output_dir``.
        num_processes: Processes on this host; each has this capacity. The size in the config is for all of them.
    """

    name: str
    capacity_bytes: int
    slot_bytes: SlotBytes
    workspace_bytes: int = 0
    generations: int = 0
    filling_bytes: int = 0
    residency: Residency | None = None
    links: tuple[tuple[str, str], ...] = ()
    is_addressable: bool = True
    is_read_only: bool = False
    is_durable: bool = False
    num_processes: int = 1

    def generation_bytes(self, block: BlockPlan) -> int:
        """Return the bytes that the generations of a block take if its home is this tier."""
        return self.generations * self.slot_bytes(block.nbytes) if block.is_saved else 0


@dataclass(frozen=True)
class Placement:
    """The homes of all blocks, the peak contents of each tier, and the bytes that each link moves per step.

    Attributes:
        homes: Block key -> tier.
        home_bytes: Tier -> kind -> slot bytes.
        working_bytes: Tier -> bytes of a tick's largest working set that is not at home; more if loading the weights
            of a layout takes more.
        median_working_bytes: Tier -> low median of the working sets of all ticks.
        traffic_bytes: ``"src->dst"`` -> block bytes moved per step, between the first and the last.
        first_traffic_bytes: Bytes of a first step, which has nothing to update.
        last_traffic_bytes: Bytes of the updates after the last step.
        lookahead: Whether the copies of two consecutive ticks always fit together (double buffering).
        workspace_bytes: Tier -> bytes outside blocks.
        stays: Copies that wait for their next use.
        generation_bytes: Tier -> bytes reserved for committed generations, in addition to the live blocks.
        routes: Links between the tiers.
        buffers: Tier -> slot bytes -> number of buffers for copies of that size, made before the first step. In a tier
            without an entry, a copy may free a buffer of another size to get its own.
        missing_bytes: Tier of a run on a GPU -> additional bytes that fixed buffers for each size would need.
    """

    homes: Mapping[str, str]
    home_bytes: Mapping[str, Mapping[Kind, int]]
    working_bytes: Mapping[str, int]
    median_working_bytes: Mapping[str, int]
    traffic_bytes: Mapping[str, int]
    first_traffic_bytes: Mapping[str, int]
    last_traffic_bytes: Mapping[str, int]
    lookahead: bool
    workspace_bytes: Mapping[str, int] = field(default_factory=dict)
    stays: Stays = field(default_factory=dict)
    generation_bytes: Mapping[str, int] = field(default_factory=dict)
    routes: Routes = field(default_factory=Routes)
    buffers: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    missing_bytes: Mapping[str, int] = field(default_factory=dict)

    def run_traffic_bytes(self, num_steps: int) -> dict[str, int]:
        """Return the block bytes that each link moves in a run of ``num_steps`` steps, at least 1."""
        assert num_steps >= 1, num_steps
        return {
            link: self.first_traffic_bytes[link] + (num_steps - 1) * nbytes + self.last_traffic_bytes[link]
            for link, nbytes in self.traffic_bytes.items()
        }

    def peak_bytes(self, tier: str) -> int:
        """Return the smallest capacity of ``tier`` that this placement needs."""
        other_bytes = self.workspace_bytes.get(tier, 0) + self.generation_bytes.get(tier, 0)
        return sum(self.home_bytes[tier].values()) + self.working_bytes[tier] + other_bytes


class PlacementSolver:
    """Solver of the placement of one program.

    Args:
        program: Blocks and ticks of a step.
        tiers: Budgets, fast to slow.
        allowed: Kind -> allowed home tiers, preferred first.
        open_bytes: Tier -> bytes kept free of homes, for prefetched copies and write-backs.
        stay_share: Share of the memory left by homes and ticks that copies may take while they stay.
        given: Key -> home of blocks that exist already.

    Attributes:
        stops: (home, tier of a use) -> tiers that hold a copy for the use.
    """

    def __init__(
        self,
        program: StepProgram,
        tiers: Sequence[TierBudget],
        allowed: Homes,
        open_bytes: Mapping[str, int] | None = None,
        stay_share: float = 0.0,
        given: Mapping[str, str] | None = None,
    ) -> None:
        self._program = program
        self._given = given or {}
        self._tiers = {tier.name: tier for tier in tiers}
        self._order = [tier.name for tier in tiers]
        self._routes = Routes(tuple(link for tier in tiers for link in tier.links))
        self._allowed = allowed
        self._open_bytes = dict(open_bytes or {})
        self._stay_share = stay_share
        #: key -> (tick, group) of its uses. Group 0 is held for the tick; other groups pass.
        self.groups_of: dict[str, list[tuple[int, int]]] = {key: [] for key in program.blocks}
        #: key -> update ticks whose tier depends on its home, see ``StepProgram.tier_of``.
        self.deciding: dict[str, list[int]] = {}
        modes: dict[str, list[Mode]] = {key: [] for key in program.blocks}
        for number, tick in enumerate(program.ticks):
            for group_number, group in enumerate((tick.held, *tick.passing)):
                for key, mode in group:
                    self.groups_of[key].append((number, group_number))
                    modes[key].append(mode)
            if tick.phase == "update":
                for key, _ in tick.uses:
                    self.deciding.setdefault(key, []).append(number)
        #: tier -> key -> bytes of its slot there.
        self.slots = {
            tier.name: {key: tier.slot_bytes(block.nbytes) for key, block in program.blocks.items()} for tier in tiers
        }
        self._num_moves = {key: sum((m != "w") + (m != "r") for m in of_key) for key, of_key in modes.items()}
        self._stops: dict[tuple[str, str], tuple[str, ...]] = {}
        budget = self._tiers[program.compute_tier]
        self._residents = (
            None if budget.residency is None else ResidentChooser(program, budget.residency, budget.slot_bytes)
        )

    def solve(self) -> Placement | Shortfall:
        """Return the placement, or the tier that is too small for any placement."""
        settled = self.settle()
        return settled if isinstance(settled, Shortfall) else self.describe(settled)

    def settle(self, open_bytes: Mapping[str, int] | None = None) -> Settled | Shortfall:
        """Return a home for every block, or the tier that is too small for any placement.

        Args:
            open_bytes: Replaces the value passed to the constructor.
        """
        if open_bytes is not None:
            self._open_bytes = dict(open_bytes)
        state, ahead = self._best_fill()
        full = state.overfull(ahead=False)
        if full is not None:
            return self._shortfall(full, state)
        # On a CPU alone, freeing and reallocating buffers costs page faults, but less than fixed buffers cost memory.
        kept = [name for name in ("gpu", "ram") if self._program.compute_tier == "gpu"]
        return Settled(
            state,
            ahead,
            {name: BufferRoom(state.copies_by_tick(name), state.room_for_copies(name)) for name in kept},
        )

    def _best_fill(self) -> tuple[_Fill, bool]:
        """Return the homes that save most. If the last tier overflows, return those that use least of it."""
        state, ahead = self._fill(self._promotion_key)
        last = self._order[-1]
        if self._tiers[last].generations and state.overfull(ahead=False) == last:
            tight, tight_ahead = self._fill(self._relief_key)
            if tight.peak(last, ahead=False) < state.peak(last, ahead=False):
                return tight, tight_ahead
        return state, ahead

    def _fill(self, order: Callable[[BlockPlan], tuple[float, ...]]) -> tuple[_Fill, bool]:
        """Return homes, with blocks moved up in ``order``, and whether the copies of two ticks fit together."""
        homes = {key: max(self._homes(b), key=self._order.index) for key, b in self._program.blocks.items()}
        state = _Fill(self, homes)
        for ahead in (True, False):
            if state.overfull(ahead=ahead) in (None, self._order[-1]):
                break
        self._make_residents(state, ahead=ahead)
        for block in sorted(self._program.blocks.values(), key=order):
            if self._is_resident(block, homes):
                continue
            for tier in self._homes(block):
                if tier == homes[block.key] or state.try_move([block.key], tier, ahead=ahead):
                    break
        self._place_overflow_in_compute_tier(state, ahead=ahead)
        if self._residents is not None and state.overfull(ahead=False) == self._order[-1]:
            self._residents.choose(
                homes,
                lambda keys: state.try_move(keys, self._program.compute_tier, ahead=ahead),
                lambda: state.overfull(ahead=False) == self._order[-1],
            )
        return state, ahead

    def _make_residents(self, state: _Fill, *, ahead: bool) -> None:
        """Make the compute tier the home of all blocks if they fit, else of those that save most."""
        if self._residents is None:
            return

        def try_move(keys: Sequence[str]) -> bool:
            return state.try_move(keys, self._program.compute_tier, ahead=ahead)

        everything = self._residents.everything()
        if not everything or not try_move(everything):
            self._residents.choose(state.homes, try_move)

    def _place_overflow_in_compute_tier(self, state: _Fill, *, ahead: bool) -> None:
        """Place gradients that overflow RAM in the rest of the compute tier, before drives.

        They cross the bus once in either case, so residency alone would not move them.
        """
        residency = self._tiers[self._program.compute_tier].residency
        if residency is None or "gradients" not in residency.kinds:
            return
        for block in self._program.blocks.values():
            if block.kind == "gradients" and not self._tiers[state.homes[block.key]].is_addressable:
                state.try_move([block.key], self._program.compute_tier, ahead=ahead)

    def _is_resident(self, block: BlockPlan, homes: Mapping[str, str]) -> bool:
        residency = self._tiers[self._program.compute_tier].residency
        is_there = homes[block.key] == self._program.compute_tier
        return residency is not None and block.kind in residency.kinds and is_there

    def open_bytes(self, tier: str) -> int:
        """Return the bytes of a tier kept free of homes, in addition to the working sets of the ticks."""
        return self._open_bytes.get(tier, 0)

    def _homes(self, block: BlockPlan) -> Sequence[str]:
        """Return the allowed home tiers of a block, preferred first."""
        if block.key in self._given:
            return (self._given[block.key],)
        return self._allowed["in place" if block.in_place else block.kind]

    def _promotion_key(self, block: BlockPlan) -> tuple[float, ...]:
        """Sort by bytes saved per byte held, descending; then by kind, so that kinds stay together."""
        return (-float(self._num_moves[block.key]), KINDS.index(block.kind))

    def _relief_key(self, block: BlockPlan) -> tuple[float, ...]:
        """Sort blocks with generations first: they take their bytes several times."""
        return (not block.is_saved, *self._promotion_key(block))

    def stops(self, home: str, used_in: str) -> tuple[str, ...]:
        """Return the tiers other than its home in which a use of a block needs memory."""
        found = self._stops.get((home, used_in))
        if found is None:
            found = self._stops[home, used_in] = tuple(tier for _, tier in self._routes.between(home, used_in))
        return found

    def _shortfall(self, tier: str, state: _Fill) -> Shortfall:
        have, num_processes = self._tiers[tier].capacity_bytes, self._tiers[tier].num_processes
        need = state.peak(tier, ahead=False)
        in_all = ""
        if num_processes > 1:
            nbytes = num_processes * need
            in_all = f" for each of {num_processes} processes, {nbytes} ({format_size(nbytes)}) together"
        if tier == self._order[-1] and len(self._order) > 1:
            more = format_size(need - have)
            advice = f"Give tiers.{tier} that size{in_all}, or a faster tier {more} more."
        else:
            drive = "" if "nvme" in self._order else " add a [[tiers.nvme]] path,"
            advice = f"Give tiers.{tier}.size that much{in_all},{drive} or lower data.max_length or the batch."
        return Shortfall(tier, need, have, advice + self._less_for_checkpoints(tier, state))

    def _less_for_checkpoints(self, tier: str, state: _Fill) -> str:
        """Return sentences that state the need with fewer or no checkpoints on a tier."""
        generations = self._tiers[tier].generations
        if not state.generation_bytes(tier):
            return ""
        text = f" {format_size(state.generation_bytes(tier))} of this is for {generations} checkpoints:"
        if generations > MIN_GENERATIONS:
            need = self._need_with(MIN_GENERATIONS, tier)
            text += f" checkpoint.save_total_limit = {MIN_GENERATIONS} would need {need} ({format_size(need)}),"
        need = self._need_with(0, tier)
        text += ' checkpoint.save_strategy = "no" with save_on_signal = false'
        return f"{text} would need {need} ({format_size(need)})."

    def _need_with(self, generations: int, tier: str) -> int:
        """Return the smallest capacity of a tier that keeps ``generations`` generations."""
        tiers = [replace(t, generations=generations) if t.name == tier else t for t in self._tiers.values()]
        solver = PlacementSolver(self._program, tiers, self._allowed, self._open_bytes, self._stay_share, self._given)
        return solver._best_fill()[0].peak(tier, ahead=False)

    def describe(self, settled: Settled) -> Placement:
        """Return the placement with these homes."""
        state = settled.state
        home_bytes: dict[str, dict[Kind, int]] = {name: dict.fromkeys(KINDS, 0) for name in self._order}
        for key, block in self._program.blocks.items():
            home = state.homes[key]
            home_bytes[home][block.kind] += self.slots[home][key]
        slot_bytes = {name: tier.slot_bytes for name, tier in self._tiers.items()}
        room = {name: state.room_for_stays(name, self._stay_share) for name in self._order}
        missing = settled.missing_bytes
        apart = {name: each for name, each in settled.buffer_room.items() if name not in missing}
        stays = choose_stays(self._program, state.homes, slot_bytes, room, apart)
        traffic = Traffic(self._program, self._routes, state.homes, stays)
        buffers = {name: state.choose_buffers(name, stays) for name in apart}
        return Placement(
            homes=state.homes,
            home_bytes=home_bytes,
            working_bytes={name: state.largest_working_set(name, ahead=False) for name in self._order},
            median_working_bytes={name: int(median_low(state.working_sets(name))) for name in self._order},
            traffic_bytes=traffic.of_step(),
            first_traffic_bytes=traffic.of_first_step(),
            last_traffic_bytes=traffic.of_last_updates(),
            lookahead=settled.lookahead,
            stays=stays,
            workspace_bytes={name: tier.workspace_bytes for name, tier in self._tiers.items()},
            generation_bytes={name: state.generation_bytes(name) for name in self._order},
            routes=self._routes,
            buffers={name: counts for name, counts in buffers.items() if counts},
            missing_bytes=missing,
        )


@dataclass(frozen=True, slots=True)
class Settled:
    """A home for every block.

    Attributes:
        state: The homes, with the memory that they leave.
        lookahead: Whether the copies of two consecutive ticks always fit together.
        buffer_room: Tier of a run on a GPU -> memory for its buffers.
    """

    state: _Fill
    lookahead: bool
    buffer_room: Mapping[str, BufferRoom]

    @property
    def missing_bytes(self) -> dict[str, int]:
        """Tier -> additional bytes that its buffers would need."""
        return {name: room.missing_bytes for name, room in self.buffer_room.items() if room.missing_bytes}


class _Fill:
    """Homes being decided, with the bytes of every tier and tick kept up to date."""

    def __init__(self, solver: PlacementSolver, homes: dict[str, str]) -> None:
        self.solver, self.homes = solver, homes
        self._ticks = solver._program.ticks
        self._tiers = solver._tiers
        self._home_bytes = dict.fromkeys(solver._order, 0)
        self._durable_bytes = dict.fromkeys(solver._order, 0)
        self._generation_bytes = dict.fromkeys(solver._order, 0)
        for key, block in solver._program.blocks.items():
            self._count(block, homes[key], 1)
        self._used_in = [solver._program.tier_of(tick, homes) for tick in self._ticks]
        self._working = {name: _WorkingSets(len(self._ticks)) for name in solver._order}
        for number in range(len(self._ticks)):
            self._measure(number)

    def _measure(self, number: int) -> None:
        """Recount the working set of a tick."""
        tick, used_in, solver = self._ticks[number], self._used_in[number], self.solver
        groups = (tick.held, *tick.passing)
        found = {name: [0] * len(groups) for name in solver._order}
        for place, group in enumerate(groups):
            for key, _ in group:
                for name in solver.stops(self.homes[key], used_in):
                    found[name][place] += solver.slots[name][key]
        for name, sizes in found.items():
            self._working[name].put(number, sizes)

    def _passes_through(self, tier: str, used_in: str, key: str) -> int:
        """Return the slot bytes that one use of a block needs in ``tier``, in addition to its home."""
        return self.solver.slots[tier][key] if tier in self.solver.stops(self.homes[key], used_in) else 0

    def working_sets(self, tier: str) -> list[int]:
        """Return the working set of every tick."""
        return self._working[tier].by_tick or [0]

    def largest_working_set(self, tier: str, *, ahead: bool) -> int:
        of_a_step = self._home_bytes[tier] - self._durable_bytes[tier] + self._tiers[tier].workspace_bytes
        return max(self._working[tier].largest(ahead=ahead), self._tiers[tier].filling_bytes - of_a_step)

    def peak(self, tier: str, *, ahead: bool) -> int:
        other_bytes = self._tiers[tier].workspace_bytes + self._generation_bytes[tier]
        return self._home_bytes[tier] + other_bytes + self.largest_working_set(tier, ahead=ahead)

    def generation_bytes(self, tier: str) -> int:
        """Return the bytes of the committed generations on a tier, in addition to its live blocks."""
        return self._generation_bytes[tier]

    def room_for_stays(self, tier: str, share: float) -> list[int]:
        """Return for every tick the bytes left for copies that stay, after its own and a neighboring tick's copies."""
        sets = self._working[tier].by_tick
        pairs = [
            a + max(before, after)
            for before, a, after in zip(sets[-1:] + sets, sets, sets[1:] + sets[:1], strict=False)
        ]
        free = self._tiers[tier].capacity_bytes - self.peak(tier, ahead=False)
        spare = max(0, int(share * (self._tiers[tier].capacity_bytes - self.peak(tier, ahead=True))))
        most = max(pairs, default=0)
        return [max(0, min(free, spare + most - pair)) if share else 0 for pair in pairs]

    def choose_buffers(self, tier: str, stays: Stays) -> dict[int, int]:
        """Return the number of buffers for each size of copies: enough for the most consecutive ticks that fit.

        The remaining memory goes to the sizes that move most. The copies of two ticks are assumed to fit.
        """
        copies, room = self.copies_by_tick(tier, stays), self.room_for_copies(tier)
        if tier == self.solver._program.compute_tier:
            room -= int(_UNMADE_SHARE * self._tiers[tier].capacity_bytes)
        windows = range(2, len(copies) + 1)

        counted = CopyWindows(copies)

        def total(num_ticks: int) -> int:
            return sum(size * count for size, count in counted.most(num_ticks).items())

        num_ticks = max(2, windows.start + bisect.bisect_right(windows, room, key=total) - 1)
        chosen, most = counted.most(num_ticks), counted.most(len(copies))
        left = max(0, room - sum(size * count for size, count in chosen.items()))
        moved = Counter[int]()
        for of_tick in copies:
            for group in (of_tick.held, *of_tick.passing):
                for size in group.values():
                    moved[size] += size
        for size, _ in moved.most_common():
            more = min(left // size, most[size] - chosen[size])
            chosen[size] += more
            left -= more * size
        return chosen

    def room_for_copies(self, tier: str) -> int:
        """Return the bytes of a tier left by homes, workspace and generations."""
        taken = self._home_bytes[tier] + self._tiers[tier].workspace_bytes + self._generation_bytes[tier]
        return self._tiers[tier].capacity_bytes - taken

    def copies_by_tick(self, tier: str, stays: Stays | None = None) -> list[TickCopies]:
        """Return the copies in ``tier`` for each tick: of used blocks with another home, and of blocks that stay."""
        by_tick = []
        for tick, used_in in zip(self._ticks, self._used_in, strict=True):
            slots = [
                {key: size for key, _ in group if (size := self._passes_through(tier, used_in, key))}
                for group in (tick.held, *tick.passing)
            ]
            by_tick.append(TickCopies(slots[0], [group for group in slots[1:] if group]))
        for (start, key), stop in (stays or {}).items():
            if self._used_in[start] == tier:
                nbytes = self.solver.slots[tier][key]
                for number in range(start, stop + (1 if stop > start else 1 + len(by_tick))):
                    by_tick[number % len(by_tick)].held[key] = nbytes
        return by_tick

    def overfull(self, *, ahead: bool) -> str | None:
        """Return the first tier, fast to slow, whose peak exceeds its capacity."""
        for name in self.solver._order:
            if self.peak(name, ahead=ahead) > self._tiers[name].capacity_bytes:
                return name
        return None

    def try_move(self, keys: Sequence[str], tier: str, *, ahead: bool) -> bool:
        """Make ``tier`` the home of blocks if it still fits and no slower tier gets too full. Return whether it did."""
        if self._is_too_full(keys, tier, ahead=ahead):
            return False
        blocks = [self.solver._program.blocks[key] for key in keys]
        before = {key: self.homes[key] for key in keys}
        below = self.solver._order[self.solver._order.index(tier) + 1 :]
        most = {name: max(self._tiers[name].capacity_bytes, self.peak(name, ahead=ahead)) for name in below}
        most[tier] = self._tiers[tier].capacity_bytes - self.solver.open_bytes(tier)
        for block in blocks:
            self._move(block, tier)
        if all(self.peak(name, ahead=ahead) <= nbytes for name, nbytes in most.items()):
            return True
        for block in blocks:
            self._move(block, before[block.key])
        return False

    def _is_too_full(self, keys: Sequence[str], tier: str, *, ahead: bool) -> bool:
        """Return whether blocks certainly do not fit into a tier. Most candidates do not, so this avoids a trial move.

        The fullest tick keeps its contents there except copies of these blocks. An update tick may move to another tier
        with all its contents.
        """
        budget, slots, working = self._tiers[tier], self.solver.slots[tier], self._working[tier]
        grown, left = 0, working.largest(ahead=ahead)
        ticks = working.fullest(ahead=ahead)
        for key in keys:
            if self.homes[key] == tier:
                continue
            grown += slots[key] + budget.generation_bytes(self.solver._program.blocks[key])
            for number, _ in self.solver.groups_of[key]:
                if number in ticks:
                    left -= left if self._ticks[number].phase == "update" else slots[key]
        other_bytes = budget.workspace_bytes + self._generation_bytes[tier]
        least = self._home_bytes[tier] + grown + other_bytes + max(0, left)
        return least > budget.capacity_bytes - self.solver.open_bytes(tier)

    def _move(self, block: BlockPlan, tier: str) -> None:
        key, before, solver = block.key, self.homes[block.key], self.solver
        self._count(block, before, -1)
        self._count(block, tier, 1)
        for number, group in solver.groups_of[key]:
            used_in = self._used_in[number]
            old, new = solver.stops(before, used_in), solver.stops(tier, used_in)
            for name in old:
                if name not in new:
                    self._working[name].add(number, group, -solver.slots[name][key])
            for name in new:
                if name not in old:
                    self._working[name].add(number, group, solver.slots[name][key])
        self.homes[key] = tier
        for number in solver.deciding.get(key, ()):
            used_in = solver._program.tier_of(self._ticks[number], self.homes)
            if used_in != self._used_in[number]:  # the whole tick now runs in another tier
                self._used_in[number] = used_in
                self._measure(number)

    def _count(self, block: BlockPlan, tier: str, times: int) -> None:
        nbytes = times * self.solver.slots[tier][block.key]
        self._home_bytes[tier] += nbytes
        self._durable_bytes[tier] += nbytes if block.kind in DURABLE_KINDS else 0
        self._generation_bytes[tier] += times * self._tiers[tier].generation_bytes(block)


class _WorkingSets:
    """Bytes that the ticks of a step hold in one tier besides homes, with their maxima.

    Attributes:
        by_tick: Bytes of every tick: the held group plus the largest passing group.
    """

    def __init__(self, num_ticks: int) -> None:
        self.by_tick = [0] * num_ticks
        self._groups: list[list[int]] = [[0]] * num_ticks
        #: Whether two consecutive ticks count -> heap of (-bytes, first tick). An entry with outdated bytes is dropped
        #: when it reaches the top. Layers are alike, so most changes affect one of the fullest ticks.
        self._heaps: dict[bool, list[tuple[int, int]]] = {
            ahead: [(0, tick) for tick in range(num_ticks)] for ahead in (False, True)
        }
        self._changed: dict[bool, set[int]] = {False: set(), True: set()}  # not yet in the heap

    def put(self, tick: int, groups: list[int]) -> None:
        """Set the bytes of each group of a tick; group 0 is held."""
        self._groups[tick] = groups
        self._set(tick, groups[0] + max(groups[1:], default=0))

    def add(self, tick: int, group: int, nbytes: int) -> None:
        """Add bytes to a group of a tick; group 0 is held."""
        groups = self._groups[tick]
        groups[group] += nbytes
        self._set(tick, groups[0] + max(groups[1:], default=0))

    def _set(self, tick: int, nbytes: int) -> None:
        if self.by_tick[tick] != nbytes:
            self.by_tick[tick] = nbytes
            self._changed[False].add(tick)
            self._changed[True].update((tick, (tick or len(self.by_tick)) - 1))

    def largest(self, *, ahead: bool) -> int:
        """Return the bytes of the fullest tick, or with ``ahead`` of the fullest two consecutive ticks."""
        heap, changed = self._heaps[ahead], self._changed[ahead]
        if len(heap) + len(changed) > 4 * len(self.by_tick):
            heap[:] = [(-self._bytes_from(tick, ahead=ahead), tick) for tick in range(len(self.by_tick))]
            heapq.heapify(heap)
        else:
            for tick in changed:
                heapq.heappush(heap, (-self._bytes_from(tick, ahead=ahead), tick))
        changed.clear()
        while heap and -heap[0][0] != self._bytes_from(heap[0][1], ahead=ahead):
            heapq.heappop(heap)
        return -heap[0][0] if heap else 0

    def fullest(self, *, ahead: bool) -> tuple[int, ...]:
        """Return the tick or ticks that the last call of ``largest`` found."""
        first = self._heaps[ahead][0][1] if self._heaps[ahead] else 0
        return (first, (first + 1) % len(self.by_tick)) if ahead and self.by_tick else (first,)

    def _bytes_from(self, tick: int, *, ahead: bool) -> int:
        return self.by_tick[tick] + (self.by_tick[tick + 1 - len(self.by_tick)] if ahead else 0)
