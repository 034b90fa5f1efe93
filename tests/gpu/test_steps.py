"""Steps on a GPU: the host does not wait within a step, memory does not grow, and compute-sanitizer finds no error."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from bench.gpu_sides.cases import SHAPES, merged, part_named
from bench.sides import Ours, run_config
from fakes.gpu_run import GPU_TIER_BYTES, gpu_config_text, no_waits_allowed
from fakes.virtual_cuda import VirtualCuda
from megatrain.config import load_config
from megatrain.engine.step import StepEngine
from megatrain.plan.planner import plan_run
from megatrain.training.resolve import resolve
from megatrain.training.trainer import Trainer
from oracles.tiered_run import make_loader
from processes import warm
from tiered import GpuTier, MiB, RamTier

ONE_STEP = Path(__file__).parent / "one_step.py"
ROOT = Path(__file__).parents[2]
ALL_RAM = 'weights = ["ram"]\ngradients = ["ram"]\noptimizer = ["ram"]\nactivations = ["ram"]'


@contextmanager
def engine_in(
    folder: Path, model: Path, num_steps: int, *, gpu_bytes: int = GPU_TIER_BYTES, **tables: str
) -> Iterator[tuple[StepEngine, Any, Trainer]]:
    """Yield an engine, its data loader and its trainer."""
    (folder / "run.toml").write_text(gpu_config_text(folder, model, gpu_bytes=gpu_bytes, **tables))
    config = load_config(folder / "run.toml").config
    plan = plan_run(resolve(config))
    with Trainer(config, plan=plan).open() as trainer:
        trainer.load()
        trainer.store.wait_idle()
        for optimizer in (plan.traced.optimizer, plan.traced.device_optimizer):
            if optimizer is not None:
                optimizer.warm_up()
        yield trainer.make_engine(num_steps), make_loader(config, plan), trainer


@pytest.mark.usefixtures("virtual")
@pytest.mark.parametrize("placement", ["", ALL_RAM], ids=["auto", "all in RAM"])
@pytest.mark.parametrize("packing", ["false", "true"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_host_waits_only_for_the_end_of_a_step(
    max_grad_norm: float, packing: str, placement: str, tiny_model: Path, tmp_path: Path
) -> None:
    """torch raises an error at every operation that waits. The final read waits for an event, which torch allows."""
    tables = {"optimizer": f"max_grad_norm = {max_grad_norm}", "data": f"packing = {packing}", "placement": placement}
    with engine_in(tmp_path, tiny_model, 6, **tables) as (engine, loader, _):
        for number in range(3):  # initializes libraries and allocates memory
            engine.step(next(loader).micro_batches, step_index=number, lr=1e-3)
        with no_waits_allowed():
            results = [engine.step(next(loader).micro_batches, step_index=n, lr=1e-3) for n in range(3, 6)]
        assert all(6 < result.loss < 7 and 1 < result.grad_norm < 5 for result in results)
        engine.finish_updates()


@pytest.mark.usefixtures("virtual")
def test_waits_are_allowed_again_after_no_waits_allowed() -> None:
    """Waits are allowed again even after the first ``no_waits_allowed`` block in a process.

    torch then warns after it has set the mode, and pytest turns the warning into an error.
    """
    number = torch.ones((), device="cuda")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"), no_waits_allowed():
            number.item()
        assert number.item() == 1


@pytest.mark.parametrize("placement", ["", ALL_RAM], ids=["auto", "all in RAM"])
def test_memory_is_constant_over_fifty_steps(
    placement: str, virtual: VirtualCuda | None, tiny_model: Path, tmp_path: Path
) -> None:
    num_steps, num_warm = (50, 10) if virtual is None else (12, 4)
    with engine_in(tmp_path, tiny_model, num_steps, placement=placement) as (engine, loader, trainer):
        tier = trainer.store.tier("gpu")
        assert isinstance(tier, GpuTier)
        warm, after = {}, {}
        for number in range(num_steps):
            engine.step(next(loader).micro_batches, step_index=number, lr=1e-3)
            if number + 1 in (num_warm, num_steps):
                (warm if number + 1 == num_warm else after).update(memory_of(tier))
        engine.finish_updates()
    rss = after.pop("rss") - warm.pop("rss")
    assert after == warm, "neither allocations nor drops after the first steps"
    assert rss <= 16 * MiB, rss


@pytest.mark.slow
@pytest.mark.parametrize(("gpu_bytes", "is_tight"), [(5 * MiB, True), (12 * MiB, False)])
def test_buffers_are_dropped_within_steps_only_if_memory_is_tight(
    gpu_bytes: int, is_tight: bool, virtual: VirtualCuda | None, tiny_model: Path, tmp_path: Path
) -> None:
    """The largest tick needs 4.1 MiB (5.2 MiB on a real GPU). If buffers of all sizes fit at once, steps reuse them."""
    if virtual is None and is_tight:
        gpu_bytes += MiB
    with engine_in(tmp_path, tiny_model, 4, gpu_bytes=gpu_bytes, placement=ALL_RAM) as (engine, loader, trainer):
        tier = trainer.store.tier("gpu")
        assert isinstance(tier, GpuTier)
        for number in range(4):
            engine.step(next(loader).micro_batches, step_index=number, lr=1e-3)
        engine.finish_updates()
        assert (tier.num_drops > 0) == is_tight  # which step drops buffers depends on the order in which copies end


@pytest.mark.slow
@pytest.mark.usefixtures("virtual")
@pytest.mark.parametrize(
    ("part", "layers", "gpu", "ram"),
    [
        # The numbers of dropped buffers per step are those without separate buffers for copies.
        ("20b_nvme+full_recompute+eager", 8, "32MiB", "36MiB"),  # seven RAM slabs
        ("7b_64k_equal", 28, "110MiB", "113MiB"),
        ("14b+full_recompute+eager", 48, "124MiB", "113MiB"),  # three GPU buffers
        ("20b_nvme+full_recompute+eager", 38, "126MiB", "113MiB"),  # seventeen RAM slabs
    ],
)
def test_steps_with_bench_shapes_allocate_nothing(part: str, layers: int, gpu: str, ram: str, tmp_path: Path) -> None:
    """Parameters, GPU memory and RAM are 1/1024 of the benchmark's."""
    case, tiers = part_named(part), {"gpu": {"size": gpu}, "ram": {"size": ram}}
    if case.uses_drive:
        tiers["nvme"] = [{"path": str(tmp_path / "drive"), "size": "1GiB"}]  # type: ignore[assignment]
    values = {**SHAPES[case.shape], "num_hidden_layers": layers}
    for key in ("hidden_size", "intermediate_size", "vocab_size"):
        values[key] //= 32
    (tmp_path / "config.json").write_text(json.dumps(values))
    tables = merged(case.tables, {"tiers": tiers, "checkpoint": {"save_strategy": "no", "save_on_signal": False}})
    model = {"model_name_or_path": str(tmp_path), "attn_implementation": "sdpa", "train_from_scratch": True}
    tables = merged(tables, {"model": model, "precision": {"compute_dtype": "bfloat16"}})
    config = run_config(tmp_path, tmp_path / "config.json", (2, 2, 16), tmp_path, device="cuda", **tables)
    ids = torch.arange(64).reshape(2, 2, 16) % 100
    batches = [{"input_ids": rows, "labels": rows.clone()} for rows in ids]
    with Ours(config, 2, plan=plan_run(resolve(config), padded=False)) as ours:
        assert ours.plan.placement.buffers and not ours.plan.placement.missing_bytes
        ram_tier = ours._store.tier("ram")
        assert isinstance(ram_tier, RamTier)
        made_bytes = ram_tier.made_bytes
        for _ in range(2):
            assert ours.step(batches, 1e-4).num_drops == {"gpu": 0, "ram": 0}
        ours.finish()
        assert ram_tier.made_bytes == made_bytes
        assert ours.moved_bytes() == ours.planned_bytes()


