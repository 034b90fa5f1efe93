"""Translate another tool's file or command into the text of a config of ours, and list what was left out."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.base.other_tools import Tool
from megatrain.base.toml import format_value
from megatrain.config.keys import ARRAY_TABLES, FREE_TABLES, KEYS, NAMES, schema_key
from megatrain.config.problems import find_bad_combinations, validated
from megatrain.translate.draft import (
    Draft,
    ForeignConfig,
    Left,
    TranslatedValue,
    plain_key,
    read_command_line,
    read_source,
)
from megatrain.translate.engines import DEEPSPEED_VERSION, put_processes, translate_deepspeed, translate_megatrain
from megatrain.translate.trainers import (
    drop_evaluation_without_rows,
    translate_axolotl,
    translate_llama_factory,
    translate_trl,
)

_TRANSLATORS: Mapping[Tool, Callable[[Draft], None]] = {
    "llamafactory": translate_llama_factory,
    "axolotl": translate_axolotl,
    "trl": translate_trl,
    "deepspeed": translate_deepspeed,
    "megatrain": translate_megatrain,
}
_COMMENT_COLUMN = 42
_LONGEST_VALUE = 60


@dataclass(frozen=True)
class Translation:
    """A translated config.

    Attributes:
        tool: The tool it was translated from.
        toml: The text of our config, which loads.
        entries: Dotted key -> value, as in the text.
        lost: Keys without an equivalent.
        unneeded: Keys that nothing is needed for.
    """

    tool: Tool
    toml: str
    entries: Mapping[str, TranslatedValue]
    lost: tuple[Left, ...]
    unneeded: tuple[Left, ...]

    @property
    def to_fill_in(self) -> Mapping[str, TranslatedValue]:
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
    """Translate a YAML or JSON config, or a shell script that starts a training. Nothing is written.

    Args:
        path: The file.
        tool: The tool it belongs to; detected by default.
        folder: The folder that the translation will be in, and that its paths are relative to. Default: ``base``.
        base: The folder that relative paths in the file start from: where the tool is started. Default: the current
            one.

    Raises:
        TranslationError: The file cannot be read or parsed, or asks for training that is not supported here.
    """
    return _translate(read_source(path, tool), folder, base)


def translate_command_line(
    words: Sequence[str], tool: Tool | None = None, *, folder: Path | None = None, base: Path | None = None
) -> Translation:
    """Translate a command line that starts a training, as :func:`translate_file` does a file.

    Args:
        words: The command and its arguments, as a shell passes them.
        tool: as for :func:`translate_file`.
        folder: as for :func:`translate_file`.
        base: as for :func:`translate_file`.

    Raises:
        TranslationError: It starts no training, or one that is not supported here.
    """
    return _translate(read_command_line(words, tool), folder, base)


def _translate(source: ForeignConfig, folder: Path | None, base: Path | None) -> Translation:
    base = (base or Path.cwd()).resolve()
    draft = Draft(source, base)
    _TRANSLATORS[draft.source.tool](draft)
    draft.lose_unread()
    drop_evaluation_without_rows(draft)
    _gather_processes(draft)
    if "output_dir" not in draft.entries:
        draft.fill_in("output_dir", "outputs/first", "folder of the run")
    _settle(draft)
    where = (folder or base).resolve()
    entries = {
        key: TranslatedValue(_relative(entry, base, where), entry.theirs, entry.note, entry.is_path, entry.to_fill_in)
        for key, entry in draft.entries.items()
    }
    return Translation(draft.source.tool, _to_toml(draft, entries), entries, tuple(draft.lost), tuple(draft.unneeded))


def _gather_processes(draft: Draft) -> None:
    """Take over how many processes a launcher starts; list what else it was told.

    The batch is that of all of them here, and theirs that of each: so it is multiplied.
    """
    source, key = draft.source, "training.gradient_accumulation_steps"
    draft.lost += source.lost
    draft.unneeded += source.unneeded
    if source.num_processes is None:
        draft.lose(
            "launcher",
            f"how many processes it starts is not said: for the same rows per step multiply {key} by their number",
        )
    elif source.num_processes > 1:
        before = draft.entries.get(key)
        steps = before.value if before is not None and isinstance(before.value, int) else 1
        note = f"{steps} x {source.num_processes} processes: here the rows of a step are those of all"
        draft.put(key, steps * source.num_processes, before.theirs if before is not None else "", note)
        put_processes(draft, source.num_processes, source.num_hosts)


def _settle(draft: Draft) -> None:
    """Take out entries that this release cannot use, until the rest is a valid config.

    Raises:
        TranslationError: A required key has no usable value.
    """
    for key in [key for key in draft.entries if schema_key(key) not in KEYS]:
        _take_out(draft, key, f"this release has no {plain_key(key)}")
    model = draft.entries.get("model.model_name_or_path")
    if "model.revision" in draft.entries and (model is None or model.is_path or str(model.value).count("/") != 1):
        _take_out(draft, "model.revision", "it is of a model on the hub, OWNER/NAME")
    while True:
        problems = _problems(draft)
        if not problems:
            return
        found = False
        for key, why in problems:
            for entry in _entries_behind(draft, key):
                found = True
                _take_out(draft, entry, why)
        if not found:
            raise draft.refuse("no valid config comes of it: " + "; ".join(why for _, why in problems))


def _problems(draft: Draft) -> list[tuple[str, str]]:
    """Return what makes a draft no valid config: our key, and why."""
    values = _nested({key: entry.value for key, entry in draft.entries.items()})
    config, found = validated(values)
    if config is None:
        return [(problem.key, str(problem)) for problem in found]
    bad = [problem for problem in find_bad_combinations(config) if problem.key != "output_dir"]
    return [(problem.key, f"{problem.message}. {problem.remedy}".rstrip(". ")) for problem in bad]


def _entries_behind(draft: Draft, key: str) -> list[str]:
    """Return the entries that a problem with a key comes from: of the key, inside it, or the nearest around it."""
    if key == "optimizer.lr_scheduler_kwargs" and key not in draft.entries:
        key = "optimizer.lr_scheduler_type"
    while key:
        inside = [name for name in draft.entries if name == key or name.startswith(f"{key}.")]
        optional = [name for name in inside if not draft.entries[name].to_fill_in]
        if optional:
            return optional if len(optional) == 1 or inside == [key] else []
        key = key.rpartition(".")[0]
    return []


def _take_out(draft: Draft, key: str, why: str) -> None:
    entry = draft.entries.pop(key)
    if entry.theirs:
        draft.lose(entry.theirs, why, entry.value)


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted keys as nested tables and lists; the entries of a list must come in order."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        at: Any = tree
        parts = key.split(".")
        for index, part in enumerate(parts[:-1]):
            if part.isdecimal():
                while len(at) <= int(part):
                    at.append({})
                at = at[int(part)]
            else:
                at = at.setdefault(part, [] if ".".join(parts[: index + 1]) in ARRAY_TABLES else {})
        at[parts[-1]] = value
    return tree


def _relative(entry: TranslatedValue, base: Path, folder: Path) -> Any:
    """Return an entry's value as a config in ``folder`` has it."""
    if not entry.is_path or Path(entry.value).expanduser().is_absolute():
        return entry.value
    return os.path.relpath(base / entry.value, folder)


