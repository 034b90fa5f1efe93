"""Runs with the CUDA tier and its links, on a fake device that delays each copy until some code waits for it.

Layers run on the host without delay. Copies between tiers are queued on streams, with the events, leases and threads of
a GPU run. Results must be bit-identical to a run in RAM, and the traffic must be as planned.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.lazy_device import LazyDevice
from megatrain.machine.resources import TierSpecs
from megatrain.plan import run_tiers
from oracles.tiered_run import config_text, run_config
from tiered import MiB
from tiered.links import route
from tiered.links.cuda import CudaLink
from tiered.links.files import PosixMover

NUM_STEPS = 3
ALL_NVME = 'weights = ["nvme"]\ngradients = ["nvme"]\noptimizer = ["nvme"]\nactivations = ["nvme"]'


@pytest.mark.parametrize(("placement", "past_ram"), [("", False), (ALL_NVME, False), (ALL_NVME, True)])
@pytest.mark.parametrize("order", ["layer", "micro_batch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cuda_links_are_bit_identical_to_ram(
    dtype: str,
    order: str,
    placement: str,
    past_ram: bool,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tables = {"precision": f'compute_dtype = "{dtype}"', "advanced": f'micro_batch_order = "{order}"'}
    expected = run_config(config_text(tmp_path, tiny_model, nvme=0, **tables), tmp_path / "ram", num_steps=NUM_STEPS)
    device = LazyDevice()
    monkeypatch.setattr(TierSpecs, "compute_tier", lambda tiers, device: "gpu")
    monkeypatch.setattr(TierSpecs, "gpu_capacity_bytes", lambda tiers, device: 16 * MiB)
    monkeypatch.setattr(run_tiers, "GpuTier", lambda size, device, **options: lazy.gpu_tier(size, **options))
    monkeypatch.setattr(TierSpecs, "can_bypass_ram", lambda tiers, device: past_ram)
    monkeypatch.setattr(route, "make_mover", lambda tier, needs_gds: PosixMover(tier))
    submitted: list[str] = []
    submit = CudaLink.submit
    monkeypatch.setattr(CudaLink, "submit", lambda link, *args: submitted.append(link.src) or submit(link, *args))
    with device.in_place() as lazy:
        text = config_text(tmp_path, tiny_model, placement=placement, **tables)
        result = run_config(text, tmp_path / "device", num_steps=NUM_STEPS)
    assert result.losses == expected.losses
    assert result.grad_norms == expected.grad_norms
    assert result.digests == expected.digests
    assert result.moved is not None
    moved = {link: stats.num_bytes for link, stats in result.moved.links.items()}
    assert moved == result.plan.placement.run_traffic_bytes(NUM_STEPS)
    assert result.moved.links["ram->gpu"].path == "cuda"
    assert {"ram", "gpu"} == set(submitted) or past_ram
    assert device.num_run > 0 or past_ram
