"""How long a checkpoint takes (which depends on the bytes in RAM, not on the state's size) and how it delays training.

    python bench/checkpoint.py --json
    python bench/checkpoint.py --quick        # less than a minute: 0.1 and 0.4 GB, a small model
    python bench/checkpoint.py --sizes 0.5,2,8 --scratch /mnt/drive

First, the bench commits states of several sizes, split into the same number of blocks (the smallest also into ten times
that number). There are four kinds of states. In three of them, RAM is the home of none, a tenth or all of the blocks,
and NVMe is the home of the others. In the fourth, all homes are on NVMe, and a tenth of the blocks is dirty in RAM at
each commit. Each state is committed as it is, and again after every block on NVMe has been rewritten. Then the real
trainer runs. Its steps while a checkpoint is written are compared with its other steps.

Claims: a commit writes the blocks whose home is RAM and hard-links the others. An unchanged commit of the largest state
on NVMe takes at most 1.5 times as long as a commit of the smallest state.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # `import megatrain` would set this too late, after torch
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil
import torch

import tiered.durable.commit
from bench.common import QUICKSTART, Report
from bench.models import write_llama
from bench.sides import run_config
from megatrain.base.observer import CheckpointMetrics, RunObserver, StepMetrics
from megatrain.training.trainer import Trainer
from tiered import CommitFigures, NvmeTier, RamTier, TieredStore
from tiered.durable.arrays import flush_arrays
from tiered.units import PAGE_BYTES, GiB, MiB, round_up

TARGET_RATIO = 1.5
_SPARE_RAM_BYTES = 2 * GiB  # reserved for other programs

#: Name -> (share of blocks whose home is RAM, share of blocks that are changed in RAM before each commit).
SHARES = {"ram0": (0.0, 0.0), "ram10": (0.1, 0.0), "ram100": (1.0, 0.0), "changed10": (0.0, 0.1)}


def main() -> int:
    """Run the bench. Return 1 if a row fails, except for timing rows."""
    arguments = parse_arguments()
    default = "0.1,0.4" if arguments.quick else "0.5,2,8"
    sizes = sorted(float(text) for text in (arguments.sizes or default).split(","))
    report = Report("checkpoint", as_json=arguments.json, tokens_per_step=None)
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        Costs(arguments, Path(scratch), report).run(sizes)
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        hidden, layers, vocabulary = (128, 4, 1024) if arguments.quick else (512, 8, 8192)
        model = write_llama(Path(scratch, "model"), hidden=hidden, layers=layers, vocabulary=vocabulary)
        report.row("model", f"llama {hidden}x{layers}, vocabulary {vocabulary}", "")
        for placement in ("ram", "nvme"):
            for mode in ("beside", "waiting"):
                Stall(model, arguments, Path(scratch), report).run(placement, mode)
    report.row("load_average", round(os.getloadavg()[0], 2), "threads, 1 minute")
    return 0 if report.all_ok else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--quick", action="store_true", help="small states, a model of 1 M parameters")
    parser.add_argument("--sizes", help="states in GB (10^9), with commas between; what does not fit is left out")
    parser.add_argument("--blocks", type=int, default=50, help="blocks of a state; one state gets 10 times this number")
    parser.add_argument("--rounds", type=int, help="measured commits of each kind, after one warm-up")
    parser.add_argument("--saves", type=int, help="checkpoints of each training run")
    parser.add_argument("--scratch", type=Path, help="folder on the drive to measure; default: the temporary folder")
    return parser.parse_args()


@dataclass(frozen=True)
class Cost:
    """Measurements of one commit, and the seconds it spent flushing files that were written before the commit."""

    figures: CommitFigures
    flush_s: float


class Costs:
    """Measures how long a store takes to commit states of several sizes."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, report: Report) -> None:
        self._arguments, self._folder, self._report = arguments, folder, report
        self._rounds = arguments.rounds or (2 if arguments.quick else 3)

    def run(self, sizes: Sequence[float]) -> None:
        """Measure all state sizes and RAM shares, and print the rows."""
        num_blocks = self._arguments.blocks
        fitting = {
            (size, share): self._measure(size, share, num_blocks, f"{size:g}GB.{share}")
            for size in sizes
            for share in SHARES
        }
        done = [size for size in sizes if fitting[size, "ram0"]]
        self._measure(sizes[0], "ram0", 10 * num_blocks, f"{sizes[0]:g}GB.ram0.{10 * num_blocks}blocks")
        if len(done) > 1:
            self._compare(done[0], done[-1])

    def _compare(self, small: float, large: float) -> None:
        """Commit two states on NVMe alternately, so that other load slows both down. Print the ratio of their times."""
        num_blocks, rounds = self._arguments.blocks, max(5, self._rounds)
        with ExitStack() as stack:
            states = []
            for size in (small, large):
                nbytes = self._nbytes(size, num_blocks)
                state = State(self._folder / f"state{size:g}", nbytes, num_blocks, "ram0")
                states.append(stack.enter_context(state))
                state.rewrite(everything=True)
                state.commit()
            pairs = [[state.commit().figures.seconds for state in states] for _ in range(rounds)]
        for size in (small, large):
            shutil.rmtree(self._folder / f"state{size:g}")
        ratios = [large_s / small_s for small_s, large_s in pairs]
        ratio, name = statistics.median(ratios), f"ratio.ram0.{large:g}GB/{small:g}GB"
        self._report.row(name, ratio, "x", target=TARGET_RATIO, ok=ratio <= TARGET_RATIO, timing=True)
        self._report.row(f"{name}.each", [round(each, 3) for each in ratios], "x")

    def _nbytes(self, size: float, num_blocks: int) -> int:
        """Convert ``size`` from GB to bytes, rounded up so that each block consists of whole pages."""
        return round_up(int(size * 1e9) // num_blocks, PAGE_BYTES) * num_blocks

    def _measure(self, size: float, share: str, num_blocks: int, name: str) -> bool:
        """Commit one state and print the rows. Return False if the state does not fit on this machine."""
        in_ram, _ = SHARES[share]
        nbytes = self._nbytes(size, num_blocks)
        ram_bytes, disk_bytes = int(in_ram * nbytes) + _SPARE_RAM_BYTES, 3 * nbytes
        have_ram, have_disk = psutil.virtual_memory().available, shutil.disk_usage(self._folder).free
        if ram_bytes > have_ram or disk_bytes > have_disk:
            text = f"needs {ram_bytes} bytes of RAM, {have_ram} free; {disk_bytes} of disk, {have_disk} free"
            self._report.row(f"{name}.skipped", text, "")
            return False
        with State(self._folder / "state", nbytes, num_blocks, share) as state:
            state.rewrite(everything=True)
            state.commit()
            unchanged = [state.commit() for _ in range(self._rounds)]
            rewritten = [state.commit(rewrite=True) for _ in range(self._rounds)] if in_ram < 1 else []
        shutil.rmtree(self._folder / "state")
        self._print_results(name, unchanged, rewritten, state)
        return True

    def _print_results(self, name: str, unchanged: Sequence[Cost], rewritten: Sequence[Cost], state: State) -> None:
        row, (first, *_) = self._report.row, unchanged
        written, linked = first.figures.written_bytes, first.figures.linked_bytes
        row(f"{name}.written", written, "bytes", target=state.ram_bytes, ok=written == state.ram_bytes)
        rest = state.nbytes - state.ram_bytes
        row(f"{name}.linked", linked, "bytes", target=rest, ok=linked == rest)
        for kind, costs in (("as_it_stands", unchanged), ("rewritten", rewritten)):
            if not costs:
                continue
            seconds = statistics.median(cost.figures.seconds for cost in costs)
            flush_s = statistics.median(cost.flush_s for cost in costs)
            row(f"{name}.{kind}.seconds", seconds, "s")
            row(f"{name}.{kind}.each", [round(cost.figures.seconds, 4) for cost in costs], "s")
            row(f"{name}.{kind}.held", statistics.median(cost.figures.freeze_s for cost in costs), "s")
            row(f"{name}.{kind}.flush", flush_s, "s")
            row(f"{name}.{kind}.rest", statistics.median(c.figures.seconds - c.flush_s for c in costs), "s")
        if state.ram_bytes:
            median_s = statistics.median(cost.figures.seconds for cost in unchanged)
            row(f"{name}.as_it_stands.rate", state.ram_bytes / median_s, "bytes/s")


class State:
    """State to commit, as blocks of equal size in a separate store. A context manager that closes the store.

    Attributes:
        nbytes: Total size of all blocks, in bytes.
        ram_bytes: Total size of the blocks whose home is RAM, in bytes.
    """

    def __init__(self, folder: Path, nbytes: int, num_blocks: int, share: str) -> None:
        in_ram, changed = SHARES[share]
        num_in_ram = round(in_ram * num_blocks)
        self._block_bytes = nbytes // num_blocks
        self._in_ram = [f"ram{number}" for number in range(num_in_ram)]
        self._on_nvme = [f"nvme{number}" for number in range(num_blocks - num_in_ram)]
        self._changed = self._on_nvme[: round(changed * num_blocks)]
        self.nbytes, self.ram_bytes = nbytes, num_in_ram * self._block_bytes
        num_copies = max(4, len(self._changed))
        ram = RamTier(self.ram_bytes + num_copies * self._block_bytes)
        nvme = NvmeTier([folder / "nvme"], max(3 * nbytes, MiB))
        self._store = TieredStore([ram, nvme], path=str(folder / "checkpoints"), keep_generations=1)
        self._turn = 0
        for key in (*self._in_ram, *self._on_nvme):
            home = "ram" if key in self._in_ram else "nvme"
            self._store.register(key, (self._block_bytes,), torch.uint8, home=home)

    def __enter__(self) -> State:
        return self

    def __exit__(self, *exception: object) -> None:
        self._store.close()

    def rewrite(self, *, everything: bool = False) -> None:
        """Rewrite all blocks on NVMe (and in RAM, with ``everything``), and wait for all transfers."""
        for key in (*self._in_ram, *self._on_nvme) if everything else self._on_nvme:
            self._change(key)
            if key in self._on_nvme:
                self._store.evict(key, "ram")
        self._store.wait_idle()

    def _change(self, key: str) -> None:
        self._turn += 1
        with self._store.acquire(key, "ram", "w") as lease:
            lease.tensor.fill_(self._turn % 251)

    def commit(self, *, rewrite: bool = False) -> Cost:
        """Change the blocks that should be dirty in RAM. Then commit, and wait until the commit is complete.

        Args:
            rewrite: Whether to rewrite all blocks on NVMe first.
        """
        if rewrite:
            self.rewrite()
        for key in self._changed:
            self._change(key)
        with TimedFlush() as flush:
            commit = self._store.commit()
            commit.wait()
        return Cost(commit.figures, flush.seconds)


class TimedFlush:
    """Context manager that measures how long a commit spends flushing files that were written before the commit."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> TimedFlush:
        setattr(tiered.durable.commit, "flush_arrays", self._flush)  # noqa: B010
        return self

    def __exit__(self, *exception: object) -> None:
        setattr(tiered.durable.commit, "flush_arrays", flush_arrays)  # noqa: B010

    def _flush(self, arrays: Any) -> None:
        start_s = time.perf_counter()
        flush_arrays(arrays)
        self.seconds += time.perf_counter() - start_s


class Stall(RunObserver):
    """Training run that saves a checkpoint every few steps. The object is also the observer of the run.

    A cycle starts at the end of the last step before a save, and ends at the same point before the next save. Steps in
    the second half of a cycle count as undisturbed, because the checkpoint should be complete by then. The cost of a
    save is the time by which its cycle exceeds the same number of undisturbed steps.
    """

    CYCLE = 8  # steps

    def __init__(self, model: Path, arguments: argparse.Namespace, folder: Path, report: Report) -> None:
        self._model, self._folder, self._report = model, folder, report
        self._num_saves = arguments.saves or (3 if arguments.quick else 8)
        self._length = 32 if arguments.quick else 128  # tokens per step
        self._ends_s: list[float] = []
        self._saves: list[CheckpointMetrics] = []

    def run(self, placement: str, mode: str) -> None:
        """Train with the optimizer state in RAM or on NVMe, and print the rows.

        Args:
            placement: "ram" or "nvme".
            mode: "beside" if steps continue during a save, "waiting" if they wait for it.
        """
        out = self._folder / f"{placement}_{mode}"
        tables: dict[str, Any] = {"tiers": {"ram": {"size": "4GiB"}}}
        if placement == "nvme":
            tables["placement"] = {"optimizer": ["nvme"]}
            tables["tiers"]["nvme"] = [{"path": str(out / "drive"), "size": "4GiB"}]
        num_steps = (self._num_saves + 1) * self.CYCLE
        training = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_steps": num_steps}
        saving = {"save_steps": self.CYCLE, "async_save": mode == "beside", "min_free_disk": "0MiB"}
        text = QUICKSTART / "loomings.txt"
        config = run_config(
            self._model, text, (1, 1, self._length), out, training=training, checkpoint=saving, **tables
        )
        Trainer(config, observer=self).train()
        shutil.rmtree(out)
        self._print_results(f"save.{placement}.{mode}")

    def _print_results(self, name: str) -> None:
        row = self._report.row
        ends = [*range(self.CYCLE - 1, len(self._ends_s), self.CYCLE)]  # last step of each cycle, before a save
        periods = [after - before for before, after in pairwise(self._ends_s)]
        quiet_s = statistics.median(
            second for start in ends[:-1] for second in periods[start + self.CYCLE // 2 : start + self.CYCLE]
        )
        cycles = [self._ends_s[end] - self._ends_s[start] for start, end in pairwise(ends)]
        saves = [save for save in self._saves if save.step < len(self._ends_s)]
        row(f"{name}.step_alone", quiet_s, "s")
        row(f"{name}.step_after_save", statistics.median(periods[start] for start in ends[:-1]), "s")
        row(f"{name}.lost_per_save", statistics.median(cycle - self.CYCLE * quiet_s for cycle in cycles), "s")
        row(f"{name}.held", statistics.median(save.stall_s for save in saves), "s")
        row(f"{name}.seconds", statistics.median(save.seconds for save in saves), "s")
        row(f"{name}.written", saves[0].written_bytes, "bytes")
        row(f"{name}.linked", saves[0].linked_bytes, "bytes")
        row(f"{name}.saves", len(saves), "saves", target=self._num_saves, ok=len(saves) == self._num_saves)

    def on_step(self, metrics: StepMetrics) -> None:
        self._ends_s.append(time.perf_counter())

    def on_checkpoint(self, metrics: CheckpointMetrics) -> None:
        self._saves.append(metrics)


if __name__ == "__main__":
    sys.exit(main())
