"""The path that a GPU takes, with host memory in its place: three tiers, layers run in the fastest one.

Every copy in and out of the compute tier, the two-hop routes to files and the planned traffic of all links are those
of a GPU run; only the device is missing. The numbers must be those of a run in RAM.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.plan import machine
from reference.tiered_run import config_text, run_config
from tiered.units import MiB

NUM_STEPS = 4
PLACEMENTS = {
    "homes in RAM": "",
    "state on NVMe": 'optimizer = ["nvme"]',
    "everything on NVMe": 'weights = ["nvme"]\ngradients = ["nvme"]\noptimizer = ["nvme"]\nactivations = ["nvme"]',
}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_device_tier_gives_the_same_bits(
    placement: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run_config(config_text(tmp_path, tiny_model, nvme=0), tmp_path / "ram", num_steps=NUM_STEPS)
    monkeypatch.setattr(machine, "compute_tier", lambda device: "gpu")
    monkeypatch.setattr(machine, "gpu_capacity_bytes", lambda config, device: 16 * MiB)
    text = config_text(tmp_path, tiny_model, placement=PLACEMENTS[placement])
    result = run_config(text, tmp_path / "device", num_steps=NUM_STEPS)
    assert result.plan.tiers == ("gpu", "ram", "nvme")
    assert result.losses == expected.losses
    assert result.digests == expected.digests
    assert result.moved is not None
    moved = {link: stats.num_bytes for link, stats in result.moved.links.items()}
    assert moved == result.plan.placement.run_traffic_bytes(NUM_STEPS)
