"""TOML files and ``--set`` to one checked config. Every problem is found before any is reported."""

from __future__ import annotations

import copy
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from megatrain.config.combinations import find_bad_combinations, find_warnings
from megatrain.config.explain import explain_error
from megatrain.config.files import Tree, make_paths_absolute, read_toml
from megatrain.config.keys import (
    ARRAY_TABLES,
    FREE_TABLES,
    advice_for_unknown,
    advice_without_match,
    dotted,
    full_keys_of_leaf,
    has_advice,
    known_keys,
    known_tables,
    plain,
)
from megatrain.config.keys import Path as KeyPath
from megatrain.config.problems import ConfigError, Problem
from megatrain.config.schema import RunConfig
from megatrain.translate.names import ACCEPTED, ALWAYS_ON

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

OVERRIDE = "--set"


@dataclass(frozen=True)
class LoadedConfig:
    """A config and where it came from.

    Attributes:
        config: the checked values.
        origins: dotted key -> ``"file:line"`` or ``"--set"``; keys left out have their default.
        source: the main config file.
        warnings: sentences for the user; nothing is wrong.
    """

    config: RunConfig
    origins: Mapping[str, str]
    source: Path
    warnings: tuple[str, ...] = ()


def load_config(
    path: str | Path, extra_files: Sequence[str | Path] = (), overrides: Sequence[str] = ()
) -> LoadedConfig:
    """Read a config: defaults < ``path`` < ``extra_files`` in order < ``overrides``.

    Tables merge, arrays are replaced. Paths in a file are relative to that file, those in ``overrides`` to the
    current directory. Nothing is written and no model or data file is opened.

    Args:
        path: the main file.
        extra_files: more TOML files.
        overrides: ``"key=value"`` texts; the key dotted (``data.train.0.path``) or a leaf name that is unique; the
            value as TOML, or plain text.

    Raises:
        ConfigError: with every problem that was found.
    """
    source = Path(path)
    problems: list[Problem] = []
    tree = Tree({})
    for file in (source, *map(Path, extra_files)):
        try:
            _merge(tree, read_toml(file))
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:  # nothing else can be said about a file that cannot be read
        raise ConfigError(str(source), problems)
    for text in overrides:
        problems.extend(_apply_override(tree, text))
    warnings: list[str] = []
    problems.extend(_clean(tree, warnings))
    config, errors = _validate(tree)
    problems.extend(errors)
    if config is not None:
        problems.extend(_located(tree, find_bad_combinations(config)))
        warnings.extend(find_warnings(config))
    if problems or config is None:
        raise ConfigError(str(source), problems)
    origins = {key: where if line is None else f"{where}:{line}" for key, (where, line) in tree.origins.items()}
    return LoadedConfig(config, origins, source, tuple(warnings))


def _merge(tree: Tree, other: Tree) -> None:
    """Lay ``other`` over ``tree``: tables merge, everything else is replaced together with its origins."""

    def lay(below: dict[str, Any], above: dict[str, Any], prefix: str) -> None:
        for key, value in above.items():
            name = prefix + key
            if isinstance(value, dict) and isinstance(below.get(key), dict):
                lay(below[key], value, f"{name}.")
                continue
            for old in [old for old in tree.origins if old == name or old.startswith(f"{name}.")]:
                del tree.origins[old]
            below[key] = copy.deepcopy(value)

    lay(tree.values, other.values, "")
    tree.origins.update(other.origins)


def _apply_override(tree: Tree, text: str) -> list[Problem]:
    """Write one ``key=value`` into the tree; return what is wrong with it."""
    name, separator, value_text = text.partition("=")
    name = name.strip()
    if not separator or not all(part.strip() for part in name.split(".")):
        return [Problem(name, f"`{text}` is not KEY=VALUE", "Write for example --set learning_rate=2e-5", OVERRIDE)]
    first, _, rest = name.partition(".")
    if first not in known_keys() and first not in known_tables():
        homes = full_keys_of_leaf(first)
        if len(homes) > 1:
            return [Problem(name, f"`{first}` is in several tables", f"Write one of {', '.join(homes)}", OVERRIDE)]
        name = ".".join([*homes, rest] if rest else homes) or name
    path: KeyPath = tuple(int(part) if part.isdecimal() else part for part in name.split("."))
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
    """Return ``value`` inside one-item tables and lists along ``path``."""
    for part in reversed(path):
        value = [value] if isinstance(part, int) else {part: value}
    return value


