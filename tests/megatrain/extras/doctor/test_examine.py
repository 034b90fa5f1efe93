"""A quick run of the doctor's whole examination measures plausible rates and stores the same rates in a profile."""

from __future__ import annotations

import json
import os
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.virtual_cuda import VirtualCuda
from megatrain.extras.doctor import drives, examine, layers, processors
from megatrain.extras.doctor.drives import DriveEffort, UnusablePathError
from megatrain.extras.doctor.processors import measure_gpu, measure_processor, product_flops_per_s
from megatrain.optim.threads import KernelThreads
from tiered import MiB


@pytest.fixture
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "QUICK", DriveEffort(64 * MiB, 0.0, 0.0))
    monkeypatch.setattr(examine, "_QUICK_PROCESSOR", (8 * MiB, 0.0))
    monkeypatch.setattr(examine, "measure_layers", partial(layers.measure_layers, shapes=layers.SHAPES[:1]))


@pytest.mark.usefixtures("_brief")
def test_profile_has_the_rates_measured_by_examine(tmp_path: Path) -> None:
    told: list[str] = []
    seen = examine.examine([tmp_path], quick=True, on_progress=told.append)
    assert os.listdir(tmp_path) == []
    assert told[-1] == str(tmp_path)
    stored = seen.profile
    drive = stored.drive_of(tmp_path)
    assert drive is not None
    assert drive.mixed_bytes_per_s == seen.drives[0].tier.mixed
    assert drive.read_bytes_per_s == seen.drives[0].tier.read
    assert stored.is_quick and drive.is_quick
    assert stored.adamw_params_per_s.keys() == {"float32", "bfloat16"}
    for rates in (stored.matmul_flops_per_s, stored.attention_flops_per_s, stored.elementwise_bytes_per_s):
        assert rates.keys() <= {"cpu/float32", "cpu/bfloat16"} and all(rate > 0 for rate in rates.values())
    assert (stored.launches_per_s or 0.0) == seen.layers.launches_per_s < 1e7
    assert json.loads(json.dumps(seen.to_json()))["drives"][0]["path"] == str(tmp_path)
    assert {finding.severity for finding in seen.findings} <= {"ok", "note", "warn"}


@pytest.mark.usefixtures("_brief")
def test_paths_are_looked_at_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(**arguments: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(examine, "measure_processor", never)
    with pytest.raises(UnusablePathError, match="does not exist"):
        examine.examine([tmp_path, tmp_path / "none"], quick=True)
    assert os.listdir(tmp_path) == []
    assert max(drives.QUICK.span_bytes, drives.FULL.span_bytes) <= 512 * MiB


def test_processor_measurement_gives_positive_rates() -> None:
    threads = KernelThreads(1)
    found = measure_processor(span_bytes=8 * MiB, seconds=0.0, threads=threads)
    assert found.num_threads == 1
    assert min(found.ram_update, *found.adamw_params.values()) > 0


def test_products_count_their_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mocked clock reports one second for every run, so the rate is the FLOPs of a layer's six matrix products."""
    monkeypatch.setattr(processors, "_best_s", lambda work, seconds: 1.0)
    tokens, width, inner = 512, 256, 768
    flops = 3 * 2 * tokens * (width * width + width * inner)
    rate = partial(product_flops_per_s, torch.device("cpu"), torch.float32, 1.0)
    assert rate() == flops
    sums = 2 * 4 * (width * width + width * inner)  # bytes of the fp32 sums, read and written at a separate rate
    assert rate(sums_bytes_per_s=4 * sums) == pytest.approx(flops / 0.75)
    assert rate(sums_bytes_per_s=sums / 4) == pytest.approx(flops / 0.5)  # products take at least half of the time


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measured_products_match_a_step(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The products are two forwards, two input gradients, and two weight gradients that are added to fp32 sums."""
    seen: Counter[tuple[int, int, int]] = Counter()
    multiply, add = torch.mm, torch.addmm

    def watched(left: torch.Tensor, right: torch.Tensor, **options: Any) -> torch.Tensor:
        seen[left.shape[0], left.shape[1], right.shape[1]] += 1
        return multiply(left, right, **options)

    def watched_sum(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, **options: Any) -> torch.Tensor:
        assert total.dtype == torch.float32
        seen[left.shape[0], left.shape[1], right.shape[1]] += 1
        return add(total, left, right, **options)

    monkeypatch.setattr(torch, "mm", watched)
    monkeypatch.setattr(torch, "addmm", watched_sum)
    monkeypatch.setattr(processors, "_PRODUCT_TOKENS", (64,))
    monkeypatch.setattr(processors, "_best_s", lambda work, seconds: work() or 1.0)
    product_flops_per_s(torch.device("cpu"), dtype, 1.0)
    # The MLP's weight gradient costs the same as its other products: 64 tokens times 32 times 96.
    wanted = [(64, 32, 32), (64, 32, 32), (64, 32, 96), (64, 96, 32), (32, 64, 32), (96, 64, 32)]
    assert seen == Counter(wanted)


def test_attention_and_layer_rest_count_their_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mocked clock reports one second for a run of two forwards and a backward over half of all pairs."""
    monkeypatch.setattr(processors, "_best_s", lambda work, seconds: 1.0)
    attention, moved = processors.layer_rates(torch.device("cpu"), torch.float32, 1.0)
    assert attention == (2 + 2.5) * 2 * 2 * 8 * 1024 * 1024 * 64 / 2
    array = 4 * 2048 * 1024
    # Arrays read and written. Squares: 2, mean: 1, product with the root: 2, SiLU: 2. Product with the up projection:
    # 3, product with the norm: 3, residual sum: 3.
    forward = 16 * array
    assert 2 * forward < moved < 5 * forward


def test_benchmark_data_is_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """With constant data, results would be too good: processors work faster, and links may compress it."""
    seen: list[torch.Tensor] = []
    multiply = torch.mm

    def watched(left: torch.Tensor, right: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.extend((left.cpu(), right.cpu()))
        return multiply(left, right, **options)

    def copied(target: torch.Tensor, source: torch.Tensor) -> float:
        seen.append(source.cpu())
        target.copy_(source)  # so that the copy in the other direction also has random data
        return 1e9

    monkeypatch.setattr(processors, "_PRODUCT_TOKENS", (64,))
    monkeypatch.setattr(processors, "_ROW_TOKENS", 64)
    monkeypatch.setattr(processors, "_TOKENS", 64)
    monkeypatch.setattr(processors, "_COPY_BYTES", MiB)
    monkeypatch.setattr(processors, "_copy_rate", copied)
    monkeypatch.setattr(torch, "mm", watched)
    with VirtualCuda().in_place():
        found = measure_gpu(seconds=0.0)
        product_flops_per_s(torch.device("cpu"), torch.float32, 0.0)
    assert found is not None and found.update is not None and len(seen) >= 2 + 2 * 2 + 2
    assert all(contents.unique().numel() >= 100 for contents in seen)


def test_without_a_gpu_there_is_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert measure_gpu(seconds=0.1) is None


@pytest.mark.gpu
def test_gpu_measurement_gives_plausible_rates() -> None:
    found = measure_gpu(seconds=0.1)
    assert found is not None
    assert found.is_pinned
    assert min(found.h2d, found.d2h, *found.matmul_flops.values()) > 1e9
    assert found.memory_bytes > 0
