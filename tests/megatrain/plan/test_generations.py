"""Space for checkpoints on the drive: the planned amount, and the message if there is too little."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megatrain.config import load_config
from megatrain.engine.program.block_plan import DURABLE_KINDS
from megatrain.machine.file_systems import own_drive_bytes
from megatrain.plan.plan import Plan
from megatrain.plan.planner import plan_run
from megatrain.plan.shortfall import DoesNotFitError
from megatrain.plan.show import table_rows
from megatrain.training.resolve import resolve
from oracles.tiered_run import EXAMPLES, config_text
from tiered import MiB, NvmeTier, RamTier, TieredStore

ON_DRIVE = 'weights = "nvme"\noptimizer = "nvme"'
OFF = ("save_strategy=no", "save_on_signal=false")


def make_plan(folder: Path, *overrides: str, **tables: str) -> Plan:
    text = config_text(folder, EXAMPLES / "quickstart" / "model", **tables)
    path = folder / "run.toml"
    path.write_text(text.replace("[model]", "[model]\ntrain_from_scratch = true", 1))
    return plan_run(resolve(load_config(path, overrides=overrides).config))


def durable_bytes(plan: Plan, tier: str) -> int:
    return sum(plan.placement.home_bytes[tier][kind] for kind in DURABLE_KINDS)


@pytest.mark.parametrize(
    ("overrides", "sets"),
    [
        ((), 2),
        (("save_total_limit=1",), 2),
        (("save_total_limit=5",), 5),
        (("save_strategy=no",), 2),
        (("save_on_signal=false",), 2),
        (OFF, 0),
    ],
)
def test_each_generation_takes_the_durable_bytes(tmp_path: Path, overrides: tuple[str, ...], sets: int) -> None:
    plan = make_plan(tmp_path, *overrides, placement=ON_DRIVE)
    held = durable_bytes(plan, "nvme")
    # For each parameter a weight, m and v in fp32, plus alignment.
    num_parameters = sum(layout.num_elements for layout in plan.graph.layouts.values())
    assert 12 * num_parameters <= held < 12 * num_parameters + MiB
    assert plan.placement.generation_bytes == {"ram": 0, "nvme": sets * held}
    assert plan.totals["nvme"] == sum(plan.placement.home_bytes["nvme"].values()) + sets * held
    rows = {kind: sizes for kind, sizes, _ in table_rows(plan)}
    assert rows.get("checkpoints", {}).get("nvme", 0) == sets * held
    assert plan.checkpoint.output_dir_bytes == 0


def test_blocks_in_ram_are_saved_to_the_output_folder(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    assert not any(plan.placement.generation_bytes.values())
    assert "checkpoints" not in [kind for kind, _, _ in table_rows(plan)]
    blocks = [block for block in plan.program.blocks.values() if block.kind in DURABLE_KINDS]
    assert plan.checkpoint.output_dir_bytes == sum(block.nbytes for block in blocks)


def refused(folder: Path, size: str, *overrides: str, **tables: str) -> DoesNotFitError:
    with pytest.raises(DoesNotFitError) as caught:
        make_plan(folder, *overrides, f"tiers.nvme.0.size={size}", **tables)
    return caught.value


@pytest.mark.parametrize(
    ("limit", "ram"),
    [
        (2, "256MiB"),
        pytest.param(4, "256MiB", marks=pytest.mark.slow),
        pytest.param(2, "8MiB", marks=pytest.mark.slow),
        (4, "7MiB"),
    ],
)
def test_every_size_in_the_error_is_the_minimum(tmp_path: Path, limit: int, ram: str) -> None:
    tables = {"ram": ram, "placement": ON_DRIVE if ram == "256MiB" else ""}
    error = refused(tmp_path, "4KiB", f"save_total_limit={limit}", **tables)
    named = [int(size) for size in re.findall(r"(?:needs at least|would need) (\d+) \(", str(error))]
    assert len(named) == (3 if limit > 2 else 2), str(error)
    settings = [(f"save_total_limit={limit}",), ("save_total_limit=2",), OFF]
    for need, overrides in zip(named, settings if limit > 2 else settings[::2], strict=True):
        assert make_plan(tmp_path, *overrides, f"tiers.nvme.0.size={need}B", **tables).totals["nvme"] <= need
        below = refused(tmp_path, f"{need - 1}B", *overrides, **tables)
        assert (below.tier, below.need_bytes) == ("nvme", need)
    assert named == sorted(named, reverse=True)


def test_plan_without_checkpoints_does_not_mention_them(tmp_path: Path) -> None:
    assert "checkpoint" not in str(refused(tmp_path, "4KiB", *OFF, placement=ON_DRIVE))


def test_tight_drive_sheds_blocks_with_several_generations(tmp_path: Path) -> None:
    usual = make_plan(tmp_path, ram="8MiB")
    need = refused(tmp_path, "4KiB", ram="8MiB").need_bytes
    assert need < usual.totals["nvme"]
    tight = make_plan(tmp_path, f"tiers.nvme.0.size={need}B", ram="8MiB")
    assert 0 < durable_bytes(tight, "nvme") < durable_bytes(usual, "nvme")
    assert 7 * MiB < tight.totals["ram"] <= 8 * MiB, "blocks that left the drive are there now"


def test_space_of_own_checkpoints_counts_as_available(tmp_path: Path) -> None:
    text = config_text(tmp_path, EXAMPLES / "quickstart" / "model").replace('size = "256MiB"\n', 'size = "auto"\n')
    (tmp_path / "run.toml").write_text(text)
    config = load_config(tmp_path / "run.toml").config
    path, checkpoints = config.tiers.nvme[0].path, config.output_dir / "checkpoints"
    assert own_drive_bytes(path, checkpoints) == 0
    tiers = [RamTier(MiB), NvmeTier([path], 64 * MiB)]
    with TieredStore(tiers, path=str(checkpoints)) as store:
        store.register("block", (MiB // 4,), torch.float32, home="nvme", durable=True)
        for _ in range(2):
            with store.acquire("block", "ram", "w") as lease:
                lease.tensor.fill_(1.0)
            store.evict("block", "ram")
            store.commit({}).wait()
    assert own_drive_bytes(path, checkpoints) == 2 * MiB
    assert own_drive_bytes(path, tmp_path / "another run") == MiB, "only the live block"
