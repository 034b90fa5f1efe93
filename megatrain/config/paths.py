"""Makes paths in config values absolute, expands their variables, and masks their secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatrain.base.errors import Problem
from megatrain.base.table import mask_secrets
from megatrain.config.keys import KEYS
from megatrain.config.keys import Path as KeyPath

_URL = re.compile(r"[a-z][a-z0-9+.-]*://")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*))")


def make_paths_absolute(values: dict[str, Any], folder: Path) -> None:
    """Resolve every path in a tree of config values against ``folder``, in place.

    ``~`` and environment variables are expanded. A path with an unset variable stays unchanged. In
    URLs, passwords and signatures are masked, because configs are stored and shown.
    """
    for table, leaf, _, schema in _paths_in(values):
        table[leaf] = mask_secrets(table[leaf])
        if not _first_unset_variable(table[leaf]):
            table[leaf] = _absolute(table[leaf], folder, schema["x-path"]["name"])


def absolute_value(path: KeyPath, value: Any, folder: Path) -> Any:
    """Return a key's value with all its paths resolved against ``folder``. The value may be a table or a list."""
    tree = value
    for part in reversed(path):
        tree = [tree] if isinstance(part, int) else {part: tree}
    if isinstance(tree, dict):
        make_paths_absolute(tree, folder)
    for part in path:
        tree = tree[0] if isinstance(part, int) else tree[part]
    return tree


def unset_variables(values: dict[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each path with an environment variable that is not set."""
    for table, leaf, key, _ in _paths_in(values):
        if name := _first_unset_variable(table[leaf]):
            message = f'{key} = "{table[leaf]}" uses the variable ${name}, which is not set'
            yield Problem(key, message, f"Set it (export {name}=...), or write the path without it")


def _paths_in(values: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, str, Mapping[str, Any]]]:
    """Yield (table that contains the path, last part of its key, dotted key, schema) for each path in config values."""
    for key, schema in KEYS.items():
        if "x-path" in schema:
            *tables, leaf = key.split(".")
            for prefix, table in _tables_at(values, tables):
                if isinstance(table.get(leaf), str) and table[leaf] not in ("", *schema["x-path"]["words"]):
                    yield table, leaf, f"{prefix}{leaf}", schema


def _tables_at(values: Any, names: Sequence[str], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (dotted key with a trailing dot, table) for a table, or for each item of an array table."""
    if isinstance(values, list):
        for index, item in enumerate(values):
            yield from _tables_at(item, names, f"{prefix}{index}.")
    elif isinstance(values, dict):
        if names:
            yield from _tables_at(values.get(names[0]), names[1:], f"{prefix}{names[0]}.")
        else:
            yield prefix, values


def _first_unset_variable(text: str) -> str:
    """Return the first unset variable in a path, or "" if all are set or the path exists as written."""
    names = [match[1] or match[2] for match in _VARIABLE.finditer(text)]
    return next((name for name in names if name not in os.environ and not os.path.exists(text)), "")


def _absolute(text: str, folder: Path, name: str | None) -> str:
    if not (folder / text).exists():  # the name of an existing folder may contain "$"
        text = _VARIABLE.sub(lambda match: os.environ.get(match[1] or match[2], match[0]), text)
    if _URL.match(text):
        return mask_secrets(text)
    path = Path(text).expanduser()
    candidate = path if path.is_absolute() else folder / path
    if name is not None and not path.is_absolute() and not candidate.exists() and re.fullmatch(name, text):
        return text  # the name of a hub repository, not a local folder
    return _normalize(candidate)


def _normalize(path: Path) -> str:
    """Remove ``.`` and ``..`` without following links, so that globs stay unchanged."""
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and len(parts) > 1:
            parts.pop()
        elif part != ".":
            parts.append(part)
    return str(Path(*parts))
