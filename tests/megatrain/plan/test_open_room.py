"""RAM left open for copies: none if everything fits, a tenth by default, the fastest amount if rates are known."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest

from megatrain.config import load_config
from megatrain.machine.file_systems import file_system_of
from megatrain.machine.profiles import DriveProfile, LoadedProfile, MachineProfile, cpu_name
from megatrain.machine.this_machine import ThisMachine
from megatrain.plan.plan import Plan
from megatrain.plan.planner import plan_run
from megatrain.plan.search import WORTHWHILE, with_open_room
from megatrain.plan.simulate import measured_rates, simulate_step
from megatrain.training.resolve import resolve
from oracles.tiered_run import EXAMPLES, config_text
from tiered import MiB


def make_plan(folder: Path, ram: str, **tables: str) -> Plan:
    (folder / "run.toml").write_text(config_text(folder, EXAMPLES / "quickstart" / "model", ram=ram, **tables))
    return plan_run(resolve(load_config(folder / "run.toml").config))


def profile(folder: Path, *, drive: float, flops: float = 1e11) -> LoadedProfile:
    now = datetime.now(UTC)
    rates = dict.fromkeys(
        ("read", "write", "mixed"),
        drive,
    )
    measured = DriveProfile(
        path=str(folder),
        filesystem="ext4",
        measured_at=now,
        is_quick=True,
        is_direct=True,
        **{f"{name}_bytes_per_s": rate for name, rate in rates.items()},  # type: ignore[arg-type]
    )
    machine = MachineProfile(
        host="here",
        cpu=cpu_name(),
        ram_bytes=psutil.virtual_memory().total,
        measured_at=now,
        is_quick=True,
        num_threads=2,
        ram_update_bytes_per_s=2e10,
        adamw_params_per_s={"float32": 1e9, "bfloat16": 1e9},
        matmul_flops_per_s={"cpu/float32": flops},
        drives={file_system_of(folder).key: measured},
    )
    return LoadedProfile(machine)


def test_no_memory_is_reserved_if_everything_fits(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, "64MiB")
    assert not any(plan.traffic.values())


def test_a_tenth_stays_open_without_measurements(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, "10MiB")
    assert 0.85 * 10 * MiB < plan.totals["ram"] <= 0.9 * 10 * MiB
    assert plan.placement.homes == next(with_open_room(plan, LoadedProfile(None))).placement.homes


@pytest.mark.parametrize("drive", [2e7, 5e8, 1e10])
def test_no_other_share_is_faster_with_measurements(
    drive: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ThisMachine, "rates", lambda machine: profile(tmp_path, drive=drive))
    plan = make_plan(tmp_path, "10MiB")
    rates = measured_rates(plan)
    assert rates is not None
    steps_s = [
        simulate_step(other, 2 * 3 * 64, rates).step_s for other in with_open_room(plan, profile(tmp_path, drive=drive))
    ]
    assert min(steps_s) <= simulate_step(plan, 2 * 3 * 64, rates).step_s <= min(steps_s) / WORTHWHILE


def test_minimum_ram_size_still_fits(tmp_path: Path) -> None:
    need = 5500 * 1024
    assert 0.9 * need < make_plan(tmp_path, f"{need}B").totals["ram"] <= need


@pytest.mark.parametrize(("drive", "flops", "saves"), [(1e11, 1e9, True), (1e7, 1e13, False)])
def test_results_are_saved_next_to_moving_blocks_if_faster(
    drive: float, flops: float, saves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saving results pays off with a fast drive and a slow processor. It is never done on a drive, because of wear."""
    monkeypatch.setattr(ThisMachine, "rates", lambda machine: profile(tmp_path, drive=drive, flops=flops))
    state = {"placement": 'optimizer = ["nvme"]'}
    plan = make_plan(tmp_path, "40MiB", **state)
    assert any(plan.traffic.values())
    assert plan.program.recompute.saved_results == (frozenset({1, 2, 3, 4}) if saves else frozenset())
    assert not plan.program.recompute.saved_attention
    path = tmp_path / "run.toml"
    path.write_text(path.read_text().replace("[model]", '[model]\ncompile = true\ncompile_backend = "eager"', 1))
    compiled = plan_run(resolve(load_config(path).config))
    assert not compiled.program.recompute.saving_visits, "a compiled layer is recomputed whole"
    on_drive = make_plan(tmp_path, "12MiB", placement='optimizer = ["nvme"]\nactivations = ["nvme"]')
    assert not on_drive.program.recompute.saved_results
    beside = make_plan(tmp_path, "20MiB", placement='optimizer = ["nvme"]', training='recompute = "none:1"')
    assert beside.program.recompute.kept_graphs == {4, 5} and any(beside.traffic.values())
    assert not beside.program.recompute.saving_visits, "with an explicit number, other layers are recomputed whole"


@pytest.mark.parametrize(("ram", "num_layers"), [("14MiB", 1), ("18MiB", 3)])
def test_number_of_layers_that_save_results_is_optimal(
    ram: str, num_layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chosen number of layers has the shortest step among all numbers that add almost no drive writes."""
    monkeypatch.setattr(ThisMachine, "rates", lambda machine: profile(tmp_path, drive=1e10, flops=1e9))

    def written(recompute: str) -> Plan:
        return make_plan(tmp_path, ram, training=f'recompute = "{recompute}"', placement='optimizer = ["nvme"]')

    def step_s(plan: Plan) -> float:
        rates = measured_rates(plan)
        assert rates is not None
        return simulate_step(plan, 2 * 3 * 64, rates).step_s

    found, none = written("auto"), written("full")
    each = [none, *(written(f"selective:{count}") for count in (1, 2, 3, 4))]
    allowed = [plan for plan in each if plan.traffic["ram->nvme"] <= 1.1 * none.traffic["ram->nvme"]]
    assert step_s(found) == min(map(step_s, allowed))
    assert len(found.program.recompute.saved_results) == num_layers == len(allowed) - 1
    assert 0.8 * found.budgets["ram"] < found.totals["ram"] <= found.budgets["ram"]
