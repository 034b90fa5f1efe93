"""The probes that record which tests reach a planted mistake."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mutants import recording
from mutants.recording import Probes, probes_of

SOURCE = '''\
LIMIT = 3

def compute(a, b=2):
    """Return a number."""
    if a:
        return (a
                + b)
    elif b:
        a = 1
    return a

@njit
def compiled(a):
    return a + 1

class Value:
    size = 4

    def get(self):
        return self.size
'''


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (1, Probes(None, ((5, 4), (14, 4), (20, 8)))),
        (3, Probes(None, ((5, 4), (14, 4), (20, 8)))),  # an import evaluates a function's defaults
        (5, Probes((5, 4), ((5, 4),))),
        (7, Probes((6, 8), ((5, 4),))),
        (8, Probes((8, 4), ((5, 4),))),
        (9, Probes((9, 8), ((5, 4),))),
        (14, None),
        (17, Probes(None, ((5, 4), (14, 4), (20, 8)))),
        (20, Probes((20, 8), ((20, 8),))),
    ],
)
def test_probes_are_at_the_statement_and_at_its_function(line: int, expected: Probes | None) -> None:
    assert probes_of(ast.parse(SOURCE), line) == expected


def test_a_process_reports_each_statement_that_its_test_executes(tmp_path: Path) -> None:
    file = Path(recording.ROOT, "tiered", "units.py")
    lines = file.read_text().splitlines()
    places = [
        ("tiered/units.py", number, 4) for number, line in enumerate(lines, 1) if line.startswith("    return -(-")
    ]
    (tmp_path / recording.PROBES).write_text(json.dumps(places))
    environment = {
        **os.environ,
        "MUTANTS_RECORD": str(tmp_path),
        "MUTANTS_TESTS": str(recording.ROOT / "tests"),
        "PYTHONPATH": str(Path(recording.__file__).with_name("at_start")),
        "MUTANTS_TEST": "tests/test_a.py::test_b",
        "PYTEST_CURRENT_TEST": "inner.py::test_c (call)",
    }
    program = (
        "import tiered.units as u; assert [u.round_up(3, 2) for _ in range(3)] == [4] * 3; print(u.round_up.__doc__)"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, timeout=60, capture_output=True
    )
    assert output.stdout.startswith(b"Return the smallest")
    recorded = recording.read(tmp_path)
    assert recorded.tests == {
        (file, (line, column)): frozenset({"tests/test_a.py::test_b"}) for file, line, column in places
    }
