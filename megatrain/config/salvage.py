"""What can be used of a config with mistakes, so that its files can be looked at all the same."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatrain.config.combinations import find_bad_combinations
from megatrain.config.files import read_toml
from megatrain.config.problems import ConfigError, Problem
from megatrain.config.schema import RunConfig

_MOST_ROUNDS = 20


def salvage(
    path: Path, extra_files: Sequence[Path], problems: Collection[Problem]
) -> tuple[RunConfig | None, list[Problem]]:
    """Return the config without the keys that are wrong, and the problems that show only then.

    None where a key is wrong that a config needs, or a file is no TOML.
    """
    values: dict[str, Any] = {}
    lines: dict[str, tuple[str, int | None]] = {}
    try:
        for file in (path, *extra_files):
            tree = read_toml(file)
            _lay_over(values, tree.values)
            lines.update(tree.origins)
    except ConfigError:
        return None, []
    said = {problem.message for problem in problems}
    wrong = [problem.key for problem in problems]
    further: list[Problem] = []
    taken: list[str] = []
    for _ in range(_MOST_ROUNDS):
        removed = [_remove(values, key) for key in wrong if key]
        taken += [key for key in wrong if key]
        try:
            config = RunConfig.model_validate(values)
        except ValidationError as error:
            wrong = [".".join(map(str, detail["loc"])) for detail in error.errors(include_url=False)]
        else:
            bad = find_bad_combinations(config)
            if not bad:
                return config, further
            further += [
                Problem(each.key, each.message, each.remedy, *lines.get(each.key, ("", None)))
                for each in bad
                if each.message not in said and not any(_follows_from(each, key) for key in taken)
            ]
            wrong = [each.key for each in bad]
        if not any(removed) and not any(_is_there(values, key) for key in wrong):
            break
    return None, further


def _follows_from(problem: Problem, taken: str) -> bool:
    """Return whether a problem speaks of a key that was taken out: it may be there only because of that."""
    leaf = re.escape(taken.rpartition(".")[2])
    return taken.startswith(f"{problem.key}.") or re.search(rf"\b{leaf}\b", problem.message) is not None


def _lay_over(below: dict[str, Any], above: dict[str, Any]) -> None:
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            _lay_over(below[key], value)
        else:
            below[key] = value


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
    """Remove a key, or the value around it that is neither table nor list; return whether there was one."""
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
