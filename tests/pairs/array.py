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
from itertools import accumulate, combinations
from pathlib import Path
from typing import Any

from pairs.factors import EXCLUSIONS, FACTORS, IN_SOFTWARE, Row, is_excluded

FILE = Path(__file__).with_name("rows.jsonl")
#: Largest cost of a row that runs without `-m slow`, and of all such rows of a day; see ``cost_of``.
MOST_COST_OF_A_ROW, COST_OF_A_DAY = 4, 14


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


def chosen(day: str) -> Sequence[dict[str, str]]:
    """Return the rows of a day: random rows, as many as together cost at most ``COST_OF_A_DAY``."""
    drawn = [row for row in all_rows() if cost_of(row) <= MOST_COST_OF_A_ROW]
    random.Random(day).shuffle(drawn)
    costs = accumulate(map(cost_of, drawn))
    return [row for row, cost in zip(drawn, costs, strict=True) if cost <= COST_OF_A_DAY]


def cost_of(row: Row) -> float:
    """Return the approximate duration of a row, in runs of a small dense text model in one process on the CPU."""
    cost = {"llama": 1, "gpt2": 1, "qwen3_moe": 2, "gpt_oss": 2, "zamba2": 2.5, "qwen2_5_vl": 3}[row["model"]]
    cost *= 4 if row["placement"] in IN_SOFTWARE else 1
    return cost * (1 if row["ranks"] == "alone" else 2) * (2 if row["layers"] == "compiled" else 1)


if __name__ == "__main__":
    made = generate(all_rows())
    FILE.write_text("".join(json.dumps(each) + "\n" for each in made))
