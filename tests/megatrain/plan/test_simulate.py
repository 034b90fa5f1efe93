"""A simulated step moves the planned bytes. Its time is between the maximum and the sum of compute and I/O time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.rates import make_machine
from megatrain.config import load_config
from megatrain.machine.planned_machine import find_machine
from megatrain.machine.profiles import store_profile
from megatrain.plan.plan import Plan
from megatrain.plan.planner import plan_run
from megatrain.plan.simulate import (
    SimulatedRates,
    SimulatedStep,
    measured_rates,
    replay,
    simulate_step,
    step_seconds,
)
from megatrain.plan.times import MeasuredTicks
from megatrain.plan.traffic import Traffic
from megatrain.training.resolve import resolve
from oracles.tiered_run import EXAMPLES, config_text

ALL_NVME = 'weights = ["nvme"]\ngradients = ["nvme"]\noptimizer = ["nvme"]\nactivations = ["nvme"]'
TOKENS = 2 * 3 * 64


def make_plan(folder: Path, *, nvme: int = 1, **tables: str) -> Plan:
    text = config_text(folder, EXAMPLES / "quickstart" / "model", nvme=nvme, **tables)
    (folder / "run.toml").write_text(text)
    return plan_run(resolve(load_config(folder / "run.toml").config))


def rates(*, nvme: float = 1e9, flops: float = 1e10) -> SimulatedRates:
    return SimulatedRates(nvme_bytes_per_s=nvme, flops_per_s=flops, update_params_per_s=5e8)


@pytest.mark.parametrize(
    "tables",
    [
        {"placement": ALL_NVME},
        {"placement": 'optimizer = ["nvme"]'},
        {"placement": ALL_NVME, "advanced": 'micro_batch_order = "micro_batch"'},
        {"ram": "5500KiB"},
    ],
)
def test_replayed_traffic_equals_the_plan(tables: dict[str, Any], tmp_path: Path) -> None:
    plan = make_plan(tmp_path, **tables)
    step = simulate_step(plan, TOKENS, rates())
    assert step.moved_bytes == plan.traffic
    assert step.prefetch_wasted == 0
    io_s = sum(plan.traffic.values()) / 1e9
    assert max(step.compute_s, io_s) * 0.999 <= step.step_s <= (step.compute_s + io_s) * 1.001
    assert step.step_s == pytest.approx(step.compute_s + sum(step.stall_s.values()))


@pytest.mark.parametrize(("gpu", "placement"), [("16MiB", ALL_NVME), ("12MiB", ""), ("32MiB", "")])
def test_device_tier_is_replayed(gpu: str, placement: str, tmp_path: Path) -> None:
    plan = make_plan(tmp_path, placement=placement, gpu=gpu, ram="7MiB")
    assert plan.tiers == ("gpu", "ram", "nvme")
    assert simulate_step(plan, TOKENS, rates()).moved_bytes == plan.traffic


def test_host_updates_overlap_queued_kernels(tmp_path: Path) -> None:
    waiting = make_plan(
        tmp_path, placement='optimizer = ["ram"]\nweights = ["ram"]\ngradients = ["ram"]', gpu="12MiB", nvme=0
    )
    queued = replace(waiting, run=replace(waiting.run, device=torch.device("cuda")))
    fast_bus = replace(rates(), bus_bytes_per_s=1e15)
    updates_s = waiting.updates.num_weights(on_gpu=False) / fast_bus.update_params_per_s
    one_by_one, beside = (simulate_step(plan, TOKENS, fast_bus) for plan in (waiting, queued))
    assert updates_s > 0 and one_by_one.moved_bytes == beside.moved_bytes
    assert max(updates_s, one_by_one.step_s - updates_s) <= beside.step_s < one_by_one.step_s


def test_with_a_fast_drive_a_step_is_its_computing(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, placement=ALL_NVME)
    step = simulate_step(plan, TOKENS, rates(nvme=1e15))
    assert step.step_s == pytest.approx(step.compute_s, rel=1e-3)


def test_more_ram_never_slows_a_step_noticeably(tmp_path: Path) -> None:
    seconds = [
        simulate_step(make_plan(tmp_path, placement=ALL_NVME, ram=ram), TOKENS, rates()).step_s
        for ram in ("5500KiB", "8MiB", "16MiB")
    ]
    for less_room, more_room in pairwise(seconds):
        assert 0.9 * less_room < more_room <= 1.02 * less_room


def test_step_in_ram_has_no_stalls(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, nvme=0)
    step = simulate_step(plan, TOKENS, rates())
    assert step.step_s == step.compute_s and not step.stall_s


def test_summary_of_a_replayed_step() -> None:
    step = SimulatedStep(2.5, 1.5, {"nvme": 0.7, "ranks": 0.3}, 12.4, 3.0, 1.0, {})
    text = "replayed step   2.50 s: computing 1.50 s, waiting: nvme 0.70 s  ranks 0.30 s; fetched ahead: "
    assert step.line == f"{text}12 copies in time, 3 late, 1 unused"
    none = replace(step, stall_s={}, prefetch_on_time=0.0, prefetch_late=0.0, prefetch_wasted=0.0)
    waiting = "waiting: nothing; fetched ahead: 0 copies in time, 0 late, 0 unused"
    assert none.line == f"replayed step   2.50 s: computing 1.50 s, {waiting}"


def test_rate_of_each_storage_tier() -> None:
    found = replace(rates(nvme=3.0), others_bytes_per_s={"folder": 5.0})
    assert [found.storage_rate(tier) for tier in ("nvme", "folder", "other")] == [3.0, 5.0, 1e12]


def timed(plan: Plan) -> tuple[Plan, float]:
    """Return the plan with ticks that took 1, 2, 3 ... ms, and the seconds of a step that does not wait."""
    seconds = tuple((index + 1) / 1000 for index in range(len(plan.program.ticks)))
    return replace(plan, ticks=MeasuredTicks(seconds, 0.25, 3, 3, False, 1)), sum(seconds) + 0.25


def test_timed_ticks_are_replayed_as_they_are(tmp_path: Path) -> None:
    """Each copy to or from a drive takes time of the step's thread, and its bytes delay the computing."""
    in_ram, step_s = timed(make_plan(tmp_path, nvme=0))
    found = simulate_step(in_ram, 5 * TOKENS, rates())
    assert (found.step_s, found.compute_s) == pytest.approx((step_s, step_s)) and not found.stall_s
    plan, step_s = timed(make_plan(tmp_path, placement=ALL_NVME, training='recompute = "full"'))
    fast = rates(nvme=1e15)
    assert simulate_step(plan, TOKENS, fast).step_s == pytest.approx(step_s, rel=1e-5)
    placement = plan.placement
    traffic = Traffic(plan.program, placement.routes, placement.homes, placement.stays)
    num_copies = traffic.num_transfers("nvme")
    found = simulate_step(plan, TOKENS, replace(fast, seconds_per_nvme_copy=1e-3))
    assert found.step_s == pytest.approx(step_s + num_copies * 1e-3, rel=1e-5)
    drive = rates(nvme=1e9)
    moved = sum(plan.traffic.values())
    found = simulate_step(plan, TOKENS, replace(drive, computing_s_per_nvme_byte=2e-9))
    alone = simulate_step(plan, TOKENS, drive)
    # Parts of copies that begin between two ticks are not counted.
    assert alone.compute_s == pytest.approx(step_s)
    assert alone.compute_s < found.compute_s <= alone.compute_s + 2e-9 * moved


def test_replay_uses_the_rates_behind_the_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    unknown = make_plan(tmp_path, nvme=0, training='recompute = "full"')
    assert replay(unknown) is None and step_seconds(unknown) is None
    store_profile(make_machine(tmp_path))
    plan = make_plan(tmp_path, nvme=0, training='recompute = "full"')
    found, known = replay(plan), measured_rates(plan)
    assert found is not None and known is not None and plan.estimate.step_s is not None
    assert found == simulate_step(plan, TOKENS, known) and step_seconds(plan) == found.step_s
    assert found.step_s == pytest.approx(plan.estimate.step_s, rel=1e-3)  # no block moves
    twice = replay(plan, 2 * TOKENS)
    assert twice == simulate_step(plan, 2 * TOKENS, known) != found
    elsewhere = replace(plan, run=replace(plan.run, tiers=replace(plan.run.tiers, machine=find_machine("gh200"))))
    assert step_seconds(elsewhere) == plan.estimate.step_s
