"""Overlap of I/O and compute: steps with all state on NVMe, compared with compute alone and with bytes / drive rate.

    python bench/nvme_step.py --json
    python bench/nvme_step.py --quick         # a minute, a small model
    python bench/nvme_step.py --tokens 1x1x32,1x1x256,2x2x256 --ram 400MiB

Three kinds of work alternate in one process. First, steps run with everything in RAM (compute alone). Then the same
number of steps runs with weights, gradients, optimizer state and activations on the drive. Finally, plain reads and
writes in the same proportion go through the same kind of tier (the drive's mixed rate). Claim: a step takes at most
1.05 times the larger of compute alone and bytes / mixed rate. This holds with few tokens, when the drive limits the
step, and with many tokens, when compute does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # `import megatrain` would set this too late, after torch
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.common import QUICKSTART, Report, step_shape
from bench.models import write_llama
from bench.sides import MicroBatches, Ours, StepTimes, batches, run_config
from megatrain.config.schema import RunConfig
from megatrain.optim.threads import default_num_threads
from megatrain.plan.planner import plan_run
from megatrain.plan.shortfall import DoesNotFitError
from megatrain.training.resolve import resolve
from tiered import NvmeTier, RamTier, TieredStore
from tiered.units import MiB, parse_size

TARGET_RATIO = 1.05
LR = 1e-4
_DRIVE_ROUNDS = 5
ON_NVME = {kind: ["nvme"] for kind in ("weights", "gradients", "optimizer", "activations")}


def main() -> int:
    """Run the bench. Return 1 if a row fails, except for timing rows."""
    arguments = parse_arguments()
    torch.set_num_threads(default_num_threads())
    default = "1x1x32,1x1x256" if arguments.quick else "1x1x32,1x1x256,2x2x256,2x4x256"
    shapes = [step_shape(text) for text in (arguments.tokens or default).split(",")]
    hidden, layers, vocabulary = (128, 4, 1024) if arguments.quick else (768, 12, 8192)
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        model = write_llama(Path(scratch, "model"), hidden=hidden, layers=layers, vocabulary=vocabulary)
        all_ok, times = True, []
        for number, shape in enumerate(shapes):
            tokens = shape[0] * shape[1] * shape[2]
            report = Report("nvme_step", as_json=arguments.json, tokens_per_step=tokens)
            times.append((tokens, *Regime(model, arguments, shape, Path(scratch, f"drive{number}"), report).run()))
            all_ok &= report.all_ok
        if len({tokens for tokens, _, _ in times}) > 1:
            print_crossing(times, arguments)
    return 0 if all_ok else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--quick", action="store_true", help="a model of 1 M parameters, two shapes")
    parser.add_argument("--tokens", help="shapes of a step, micro-batches x rows x tokens, with commas between")
    parser.add_argument("--ram", help='RAM tier of the NVMe side, e.g. "400MiB"; default: twice its minimum')
    parser.add_argument("--steps", type=int, default=3, help="consecutive steps of a turn")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds, after one warm-up round")
    parser.add_argument("--verify", choices=("off", "resume", "always"), default="resume", help="checksums")
    parser.add_argument("--scratch", type=Path, help="folder on the drive to measure; default: the temporary folder")
    return parser.parse_args()


class Regime:
    """Measurement for one number of tokens per step: both sides, the drive, and the printed rows."""

    def __init__(
        self, model: Path, arguments: argparse.Namespace, shape: tuple[int, int, int], folder: Path, report: Report
    ) -> None:
        self._model, self._arguments, self._shape = model, arguments, shape
        self._folder, self._report = folder, report
        folder.mkdir()

    def run(self) -> tuple[float, float]:
        """Measure and print the rows. Return the median seconds per step for compute alone and for bytes / rate."""
        arguments, text = self._arguments, QUICKSTART / "loomings.txt"
        ram_config = run_config(self._model, text, self._shape, self._folder)
        nvme_config = self._nvme_config()
        data = batches(ram_config)
        rounds: list[tuple[StepTimes, StepTimes, float]] = []
        with ExitStack() as stack:
            num_steps = (1 + arguments.rounds) * arguments.steps
            in_ram = stack.enter_context(Ours(ram_config, num_steps))
            on_nvme = stack.enter_context(Ours(nvme_config, num_steps))
            traffic = on_nvme.plan.traffic
            drive = stack.enter_context(Drive(self._folder / "plain", traffic, verify=arguments.verify))
            for _ in range(1 + arguments.rounds):
                turn: list[MicroBatches] = list(islice(data, arguments.steps))
                rounds.append((in_ram.steps(turn, LR), on_nvme.steps(turn, LR), drive.rate_bytes_per_s()))
            for side in (in_ram, on_nvme):
                side.finish()
            self._print_bytes(on_nvme)
        return self._print_times(rounds, sum(traffic.values()))

    def _nvme_config(self) -> RunConfig:
        ram = self._arguments.ram
        if ram is None:
            try:
                plan_run(resolve(self._config_with_ram("1MiB")))
                ram = "1MiB"
            except DoesNotFitError as error:
                ram = f"{2 * error.need_bytes}B"
        self._report.row("nvme.ram_tier", parse_size(ram), "bytes")
        return self._config_with_ram(ram)

    def _config_with_ram(self, ram: str) -> RunConfig:
        tiers: dict[str, Any] = {
            "ram": {"size": ram},
            "nvme": [{"path": str(self._folder / "nvme")}],
            "verify": self._arguments.verify,
        }
        text = QUICKSTART / "loomings.txt"
        return run_config(self._model, text, self._shape, self._folder, tiers=tiers, placement=ON_NVME)

    def _print_times(self, rounds: Sequence[tuple[StepTimes, StepTimes, float]], num_bytes: int) -> tuple[float, float]:
        row, measured = self._report.row, rounds[1:]
        compute_s = statistics.median(ram.total_s for ram, _, _ in measured)
        drive_s = statistics.median(num_bytes / rate for _, _, rate in measured)
        ratios = [nvme.total_s / max(ram.total_s, num_bytes / rate) for ram, nvme, rate in measured]
        row("compute_alone", compute_s, "s")
        for part in ("update_kernels", "cpu"):
            row(f"compute_alone.{part}", statistics.median(ram.parts_s[part] for ram, _, _ in measured), "s")
        row("drive.mixed_rate", statistics.median(rate for _, _, rate in measured), "bytes/s")
        row("bytes_over_rate", drive_s, "s")
        row("bound_by", "compute" if compute_s > drive_s else "drive", "")
        row("nvme.step", statistics.median(nvme.total_s for _, nvme, _ in measured), "s")
        ratio = statistics.median(ratios)
        row("ratio.step/bound", ratio, "x", target=TARGET_RATIO, ok=ratio <= TARGET_RATIO, timing=True)
        row("ratio.step/bound.each", [round(each, 3) for each in ratios], "x")
        for part in measured[0][1].parts_s:
            row(f"nvme.{part}", statistics.median(nvme.parts_s[part] for _, nvme, _ in measured), "s")
        differing = sum((ram.loss, ram.grad_norm) != (nvme.loss, nvme.grad_norm) for ram, nvme, _ in rounds)
        row("loss.turns_that_differ_by_placement", differing, "turns", target=0, ok=differing == 0)
        for counter, unit in (("user", "s"), ("system", "s"), ("page_faults", "pages")):
            row(f"compute_alone.{counter}", statistics.median(ram.usage[counter] for ram, _, _ in measured), unit)
            row(f"nvme.{counter}", statistics.median(nvme.usage[counter] for _, nvme, _ in measured), unit)
        row("load_average", round(os.getloadavg()[0], 2), "threads, 1 minute")
        return compute_s, drive_s

    def _print_bytes(self, side: Ours) -> None:
        planned, num_parameters = side.planned_bytes(), side.plan.graph.num_parameters
        self._report.row("parameters", num_parameters, "1")
        for link, moved in side.moved_bytes().items():
            self._report.row(f"{link}.per_step", side.plan.traffic[link] / num_parameters, "bytes/parameter")
            self._report.row(f"{link}.moved", moved, "bytes", target=planned[link], ok=moved == planned[link])
        for counter in ("prefetch_on_time", "prefetch_late", "prefetch_wasted"):
            total = sum(getattr(window, counter) for window in side.windows)
            self._report.row(f"nvme.{counter}", total, "copies")
        for tier, stats in side.windows[-1].tiers.items():
            high, capacity = stats.high_water_bytes, stats.capacity_bytes
            self._report.row(f"nvme.{tier}.high_water", high, "bytes", target=capacity, ok=high <= capacity)


class Drive:
    """Plain reads and writes through the tier, in the same proportion as in a step, all queued at once."""

    BLOCK_BYTES = 32 * MiB

    def __init__(self, folder: Path, traffic: dict[str, int], *, verify: str, total_bytes: int = 768 * MiB) -> None:
        read, written = traffic["nvme->ram"], traffic["ram->nvme"]
        num_blocks = total_bytes // self.BLOCK_BYTES
        num_read = max(1, round(num_blocks * read / (read + written)))
        keys = [f"block{number}" for number in range(num_blocks)]
        self._read, self._written = keys[:num_read], keys[num_read:]
        tiers = [
            RamTier(total_bytes),
            NvmeTier([folder], 2 * total_bytes, verify=verify),  # type: ignore[arg-type]
        ]
        self._store = TieredStore(tiers)
        for key in keys:
            self._store.register(key, (self.BLOCK_BYTES,), torch.uint8, home="nvme")
            with self._store.acquire(key, "ram", "w") as lease:
                lease.tensor.random_(0, 256)
            self._store.evict(key, "ram")
        self._store.wait_idle()

    def __enter__(self) -> Drive:
        return self

    def __exit__(self, *exception: object) -> None:
        self._store.close()

    def rate_bytes_per_s(self) -> float:
        """Return the rate of concurrent reads and writes in bytes/s.

        Several rounds are timed, because short bursts are faster.
        """
        seconds = sum(self._round_s() for _ in range(_DRIVE_ROUNDS))
        return _DRIVE_ROUNDS * (len(self._read) + len(self._written)) * self.BLOCK_BYTES / seconds

    def _round_s(self) -> float:
        for key in self._written:
            with self._store.acquire(key, "ram", "w"):
                pass
        start_s = time.perf_counter()
        for reads, writes in _interleave(self._read, self._written):
            for key in reads:
                self._store.prefetch(key, "ram")
            for key in writes:
                self._store.evict(key, "ram")
        self._store.wait_idle()
        seconds = time.perf_counter() - start_s
        for key in self._read:
            self._store.evict(key, "ram")
        return seconds


def _interleave(first: Sequence[str], second: Sequence[str]) -> Iterator[tuple[list[str], list[str]]]:
    """Split both sequences evenly into the same number of parts, and yield the parts in pairs."""
    count = max(len(first), len(second), 1)
    for number in range(count):
        yield (
            list(first[number * len(first) // count : (number + 1) * len(first) // count]),
            list(second[number * len(second) // count : (number + 1) * len(second) // count]),
        )


def print_crossing(times: Sequence[tuple[int, float, float]], arguments: argparse.Namespace) -> None:
    """Print at how many tokens per step compute takes as long as the drive: measured, and by formula."""
    report = Report("nvme_step", as_json=arguments.json, tokens_per_step=None)
    (few, few_s, few_drive_s), (many, many_s, many_drive_s) = times[0], times[-1]
    slope = (many_s - few_s) / (many - few)
    crossing = few + ((few_drive_s + many_drive_s) / 2 - few_s) / slope
    report.row("crossing.measured", crossing, "tokens/step")
    # T* = c eta P / 8, where c is the drive's seconds per parameter and eta P the achieved FLOP/s, both from the
    # largest step. This formula omits costs that do not depend on the number of tokens (updates, calls).
    report.row("crossing.formula", many_drive_s / (many_s / many), "tokens/step")
    report.row("compute.per_token", slope, "s")
    report.row("compute.fixed", few_s - slope * few, "s")


if __name__ == "__main__":
    sys.exit(main())
