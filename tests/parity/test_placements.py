"""Placement never changes the results of a run, and the real traffic equals the planned traffic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from oracles.tiered_run import TieredRun, config_text, run_config

NUM_STEPS = 5
ALL_NVME = 'weights = ["nvme"]\ngradients = ["nvme"]\noptimizer = ["nvme"]\nactivations = ["nvme"]'
LRU = 'eviction_policy = "lru"'

PLACEMENTS: dict[str, dict[str, Any]] = {
    "all in RAM": {"nvme": 0},
    "all on NVMe": {"placement": ALL_NVME},
    "weights in RAM, state on NVMe": {"placement": 'optimizer = ["nvme"]'},
    "activations and gradients on NVMe": {"placement": 'gradients = ["nvme"]\nactivations = ["nvme"]'},
    "RAM tier of two layers": {"ram": "tight"},
    "all on NVMe, much room for copies that stay": {"placement": ALL_NVME, "ram": "64MiB"},
    "two NVMe paths striped": {"placement": ALL_NVME, "nvme": 2},
    "two NVMe paths, one three times as fast": {"placement": ALL_NVME, "nvme": 2, "rates": (1, 3)},
    "files of 8 KiB": {"placement": ALL_NVME, "advanced": 'file_size = "8KiB"'},
    "files of 1 MiB, striped": {"placement": ALL_NVME, "nvme": 3, "advanced": 'file_size = "1MiB"'},
    "checked on every read": {"placement": ALL_NVME, "tiers": 'verify = "always"'},
    "checked on every read, striped": {"placement": ALL_NVME, "nvme": 2, "tiers": 'verify = "always"'},
    "never checked": {"placement": ALL_NVME, "tiers": 'verify = "off"'},
    "prefetch depth 0": {"placement": ALL_NVME, "advanced": "prefetch = 0"},
    "prefetch depth 1 block": {"placement": ALL_NVME, "advanced": 'prefetch = "1MiB"'},
    "prefetch unlimited": {"placement": ALL_NVME, "advanced": 'prefetch = "unlimited"'},
    "LRU": {"placement": ALL_NVME, "advanced": LRU},
    "LRU, tight": {"ram": "tight", "advanced": LRU},
    "micro-batch-major": {"nvme": 0, "advanced": 'micro_batch_order = "micro_batch"'},
    "micro-batch-major on NVMe": {"placement": ALL_NVME, "advanced": 'micro_batch_order = "micro_batch"'},
}


def run(folder: Path, model: Path, placement: dict[str, Any], precision: str) -> TieredRun:
    options = {"nvme": 1, **placement}
    if options.get("ram") == "tight":
        options["ram"] = "5500KiB"
    elif options.get("placement") == ALL_NVME:
        options.setdefault("ram", "7MiB")  # with more RAM, copies stay there between uses, so fewer bytes move
    return run_config(config_text(folder, model, precision=precision, **options), folder, num_steps=NUM_STEPS)


@pytest.fixture(scope="module")
def baselines(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, TieredRun]:
    return {
        dtype: run(tmp_path_factory.mktemp(dtype), tiny_model, PLACEMENTS["all in RAM"], f'compute_dtype = "{dtype}"')
        for dtype in ("float32", "bfloat16")
    }


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, "float32") for name in PLACEMENTS if name != "all in RAM"]
    + [(name, "bfloat16") for name in ("all on NVMe", "LRU, tight", "two NVMe paths striped", "micro-batch-major")],
)
def test_same_bits_and_planned_traffic(
    name: str, dtype: str, tiny_model: Path, tmp_path: Path, baselines: dict[str, TieredRun]
) -> None:
    result, expected = run(tmp_path, tiny_model, PLACEMENTS[name], f'compute_dtype = "{dtype}"'), baselines[dtype]
    assert result.losses == expected.losses
    assert result.grad_norms == expected.grad_norms
    assert result.digests == expected.digests
    assert result.moved is not None
    moved = {link: stats.num_bytes for link, stats in result.moved.links.items()}
    assert moved == result.plan.placement.run_traffic_bytes(NUM_STEPS)
    assert result.moved.prefetch_wasted == 0 and result.moved.schedule_misses == 0
    for tier, stats in result.moved.tiers.items():
        assert stats.home_bytes == sum(result.plan.placement.home_bytes[tier].values()), tier
        assert stats.home_bytes <= stats.high_water_bytes <= stats.capacity_bytes == result.plan.budgets[tier]


@pytest.mark.parametrize("placement", ["all on NVMe", "two NVMe paths striped"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bf16_gradients_are_rounded_sums(
    placement: str, dtype: str, tiny_model: Path, tmp_path: Path, baselines: dict[str, TieredRun]
) -> None:
    precision = f'compute_dtype = "{dtype}"\ngrad_dtype = "bfloat16"'
    in_ram = run(tmp_path / "ram", tiny_model, PLACEMENTS["all in RAM"], precision)
    spread = run(tmp_path / "nvme", tiny_model, PLACEMENTS[placement], precision)
    assert spread.losses == in_ram.losses and spread.grad_norms == in_ram.grad_norms
    assert spread.digests == in_ram.digests
    exact = baselines[dtype]
    assert in_ram.losses[0] == exact.losses[0]
    assert in_ram.grad_norms[0] != exact.grad_norms[0]
    assert in_ram.grad_norms[0] == pytest.approx(exact.grad_norms[0], rel=2**-8)
    assert in_ram.losses == pytest.approx(exact.losses, rel=1e-2)
    blocks = in_ram.plan.program.blocks.values()
    assert {block.dtype for block in blocks if block.kind == "gradients"} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optim", ["muon", "lion", "sgd", "adafactor"])
def test_every_optimizer_gives_the_same_bits_everywhere(
    optim: str, dtype: str, tiny_model: Path, tmp_path: Path
) -> None:
    tables = {"precision": f'compute_dtype = "{dtype}"', "optimizer": f'optim = "{optim}"\nema_decay = 0.9'}
    in_ram = run_config(config_text(tmp_path, tiny_model, nvme=0, **tables), tmp_path / "ram", num_steps=3)
    text = config_text(tmp_path, tiny_model, placement=ALL_NVME, **tables)
    on_nvme = run_config(text, tmp_path / "nvme", num_steps=3)
    assert on_nvme.losses == in_ram.losses and on_nvme.grad_norms == in_ram.grad_norms
    assert on_nvme.digests == in_ram.digests and any(key.endswith("/ema") for key in in_ram.digests)
    assert on_nvme.moved is not None
    moved = {link: stats.num_bytes for link, stats in on_nvme.moved.links.items()}
    assert moved == on_nvme.plan.placement.run_traffic_bytes(3)


def test_training_loss_decreases(baselines: dict[str, TieredRun]) -> None:
    for baseline in baselines.values():
        assert baseline.losses[-1] < baseline.losses[0] - 0.1
