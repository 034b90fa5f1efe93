"""Loads TOML files and ``--set`` into one checked config, and reports all problems together.

Files are read as trees of values with the line of each key. The trees are merged, unknown names are removed, and
the schema checks the rest. :func:`salvage` returns the usable part of a config with problems.
"""

from __future__ import annotations

import copy
import os
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatrain.base.errors import ConfigError, Problem
from megatrain.base.other_tools import ACCEPTED, ALWAYS_ON
from megatrain.base.table import without_secrets
from megatrain.config.combinations import find_bad_combinations, find_warnings
from megatrain.config.keys import (
    ARRAY_TABLES,
    KEYS,
    TABLES,
    advice_for_unknown,
    advice_without_match,
    dotted,
    full_keys_of_leaf,
    has_advice,
    looks_like_table,
    nearest_table,
    parse_path,
    plain,
)
from megatrain.config.keys import Path as KeyPath
from megatrain.config.schema import RunConfig
from megatrain.config.syntax import encoding_problem, syntax_problem, toml_lines
from megatrain.config.values import explain_error

OVERRIDE = "--set"
_MOST_ROUNDS = 20
_MEANT = re.compile(r"Did you mean ([\w.]+)")
_HEADER = re.compile(r"\s*(\[\[?)\s*([^\]]+?)\s*\]\]?\s*(?:#.*)?")
_KEY = re.compile(r"""\s*((?:"[^"]*"|'[^']*'|[A-Za-z0-9_-]+)(?:\s*\.\s*(?:"[^"]*"|'[^']*'|[A-Za-z0-9_-]+))*)\s*=""")
_KEY_PART = re.compile(r""""([^"]*)"|'([^']*)'|([A-Za-z0-9_-]+)""")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*))")
_STRING_OR_COMMENT = re.compile(r""""(?:\\.|[^"\\])*"|'[^']*'|#.*""")


@dataclass(frozen=True)
class LoadedConfig:
    """A config and the origin of its values.

    Attributes:
        origins: dotted key -> ``"file:line"`` or ``"--set"``; keys that are not set are left out.
        source: the main config file.
        warnings: sentences for the user, about values that do not prevent a run.
    """

    config: RunConfig
    origins: Mapping[str, str]
    source: Path
    warnings: tuple[str, ...] = ()


def load_config(
    path: str | Path, extra_files: Sequence[str | Path] = (), overrides: Sequence[str] = ()
) -> LoadedConfig:
    """Read a config: defaults < ``path`` < ``extra_files`` in order < ``overrides``.

    Tables merge, arrays are replaced. Paths in a file are relative to that file, paths in ``overrides`` to the
    current directory. Nothing is written, and model and data files are not opened.

    Args:
        path: the main file.
        overrides: ``"key=value"`` texts; the key is dotted (``data.train.0.path``) or a unique last part; the
            value is TOML or plain text.

    Raises:
        ConfigError: with every problem found.
    """
    source = Path(path)
    problems: list[Problem] = []
    tree = Tree({})
    for file in (source, *map(Path, extra_files)):
        try:
            _merge(tree, read_toml(file))
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:  # the contents of an unreadable file cannot be checked
        raise ConfigError(str(source), problems)
    for text in overrides:
        problems.extend(_apply_override(tree, text))
    warnings: list[str] = []
    problems.extend(_clean(tree, warnings))
    problems.extend(_located(tree, _unset_variables(tree.values)))
    config, errors = _validate(tree)
    problems.extend(errors)
    if config is not None:
        meant = [key for each in problems for key in _MEANT.findall(each.remedy)]
        found = _located(tree, find_bad_combinations(config))
        # A problem that mentions the correct name of a misspelled key may follow from the misspelling.
        problems.extend(each for each in found if not any(_follows_from(each, key) for key in meant))
        warnings.extend(find_warnings(config))
    is_overlay = not tree.values.keys() & {"task", "output_dir", "data", "model"}
    if config is None and tree.values and is_overlay and not extra_files:
        text = "the file has no task, output_dir, model or data, so it only changes another config"
        problems.insert(0, Problem("", text, f"Apply it: megatrain-tier run CONFIG -c {source}", str(source)))
    if problems or config is None:
        raise ConfigError(str(source), problems)
    origins = {key: where if line is None else f"{where}:{line}" for key, (where, line) in tree.origins.items()}
    return LoadedConfig(config, origins, source, tuple(warnings))


# Files


@dataclass
class Tree:
    """The values of one file, or of several merged files.

    Attributes:
        origins: dotted key -> (file or "--set", line or None).
    """

    values: dict[str, Any]
    origins: dict[str, tuple[str, int | None]] = field(default_factory=dict)

    def origin(self, key: str) -> tuple[str, int | None]:
        """Return the origin of a key, the nearest table around it, or a key inside it; ("", None) for a default."""
        around = key
        while around:
            if around in self.origins:
                return self.origins[around]
            around = around.rpartition(".")[0]
        inside = (origin for name, origin in self.origins.items() if name.startswith(f"{key}."))
        return next(inside, ("", None))


