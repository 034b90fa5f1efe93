"""Choice of the blocks whose home is the compute tier, by the seconds that each byte there saves."""

from __future__ import annotations

import heapq
import math
from collections import ChainMap
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatrain.engine.program.block_plan import KINDS, BlockPlan, Kind
from megatrain.engine.program.step_program import StepProgram
from megatrain.engine.tape.tape import BlockUse, follow
from tiered import Mode

_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class Residency:
    """Rules for homes in the compute tier if that tier is not RAM.

    Attributes:
        kinds: Kinds of blocks that may have their home in the compute tier.
        bus_s_per_byte: Seconds per byte moved between the compute tier and RAM. Without measured rates it is 1, which
            ranks candidates by bytes.
        host_update_s_per_element: Seconds per weight updated in RAM. 0 without measured rates.
    """

    kinds: frozenset[Kind]
    bus_s_per_byte: float = 1.0
    host_update_s_per_element: float = 0.0


@dataclass(frozen=True, slots=True)
class _PlacementCandidate:
    """Blocks that move together. Among candidates with equal cost per byte, the lowest ``rank`` moves first."""

    keys: tuple[str, ...]
    rank: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _CostInputs:
    """Inputs to a candidate's cost, other than the tiers' rates.

    Attributes:
        keys: Blocks whose homes affect the cost: the candidate's blocks and their groups.
        pattern: Number of the candidate's pattern. Candidates with the same pattern have equal costs if the homes of
            their ``keys`` are pairwise equal.
    """

    keys: tuple[str, ...]
    pattern: int


