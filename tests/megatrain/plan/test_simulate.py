"""A simulated step moves the planned bytes. Its time is between the maximum and the sum of compute and I/O time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.config import load_config
from megatrain.plan.plan import Plan
from megatrain.plan.planner import plan_run
from megatrain.plan.simulate import SimulatedRates, simulate_step
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
