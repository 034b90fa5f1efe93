"""Write the tables of the pages in docs/coming_from: all known keys of other tools, and their replacements.

``python docs/keys_of_tools.py docs/coming_from`` rewrites the tables between the markers of each page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from megatrain.base.other_tools import KEYS, OTHER_KEYS, Row

BEGIN, END = "<!-- keys: written by docs/keys_of_tools.py -->", "<!-- end of keys -->"


def table_of(tool: str) -> str:
    """Return the tables of a tool's keys in Markdown."""
    rows: Mapping[str, Row] = dict(KEYS).get(tool) or {  # type: ignore[call-overload]
        key: row for key, row in OTHER_KEYS.items() if row.tool == tool
    }
    moved = {key: row for key, row in rows.items() if row.is_set}
    same = [key for key, row in moved.items() if key == row.config_key.rpartition(".")[2] and not row.note]
    lines = []
    if same:
        lines += [
            "**Keys with the same name**: " + ", ".join(f"`{moved[key].config_key}`" for key in sorted(same)) + ".",
            "",
        ]
    others = sorted(key for key in moved if key not in same)
    if others:
        lines += ["| key | key here | note |", "|---|---|---|"]
        lines += [f"| `{key}` | `{moved[key].config_key}` | {_cell(moved[key].note)} |" for key in others]
        lines += [""]
    for conversion, title in (("unneeded", "not needed here"), ("lost", "no equivalent here")):
        reasons = _by_reason((key, row) for key, row in rows.items() if row.conversion == conversion)
        if reasons:
            lines += [f"| {title} | why |", "|---|---|"]
            lines += [f"| {', '.join(f'`{key}`' for key in names)} | {_cell(why)} |" for why, names in reasons.items()]
            lines += [""]
    return "\n".join(lines)


def _by_reason(rows: Iterable[tuple[str, Row]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, row in sorted(rows, key=lambda each: each[0]):
        found.setdefault(row.reason, []).append(key)
    return found


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def update_page(page: str, tool: str) -> str:
    """Return a page in which the text between the markers is replaced by the current tables."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table_of(tool)}\n{END}{after}"


if __name__ == "__main__":
    for path in sorted(Path(sys.argv[1]).glob("*.md")):
        path.write_text(update_page(path.read_text(encoding="utf-8"), path.stem), encoding="utf-8")
