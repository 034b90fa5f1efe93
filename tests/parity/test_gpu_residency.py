"""GPU memory as a home of blocks, emulated in RAM: runs have three tiers, and layers run in the fastest one.

Only the GPU itself is missing. Copies to and from the compute tier, two-hop routes to files, the tiers of updates and
the planned traffic are as in a GPU run. Results must be bit-identical to a run in RAM.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import load_config
from megatrain.plan.planner import plan_run
from megatrain.plan.shortfall import DoesNotFitError
from megatrain.plan.show import messages
from megatrain.training.resolve import resolve
from oracles.tiered_run import ALL_NVME, TieredRun, config_text, run_config, write_tiny_model
from tiered import MiB

NUM_STEPS = 3
ALL_RAM = ALL_NVME.replace("nvme", "ram")
#: Nothing needs the global norm, so a group is updated as soon as its gradient is complete.
NO_CHECKS = 'max_grad_norm = 0\nnonfinite = "ignore"'
SIZES = ("barely", "6MiB", "8MiB", "10MiB", "13MiB", "16MiB", "20MiB", "64MiB")

Baseline = Callable[..., TieredRun]


def given(text: str, freeze: str) -> str:
    return text.replace("[data]", f"freeze = {freeze}\n[data]", 1) if freeze else text


def run(folder: Path, model: Path, *, gpu: str, freeze: str = "", **tables: Any) -> TieredRun:
    """Run with a GPU tier of the given size. "barely" means the smallest size that the planner accepts."""
    folder.mkdir(exist_ok=True)
    size = "4KiB" if gpu == "barely" else gpu
    for _ in range(8):
        text = given(config_text(folder, model, gpu=size, **tables), freeze)
        if gpu != "barely":
            break
        (folder / "plan.toml").write_text(text)
        try:
            plan_run(resolve(load_config(folder / "plan.toml").config))
            break
        except DoesNotFitError as error:
            size = f"{error.need_bytes}B"
    return run_config(text, folder, num_steps=NUM_STEPS)


def groups_on_gpu(result: TieredRun) -> tuple[int, int]:
    """Return the number of groups updated in the GPU tier, and the total number of groups."""
    updates = [tick for tick in result.plan.program.ticks if tick.phase == "update"]
    return len(result.plan.updates.gpu_memory_ticks), len(updates)


@pytest.fixture(scope="module")
def baseline(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    """Return a function that trains with the given tables and everything in RAM, and caches the results."""
    known: dict[str, TieredRun] = {}

    def find(model: Path = tiny_model, freeze: str = "", **tables: str) -> TieredRun:
        name = repr((model, freeze, sorted(tables.items())))
        if name not in known:
            folder = tmp_path_factory.mktemp("baseline")
            known[name] = run_config(
                given(config_text(folder, model, nvme=0, **tables), freeze), folder, num_steps=NUM_STEPS
            )
        return known[name]

    return find


@pytest.mark.parametrize("optimizer", ["", NO_CHECKS], ids=["updates wait", "updates at once"])
def test_run_that_fits_moves_nothing(optimizer: str, tiny_model: Path, tmp_path: Path, baseline: Baseline) -> None:
    result = run(tmp_path, tiny_model, gpu="64MiB", optimizer=optimizer, ram="2MiB")
    assert set(result.plan.placement.homes.values()) == {"gpu"}
    assert groups_on_gpu(result)[0] == groups_on_gpu(result)[1] > 0
    assert result.moved is not None
    assert {link: stats.num_bytes for link, stats in result.moved.links.items()} == dict.fromkeys(
        result.plan.traffic, 0
    )
    result.assert_same(baseline(optimizer=optimizer))
    result.assert_as_planned()


@pytest.mark.parametrize("optim", ["lion", "sgd", "adafactor", "muon"])
@pytest.mark.parametrize(("gpu", "dtype"), [("10MiB", "float32"), ("10MiB", "bfloat16"), ("64MiB", "bfloat16")])
def test_every_optimizer(
    gpu: str, optim: str, dtype: str, tiny_model: Path, tmp_path: Path, baseline: Baseline
) -> None:
    tables = {"precision": f'compute_dtype = "{dtype}"', "optimizer": f'optim = "{optim}"'}
    result = run(tmp_path, tiny_model, gpu=gpu, ram="8MiB", **tables)
    result.assert_same(baseline(**tables))
    result.assert_as_planned()
    there, all_groups = groups_on_gpu(result)
    if optim in ("adafactor", "muon"):
        why = {
            "adafactor": "Adafactor has no GPU kernel",
            "muon": "for Muon, the GPU computes only the matrix products",
        }
        assert there == 0 and f"updates run in ram: {why[optim]}" in messages(result.plan)
        assert (result.moved_outside.get("ram->gpu", 0) > 0) == (optim == "muon")
        assert not result.plan.placement.home_bytes["gpu"]["optimizer"]
    else:
        assert 0 < there <= all_groups and (gpu != "64MiB" or there == all_groups)


@pytest.mark.parametrize("gpu", ["barely", "12MiB"])
@pytest.mark.parametrize(
    ("changes", "freeze"),
    [
        ({"tie_word_embeddings": False}, ""),
        ({}, '["model.layers.0.*", "model.layers.2.*"]'),
        ({}, '["model.embed_tokens.*"]'),
        ({"tie_word_embeddings": False}, '["lm_head.*"]'),
    ],
    ids=["untied", "frozen layers", "frozen tied embedding", "frozen head"],
)
def test_shared_and_frozen_parameters(
    changes: dict[str, Any], freeze: str, gpu: str, tmp_path: Path, baseline: Baseline, models: dict[str, Path]
) -> None:
    model = models["untied" if changes else "tied"]
    result = run(tmp_path, model, gpu=gpu, ram="9MiB", freeze=freeze)
    result.assert_same(baseline(model, freeze=freeze))
    result.assert_as_planned()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        "tied": write_tiny_model(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True),
        "untied": write_tiny_model(tmp_path_factory.mktemp("untied"), tie_word_embeddings=False),
    }


@pytest.mark.parametrize(
    "placement",
    [
        ALL_RAM.replace('optimizer = ["ram"]', 'optimizer = ["nvme"]'),
        ALL_NVME,
        'optimizer = ["nvme"]',
        'optimizer = ["gpu"]\nweights = ["ram"]',
        'weights = ["gpu"]\noptimizer = ["ram"]',
        'weights = ["gpu", "ram"]\nactivations = ["nvme"]',
        'gradients = ["gpu"]',
        'gradients = ["ram"]',
        'activations = ["gpu"]\nweights = ["ram", "gpu"]',
        ALL_NVME.replace("nvme", "gpu"),
    ],
)
def test_requested_homes_are_used(placement: str, tiny_model: Path, tmp_path: Path, baseline: Baseline) -> None:
    result = run(tmp_path, tiny_model, gpu="24MiB", ram="12MiB", placement=placement)
    for line in placement.splitlines():
        kind, _, tiers = line.partition(" = ")
        assert all(name in tiers for name, held in result.plan.placement.home_bytes.items() if held[kind])  # type: ignore[index]
    result.assert_same(baseline())
    result.assert_as_planned()


def test_gpu_memory_compensates_for_small_ram(tiny_model: Path, tmp_path: Path, baseline: Baseline) -> None:
    """Neither tier alone can hold all blocks, and there is no drive."""
    blocks = baseline().plan.program.blocks.values()
    assert 12 * MiB < sum(block.nbytes for block in blocks) < 20 * MiB
    with pytest.raises(DoesNotFitError):
        run(tmp_path / "small", tiny_model, nvme=0, ram="5MiB", gpu="5MiB")
    result = run(tmp_path / "both", tiny_model, nvme=0, ram="8MiB", gpu="12MiB")
    result.assert_same(baseline())
    result.assert_as_planned()


@pytest.mark.slow
def test_more_gpu_memory_never_moves_more(tiny_model: Path, tmp_path: Path) -> None:
    """One percent more is allowed, because blocks whose home is GPU memory leave less space for copies."""
    moved = []
    for size in range(6, 24):
        (tmp_path / "run.toml").write_text(config_text(tmp_path, tiny_model, nvme=0, gpu=f"{size}MiB"))
        moved.append(sum(plan_run(resolve(load_config(tmp_path / "run.toml").config)).traffic.values()))
    assert all(more <= 1.01 * less for less, more in pairwise(moved)) and moved[0] > moved[-1] == 0
