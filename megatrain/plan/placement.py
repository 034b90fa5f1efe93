"""Placement of blocks: their homes, the memory that remains free, and the resulting traffic."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median_low
from typing import Literal

from megatrain.checkpoint.table import MIN_GENERATIONS
from megatrain.engine.program.block_plan import DURABLE_KINDS, KINDS, BlockPlan, Kind
from megatrain.engine.program.step_program import NextUses, StepProgram
from megatrain.plan.copy_windows import CopyWindows, TickCopies
from megatrain.plan.residents import Residency, ResidentChooser
from megatrain.plan.shortfall import Shortfall
from megatrain.plan.stays import BufferBudget, choose_stays
from megatrain.plan.traffic import Traffic
from megatrain.plan.working_sets import WorkingSets
from tiered import Mode
from tiered.ext import Routes
from tiered.units import format_size

#: Allowed home tiers by kind of block, preferred first. ``in place`` is for weights read from the model's folder.
Homes = Mapping[Kind | Literal["in place"], Sequence[str]]
#: Function that rounds the bytes of a block's contents up to the bytes of its slot in a tier.
SlotBytes = Callable[[int], int]
#: Share of the compute tier that buffers for more than two ticks must leave free, because layers may allocate more
#: memory than the trace recorded.
_UNBUFFERED_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class PlacementSpec:
    """Allowed homes for each kind of block.

    Attributes:
        residents: Kinds whose blocks may have their home in the compute tier if that tier is not RAM.
    """

    homes: Homes
    residents: frozenset[Kind]


@dataclass(frozen=True, slots=True)
class TierBudget:
    """Planner's budget for a tier: capacity, slot rounding, and contents other than blocks.

    Attributes:
        workspace_bytes: Bytes outside of blocks.
        generations: Number of committed generations of the tier's durable blocks, in addition to the live blocks.
        filling_bytes: Bytes needed to load or save the weights of one layout, in addition to the durable blocks.
        residency: Rules for homes in the compute tier if that tier is not RAM.
        links: Pairs (source, destination) of the tier's links with faster tiers, one for each direction.
        is_addressable: Whether blocks can be used in place. Otherwise they are copied to other tiers for use.
        is_read_only: Whether blocks with their home in the tier exist from the start and are never written.
        is_durable: Whether the tier keeps its part of checkpoints. Other tiers write their part to ``output_dir``.
        num_processes: Processes on this host, each with this capacity. The config sets the size for all processes.
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
        """Return the bytes that a block's generations take if this tier is the block's home."""
        return self.generations * self.slot_bytes(block.nbytes) if block.is_saved else 0


@dataclass(frozen=True)
class Placement:
    """Homes of all blocks, the peak contents of each tier, and the bytes that each link moves per step.

    Attributes:
        homes: Home tier by block key.
        home_bytes: Slot bytes by tier and kind.
        working_bytes: Bytes of the largest working set of any tick (homes excluded), or of loading a layout's weights
            if that needs more, by tier.
        median_working_bytes: Low median of all ticks' working sets, by tier.
        traffic_bytes: Block bytes moved in each step except the first and the last, by link ``"src->dst"``.
        first_traffic_bytes: Block bytes of a first step, which has nothing to update, by link.
        last_traffic_bytes: Block bytes of the updates after the last step, by link.
        workspace_bytes: Bytes outside of blocks, by tier.
        stays: Copies that stay in a tier until their next use.
        generation_bytes: Bytes reserved for committed generations in addition to the live blocks, by tier.
        buffers: Number of buffers for copies, by tier and slot bytes. They are created before the first step. In a tier
            without an entry, a copy may first have to free a buffer of a different size.
        missing_bytes: Bytes by which tiers are too small for separate buffers of each size, by tier. GPU runs only.
    """

    homes: Mapping[str, str]
    home_bytes: Mapping[str, Mapping[Kind, int]]
    working_bytes: Mapping[str, int]
    median_working_bytes: Mapping[str, int]
    traffic_bytes: Mapping[str, int]
    first_traffic_bytes: Mapping[str, int]
    last_traffic_bytes: Mapping[str, int]
    workspace_bytes: Mapping[str, int] = field(default_factory=dict)
    stays: NextUses = field(default_factory=dict)
    generation_bytes: Mapping[str, int] = field(default_factory=dict)
    routes: Routes = field(default_factory=Routes)
    buffers: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    missing_bytes: Mapping[str, int] = field(default_factory=dict)

    def run_traffic_bytes(self, num_steps: int) -> dict[str, int]:
        """Return the block bytes that each link moves in a run of at least one step."""
        assert num_steps >= 1, num_steps
        return {
            link: self.first_traffic_bytes[link] + (num_steps - 1) * nbytes + self.last_traffic_bytes[link]
            for link, nbytes in self.traffic_bytes.items()
        }

    def peak_bytes(self, tier: str) -> int:
        """Return the capacity that this placement needs in a tier."""
        other_bytes = self.workspace_bytes.get(tier, 0) + self.generation_bytes.get(tier, 0)
        return sum(self.home_bytes[tier].values()) + self.working_bytes[tier] + other_bytes


