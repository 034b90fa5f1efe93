"""Plants random mistakes, and shows which ones the tests catch (`make mutants-record`, `make mutants-sample`).

    python -m mutants.campaign record --seeds 7 8 9        # run the CI suite once, with probes at the drawn mistakes
    python -m mutants.campaign sample --seed 7             # plant the mistakes of a seed
    python -m mutants.campaign sample --seed 7 --only 3    # plant only the fourth mistake of that sample

Each mistake is planted in a copy of the repository. A process that has imported the libraries, but none of this
project's packages, forks a child that runs the tests. Tests that execute the statement run first, then tests that
execute its function, each group from the fastest to the slowest. The other tests of the same files follow, because they
may share a fixture. A mistake survives if no test fails within the time limit. A failing test counts only if it passes
without the mistake.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from mutants import recording
from mutants.operators import Mistake, mistakes_in
from mutants.recording import ROOT, Place, Probes, Record, probes_of

PACKAGES = ("tiered", "megatrain", "cli")
FOLDER = ROOT / "temp" / "mutants"
#: A mistake in code that no CI test executes does not count, so more mistakes are drawn than will be planted.
DRAWN_PER_COUNTED = 2
#: File with one row for each survivor that has a verdict.
VERDICTS = Path(__file__).with_name("verdicts.jsonl")
LIBRARIES = ("numba", "torch", "transformers", "transformers.trainer", "pydantic", "rich.table")
#: Number of tests that run before pytest collects the others, because collecting all of them takes half a minute.
NUM_NEAREST = 40
#: A test that hangs counts as failed.
TEST_TIMEOUT_S = 120
CAUGHT, SURVIVED, UNCLEAR = "caught", "survived", "unclear"


@dataclass(frozen=True)
class Result:
    """Outcome of the tests for one mistake.

    Attributes:
        outcome: `caught`, or `survived` if all chosen tests passed or the time ran out.
        test: Name of the test that failed, or "".
        num_run: Number of tests that ran.
        num_chosen: Number of tests that were chosen.
    """

    outcome: str
    test: str
    num_run: int
    num_chosen: int
    seconds: float


@dataclass(frozen=True)
class Drawn:
    """A mistake, and the code locations whose execution shows which tests could catch it."""

    mistake: Mistake
    diff: str
    probes: Probes


@dataclass(frozen=True)
class Chosen:
    """A mistake and its tests, in the order in which they run. ``tests`` is empty if no test executes the statement."""

    mistake: Mistake
    diff: str
    tests: tuple[str, ...]


def record(arguments: argparse.Namespace) -> int:
    """Draw the samples, then run the CI suite once to learn which tests reach the drawn mistakes."""
    folder = FOLDER / "record"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    drawn = {seed: draw(seed, DRAWN_PER_COUNTED * arguments.count) for seed in arguments.seeds}
    places = {
        (each.mistake.path, *place)
        for sample in drawn.values()
        for each in sample
        for place in (*each.probes.functions, *filter(None, [each.probes.statement]))
    }
    (folder / recording.PROBES).write_text(json.dumps(sorted(places)))
    environment = {
        **os.environ,
        "MUTANTS_RECORD": str(folder),
        "MUTANTS_TESTS": str(ROOT / "tests"),
        "PYTHONPATH": str(Path(__file__).with_name("at_start")),
    }
    environment.setdefault("TEST_DAY", "0")
    head = {"head": _head(), "day": environment["TEST_DAY"], "count": arguments.count}
    (folder / "head.json").write_text(json.dumps(head))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "mutants.recording", "-o", "timeout=900"]
    command += ["-n", str(arguments.workers), "--dist", "worksteal", "--today", *arguments.pytest]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def _head() -> str:
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def sample(arguments: argparse.Namespace) -> int:
    """Plant a sample, and print each survivor as a diff, then the rates.

    Returns:
        Exit status: 1 if a survivor has no verdict, 2 if the record is from another commit.
    """
    folder = FOLDER / "record"
    head = json.loads((folder / "head.json").read_text())
    if head["head"] != _head():
        print(f"recorded at {head['head'][:12]}, and files have changed: record again", file=sys.stderr)
        return 2
    os.environ["TEST_DAY"] = head["day"]
    recorded = recording.read(folder)
    executed = [_with_tests(each, recorded) for each in draw(arguments.seed, DRAWN_PER_COUNTED * head["count"])]
    chosen = [each for each in executed if each.tests][: head["count"]]
    chosen = chosen if arguments.only is None else [chosen[arguments.only]]
    start_s = time.monotonic()
    with multiprocessing.get_context("fork").Pool(arguments.workers, _make_tree, [_numbers(arguments.workers)]) as pool:
        results = []
        tasks = [(each, arguments.seconds) for each in chosen]
        for number, result in enumerate(pool.imap(_judge, tasks, chunksize=1)):
            _print(number, chosen[number], result)
            results.append(result)
    minutes = (time.monotonic() - start_s) / 60
    return _summarize(chosen, results, minutes, arguments)


@functools.cache
def _mistakes_by_line() -> tuple[dict[str, str], dict[tuple[str, int], list[Mistake]]]:
    """Return the text of each file of the packages, and the possible mistakes of each line."""
    listed = ["git", "ls-files", "--", *(f"{package}/*.py" for package in PACKAGES)]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in names}
    by_line: dict[tuple[str, int], list[Mistake]] = defaultdict(list)
    for name, text in texts.items():
        for mistake in mistakes_in(name, text):
            by_line[name, mistake.line].append(mistake)
    return texts, by_line


def draw(seed: int, count: int) -> list[Drawn]:
    """Draw mistakes. For each, draw a line first, then an operator that applies there, then one of its mistakes."""
    rng = random.Random(seed)
    texts, by_line = _mistakes_by_line()
    lines = sorted(by_line)
    found: dict[Mistake, Drawn] = {}
    while len(found) < count:
        name, line = rng.choice(lines)
        candidates = by_line[name, line]
        operator = rng.choice(sorted({each.operator for each in candidates}))
        mistake = rng.choice([each for each in candidates if each.operator == operator])
        probes = probes_of(ast.parse(texts[name]), line)
        if probes is not None and mistake.is_valid(texts[name]):
            found[mistake] = Drawn(mistake, mistake.diff(texts[name]), probes)
    return list(found.values())


def _with_tests(drawn: Drawn, recorded: Record) -> Chosen:
    """Choose and order a mistake's tests: tests of its statement, of its function, and others in the same files."""

    def reached(places: Sequence[Place]) -> set[str]:
        return set().union(*(recorded.tests.get((drawn.mistake.path, place), frozenset()) for place in places))

    def by_time(tests: set[str]) -> list[str]:
        return sorted(tests, key=lambda test: (recorded.duration_s.get(test, 60.0), test))

    near = reached(drawn.probes.functions)
    first = near if drawn.probes.statement is None else reached([drawn.probes.statement])
    files = {test.partition("::")[0] for test in first}
    rest = {test for test in recorded.duration_s if test.partition("::")[0] in files} if first else set()
    tests = (*by_time(first), *by_time(near - first), *by_time(rest - near - first)) if first else ()
    return Chosen(drawn.mistake, drawn.diff, tests)


