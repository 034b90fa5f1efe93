"""From a file of another tool to the text of a config of ours, with a list of what did not come along."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.config.json_schema import json_schema
from megatrain.config.keys import ARRAY_TABLES, FREE_TABLES
from megatrain.config.resolved import format_value
from megatrain.translate import axolotl, deepspeed, llamafactory, megatrain, trl
from megatrain.translate.common import evaluation_without_rows
from megatrain.translate.draft import Draft, Entry, Left, plain_key, relative, settle
from megatrain.translate.source import Tool, read_source

_TRANSLATORS: Mapping[Tool, Callable[[Draft], None]] = {
    "llamafactory": llamafactory.translate,
    "axolotl": axolotl.translate,
    "trl": trl.translate,
    "deepspeed": deepspeed.translate,
    "megatrain": megatrain.translate,
}
_COMMENT_COLUMN = 42
_LONGEST_VALUE = 60


@dataclass(frozen=True)
class Translation:
    """A translated config.

    Attributes:
        tool: whose file it was.
        toml: the text of ours, which loads.
        entries: dotted key -> value, as in the text.
        lost: what has no equivalent.
        unneeded: what needs none.
    """

    tool: Tool
    toml: str
    entries: Mapping[str, Entry]
    lost: tuple[Left, ...]
    unneeded: tuple[Left, ...]

    @property
    def to_fill_in(self) -> Mapping[str, Entry]:
        """Return the keys whose values are only examples."""
        return {key: entry for key, entry in self.entries.items() if entry.to_fill_in}

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "tool": self.tool,
            "toml": self.toml,
            "values": {
                key: {"value": entry.value, "from": entry.theirs, "note": entry.note}
                for key, entry in self.entries.items()
            },
            "no_equivalent": [_left_to_json(left) for left in self.lost],
            "not_needed": [_left_to_json(left) for left in self.unneeded],
            "to_fill_in": list(self.to_fill_in),
        }


def _left_to_json(left: Left) -> dict[str, Any]:
    return {"key": left.theirs, "value": left.value, "why": left.why}


def translate_file(
    path: Path, tool: Tool | None = None, *, folder: Path | None = None, base: Path | None = None
) -> Translation:
    """Translate a YAML or JSON config. Nothing is written.

    Args:
        path: the file.
        tool: whose it is; found out where not given.
        folder: where the translation will lie; its paths are relative to that. Default: ``base``.
        base: what relative paths in the file are relative to: the folder that the tool is started in. Default: the
            current one.

    Raises:
        TranslationError: the file cannot be read or parsed, or asks for training that is not done here.
    """
    base = (base or Path.cwd()).resolve()
    draft = Draft(read_source(path, tool), base)
    _TRANSLATORS[draft.source.tool](draft)
    evaluation_without_rows(draft)
    settle(draft)
    where = (folder or base).resolve()
    entries = {
        key: Entry(relative(entry, base, where), entry.theirs, entry.note, entry.is_path, entry.to_fill_in)
        for key, entry in draft.entries.items()
    }
    return Translation(draft.source.tool, _to_toml(draft, entries), entries, tuple(draft.lost), tuple(draft.unneeded))


def _to_toml(draft: Draft, entries: Mapping[str, Entry]) -> str:
    lines = [f"# Translated from {draft.source.path.name} ({draft.source.title}) by `megatrain-tier import`."]
    for title, lefts in (("Has no equivalent here", draft.lost), ("Not needed here", draft.unneeded)):
        if lefts:
            lines += ["#", f"# {title}:", *(f"#   {one_line(left)}" for left in lefts)]
    lines += ["", "config_version = 1"]
    table = ""
    entries = _collapsed(entries)
    for key in _in_order(entries):
        above, _, leaf = key.rpartition(".")
        if above != table:
            name = plain_key(above)
            header = f"[[{name}]]" if name in ARRAY_TABLES else f"[{above}]"
            lines += ["", header]
            table = above
        lines.append(_line(leaf, entries[key]))
    return "\n".join(lines) + "\n"


def _collapsed(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return entries with those of one table of free names as a single one, to be written inline."""
    collapsed: dict[str, Entry] = {}
    for key, entry in entries.items():
        above, _, name = key.rpartition(".")
        if plain_key(above) not in FREE_TABLES:
            collapsed[key] = entry
        else:
            others = collapsed.get(above, Entry({}))
            theirs = "; ".join(dict.fromkeys(part for part in (others.theirs, entry.theirs) if part))
            collapsed[above] = Entry({**others.value, name: entry.value}, theirs, entry.note or others.note)
    return collapsed


def _line(leaf: str, entry: Entry) -> str:
    text = f"{leaf} = {format_value(entry.value)}"
    theirs = entry.theirs if entry.theirs.rpartition(".")[2] != leaf else ""
    comment = ("FILL IN: " if entry.to_fill_in else "") + "; ".join(part for part in (theirs, entry.note) if part)
    return f"{text:<{_COMMENT_COLUMN}}  # {_ascii(comment)}" if comment else text


def _in_order(entries: Mapping[str, Entry]) -> list[str]:
    """Return keys in the order of the schema: the values of a table before the tables inside it."""
    order = {name: number for number, name in enumerate(_names(json_schema(), ""))}

    def place(key: str) -> tuple[bool, list[tuple[int, str]]]:
        parts, path = key.split("."), []
        for length in range(1, len(parts) + 1):
            name = plain_key(".".join(parts[:length]))
            is_leaf = length == len(parts)
            path.append((order.get(name, len(order)) - (len(order) if is_leaf else 0), parts[length - 1].zfill(6)))
        return len(parts) > 1, path

    return sorted(entries, key=place)


def _names(schema: Mapping[str, Any], prefix: str) -> list[str]:
    names = []
    for name, inner in schema.get("properties", {}).items():
        names += [prefix + name, *_names(inner.get("items", inner), f"{prefix}{name}.")]
    return names


def one_line(left: Left) -> str:
    """Return what became of a key in one line: its value is shown where it is short."""
    value = left.value
    shown = "" if value is None else json.dumps(value, default=str, ensure_ascii=True)
    if len(shown) > _LONGEST_VALUE:
        shown = "..."
    return _ascii(f"{left.theirs}{f' = {shown}' if shown else ''}: {left.why}")


def _ascii(text: str) -> str:
    """Return a text as one line of characters that every file and terminal shows."""
    words = " ".join(text.encode("ascii", "replace").decode().split())
    return "".join(char if char.isprintable() else "?" for char in words)
