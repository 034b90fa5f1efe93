"""Translation of another tool's config file or command into the text of a config, with a list of omitted keys."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatrain.base.other_tools import RANKS, Tool
from megatrain.base.toml import format_value
from megatrain.config.combinations import find_bad_combinations
from megatrain.config.keys import ARRAY_TABLES, FREE_TABLES, KEYS, NAMES, schema_key
from megatrain.config.load import validate_values
from megatrain.extras.translate.command_lines import is_world_size_option
from megatrain.extras.translate.draft import OmittedKey, TranslatedValue, Translation, plain_key
from megatrain.extras.translate.read import Source, can_be_path, read_command_line, read_source
from megatrain.extras.translate.tools import DEEPSPEED_VERSION, TOOLS, put_processes

_COMMENT_COLUMN = 42
_LONGEST_VALUE = 60


def translate_file(
    path: Path, tool: Tool | None = None, *, folder: Path | None = None, base: Path | None = None
) -> Translation:
    """Translate a YAML or JSON config, or a shell script that starts a training run, without writing a file.

    Args:
        tool: Tool of the file; detected by default.
        folder: Folder of the new config, to which its paths are relative. Default: ``base``.
        base: Working directory of the tool, to which paths in the file are relative. Default: the current folder.

    Raises:
        TranslationError: The file cannot be read or parsed, or describes an unsupported kind of training.
    """
    return _translate(read_source(path, tool), folder, base)


def translate_command_line(
    words: Sequence[str], tool: Tool | None = None, *, folder: Path | None = None, base: Path | None = None
) -> Translation:
    """Translate a command line that starts a training run, like :func:`translate_file` for a file.

    Args:
        words: Command and arguments, as a shell passes them.
        tool: As in :func:`translate_file`.
        folder: As in :func:`translate_file`.
        base: As in :func:`translate_file`.

    Raises:
        TranslationError: The command does not start a training run, or starts a run of an unsupported kind.
    """
    return _translate(read_command_line(words, tool), folder, base)


def _translate(source: Source, folder: Path | None, base: Path | None) -> Translation:
    draft = Translation(source, (base or Path.cwd()).resolve())
    TOOLS[source.tool](draft)
    draft.omit_unanswered()
    _drop_evaluation_without_rows(draft)
    _gather_processes(draft)
    if "output_dir" not in draft.entries:
        draft.fill_in("output_dir", "outputs/first", "folder of the run")
    _refuse_impossible_paths(draft)
    _remove_unusable_entries(draft)
    target = (folder or draft.base).resolve()
    draft.entries = {
        key: replace(entry, value=_relative_value(entry, draft.base, target)) for key, entry in draft.entries.items()
    }
    draft.toml = _to_toml(draft)
    return draft


def _drop_evaluation_without_rows(draft: Translation) -> None:
    """Remove the evaluation schedule if the config has no evaluation rows."""
    if any(key.startswith("data.eval.") or key == "data.val_size" for key in draft.entries):
        return
    for key in [key for key in draft.entries if key.startswith("evaluation.")]:
        entry = draft.entries.pop(key)
        if entry.tool_key and entry.value not in ("no", False):
            draft.omit(entry.tool_key, "there are no rows to evaluate on; set them in [[data.eval]]", entry.value)


def _refuse_impossible_paths(draft: Translation) -> None:
    """Raise an error for a path that is impossible on this machine; see `can_be_path`."""
    for key, entry in draft.entries.items():
        is_path = entry.is_path or key == "output_dir" or key.endswith("path")
        if is_path and isinstance(entry.value, str) and not can_be_path(draft.base, entry.value):
            short_path = entry.value[:_LONGEST_VALUE]
            raise draft.refuse(f"{entry.tool_key or key}: {json.dumps(short_path)} cannot be a path on this machine")


def _gather_processes(draft: Translation) -> None:
    """Translate the number of processes of a launcher, and list the launcher's other options as not needed.

    Other tools count the rows of a step per process. Here a step counts the rows of all processes, so the accumulation
    steps are multiplied by the number of processes.
    """
    line, key = draft.source.line, "training.gradient_accumulation_steps"
    for name in line.unknown:
        draft.omit(f"${{...}} in --{name}", "only a shell can compute its value")
    for command in draft.source.other_commands:
        draft.omit(command, "another training in the same script; import it separately")
    for name, value in line.launch_options.items():
        if not is_world_size_option(line, name):
            draft.drop(f"{line.launcher or 'trl'} --{name}", RANKS, value)
    if line.num_processes is None:
        reason = f"the number of processes is unknown; for the same rows per step, multiply {key} by this number"
        draft.omit("launcher", reason)
    elif line.num_processes > 1:
        previous = draft.entries.get(key)
        steps = previous.value if previous is not None and isinstance(previous.value, int) else 1
        note = f"{steps} x {line.num_processes} processes, because a step counts the rows of all processes"
        draft.put(key, steps * line.num_processes, previous.tool_key if previous is not None else "", note)
        put_processes(draft, line.num_processes, line.num_hosts)


def _remove_unusable_entries(draft: Translation) -> None:
    """Remove entries that this release cannot use, until the remaining entries are a valid config.

    Raises:
        TranslationError: A required key has no usable value.
    """
    for key in [key for key in draft.entries if schema_key(key) not in KEYS]:
        _omit_entry(draft, key, f"this release has no {plain_key(key)}")
    model = draft.entries.get("model.model_name_or_path")
    if "model.revision" in draft.entries and (model is None or model.is_path or str(model.value).count("/") != 1):
        _omit_entry(draft, "model.revision", "it requires a model on the hub, OWNER/NAME")
    while True:
        problems = _problems(draft)
        if not problems:
            return
        is_changed = False
        for key, reason in problems:
            for entry in _entries_behind(draft, key):
                is_changed = True
                _omit_entry(draft, entry, reason)
        if not is_changed:
            raise draft.refuse("the result is not a valid config: " + "; ".join(reason for _, reason in problems))


def _problems(draft: Translation) -> list[tuple[str, str]]:
    """Return (config key, reason) for each problem that makes the draft invalid."""
    values = _nested({key: entry.value for key, entry in draft.entries.items()})
    config, problems = validate_values(values)
    if config is None:
        return [(problem.key, str(problem)) for problem in problems]
    combinations = [problem for problem in find_bad_combinations(config) if problem.key != "output_dir"]
    return [(problem.key, f"{problem.message}. {problem.remedy}".rstrip(". ")) for problem in combinations]


def _entries_behind(draft: Translation, key: str) -> list[str]:
    """Return the entries that cause a problem with a key: at the key, inside it, or in the nearest outer table."""
    if key == "optimizer.lr_scheduler_kwargs" and key not in draft.entries:
        key = "optimizer.lr_scheduler_type"
    while key:
        names = [name for name in draft.entries if name == key or name.startswith(f"{key}.")]
        removable = [name for name in names if not draft.entries[name].is_placeholder]
        if removable:
            return removable if len(removable) == 1 or names == [key] else []
        key = key.rpartition(".")[0]
    return []


def _omit_entry(draft: Translation, key: str, reason: str) -> None:
    entry = draft.entries.pop(key)
    if entry.tool_key:
        draft.omit(entry.tool_key, reason, entry.value)


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert dotted keys to nested tables and lists. The entries of a list must be in order."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        node: Any = tree
        parts = key.split(".")
        for index, part in enumerate(parts[:-1]):
            if part.isdecimal():
                while len(node) <= int(part):
                    node.append({})
                node = node[int(part)]
            else:
                node = node.setdefault(part, [] if ".".join(parts[: index + 1]) in ARRAY_TABLES else {})
        node[parts[-1]] = value
    return tree


def _relative_value(entry: TranslatedValue, base: Path, folder: Path) -> Any:
    """Return an entry's value, with a relative path converted from ``base`` to ``folder``."""
    if not entry.is_path or Path(entry.value).expanduser().is_absolute():
        return entry.value
    return os.path.relpath(base / entry.value, folder)


