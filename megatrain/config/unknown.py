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
    accepted: list[tuple[str, Any, KeyOrigin]] = []
    for table, path in list(_find_unknown(tree.values)):
        key = str(path[-1])
        value = table.pop(key)
        if key in ACCEPTED_KEYS or (key in ALWAYS_ON and value is True):
            accepted.append((key, value, tree.origin(dotted(path))))
        else:
            problems.extend(_explain(tree, path, value))
    for key, value, origin in accepted:
        prefix = f"{origin}: " if origin.where else ""
        new_key = ACCEPTED_KEYS.get(key)
        if new_key is None:
            warnings.append(f"{prefix}`{key}` is always on here ({ALWAYS_ON[key]}); leave it out")
        elif new_key in tree.origins:
            problems.append(Problem(key, f"`{key}` and `{new_key}` are the same key", f"Keep {new_key}", *origin))
        else:
            warnings.append(f"{prefix}`{key}` is the name in {TRANSFORMERS_4}; here: {new_key}")
            problems.extend(tree.put(parse_path(new_key), value, origin))
    return problems, warnings


def _find_unknown(table: dict[str, Any], path: KeyPath = ()) -> Iterator[tuple[dict[str, Any], KeyPath]]:
    """Yield each unknown key or table inside a table: the table that contains it, and its path."""
    for key, value in table.items():
        inner_path = (*path, key)
        name = plain(inner_path)
        if name in KEYS:
            continue
        if name not in TABLES:
            yield table, inner_path
        elif name in ARRAY_TABLES and isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, dict):
                    yield from _find_unknown(item, (*inner_path, index))
        elif name not in ARRAY_TABLES and isinstance(value, dict):
            yield from _find_unknown(value, inner_path)


def _explain(tree: Tree, path: KeyPath, value: Any) -> Iterator[Problem]:
    """Yield the problems to report for an unknown key or table."""
    contents = list(value) if isinstance(value, dict) else []
    intended_table = nearest_table(path) if isinstance(value, dict) else ""
    # A table whose name looks misspelled is reported as a whole, even if its keys exist elsewhere.
    known_keys = [] if intended_table or has_advice(path) else [key for key in contents if has_advice((*path, key))]
    for key in known_keys:
        yield _make_problem(tree, (*path, key), "key", (*path, key))
    if not known_keys:
        yield _make_problem(tree, path, "table" if isinstance(value, dict) else "key", path)
    for key in contents if intended_table else ():
        intended_path = (*path[:-1], intended_table, key)
        if plain(intended_path) not in NAMES:
            yield _make_problem(tree, (*path, key), "key", intended_path)


def _make_problem(tree: Tree, path: KeyPath, noun: str, intended_path: KeyPath) -> Problem:
    """Return the problem of an unknown key or table, with advice for the probably intended path."""
    advice = advice_for_unknown(intended_path) or advice_without_match(intended_path)
    return Problem(dotted(path), f"unknown {noun} `{dotted(path)}`", advice, *tree.origin(dotted(path)))


# Advice


def has_advice(path: KeyPath) -> bool:
    """Return whether an unknown key is planned, retired, from another tool, or from another table of the config."""
    leaf = str(path[-1])
    return plain(path) in {*PLANNED_KEYS, *RETIRED} or leaf in TRANSLATIONS or bool(full_keys_of_leaf(leaf))


def nearest_table(path: KeyPath) -> str:
    """Return the most similar table name on the same level, without its parent tables, or "" if there is none."""
    level = plain(path[:-1])
    tables = [table.rpartition(".")[2] for table in TABLES if table.rpartition(".")[0] == level]
    return next(iter(difflib.get_close_matches(str(path[-1]), tables, n=1, cutoff=0.8)), "")


def advice_for_unknown(path: KeyPath) -> str:
    """Return advice about an unknown key, or "" if it resembles no known key."""
    name, leaf = plain(path), str(path[-1])
    retired = RETIRED.get(name) or RETIRED.get(name.partition(".")[0])  # the key or its whole table
    if retired is not None:
        return retired
    if name in PLANNED_KEYS:
        return "This release does not support it yet; leave it out"
    full_keys = full_keys_of_leaf(leaf)
    if len(full_keys) == 1:
        table = full_keys[0].rpartition(".")[0]
        if leaf in TRANSLATIONS and TRANSLATIONS[leaf].config_key != full_keys[0]:
            return f"Did you mean {full_keys[0]}? {TRANSLATIONS[leaf].advice()}"
        return f"`{leaf}` belongs {f'in {header(table)}' if table else _TOP}: write {full_keys[0]}"
    if leaf in TRANSLATIONS:
        return TRANSLATIONS[leaf].advice()
    if full_keys:
        return "Did you mean " + " or ".join(full_keys) + "?"
    if leaf in ALWAYS_ON:
        return f"It is always on here ({ALWAYS_ON[leaf]}); leave it out"
    suggestion = _nearest_name(path)
    return f"Did you mean {suggestion}?" if suggestion else ""


def advice_without_match(path: KeyPath) -> str:
    """Return advice for a key that resembles no known key. The advice lists the keys of its table."""
    table = plain(path[:-1])
    siblings = sorted(name for name in NAMES if name.rpartition(".")[0] == table)
    subject = f"[{table}] has" if table else "The top of the file has"
    names = ", ".join(name.rpartition(".")[2] for name in siblings)
    return f"Leave it out. {subject} {names}" if siblings else "Leave it out"


def _nearest_name(path: KeyPath) -> str:
    """Return the known name that is most similar to an unknown name. Prefer names in the same table."""
    table, leaf = plain(path[:-1]), str(path[-1])
    siblings = sorted(name.rpartition(".")[2] for name in NAMES if name.rpartition(".")[0] == table)
    matches = difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.6)
    if matches:
        return dotted((*path[:-1], matches[0]))
    leaves = {key.rpartition(".")[2]: key for key in sorted(KEYS)}
    matches = difflib.get_close_matches(leaf, sorted(leaves), n=1, cutoff=0.75)
    return leaves[matches[0]] if matches else ""
