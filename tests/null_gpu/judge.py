"""A plugin of pytest for `-m gpu` on the null GPU: what failed for its numbers alone has reached its end.

    . temp/null_gpu/env.sh; pytest -p null_gpu.judge -m gpu tests/gpu

Kernels do nothing there, so no number is right: an assertion of a test about one says nothing. An exception does, and
so does an assertion of ours, or one of a test about exit codes, bytes, waits or what was called.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent.parent
#: In the line of an assertion that is judged.
JUDGED = re.compile(
    r"returncode|exit_code|Traceback|num_drops|num_calls|\bpeak|\w_bytes\b|allocated|reserved|allocs|as_planned|syncs|waits"
)
#: Ends of messages of ours about numbers that cannot be, which the numbers here may be.
_NUMBERS = re.compile(r"not finite|\bnan\b|\binf\b|NonFinite|math domain error", re.IGNORECASE)
REACHED = "reached its end: only a number is wrong"


def is_about_numbers(kind: type[BaseException], message: str, frames: Sequence[tuple[str, str]]) -> bool:
    """Return whether an exception of a test says nothing where numbers are none.

    Args:
        kind: of the exception. message: its text. frames: file and line of source, the innermost last.
    """
    if _NUMBERS.search(f"{kind.__name__}: {message}"):
        return True
    file, line = frames[-1]
    is_of_a_test = Path(file).is_relative_to(TESTS)
    return issubclass(kind, AssertionError) and is_of_a_test and not JUDGED.search(line)


def faults_of_calls(folder: Path) -> list[str]:
    """Return what is wrong in the results of calls of `bench/gpu_first_hour.sh`, losses aside.

    A bench ends with 1 if any of its rows is not ok; so that is judged by the rows, and by what it printed.
    """
    rows, log = folder / "gpu.jsonl", (folder / "log.txt").read_text(encoding="utf-8")
    found = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()] if rows.exists() else []
    faults = [row["name"] for row in found if row["ok"] is False and not row["timing"] and ".loss." not in row["name"]]
    for line in log.splitlines():
        ends_as_its_rows = "gpu.py" in line and "exit status 1 " in line
        if line.startswith("Traceback") or (
            re.match(r"\[.*(no time left|exit status [^0])", line) and not ends_as_its_rows
        ):
            faults.append(line)
    return faults


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    """Report a test that failed for a number as one that was expected to."""
    report = yield
    if report.when == "call" and report.failed and call.excinfo is not None:
        frames = [(str(entry.path), str(entry.statement)) for entry in call.excinfo.traceback]
        if is_about_numbers(call.excinfo.type, str(call.excinfo.value), frames):
            report.outcome, report.wasxfail = "skipped", REACHED
    return report