def _to_toml(draft: Translation) -> str:
    tool = draft.source.title
    if draft.source.tool == "deepspeed":
        tool += f", with the defaults of version {DEEPSPEED_VERSION}"
    lines = [f"# Translated from {draft.source.path.name} ({tool}) by `megatrain-tier import`."]
    for title, omitted_keys in (("Has no equivalent here", draft.lost_keys), ("Not needed here", draft.unneeded_keys)):
        if omitted_keys:
            lines += ["#", f"# {title}:", *(f"#   {format_omitted_key(omitted)}" for omitted in omitted_keys)]
    lines += ["", "config_version = 1"]
    table = ""
    entries = _merge_free_tables(draft.entries)
    for key in _sort_keys(entries):
        parent, _, leaf = key.rpartition(".")
        if parent != table:
            name = plain_key(parent)
            header = f"[[{name}]]" if name in ARRAY_TABLES else f"[{parent}]"
            lines += ["", header]
            table = parent
        lines.append(_line(leaf, entries[key]))
    return "\n".join(lines) + "\n"


def _merge_free_tables(entries: Mapping[str, TranslatedValue]) -> dict[str, TranslatedValue]:
    """Merge the entries of each free table into a single entry, which is written inline."""
    merged_entries: dict[str, TranslatedValue] = {}
    for key, entry in entries.items():
        parent, _, name = key.rpartition(".")
        if plain_key(parent) not in FREE_TABLES:
            merged_entries[key] = entry
        else:
            old_entry = merged_entries.get(parent, TranslatedValue({}))
            tool_key = "; ".join(dict.fromkeys(part for part in (old_entry.tool_key, entry.tool_key) if part))
            value, note = {**old_entry.value, name: entry.value}, entry.note or old_entry.note
            merged_entries[parent] = TranslatedValue(value, tool_key, note)
    return merged_entries


def _line(leaf: str, entry: TranslatedValue) -> str:
    text = f"{leaf} = {format_value(entry.value)}"
    tool_key = entry.tool_key if entry.tool_key.rpartition(".")[2] != leaf else ""
    comment = ("FILL IN: " if entry.is_placeholder else "") + "; ".join(part for part in (tool_key, entry.note) if part)
    return f"{text:<{_COMMENT_COLUMN}}  # {_ascii(comment)}" if comment else text


def _sort_keys(entries: Mapping[str, TranslatedValue]) -> list[str]:
    """Return keys in the order of the schema, with the values of a table before its nested tables."""
    order = {name: index for index, name in enumerate(NAMES)}

    def sort_key(key: str) -> tuple[int, list[int], int]:
        indices = [int(part) for part in key.split(".") if part.isdecimal()]
        return order.get(plain_key(key.rpartition(".")[0]), -1), indices, order[plain_key(key)]

    return sorted(entries, key=sort_key)


def format_omitted_key(omitted: OmittedKey) -> str:
    """Return a line of text for an omitted key, with its value if the value is short."""
    value = omitted.value
    value_text = "" if value is None else json.dumps(value, default=str, ensure_ascii=True)
    if len(value_text) > _LONGEST_VALUE:
        value_text = "..."
    return _ascii(f"{omitted.tool_key}{f' = {value_text}' if value_text else ''}: {omitted.reason}")


def _ascii(text: str) -> str:
    """Convert a text to one line of printable ASCII."""
    words = " ".join(text.encode("ascii", "replace").decode().split())
    return "".join(char if char.isprintable() else "?" for char in words)
