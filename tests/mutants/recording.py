"""Records which tests execute the statements where mistakes will be planted, including in subprocesses of tests.

A probe is a call before the statement of a mistake or at the start of a function; `probes_of` chooses the locations.
Probes are inserted while an interpreter compiles a file, so files and line numbers do not change. The first time that a
test reaches a probe in a process, the probe immediately appends a line `hit NUMBER TEST` to a file. A killed process
therefore loses no lines. As a pytest plugin, the module also appends `took SECONDS TEST` for each phase of a test.

PYTEST_DONT_REWRITE is set, because the interpreter imports this module at startup, before pytest could rewrite it. The
module does not import pytest, because a test checks that programs run without it.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROBES, HITS = "probes.json", "hits"
_CALL = "__mutants_hit__"
#: Environment variables. PYTEST_CURRENT_TEST is not used, because a pytest run inside a test replaces it.
_FOLDER, _TEST = "MUTANTS_RECORD", "MUTANTS_TEST"
#: The original functions. Tests of failing drives replace them in `os`.
_open, _write, _close = os.open, os.write, os.close
_seen: set[tuple[int, str]] = set()

#: First line and column of a statement.
Place = tuple[int, int]


@dataclass(frozen=True)
class Probes:
    """Code locations whose execution shows which tests could catch a mistake.

    Attributes:
        statement: Statement with the mistake. None outside functions, where only an import executes the statement.
        functions: First statement of the enclosing function. Outside functions, first statements of all functions in
            the file.
    """

    statement: Place | None
    functions: tuple[Place, ...]


@dataclass(frozen=True)
class Record:
    """Record of one test run.

    Attributes:
        tests: (file, place) -> tests that executed the statement there.
        duration_s: Test -> seconds that the test took, including the recording.
    """

    tests: Mapping[tuple[str, Place], frozenset[str]]
    duration_s: Mapping[str, float]


def probes_of(tree: ast.AST, line: int) -> Probes | None:
    """Return the probes for a mistake on a line, or None in a function that numba compiles: it cannot call probes."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    around = [node for node in functions if node.body[0].lineno <= line <= (node.end_lineno or 0)]  # excludes defaults
    if any("njit" in ast.unparse(decorator) for node in around for decorator in node.decorator_list):
        return None
    if not around:
        return Probes(None, tuple(sorted({_start(node) for node in functions if not _has_only_a_docstring(node)})))
    function = max(around, key=lambda node: node.lineno)
    statements = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.stmt) and node is not function and node.lineno <= line <= (node.end_lineno or 0)
    ]
    innermost = max(statements, key=lambda node: (node.lineno, node.col_offset))
    return Probes((innermost.lineno, innermost.col_offset), (_start(function),))


def _has_only_a_docstring(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return len(function.body) == 1 and ast.get_docstring(function, clean=False) is not None


def _start(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Place:
    first = function.body[int(ast.get_docstring(function, clean=False) is not None)]
    return first.lineno, first.col_offset


def start() -> None:
    """Insert the probes into each file that this interpreter imports from now on."""
    folder = Path(os.environ[_FOLDER])
    places: dict[str, dict[Place, int]] = defaultdict(dict)
    for number, (file, line, column) in enumerate(json.loads((folder / PROBES).read_text())):
        places[str(ROOT / file)][line, column] = number
    hits = str(folder / HITS)
    original = SourceFileLoader.get_code

    def hit(number: int) -> None:
        test = os.environ.get(_TEST, "")
        if test and (number, test) not in _seen:
            _seen.add((number, test))
            _append(hits, f"hit {number} {test}\n")

    def get_code(self: SourceFileLoader, fullname: str) -> Any:
        path = self.get_filename(fullname)
        known = places.get(path) or places.get(os.path.realpath(path))
        if not known:
            return original(self, fullname)
        tree = ast.parse(self.get_data(path))
        return compile(ast.fix_missing_locations(_Inserter(known).visit(tree)), path, "exec")

    setattr(builtins, _CALL, hit)
    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


class _Inserter(ast.NodeTransformer):
    def __init__(self, numbers: Mapping[Place, int]) -> None:
        self._numbers = numbers

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            if isinstance(statements, list):
                setattr(node, name, [each for statement in statements for each in self._with_probe(statement)])
        return node

    def _with_probe(self, statement: ast.stmt) -> Iterator[ast.stmt]:
        number = self._numbers.get((statement.lineno, statement.col_offset))
        if number is not None:
            call = ast.Call(ast.Name(_CALL, ast.Load()), [ast.Constant(number)], [])
            yield ast.copy_location(ast.Expr(ast.copy_location(call, statement)), statement)
        yield statement


def _append(path: str, line: str) -> None:
    """Append a short line in one write, so processes do not mix lines. Ignore errors: tests may limit file sizes."""
    file = _open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with suppress(OSError):
        _write(file, line.encode())
    _close(file)


def pytest_runtest_logstart(nodeid: str) -> None:
    """Set an environment variable to the name of the running test, for its child processes."""
    os.environ[_TEST] = nodeid


def pytest_runtest_logfinish() -> None:
    """Remove the environment variable, so that nothing is attributed to a finished test."""
    os.environ.pop(_TEST, None)


def pytest_runtest_logreport(report: Any) -> None:
    """Record how long a phase of a test took, in the process that ran the test."""
    if not hasattr(report, "node"):  # only the controller of pytest-xdist adds `node`
        _append(str(Path(os.environ[_FOLDER], HITS)), f"took {report.duration:.3f} {report.nodeid}\n")


def read(folder: Path) -> Record:
    """Return the record that a test run wrote to a folder."""
    probes = [(file, (line, column)) for file, line, column in json.loads((folder / PROBES).read_text())]
    tests: dict[tuple[str, Place], set[str]] = defaultdict(set)
    duration_s: dict[str, float] = defaultdict(float)
    for row in (folder / HITS).read_text().splitlines():
        kind, value, test = row.split(" ", 2)
        if kind == "hit":
            tests[probes[int(value)]].add(sys.intern(test))
        else:
            duration_s[test] += float(value)
    return Record({key: frozenset(each) for key, each in tests.items()}, duration_s)
