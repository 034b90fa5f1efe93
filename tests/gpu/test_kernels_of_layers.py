"""Compiled layers, MLPs in pieces and liger kernels on a GPU.

Losses are close to the losses of plain layers, and results are bit-identical for all placements.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fakes.virtual_cuda import VirtualCuda
from oracles.tiered_run import TieredRun, config_text, run_config

KEYS = {"compile": "compile = true", "pieces": "mlp_rows = 48", "liger": "use_liger_kernel = true"}
WARNS = pytest.mark.filterwarnings("ignore")  # torch warns when inductor first compiles kernels
CASES = [pytest.param(name, marks=WARNS) if name == "compile" else name for name in KEYS]


def run(folder: Path, model: Path, keys: str, **tables: Any) -> TieredRun:
    text = config_text(folder, model, **tables).replace('device = "cpu"', 'device = "cuda"')
    return run_config(text.replace("[data]", f"{keys}\n[data]", 1), folder, num_steps=3)


@pytest.mark.parametrize("name", CASES)
def test_losses_are_close_and_placements_bit_identical(
    name: str, virtual: VirtualCuda | None, tiny_model: Path, tmp_path: Path
) -> None:
    if virtual is not None and name != "pieces":
        pytest.skip("kernels made for a GPU run on none")
    if name == "liger":
        pytest.importorskip("liger_kernel")
    plain = run(tmp_path / "plain", tiny_model, "", nvme=0)
    in_ram = run(tmp_path / "ram", tiny_model, KEYS[name], nvme=0)
    placement = 'weights = ["nvme"]\noptimizer = ["nvme"]\nactivations = ["nvme"]'
    on_nvme = run(tmp_path / "nvme", tiny_model, KEYS[name], placement=placement)
    assert in_ram.losses == pytest.approx(plain.losses, rel=1e-2)
    assert (on_nvme.losses, on_nvme.digests) == (in_ram.losses, in_ram.digests)
