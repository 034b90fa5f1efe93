"""Resident blocks in GPU memory: the counted traffic is exact, and a group becomes resident as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from fakes.rates import make_machine
from megatrain.config import load_config
from megatrain.engine.program.step_program import StepProgram
from megatrain.machine.planned_machine import find_machine
from megatrain.machine.profiles import LoadedProfile, MachineProfile
from megatrain.plan import planner
from megatrain.plan.budgets import with_residents
from megatrain.plan.placement import PlacementSolver
from megatrain.plan.plan import Plan
from megatrain.plan.planner import plan_run
from megatrain.plan.residents import Residency, ResidentChooser
from megatrain.plan.run_spec import RunSpec
from megatrain.plan.run_tiers import link_pair
from megatrain.plan.show import messages
from megatrain.plan.stays import choose_stays
from megatrain.plan.times import Estimate
from megatrain.plan.traffic import Traffic
from megatrain.training.resolve import resolve
from oracles.tiered_run import EXAMPLES, config_text
from processes.saved_run import command_group
from tiered.hops import Routes
from tiered.units import format_size

MODEL = EXAMPLES / "quickstart" / "model"
NO_CHECKS = 'max_grad_norm = 0\nnonfinite = "ignore"'
ALL_KINDS = frozenset({"weights", "optimizer", "gradients", "activations"})
#: Forms of the program: updates before the forward or during the backward, both orders, and both weight formats.
FORMS: dict[str, dict[str, str]] = {
    "usual": {},
    "bfloat16": {"precision": 'compute_dtype = "bfloat16"'},
    "updates at once": {"optimizer": NO_CHECKS},
    "micro-batch-major": {"advanced": 'micro_batch_order = "micro_batch"'},
}


def make_plan(folder: Path, gpu: str = "64MiB", **tables: str) -> Plan:
    (folder / "run.toml").write_text(config_text(folder, MODEL, nvme=0, gpu=gpu, **tables))
    return plan_run(resolve(load_config(folder / "run.toml").config))


def bus_bytes(program: StepProgram, homes: Mapping[str, str]) -> int:
    """Return the bytes that a step moves between GPU and RAM if copies stay only from one tick to the next."""
    sizes = {tier: (lambda nbytes: nbytes) for tier in ("gpu", "ram")}
    stays = choose_stays(program, homes, sizes, {tier: [0] * len(program.ticks) for tier in sizes})
    within_a_step = {(start, key): stop for (start, key), stop in stays.items() if stop > start}
    return sum(Traffic(program, Routes(link_pair("gpu", "ram")), homes, within_a_step).step_bytes().values())


def homes_after(program: StepProgram, room: int, residency: Residency) -> dict[str, str]:
    """Return the homes that the chooser selects if GPU memory has ``room`` bytes and holds nothing else."""
    homes = dict.fromkeys(program.blocks, "ram")

    def try_move(keys: object) -> bool:
        wanted = {*(key for key, tier in homes.items() if tier == "gpu"), *keys}  # type: ignore[misc]
        if sum(program.blocks[key].nbytes for key in wanted) > room:
            return False
        homes.update(dict.fromkeys(wanted, "gpu"))
        return True

    ResidentChooser(program, residency, lambda nbytes: nbytes).choose(homes, try_move)
    return homes


@pytest.mark.parametrize("form", FORMS)
def test_costs_of_alike_candidates_are_equal(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal layers share one computed cost. The homes are the same as with separately computed costs."""
    program = make_plan(tmp_path, **FORMS[form]).program
    rooms = [sum(block.nbytes for block in program.blocks.values()) * tenths // 10 for tenths in (2, 5, 8)]
    residency = Residency(ALL_KINDS, 1e-9, 1e-8)
    found = [homes_after(program, room, residency) for room in rooms]
    assert len({tuple(homes.values()) for homes in found}) == len(rooms)
    monkeypatch.setattr(ResidentChooser, "_cached_cost", lambda self, _, keys, homes: self._cost(keys, homes))
    assert found == [homes_after(program, room, residency) for room in rooms]


@pytest.mark.parametrize("form", FORMS)
def test_every_chosen_move_saves_its_estimate(form: str, tmp_path: Path) -> None:
    """Each move reduces the traffic of a step, and the traffic equals the bytes that the chooser counts."""
    program = make_plan(tmp_path, **FORMS[form]).program
    homes = dict.fromkeys(program.blocks, "ram")
    chooser = ResidentChooser(program, Residency(ALL_KINDS), lambda nbytes: nbytes)
    moved = [bus_bytes(program, homes)]

    def move(keys: object) -> bool:
        homes.update(dict.fromkeys(keys, "gpu"))  # type: ignore[call-overload]
        moved.append(bus_bytes(program, homes))
        assert moved[-1] < moved[-2], keys
        assert moved[-1] == sum(
            chooser._load([key], homes, chooser._new_tick_tiers(list(program.blocks), homes))[0]
            for key in program.blocks
        )
        return True

    chooser.choose(homes, move)
    assert len(moved) > 5
    assert moved[-1] == 0
    left = {program.blocks[key].kind for key, tier in homes.items() if tier == "ram"}
    assert left <= ({"gradients"} if form == "updates at once" else set())


@pytest.mark.parametrize("form", FORMS)
def test_optimizer_state_is_resident_only_with_its_weights(form: str, tmp_path: Path) -> None:
    program = make_plan(tmp_path, **FORMS[form]).program
    total = sum(block.nbytes for block in program.blocks.values())
    for share in (0.1, 0.3, 0.5, 0.8):
        homes = homes_after(program, int(share * total), Residency(ALL_KINDS))
        for tick in program.ticks:
            if tick.phase == "update":
                lasting = [key for key, _ in tick.held if key not in tick.spent]
                state = {homes[key] for key in lasting if program.blocks[key].kind == "optimizer"}
                assert state == {"ram"} or {homes[key] for key in lasting} == {"gpu"}
                assert (program.tick_tier(tick, homes) == "gpu") == (state == {"gpu"})


def test_shared_gradient_blocks_move_with_the_first_group(tmp_path: Path) -> None:
    """A visit runs between a backward and its update, so a gradient with another home would be moved away and back."""
    program = make_plan(tmp_path, optimizer=NO_CHECKS).program
    blocks = program.blocks.values()
    lasting = sum(block.nbytes for block in blocks if block.kind in ("weights", "optimizer"))
    homes = homes_after(program, lasting, Residency(frozenset({"weights", "optimizer", "gradients"})))
    updates = [tick for tick in program.ticks if tick.phase == "update"]
    assert sum(program.tick_tier(tick, homes) == "gpu" for tick in updates) == len(updates) - 1
    for number, key in program.occupants:
        if program.tick_tier(program.ticks[number], homes) == "gpu" and program.ticks[number].phase == "update":
            assert homes[key] == "gpu"


def test_update_scratch_in_ram_can_prioritize_groups(tmp_path: Path) -> None:
    program = make_plan(tmp_path, training='recompute = "full"').program
    room = sum(block.nbytes for block in program.blocks.values() if block.kind == "activations")
    by_bytes = homes_after(program, room, Residency(ALL_KINDS))
    slow_updates = Residency(ALL_KINDS, bus_s_per_byte=1e-11, host_update_s_per_element=1e-8)
    by_seconds = homes_after(program, room, slow_updates)
    kinds = [{program.blocks[key].kind for key in h if h[key] == "gpu"} for h in (by_bytes, by_seconds)]
    assert kinds[0] == {"activations"}
    assert {"weights", "optimizer"} <= kinds[1]


def test_rules_for_resident_blocks_follow_from_the_rates(tmp_path: Path) -> None:
    """A byte crosses the bus in one of two directions. Without rates, blocks are ranked by bytes."""
    plan = make_plan(tmp_path, training='recompute = "full"')
    run, program = plan.run, plan.program
    budgets = {name: replace(each, residency=None, filling_bytes=0) for name, each in plan.budgets_by_tier.items()}

    def rules(profile: MachineProfile | None, program: StepProgram = program, run: RunSpec = run) -> Residency | None:
        found = with_residents(budgets, run, program, profile)
        ram = replace(budgets["ram"], filling_bytes=4 * 174_080)  # the weights of a layer
        assert found == {"gpu": replace(budgets["gpu"], residency=found["gpu"].residency), "ram": ram}
        return found["gpu"].residency

    gpu = {"name": "some", "memory_bytes": 1 << 30, "h2d_bytes_per_s": 2e9, "d2h_bytes_per_s": 1e9}
    rates = {"adamw_params_per_s": {"float32": 1e8, "int8": 4e8}}
    machine = make_machine(tmp_path, gpu=gpu, **rates)
    assert rules(None) == Residency(ALL_KINDS) == Residency(ALL_KINDS, 1.0, 0.0) == rules(make_machine(tmp_path))
    assert rules(machine) == Residency(ALL_KINDS, 0.25e-9 + 0.5e-9, 1e-8)
    unknown = make_machine(tmp_path, gpu=gpu, adamw_params_per_s={"bfloat16": 1e8})
    assert rules(unknown) == Residency(ALL_KINDS, 0.25e-9 + 0.5e-9, 0.0)
    lion = replace(run, optimizer=run.optimizer.model_copy(update={"optim": "lion"}))
    assert rules(machine, run=lion) == Residency(ALL_KINDS, 0.25e-9 + 0.5e-9, 0.0)
    on_host = replace(program, updates=replace(program.updates, in_compute_tier=False))
    assert rules(machine, on_host) == Residency(ALL_KINDS - {"optimizer"}, 0.25e-9 + 0.5e-9, 1e-8)
    in_ram = with_residents(budgets, run, replace(program, compute_tier="ram"), machine)
    assert in_ram["gpu"] == budgets["gpu"] and in_ram["ram"].residency is None


def test_streamed_updates_balance_the_bus_and_the_processor(tmp_path: Path) -> None:
    """All six groups are in RAM. The bus brings weights, state and gradients, and takes all but the gradients."""
    in_ram = 'weights = "ram"\noptimizer = "ram"\ngradients = "ram"'
    plan = make_plan(tmp_path, gpu="12MiB", placement=in_ram, training='recompute = "full"')
    for count, visits in ((1, {3}), (2, {1, 4}), (3, {1, 3, 5}), (9, set(range(6)))):
        assert planner._with_streamed_updates(plan, count).updates.streamed == visits
    on_host = replace(plan.program, updates=replace(plan.program.updates, in_compute_tier=False))
    for program in (on_host, replace(plan.program, compute_tier="ram")):
        assert planner._with_streamed_updates(replace(plan, program=program), 1) == program

    weights, embedding = 4 * (131_072 + 4 * 174_080 + 1024), 4 * 131_072  # the embedding has two gradients
    plan = replace(plan, estimate=replace(plan.estimate, seconds={"optimizer": 1.0}))

    def counts(down_s: float, up_s: float, plan: Plan = plan, update: float | None = 1.0) -> list[int]:
        """Return the numbers of streamed groups in the order in which they are tried."""
        rates = {"h2d_bytes_per_s": (4 * weights + embedding) / down_s, "d2h_bytes_per_s": 3 * weights / up_s}
        gpu = {"name": "some", "memory_bytes": 1, "update_bytes_per_s": update, **rates}
        found = planner._plans_with_streamed_updates(plan, LoadedProfile(make_machine(tmp_path, gpu=gpu)))
        return list(dict.fromkeys(len(other.program.updates.streamed) for other in found))

    assert [counts(1.0, 0.5), counts(0.5, 1.0)] == [[3, 1], [3, 1]]  # half of the groups
    assert [counts(2.0, 1.0), counts(1.0, 5.0), counts(0.2, 0.1), counts(50.0, 1.0)] == [[2, 1], [1], [5, 2], []]
    assert counts(1.0, 1.0, update=None) == counts(1.0, 1.0, replace(plan, estimate=Estimate(1, {}))) == []
    tiers = replace(plan.run.tiers, machine=find_machine("gh200"))
    assert counts(1.0, 1.0, replace(plan, run=replace(plan.run, tiers=tiers))) == []
    for profile in (make_machine(tmp_path), None):
        assert not list(planner._plans_with_streamed_updates(plan, LoadedProfile(profile)))


def test_planning_is_deterministic(tmp_path: Path) -> None:
    first, again = (make_plan(tmp_path, gpu="12MiB") for _ in range(2))
    assert first.placement == again.placement


def test_gpu_holds_no_state_without_an_update_kernel(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, training='recompute = "full"')
    tiers = dict(plan.budgets_by_tier)
    tiers["gpu"] = replace(tiers["gpu"], residency=Residency(ALL_KINDS - {"optimizer"}))
    program = replace(plan.program, updates=replace(plan.program.updates, in_compute_tier=False))
    allowed = {kind: ["ram"] for kind in ALL_KINDS}
    placement = PlacementSolver(program, list(tiers.values()), allowed).solve()
    assert not placement.home_bytes["gpu"]["optimizer"] and placement.home_bytes["gpu"]["activations"]
    assert {program.tick_tier(tick, placement.homes) for tick in program.ticks if tick.phase == "update"} == {"ram"}


@pytest.mark.parametrize(
    ("gpu", "lines"),
    [
        (
            "64MiB",
            ["every block is resident in gpu: nothing is streamed", "6 of 6 groups of blocks, 100 % of the trained"],
        ),
        ("12MiB", ["moved per step  gpu->ram", "of gpu are prefetch room", "3 of 6 groups of blocks,"]),
    ],
)
def test_plan_lists_resident_blocks_of_the_gpu(gpu: str, lines: list[str], tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(config_text(tmp_path, MODEL, nvme=0, gpu=gpu))
    result = CliRunner().invoke(command_group(), ["plan", str(tmp_path / "run.toml")])
    assert result.exit_code == 0, result.output
    for line in lines:
        assert line in result.output, result.output


def test_homes_move_until_the_copy_buffers_of_the_moved_blocks_fit(tmp_path: Path) -> None:
    """After the open room has grown once, the moved blocks need buffers of other sizes, so it must grow again."""
    placement = make_plan(tmp_path, "7MiB").placement
    assert placement.buffers["gpu"] and not placement.missing_bytes


def test_plan_reports_the_bytes_of_copy_buffers(tmp_path: Path) -> None:
    """If the buffers of two ticks fit together, the plan has them. Otherwise, it reports the missing bytes."""
    in_ram = 'weights = ["ram"]\ngradients = ["ram"]\noptimizer = ["ram"]\nactivations = ["ram"]'
    tight, wide = (make_plan(tmp_path, gpu, placement=in_ram) for gpu in ("5MiB", "12MiB"))
    assert not tight.placement.buffers.get("gpu") and tight.placement.missing_bytes["gpu"] > 0
    text = next(text for text in messages(tight) if "are replaced by other sizes" in text)
    assert text.startswith("gpu: ") and format_size(tight.placement.missing_bytes["gpu"]) in text
    counts = wide.placement.buffers["gpu"]
    assert not wide.placement.missing_bytes and not any(
        "are replaced by other sizes" in text for text in messages(wide)
    )
    held = sum(size * count for size, count in counts.items()) + wide.placement.workspace_bytes["gpu"]
    assert 0.9 * wide.budgets["gpu"] < held <= wide.budgets["gpu"] and min(counts.values()) == 2
    more = make_plan(tmp_path, f"{tight.budgets['gpu'] + tight.placement.missing_bytes['gpu']}B", placement=in_ram)
    assert more.placement.buffers["gpu"] and not more.placement.missing_bytes
    less = make_plan(tmp_path, f"{more.budgets['gpu'] - 4096}B", placement=in_ram)
    assert not less.placement.buffers.get("gpu") and less.placement.missing_bytes == {"gpu": 4096}
