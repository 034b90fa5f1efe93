"""Config values with the file and line of each key, before the schema checks them."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from megatrain.base.errors import ConfigError, Problem
from megatrain.config.keys import Path as KeyPath
from megatrain.config.keys import dotted
from megatrain.config.paths import make_paths_absolute
from megatrain.config.syntax import encoding_problem, syntax_problem, toml_lines

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\]]+?)\s*\]\]?\s*(?:#.*)?")
_KEY = re.compile(r"""\s*((?:"[^"]*"|'[^']*'|[A-Za-z0-9_-]+)(?:\s*\.\s*(?:"[^"]*"|'[^']*'|[A-Za-z0-9_-]+))*)\s*=""")
_KEY_PART = re.compile(r""""([^"]*)"|'([^']*)'|([A-Za-z0-9_-]+)""")
_STRING_OR_COMMENT = re.compile(r""""(?:\\.|[^"\\])*"|'[^']*'|#.*""")


class KeyOrigin(NamedTuple):
    """Origin of a key's value.

    Attributes:
        where: File that sets the key, or ``--set``, or "" for a default.
        line: Line in the file, from 1, or None if unknown.
    """

    where: str = ""
    line: int | None = None

    def __str__(self) -> str:
        return self.where if self.line is None else f"{self.where}:{self.line}"


@dataclass
class Tree:
    """Tree of config values from one file, or from several merged files.

    Attributes:
        origins: Origins of keys and table headers, by dotted key.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, KeyOrigin] = field(default_factory=dict)

    def origin(self, key: str) -> KeyOrigin:
        """Return the origin of a key, else of the nearest table that contains it, else of a key inside it."""
        parent = key
        while parent:
            if parent in self.origins:
                return self.origins[parent]
            parent = parent.rpartition(".")[0]
        origins = (origin for name, origin in self.origins.items() if name.startswith(f"{key}."))
        return next(origins, KeyOrigin())

    def locate(self, problems: Iterable[Problem]) -> list[Problem]:
        """Return copies of these problems that also state the file and line of their keys."""
        return [replace(problem, **self.origin(problem.key)._asdict()) for problem in problems]

    def merge(self, other: Tree) -> None:
        """Add the values of ``other``. Tables are merged. Any other value replaces the existing value."""
        self._merge(self.values, other.values, "")
        self.origins.update(other.origins)

    def _merge(self, target: dict[str, Any], source: dict[str, Any], prefix: str) -> None:
        for key, value in source.items():
            name = prefix + key
            if isinstance(value, dict) and isinstance(target.get(key), dict):
                self._merge(target[key], value, f"{name}.")
                continue
            for old in [old for old in self.origins if old == name or old.startswith(f"{name}.")]:
                del self.origins[old]
            target[key] = copy.deepcopy(value)

    def put(self, path: KeyPath, value: Any, origin: KeyOrigin) -> list[Problem]:
        """Set a value at a path, and return the problems. Missing tables, and the next item of a list, are created."""
        node: Any = self.values
        for index, part in enumerate(path):
            if (obstacle := _obstacle(node, part, dotted(path[:index]))) is not None:
                return [Problem(dotted(path), *obstacle, *origin)]
            is_last = index == len(path) - 1
            new_node = value if is_last else [] if isinstance(path[index + 1], int) else {}
            if isinstance(part, int) and part == len(node):
                node.append(new_node)
            elif is_last:
                node[part] = value
            elif isinstance(part, str):
                node.setdefault(part, new_node)
            node = node[part]
        self.origins[dotted(path)] = origin
        return []

    def has(self, key: str) -> bool:
        """Return whether a dotted key is set."""
        values: Any = self.values
        for part in key.split("."):
            values = _get_item(values, part)
        return values is not None

    def remove(self, key: str) -> bool:
        """Remove a dotted key, or a value that replaces one of its tables. Return whether anything was removed."""
        *tables, leaf = key.split(".")
        values: Any = self.values
        for part in tables:
            inner = _get_item(values, part)
            if not isinstance(inner, dict | list):
                leaf = part
                break
            values = inner
        if not isinstance(values, dict) or values.get(leaf) is None:
            return False
        del values[leaf]
        return True


def _obstacle(node: Any, part: int | str, outer: str) -> tuple[str, str] | None:
    """Return why a value cannot contain a key or item, and the remedy. Return None if it can."""
    if isinstance(part, str):
        is_table = isinstance(node, dict)
        return None if is_table else (f"{outer} is a value, not a table", f"Write --set {outer}=VALUE")
    length = len(node) if isinstance(node, list) else 0
    if isinstance(node, list) and part <= length:
        return None
    remedy = f"Write a number from 0 to {length}; {length} adds one"
    return f"{outer} has {length} items; item {part} does not exist", remedy


def _get_item(values: Any, part: str) -> Any:
    """Return a key of a table or an item of a list, or None if it does not exist."""
    if isinstance(values, dict):
        return values.get(part)
    if isinstance(values, list) and part.isdecimal() and int(part) < len(values):
        return values[int(part)]
    return None


# Files


def read_toml(path: Path) -> Tree:
    """Read one config file. Paths in it become absolute.

    Raises:
        ConfigError: The file is missing, unreadable, or not TOML.
    """
    source, raw = str(path), b""
    try:
        raw = path.read_bytes()
        text = raw.decode("utf-8-sig").replace("\r\n", "\n")
        values = tomllib.loads(text)
    except UnicodeDecodeError as error:
        problem = encoding_problem(source, raw, error)
    except tomllib.TOMLDecodeError as error:
        problem = syntax_problem(source, text, error)
    except OSError as error:
        problem = Problem("", *_explain_os_error(path, error), source)
    else:
        make_paths_absolute(values, path.resolve().parent)
        return Tree(values, {key: KeyOrigin(source, line) for key, line in find_lines(text).items()})
    raise ConfigError(source, [problem]) from None


def _explain_os_error(path: Path, error: OSError) -> tuple[str, str]:
    """Return why a file cannot be read, and the remedy."""
    if isinstance(error, FileNotFoundError):
        names = sorted(p.name for p in path.parent.glob("*.toml") if p.is_file()) if path.parent.is_dir() else []
        return "there is no such file", f"In that folder: {', '.join(names[:5])}" if names else "Check the path"
    if isinstance(error, IsADirectoryError):
        return "this is a folder", "Give the config file, such as run.toml"
    return f"the file cannot be read: {error.strerror}", "Check its permissions"


def find_lines(text: str) -> dict[str, int]:
    """Return the line number, from 1, of each key and table header in a TOML text, by dotted name with indexes."""
    lines: dict[str, int] = {}
    counts: dict[str, int] = {}
    table = ""
    depth, quote = 0, ""  # number of open brackets and braces, and the quote that ends an open multi-line string
    for lineno, line in enumerate(toml_lines(text), start=1):
        if quote:
            if quote in line:
                quote = ""
            continue
        if depth == 0:
            header = _HEADER.fullmatch(line)
            if header is not None:
                name = ".".join(_parts(header[2]))
                name = _with_numbers(name, counts)
                if header[1] == "[[":
                    counts[name] = counts.get(name, -1) + 1
                    name = f"{name}.{counts[name]}"
                table = f"{name}."
                lines.setdefault(name, lineno)
                continue
            key = _KEY.match(line)
            if key is not None:
                lines.setdefault(table + ".".join(_parts(key[1])), lineno)
        for mark in ('"""', "'''"):
            if line.count(mark) % 2:
                quote = mark
        code = _STRING_OR_COMMENT.sub("", line)
        if not _HEADER.fullmatch(line) or depth:
            depth = max(0, depth + code.count("[") + code.count("{") - code.count("]") - code.count("}"))
    return lines


def _parts(text: str) -> list[str]:
    return [match[1] or match[2] or match[3] or "" for match in _KEY_PART.finditer(text)]


def _with_numbers(name: str, counts: dict[str, int]) -> str:
    """Return ``name`` with the current index inserted after each array table, except after the last part."""
    parts = name.split(".")
    path = parts[0]
    for part in parts[1:]:
        path = f"{path}.{counts[path]}.{part}" if path in counts else f"{path}.{part}"
    return path
