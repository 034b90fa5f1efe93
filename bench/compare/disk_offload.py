"""Our `score` and `generate`, and transformers with accelerate's disk offload, for a model that exceeds RAM.

    python bench/compare/disk_offload.py --json --scratch /mnt/drive
    python bench/compare/disk_offload.py --quick

Both sides run the same Llama with random fp32 weights from the same folder, on the same rows and prompts. They
alternate, each in a separate process. Our RAM tier is a quarter of the weights, or the minimum if that is larger.
accelerate's `max_memory` is chosen so that both processes have about the same peak memory (both peaks are printed).

Our side bypasses the page cache. For `accelerate`, the model's files are dropped from the page cache before every
forward (not timed), as if the model were larger than memory. For `accelerate_cached`, the files are in the page cache
before its turn begins and stay there. Like `ours_in_ram`, this side can keep all weights in RAM.

One accelerate forward has as many rows as one of our passes, so that both sides fetch the weights equally often.
Seconds cover only forwards and passes, not opening the model.

Claims: log-probabilities are equal within fp32 rounding, and all greedy tokens are equal. Our side moves the planned
number of bytes. Seconds, and the bytes that the kernel read for each process, are only reported. Each round also
measures the rate at which four threads read the model's files without the page cache. `ours.drive_share` is the time to
read our side's bytes at that rate, divided by our seconds.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

# Remove this file's folder from the path, because `import deepspeed` would find `deepspeed.py` there.
sys.path.remove(str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from safetensors.torch import save_file

from bench.common import QUICKSTART, Report, step_shape
from bench.compare.forward_worker import ForwardJob, Turn, generator, scoring_config
from bench.compare.processes import SideFailedError, SideProcess, import_failure
from bench.models import write_llama
from megatrain.extras.scoring import Scorer, plan_scoring
from megatrain.optim.threads import default_num_threads
from megatrain.plan.shortfall import DoesNotFitError
from tiered.ext import open_direct

TASKS = ("score", "generate")
OURS, IN_RAM, ACCELERATE, CACHED = "ours", "ours_in_ram", "accelerate", "accelerate_cached"
TURN_TIMEOUT_S = 600.0
TARGET_DIFFERENCE = 1e-5
#: Memory as fractions of the weights: our RAM tier, and the minimum and maximum for accelerate.
TIER_SHARE, LEAST_SHARE, MOST_SHARE = 1 / 4, 1 / 8, 7 / 8

#: Number of warm-up turns, in which a process's memory grows, and number of `max_memory` values to try.
NUM_WARM_TURNS, NUM_TRIALS = 2, 3
#: Bytes per read and number of reading threads, to measure the drive's rate.
PART_BYTES, NUM_READERS = 4 << 20, 4

#: Measurements of each side, by round.
Rounds = Mapping[str, Sequence[Mapping[str, Any]]]


def main() -> int:
    """Run the comparison. Return 1 if a row fails, except for timing rows."""
    arguments = parse_arguments()
    num_micro_batches, rows, length = arguments.tokens
    report = Report("compare/disk_offload", as_json=arguments.json, tokens_per_step=num_micro_batches * rows * length)
    reason = import_failure(arguments.python, "accelerate")
    if reason:
        report.row("accelerate.skipped", reason, "reason")
        return 0
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        Comparison(Path(scratch), arguments, report).run()
    return 0 if report.all_ok else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--quick", action="store_true", help="a model of 30 MB instead of 1.3 GB; 1 round")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has accelerate; default: this one")
    parser.add_argument("--rounds", type=int, help=f"measured rounds, after {NUM_WARM_TURNS} without measurement")
    parser.add_argument("--max-memory", type=int, help="bytes of accelerate; default: as large as our side")
    parser.add_argument("--tasks", type=_tasks, default=TASKS, help=f"default: {','.join(TASKS)}")
    parser.add_argument("--tokens", type=step_shape, help="micro-batches x rows x tokens of a row of a pass of scores")
    parser.add_argument("--passes", type=int, default=4, help="of scores, in each round")
    parser.add_argument("--prompts", type=int, default=8, help="prompts that are continued together")
    parser.add_argument("--new-tokens", type=int, help="of each prompt")
    parser.add_argument("--scratch", type=Path, help="folder on the drive to measure; default: the temporary folder")
    arguments = parser.parse_args()
    quick = arguments.quick
    arguments.rounds = arguments.rounds or (1 if quick else 3)
    arguments.tokens = arguments.tokens or ((1, 2, 32) if quick else (1, 8, 128))
    arguments.new_tokens = arguments.new_tokens or (4 if quick else 8)
    return arguments


def _tasks(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(TASKS):
        raise argparse.ArgumentTypeError(f"'{text}': choose from {','.join(TASKS)}")
    return names


def write_rows(job: ForwardJob, text: str, num_passes: int) -> int:
    """Write the text to score (the beginning of a book) and the rows made from it. Return the number of rows."""
    num_micro_batches, rows, length = job.shape
    config = scoring_config(replace(job, ram_bytes=1 << 40), Path(job.folder) / "rows")
    plan = plan_scoring(config)
    wanted = num_passes * num_micro_batches * rows
    size = 6 * wanted * length  # characters; too many at first, because a token has fewer than 6
    while True:
        Path(job.text).write_text(text[:size], encoding="utf-8")
        order, collator = Scorer(config, plan=plan).make_rows()
        if order.num_rows <= wanted:
            break
        size = int(size * (wanted - 0.5) / order.num_rows)
    batch = collator.micro_batch(order.dataset, order.rows(0, order.num_rows))
    names = {"input_ids", "attention_mask", "labels"} & set(batch)
    save_file({name: batch[name].contiguous() for name in names}, job.rows)
    return order.num_rows


def with_enough_ram(job: ForwardJob) -> ForwardJob:
    """Return the job with a RAM tier that is large enough both for scoring and for generation."""

    def plan_scores(job: ForwardJob) -> None:
        plan_scoring(scoring_config(job, Path(job.folder)))

    for plan in (plan_scores, generator):
        try:
            plan(job)
        except DoesNotFitError as error:
            job = replace(job, ram_bytes=max(job.ram_bytes, error.need_bytes))
    return job


def read_rate(model: Path) -> float:
    """Read a model's files without the page cache, and return the rate in bytes per second."""
    parts = [
        (path, start) for path in model.glob("*.safetensors") for start in range(0, path.stat().st_size, PART_BYTES)
    ]
    memory = threading.local()

    def read(part: tuple[Path, int]) -> int:
        if not hasattr(memory, "bytes"):
            memory.bytes = mmap.mmap(-1, PART_BYTES)  # O_DIRECT needs page-aligned memory
        path, start = part
        file = open_direct(path, os.O_RDONLY)
        try:
            return os.preadv(file, [memory.bytes], start)
        finally:
            os.close(file)

    start_s = time.perf_counter()
    with ThreadPoolExecutor(NUM_READERS) as pool:
        num_bytes = sum(pool.map(read, parts))
    return num_bytes / (time.perf_counter() - start_s)