def _to_toml(draft: Draft, entries: Mapping[str, TranslatedValue]) -> str:
    tool = draft.source.title
    if draft.source.tool == "deepspeed":
        tool += f", with the defaults of version {DEEPSPEED_VERSION}"
    lines = [f"# Translated from {draft.source.path.name} ({tool}) by `megatrain-tier import`."]
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


def _collapsed(entries: Mapping[str, TranslatedValue]) -> dict[str, TranslatedValue]:
    """Return entries with each free table as a single one, to be written inline."""
    collapsed: dict[str, TranslatedValue] = {}
    for key, entry in entries.items():
        above, _, name = key.rpartition(".")
        if plain_key(above) not in FREE_TABLES:
            collapsed[key] = entry
        else:
            others = collapsed.get(above, TranslatedValue({}))
            theirs = "; ".join(dict.fromkeys(part for part in (others.theirs, entry.theirs) if part))
            collapsed[above] = TranslatedValue({**others.value, name: entry.value}, theirs, entry.note or others.note)
    return collapsed


def _line(leaf: str, entry: TranslatedValue) -> str:
    text = f"{leaf} = {format_value(entry.value)}"
    theirs = entry.theirs if entry.theirs.rpartition(".")[2] != leaf else ""
    comment = ("FILL IN: " if entry.to_fill_in else "") + "; ".join(part for part in (theirs, entry.note) if part)
    return f"{text:<{_COMMENT_COLUMN}}  # {_ascii(comment)}" if comment else text


def _in_order(entries: Mapping[str, TranslatedValue]) -> list[str]:
    """Return keys in the order of the schema: the values of a table before the tables inside it."""
    order = {name: number for number, name in enumerate(NAMES)}

    def place(key: str) -> tuple[bool, list[tuple[int, str]]]:
        parts, path = key.split("."), []
        for length in range(1, len(parts) + 1):
            name = plain_key(".".join(parts[:length]))
            is_leaf = length == len(parts)
            path.append((order.get(name, len(order)) - (len(order) if is_leaf else 0), parts[length - 1].zfill(6)))
        return len(parts) > 1, path

    return sorted(entries, key=place)


def one_line(left: Left) -> str:
    """Return a left-out key in one line, with its value where that is short."""
    value = left.value
    shown = "" if value is None else json.dumps(value, default=str, ensure_ascii=True)
    if len(shown) > _LONGEST_VALUE:
        shown = "..."
    return _ascii(f"{left.theirs}{f' = {shown}' if shown else ''}: {left.why}")


def _ascii(text: str) -> str:
    """Return a text as one line of printable ASCII."""
    words = " ".join(text.encode("ascii", "replace").decode().split())
    return "".join(char if char.isprintable() else "?" for char in words)
