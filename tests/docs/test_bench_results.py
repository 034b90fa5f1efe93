"""The results page links to every result file, quotes existing rows, and shows commands of existing benches."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "bench" / "results"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")


def test_every_result_is_on_the_page() -> None:
    named = set(re.findall(r"\]\(([\w.]+)\)", PAGE))
    assert {path.name for path in FOLDER.iterdir()} - {"README.md"} <= named


def test_quoted_rows_match_the_result_files() -> None:
    rows: list[dict[str, object]] = []
    quoted = 0
    for line in PAGE.splitlines():
        if found := re.match(r"Rows of \[([\w.]+\.jsonl)\]", line):
            rows = [json.loads(each) for each in (FOLDER / found[1]).read_text(encoding="utf-8").splitlines()]
        elif line.startswith("    {"):
            quote = json.loads(line)
            assert any(quote.items() <= row.items() for row in rows), line
            quoted += 1
    assert quoted >= len(list(FOLDER.glob("*.jsonl")))


def test_quoted_bench_commands_exist() -> None:
    commands = re.findall(r"^ {4}(?:python|make) (\S+)", PAGE, flags=re.MULTILINE)
    assert len(commands) >= 15
    assert all((ROOT / command).is_file() for command in commands if command.startswith("bench/"))