def memory_of(tier: GpuTier) -> dict[str, int]:
    """Return the figures that must stay constant between two steps, and the resident memory of the process."""
    found = {"rss": psutil.Process().memory_info().rss, "drops": tier.num_drops}
    stats = torch.cuda.memory_stats()
    # Exclude slots: their number depends on how far ahead fetches are, and the tier limits their total size. Use
    # `requested_bytes`, because the allocator may hand out larger cached blocks, whose sizes vary.
    slot_bytes = tier._ledger.slot_bytes + tier._pool.pooled_bytes
    found["beside slots"] = stats["requested_bytes.all.current"] - slot_bytes
    return found | {name: stats[name] for name in ("num_ooms", "num_alloc_retries")}


def test_compute_sanitizer_script_runs(tmp_path: Path) -> None:
    result = run_script([sys.executable, ONE_STEP, "--virtual", "--folder", tmp_path])
    assert "2 steps" in result.stdout, result.stdout + result.stderr


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("tool", ["memcheck", "synccheck", "racecheck"])
def test_compute_sanitizer_reports_no_error(tool: str, tmp_path: Path) -> None:
    checker = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(checker).exists():
        pytest.skip("compute-sanitizer is not installed")
    command = [checker, "--tool", tool, "--error-exitcode", "9", sys.executable, ONE_STEP, "--folder", tmp_path]
    result = run_script(command)
    assert "ERROR SUMMARY: 0 errors" in result.stdout or "0 hazards" in result.stdout, result.stdout


def run_script(command: list[Any]) -> subprocess.CompletedProcess[str]:
    result = warm.run(command, cwd=ROOT, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    return result
