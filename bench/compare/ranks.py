"""Our engine and DeepSpeed ZeRO-3 with one and with two processes, on the CPU, with state on NVMe.

    python bench/compare/ranks.py --json --python /path/to/environment/bin/python --scratch /mnt/drive
    python bench/compare/ranks.py --quick

Claim: our losses are bit-identical with one and with two processes. DeepSpeed's losses are only reported, as are both
sides' seconds, CPU seconds and bytes. All processes start from the same weights and use one thread. A step has the
same tokens and hyper-parameters for any number of processes. The sides alternate, a few steps each. Together, our
processes get 25% more RAM than the minimum. Each DeepSpeed process has its own buffers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

# `deepspeed.py` removes this folder from the path, because `import deepspeed` would find that file.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from bench.common import Report, step_shape
from bench.compare.deepspeed import STEPS_PER_ROUND, make_model
from bench.compare.ours import least_ram_bytes
from bench.compare.processes import SideFailedError, SideProcess, import_failure
from bench.compare.worker import Job
from bench.compare.zero3 import free_port

SIDES = ("ours", "deepspeed")
SIZES = (1, 2)

#: Measurements of each process, by round.
Rounds = Sequence[Sequence[Mapping[str, Any]]]


def main() -> int:
    """Run the comparison. Return 1 if a row fails, except for timing rows."""
    arguments = parse_arguments()
    shape = arguments.tokens
    report = Report("compare/ranks", as_json=arguments.json, tokens_per_step=shape[0] * shape[1] * shape[2])
    reason = import_failure(arguments.python, "deepspeed") if "deepspeed" in arguments.sides else ""
    if reason:
        report.row("deepspeed.skipped", reason, "reason")
    sides = [side for side in arguments.sides if side == "ours" or not reason]
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        model = Path(scratch) / "model"
        make_model(model, quick=arguments.quick)
        report.row("load_average.before", round(os.getloadavg()[0], 2), "threads, 1 minute")
        measured: dict[tuple[str, int], Rounds] = {}
        with ExitStack() as stack:
            worlds = {}
            for side in sides:
                for size in SIZES:
                    job = Job(side, str(model), "", shape, (1 + arguments.rounds) * STEPS_PER_ROUND, 1, size=size)
                    try:
                        worlds[side, size] = stack.enter_context(_world(job, arguments.python, Path(scratch)))
                    except SideFailedError as error:
                        _print_failure(report, f"{side}.{size}", error)
            measured = _take_turns(worlds, arguments.rounds, report)
        report.row("load_average", round(os.getloadavg()[0], 2), "threads, 1 minute")
    for (side, size), rounds in measured.items():
        _print_results(report, f"{side}.{size}", rounds)
    for side in sides:
        _print_losses(report, side, [measured.get((side, size)) for size in SIZES])
    return 0 if report.all_ok else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--quick", action="store_true", help="a model of 7 M parameters instead of 97.5 M")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has DeepSpeed; default: this one")
    parser.add_argument("--sides", type=_names, default=SIDES, help=f"sides that take part; default: {','.join(SIDES)}")
    parser.add_argument(
        "--rounds", type=int, default=3, help=f"measured rounds of {STEPS_PER_ROUND} steps, after one warm-up round"
    )
    parser.add_argument(
        "--tokens", type=step_shape, default=(2, 1, 128), help="micro-batches x rows x tokens of a step"
    )
    parser.add_argument("--scratch", type=Path, help="folder on the drive to measure; default: the temporary folder")
    return parser.parse_args()


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(SIDES):
        raise argparse.ArgumentTypeError(f"'{text}': choose from {','.join(SIDES)}")
    return names


@contextmanager
def _world(job: Job, python: str, scratch: Path) -> Iterator[list[SideProcess]]:
    """Start a side's processes, and yield them once they have formed a process group and are ready."""
    folder = scratch / f"{job.side}{job.size}"
    folder.mkdir()
    if job.side == "ours":
        job = replace(job, overrides={"training": _batch(job)})
        job = replace(job, ram=f"{least_ram_bytes(replace(job, nvme=str(folder))) * 5 // 4}B")
    meeting = str(folder / "meeting") if job.side == "ours" else free_port()

    def start(rank: int) -> SideProcess:
        # Both sides create a folder per rank on each drive.
        own = asdict(replace(job, nvme=str(folder), rank=rank, meeting=meeting))
        interpreter = sys.executable if job.side == "ours" else python
        return SideProcess(interpreter, own, scratch / f"{job.side}{job.size}.{rank}.log")

    with ExitStack() as stack:
        with ThreadPoolExecutor(job.size) as pool:
            started = [pool.submit(start, rank) for rank in range(job.size)]
        failed = [each.exception() for each in started]
        ranks = [stack.enter_context(each.result()) for each in started if each.exception() is None]
        for error in failed:
            if error is not None:
                raise error
        yield ranks


