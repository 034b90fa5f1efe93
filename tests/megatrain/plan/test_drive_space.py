"""Space that a plan needs on the drives of its paths and of ``output_dir``, and the error if a drive is too small."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import load_config
from megatrain.machine.file_systems import Space
from megatrain.plan import tiers
from megatrain.plan.plan import Plan
from megatrain.plan.shortfall import DoesNotFitError
from megatrain.plan.tiers import check_drives, open_store, register_blocks
from megatrain.ranks.world import World
from oracles.tiered_run import ALL_NVME, EXAMPLES, config_text, plan_of
from tiered import MiB
from tiered.units import format_size

#: Bytes of the fp32 weights and AdamW state, and of the gradients (two of the embedding) and the layers' inputs.
SAVED = 3 * 4 * (131_072 + 4 * 174_080 + 1024)
TRANSIENT = 4 * (2 * 131_072 + 4 * 174_080 + 1024) + 15 * 4 * 2 * 64 * 128
RESERVE = 5 * MiB
CHECKPOINTS = " 3 checkpoints are part of this: lower checkpoint.save_total_limit."
COPIES = f" {format_size(3 * SAVED)} of this is for whole copies: checkpoint.save_copy."


@pytest.fixture
def make_plan(tmp_path: Path) -> Callable[..., Plan]:
    """Return a function that plans a run with three checkpoints, on drives or in RAM."""

    def make_plan(nvme: int = 1, **checkpoint: Any) -> Plan:
        placement = {"placement": ALL_NVME} if nvme else {}
        text = config_text(
            tmp_path, EXAMPLES / "quickstart" / "model", nvme=nvme, training='recompute = "full"', **placement,
            advanced='file_size = "256KiB"' if nvme > 1 else "",
        )  # fmt: skip
        table = {"save_total_limit": 3, "min_free_disk": f'"{RESERVE}B"', **checkpoint}
        lines = "".join(f"{key} = {value}\n" for key, value in table.items())
        (tmp_path / "run.toml").write_text(f"{text}[checkpoint]\n{lines}")
        return plan_of(load_config(tmp_path / "run.toml").config)

    return make_plan


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that returns the error if a drive has one byte too little. Other drives have enough space."""

    def refused(plan: Plan, name: str, need: int, *, numbers: dict[str, int], free: int | None = None) -> str:
        """Return the error for the drive of the path ``name``. ``numbers`` are the drives of paths by name."""
        free = need if free is None else free
        limits = {name: free}
        monkeypatch.setattr(tiers, "file_system_number", lambda path: numbers[path.name])
        monkeypatch.setattr(tiers, "disk_usage", lambda path: Space(1 << 50, limits.get(path.name, 1 << 40)))
        check_drives(plan)
        limits[name] = free - 1
        with pytest.raises(DoesNotFitError) as error:
            check_drives(plan)
        assert (error.value.need_bytes, error.value.have_bytes) == (need, need - 1)
        assert error.value.tier == ("output_dir" if name == "checkpoints" else "nvme")
        return str(error.value)

    return refused


def too_small(place: str, need: int) -> str:
    size = format_size(need - 1)
    return f"does not fit: the drive of {place} has {size} free, but this run needs at least {format_size(need)} there"


OWN_DRIVES = {"drive0": 1, "drive1": 2, "checkpoints": 3}


def test_a_drive_needs_space_for_blocks_and_their_generations(
    make_plan: Callable[..., Plan], refused: Callable[..., str], tmp_path: Path
) -> None:
    """All ranks of a host use the same drives."""
    plan = make_plan()
    need = TRANSIENT + 4 * SAVED
    found = refused(plan, "drive0", need, numbers=OWN_DRIVES)
    assert found == f"{too_small(str(tmp_path / 'drive0'), need)}. Free space, or use another drive.{CHECKPOINTS}"
    ranked = replace(plan, run=replace(plan.run, world=World.local(1, 3)))
    found = refused(ranked, "drive0", 3 * need, numbers=OWN_DRIVES)
    assert found.startswith(too_small(str(tmp_path / "drive0"), 3 * need))
    without = replace(plan.run.checkpoint, table=plan.run.checkpoint.table.without_saves())
    plan = replace(plan, run=replace(plan.run, checkpoint=without))
    found = refused(plan, "drive0", TRANSIENT + SAVED, numbers=OWN_DRIVES)
    assert found == f"{too_small(str(tmp_path / 'drive0'), TRANSIENT + SAVED)}. Free space, or use another drive."


