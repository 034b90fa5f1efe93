"""Config files as trees of values, with the line each key stands on. Paths become absolute here."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatrain.config.problems import ConfigError, Problem
from megatrain.config.syntax import encoding_problem, syntax_problem

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\]]+?)\s*\]\]?\s*(?:#.*)?")
_KEY = re.compile(r"""\s*((?:"[^"]*"|'[^']*'|[A-Za-z0-9_-]+)(?:\s*\.\s*(?:"[^"]*"|'[^']*'|[A-Za-z0-9_-]+))*)\s*=""")
_KEY_PART = re.compile(r""""([^"]*)"|'([^']*)'|([A-Za-z0-9_-]+)""")
_STRING_OR_COMMENT = re.compile(r""""(?:\\.|[^"\\])*"|'[^']*'|#.*""")
_MODEL_NAME = re.compile(r"[\w.-]+/[\w.-]+|[\w-]+")
_DATASET_NAME = re.compile(r"\w[\w.-]*/(?!.*\.[A-Za-z]\w+$)[\w.-]+")  # owner/name; what ends as files do is a file


@dataclass
class Tree:
    """The values of one file (or of several, merged).

    Attributes:
        values: nested tables.
        origins: dotted key -> (file or "--set", line or None).
    """

    values: dict[str, Any]
    origins: dict[str, tuple[str, int | None]] = field(default_factory=dict)

    def origin(self, key: str) -> tuple[str, int | None]:
        """Return where ``key`` was written, or the nearest table around it; ("", None) for a default."""
        while key:
            if key in self.origins:
                return self.origins[key]
            key = key.rpartition(".")[0]
        return "", None


def read_toml(path: Path) -> Tree:
    """Read one config file.

    Raises:
        ConfigError: no such file, not readable, or not TOML.
    """
    source = str(path)
    raw = b""
    try:
        raw = path.read_bytes()
        text = raw.decode("utf-8-sig").replace("\r\n", "\n")
    except FileNotFoundError:
        near = sorted(p.name for p in path.parent.glob("*.toml") if p.is_file()) if path.parent.is_dir() else []
        remedy = f"In that folder: {', '.join(near[:5])}" if near else "Check the path"
        raise ConfigError(source, [Problem("", "there is no such file", remedy, source)]) from None
    except IsADirectoryError:
        problem = Problem("", "this is a folder", "Give the config file itself, such as run.toml", source)
        raise ConfigError(source, [problem]) from None
    except OSError as error:
        problem = Problem("", f"the file cannot be read: {error.strerror}", "Check its permissions", source)
        raise ConfigError(source, [problem]) from None
    except UnicodeDecodeError as error:
        raise ConfigError(source, [encoding_problem(source, raw, error)]) from None
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(source, [syntax_problem(source, text, error)]) from None
    lines = find_lines(text)
    make_paths_absolute(values, path.resolve().parent)
    return Tree(values, {key: (source, line) for key, line in lines.items()})


def find_lines(text: str) -> dict[str, int]:
    """Return the line (from 1) of every key and table header of a TOML text; dotted, array tables numbered."""
    lines: dict[str, int] = {}
    counts: dict[str, int] = {}
    table = ""
    depth, quote = 0, ""  # inside an open array, or inside a multi-line string that ends with `quote`
    for number, line in enumerate(text.splitlines(), start=1):
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
                lines.setdefault(name, number)
                continue
            key = _KEY.match(line)
            if key is not None:
                lines.setdefault(table + ".".join(_parts(key[1])), number)
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
    """Insert the current number after every array table that ``name`` goes through, its own last part excepted."""
    parts = name.split(".")
    path = parts[0]
    for part in parts[1:]:
        path = f"{path}.{counts[path]}.{part}" if path in counts else f"{path}.{part}"
    return path


def make_paths_absolute(values: dict[str, Any], folder: Path) -> None:
    """Make every path in a tree of config values absolute, in place, as seen from ``folder``."""

    def change(table: Any, key: str, *, names: re.Pattern[str] | None = None, keep: tuple[str, ...] = ()) -> None:
        if isinstance(table, dict) and isinstance(table.get(key), str) and table[key] not in ("", *keep):
            table[key] = _absolute(table[key], folder, names)

    change(values, "output_dir")
    model = values.get("model")
    change(model, "model_name_or_path", names=_MODEL_NAME)
    change(model, "tokenizer_name_or_path", names=_MODEL_NAME)
    change(model, "chat_template", keep=("auto",))
    change(values.get("checkpoint"), "resume_from_checkpoint", keep=("auto", "no"))
    data = values.get("data")
    change(data, "cache_dir", keep=("auto", "none"))
    for table in [*_listed(data.get("train")), *_listed(data.get("eval"))] if isinstance(data, dict) else ():
        change(table, "path", names=_DATASET_NAME)
    tiers = values.get("tiers")
    for table in _listed(tiers.get("nvme")) if isinstance(tiers, dict) else ():
        change(table, "path")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _absolute(text: str, folder: Path, names: re.Pattern[str] | None) -> str:
    path = Path(text).expanduser()
    candidate = path if path.is_absolute() else folder / path
    if names is not None and not path.is_absolute() and not candidate.exists() and names.fullmatch(text):
        return text  # a name on the hub, not a folder here
    return str(Path(_normalised(candidate)))


def _normalised(path: Path) -> str:
    """Remove ``.`` and ``..`` without following links, so that globs survive."""
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and len(parts) > 1:
            parts.pop()
        elif part != ".":
            parts.append(part)
    return str(Path(*parts))
