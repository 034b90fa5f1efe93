"""Every row of docs/faults.md names at least one test, and all named tests exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_row_names_tests_that_exist() -> None:
    rows = [line for line in (ROOT / "docs/faults.md").read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 15
    for row in rows:
        names = re.findall(r"`([^`]*)`", row.rsplit(" | ", 1)[1])
        assert names, row
        file = ""
        for name in names:
            file, _, test = name.partition("::") if not name.startswith("::") else (file, "", name[2:])
            text = (ROOT / "tests/faults" / file).resolve().read_text()
            assert not test or f"def {test}(" in text, name
