"""A pytest plugin for `-m gpu` on the null GPU: it ignores assertions about numbers, all others count.

    . temp/null_gpu/env.sh; pytest -p null_gpu.judge -m gpu tests/gpu

Kernels do nothing there, so no number is right: an assertion about a number means nothing, and the test continues after
it. An exception counts. So does an assertion of the project, or of a test about exit codes, bytes, waits or calls.
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
#: Tests that the project's packages ship, for authors of tiers.
SUITES = TESTS.parent / "tiered" / "testing"
#: Raises if numbers of two tensors differ.
_COMPARES = Path(torch.__file__).parent / "testing"
#: Test, a part of its error, and the reason why meaningless numbers always cause it.
KNOWN = (
    (
        "test_whole_runs.py::test_evaluations_continue_rows_as_on_a_cpu",
        "the cache is larger than planned",
        "that a row is complete is a number on the device, so transformers never ends generating",
    ),
    (
        "test_embedded_optimizer.py::test_a_sparse_gradient_is_made_dense_on_the_stream_of_its_copy",
        "integer multiplication overflow",
        "how many elements a sparse tensor has is a number on the device",
    ),
)
#: Words in the line of an assertion that counts.
JUDGED = re.compile(
    r"returncode|exit_code|Traceback|num_drops|num_calls|\bpeak|\w_bytes\b|allocated|reserved|allocs|as_planned|syncs|waits"
    r"|\bmoved|traffic|links|prefetch_|schedule_misses|gathers_ahead|is_pinned"
)
#: Ends of the project's messages about impossible numbers, which can occur here.
_NUMBERS = re.compile(r"not finite|\bnan\b|\binf\b|NonFinite|math domain error", re.IGNORECASE)
REACHED = "only a number is wrong"
_passed_over: list[str] = []  # in the running test


@contextmanager
def passing_over(text: str) -> Iterator[None]:
    """Continue after an assertion of a test about a number; ``text`` is its source."""
    try:
        yield
    except AssertionError:
        _passed_over.append(text)


def with_numbers_passed_over(tree: ast.Module, source: str) -> None:
    """Put every assertion about a number of a module into a ``with passing_over(...)``."""
    name = __name__.partition(".")[0]

    class Wrapped(ast.NodeTransformer):
        def visit_Assert(self, node: ast.Assert) -> ast.stmt:
            text = ast.get_source_segment(source, node) or ""
            if JUDGED.search(text):
                return node
            call = f"__import__({__name__!r}, fromlist=[{name!r}]).passing_over({text.splitlines()[0]!r})"
            wrapped = ast.parse(f"with {call}: pass").body[0]
            assert isinstance(wrapped, ast.With)
            for each in ast.walk(wrapped):
                ast.copy_location(each, node)
            wrapped.body = [node]
            return wrapped

    Wrapped().visit(tree)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Make pytest pass over numbers in every module whose assertions it rewrites, oracles included."""
    own = rewrite.rewrite_asserts

    def rewritten(tree: ast.Module, source: bytes, *more: Any) -> None:
        with_numbers_passed_over(tree, source.decode())
        own(tree, source, *more)

    rewrite.rewrite_asserts = rewritten
    rewrite.PYC_TAIL = f".null-gpu{rewrite.PYC_TAIL}"  # no other run may use these compiled files
    pytest.register_assert_rewrite("oracles", "tiered.testing")


def is_about_numbers(kind: type[BaseException], message: str, frames: Sequence[tuple[str, str]]) -> bool:
    """Return whether an exception of a test means nothing without real numbers.

    Args:
        kind: of the exception. message: its text. frames: file and line of source, the innermost last.
    """
    if _NUMBERS.search(f"{kind.__name__}: {message}"):
        return True
    file, line = asserting(frames)
    is_of_a_test = Path(file).is_relative_to(TESTS) or Path(file).is_relative_to(SUITES)
    return issubclass(kind, AssertionError) and is_of_a_test and not JUDGED.search(line)


def asserting(frames: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Return file and line of the innermost frame that is not one of torch's comparisons."""
    return next(frame for frame in reversed(frames) if not Path(frame[0]).is_relative_to(_COMPARES))


def known(test: str, message: str) -> str:
    """Return the reason for a test's known error, or ""."""
    return next((why for name, part, why in KNOWN if name in test and part in message), "")


def faults_of_calls(folder: Path) -> list[str]:
    """Return the errors in the results of calls of `bench/gpu_fifteen.sh`, without losses.

    A bench exits with 1 if any of its rows is not ok, so the rows and the output decide.
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
def possible_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps find possible gradient norms: a norm of arbitrary memory would end them."""
    from megatrain.optim import clip

    own = clip._sum_in_order

    def possible(values: Iterable[float]) -> float:
        found = abs(own(values))
        return found if math.isfinite(found) else 0.0

    monkeypatch.setattr(clip, "_sum_in_order", possible)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    """Report a test that failed for a number, or passed one over, as an expected failure."""
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
            report.outcome, report.wasxfail = "skipped", f"{REACHED}: {asserting(frames)[1]}"
    return report
