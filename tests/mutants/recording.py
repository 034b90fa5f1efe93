"""Records the lines of the packages that each test executes, including lines in the processes that it starts.

Each process writes one file of JSON lines into the folder `MUTANTS_RECORD`; a line is `[test, file, [lines]]`.
A killed process writes none. `read` joins the files. As a pytest plugin the module also records how long each test
takes. PYTEST_DONT_REWRITE: the interpreter's start has imported it by then.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coverage
import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("tiered", "megatrain", "cli")
_FOLDER, _TEST = "MUTANTS_RECORD", "PYTEST_CURRENT_TEST"
_running: coverage.Coverage | None = None
_durations_s: dict[str, float] = {}


@dataclass(frozen=True)
class Record:
    """The tests of one head.

    Attributes:
        tests_by_line: File -> line -> tests that execute it, after imports.
        duration_s: Test -> seconds, with the recording.
    """

    tests_by_line: Mapping[str, Mapping[int, frozenset[str]]]
    duration_s: Mapping[str, float]


def start() -> None:
    """Record in this process from now on, for the test that the environment names."""
    global _running
    if _running is None:
        atexit.register(save)
        leave = os._exit

        def save_and_leave(status: int) -> Any:
            save()
            leave(status)

        os._exit = save_and_leave  # type: ignore[assignment]
        os.register_at_fork(after_in_child=start)
    else:
        _running.stop()  # a copy of the parent's, after a fork; the parent writes those lines
    _running = coverage.Coverage(
        data_file=str(Path(os.environ[_FOLDER], f"{os.getpid()}-{secrets.token_hex(4)}.coverage")),
        config_file=False,
        source=[str(ROOT / name) for name in PACKAGES],
        concurrency=["thread", "greenlet"],
        context=current_test(),
        messages=False,
    )
    _running.set_option("run:disable_warnings", ["no-data-collected", "module-not-measured", "already-imported"])
    _running.start()


def current_test() -> str:
    """Return the node id of the test that runs, or the empty string."""
    return os.environ.get(_TEST, "").rpartition(" (")[0]


def save() -> None:
    """Write the lines of this process and stop."""
    global _running
    if _running is None or _FOLDER not in os.environ:
        return
    recorded, _running = _running, None
    recorded.stop()
    data = recorded.get_data()
    rows: list[tuple[str, str, list[int]]] = []
    for file in data.measured_files():
        lines: dict[str, list[int]] = defaultdict(list)
        for line, tests in data.contexts_by_lineno(file).items():
            for test in tests:
                lines[test].append(line)
        rows += [(test, str(Path(file).relative_to(ROOT)), sorted(each)) for test, each in lines.items() if test]
    path = Path(data.data_filename())
    if rows:
        path.with_suffix(".lines").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data.erase()
    if _durations_s:
        path.with_suffix(".durations").write_text(json.dumps(_durations_s))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Attribute the lines of a test to it, and note how long it takes."""
    if _running is not None:
        _running.switch_context(item.nodeid)
    start_s = time.perf_counter()
    result = yield
    _durations_s[item.nodeid] = time.perf_counter() - start_s
    return result


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Write the lines before the worker says that it has finished: after that, xdist kills it within seconds."""
    save()


def read(folder: Path) -> Record:
    """Join the files of all processes."""
    tests: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for test, file, lines in _rows(folder):
        for line in lines:
            tests[file][line].add(test)
    durations: dict[str, float] = {}
    for path in folder.glob("*.durations"):
        durations.update(json.loads(path.read_text()))
    frozen = {file: {line: frozenset(each) for line, each in lines.items()} for file, lines in tests.items()}
    return Record(frozen, durations)


def _rows(folder: Path) -> Iterator[tuple[str, str, list[int]]]:
    for path in sorted(folder.glob("*.lines")):
        with path.open() as file:
            for line in file:
                test, name, lines = json.loads(line)
                yield sys.intern(test), sys.intern(name), lines
