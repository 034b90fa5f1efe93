"""Cost of many blocks and many checkpoints: registering a block, opening a committed folder, `ckpt ls`.

    python bench/many_blocks.py --json
    python bench/many_blocks.py --quick        # 2,000 blocks and 50 checkpoints

Claims: registering a block with a 4 KiB slot in a RAM tier takes at most 150 us. For the last tenth of 100,000 blocks,
it takes at most 1.5 times as long as for the first tenth. `TieredStore.open` of a committed folder of 100,000 such
blocks takes at most 10 s. `ckpt ls` of 2,000 checkpoints with 22 blocks each takes at most 3 s.

The row `floor` is the CPU time that plain Python needs to open, read, hash and close the blocks' files.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import xxhash

from bench.common import ROOT, Report
from megatrain.checkpoint.state import RunState
from tiered import GiB, MiB, NvmeTier, RamTier, TieredStore

REGISTER_TARGET_US, OPEN_TARGET_S, LIST_TARGET_S, GROWTH_TARGET = 150.0, 10.0, 3.0, 1.5
BLOCKS_OF_CHECKPOINT = 22
_NUM_PARTS = 10


def main() -> int:
    """Run the bench. Return 1 if a row fails, except for timing rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--quick", action="store_true", help="2,000 blocks and 50 checkpoints")
    parser.add_argument("--blocks", type=int, help="blocks of the store")
    parser.add_argument("--checkpoints", type=int, help="checkpoints of the run")
    parser.add_argument("--scratch", type=Path, help="folder for the files; default: the temporary folder")
    arguments = parser.parse_args()
    num_blocks = arguments.blocks or (2_000 if arguments.quick else 100_000)
    num_checkpoints = arguments.checkpoints or (50 if arguments.quick else 2_000)
    report = Report("many_blocks", as_json=arguments.json, tokens_per_step=None)
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        measure_register(report, num_blocks)
        measure_open(report, Path(scratch, "store"), num_blocks)
        measure_list(report, Path(scratch, "run"), num_checkpoints)
    report.row("load_average", round(os.getloadavg()[0], 2), "threads, 1 minute")
    return 0 if report.all_ok else 1


def measure_register(report: Report, num_blocks: int) -> None:
    """Register blocks in RAM, and print the CPU time per block for each tenth of the blocks."""
    means = []
    with TieredStore([RamTier(2 * GiB)]) as store:
        for part in range(_NUM_PARTS):
            start_s = time.process_time()
            for number in range(num_blocks // _NUM_PARTS):
                store.register(f"{part}/{number}", (64,), torch.float32, home="ram")
            means.append((time.process_time() - start_s) / (num_blocks // _NUM_PARTS) * 1e6)
        report.row(
            f"register.{num_blocks}.blocks", len(store), "blocks", target=num_blocks, ok=len(store) == num_blocks
        )
    mean = sum(means) / len(means)
    report.row(f"register.{num_blocks}.cpu", mean, "us/block", target=REGISTER_TARGET_US, ok=mean <= 150, timing=True)
    growth = means[-1] / means[0]
    report.row(
        f"register.{num_blocks}.last/first", growth, "x", target=GROWTH_TARGET, ok=growth <= GROWTH_TARGET, timing=True
    )
    report.row(f"register.{num_blocks}.each", [round(each, 1) for each in means], "us/block")


def measure_open(report: Report, folder: Path, num_blocks: int) -> None:
    """Commit the blocks of a RAM tier, and print how long the commit and opening the committed folder take."""
    with TieredStore([RamTier(2 * GiB)], path=str(folder)) as store:
        for number in range(num_blocks):
            store.put(f"{number // 100}/{number}", torch.full((64,), float(number)))
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        store.commit().wait()
        report.row(f"commit.{num_blocks}", time.perf_counter() - start_s, "s")
        report.row(f"commit.{num_blocks}.cpu", (time.process_time() - start_cpu_s) / num_blocks * 1e6, "us/block")
    paths = [folder / "snap/00000001" / f"{number // 100}/{number}" / "c/0" for number in range(num_blocks)]
    start_cpu_s = time.process_time()
    for path in paths:
        _read_plainly(path)
    report.row(f"open.{num_blocks}.floor", (time.process_time() - start_cpu_s) / num_blocks * 1e6, "us/block")
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    with TieredStore.open(str(folder), [RamTier(2 * GiB)]) as store:
        seconds = time.perf_counter() - start_s
        name = f"open.{num_blocks}"
        report.row(name, seconds, "s", target=OPEN_TARGET_S, ok=seconds <= OPEN_TARGET_S, timing=True)
        report.row(f"open.{num_blocks}.cpu", (time.process_time() - start_cpu_s) / num_blocks * 1e6, "us/block")
        last = float(store[f"{(num_blocks - 1) // 100}/{num_blocks - 1}"][0])
        report.row(f"open.{num_blocks}.last", last, "", target=num_blocks - 1, ok=last == num_blocks - 1)
    shutil.rmtree(folder)


def _read_plainly(path: Path) -> str:
    fd = os.open(path, os.O_RDONLY)
    try:
        return xxhash.xxh3_64(os.read(fd, 4096)).hexdigest()
    finally:
        os.close(fd)


def measure_list(report: Report, folder: Path, num_checkpoints: int) -> None:
    """Create a run with many checkpoints, and print how long `ckpt ls` takes, including its startup."""
    tiers = [RamTier(8 * MiB), NvmeTier([folder / "checkpoints"], 64 * MiB)]
    with TieredStore(tiers, keep_generations=num_checkpoints) as store:
        for number in range(BLOCKS_OF_CHECKPOINT):
            store.put(f"layer.{number // 4}/w{number}", torch.ones(64))
        for step in range(1, num_checkpoints + 1):
            store.commit(_state(step).to_meta()).wait()
    command = [sys.executable, "-m", "megatrain", "ckpt", "ls", str(folder), "--json"]
    start_s = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    seconds = time.perf_counter() - start_s
    found = [each["step"] for each in json.loads(done.stdout)["checkpoints"]]
    report.row(
        f"ckpt_ls.{num_checkpoints}.found",
        len(found),
        "checkpoints",
        target=num_checkpoints,
        ok=sorted(found) == list(range(1, num_checkpoints + 1)),
    )
    name = f"ckpt_ls.{num_checkpoints}"
    report.row(name, seconds, "s", target=LIST_TARGET_S, ok=seconds <= LIST_TARGET_S, timing=True)


def _state(step: int) -> RunState:
    return RunState(
        step=step, max_steps=step, num_updates=step, epoch=0, epoch_step=step, num_real_tokens=0, num_trained_tokens=0,
        seconds=0.0, first_loss=None, last_loss=None, seed=0, data_seed=0, lr_schedule={}, config_toml="",
        data_fingerprint="", model={}, run_name="bench", saved_at=f"2026-01-01T00:00:00.{step:06d}+00:00",
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