def _numbers(count: int) -> Any:
    numbers = multiprocessing.get_context("fork").SimpleQueue()
    for number in range(count):
        numbers.put(number)
    return numbers


_tree: Path
_broken: set[str] = set()  # tests that also fail without a mistake, e.g. if they need a process without torch


def _make_tree(numbers: Any) -> None:
    """Copy the repository for one worker, and import the libraries, which no mistake changes."""
    global _tree
    _tree = FOLDER / f"tree{numbers.get()}"
    shutil.rmtree(_tree, ignore_errors=True)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (_tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, _tree / name)
    # The command's package has a different name when it is installed. Without this folder, a program would import the
    # installed package instead of the copy with the mistake.
    shim = _tree / "temp" / "site" / "megatrain_tier_cli"
    shim.mkdir(parents=True)
    for path in (_tree / "cli").iterdir():
        (shim / path.name).symlink_to(path)
    (shim / "example").symlink_to(_tree / "examples" / "quickstart")
    for name in LIBRARIES:
        __import__(name)


def _judge(task: tuple[Chosen, float]) -> Result:
    chosen, limit_s = task
    start_s = time.monotonic()
    path = _tree / chosen.mistake.path
    status, text = path.stat(), path.read_text(encoding="utf-8")
    path.write_text(chosen.mistake.applied(text), encoding="utf-8")
    tests = [test for test in chosen.tests if test not in _broken]
    try:
        failed, num_run = _run(tests[:NUM_NEAREST], limit_s)
        left_s = limit_s - (time.monotonic() - start_s)
        if not failed and tests[NUM_NEAREST:] and left_s > 0:
            failed, num_others = _run(tests[NUM_NEAREST:], left_s)
            num_run += num_others
    finally:
        path.write_text(text, encoding="utf-8")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    outcome = SURVIVED
    if failed:
        outcome = UNCLEAR if failed in chosen.tests and _run([failed], limit_s)[0] else CAUGHT
    if outcome == UNCLEAR:  # judge this mistake again, and all later ones, without the failed test
        _broken.add(failed)
        return _judge(task)
    return Result(outcome, failed, num_run, len(chosen.tests), time.monotonic() - start_s)


