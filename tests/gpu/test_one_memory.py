"""Runs on a GPU that shares the host's memory.

Such runs have one tier for this memory, and copy nothing within it. Results are bit-identical to
results on a discrete GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from fakes.gpu_run import GPU_TIER_BYTES, gpu_config_text, virtual_gpu
from fakes.twins import Twins
from fakes.virtual_cuda import VirtualCuda
from megatrain.base.errors import ConfigError
from megatrain.config import load_config
from megatrain.machine import this_machine
from megatrain.machine.planned_machine import find_machine
from megatrain.machine.resources import TierSpecs
from megatrain.plan.planner import plan_run
from megatrain.ranks import collectives
from megatrain.ranks.world import World
from megatrain.training.resolve import resolve, resolve_tiers
from megatrain.training.trainer import Trainer
from oracles.tiered_run import config_text, make_loader, run_config
from processes.saved_run import NVME, make_run
from tiered import GiB, MiB

ALL_ON_DRIVE = "".join(f'{kind} = ["nvme"]\n' for kind in ("weights", "optimizer", "activations", "gradients"))
CHECKED = {"tiers": 'verify = "always"', "precision": 'compute_dtype = "bfloat16"'}
CASES = {
    "all on a drive": {"placement": ALL_ON_DRIVE, **CHECKED},
    "in memory": {},
    "state on a drive": {"placement": 'optimizer = ["nvme"]'},
    "updates by the host": {
        "placement": 'optimizer = ["nvme"]',
        "optimizer": 'optim = "muon"\nmax_grad_norm = 0\n' + 'nonfinite = "ignore"',
    },
}


@pytest.fixture
def integrated() -> Iterator[VirtualCuda]:
    with virtual_gpu(is_integrated=True) as device:
        yield device


def assert_shared_memory_run_matches(model: Path, folder: Path, **tables: str) -> None:
    tables = {"precision": 'compute_dtype = "float32"', **tables}
    with virtual_gpu():
        text = gpu_config_text(folder / "two", model, gpu_bytes=GPU_TIER_BYTES, **tables)
        two = run_config(text, folder / "two", num_steps=3)
    with virtual_gpu(is_integrated=True):
        one = run_config(config_text(folder / "one", model, device="cuda", **tables), folder / "one", num_steps=3)
    one.assert_as_planned()
    one.assert_same(two)
    assert one.plan.program.compute_tier == "ram" and "gpu" not in one.plan.budgets
    assert one.moved is not None
    moved = {link for link, stats in one.moved.links.items() if stats.num_bytes}
    assert moved == ({"nvme->ram", "ram->nvme"} if "nvme" in tables.get("placement", "") else set())


@pytest.mark.slow  # tests/pairs covers shared memory
@pytest.mark.parametrize("case", CASES)
def test_shared_memory_runs_match_a_discrete_gpu(case: str, tiny_model: Path, tmp_path: Path) -> None:
    assert_shared_memory_run_matches(tiny_model, tmp_path, **CASES[case])


@pytest.mark.slow
def test_updates_without_a_gpu_kernel_run_on_the_host(tiny_model: Path, tmp_path: Path) -> None:
    assert_shared_memory_run_matches(tiny_model, tmp_path, **CASES["updates by the host"])


@pytest.mark.usefixtures("integrated")
def test_command_trains_stops_and_resumes(tmp_path: Path) -> None:
    """The run trains adapters. Base weights are read from the model folder into the shared memory."""
    run = make_run(tmp_path / "run")
    lora = '[lora]\nr = 4\ntarget_modules = ["q_proj", "v_proj"]\n'
    places = 'optimizer = ["nvme"]\nweights = ["folder", "ram"]\n'
    values = {"device": "cuda", "dtype": "bfloat16", "placement": places, "more": NVME + lora}
    whole = run.run(steps=3, out="whole", **values)
    assert whole.exit_code == 0, whole.output
    for steps in (2, 3):
        done = run.run("--max-steps", str(steps), steps=3, **values)
        assert done.exit_code == 0, done.output
    rows = [
        [json.loads(row) for row in (run.folder / out / "metrics.jsonl").read_text().splitlines()]
        for out in ("whole", "out")
    ]
    losses = [[row["loss"] for row in found if "event" not in row] for found in rows]
    assert losses[0] == losses[1] and len(losses[0]) == 3
    summary = json.loads((run.folder / "whole/summary.json").read_text())["ends"][-1]
    assert set(summary["tier_capacity_bytes"]) == {"ram", "folder", "nvme"}
    assert summary["link_bytes"]["folder->ram"] > 0 < summary["link_bytes"]["nvme->ram"]
    assert 0 < summary["tier_peak_bytes"]["ram"] <= summary["tier_capacity_bytes"]["ram"]


def two_ranks(folder: Path, text: str) -> list[tuple[float, float | None]]:
    """Train as rank 0 of two simulated ranks. Return the loss and gradient norm of each step."""
    folder.mkdir()
    text = text.replace("gradient_accumulation_steps = 3", "gradient_accumulation_steps = 4")
    (folder / "run.toml").write_text(text)
    config, world = load_config(folder / "run.toml").config, World.local(0, 2)
    plan, found = plan_run(replace(resolve(config), world=world)), []
    loader = make_loader(config, plan)
    with mock.patch.object(collectives, "Collectives", Twins.of(world)), Trainer(config, plan=plan).open() as trainer:
        trainer.load()
        engine = trainer.make_engine(2)
        for number in range(2):
            result = engine.step(next(loader).micro_batches, step_index=number, lr=1e-3)
            found.append((result.loss, result.grad_norm))
        engine.finish_updates()
    return found


@pytest.mark.slow
def test_shared_memory_ranks_match_discrete_gpu_losses(tiny_model: Path, tmp_path: Path) -> None:
    with virtual_gpu():
        two = two_ranks(tmp_path / "two", gpu_config_text(tmp_path / "two", tiny_model, nvme=0))
    with virtual_gpu(is_integrated=True):
        one = two_ranks(tmp_path / "one", config_text(tmp_path / "one", tiny_model, device="cuda", nvme=0))
    assert one == two


def specs_of(folder: Path, tiers: str = "") -> TierSpecs:
    (folder / "run.toml").write_text(
        f'task = "pretrain"\noutput_dir = "out"\ndevice = "cuda"\n[model]\nmodel_name_or_path = "model"\n'
        f'[[data.train]]\npath = "text.txt"\n{tiers}'
    )
    return resolve_tiers(load_config(folder / "run.toml").config)


@pytest.mark.usefixtures("integrated")
def test_a_tenth_of_the_memory_is_reserved_for_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "total_ram_bytes", lambda: 120 * GiB)
    monkeypatch.setattr(this_machine, "available_ram_bytes", lambda: 115 * GiB)
    cuda = torch.device("cuda")
    specs = specs_of(tmp_path)
    assert specs.compute_tier(cuda) == "ram" == specs.compute_tier(torch.device("cpu"))
    assert specs.ram_capacity_bytes() == specs.gpu_capacity_bytes(cuda) == 103 * GiB
    with pytest.raises(ConfigError, match=r'tiers\.ram\.size = "112GiB".*one memory.*at most "108GiB"'):
        specs_of(tmp_path, '[tiers.ram]\nsize = "112GiB"\n').ram_capacity_bytes()


@pytest.mark.usefixtures("integrated")
def test_sized_gpu_tier_uses_the_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with ``tiers.gpu.size`` copies blocks as on any other GPU. Both tiers must fit into the shared memory."""
    monkeypatch.setattr(this_machine, "total_ram_bytes", lambda: 120 * GiB)
    monkeypatch.setattr(this_machine, "available_ram_bytes", lambda: 115 * GiB)
    specs = specs_of(tmp_path, '[tiers.gpu]\nsize = "60GiB"\n')
    assert specs.compute_tier(torch.device("cuda")) == "gpu"
    assert specs.ram_capacity_bytes() == 43 * GiB
    with pytest.raises(ConfigError, match=r'tiers\.ram\.size = "60GiB" and tiers\.gpu\.size = "60GiB"'):
        specs_of(tmp_path, '[tiers.ram]\nsize = "60GiB"\n[tiers.gpu]\nsize = "60GiB"\n').ram_capacity_bytes()


def test_shared_memory_plan_has_one_tier_without_traffic(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        config_text(tmp_path, tiny_model, nvme=0, ram="auto").replace('device = "cpu"', 'device = "auto"')
    )
    spark = find_machine("dgx-spark")
    plan = plan_run(resolve(load_config(tmp_path / "run.toml").config, spark))
    assert set(plan.budgets) == {"ram"} and not any(plan.traffic.values())
    assert spark.has_unified_memory and spark.ram.total == spark.gpu_memory(plan.device).total
    assert plan.budgets["ram"] == spark.ram.free - spark.ram.total // 10 > 100 * GiB > 2 * MiB
    apart = plan_run(resolve(load_config(tmp_path / "run.toml").config, find_machine("gh200")))
    assert "gpu" in apart.budgets