def _batch(job: Job) -> dict[str, int]:
    """Return the ``[training]`` settings that make one process and two processes compute identical sums."""
    num_micro_batches, rows, _ = job.shape
    return {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": num_micro_batches,
        "gradient_lanes": max(SIZES),
    }


def _take_turns(
    worlds: Mapping[tuple[str, int], Sequence[SideProcess]], num_rounds: int, report: Report
) -> dict[tuple[str, int], Rounds]:
    """Run all rounds. Return the measurements by side and number of processes, including the warm-up round."""
    rounds: dict[tuple[str, int], list[list[dict[str, Any]]]] = {world: [] for world in worlds}
    for number in range(1 + num_rounds):
        names = list(rounds)
        first = number % max(1, len(names))
        for name in [*names[first:], *names[:first]]:
            try:
                with ThreadPoolExecutor(len(worlds[name])) as pool:
                    rounds[name].append(list(pool.map(lambda rank: rank.steps(STEPS_PER_ROUND), worlds[name])))
            except SideFailedError as error:
                _print_failure(report, f"{name[0]}.{name[1]}", error)
                del rounds[name]
    return dict(rounds)


# -- rows ----------------------------------------------------------------------------------------------------------


def _print_failure(report: Report, name: str, error: SideFailedError) -> None:
    report.row(f"{name}.failed", str(error), "reason")
    if name.startswith("ours"):
        report.row(f"{name}.runs", 0, "1", target=1, ok=False)


def _print_results(report: Report, name: str, rounds: Rounds) -> None:
    measured = rounds[1:]
    steps = [max(rank["total_s"] for rank in ranks) for ranks in measured]
    report.row(f"{name}.step", statistics.median(steps), "s")
    report.row(f"{name}.steps", [round(step, 4) for step in steps], "s")
    cpu = statistics.median(sum(rank["parts_s"]["cpu"] for rank in ranks) for ranks in measured)
    report.row(f"{name}.cpu", cpu, "CPU-s/step of all processes")
    for way in ("read", "write"):
        moved = statistics.median(sum(rank[f"{way}_bytes"] for rank in ranks) for ranks in measured)
        report.row(f"{name}.nvme_{way}_per_step", moved, "bytes of all processes")
    report.row(f"{name}.peak_rss", sum(max(r["peak_rss"] for r in each) for each in zip(*rounds, strict=True)), "bytes")
    report.row(f"{name}.losses", _losses(rounds), "nats")


def _losses(rounds: Rounds) -> list[float]:
    """Return the loss of each round's last step, averaged over the ranks."""
    return [statistics.fmean(rank["loss"] for rank in ranks) for ranks in rounds]


def _print_losses(report: Report, side: str, of_sizes: Sequence[Rounds | None]) -> None:
    one, several = of_sizes
    if one is None or several is None:
        return
    pairs = list(zip(_losses(one), _losses(several), strict=True))
    changed = sum(first != second for first, second in pairs)
    apart = max(abs(first - second) / abs(first) for first, second in pairs)
    is_ours = side == "ours"
    target, ok = (0, changed == 0) if is_ours else (None, None)
    report.row(f"{side}.losses_that_change_with_ranks", changed, f"of {len(pairs)}", target=target, ok=ok)
    report.row(f"{side}.losses_apart", apart, "relative, at most")


if __name__ == "__main__":
    sys.exit(main())