def _run(tests: Sequence[str], limit_s: float) -> tuple[str, int]:
    """Run tests in a forked process until one fails or the time is up. Return the failed test or "", and how many ran.

    If the process crashes or has to be killed, the test that started last counts as failed.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        os.setsid()
        try:
            _run_here(tests, limit_s, writer)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0)
    os.close(writer)
    killer = threading.Timer(limit_s + 2 * TEST_TIMEOUT_S, os.killpg, [pid, signal.SIGKILL])
    killer.start()
    with open(reader) as lines:
        rows = [line.split(" ", 1) for line in lines.read().splitlines()]
    os.waitpid(pid, 0)
    killer.cancel()
    num_run = sum(row[0] == "ended" for row in rows)
    failed = [row[1] for row in rows if row[0] == "failed"]
    if not failed and ["done", ""] not in rows:
        failed = [row[1] for row in rows if row[0] == "started"][-1:] or ["the import of the tests"]
    return (failed[0] if failed else ""), num_run


def _run_here(tests: Sequence[str], limit_s: float, writer: int) -> None:
    output = os.open(FOLDER / f"{_tree.name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(_tree)
    paths = [str(_tree), str(_tree / "tests"), str(_tree / "temp" / "site")]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    kept = [path for path in sys.path if not path.startswith(str(ROOT)) or "site-packages" in path]
    sys.path[:] = paths + kept
    for name in [name for name in sys.modules if name.partition(".")[0] == "mutants"]:
        del sys.modules[name]
    plugin = _Watch(tests, time.monotonic() + limit_s, writer)
    options = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", f"timeout={TEST_TIMEOUT_S}"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # for plugins that were imported with the libraries
    status = pytest.main([*options, *tests], plugins=[plugin])
    if status in (pytest.ExitCode.OK, pytest.ExitCode.INTERRUPTED, pytest.ExitCode.NO_TESTS_COLLECTED):
        os.write(writer, b"done \n")


class _Watch:
    """Pytest plugin that runs tests in a given order until the time is up, and reports each test."""

    def __init__(self, tests: Sequence[str], deadline_s: float, writer: int) -> None:
        self._order = {test: number for number, test in enumerate(tests)}
        self._deadline_s, self._writer = deadline_s, writer

    def _report(self, kind: str, test: str) -> None:
        os.write(self._writer, f"{kind} {test}\n".encode())

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self._order.get(item.nodeid, len(self._order)))

    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        if time.monotonic() > self._deadline_s:
            item.session.shouldstop = "the time is up"
        self._report("started", item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._report("failed", report.nodeid)
        if report.when == "teardown":
            self._report("ended", report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._report("failed", report.nodeid)


def package_of(path: str) -> str:
    """Return the package that a file's mistakes are counted under: a package inside `megatrain`, or a top-level one."""
    parts = Path(path).with_suffix("").parts
    return "/".join(parts[:2]) if parts[0] == "megatrain" and len(parts) > 2 else parts[0]


def read_verdicts() -> Iterator[dict[str, Any]]:
    """Yield the survivors that have a verdict."""
    if VERDICTS.exists():
        for line in VERDICTS.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def _print(number: int, chosen: Chosen, result: Result) -> None:
    mistake = chosen.mistake
    print(
        f"{number:3} {result.outcome:8} {mistake.path}:{mistake.line} {mistake.operator}; {result.num_run} of "
        f"{result.num_chosen} tests, {result.seconds:.0f} s{'; ' if result.test else ''}{result.test}",
        flush=True,
    )
    if result.outcome != CAUGHT:
        print(chosen.diff, flush=True)


def _summarize(chosen: Sequence[Chosen], results: Sequence[Result], minutes: float, arguments: Any) -> int:
    judged = {row["diff"]: row for row in read_verdicts()}
    caught: Counter[str] = Counter()
    counted: Counter[str] = Counter()
    num_unjudged = 0
    for each, result in zip(chosen, results, strict=True):
        package = package_of(each.mistake.path)
        verdict = judged.get(each.diff, {}).get("verdict", "")
        if result.outcome == CAUGHT:
            caught[package] += 1
            counted[package] += 1
        elif verdict != "equivalent":
            counted[package] += 1
            num_unjudged += not verdict
    for package in sorted(counted):
        print(f"{package:24} {caught[package]:3} of {counted[package]:3}")
    total = sum(counted.values())
    print(f"{'all':24} {sum(caught.values()):3} of {total:3}, seed {arguments.seed}, {minutes:.0f} minutes")
    out = FOLDER / f"sample-{arguments.seed}{'' if arguments.only is None else f'-{arguments.only}'}.jsonl"
    with out.open("w", encoding="utf-8") as file:
        for each, result in zip(chosen, results, strict=True):
            mistake = each.mistake
            row = {"file": mistake.path, "line": mistake.line, "operator": mistake.operator, "diff": each.diff}
            file.write(json.dumps({**row, **asdict(result)}) + "\n")
    print(f"all of them: {out.relative_to(ROOT)}; judge survivors in {VERDICTS.relative_to(ROOT)}")
    return int(num_unjudged > 0)


def main() -> int:
    """Parse the command line, and run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    drawing = commands.add_parser("record")
    drawing.add_argument("--seeds", type=int, nargs="+", required=True)
    drawing.add_argument("--count", type=int, default=40, help="mistakes per seed")
    drawing.add_argument("--workers", type=int, default=2)
    drawing.add_argument("pytest", nargs="*", help="options of pytest after --; default: the suite of CI")
    drawing.set_defaults(run=record)
    sampling = commands.add_parser("sample")
    sampling.add_argument("--seed", type=int, required=True)
    sampling.add_argument("--only", type=int, help="number of one mistake of the sample")
    sampling.add_argument("--seconds", type=float, default=180.0, help="time limit of a mistake")
    sampling.add_argument("--workers", type=int, default=2)
    sampling.set_defaults(run=sample)
    arguments = parser.parse_args()
    status: int = arguments.run(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