def test_output_dir_needs_space_for_copies_and_a_reserve(
    make_plan: Callable[..., Plan], refused: Callable[..., str], tmp_path: Path
) -> None:
    plan = make_plan(save_copy="true")
    need, place = 3 * SAVED + RESERVE, f"output_dir ({tmp_path / 'out'})"
    found = refused(plan, "checkpoints", need, numbers=OWN_DRIVES)
    parts = f"{format_size(3 * SAVED)} to write, and 5.00 MiB that stay free (checkpoint.min_free_disk)"
    lower = "Lower checkpoint.min_free_disk, free space, or use another drive."
    assert found == f"{too_small(place, need)}: {parts}. {lower}{COPIES}"
    ranked = replace(plan, run=replace(plan.run, world=World.local(1, 2)))
    found = refused(ranked, "checkpoints", 6 * SAVED + RESERVE, numbers=OWN_DRIVES)
    assert found.endswith(f" {format_size(6 * SAVED)} of this is for whole copies: checkpoint.save_copy.")
    found = refused(make_plan(), "checkpoints", RESERVE, numbers=OWN_DRIVES)
    assert found == f"{too_small(place, RESERVE)}: 0 B to write, and 5.00 MiB that stay free " + (
        f"(checkpoint.min_free_disk). {lower}"
    )


def test_output_dir_needs_space_for_the_checkpoints_of_blocks_in_ram(
    make_plan: Callable[..., Plan], refused: Callable[..., str], tmp_path: Path
) -> None:
    plan, place = make_plan(nvme=0, min_free_disk='"0B"'), f"output_dir ({tmp_path / 'out'})"
    found = refused(plan, "checkpoints", 3 * SAVED, numbers=OWN_DRIVES)
    assert found == f"{too_small(place, 3 * SAVED)}. Free space, or use another drive.{CHECKPOINTS}"
    ranked = replace(plan, run=replace(plan.run, world=World.local(1, 2)))
    refused(ranked, "checkpoints", 6 * SAVED, numbers=OWN_DRIVES)


def test_paths_on_one_drive_need_space_together(
    make_plan: Callable[..., Plan], refused: Callable[..., str], tmp_path: Path
) -> None:
    """Files of 256 KiB alternate between two paths."""
    plan = make_plan(nvme=2, save_copy="true")
    on_drives, in_output_dir = plan.budgets_by_tier["nvme"], 3 * SAVED + RESERVE
    sizes = {key: on_drives.slot_bytes(block.nbytes) for key, block in plan.program.blocks.items()}
    blocks = sum((4 if plan.program.blocks[key].is_saved else 1) * size for key, size in sizes.items())
    need = blocks + in_output_dir
    found = refused(plan, "drive0", need, numbers={"drive0": 1, "drive1": 1, "checkpoints": 1})
    parts = f"{format_size(blocks + 3 * SAVED)} to write, and 5.00 MiB that stay free (checkpoint.min_free_disk)"
    place, lower = str(tmp_path / "drive0"), "Lower checkpoint.min_free_disk, free space, or use another drive."
    assert found == f"{too_small(place, need)}: {parts}. {lower}{CHECKPOINTS}{COPIES}"


def test_files_of_earlier_starts_count_as_free_space(
    make_plan: Callable[..., Plan], refused: Callable[..., str], tmp_path: Path
) -> None:
    """Files of checkpoints and copies count, each file once, even if it has several links."""
    plan = make_plan(nvme=0, min_free_disk='"0B"')
    for name, nbytes in (("checkpoints", 8192), ("copies", 16_384)):
        path = tmp_path / "out" / name / "c" / "0"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x" * nbytes)
        (path.parent / "1").hardlink_to(path)
    free = 3 * SAVED - 8192 - 16_384
    found = refused(plan, "checkpoints", 3 * SAVED, free=free, numbers=OWN_DRIVES)
    assert found.startswith(too_small(f"output_dir ({tmp_path / 'out'})", 3 * SAVED))


def test_store_of_a_plan_has_its_tiers_and_a_page_on_each_drive(make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    plan = make_plan(nvme=2)
    with open_store(plan) as store:
        assert store.tier_names == ["ram", "nvme"] and store.path == str(tmp_path / "out" / "checkpoints")
        capacities = {name: tier.capacity_bytes for name, tier in store.stats().tiers.items()}
        assert (capacities, store.keep_generations) == (plan.budgets, 3)
        register_blocks(store, plan, durable=True)
        saved = {key for key, block in plan.program.blocks.items() if block.is_saved}
        assert {spec.key for spec in store.blocks()} == saved
        assert all(spec.durable and spec.home == "nvme" for spec in store.blocks())
        register_blocks(store, plan, durable=False)
        assert {spec.key for spec in store.blocks()} == set(plan.program.blocks)
        assert {spec.key for spec in store.blocks() if spec.durable} == saved
    for drive in ("drive0", "drive1"):
        text = (tmp_path / drive / "README.txt").read_text()
        assert text.startswith("This folder belongs to megatrain-tier.")