class Comparison:
    """Compares all sides in rounds, and prints the rows."""

    def __init__(self, scratch: Path, arguments: argparse.Namespace, report: Report) -> None:
        self._scratch, self._report = scratch, report
        self._python, self._num_rounds = arguments.python, arguments.rounds
        self._max_memory = arguments.max_memory
        hidden, layers, vocabulary = (256, 8, 1024) if arguments.quick else (1024, 24, 8192)
        model = write_llama(scratch / "model", hidden=hidden, layers=layers, vocabulary=vocabulary)
        self._weight_bytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
        for path in model.glob("*.safetensors"):
            with path.open("rb") as file:
                os.fsync(file.fileno())  # dirty pages cannot be dropped from the page cache
        text = (QUICKSTART / "moby_dick.txt").read_text(encoding="utf-8")
        prompts = tuple(text[2000 * number :][: 24 + 8 * number] for number in range(arguments.prompts))
        Path(scratch, OURS).mkdir()
        job = ForwardJob(
            side=OURS,
            model=str(model),
            folder=str(scratch / OURS),
            ram_bytes=int(TIER_SHARE * self._weight_bytes),
            num_threads=default_num_threads(),
            shape=arguments.tokens,
            text=str(scratch / "rows.txt"),
            rows=str(scratch / "rows.safetensors"),
            prompts=prompts,
            max_new_tokens=arguments.new_tokens,
        )
        self._num_rows = write_rows(job, text, arguments.passes)
        self._job = with_enough_ram(job)
        per_forward = arguments.tokens[0] * arguments.tokens[1]
        sides = {OURS: False, IN_RAM: False, ACCELERATE: False, CACHED: True}
        self._turns: dict[str, dict[str, Turn]] = {
            task: {name: Turn(task, per_forward, keeps_cache=keeps) for name, keeps in sides.items()}
            for task in arguments.tasks
        }

    def run(self) -> None:
        """Start all sides, alternate between them, and print the rows."""
        row = self._report.row
        row("weights", self._weight_bytes, "bytes")
        row("rows", self._num_rows, "1")
        with ExitStack() as stack:
            try:
                ours = stack.enter_context(self._start(self._job))
                first = self._take_all(ours, OURS)
                in_ram = stack.enter_context(self._start(replace(self._job, ram_bytes=2 * self._weight_bytes), IN_RAM))
                self._take_all(in_ram, IN_RAM)
                accelerate, theirs = self._with_equal_memory(stack, first)
            except SideFailedError as error:
                row("sides.run", 0, str(error), target=1, ok=False)
                return
            row("ours.ram_tier", self._job.ram_bytes, "bytes")
            row("accelerate.version", str(accelerate.about["version"]), "version")
            row("accelerate.max_memory", theirs.ram_bytes, "bytes")
            row("accelerate.offloaded", accelerate.about["offloaded_bytes"], "bytes")
            row("accelerate.offloads", accelerate.about["offloads"], "1", target=1, ok=accelerate.about["offloads"])
            sides = {OURS: ours, IN_RAM: in_ram, ACCELERATE: accelerate, CACHED: accelerate}
            for task, turns in self._turns.items():
                rounds: dict[str, list[Mapping[str, Any]]] = {name: [] for name in turns}
                rates = []
                for number in range(self._num_rounds):
                    rates.append(read_rate(Path(self._job.model)))
                    names = list(turns)
                    begin = number % len(names)
                    for name in [*names[begin:], *names[:begin]]:
                        rounds[name].append(sides[name].ask(_line(turns[name]), TURN_TIMEOUT_S))
                self._print_results(task, rounds, rates)
        row("load_average", round(os.getloadavg()[0], 2), "threads, 1 minute")

    def _start(self, job: ForwardJob, name: str = "") -> SideProcess:
        python = sys.executable if job.side == OURS else self._python
        folder = self._scratch / (name or job.side)
        folder.mkdir(exist_ok=True)
        log = folder.with_suffix(".log")
        return SideProcess(python, asdict(replace(job, folder=str(folder))), log, "forward_worker")

    def _take_all(self, side: SideProcess, name: str) -> int:
        """Run a side's turns ``NUM_WARM_TURNS`` times as a warm-up, and return the side's peak resident bytes."""
        turns = [turns[name] for turns in self._turns.values()] * NUM_WARM_TURNS
        return max(int(side.ask(_line(turn), TURN_TIMEOUT_S)["peak_rss"]) for turn in turns)

    def _with_equal_memory(self, stack: ExitStack, peak_rss: int) -> tuple[SideProcess, ForwardJob]:
        """Start and warm up the accelerate side, and return it with its job.

        Unless ``--max-memory`` is given, try several values and use the one whose peak memory is closest to our peak.
        """
        job = replace(self._job, side=ACCELERATE)
        if self._max_memory:
            job = replace(job, ram_bytes=self._max_memory)
        else:
            job = replace(job, ram_bytes=self._equal_memory(job, peak_rss))
        side = stack.enter_context(self._start(job))
        self._take_all(side, ACCELERATE)
        return side, job

    def _equal_memory(self, job: ForwardJob, peak_rss: int) -> int:
        least, most = int(LEAST_SHARE * self._weight_bytes), int(MOST_SHARE * self._weight_bytes)
        apart: dict[int, int] = {}
        tried = job.ram_bytes
        while len(apart) < NUM_TRIALS and tried not in apart:
            with self._start(replace(job, ram_bytes=tried)) as side:
                apart[tried] = peak_rss - self._take_all(side, ACCELERATE)
            tried = min(max(tried + apart[tried], least), most)
        return min(apart, key=lambda ram_bytes: abs(apart[ram_bytes]))

    # -- rows --------------------------------------------------------------------------------------------------

    def _print_results(self, task: str, rounds: Rounds, rates: Sequence[float]) -> None:
        row = self._report.row
        for name, measured in rounds.items():
            seconds = [one["seconds"] for one in measured]
            row(f"{task}.{name}.seconds", statistics.median(seconds), "s")
            row(f"{task}.{name}.seconds.each", [round(each, 4) for each in seconds], "s")
            row(f"{task}.{name}.read", statistics.median(one["read_bytes"] for one in measured), "bytes")
            row(f"{task}.{name}.peak_rss", max(one["peak_rss"] for one in measured), "bytes")
        for name, measured in rounds.items():
            if name != OURS:
                pairs = zip(measured, rounds[OURS], strict=True)
                ratios = [theirs["seconds"] / mine["seconds"] for theirs, mine in pairs]
                row(f"{task}.ratio.{name}/ours", statistics.median(ratios), "x", timing=True)
                row(f"{task}.ratio.{name}/ours.each", [round(each, 4) for each in ratios], "x")
        row(f"{task}.drive.read_rate", statistics.median(rates), "bytes/s")
        row(f"{task}.drive.read_rate.each", [round(rate) for rate in rates], "bytes/s")
        shares = [one["read_bytes"] / rate / one["seconds"] for one, rate in zip(rounds[OURS], rates, strict=True)]
        row(f"{task}.ours.drive_share", statistics.median(shares), "1")
        for field in ("planned_bytes", "moved_bytes"):
            row(f"{task}.ours.{field}", sum(rounds[OURS][-1][field].values()), "bytes")
        is_planned = all(one["planned_bytes"] == one["moved_bytes"] for one in rounds[OURS])
        row(f"{task}.ours.moved_is_planned", int(is_planned), "1", target=1, ok=is_planned)
        self._print_scores(rounds) if task == "score" else self._print_tokens(rounds)

    def _print_scores(self, rounds: Rounds) -> None:
        means = {name: [one["mean_log_prob"] for one in measured] for name, measured in rounds.items()}
        counts = {one["num_scored"] for measured in rounds.values() for one in measured}
        row = self._report.row
        row("score.tokens", max(counts), "tokens", target=min(counts), ok=len(counts) == 1)
        row("score.mean_log_prob", means[OURS][0], "nats")
        apart = max(abs(mean - means[OURS][0]) / abs(means[OURS][0]) for each in means.values() for mean in each)
        row("score.difference", apart, "relative", target=TARGET_DIFFERENCE, ok=apart <= TARGET_DIFFERENCE)

    def _print_tokens(self, rounds: Rounds) -> None:
        expected = rounds[ACCELERATE][0]["tokens"]
        others = [one["tokens"] for measured in rounds.values() for one in measured]
        same = all(tokens == expected for tokens in others)
        self._report.row("generate.tokens", sum(map(len, expected)), "tokens")
        self._report.row("generate.same_tokens", int(same), "1", target=1, ok=same)


def _line(turn: Turn) -> str:
    return json.dumps(asdict(turn))


if __name__ == "__main__":
    sys.exit(main())
