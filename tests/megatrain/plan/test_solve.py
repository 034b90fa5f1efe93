"""Homes, working sets and traffic of steps small enough to count by hand. Slots have the sizes of their blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.converters.spec import build_graph
from megatrain.engine.program.block_keys import state_key, weight_key
from megatrain.engine.program.block_plan import BlockPlan, Kind
from megatrain.engine.program.step_program import GroupUpdates, StepProgram, Tick
from megatrain.plan.budgets import filling_bytes
from megatrain.plan.placement import HomeAssignment, Placement, PlacementSolver, TierBudget
from megatrain.plan.residents import Residency
from megatrain.plan.run_tiers import link_pair
from megatrain.plan.shortfall import DoesNotFitError, Shortfall, require_fit
from megatrain.plan.traffic import Traffic
from megatrain.plan.working_sets import WorkingSets
from megatrain.ranks.shards import RankShards
from megatrain.trace.trace import trace_visits
from oracles.families import tiny_config
from oracles.planned_workspace import planned_workspace
from tiered.hops import Routes
from tiered.schedule import Mode
from tiered.units import PAGE_BYTES

SIZES = {"a": 100, "b": 10, "c": 100, "x": 30, "y": 50}
DRIVE: Mapping[Kind, Sequence[str]] = dict.fromkeys(("weights", "gradients", "optimizer", "activations"), ("nvme",))
EITHER: Mapping[Kind, Sequence[str]] = dict.fromkeys(DRIVE, ("ram", "nvme"))
LINKS = link_pair("ram", "nvme")


def program(*ticks: Tick, kind: Kind = "weights") -> StepProgram:
    used = sorted({key for tick in ticks for key, _ in tick.uses})
    return StepProgram({key: BlockPlan(key, kind, SIZES[key], torch.int8) for key in used}, ticks, "ram")


def tick(held: Sequence[tuple[str, Mode]], passing: Sequence[tuple[str, Mode]] = (), spent: str = "") -> Tick:
    return Tick("forward", 0, tuple(held), tuple((use,) for use in passing), frozenset(spent))


def solve(
    steps: StepProgram,
    ram: int,
    allowed: Mapping[Kind, Sequence[str]] = DRIVE,
    *,
    open_bytes: int = 0,
    stay_share: float = 0.0,
) -> Placement:
    tiers = [TierBudget("ram", ram, int), TierBudget("nvme", 10_000, int, links=LINKS)]
    return require_fit(PlacementSolver(steps, tiers, allowed, {"ram": open_bytes}, stay_share).solve())


READS = program(tick([("a", "r")]), tick([("b", "r")]), tick([("c", "r")]))


@pytest.mark.parametrize(("ram", "fits"), [(199, False), (200, True)])
def test_last_tick_and_first_tick_of_the_next_step_are_neighbors(ram: int, fits: bool) -> None:
    """The two largest neighboring ticks are the last of one step and the first of the next."""
    tiers = [TierBudget("ram", ram, int), TierBudget("nvme", 10_000, int, links=LINKS)]
    settled = PlacementSolver(READS, tiers, DRIVE).assign()
    assert isinstance(settled, HomeAssignment) and (settled.state.overfull_tier(ahead=True) is None) == fits


def test_pass_through_copies_are_sequential() -> None:
    placement = solve(program(tick([("b", "r")], [("x", "r"), ("y", "r")])), 60)
    assert placement.working_bytes["ram"] == 10 + 50
    with pytest.raises(DoesNotFitError, match="needs at least 60 "):
        solve(program(tick([("b", "r")], [("x", "r"), ("y", "r")])), 59)


@pytest.mark.parametrize(("open_bytes", "home"), [(0, "ram"), (1, "nvme")])
def test_reserved_space_is_not_used_for_homes(open_bytes: int, home: str) -> None:
    assert solve(program(tick([("b", "r")])), 10, EITHER, open_bytes=open_bytes).homes == {"b": home}


@pytest.mark.parametrize(("kind", "kept"), [("weights", 200), ("optimizer", 200), ("gradients", 0), ("activations", 0)])
def test_generations_take_space_for_durable_blocks(kind: Kind, kept: int) -> None:
    steps, drive = program(tick([("a", "r")]), kind=kind), TierBudget("nvme", 10_000, int, generations=2, links=LINKS)
    placement = PlacementSolver(steps, [TierBudget("ram", 100, int), drive], DRIVE).solve()
    assert placement.generation_bytes["nvme"] == kept and placement.peak_bytes("nvme") == 100 + kept


def test_block_that_does_not_fit_leaves_space_for_others() -> None:
    """RAM has space for the largest tick and ``b``, but not for ``a`` or ``c``."""
    placement = solve(READS, 110, EITHER)
    assert placement.homes == {"a": "nvme", "b": "ram", "c": "nvme"}
    assert placement.traffic_bytes == {"nvme->ram": 200, "ram->nvme": 0}
    assert placement.peak_bytes("ram") == 110


MODES: dict[str, tuple[tuple[Mode, Mode], str, tuple[int, int], tuple[int, int]]] = {
    # modes of two uses, blocks that the second use discards, bytes (read, written) without and with a stay between
    "read twice": (("r", "r"), "", (20, 0), (10, 0)),
    "written, then read": (("w", "r"), "", (10, 10), (0, 10)),
    "written, then dead": (("w", "r"), "b", (10, 10), (0, 0)),
    "changed, then read": (("rw", "r"), "", (20, 10), (10, 10)),
    "changed twice": (("rw", "rw"), "", (20, 20), (10, 10)),
    "read, then written": (("r", "w"), "", (10, 10), (10, 10)),
}


@pytest.mark.parametrize("name", MODES)
def test_dirty_copy_is_written_home_once(name: str) -> None:
    (first, second), spent, plain, staying = MODES[name]
    steps = program(tick([("b", first)]), tick([("b", second)], spent=spent))
    for stays, (read, written) in (({}, plain), ({(0, "b"): 1}, staying)):
        moved = Traffic(steps, Routes(LINKS), {"b": "nvme"}, stays).step_bytes()
        assert (moved["nvme->ram"], moved["ram->nvme"]) == (read, written), stays


@pytest.mark.parametrize(("ram", "stays"), [(159, False), (160, True)])
def test_copy_stays_if_all_pairs_of_ticks_have_space(ram: int, stays: bool) -> None:
    """Between the two uses of ``b``, ticks ``y`` and ``a`` need 150 bytes together, and the copy of ``b`` 10 more."""
    steps = program(*(tick([(key, "r")]) for key in "bxyab"))
    assert ((0, "b") in solve(steps, ram, stay_share=1.0).stays) == stays


def test_copy_that_is_overwritten_next_does_not_stay() -> None:
    steps = program(tick([("b", "r")]), tick([("x", "r")]), tick([("b", "w")]), tick([("x", "r")]))
    assert set(solve(steps, 1000, stay_share=1.0).stays) == {(1, "x"), (2, "b"), (3, "x")}


def test_run_traffic_sums_first_later_and_final_traffic() -> None:
    placement = solve(READS, 110, EITHER)
    assert placement.run_traffic_bytes(1)["nvme->ram"] == 200
    assert placement.run_traffic_bytes(3)["nvme->ram"] == 600


def test_workspace_counts_streams_twice_and_masks_once() -> None:
    """Between two units, each micro-batch holds one unit's input, the other's output, and the masks and tables."""
    graph = build_graph(tiny_config("llama"))
    trace = trace_visits(graph, 2, 16, torch.float32)
    stays = max(visit.memory.retained_nbytes for visit in trace.visits)
    streams = max(visit.memory.held_nbytes - visit.memory.retained_nbytes for visit in trace.visits)
    assert stays > 0
    inside = max(
        trace.head_nbytes, *(max(visit.memory.forward_nbytes, visit.memory.backward_nbytes) for visit in trace.visits)
    )
    for count in (1, 1000):
        assert 0 <= planned_workspace(graph, trace, count) - (count * (stays + 2 * streams) + inside) < PAGE_BYTES
    wide = replace(trace, head_nbytes=10 * inside)  # with a large vocabulary
    assert 0 <= planned_workspace(graph, wide, 1) - (stays + 2 * streams + 10 * inside) < PAGE_BYTES


@pytest.mark.parametrize(("dtype", "nbytes"), [(torch.float32, 4), (torch.bfloat16, 2 + 4 + 2)])
def test_loaded_weights_count_with_master_and_low_half(dtype: torch.dtype, nbytes: int) -> None:
    size = PAGE_BYTES
    blocks = [
        BlockPlan(weight_key("layer"), "weights", size, dtype),
        BlockPlan(state_key("layer", "low"), "optimizer", size, torch.int16),
    ]
    assert filling_bytes(StepProgram({block.key: block for block in blocks}, (), "gpu")) == nbytes * size


def test_export_has_space_for_the_master_of_parts_and_shards() -> None:
    """Weights and low halves take 2 bytes per element each. The master of the whole layout takes 4."""
    size, name = PAGE_BYTES, weight_key("layer")
    blocks = [
        *(BlockPlan(f"{name}.{part}", "weights", size, torch.bfloat16, parent_key=name) for part in range(3)),
        BlockPlan(state_key("layer", "low"), "optimizer", size, torch.int16),
    ]
    program = StepProgram({block.key: block for block in blocks}, (), "gpu")
    assert filling_bytes(program) == (2 + 3 * 4 + 2) * size
    two_ranks = replace(program, sharding=replace(program.sharding, shards=RankShards(0, 2)))
    assert filling_bytes(two_ranks) == (2 + 2 * 3 * 4 + 2) * size


@settings(max_examples=60)
@given(st.data())
def test_blocks_refused_by_the_bound_would_not_fit(data: st.DataObject) -> None:
    """The bound on the fullest tick changes no result, and a reused solver gives the same results as a new one."""
    count = data.draw(st.integers(1, 5))
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=3 * count, max_size=3 * count))
    blocks: dict[str, BlockPlan] = {}
    ticks: list[Tick] = []
    for number in range(count):
        kinds: tuple[tuple[str, Kind], ...] = (("w", "weights"), ("m", "optimizer"), ("g", "gradients"))
        for (name, kind), size in zip(kinds, sizes[3 * number :], strict=False):
            blocks[f"{name}{number}"] = BlockPlan(f"{name}{number}", kind, size, torch.int8)
        uses: tuple[tuple[str, Mode], ...] = ((f"w{number}", "rw"), (f"m{number}", "rw"), (f"g{number}", "r"))
        ticks.append(Tick("update", number, uses[:1], (uses[1:],), frozenset([f"g{number}"])))
        ticks.append(Tick("forward", number, ((f"w{number}", "r"),)))
    ticks += [Tick("backward", n, ((f"w{n}", "r"),), (((f"g{n}", "w"),),)) for n in reversed(range(count))]
    has_gpu = data.draw(st.booleans())
    steps = StepProgram(
        blocks, tuple(ticks), "gpu" if has_gpu else "ram", updates=GroupUpdates(in_compute_tier=has_gpu)
    )
    gpu, ram, drive = (data.draw(st.integers(80, 500)) for _ in range(3))
    residency = Residency(frozenset(("weights", "optimizer", "gradients")))
    bus = link_pair("gpu", "ram")
    tiers = [TierBudget("gpu", gpu, int, 7, residency=residency, links=bus)] if has_gpu else []
    tiers.append(TierBudget("ram", ram, int, 5, filling_bytes=60))
    tiers.append(TierBudget("nvme", drive, int, generations=2, links=LINKS, is_addressable=False))

    def solved(solver: PlacementSolver, room: Mapping[str, int]) -> object:
        settled = solver.assign(room)
        return settled if isinstance(settled, Shortfall) else solver.describe(settled)

    rooms = [{"ram": data.draw(st.integers(0, 100))} for _ in range(2)]
    solver = PlacementSolver(steps, tiers, EITHER, None, 0.9)
    for room in rooms:
        with mock.patch("megatrain.plan.placement._HomeState._is_too_full", return_value=False):
            expected = solved(PlacementSolver(steps, tiers, EITHER, None, 0.9), room)
        assert solved(solver, room) == expected


def test_few_blocks_are_moved_on_trial_to_a_full_tier() -> None:
    """A trial adds the block's bytes and subtracts them again. With a trial per block, planning would be slow."""
    blocks = {f"w{number}": BlockPlan(f"w{number}", "weights", 100, torch.int8) for number in range(50)}
    ticks = tuple(Tick("forward", number, ((key, "r"),)) for number, key in enumerate(blocks))
    with mock.patch.object(WorkingSets, "add", autospec=True, side_effect=WorkingSets.add) as changes:
        placement = solve(StepProgram(blocks, ticks, "ram"), 1000, EITHER)
    num_moved = list(placement.homes.values()).count("ram")
    num_trials = 2  # of the blocks in the fullest two ticks
    assert num_moved == 8 and changes.call_count == num_moved + 2 * num_trials