class PlacementSolver:
    """Search for the placement of one program.

    Args:
        tiers: Budgets, fast to slow.
        open_bytes: Bytes that homes must leave free for prefetched copies and write-backs, by tier.
        stay_share: Share of the memory outside of homes and working sets that copies may occupy between two uses.
        existing_homes: Homes of blocks that already exist, by key.

    Attributes:
        tiers: Budgets by tier.
        order: Names of the tiers, fast to slow.
    """

    def __init__(
        self,
        program: StepProgram,
        tiers: Sequence[TierBudget],
        allowed: Homes,
        open_bytes: Mapping[str, int] | None = None,
        stay_share: float = 0.0,
        existing_homes: Mapping[str, str] | None = None,
    ) -> None:
        self.program = program
        self._existing_homes = existing_homes or {}
        self.tiers = {tier.name: tier for tier in tiers}
        self.order = [tier.name for tier in tiers]
        self._routes = Routes(tuple(link for tier in tiers for link in tier.links))
        self._allowed = allowed
        self._open_bytes = dict(open_bytes or {})
        self._stay_share = stay_share
        #: (tick, group) of each block's uses, by key. Group 0 is held for the tick; other groups pass.
        self.groups_by_key: dict[str, list[tuple[int, int]]] = {key: [] for key in program.blocks}
        #: Update ticks whose tier depends on a block's home, by key; see ``StepProgram.tick_tier``.
        self.deciding_ticks: dict[str, list[int]] = {}
        modes: dict[str, list[Mode]] = {key: [] for key in program.blocks}
        for tick_index, tick in enumerate(program.ticks):
            for group_index, group in enumerate((tick.held, *tick.passing)):
                for key, mode in group:
                    self.groups_by_key[key].append((tick_index, group_index))
                    modes[key].append(mode)
            if tick.phase == "update":
                for key, _ in tick.uses:
                    self.deciding_ticks.setdefault(key, []).append(tick_index)
        #: Slot bytes of each block, by tier and key.
        self.slots = {
            tier.name: {key: tier.slot_bytes(block.nbytes) for key, block in program.blocks.items()} for tier in tiers
        }
        self._num_moves = {key: sum((m != "w") + (m != "r") for m in uses) for key, uses in modes.items()}
        self._stops: dict[tuple[str, str], tuple[str, ...]] = {}
        budget = self.tiers[program.compute_tier]
        self._residents = (
            None if budget.residency is None else ResidentChooser(program, budget.residency, budget.slot_bytes)
        )

    def solve(self) -> Placement | Shortfall:
        """Return the placement, or the tier that is too small for any placement."""
        assignment = self.assign()
        return assignment if isinstance(assignment, Shortfall) else self.describe(assignment)

    def assign(self, open_bytes: Mapping[str, int] | None = None) -> HomeAssignment | Shortfall:
        """Return a home for every block, or the tier that is too small for any placement.

        Args:
            open_bytes: Replaces the value passed to the constructor.
        """
        if open_bytes is not None:
            self._open_bytes = dict(open_bytes)
        state = self._best_state()
        tier = state.overfull_tier(ahead=False)
        if tier is not None:
            return self._shortfall(tier, state)
        # Without a GPU, fixed buffers are not worth their memory: reallocating buffers costs only page faults.
        names = [name for name in ("gpu", "ram") if self.program.compute_tier == "gpu"]
        buffer_room = {name: BufferBudget(state.copies_by_tick(name), state.room_for_copies(name)) for name in names}
        return HomeAssignment(state, buffer_room)

    def _best_state(self) -> _HomeState:
        """Return the homes that save the most traffic. If they overflow the last tier, use less of that tier."""
        state = self._assign_homes(self._promotion_key)
        last_tier = self.order[-1]
        if self.tiers[last_tier].generations and state.overfull_tier(ahead=False) == last_tier:
            relief_state = self._assign_homes(self._relief_key)
            if relief_state.peak(last_tier, ahead=False) < state.peak(last_tier, ahead=False):
                return relief_state
        return state

    def _assign_homes(self, order: Callable[[BlockPlan], tuple[float, ...]]) -> _HomeState:
        """Move blocks to faster homes in ``order``, and leave memory for the copies of two ticks if possible."""
        homes = {key: max(self._homes(b), key=self.order.index) for key, b in self.program.blocks.items()}
        state = _HomeState(self, homes)
        for ahead in (True, False):
            if state.overfull_tier(ahead=ahead) in (None, self.order[-1]):
                break
        self._make_residents(state, ahead=ahead)
        for block in sorted(self.program.blocks.values(), key=order):
            if self._is_resident(block, homes):
                continue
            for tier in self._homes(block):
                if tier == homes[block.key] or state.try_move([block.key], tier, ahead=ahead):
                    break
        self._place_overflow_in_compute_tier(state, ahead=ahead)
        if self._residents is not None and state.overfull_tier(ahead=False) == self.order[-1]:
            move = partial(state.try_move, tier=self.program.compute_tier, ahead=ahead)
            self._residents.choose(homes, move, lambda: state.overfull_tier(ahead=False) == self.order[-1])
        return state

    def _make_residents(self, state: _HomeState, *, ahead: bool) -> None:
        """Make the compute tier the home of all blocks. If they do not fit, move those that save the most time."""
        if self._residents is None:
            return
        move = partial(state.try_move, tier=self.program.compute_tier, ahead=ahead)
        all_keys = self._residents.all_keys()
        if not all_keys or not move(all_keys):
            self._residents.choose(state.homes, move)

    def _place_overflow_in_compute_tier(self, state: _HomeState, *, ahead: bool) -> None:
        """Move gradients that overflow RAM into free memory of the compute tier instead of to drives.

        The choice of residents did not move these gradients, because they cross the bus once in either case.
        """
        residency = self.tiers[self.program.compute_tier].residency
        if residency is None or "gradients" not in residency.kinds:
            return
        for block in self.program.blocks.values():
            if block.kind == "gradients" and not self.tiers[state.homes[block.key]].is_addressable:
                state.try_move([block.key], self.program.compute_tier, ahead=ahead)

    def _is_resident(self, block: BlockPlan, homes: Mapping[str, str]) -> bool:
        residency = self.tiers[self.program.compute_tier].residency
        is_home = homes[block.key] == self.program.compute_tier
        return residency is not None and block.kind in residency.kinds and is_home

    def open_bytes(self, tier: str) -> int:
        """Return how many bytes homes must leave free in a tier, in addition to the ticks' working sets."""
        return self._open_bytes.get(tier, 0)

    def _homes(self, block: BlockPlan) -> Sequence[str]:
        """Return the allowed home tiers of a block, preferred first."""
        if block.key in self._existing_homes:
            return (self._existing_homes[block.key],)
        return self._allowed["in place" if block.in_place else block.kind]

    def _promotion_key(self, block: BlockPlan) -> tuple[float, ...]:
        """Return a sort key: descending by traffic saved per byte held, then by kind, to keep each kind together."""
        return (-float(self._num_moves[block.key]), KINDS.index(block.kind))

    def _relief_key(self, block: BlockPlan) -> tuple[float, ...]:
        """Return a sort key that puts blocks with generations first, because each occupies several times its size."""
        return (not block.is_saved, *self._promotion_key(block))

    def stop_tiers(self, home: str, tick_tier: str) -> tuple[str, ...]:
        """Return the tiers, other than a block's home, in which a use of the block needs memory."""
        tiers = self._stops.get((home, tick_tier))
        if tiers is None:
            tiers = self._stops[home, tick_tier] = tuple(tier for _, tier in self._routes.between(home, tick_tier))
        return tiers

    def _shortfall(self, tier: str, state: _HomeState) -> Shortfall:
        have_bytes, num_processes = self.tiers[tier].capacity_bytes, self.tiers[tier].num_processes
        need_bytes = state.peak(tier, ahead=False)
        total_note = ""
        if num_processes > 1:
            nbytes = num_processes * need_bytes
            total_note = f" for each of {num_processes} processes, {nbytes} ({format_size(nbytes)}) together"
        if tier == self.order[-1] and len(self.order) > 1:
            missing_size = format_size(need_bytes - have_bytes)
            advice = f"Give tiers.{tier} that size{total_note}, or a faster tier {missing_size} more."
        else:
            drive = "" if "nvme" in self.order else " add a [[tiers.nvme]] path,"
            advice = f"Give tiers.{tier}.size that much{total_note},{drive} or lower data.max_length or the batch."
        return Shortfall(tier, need_bytes, have_bytes, advice + self._checkpoint_advice(tier, state))

    def _checkpoint_advice(self, tier: str, state: _HomeState) -> str:
        """Return sentences that state what a tier would need with fewer checkpoints, and with none."""
        generations = self.tiers[tier].generations
        if not state.generation_bytes[tier]:
            return ""
        text = f" {format_size(state.generation_bytes[tier])} of this is for {generations} checkpoints:"
        if generations > MIN_GENERATIONS:
            need = self._need_bytes(MIN_GENERATIONS, tier)
            text += f" checkpoint.save_total_limit = {MIN_GENERATIONS} would need {need} ({format_size(need)}),"
        need = self._need_bytes(0, tier)
        text += ' checkpoint.save_strategy = "no" with save_on_signal = false'
        return f"{text} would need {need} ({format_size(need)})."

    def _need_bytes(self, generations: int, tier: str) -> int:
        """Return the smallest capacity with which a tier can hold ``generations`` generations."""
        tiers = [replace(t, generations=generations) if t.name == tier else t for t in self.tiers.values()]
        limits = self._open_bytes, self._stay_share, self._existing_homes
        solver = PlacementSolver(self.program, tiers, self._allowed, *limits)
        return solver._best_state().peak(tier, ahead=False)

    def describe(self, assignment: HomeAssignment) -> Placement:
        """Return the placement that results from an assignment of homes."""
        state = assignment.state
        home_bytes: dict[str, dict[Kind, int]] = {name: dict.fromkeys(KINDS, 0) for name in self.order}
        for key, block in self.program.blocks.items():
            home = state.homes[key]
            home_bytes[home][block.kind] += self.slots[home][key]
        slot_bytes = {name: tier.slot_bytes for name, tier in self.tiers.items()}
        room = {name: state.room_for_stays(name, self._stay_share) for name in self.order}
        missing_bytes = assignment.missing_bytes
        budgets = {name: deepcopy(room) for name, room in assignment.buffer_room.items() if name not in missing_bytes}
        stays = choose_stays(self.program, state.homes, slot_bytes, room, budgets)
        traffic = Traffic(self.program, self._routes, state.homes, stays)
        buffers = {name: state.choose_buffers(name, stays) for name in budgets}
        return Placement(
            homes=state.homes,
            home_bytes=home_bytes,
            working_bytes={name: state.largest_working_set(name, ahead=False) for name in self.order},
            median_working_bytes={name: int(median_low(state.working_sets(name))) for name in self.order},
            traffic_bytes=traffic.step_bytes(),
            first_traffic_bytes=traffic.first_step_bytes(),
            last_traffic_bytes=traffic.last_update_bytes(),
            stays=stays,
            workspace_bytes={name: tier.workspace_bytes for name, tier in self.tiers.items()},
            generation_bytes=dict(state.generation_bytes),
            routes=self._routes,
            buffers={name: counts for name, counts in buffers.items() if counts},
            missing_bytes=missing_bytes,
        )


