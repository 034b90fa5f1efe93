"""Blocks that live in GPU memory, or are updated there, are bit-identical to blocks that live in RAM."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from fakes.virtual_cuda import VirtualCuda
from megatrain.config.load import load_config
from megatrain.machine.profiles import GpuProfile, LoadedProfile, MachineProfile
from megatrain.machine.this_machine import ThisMachine
from megatrain.plan import planner
from megatrain.plan.plan import Plan
from megatrain.plan.show import messages
from megatrain.plan.traffic import Traffic
from megatrain.training.resolve import resolve
from oracles.tiered_run import TieredRun, config_text, run_config, write_tiny_model
from tiered import parse_size

NUM_STEPS = 2
ALL_RAM = 'weights = ["ram"]\ngradients = ["ram"]\noptimizer = ["ram"]\nactivations = ["ram"]'
NO_CHECKS = 'max_grad_norm = 0\nnonfinite = "ignore"'
#: Each layer's gradient norm is copied to the host while the device computes the next layer.
BY_LAYER = 'clip_scope = "layer"\nmax_grad_norm = 0.05'


@pytest.fixture(scope="module")
def results_in_ram() -> dict[tuple[str, str], TieredRun]:
    """Return an empty cache for the results of runs with all homes in RAM, by optimizer and dtype."""
    return {}


@pytest.mark.parametrize("nvme", [0, 1], ids=["RAM", "NVMe"])
@pytest.mark.parametrize("gpu", ["12MiB", "24MiB", "128MiB"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "optimizer", ["", NO_CHECKS, BY_LAYER, 'optim = "lion"\nema_decay = 0.9', 'optim = "sgd"', 'optim = "adafactor"']
)
def test_gpu_homes_are_bit_identical_to_ram(
    optimizer: str,
    dtype: str,
    gpu: str,
    nvme: int,
    virtual: VirtualCuda | None,
    tmp_path: Path,
    results_in_ram: dict[tuple[str, str], TieredRun],
) -> None:
    model = write_tiny_model(tmp_path / "model")
    tables = {"optimizer": optimizer, "precision": f'compute_dtype = "{dtype}"'}
    if (optimizer, dtype) not in results_in_ram:
        in_ram = config_text(tmp_path, model, nvme=0, device="cuda", gpu="128MiB", placement=ALL_RAM, **tables)
        results_in_ram[optimizer, dtype] = run_config(in_ram, tmp_path / "ram", num_steps=NUM_STEPS)
    expected = results_in_ram[optimizer, dtype]
    below = {"ram": "9MiB"} if nvme else {}
    text = config_text(tmp_path, model, nvme=nvme, device="cuda", gpu=gpu, **below, **tables)
    if virtual is not None:
        virtual.peak_bytes = virtual.allocated_bytes
    result = run_config(text, tmp_path / "gpu", num_steps=NUM_STEPS)
    if virtual is not None:
        assert 0 < virtual.peak_bytes <= parse_size(gpu), "all tensors on the device, including layers' inner ones"
    result.assert_same(expected)
    result.assert_as_planned()
    if gpu == "128MiB" and "adafactor" not in optimizer:
        assert set(result.plan.placement.homes.values()) == {"gpu"} and not any(result.plan.traffic.values())


@pytest.mark.parametrize(
    ("dtype", "optimizer"),
    [
        ("bfloat16", ""),
        pytest.param("bfloat16", "ema_decay = 0.9", marks=pytest.mark.slow),
        pytest.param("float32", NO_CHECKS, marks=pytest.mark.slow),
    ],
)
def test_muon_results_are_bit_identical_for_all_placements(
    dtype: str, optimizer: str, virtual: VirtualCuda | None, tmp_path: Path
) -> None:
    """Muon's matrix products run on the device, in whichever tier the blocks have their homes.

    Results are therefore bit-identical for all placements, and the bus traffic is as planned.
    """
    model = write_tiny_model(tmp_path / "model")
    results: list[TieredRun] = []
    for gpu, nvme, tables in (("160MiB", 0, {"placement": ALL_RAM}), ("160MiB", 0, {}), ("44MiB", 1, {"ram": "9MiB"})):
        text = config_text(
            tmp_path,
            model,
            nvme=nvme,
            device="cuda",
            gpu=gpu,
            optimizer=f'optim = "muon"\n{optimizer}',
            precision=f'compute_dtype = "{dtype}"',
            **tables,
        )
        if virtual is not None:
            virtual.peak_bytes = virtual.allocated_bytes
        results.append(run_config(text, tmp_path / f"run{len(results)}", num_steps=NUM_STEPS))
        if virtual is not None:
            assert 0 < virtual.peak_bytes <= parse_size(gpu)
        results[-1].assert_same(results[0])
        results[-1].assert_as_planned()
        graph = results[-1].plan.graph
        vocabulary = [entry for entry in graph.layouts["model.embed_tokens"].entries]
        matrices = [
            entry
            for layout in graph.layouts.values()
            for entry in layout.entries
            if len(entry.shape) == 2 and entry not in vocabulary
        ]
        sent = NUM_STEPS * 2 * sum(entry.numel for entry in matrices)
        assert dict(results[-1].moved_outside) == {"ram->gpu": sent, "gpu->ram": sent}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["", NO_CHECKS, BY_LAYER, 'optim = "lion"'])
def test_split_updates_are_bit_identical(
    optimizer: str, dtype: str, virtual: VirtualCuda | None, tmp_path: Path
) -> None:
    """All homes are in RAM.

    None, some or all of the groups are fetched to the device for the update. The rest are updated in RAM.
    """
    model = write_tiny_model(tmp_path / "model")
    results: dict[int, TieredRun] = {}
    for count in (0, 3, 100):
        text = config_text(
            tmp_path,
            model,
            nvme=0,
            device="cuda",
            gpu="24MiB",
            placement=ALL_RAM,
            optimizer=optimizer,
            precision=f'compute_dtype = "{dtype}"',
            advanced=f"stream_updates = {count}",
        )
        results[count] = run_config(text, tmp_path / str(count), num_steps=NUM_STEPS)
        results[count].assert_as_planned()
        results[count].assert_same(results[0])
    plans = {count: result.plan for count, result in results.items()}
    groups = len(plans[0].updates.ticks)
    assert [len(plan.updates.gpu_memory_ticks) for plan in plans.values()] == [0, 3, groups]
    assert set(plans[3].placement.homes.values()) == {"ram"}
    moved = [moved_state(plan) for plan in plans.values()]
    assert moved[0] == 0 < moved[1] < moved[2]


@pytest.mark.parametrize(("params_per_s", "bus", "shares"), [(1e6, 1e12, True), (1e12, 1e6, False)])
def test_updates_are_shared_if_the_rates_favor_it(
    params_per_s: float, bus: float, shares: bool, virtual: VirtualCuda | None, tmp_path: Path
) -> None:
    """With a slow CPU and a fast bus, the device makes some updates. In the reverse case, it makes none.

    Without measured rates, it makes none either.
    """
    model = write_tiny_model(tmp_path / "model")
    text = config_text(tmp_path, model, nvme=0, device="cuda", gpu="24MiB", placement=ALL_RAM)
    (tmp_path / "run.toml").write_text(text)
    run = resolve(load_config(tmp_path / "run.toml").config)
    found = MachineProfile(
        host="here",
        cpu="some",
        ram_bytes=1 << 30,
        measured_at=datetime.now(UTC),
        is_quick=True,
        num_threads=2,
        ram_update_bytes_per_s=1e10,
        adamw_params_per_s=dict.fromkeys(("float32", "bfloat16"), params_per_s),
        matmul_flops_per_s=dict.fromkeys(("cuda/float32", "cuda/bfloat16"), 1e13),
        gpu=GpuProfile(
            name="some", memory_bytes=1 << 30, h2d_bytes_per_s=bus, d2h_bytes_per_s=bus, update_bytes_per_s=1e12
        ),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThisMachine, "rates", lambda machine: LoadedProfile(found))
        plan = planner.plan_run(run)
    assert bool(plan.program.updates.streamed) == shares
    if shares:
        assert all(tick.visit in plan.program.updates.streamed for tick in plan.updates.gpu_memory_ticks)
        assert any("part by part for their updates" in text for text in messages(plan))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThisMachine, "rates", lambda machine: LoadedProfile(None))
        assert not planner.plan_run(run).program.updates.streamed


def moved_state(plan: Plan) -> int:
    """Return the bytes of optimizer state that a step moves to the device. Assert that all of them move back."""
    program, placement = plan.program, plan.placement
    moved = Traffic(program, placement.routes, placement.homes, placement.stays).step_bytes(
        lambda key: program.blocks[key].kind == "optimizer"
    )
    assert moved["ram->gpu"] == moved["gpu->ram"]
    return moved["ram->gpu"]


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["true", "false"])
def test_rows_fit_a_tier_without_space_for_a_mask(virtual: VirtualCuda | None, tmp_path: Path, packing: str) -> None:
    """Neither packed documents nor single rows need a mask of shape [S, S]."""
    model = write_tiny_model(tmp_path / "model")
    size = "30MiB" if virtual is None else "19MiB"  # on a real GPU, attention needs workspace
    text = config_text(tmp_path, model, nvme=0, device="cuda", gpu=size, data=f"packing = {packing}")
    text = text.replace("max_length = 64", "max_length = 1024").replace("batch_size = 2", "batch_size = 1")
    if virtual is not None:
        virtual.peak_bytes = virtual.allocated_bytes
    result = run_config(text, tmp_path / "run", num_steps=2)
    if virtual is not None:
        assert 0 < virtual.peak_bytes <= parse_size(size)
    result.assert_as_planned()
