"""A run of several ranks, one of which has a full drive. The drive is a small real file system."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from processes.rank_runs import launch, launched, read_until, wait_until
from processes.ranks import LIMIT_S
from processes.saved_run import make_run
from tiered import MiB
from tiered.ext import claim_directory

KEYS = [
    word
    for key in (
        "training.gradient_accumulation_steps=4",
        "training.gradient_lanes=4",
        "tiers.nvme.0.size=80MiB",
        "tiers.ram.size=24MiB",
        "placement.weights=nvme",
        "placement.optimizer=nvme",
        "checkpoint.save_steps=1",
    )
    for word in ("--set", key)
]


@pytest.mark.slow
def test_full_drive_of_one_rank_pauses_all_ranks(small_drive: Any, tmp_path: Path) -> None:
    """Saves need new files for changed blocks. Rank 1 has no space, so all ranks wait, and then continue together."""
    run = make_run(tmp_path / "run")
    drive = run.folder / "drive"
    claim_directory(drive)  # as an earlier run would; otherwise, the run refuses the folder
    small_drive.store.mkdir()
    (drive / "rank00001").symlink_to(small_drive.store)
    on_drive = [*KEYS, "--set", f"tiers.nvme.0.path={drive}"]
    metrics = run.out / "metrics.jsonl"
    with launched(2, run.write_config(steps=10_000), *on_drive) as process:
        wait_until(lambda: metrics.exists() and b"grad_norm" in metrics.read_bytes(), process)
        small_drive.fill(leave_bytes=MiB // 4)
        assert "rank 1: " in read_until("paused", process)
        small_drive.make_room()
        assert "rank 1: " in read_until("free space again", process)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75, err
    assert run.call("ckpt", "verify", run.out).exit_code == 0
    again = launch(2, run.write_config(steps=10_000), "--dry-run", *on_drive)
    assert again.codes == [0], again.err