@dataclass(frozen=True, slots=True)
class HomeAssignment:
    """Home of every block.

    Attributes:
        buffer_room: Memory for buffers by tier, for runs on a GPU.
    """

    state: _HomeState
    buffer_room: Mapping[str, BufferBudget]

    @property
    def missing_bytes(self) -> dict[str, int]:
        """Bytes by which each tier is too small for its buffers. Tiers with enough memory are left out."""
        return {name: room.missing_bytes for name, room in self.buffer_room.items() if room.missing_bytes}


class _HomeState:
    """Homes that a search changes, and the bytes that result from them in each tier and tick."""

    def __init__(self, solver: PlacementSolver, homes: dict[str, str]) -> None:
        self.solver, self.homes = solver, homes
        self._ticks = solver.program.ticks
        self._tiers = solver.tiers
        self._home_bytes = dict.fromkeys(solver.order, 0)
        self._durable_bytes = dict.fromkeys(solver.order, 0)
        #: Bytes of committed generations in addition to the live blocks, by tier.
        self.generation_bytes = dict.fromkeys(solver.order, 0)
        for key, block in solver.program.blocks.items():
            self._count(block, homes[key], 1)
        self._tick_tiers = [solver.program.tick_tier(tick, homes) for tick in self._ticks]
        self._working_sets = {name: WorkingSets(len(self._ticks)) for name in solver.order}
        for tick_index in range(len(self._ticks)):
            self._recount(tick_index)

    def _recount(self, tick_index: int) -> None:
        """Recompute a tick's working set in every tier after homes have changed."""
        tick, tick_tier, solver = self._ticks[tick_index], self._tick_tiers[tick_index], self.solver
        groups = (tick.held, *tick.passing)
        sizes_by_tier = {name: [0] * len(groups) for name in solver.order}
        for group_index, group in enumerate(groups):
            for key, _ in group:
                for name in solver.stop_tiers(self.homes[key], tick_tier):
                    sizes_by_tier[name][group_index] += solver.slots[name][key]
        for name, sizes in sizes_by_tier.items():
            self._working_sets[name].put(tick_index, sizes)

    def working_sets(self, tier: str) -> list[int]:
        """Return the working set of every tick."""
        return self._working_sets[tier].by_tick or [0]

    def largest_working_set(self, tier: str, *, ahead: bool) -> int:
        transient_bytes = self._home_bytes[tier] - self._durable_bytes[tier] + self._tiers[tier].workspace_bytes
        return max(self._working_sets[tier].largest(ahead=ahead), self._tiers[tier].filling_bytes - transient_bytes)

    def peak(self, tier: str, *, ahead: bool) -> int:
        other_bytes = self._tiers[tier].workspace_bytes + self.generation_bytes[tier]
        return self._home_bytes[tier] + other_bytes + self.largest_working_set(tier, ahead=ahead)

    def room_for_stays(self, tier: str, share: float) -> list[int]:
        """Return the bytes left at every tick for copies that stay, after the copies of that tick and a neighbor."""
        sizes = self._working_sets[tier].by_tick
        pair_sizes = [
            size + max(previous_size, next_size)
            for previous_size, size, next_size in zip(sizes[-1:] + sizes, sizes, sizes[1:] + sizes[:1], strict=False)
        ]
        free_bytes = self._tiers[tier].capacity_bytes - self.peak(tier, ahead=False)
        spare_bytes = max(0, int(share * (self._tiers[tier].capacity_bytes - self.peak(tier, ahead=True))))
        largest_pair = max(pair_sizes, default=0)
        return [max(0, min(free_bytes, spare_bytes + largest_pair - pair)) if share else 0 for pair in pair_sizes]

    def choose_buffers(self, tier: str, stays: NextUses) -> dict[int, int]:
        """Return the number of buffers by slot bytes, enough for the longest run of consecutive ticks that fits.

        The remaining memory goes to the sizes that move the most bytes. The copies of two ticks are assumed to fit.
        """
        copies, room_bytes = self.copies_by_tick(tier, stays), self.room_for_copies(tier)
        if tier == self.solver.program.compute_tier:
            room_bytes -= int(_UNBUFFERED_SHARE * self._tiers[tier].capacity_bytes)
        tick_counts = range(2, len(copies) + 1)
        windows = CopyWindows(copies)

        def buffer_bytes(num_ticks: int) -> int:
            return sum(size * count for size, count in windows.max_buffer_counts(num_ticks).items())

        num_ticks = max(2, tick_counts.start + bisect.bisect_right(tick_counts, room_bytes, key=buffer_bytes) - 1)
        counts, max_counts = windows.max_buffer_counts(num_ticks), windows.max_buffer_counts(len(copies))
        left_bytes = max(0, room_bytes - sum(size * count for size, count in counts.items()))
        moved_bytes = Counter[int]()
        for tick_copies in copies:
            for group in (tick_copies.held, *tick_copies.passing):
                for size in group.values():
                    moved_bytes[size] += size
        for size, _ in moved_bytes.most_common():
            num_more = min(left_bytes // size, max_counts[size] - counts[size])
            counts[size] += num_more
            left_bytes -= num_more * size
        return counts

    def room_for_copies(self, tier: str) -> int:
        """Return the bytes of a tier that homes, workspace and generations leave free."""
        used_bytes = self._home_bytes[tier] + self._tiers[tier].workspace_bytes + self.generation_bytes[tier]
        return self._tiers[tier].capacity_bytes - used_bytes

    def copies_by_tick(self, tier: str, stays: NextUses | None = None) -> list[TickCopies]:
        """Return the copies in ``tier`` at each tick: used blocks with a different home, and copies that stay."""
        by_tick, sizes, stops = [], self.solver.slots[tier], self.solver.stop_tiers
        for tick, tick_tier in zip(self._ticks, self._tick_tiers, strict=True):
            slots = [
                {key: sizes[key] for key, _ in group if sizes[key] and tier in stops(self.homes[key], tick_tier)}
                for group in (tick.held, *tick.passing)
            ]
            by_tick.append(TickCopies(slots[0], [group for group in slots[1:] if group]))
        for (start, key), stop in (stays or {}).items():
            if self._tick_tiers[start] == tier:
                nbytes = self.solver.slots[tier][key]
                for tick_index in range(start, stop + (1 if stop > start else 1 + len(by_tick))):
                    by_tick[tick_index % len(by_tick)].held[key] = nbytes
        return by_tick

    def overfull_tier(self, *, ahead: bool) -> str | None:
        """Return the first tier, fast to slow, whose peak exceeds its capacity, or None."""
        for name in self.solver.order:
            if self.peak(name, ahead=ahead) > self._tiers[name].capacity_bytes:
                return name
        return None

    def try_move(self, keys: Sequence[str], tier: str, *, ahead: bool) -> bool:
        """Make ``tier`` the home of blocks if they fit and no slower tier overflows. Return whether they moved."""
        if self._is_too_full(keys, tier, ahead=ahead):
            return False
        blocks = [self.solver.program.blocks[key] for key in keys]
        old_homes = {key: self.homes[key] for key in keys}
        slower_tiers = self.solver.order[self.solver.order.index(tier) + 1 :]
        limits = {name: max(self._tiers[name].capacity_bytes, self.peak(name, ahead=ahead)) for name in slower_tiers}
        limits[tier] = self._tiers[tier].capacity_bytes - self.solver.open_bytes(tier)
        for block in blocks:
            self._move(block, tier)
        if all(self.peak(name, ahead=ahead) <= nbytes for name, nbytes in limits.items()):
            return True
        for block in blocks:
            self._move(block, old_homes[block.key])
        return False

    def _is_too_full(self, keys: Sequence[str], tier: str, *, ahead: bool) -> bool:
        """Return True if blocks certainly do not fit into a tier. This avoids a trial move for most candidates.

        The fullest tick loses at most the copies of these blocks. An update tick can lose all its contents, because it
        can move to a different tier.
        """
        budget, slots, working = self._tiers[tier], self.solver.slots[tier], self._working_sets[tier]
        added_bytes, left_bytes = 0, working.largest(ahead=ahead)
        ticks = working.fullest(ahead=ahead)
        for key in keys:
            if self.homes[key] == tier:
                continue
            added_bytes += slots[key] + budget.generation_bytes(self.solver.program.blocks[key])
            for tick_index, _ in self.solver.groups_by_key[key]:
                if tick_index in ticks:
                    left_bytes -= left_bytes if self._ticks[tick_index].phase == "update" else slots[key]
        other_bytes = budget.workspace_bytes + self.generation_bytes[tier]
        min_bytes = self._home_bytes[tier] + added_bytes + other_bytes + max(0, left_bytes)
        return min_bytes > budget.capacity_bytes - self.solver.open_bytes(tier)

    def _move(self, block: BlockPlan, tier: str) -> None:
        key, old_home, solver = block.key, self.homes[block.key], self.solver
        self._count(block, old_home, -1)
        self._count(block, tier, 1)
        for tick_index, group in solver.groups_by_key[key]:
            tick_tier = self._tick_tiers[tick_index]
            old_stops, new_stops = solver.stop_tiers(old_home, tick_tier), solver.stop_tiers(tier, tick_tier)
            for name in old_stops:
                if name not in new_stops:
                    self._working_sets[name].add(tick_index, group, -solver.slots[name][key])
            for name in new_stops:
                if name not in old_stops:
                    self._working_sets[name].add(tick_index, group, solver.slots[name][key])
        self.homes[key] = tier
        for tick_index in solver.deciding_ticks.get(key, ()):
            tick_tier = solver.program.tick_tier(self._ticks[tick_index], self.homes)
            if tick_tier != self._tick_tiers[tick_index]:  # the whole tick now runs in a different tier
                self._tick_tiers[tick_index] = tick_tier
                self._recount(tick_index)

    def _count(self, block: BlockPlan, tier: str, sign: int) -> None:
        nbytes = sign * self.solver.slots[tier][block.key]
        self._home_bytes[tier] += nbytes
        self._durable_bytes[tier] += nbytes if block.kind in DURABLE_KINDS else 0
        self.generation_bytes[tier] += sign * self._tiers[tier].generation_bytes(block)