class ResidentChooser:
    """Greedy choice of the compute tier's residents.

    Args:
        slot_bytes: Function that rounds content bytes up to the compute tier's slot bytes.
    """

    def __init__(self, program: StepProgram, residency: Residency, slot_bytes: Callable[[int], int]) -> None:
        self._program, self._residency, self._slot_bytes = program, residency, slot_bytes
        self._tier = program.compute_tier
        #: Groups by block key. A block that several gradients share is in several groups, and its moves depend on all
        #: groups.
        self._groups: dict[str, list[tuple[str, ...]]] = {}
        self._move_counts: dict[tuple[str, str, tuple[str, ...]], int] = {}
        self._uses: dict[str, list[tuple[int, Mode]]] = {key: [] for key in program.blocks}
        #: Tier in which each tick runs, given the current homes. Cached, because a shared gradient block has hundreds
        #: of uses.
        self._tick_tiers = [self._tier] * len(program.ticks)
        self._use_tiers: dict[str, tuple[str, ...]] = {}  # tiers of a block's uses by key, computed on demand
        #: Update ticks whose tier depends on a block's home, by block key.
        self._deciding_ticks: dict[str, list[int]] = {}
        for index, tick in enumerate(program.ticks):
            for key, mode in tick.uses:
                self._uses[key].append((index, mode))
            if tick.phase == "update":
                group = tuple(key for key, _ in tick.uses)
                for key in group:
                    self._groups.setdefault(key, []).append(group)
                    self._deciding_ticks.setdefault(key, []).append(index)
        self._candidates = [
            candidate
            for candidate in (*self._group_candidates(), *self._block_candidates())
            if all(program.blocks[key].kind in residency.kinds for key in candidate.keys)
        ]
        self._candidates_by_key: dict[str, list[int]] = {}
        for index, candidate in enumerate(self._candidates):
            for key in candidate.keys:
                self._candidates_by_key.setdefault(key, []).append(index)
        #: Cost inputs by candidate. Most layers of a model are identical, so few costs are computed.
        self._cost_inputs: dict[int, _CostInputs | None] = {}
        self._pattern_numbers: dict[Hashable, int] = {}
        self._patterns: dict[tuple[str, ...], int] = {}
        self._costs: dict[tuple[int, tuple[str, ...]], float] = {}

    def _group_candidates(self) -> Iterator[_PlacementCandidate]:
        """Yield each group that the compute tier can update, once with its gradient and once without it."""
        if not self._program.updates.in_compute_tier:
            return
        updates = [tick for tick in self._program.ticks if tick.phase == "update"]
        for index, tick in enumerate(updates):
            # Spread residents over the model: while a resident layer computes, the next layer can be fetched.
            rank = (-1.0, index * _GOLDEN_RATIO % 1.0)
            keys = tuple(key for key, _ in tick.uses)
            yield _PlacementCandidate(keys, rank)
            yield _PlacementCandidate(tuple(key for key in keys if key not in tick.spent), rank)

    def _block_candidates(self) -> Iterator[_PlacementCandidate]:
        parts_by_block: dict[str, list[BlockPlan]] = {}
        for block in self._program.blocks.values():
            parts_by_block.setdefault(block.tensor_key, []).append(block)
        for index, parts in enumerate(parts_by_block.values()):
            yield _PlacementCandidate(tuple(part.key for part in parts), (KINDS.index(parts[0].kind), index))

    def all_keys(self) -> Sequence[str]:
        """Return the keys of all blocks if every kind may be resident (a step then needs no copies), else no keys."""
        return list(self._program.blocks) if len(self._residency.kinds) == len(KINDS) else ()

    def choose(
        self,
        homes: Mapping[str, str],
        try_move: Callable[[Sequence[str]], bool],
        is_needed: Callable[[], bool] | None = None,
    ) -> None:
        """Move blocks to the compute tier, in descending order of seconds saved per byte.

        Args:
            homes: Tier by block key. ``try_move`` changes it.
            try_move: Function that makes the compute tier the home of blocks, or returns False if they do not fit.
            is_needed: Function that returns whether more blocks must move, even if that makes the step longer.
        """
        self._tick_tiers = [self._program.tick_tier(tick, homes) for tick in self._program.ticks]
        self._use_tiers.clear()
        queue: list[tuple[float, tuple[float, ...], int]] = []
        self._push(queue, range(len(self._candidates)), homes)
        while queue and (is_needed is None or is_needed()):
            cost, _, index = heapq.heappop(queue)
            if is_needed is None and cost >= 0:
                return
            keys = self._keys_to_move(index, homes)
            if not keys or self._cached_cost(index, keys, homes) != cost:  # the entry is stale
                continue
            if try_move(keys):
                self._update_tick_tiers(keys, homes)
                self._push(queue, self._affected_candidates(keys, homes), homes)

    def _update_tick_tiers(self, keys: Sequence[str], homes: Mapping[str, str]) -> None:
        """Update the ticks' tiers after blocks have moved."""
        for tick_index, tier in self._new_tick_tiers(keys, homes).items():
            if self._tick_tiers[tick_index] != tier:
                self._tick_tiers[tick_index] = tier
                for key, _ in self._program.ticks[tick_index].uses:
                    self._use_tiers.pop(key, None)

    def _push(
        self, queue: list[tuple[float, tuple[float, ...], int]], indices: Sequence[int], homes: Mapping[str, str]
    ) -> None:
        for index in indices:
            keys = self._keys_to_move(index, homes)
            if keys:
                heapq.heappush(queue, (self._cached_cost(index, keys, homes), self._candidates[index].rank, index))

    def _keys_to_move(self, index: int, homes: Mapping[str, str]) -> tuple[str, ...]:
        return tuple(key for key in self._candidates[index].keys if homes[key] != self._tier)

    def _affected_candidates(self, keys: Sequence[str], homes: Mapping[str, str]) -> Sequence[int]:
        """Return the candidates whose cost may have changed because blocks of their groups moved."""
        groups = {id(group): group for key in keys for group in self._groups.get(key, ((key,),))}
        linked_keys = {key for group in groups.values() for key in group}
        # A shared block that was already resident crosses the bus as often as before, so other costs stay the same.
        linked_keys -= {key for key in linked_keys if self._is_shared(key) and homes[key] == self._tier}
        return sorted({index for key in linked_keys for index in self._candidates_by_key.get(key, ())})

    def _is_shared(self, key: str) -> bool:
        return len(self._groups.get(key, ())) > 1

    def _linked_blocks(self, key: str) -> tuple[str, ...]:
        """Return the blocks whose moves depend on a block's home: its group, or the block itself if it is shared."""
        return (key,) if self._is_shared(key) else self._groups.get(key, ((key,),))[0]

    def _cached_cost(self, index: int, keys: Sequence[str], homes: Mapping[str, str]) -> float:
        """Return the cost of moving a candidate's remaining blocks. The cost is cached for identical candidates."""
        if index not in self._cost_inputs:
            self._cost_inputs[index] = self._find_cost_inputs(self._candidates[index])
        inputs = self._cost_inputs[index]
        if inputs is None:
            return self._cost(keys, homes)
        cache_key = inputs.pattern, tuple(map(homes.__getitem__, inputs.keys))
        cost = self._costs.get(cache_key)
        if cost is None:
            cost = self._costs[cache_key] = self._cost(keys, homes)
        return cost

    def _find_cost_inputs(self, candidate: _PlacementCandidate) -> _CostInputs | None:
        """Return the inputs to a candidate's cost, or None if a shared block makes it depend on several groups."""
        keys = tuple(dict.fromkeys(linked_key for key in candidate.keys for linked_key in self._linked_blocks(key)))
        if any(self._is_shared(key) for key in keys):
            return None
        own_keys = frozenset(candidate.keys)
        pattern = self._pattern_number(keys), tuple(index for index, key in enumerate(keys) if key in own_keys)
        return _CostInputs(keys, self._pattern_numbers.setdefault(pattern, len(self._pattern_numbers)))

    def _pattern_number(self, keys: tuple[str, ...]) -> int:
        """Return a number that is equal for two key sequences if their blocks match pairwise in size and use."""
        if keys not in self._patterns:
            block_indices = dict[str, int]()
            pattern = tuple(
                (
                    block_indices.setdefault(block.tensor_key, len(block_indices)),
                    block.nbytes,
                    block.num_elements,
                    block.kind,
                    block.key in self._groups,
                    self._use_pattern(block.key),
                )
                for block in map(self._program.blocks.__getitem__, keys)
            )
            self._patterns[keys] = self._pattern_numbers.setdefault(pattern, len(self._pattern_numbers))
        return self._patterns[keys]

    def _use_pattern(self, key: str) -> tuple[Hashable, ...]:
        """Return all properties of a block's uses, apart from homes, that affect how often it moves."""
        pattern, previous_index = [], -1
        for index, mode in self._uses[key]:
            tick = self._program.ticks[index]
            is_update = tick.phase == "update"
            is_streamed = is_update and tick.visit in self._program.updates.streamed
            pattern.append((mode, index == previous_index + 1, is_update, is_streamed, key in tick.spent))
            previous_index = index
        return tuple(pattern)

    def _cost(self, keys: Sequence[str], homes: Mapping[str, str]) -> float:
        """Return by how many seconds per byte a step gets longer if blocks move; negative if it gets shorter."""
        group = tuple(dict.fromkeys(member for key in keys for member in self._linked_blocks(key)))
        new_homes = ChainMap(dict.fromkeys(keys, self._tier), homes)  # type: ignore[arg-type]
        loads = self._load(group, new_homes, self._new_tick_tiers(keys, new_homes)), self._load(group, homes, {})
        changes = [a - b for a, b in zip(*loads, strict=True)]
        extra_s = changes[0] * self._residency.bus_s_per_byte + changes[1] * self._residency.host_update_s_per_element
        return extra_s / max(1, sum(self._slot_bytes(self._program.blocks[key].nbytes) for key in keys))

    def _new_tick_tiers(self, keys: Sequence[str], homes: Mapping[str, str]) -> dict[int, str]:
        """Return the tiers of the ticks that depend on these blocks' homes."""
        ticks = {index for key in keys for index in self._deciding_ticks.get(key, ())}
        return {index: self._program.tick_tier(self._program.ticks[index], homes) for index in ticks}

    def _load(self, keys: Sequence[str], homes: Mapping[str, str], tiers: Mapping[int, str]) -> tuple[int, int]:
        """Return the bytes of these blocks that cross the bus in a step, and the number of elements updated in RAM.

        Args:
            tiers: New tier of each tick that would run in another tier.
        """
        moved_bytes, num_moves = 0, dict[tuple[str, str], int]()  # all parts of a layout have equal uses, so count once
        for key in keys:
            block, home = self._program.blocks[key], homes[key]
            if (block.tensor_key, home) not in num_moves:
                num_moves[block.tensor_key, home] = self._num_moves(key, home, tiers)
            moved_bytes += block.nbytes * num_moves[block.tensor_key, home]
        num_updated = 0
        for key in keys:
            block = self._program.blocks[key]
            if block.kind == "weights" and key in self._groups:
                tick = next(n for n, mode in self._uses[key] if mode == "rw")
                num_updated += block.num_elements * (tiers.get(tick, self._tick_tiers[tick]) != self._tier)
        return moved_bytes, num_updated

    def _num_moves(self, key: str, home: str, tiers: Mapping[int, str]) -> int:
        """Return how often a block crosses the bus in a step. Between consecutive ticks, its copy stays in place."""
        use_tiers = self._use_tiers.get(key)
        if use_tiers is None:
            use_tiers = self._use_tiers[key] = tuple(self._tick_tiers[tick] for tick, _ in self._uses[key])
        if any(self._tick_tiers[tick] != tier for tick, tier in tiers.items()):
            uses = zip(self._uses[key], use_tiers, strict=True)
            use_tiers = tuple(tiers.get(tick, tier) for (tick, _), tier in uses)
        cache_key = key, home, use_tiers
        if cache_key not in self._move_counts:
            self._move_counts[cache_key] = self._count_moves(*cache_key)
        return self._move_counts[cache_key]

    def _count_moves(self, key: str, home: str, tiers: Sequence[str]) -> int:
        program, uses = self._program, self._uses[key]
        accesses = []
        for n, (tick_index, mode) in enumerate(uses):
            is_last = key in program.ticks[tick_index].spent
            is_next = n + 1 < len(uses) and uses[n + 1][0] == tick_index + 1
            is_pinned = is_next and uses[n + 1][1] != "w" and tiers[n + 1] == tiers[n] and not is_last
            accesses.append(BlockUse(tick_index, mode, tiers[n], is_last, is_pinned))
        block_uses, _ = follow(key, accesses, home)
        # Transfers between RAM and a drive do not cross the bus.
        is_resident = home == self._tier
        crossings = [is_resident != (tier == self._tier) for tier in tiers]
        return sum(u.needs_fetch + u.needs_write_back for u, moves in zip(block_uses, crossings, strict=True) if moves)