def read_toml(path: Path) -> Tree:
    """Read one config file.

    Raises:
        ConfigError: the file is missing, unreadable, or not TOML.
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
        problem = Problem("", "this is a folder", "Give the config file, such as run.toml", source)
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
    """Return dotted name -> line (from 1) for every key and table header in a TOML text; array tables have numbers."""
    lines: dict[str, int] = {}
    counts: dict[str, int] = {}
    table = ""
    depth, quote = 0, ""  # inside an open array, or inside a multi-line string that ends with `quote`
    for number, line in enumerate(toml_lines(text), start=1):
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
    """Return ``name`` with the current number after each array table, except after the last part."""
    parts = name.split(".")
    path = parts[0]
    for part in parts[1:]:
        path = f"{path}.{counts[path]}.{part}" if path in counts else f"{path}.{part}"
    return path


# Paths


def make_paths_absolute(values: dict[str, Any], folder: Path) -> None:
    """Make every path in a tree of config values absolute, in place, relative to ``folder``.

    ``~`` and environment variables are expanded. A path with an unset variable stays unchanged. A URL stays
    unchanged except for its password, because configs are stored and shown.
    """
    for table, leaf, _, schema in _paths_in(values):
        table[leaf] = without_secrets(table[leaf])
        if not _names_unset_variable(table[leaf]):
            table[leaf] = _absolute(table[leaf], folder, schema["x-path"]["name"])


def _paths_in(values: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, str, Mapping[str, Any]]]:
    """Yield (table, last part of the key, dotted key, schema) for each path in a tree of config values."""
    for key, schema in KEYS.items():
        if "x-path" in schema:
            *tables, leaf = key.split(".")
            for above, table in _tables_at(values, tables):
                if isinstance(table.get(leaf), str) and table[leaf] not in ("", *schema["x-path"]["words"]):
                    yield table, leaf, f"{above}{leaf}", schema


def _tables_at(values: Any, names: Sequence[str], above: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (dotted key with a trailing dot, table) for each table of a name; an array table has several."""
    if isinstance(values, list):
        for number, item in enumerate(values):
            yield from _tables_at(item, names, f"{above}{number}.")
    elif isinstance(values, dict):
        if names:
            yield from _tables_at(values.get(names[0]), names[1:], f"{above}{names[0]}.")
        else:
            yield above, values


def _unset_variables(values: dict[str, Any]) -> Iterator[Problem]:
    for table, leaf, key, _ in _paths_in(values):
        if name := _names_unset_variable(table[leaf]):
            message = f'{key} = "{table[leaf]}" uses the variable ${name}, which is not set'
            yield Problem(key, message, f"Set it (export {name}=...), or write the path without it")


def _names_unset_variable(text: str) -> str:
    """Return the first variable in a path that is not set; "" without one."""
    names = [match[1] or match[2] for match in _VARIABLE.finditer(text)]
    return next((name for name in names if name not in os.environ and not os.path.exists(text)), "")


def _absolute(text: str, folder: Path, name: str | None) -> str:
    if not (folder / text).exists():  # the name of a folder may contain "$"
        text = _VARIABLE.sub(lambda match: os.environ.get(match[1] or match[2], match[0]), text)
    if _URL.match(text):
        return without_secrets(text)
    path = Path(text).expanduser()
    candidate = path if path.is_absolute() else folder / path
    if name is not None and not path.is_absolute() and not candidate.exists() and re.fullmatch(name, text):
        return text  # a name on the hub, not a local folder
    return _normalised(candidate)


def _normalised(path: Path) -> str:
    """Remove ``.`` and ``..`` without following links, so that globs stay unchanged."""
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and len(parts) > 1:
            parts.pop()
        elif part != ".":
            parts.append(part)
    return str(Path(*parts))


# Layers


def _merge(tree: Tree, other: Tree) -> None:
    """Merge ``other`` into ``tree``: tables are merged, other values replace those in ``tree`` with their origins."""

    def merge(target: dict[str, Any], source: dict[str, Any], prefix: str) -> None:
        for key, value in source.items():
            name = prefix + key
            if isinstance(value, dict) and isinstance(target.get(key), dict):
                merge(target[key], value, f"{name}.")
                continue
            for old in [old for old in tree.origins if old == name or old.startswith(f"{name}.")]:
                del tree.origins[old]
            target[key] = copy.deepcopy(value)

    merge(tree.values, other.values, "")
    tree.origins.update(other.origins)


