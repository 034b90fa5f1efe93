"""Pytest plugin for `-m gpu` on the null GPU. It ignores failed assertions about computed numbers.

    . temp/null_gpu/env.sh; pytest -p null_gpu.judge -m gpu tests/gpu

Kernels do nothing on the null GPU, so computed numbers are wrong. A test continues after a failed assertion about such
a number. Failed assertions in the packages still fail the test. So do failed assertions in tests about exit codes,
bytes, waits or calls, and exceptions that wrong numbers do not explain.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.assertion import rewrite

TESTS = Path(__file__).resolve().parent.parent
#: Test suites in `tiered` for authors of tiers.
SUITES = TESTS.parent / "tiered" / "testing"
#: Folder of torch's comparison functions, such as `assert_close`.
_COMPARES = Path(torch.__file__).parent / "testing"
#: (test, part of its error message, reason why wrong numbers always cause this error).
KNOWN = (
    (
        "test_whole_runs.py::test_evaluations_continue_rows_as_on_a_cpu",
        "the cache is larger than planned",
        "that a row is complete is a number on the device, so transformers never ends generating",
    ),
    (
        "test_embedded_optimizer.py::test_sparse_gradient_is_densified_on_its_copy_stream",
        "integer multiplication overflow",
        "how many elements a sparse tensor has is a number on the device",
    ),
)
#: A failed assertion fails the test if its source line contains one of these words.
JUDGED = re.compile(
    r"returncode|exit_code|Traceback|num_drops|num_calls|\bpeak|\w_bytes\b|allocated|reserved|allocs|as_planned|syncs|waits"
    r"|\bmoved|traffic|links|prefetch_|schedule_misses|gathers_ahead|is_pinned"
)
#: Parts of error messages about impossible numbers, which are normal on the null GPU.
_NUMBERS = re.compile(r"not finite|\bnan\b|\binf\b|NonFinite|math domain error", re.IGNORECASE)
REACHED = "only a number is wrong"
_passed_over: list[str] = []  # failed assertions of the running test


@contextmanager
def recording_failures(text: str) -> Iterator[None]:
    """Continue after a failed assertion, and record its source line ``text``."""
    try:
        yield
    except AssertionError:
        _passed_over.append(text)


def tolerate_number_assertions(tree: ast.Module, source: str) -> None:
    """Wrap every assertion about a number in ``with recording_failures(...)``, in the syntax tree of a module."""
    name = __name__.partition(".")[0]

    class Wrapped(ast.NodeTransformer):
        def visit_Assert(self, node: ast.Assert) -> ast.stmt:
            text = ast.get_source_segment(source, node) or ""
            if JUDGED.search(text):
                return node
            call = f"__import__({__name__!r}, fromlist=[{name!r}]).recording_failures({text.splitlines()[0]!r})"
            wrapped = ast.parse(f"with {call}: pass").body[0]
            assert isinstance(wrapped, ast.With)
            for each in ast.walk(wrapped):
                ast.copy_location(each, node)
            wrapped.body = [node]
            return wrapped

    Wrapped().visit(tree)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Wrap assertions about numbers in every module whose assertions pytest rewrites, including the oracles."""
    own = rewrite.rewrite_asserts

    def rewritten(tree: ast.Module, source: bytes, *more: Any) -> None:
        tolerate_number_assertions(tree, source.decode())
        own(tree, source, *more)

    rewrite.rewrite_asserts = rewritten
    rewrite.PYC_TAIL = f".null-gpu{rewrite.PYC_TAIL}"  # no other run may use these compiled files
    pytest.register_assert_rewrite("oracles", "tiered.testing")


def is_about_numbers(kind: type[BaseException], message: str, frames: Sequence[tuple[str, str]]) -> bool:
    """Return whether wrong numbers explain an exception in a test. If so, the exception does not count.

    Args:
        kind: Type of the exception.
        message: Text of the exception.
        frames: (file, source line) of each frame, innermost last.
    """
    if _NUMBERS.search(f"{kind.__name__}: {message}"):
        return True
    file, line = assertion_frame(frames)
    is_of_a_test = Path(file).is_relative_to(TESTS) or Path(file).is_relative_to(SUITES)
    return issubclass(kind, AssertionError) and is_of_a_test and not JUDGED.search(line)


def assertion_frame(frames: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Return (file, source line) of the innermost frame outside torch's comparison functions."""
    return next(frame for frame in reversed(frames) if not Path(frame[0]).is_relative_to(_COMPARES))


def known(test: str, message: str) -> str:
    """Return the reason for a test's error if the error is in ``KNOWN``, otherwise ""."""
    return next((why for name, part, why in KNOWN if name in test and part in message), "")


def find_call_failures(folder: Path) -> list[str]:
    """Return the failed rows, except losses and times, and the failures in the log of `bench/gpu_fifteen.sh`.

    `gpu.py` exits with 1 if any row is not ok. This exit status is ignored, because its rows are checked instead.
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


@pytest.fixture(autouse=True)
def make_norms_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make gradient norms finite and nonnegative. They come from arbitrary memory, so they could abort a step."""
    from megatrain.optim import clip

    own = clip._sum_in_order

    def possible(values: Iterable[float]) -> float:
        found = abs(own(values))
        return found if math.isfinite(found) else 0.0

    monkeypatch.setattr(clip, "_sum_in_order", possible)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    """Report a test as an expected failure if wrong numbers explain its error, or if it ignored a failed assertion."""
    report = yield
    if report.when == "call" and report.passed and _passed_over:
        report.outcome, report.wasxfail = "skipped", f"{REACHED}: {'; '.join(dict.fromkeys(_passed_over))}"
    _passed_over.clear()
    if report.when == "call" and report.failed and call.excinfo is not None:
        frames = [(str(entry.path), str(entry.statement)) for entry in call.excinfo.traceback]
        message = str(call.excinfo.value)
        if why := known(item.nodeid, message):
            report.outcome, report.wasxfail = "skipped", why
        elif is_about_numbers(call.excinfo.type, message, frames):
            report.outcome, report.wasxfail = "skipped", f"{REACHED}: {assertion_frame(frames)[1]}"
    return report