def _leaf_of(tree: Any, path: KeyPath) -> Any:
    for part in path:
        tree = tree[0] if isinstance(part, int) else tree[part]
    return tree


def _put(tree: Tree, path: KeyPath, value: Any, name: str) -> list[Problem]:
    """Write ``value`` at ``path``, making tables (and the next item of a list) on the way."""
    at: Any = tree.values
    for index, part in enumerate(path):
        last = index == len(path) - 1
        fresh: Any = value if last else ([] if isinstance(path[index + 1], int) else {})
        if isinstance(part, int):
            if not isinstance(at, list) or part > len(at):
                have = len(at) if isinstance(at, list) else 0
                message = f"{dotted(path[:index])} has {have} items, there is no number {part}"
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


def _clean(tree: Tree, warnings: list[str]) -> list[Problem]:
    """Take unknown keys out of the tree (each a problem) and rename accepted old names (each a warning)."""
    problems: list[Problem] = []
    renamed: list[tuple[KeyPath, str, Any]] = []

    def unknown(path: KeyPath, what: str) -> None:
        where, line = tree.origin(dotted(path))
        advice = advice_for_unknown(path) or advice_without_match(path)
        problems.append(Problem(dotted(path), f"unknown {what} `{dotted(path)}`", advice, where, line))

    def visit(table: dict[str, Any], path: KeyPath) -> None:
        for key in list(table):
            here = (*path, key)
            name, value = plain(here), table[key]
            if name in known_keys() and name not in known_tables():
                continue
            if name in ARRAY_TABLES and isinstance(value, list):
                for index, item in enumerate(value):
                    if isinstance(item, dict):
                        visit(item, (*here, index))
            elif name in known_tables():
                if isinstance(value, dict) and name not in ARRAY_TABLES:
                    visit(value, here)
            elif key in ACCEPTED or (key in ALWAYS_ON and value is True):
                renamed.append((here, key, table.pop(key)))
            else:
                table.pop(key)
                inner = (
                    [(*here, child) for child in value if has_advice((*here, child))] if isinstance(value, dict) else []
                )
                for child in () if has_advice(here) else inner:
                    unknown(child, "key")
                if has_advice(here) or not inner:
                    unknown(here, "table" if isinstance(value, dict) else "key")

    visit(tree.values, ())
    for path, key, value in renamed:
        problems.extend(_rename(tree, path, key, value, warnings))
    return problems


def _rename(tree: Tree, path: KeyPath, key: str, value: Any, warnings: list[str]) -> list[Problem]:
    where, line = tree.origin(dotted(path))
    place = f"{where}:{line}: " if line is not None else f"{where}: " if where else ""
    if key in ALWAYS_ON:
        warnings.append(f"{place}`{key}` is always on here ({ALWAYS_ON[key]}); leave it out")
        return []
    ours = ACCEPTED[key]
    if tree.origin(ours) != ("", None) and ours in tree.origins:
        return [Problem(key, f"`{key}` and `{ours}` are two names for one thing", f"Keep {ours}", where, line)]
    warnings.append(f"{place}`{key}` is the name in transformers 4; here: {ours}")
    problems = _put(tree, tuple(ours.split(".")), value, ours)
    tree.origins[ours] = (where, line)
    return problems


def _validate(tree: Tree) -> tuple[RunConfig | None, list[Problem]]:
    """Return the config, or what the schema says against the values."""
    try:
        return RunConfig.model_validate(tree.values), []
    except ValidationError as error:
        found: dict[str, Problem] = {}
        for detail in error.errors(include_url=False):
            problem = explain_error(detail, tree.values)
            if problem is not None:
                found.setdefault(problem.key, problem)
        return None, _located(tree, found.values())


def _located(tree: Tree, problems: Iterable[Problem]) -> list[Problem]:
    located = []
    for problem in problems:
        where, line = tree.origin(problem.key)
        located.append(Problem(problem.key, problem.message, problem.remedy, where, line))
    return located


assert known_keys() >= FREE_TABLES, "a free table is missing from the schema"
