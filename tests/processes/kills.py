"""Kills real runs at random times, and restarts them until they finish. Results must equal an undisturbed run's.

    PYTHONPATH=.:tests python -m processes.kills --kills 200 --stops 30

The parent is a single-threaded process that has imported everything. For each start, it forks a child, which therefore
needs no imports. The child executes the command ``run`` and reports its phase to the parent. The parent kills the child
(or asks it to stop), checks the files on disk, and starts the run again.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from oracles.tiered_run import ALL_NVME, config_text, make_loader
from processes.kill_board import Board, watch
from processes.kill_checks import Outcome, bytes_on_disk, check_after_kill, check_at_end, newest_copy, read_outcome
from processes.saved_run import cli_module, command_group

NUM_STEPS = 8
HUNG_AFTER_S = 90.0
"""A child hangs if no phase began or ended for this long, not counting the time that its threads waited for a core."""
DRIVE_MIB = 96
"""Capacity of all drives of a run together."""

#: Name of a placement -> keyword arguments of ``config_text``.
PLACEMENTS: Mapping[str, Mapping[str, Any]] = {
    "striped": {"placement": ALL_NVME, "ram": "7MiB", "nvme": 2, "rates": (1, 3)},
    "mixed": {"placement": 'optimizer = ["nvme"]', "nvme": 1},
    "RAM": {"nvme": 0},
    "NVMe": {"placement": ALL_NVME, "ram": "7MiB", "nvme": 1},
}
#: Phase -> relative frequency of the signals that are aimed at it. Other signals are sent at random times.
AIMS = {
    "loading": 2,
    "saving": 1,
    "freezing": 3,
    "pruning": 4,
    "writing": 3,
    "flushing": 3,
    "flipping": 4,
    "exporting": 2,
    "copying": 3,
}
_AT_ANY_INSTANT = 0.4  # share of the signals that are sent at random times
_ENOUGH = 0.15  # probability, after each signal, that the run gets no further signal
_DRIVES_LOST = 0.5  # probability, after each signal, that all drives are lost if a whole copy exists
_POLL_S = 1e-4


@dataclass(frozen=True)
class Aim:
    """Time of a signal: ``delay_s`` after the start, or after a phase begins for the ``nth`` time."""

    delay_s: float
    phase: str | None = None
    nth: int = 1


@dataclass(frozen=True)
class Start:
    """One start of a run.

    Attributes:
        number: Number of the planned signal, or 0 for none.
        where: Phase in which the signal arrived, or None if the run ended first.
        code: Exit status; negative after a fatal signal.
        resumed: Step of the resumed checkpoint, 0 for a start from the beginning, or -1 if the process never got there.
        reported: Step of the newest reported checkpoint, or -1 for none.
        is_hung: Whether the process hung and was killed.
    """

    number: int
    where: str | None
    code: int
    resumed: int
    reported: int
    is_hung: bool = False


@dataclass
class Run:
    """A run: its settings, its folder, and all of its starts."""

    placement: str
    folder: Path
    keep: int = 2
    save_steps: int = 1
    copies: bool = False
    starts: list[Start] = field(default_factory=list)
    safe: int = -1
    """Step that no kill may cost: of the newest checkpoint reported, or of the copy left when the drives were lost."""
    num_losses: int = 0
    """How often the drives were lost."""

    def __str__(self) -> str:
        text = f"{self.folder.name}: {self.placement}, save_total_limit {self.keep}, save_steps {self.save_steps}"
        return text + ", copies" * self.copies

    def write_config(self, model: Path) -> None:
        """Create the folder and write the config to it."""
        self.folder.mkdir()
        tables = PLACEMENTS[self.placement]
        text = config_text(self.folder, model, **tables)
        text = text.replace("[training]\n", f"[training]\nmax_steps = {NUM_STEPS}\n")
        head, mark, drives = text.partition("[[tiers.nvme]]")
        drives = drives.replace('"256MiB"', f'"{DRIVE_MIB // max(1, tables["nvme"])}MiB"')
        table = f'min_free_disk = "0MiB"\nsave_copy = {str(self.copies).lower()}\n'
        table += f"save_steps = {self.save_steps}\nsave_total_limit = {self.keep}\n"
        (self.folder / "run.toml").write_text(f"{head}{mark}{drives}[checkpoint]\n{table}")

    @property
    def drives(self) -> list[Path]:
        """Return the paths of the NVMe tier."""
        return sorted(self.folder.glob("drive*"))

    @property
    def log_tail(self) -> str:
        """Return the last lines of the run's log."""
        return (self.folder / "log.txt").read_text(errors="replace")[-3000:]


