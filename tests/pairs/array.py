"""The covering array: a small set of rows that contains every possible pair of levels.

In ``tests``, ``python -m pairs.array`` regenerates ``rows.jsonl``: it keeps the rows that are still possible, and
covertable adds the missing rows.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from pairs.factors import EXCLUSIONS, FACTORS, IN_SOFTWARE, Row, is_excluded

FILE = Path(__file__).with_name("rows.jsonl")


@functools.cache
def all_rows() -> tuple[dict[str, str], ...]:
    """Return all rows, sorted by name."""
    return tuple(json.loads(line) for line in FILE.read_text().splitlines())


def generate(kept: Sequence[Row] = ()) -> list[dict[str, str]]:
    """Generate the rows of the array. This takes a few CPU seconds.

    Args:
        kept: Rows to keep, unless they are excluded or redundant.
    """
    import covertable

    plainest = {name: levels[0] for name, levels in FACTORS.items()}  # fills in factors that are newer than a row
    presets = [{**plainest, **row} for row in kept]
    constraints: list[dict[str, Any]] = []
    for each in EXCLUSIONS:
        held = [{"operator": "in", "left": name, "values": list(levels)} for name, levels in each.levels.items()]
        constraints.append({"operator": "not", "condition": {"operator": "and", "conditions": held}})
    made = covertable.make(
        {name: list(levels) for name, levels in FACTORS.items()},
        presets=[row for row in presets if not is_excluded(row)],
        constraints=constraints,
    )
    rows = sorted(({name: row[name] for name in FACTORS} for row in made), key=name_of)
    return _needed(rows)


def _needed(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Return the rows without redundant ones. A row is redundant if all its pairs are in other rows."""
    times = Counter(pair for row in rows for pair in pairs_of(row))
    left = []
    for row in rows:
        pairs = pairs_of(row)
        if all(times[pair] > 1 for pair in pairs):
            times.subtract(pairs)
        else:
            left.append(row)
    return left


def name_of(row: Row) -> str:
    """Return the test name of a row: four hex digits, its model, and its other levels except the plainest."""
    words = "-".join(row[name] for name, levels in FACTORS.items() if name == "model" or row[name] != levels[0])
    return f"{digest(row):04x}-{words}"


def digest(row: Row) -> int:
    """Return a 16-bit number that depends only on the row."""
    text = ",".join(f"{name}={row[name]}" for name in FACTORS)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:2], "little")


def pairs_of(row: Row) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    """Return the pairs of levels in a row."""
    return set(combinations(((name, row[name]) for name in FACTORS), 2))


def chosen(seed: str) -> Sequence[dict[str, str]]:
    """Return the rows of a day: a random row, plus rows for the levels that it lacks, preferably fast ones."""
    drawn = [row for row in all_rows() if not is_long(row)]
    random.Random(seed).shuffle(drawn)
    found = drawn[:1]
    missing = {(name, level) for name, levels in FACTORS.items() for level in levels}
    missing -= {level for row in found for level in row.items()}
    while missing:
        row = max(drawn, key=lambda each: len(missing & each.items()) / cost_of(each) ** 0.25)
        missing -= row.items()
        found.append(row)
    return found


def cost_of(row: Row) -> int:
    """Return the approximate duration of a row, in runs of a small text model in one process on the CPU."""
    factor = 3 if row["model"] == "zamba2" else 2 if row["model"] == "qwen2_5_vl" else 1
    return factor * (4 if row["placement"] in IN_SOFTWARE else 1) * (1 if row["ranks"] == "alone" else 2)


def is_long(row: Row) -> bool:
    """Return whether a row has two slow levels, and so takes half a minute or more."""
    is_slow_model = row["model"] in ("zamba2", "qwen2_5_vl")
    is_on_ranks, is_compiled = row["ranks"] != "alone", row["layers"] == "compiled"
    return is_slow_model + is_on_ranks + is_compiled + (row["placement"] in IN_SOFTWARE) > 1


if __name__ == "__main__":
    made = generate(all_rows())
    FILE.write_text("".join(json.dumps(each) + "\n" for each in made))
