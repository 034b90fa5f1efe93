"""The tier's share of a GPU's memory, and the share left to libraries."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatrain.config import load_config
from megatrain.config.schema import RunConfig
from megatrain.machine.resources import describe_library_memory
from megatrain.machine.this_machine import THIS_MACHINE, ThisMachine
from megatrain.training.resolve import resolve_tiers
from tiered import GiB, MiB

CUDA = torch.device("cuda")


def config_of(folder: Path, tiers: str) -> RunConfig:
    (folder / "run.toml").write_text(
        f'task = "pretrain"\noutput_dir = "out"\ndevice = "cuda"\n[model]\nmodel_name_or_path = "model"\n'
        f'[[data.train]]\npath = "text.txt"\n{tiers}'
    )
    return load_config(folder / "run.toml").config


@pytest.mark.parametrize(
    ("total", "tiers", "expected"),
    [
        (140 * GiB, "", 133 * GiB),  # 5% of the memory is more than libraries need
        (16 * GiB, "", 15 * GiB),
        (4 * GiB, "", 4 * GiB - 4 * GiB // 10),  # the margin is at most a tenth
        (140 * GiB, '[tiers]\nsafety_margin = "512MiB"\n', 139 * GiB),
        (16 * GiB, '[tiers.gpu]\nsize = "15.5GiB"\n', 15 * GiB + 512 * MiB),
    ],
)
def test_margin_is_the_minimum_of_the_libraries(
    total: int, tiers: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (total, total))
    assert resolve_tiers(config_of(tmp_path, tiers)).gpu_capacity_bytes(CUDA) == expected


def test_gpu_tier_that_leaves_libraries_too_little_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (15 * GiB, 16 * GiB))
    monkeypatch.setattr(ThisMachine, "has_unified_memory", False)
    fine = describe_library_memory(THIS_MACHINE, 14 * GiB, CUDA)
    assert fine == "1.00 GiB of free GPU memory are outside of the tier; libraries are allowed 1.00 GiB"
    tight = describe_library_memory(THIS_MACHINE, 14 * GiB + 512 * MiB, CUDA)
    assert tight.startswith("512.00 MiB") and "more than tiers.gpu.size = 14.00 GiB they may find none" in tight
    assert describe_library_memory(THIS_MACHINE, 14 * GiB, torch.device("cpu")) == ""