class Killer:
    """Test driver that kills or stops runs at random times, and restarts them until they finish.

    Args:
        model: Folder with weights and tokenizer.
        folder: Folder for the runs.
        max_starts_per_run: Maximum number of signals to one run.

    Attributes:
        runs: Runs that received signals.
        problems: Errors found. After the first error, no further signals are sent.
    """

    def __init__(self, model: Path, folder: Path, *, seed: int, max_starts_per_run: int) -> None:
        self._model, self._folder, self._random = model, folder, random.Random(seed)
        self._most_per_run = max_starts_per_run
        self._board = Board()
        self._expected: Outcome | None = None
        self._unbroken_s = 0.0
        self._phase_s: dict[str, float] = {}
        self._num_runs = 0
        self.runs: list[Run] = []
        self.problems: list[str] = []
        watch(self._board)

    def num_hits(self, number: int) -> int:
        """Return how many signals with this number hit a run."""
        return sum(start.number == number and start.where is not None for run in self.runs for start in run.starts)

    def send_signals(self, number: int, times: int) -> None:
        """Send signal ``number`` to runs of all placements in turn, until it has hit ``times`` times."""
        while self.num_hits(number) < times and not self.problems:
            turn = len(self.runs)
            placement = list(PLACEMENTS)[turn % len(PLACEMENTS)]
            if self._expected is None:
                self._run_unbroken()
            run = self._make_run(
                placement,
                keep=1 + turn // len(PLACEMENTS) % 2,
                save_steps=self._random.choice([1, 2]),
                copies=placement != "RAM" and turn % 2 == 1,
            )
            self.runs.append(run)
            self._run_with_signals(run, number)
            if not self.problems:
                shutil.rmtree(run.folder)

    def _make_run(self, placement: str, **options: Any) -> Run:
        run = Run(placement, self._folder / f"run{self._num_runs}", **options)
        self._num_runs += 1
        run.write_config(self._model)
        return run

    def _run_unbroken(self) -> None:
        """Run once without signals, to get the expected results and the duration of each phase."""
        run = self._make_run("mixed", copies=True)  # its commits both write files and make hard links
        start_s = time.monotonic()
        start = self._start(run, None, 0)
        self._unbroken_s = time.monotonic() - start_s
        figures = {phase: self._board.figures(phase) for phase in AIMS}
        self._phase_s = {phase: seconds / max(1, count) for phase, (count, seconds) in figures.items()}
        if start.code != 0:
            raise RuntimeError(f"{run}, undisturbed: exit status {start.code}\n{run.log_tail}")
        self._expected = read_outcome(run.folder)
        self.problems += [f"{run}, undisturbed: {text}" for text in self._problems_at_end(run)]

    def _run_with_signals(self, run: Run, number: int) -> None:
        """Restart a run until it finishes, and send it the signal a random number of times."""
        while not self.problems:
            is_enough = bool(run.starts) and self._random.random() < _ENOUGH
            is_last = is_enough or len(run.starts) >= self._most_per_run
            start = self._start(run, None if is_last else self._aim(run), 0 if is_last else number)
            run.starts.append(start)
            who = f"{run}, start {len(run.starts)}, signal {start.number} in {start.where}"
            run.safe = max(run.safe, start.reported)
            self.problems += [f"{who}: {text}" for text in check_after_kill(run.folder, run.keep, run.safe, run.drives)]
            if start.is_hung or start.code not in allowed_exit_codes(start):
                reason = f"no phase ended in {HUNG_AFTER_S} s" if start.is_hung else f"exit status {start.code}"
                self.problems.append(f"{who}: {reason}\n{run.log_tail}")
            elif start.code == 0:
                self.problems += [f"{who}: {text}" for text in self._problems_at_end(run)]
                return
            elif (
                run.copies and self._random.random() < _DRIVES_LOST and (copied := newest_copy(run.folder)) is not None
            ):
                for drive in run.drives:
                    shutil.rmtree(drive)
                run.safe = copied
                run.num_losses += 1

    def _problems_at_end(self, run: Run) -> Iterator[str]:
        assert self._expected is not None
        yield from check_at_end(run.folder, self._expected)
        used = bytes_on_disk(run.drives)
        if used > DRIVE_MIB << 20:
            yield f"{used} bytes on the drives, more than {DRIVE_MIB} MiB"

    def _aim(self, run: Run) -> Aim:
        done = max((start.reported for start in run.starts), default=0) / NUM_STEPS  # a resumed run is shorter
        if self._random.random() < _AT_ANY_INSTANT:
            return Aim(self._random.uniform(0, self._unbroken_s * (1 - 0.7 * max(0, done))))
        (phase,) = self._random.choices(list(AIMS), list(AIMS.values()))
        num_saves = max(1, round((1 - done) * NUM_STEPS / run.save_steps))
        nth = 1 if phase in ("loading", "exporting") else self._random.randint(1, num_saves)
        return Aim(self._random.uniform(0, self._phase_s[phase]), phase, nth)

    def _start(self, run: Run, aim: Aim | None, number: int) -> Start:
        assert threading.active_count() == 1, threading.enumerate()
        self._board.clear()
        pid = os.fork()
        if pid == 0:
            run_child(run.folder)
        where, code, is_hung = self._send_signal(pid, aim, number)
        return Start(number, where, code, self._board.step("resumed"), self._board.step("reported"), is_hung)

    def _send_signal(self, pid: int, aim: Aim | None, number: int) -> tuple[str | None, int, bool]:
        """Send the signal to a child at the planned time, and wait until the child has ended.

        Returns:
            Phase that the signal hit (or None), exit status, and whether the child hung.
        """
        start_s = time.monotonic()
        due_s = start_s + aim.delay_s if aim is not None and aim.phase is None else None
        where: str | None = None
        progress, hung_at_s, delayed_s = b"", 0.0, dict[str, float]()
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            now_s = time.monotonic()
            if ended:
                code = os.waitstatus_to_exitcode(status)
                is_hit = where is not None and (code < 0 or number != signal.SIGKILL)
                return (self._board.where() if number == signal.SIGKILL else where) if is_hit else None, code, False
            if (contents := self._board.contents()) != progress:
                progress, hung_at_s, delayed_s = contents, now_s + HUNG_AFTER_S, seconds_delayed(pid)
            if now_s > hung_at_s and now_s > hung_at_s + longest_delay_s(delayed_s, seconds_delayed(pid)):
                os.kill(pid, signal.SIGABRT)  # the child's faulthandler then prints the stacks of all threads
                os.waitpid(pid, 0)
                return where, -signal.SIGABRT, True
            if aim is not None and aim.phase and due_s is None and self._board.figures(aim.phase)[0] >= aim.nth:
                due_s = now_s + aim.delay_s
            if where is None and due_s is not None and now_s >= due_s:
                where = self._board.where()
                os.kill(pid, number)
            time.sleep(_POLL_S)


