"""The table that docs/what_fits_modules.py generates is on the page, and its sizes match a real store."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import megatrain
from oracles.any_modules import CASES
from tiered import KiB, MiB

ROOT = Path(__file__).parents[2]
pytest.importorskip("diffusers")


@pytest.fixture(scope="module")
def program() -> ModuleType:
    """Return the module that generates the table."""
    spec = importlib.util.spec_from_file_location("what_fits_modules", ROOT / "docs" / "what_fits_modules.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["what_fits_modules"] = module
    spec.loader.exec_module(module)
    return module


def test_what_fits_page_has_the_current_module_table(program: ModuleType) -> None:
    pytest.importorskip("peft")
    page = (ROOT / "docs" / "what_fits.md").read_text(encoding="utf-8")
    assert page.endswith(f"\n{program.section()}\n"), "run python docs/what_fits_modules.py"


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_predicted_module_bytes_match_a_store(lora: bool, program: ModuleType, tmp_path: Path) -> None:
    needs = program.needs_of(program.build_module(CASES["Wan"].make, lora=lora))
    torch.manual_seed(0)
    model = CASES["Wan"].make().to(torch.bfloat16)
    if lora:
        peft = pytest.importorskip("peft")
        model.requires_grad_(False)
        model.add_adapter(peft.LoraConfig(r=program.RANK, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    ram = 560 * KiB
    with megatrain.open_store(ram=f"{ram}B", nvme=tmp_path, nvme_size="64MiB") as store:
        megatrain.offload(model, store)
        megatrain.TieredAdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3, max_grad_norm=1.0)
        stats = store.stats().tiers
        assert sum(spec.nbytes for spec in store.blocks()) == pytest.approx(needs.stored, rel=0.01)  # due to padding
        in_ram, on_drive = needs.on(ram, 64 * MiB)
        rounding = 4 * KiB * len(needs.blocks) * (1 + program.KEPT)  # of slot sizes
        assert on_drive and in_ram == pytest.approx(stats["ram"].home_bytes, abs=rounding)
        assert on_drive == pytest.approx(stats["nvme"].used_bytes, abs=rounding)