def _apply_override(tree: Tree, text: str) -> list[Problem]:
    """Write one ``key=value`` into the tree, and return its problems."""
    name, separator, value_text = text.partition("=")
    name = name.strip()
    if not separator or not all(part.strip() for part in name.split(".")):
        return [Problem(name, f"`{text}` is not KEY=VALUE", "Write for example --set learning_rate=2e-5", OVERRIDE)]
    first, _, rest = name.partition(".")
    if first not in KEYS and first not in TABLES:
        homes = full_keys_of_leaf(first)
        if len(homes) > 1:
            return [Problem(name, f"`{first}` is in several tables", f"Write one of {', '.join(homes)}", OVERRIDE)]
        if homes:
            name = f"{homes[0]}.{rest}" if rest else homes[0]
    path = parse_path(name)
    array = next((array for array in ARRAY_TABLES if name.startswith(f"{array}.")), "")
    if array and not isinstance(path[array.count(".") + 1], int):
        return [Problem(name, f"{array} is a list", f"Write {array}.0.{name[len(array) + 1 :]}", OVERRIDE)]
    value = _parse_value(value_text.strip())
    small = _nested(path, value)
    if isinstance(small, dict):
        make_paths_absolute(small, Path.cwd())
        value = _leaf_of(small, path)
    return _put(tree, path, value, name)


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _nested(path: KeyPath, value: Any) -> Any:
    """Return ``value`` nested in tables and lists with one item each, along ``path``."""
    for part in reversed(path):
        value = [value] if isinstance(part, int) else {part: value}
    return value


def _leaf_of(tree: Any, path: KeyPath) -> Any:
    for part in path:
        tree = tree[0] if isinstance(part, int) else tree[part]
    return tree


def _put(tree: Tree, path: KeyPath, value: Any, name: str) -> list[Problem]:
    """Write ``value`` at ``path``, and return the problems. Missing tables and the next item of a list are created."""
    at: Any = tree.values
    for index, part in enumerate(path):
        last = index == len(path) - 1
        fresh: Any = value if last else ([] if isinstance(path[index + 1], int) else {})
        if isinstance(part, int):
            if not isinstance(at, list) or part > len(at):
                have = len(at) if isinstance(at, list) else 0
                message = f"{dotted(path[:index])} has {have} items; item {part} does not exist"
                return [Problem(name, message, f"Write a number from 0 to {have}; {have} adds one", OVERRIDE)]
            if part == len(at):
                at.append(fresh)
            elif last:
                at[part] = value
        elif not isinstance(at, dict):
            outer = dotted(path[:index])
            return [Problem(name, f"{outer} is a value, not a table", f"Write --set {outer}=VALUE", OVERRIDE)]
        elif last:
            at[part] = value
        else:
            at.setdefault(part, fresh)
        at = at[part]
    tree.origins[name] = (OVERRIDE, None)
    return []


# Unknown names


def _clean(tree: Tree, warnings: list[str]) -> list[Problem]:
    """Remove unknown keys from the tree (each a problem) and rename accepted old names (each a warning)."""
    renamed: list[tuple[KeyPath, str, Any]] = []
    problems = _remove_unknown(tree, tree.values, (), renamed)
    for path, key, value in renamed:
        problems.extend(_rename(tree, path, key, value, warnings))
    return problems


def _remove_unknown(
    tree: Tree, table: dict[str, Any], path: KeyPath, renamed: list[tuple[KeyPath, str, Any]]
) -> list[Problem]:
    """Remove unknown keys from a table and return their problems; move accepted old names to ``renamed``."""
    problems: list[Problem] = []
    for key in list(table):
        here = (*path, key)
        name, value = plain(here), table[key]
        if name in KEYS:
            continue
        if name in ARRAY_TABLES and isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, dict):
                    problems.extend(_remove_unknown(tree, item, (*here, index), renamed))
        elif name in TABLES:
            if isinstance(value, dict) and name not in ARRAY_TABLES:
                problems.extend(_remove_unknown(tree, value, here, renamed))
        elif key in ACCEPTED or (key in ALWAYS_ON and value is True):
            renamed.append((here, key, table.pop(key)))
        else:
            problems.extend(_explain_unknown(tree, here, table.pop(key)))
    return problems


def _explain_unknown(tree: Tree, path: KeyPath, value: Any) -> Iterator[Problem]:
    """Yield the problems of an unknown key or table."""
    # A table whose name looks misspelled is reported as a whole, even if its keys exist elsewhere.
    is_unrelated = isinstance(value, dict) and not looks_like_table(path)
    inner = [(*path, child) for child in value if has_advice((*path, child))] if is_unrelated else []
    for child in () if has_advice(path) else inner:
        yield _unknown(tree, child, "key", child)
    if has_advice(path) or not inner:
        yield _unknown(tree, path, "table" if isinstance(value, dict) else "key", path)
    if isinstance(value, dict) and (meant := nearest_table(path)):
        for key in value:  # unknown keys of a table whose name is misspelled
            if plain((*path[:-1], meant, key)) not in {**KEYS, **TABLES}:
                yield _unknown(tree, (*path, key), "key", (*path[:-1], meant, key))


