"""Loader that turns TOML files and ``--set`` overrides into one checked config. All problems are reported at once.

Files are read as trees of values with the line of each key. The trees are merged, unknown keys are removed, and the
schema checks the rest. :func:`salvage` returns the usable part of a config with problems.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatrain.base.errors import ConfigError, Problem
from megatrain.config.combinations import find_bad_combinations, find_warnings
from megatrain.config.keys import ARRAY_TABLES, KEYS, TABLES, full_keys_of_leaf, parse_path
from megatrain.config.paths import absolute_value, unset_variables
from megatrain.config.schema import RunConfig
from megatrain.config.tree import KeyOrigin, Tree, read_toml
from megatrain.config.unknown import remove_unknown
from megatrain.config.values import explain_error

OVERRIDE = "--set"
_MAX_ROUNDS = 20
_SUGGESTION = re.compile(r"Did you mean ([\w.]+)")


@dataclass(frozen=True)
class LoadedConfig:
    """A config and the origin of its values.

    Attributes:
        origins: ``"file:line"`` or ``"--set"``, by dotted key. Keys that are not set are left out.
        source: Main config file.
        warnings: Warnings about values that do not prevent a run.
    """

    config: RunConfig
    origins: Mapping[str, str]
    source: Path
    warnings: tuple[str, ...] = ()


def load_config(
    path: str | Path, extra_files: Sequence[str | Path] = (), overrides: Sequence[str] = ()
) -> LoadedConfig:
    """Read and check a config. Write nothing, and do not open model and data files.

    Later values replace earlier ones: defaults, ``path``, ``extra_files`` in order, ``overrides``. Tables are merged,
    arrays are replaced. Paths in a file are relative to this file, and paths in ``overrides`` to the working directory.

    Args:
        path: Main file.
        overrides: ``KEY=VALUE`` texts. The key is dotted (``data.train.0.path``), or only its last part if that is
            unique. The value is TOML or plain text.

    Raises:
        ConfigError: The config has problems. The error lists all of them.
    """
    source = Path(path)
    tree = _read(source, *map(Path, extra_files))
    problems = [problem for text in overrides for problem in _apply_override(tree, text)]
    unknown, warnings = remove_unknown(tree)
    config, errors = validate_values(tree.values)
    first_problems = {problem.key: problem for problem in reversed(errors)}
    value_errors = [problem for problem in errors if first_problems[problem.key] is problem]
    problems += [*unknown, *tree.locate(unset_variables(tree.values)), *tree.locate(value_errors)]
    if config is not None:
        bad_combinations = tree.locate(find_bad_combinations(config))
        suggested_keys = _suggested_keys(problems)
        problems.extend(bad for bad in bad_combinations if not any(_follows_from(bad, key) for key in suggested_keys))
        warnings.extend(find_warnings(config))
    is_overlay = not tree.values.keys() & {"task", "output_dir", "data", "model"}
    if config is None and tree.values and is_overlay and not extra_files:
        text = "the file has no task, output_dir, model or data, so it only changes another config"
        problems.insert(0, Problem("", text, f"Apply it: megatrain-tier run CONFIG -c {source}", str(source)))
    if problems or config is None:
        raise ConfigError(str(source), problems)
    origins = {key: str(origin) for key, origin in tree.origins.items()}
    return LoadedConfig(config, origins, source, tuple(warnings))


def _read(*files: Path) -> Tree:
    """Return the merged values of several files. Raises ConfigError with the problems of all unreadable files."""
    tree = Tree()
    problems: list[Problem] = []
    for file in files:
        try:
            tree.merge(read_toml(file))
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(str(files[0]), problems)
    return tree


# Overrides


def _apply_override(tree: Tree, text: str) -> list[Problem]:
    """Apply one ``KEY=VALUE`` override to the tree, and return its problems."""
    name, separator, value_text = text.partition("=")
    name = name.strip()
    if not separator or not all(part.strip() for part in name.split(".")):
        return [Problem(name, f"`{text}` is not KEY=VALUE", "Write for example --set learning_rate=2e-5", OVERRIDE)]
    first, _, rest = name.partition(".")
    if first not in KEYS and first not in TABLES:
        full_keys = full_keys_of_leaf(first)
        if len(full_keys) > 1:
            return [Problem(name, f"`{first}` is in several tables", f"Write one of {', '.join(full_keys)}", OVERRIDE)]
        if full_keys:
            name = f"{full_keys[0]}.{rest}" if rest else full_keys[0]
    path = parse_path(name)
    array = next((array for array in ARRAY_TABLES if name.startswith(f"{array}.")), "")
    if array and not isinstance(path[array.count(".") + 1], int):
        return [Problem(name, f"{array} is a list", f"Write {array}.0.{name[len(array) + 1 :]}", OVERRIDE)]
    value = absolute_value(path, _parse_value(value_text.strip()), Path.cwd())
    return tree.put(path, value, KeyOrigin(OVERRIDE))


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def validate_values(values: Mapping[str, Any]) -> tuple[RunConfig | None, list[Problem]]:
    """Validate each value on its own. Return the config, or None and the problems. Combinations are not checked."""
    try:
        return RunConfig.model_validate(values), []
    except ValidationError as error:
        problems = (explain_error(detail) for detail in error.errors(include_url=False))
        return None, [problem for problem in problems if problem is not None]


# The usable part of a config with problems


def salvage(
    path: Path, extra_files: Sequence[Path], problems: Collection[Problem]
) -> tuple[RunConfig | None, list[Problem]]:
    """Return the config without its wrong keys, and the new problems that their removal causes.

    The config is None if a required key is wrong or a file is not TOML.

    Args:
        problems: Problems that ``load_config`` found.
    """
    try:
        tree = _read(path, *extra_files)
    except ConfigError:
        return None, []
    messages = {problem.message for problem in problems}
    wrong_keys = [problem.key for problem in problems]
    new_problems: list[Problem] = []
    removed_keys = _suggested_keys(problems)
    for _ in range(_MAX_ROUNDS):
        removals = [tree.remove(key) for key in wrong_keys if key]
        removed_keys += [key for key in wrong_keys if key]
        try:
            config = RunConfig.model_validate(tree.values)
        except ValidationError as error:
            wrong_keys = [".".join(map(str, detail["loc"])) for detail in error.errors(include_url=False)]
        else:
            bad_combinations = find_bad_combinations(config)
            if not bad_combinations:
                return config, new_problems
            new_problems += [
                each
                for each in tree.locate(bad_combinations)
                if each.message not in messages and not any(_follows_from(each, key) for key in removed_keys)
            ]
            wrong_keys = [each.key for each in bad_combinations]
        if not any(removals) and not any(tree.has(key) for key in wrong_keys):
            break
    return None, new_problems


def _suggested_keys(problems: Iterable[Problem]) -> list[str]:
    """Return the correct names of misspelled keys. Problems that mention them may follow from the misspelling."""
    return [key for problem in problems for key in _SUGGESTION.findall(problem.remedy)]


def _follows_from(problem: Problem, removed_key: str) -> bool:
    """Return whether a problem mentions a removed key, and may therefore follow from the removal."""
    leaf = re.escape(removed_key.rpartition(".")[2])
    return removed_key.startswith(f"{problem.key}.") or re.search(rf"\b{leaf}\b", problem.message) is not None
