"""Removal of unknown keys and tables from a config, with advice about the key that was probably intended."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from megatrain.base.errors import Problem
from megatrain.base.other_tools import ACCEPTED_KEYS, ALWAYS_ON, PLANNED_KEYS, TRANSFORMERS_4, TRANSLATIONS
from megatrain.config.keys import (
    ARRAY_TABLES,
    KEYS,
    NAMES,
    TABLES,
    dotted,
    full_keys_of_leaf,
    header,
    parse_path,
    plain,
)
from megatrain.config.keys import Path as KeyPath
from megatrain.config.retired import RETIRED
from megatrain.config.tree import KeyOrigin, Tree

_TOP = "at the top of the file, before the first table"


def remove_unknown(tree: Tree) -> tuple[list[Problem], list[str]]:
    """Remove unknown keys from a tree, and rename keys whose old name is accepted. Return problems and warnings."""
    problems: list[Problem] = []
    warnings: list[str] = []
    old: list[tuple[str, Any, KeyOrigin]] = []
    for table, path in list(_find_unknown(tree.values)):
        key = str(path[-1])
        value = table.pop(key)
        if key in ACCEPTED_KEYS or (key in ALWAYS_ON and value is True):
            old.append((key, value, tree.origin(dotted(path))))
        else:
            problems.extend(_explain(tree, path, value))
    for key, value, origin in old:
        place = f"{origin}: " if origin.where else ""
        ours = ACCEPTED_KEYS.get(key)
        if ours is None:
            warnings.append(f"{place}`{key}` is always on here ({ALWAYS_ON[key]}); leave it out")
        elif ours in tree.origins:
            problems.append(Problem(key, f"`{key}` and `{ours}` are the same key", f"Keep {ours}", *origin))
        else:
            warnings.append(f"{place}`{key}` is the name in {TRANSFORMERS_4}; here: {ours}")
            problems.extend(tree.put(parse_path(ours), value, origin))
    return problems, warnings


def _find_unknown(table: dict[str, Any], path: KeyPath = ()) -> Iterator[tuple[dict[str, Any], KeyPath]]:
    """Yield each unknown key or table inside a table: the table that contains it, and its path."""
    for key, value in table.items():
        here = (*path, key)
        name = plain(here)
        if name in KEYS:
            continue
        if name not in TABLES:
            yield table, here
        elif name in ARRAY_TABLES and isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, dict):
                    yield from _find_unknown(item, (*here, index))
        elif name not in ARRAY_TABLES and isinstance(value, dict):
            yield from _find_unknown(value, here)


def _explain(tree: Tree, path: KeyPath, value: Any) -> Iterator[Problem]:
    """Yield the problems to report for an unknown key or table."""
    contents = list(value) if isinstance(value, dict) else []
    meant = nearest_table(path) if isinstance(value, dict) else ""
    # A table whose name looks misspelled is reported as a whole, even if its keys exist elsewhere.
    familiar = [] if meant or has_advice(path) else [key for key in contents if has_advice((*path, key))]
    for key in familiar:
        yield _make_problem(tree, (*path, key), "key", (*path, key))
    if not familiar:
        yield _make_problem(tree, path, "table" if isinstance(value, dict) else "key", path)
    for key in contents if meant else ():
        inside = (*path[:-1], meant, key)
        if plain(inside) not in NAMES:
            yield _make_problem(tree, (*path, key), "key", inside)


def _make_problem(tree: Tree, path: KeyPath, what: str, meant: KeyPath) -> Problem:
    """Return the problem of an unknown key or table, with advice for the probably intended path."""
    advice = advice_for_unknown(meant) or advice_without_match(meant)
    return Problem(dotted(path), f"unknown {what} `{dotted(path)}`", advice, *tree.origin(dotted(path)))


# Advice


def has_advice(path: KeyPath) -> bool:
    """Return whether an unknown key belongs to another tool, or to another table of the config."""
    leaf = str(path[-1])
    return plain(path) in {*PLANNED_KEYS, *RETIRED} or leaf in TRANSLATIONS or bool(full_keys_of_leaf(leaf))


def nearest_table(path: KeyPath) -> str:
    """Return the most similar table name on the same level, without its parent tables, or "" without a similar name."""
    level = plain(path[:-1])
    tables = [table.rpartition(".")[2] for table in TABLES if table.rpartition(".")[0] == level]
    return next(iter(difflib.get_close_matches(str(path[-1]), tables, n=1, cutoff=0.8)), "")


def advice_for_unknown(path: KeyPath) -> str:
    """Return advice about an unknown key, or "" if it resembles no known key."""
    name, leaf = plain(path), str(path[-1])
    retired = RETIRED.get(name) or RETIRED.get(name.partition(".")[0])  # a key, or its whole table
    if retired is not None:
        return retired
    if name in PLANNED_KEYS:
        return "This release does not support it yet; leave it out"
    homes = full_keys_of_leaf(leaf)
    if len(homes) == 1:
        table = homes[0].rpartition(".")[0]
        if leaf in TRANSLATIONS and TRANSLATIONS[leaf].config_key != homes[0]:
            return f"Did you mean {homes[0]}? {TRANSLATIONS[leaf].advice()}"
        return f"`{leaf}` belongs {f'in {header(table)}' if table else _TOP}: write {homes[0]}"
    if leaf in TRANSLATIONS:
        return TRANSLATIONS[leaf].advice()
    if homes:
        return "Did you mean " + " or ".join(homes) + "?"
    if leaf in ALWAYS_ON:
        return f"It is always on here ({ALWAYS_ON[leaf]}); leave it out"
    near = _nearest_name(path)
    return f"Did you mean {near}?" if near else ""


def advice_without_match(path: KeyPath) -> str:
    """Return advice for a key that resembles no known key. The advice lists the keys of its table."""
    table = plain(path[:-1])
    inside = sorted(name for name in NAMES if name.rpartition(".")[0] == table)
    where = f"[{table}] has" if table else "The top of the file has"
    names = ", ".join(name.rpartition(".")[2] for name in inside)
    return f"Leave it out. {where} {names}" if inside else "Leave it out"


def _nearest_name(path: KeyPath) -> str:
    """Return the known name that is most similar to an unknown name. Prefer names in the same table."""
    table, leaf = plain(path[:-1]), str(path[-1])
    same_table = sorted(name.rpartition(".")[2] for name in NAMES if name.rpartition(".")[0] == table)
    found = difflib.get_close_matches(leaf, same_table, n=1, cutoff=0.6)
    if found:
        return dotted((*path[:-1], found[0]))
    leaves = {key.rpartition(".")[2]: key for key in sorted(KEYS)}
    found = difflib.get_close_matches(leaf, sorted(leaves), n=1, cutoff=0.75)
    return leaves[found[0]] if found else ""