def _unknown(tree: Tree, path: KeyPath, what: str, meant: KeyPath) -> Problem:
    """Return the problem of an unknown key or table, with advice for the probably intended path."""
    where, line = tree.origin(dotted(path))
    advice = advice_for_unknown(meant) or advice_without_match(meant)
    return Problem(dotted(path), f"unknown {what} `{dotted(path)}`", advice, where, line)


def _rename(tree: Tree, path: KeyPath, key: str, value: Any, warnings: list[str]) -> list[Problem]:
    where, line = tree.origin(dotted(path))
    place = f"{where}:{line}: " if line is not None else f"{where}: " if where else ""
    if key in ALWAYS_ON:
        warnings.append(f"{place}`{key}` is always on here ({ALWAYS_ON[key]}); leave it out")
        return []
    ours = ACCEPTED[key]
    if tree.origin(ours) != ("", None) and ours in tree.origins:
        return [Problem(key, f"`{key}` and `{ours}` are the same key", f"Keep {ours}", where, line)]
    warnings.append(f"{place}`{key}` is the name in transformers 4; here: {ours}")
    problems = _put(tree, tuple(ours.split(".")), value, ours)
    tree.origins[ours] = (where, line)
    return problems


# Checking


def _validate(tree: Tree) -> tuple[RunConfig | None, list[Problem]]:
    """Return the config, and the problems that the schema finds."""
    config, problems = validated(tree.values)
    found: dict[str, Problem] = {}
    for problem in problems:
        found.setdefault(problem.key, problem)
    return config, _located(tree, found.values())


def validated(values: Mapping[str, Any]) -> tuple[RunConfig | None, list[Problem]]:
    """Return the config of nested values, or None and the problems with single values; combinations are not checked."""
    try:
        return RunConfig.model_validate(values), []
    except ValidationError as error:
        found = (explain_error(detail) for detail in error.errors(include_url=False))
        return None, [problem for problem in found if problem is not None]


def _located(tree: Tree, problems: Iterable[Problem]) -> list[Problem]:
    located = []
    for problem in problems:
        where, line = tree.origin(problem.key)
        located.append(Problem(problem.key, problem.message, problem.remedy, where, line))
    return located


# The usable part of a config with problems


def salvage(
    path: Path, extra_files: Sequence[Path], problems: Collection[Problem]
) -> tuple[RunConfig | None, list[Problem]]:
    """Return the config without its wrong keys, and the problems that only appear after their removal.

    The config is None if a required key is wrong or a file is not TOML.
    """
    tree = Tree({})
    try:
        for file in (path, *extra_files):
            _merge(tree, read_toml(file))
    except ConfigError:
        return None, []
    messages = {problem.message for problem in problems}
    wrong = [problem.key for problem in problems]
    further: list[Problem] = []
    taken: list[str] = []
    for _ in range(_MOST_ROUNDS):
        removed = [_remove(tree.values, key) for key in wrong if key]
        taken += [key for key in wrong if key]
        try:
            config = RunConfig.model_validate(tree.values)
        except ValidationError as error:
            wrong = [".".join(map(str, detail["loc"])) for detail in error.errors(include_url=False)]
        else:
            bad = find_bad_combinations(config)
            if not bad:
                return config, further
            further += [
                each
                for each in _located(tree, bad)
                if each.message not in messages and not any(_follows_from(each, key) for key in taken)
            ]
            wrong = [each.key for each in bad]
        if not any(removed) and not any(_is_there(tree.values, key) for key in wrong):
            break
    return None, further


def _follows_from(problem: Problem, taken: str) -> bool:
    """Return whether a problem mentions a removed key, and may therefore follow from the removal."""
    leaf = re.escape(taken.rpartition(".")[2])
    return taken.startswith(f"{problem.key}.") or re.search(rf"\b{leaf}\b", problem.message) is not None


def _is_there(values: Any, key: str) -> bool:
    for part in key.split("."):
        values = _inside(values, part)
    return values is not None


def _inside(values: Any, part: str) -> Any:
    if isinstance(values, dict):
        return values.get(part)
    if isinstance(values, list) and part.isdecimal() and int(part) < len(values):
        return values[int(part)]
    return None


def _remove(values: Any, key: str) -> bool:
    """Remove a key, or a value that stands where the key needs a table; return whether one existed."""
    *tables, leaf = key.split(".")
    for part in tables:
        inner = _inside(values, part)
        if not isinstance(inner, dict | list):
            if isinstance(values, dict) and inner is not None:
                del values[part]
                return True
            return False
        values = inner
    if isinstance(values, dict) and leaf in values:
        del values[leaf]
        return True
    return False