def seconds_delayed(pid: int) -> dict[str, float]:
    """Return how many seconds each thread has waited for a core. On a loaded machine, this is most of a run's time."""
    found: dict[str, float] = {}
    for path in Path("/proc", str(pid), "task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # the thread has ended in the meantime
            found[path.parent.name] = int(path.read_text().split()[1]) / 1e9
    return found


def longest_delay_s(before: Mapping[str, float], now: Mapping[str, float]) -> float:
    """Return the longest time in seconds that any thread has waited for a core since ``before``.

    The times of several threads are not added, because threads wait concurrently.
    """
    return max((seconds - before.get(thread, 0.0) for thread, seconds in now.items()), default=0.0)


def allowed_exit_codes(start: Start) -> tuple[int, ...]:
    """Return the allowed exit statuses of a start."""
    if start.where is None:
        return (0,)
    if start.number == signal.SIGKILL:
        return (-start.number,)
    main = start.where.partition(",")[0]
    if main in ("starting", "loading"):  # the signal handler has not been installed yet, or has been removed
        return (-start.number, 75, 0)
    return (75, 0)


def format_tables(runs: Sequence[Run], number: int) -> str:
    """Return two tables by placement: the phases that signals hit, and the steps from which runs resumed."""
    starts = [(run.placement, start) for run in runs for start in run.starts]
    hits = Counter((str(s.where), placement) for placement, s in starts if s.number == number and s.where is not None)
    resumed = Counter((s.resumed, placement) for placement, s in starts if s.resumed >= 0)
    steps = {step: "the beginning" if step == 0 else f"step {step}" for step, _ in sorted(resumed)}
    where = {text: text for text, _ in sorted(hits)}
    return _table(f"{signal.Signals(number).name} hit in", where, hits) + "\n" + _table("started from", steps, resumed)


def _table(title: str, rows: Mapping[Any, str], counts: Mapping[tuple[Any, str], int]) -> str:
    names = list(PLACEMENTS)
    lines = [f"{title:34}" + "".join(f"{name:>9}" for name in (*names, "all"))]
    for row, text in rows.items():
        numbers = [counts.get((row, name), 0) for name in names]
        lines.append(f"{text:34}" + "".join(f"{number:9}" for number in (*numbers, sum(numbers))))
    totals = [sum(count for (_, name), count in counts.items() if name == each) for each in names]
    lines.append(f"{'all':34}" + "".join(f"{number:9}" for number in (*totals, sum(totals))))
    return "\n".join(lines) + "\n"


def main() -> int:
    """Send signals to runs and print the tables. Return 1 if any error was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=12, help="SIGKILLs that must hit")
    parser.add_argument("--stops", type=int, default=3, help="SIGTERMs that must hit")
    parser.add_argument("--per-run", type=int, default=12, help="signals to one run, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, required=True, help="folder with weights and tokenizer")
    parser.add_argument("--result", type=Path, help="file for the figures, JSON")
    parser.add_argument("--scratch", type=Path, help="folder for the runs; the one that failed stays there")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kills-", dir=arguments.scratch))
    preload(arguments.model, folder / "preload")
    killer = Killer(arguments.model, folder, seed=arguments.seed, max_starts_per_run=arguments.per_run)
    figures: dict[str, Any] = {}
    for number, times in ((signal.SIGKILL, arguments.kills), (signal.SIGTERM, arguments.stops)):
        first, start_s = len(killer.runs), time.monotonic()
        killer.send_signals(number, times)
        print(format_tables(killer.runs[first:], number))
        hits = [s.where for run in killer.runs[first:] for s in run.starts if s.number == number and s.where]
        losses = sum(run.num_losses for run in killer.runs[first:])
        figures[number.name] = {
            "hits": hits,
            "runs": len(killer.runs) - first,
            "losses": losses,
            "seconds": time.monotonic() - start_s,
        }
        print(f"{len(hits)} hits in {figures[number.name]['runs']} runs, {figures[number.name]['seconds']:.0f} s\n")
    for text in killer.problems:
        print(f"PROBLEM {text}")
    if arguments.result is not None:
        arguments.result.write_text(json.dumps({"problems": killer.problems, **figures}))
    if killer.problems:
        print(f"the folders stay in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


def preload(model: Path, folder: Path) -> None:
    """Import the code that a run needs and fill its caches, without training or starting a thread."""
    from megatrain.config import load_config
    from megatrain.optim import clip
    from megatrain.plan import planner, traced
    from megatrain.training.resolve import resolve
    from oracles.traces import keeping

    for name in ("main", "run", "session", "options"):
        cli_module(name)
    importlib.import_module("megatrain.training.trainer")
    torch.set_num_threads(1)
    folder.mkdir(parents=True)
    path = folder / "run.toml"
    path.write_text(config_text(folder, model))
    config = load_config(path).config
    traced.trace_visits = keeping(traced.trace_visits)  # children reuse the trace
    plan = planner.plan_run(resolve(config))
    plan.traced.optimizer.warm_up()
    clip.warm_up()
    make_loader(config, plan)


def run_child(folder: Path) -> NoReturn:
    """Execute the command ``run`` for ``<folder>/run.toml`` in this child process, with output to ``log.txt``."""
    code = 1
    try:
        torch.set_num_threads(1)
        log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.enable(2)
        print("-- start", flush=True)
        command_group().main(["run", str(folder / "run.toml")])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
