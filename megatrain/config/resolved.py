"""Resolved configs, which contain all defaults: written as TOML, read again, shown with origins, and compared.

This module writes the TOML without a library, one key per line and array tables under headers, because origins and
messages refer to lines. TOML libraries write short tables of an array inline, and lists over several lines.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from megatrain.base.changes import Change, ConfigChanges
from megatrain.base.errors import ConfigError, Problem
from megatrain.base.names import RESOLVED_NAME
from megatrain.base.toml import format_value
from megatrain.config.combinations import disabling_keys
from megatrain.config.keys import (
    ARRAY_TABLES,
    FREE_TABLES,
    TABLES,
    alters,
    dotted,
    header,
    parse_path,
    plain,
    schema_key,
)
from megatrain.config.keys import Path as KeyPath
from megatrain.config.load import LoadedConfig, load_config
from megatrain.config.retired import RETIRED_CHOICES, drop_retired
from megatrain.config.schema import RunConfig
from megatrain.config.values import explain_error

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from megatrain.models.hub import HubModel

DEFAULT = "default"
_NEWER = "A newer version of megatrain-tier wrote it: upgrade"
#: Keys whose "auto" a run resolves, with their values in checkpoints that predate the keys.
DECIDED_BY_RUNS: Mapping[str, Any] = {
    "training.gradient_lanes": 1,
    "optimizer.muon_fused": "whole",
    "model.use_liger_kernel": False,
    "model.flash_attention": "FA2",
}


# Writing and reading


def to_toml(config: RunConfig) -> str:
    """Return ``config`` as TOML. Loading the text returns an equal config."""
    return "".join(f"{text}\n" for _, text in _lines(resolved_values(config)))


def resolved_values(config: RunConfig) -> dict[str, Any]:
    """Return the nested tables of ``config``, without keys that another key replaces."""
    values = config.model_dump(mode="python")
    if config.training.train_batch_tokens is not None:
        del values["training"]["per_device_train_batch_size"]
        del values["training"]["gradient_accumulation_steps"]
    return values


def config_lines(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, value as TOML) for every key of a config."""
    for key, text in _lines(resolved_values(config)):
        if key:
            yield key, text.partition(" = ")[2]


def config_from_toml(text: str, source: str = "the config in the checkpoint") -> RunConfig:
    """Return the config that :func:`to_toml` wrote as text. Missing keys get their defaults.

    Args:
        source: Name of the text in messages.

    Raises:
        ConfigError: The text is not TOML, or has keys or values that this version does not know.
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        problem = Problem("", f"this is not TOML: {error}", "The checkpoint is damaged; use another one")
        raise ConfigError(source, [problem]) from None
    try:
        return RunConfig.model_validate(drop_retired(values))
    except ValidationError as error:
        problems = [_version_problem(detail) for detail in error.errors(include_url=False)]
        raise ConfigError(source, [problem for problem in problems if problem is not None]) from None


def _version_problem(detail: ErrorDetails) -> Problem | None:
    """Return the problem for a validation error in a resolved config that was valid in the version that wrote it."""
    key = dotted(detail["loc"])
    if detail["type"] == "extra_forbidden":
        return Problem(key, f"unknown key `{key}`", _NEWER)
    problem = explain_error(detail)
    if problem is None:
        return None
    is_retired = (key.rpartition(".")[2], str(detail["input"])) in RETIRED_CHOICES
    return problem if is_retired else Problem(problem.key, problem.message, _NEWER)


def write_resolved(config: RunConfig) -> Path:
    """Create ``output_dir``, write ``config.resolved.toml`` into it atomically, and return the file's path.

    Raises:
        ConfigError: The folder cannot be created or written.
    """
    path = config.output_dir / RESOLVED_NAME
    partial_path = path.with_suffix(".toml.partial")
    try:
        config.output_dir.mkdir(parents=True, exist_ok=True)
        partial_path.write_text(to_toml(config), encoding="utf-8")
        os.replace(partial_path, path)
    except OSError as error:
        raise _unwritable(config, error) from error
    return path


def check_writable(config: RunConfig) -> None:
    """Check that ``output_dir`` is writable by creating a temporary file.

    Raises:
        ConfigError: The folder cannot be created or written.
    """
    folder = config.output_dir
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _unwritable(config, error) from error
    finally:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()


def _unwritable(config: RunConfig, error: OSError) -> ConfigError:
    message = f"output_dir: cannot write in {config.output_dir}: {error.strerror or error}"
    return ConfigError(str(config.output_dir), [Problem("output_dir", message, "Write another folder")])


def _lines(table: dict[str, Any], path: KeyPath = ()) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, line) for a table: first its values, then the tables inside it, as TOML requires."""
    tables: list[tuple[KeyPath, dict[str, Any]]] = []
    for key, value in table.items():
        inner_path = (*path, key)
        name = plain(inner_path)
        if value is None or (not value and name in ARRAY_TABLES | FREE_TABLES):
            continue  # TOML has neither null nor empty arrays of tables
        if name in ARRAY_TABLES:
            tables += [((*inner_path, index), item) for index, item in enumerate(value)]
        elif name in TABLES:
            tables.append((inner_path, value))
        else:
            yield dotted(inner_path), f"{key} = {format_value(value)}"
    for inner_path, values in tables:
        yield "", ""
        yield "", header(plain(inner_path))
        yield from _lines(values, inner_path)


# The origin of each value


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a resolved config.

    Attributes:
        key: Key that the line sets, or "" for a header or an empty line.
        origin: ``file:line``, ``--set`` or "default", or "" for a line without a key.
    """

    text: str
    key: str = ""
    origin: str = ""


def resolved_lines(loaded: LoadedConfig) -> list[Line]:
    """Return the lines of the resolved config, with the origin of each key."""
    defaults = set(to_toml(_with_defaults(loaded.config)).split("\n"))
    return [
        Line(text, key, _origin(loaded, key, is_default=text in defaults)) if key else Line(text)
        for key, text in _lines(resolved_values(loaded.config))
    ]


def _with_defaults(config: RunConfig) -> RunConfig:
    """Return a config that keeps the values of required keys and has defaults for all other keys."""
    values = config.model_dump(mode="python")
    required = {
        "task": values["task"],
        "output_dir": values["output_dir"],
        "model": {"model_name_or_path": values["model"]["model_name_or_path"]},
        "data": {"train": [{"path": source["path"]} for source in values["data"]["train"]]},
    }
    return RunConfig.model_validate(required)


def _origin(loaded: LoadedConfig, key: str, *, is_default: bool) -> str:
    """Return the origin of a key, of a value inside it, or of a table around it."""
    if key in loaded.origins:
        return loaded.origins[key]
    origins = [origin for name, origin in loaded.origins.items() if name.startswith(f"{key}.")]
    if origins:  # an inline table in the resolved config, but a table with a header in the file
        return origins[0]
    parent = key
    while not is_default and (parent := parent.rpartition(".")[0]):
        if parent in loaded.origins:  # in the file, an inline table or an array of inline tables
            return loaded.origins[parent]
    return DEFAULT


# Changes between two configs


def compare(old_config: RunConfig, new_config: RunConfig) -> ConfigChanges:
    """Return the changes from the config of a checkpoint to the config that resumes it.

    Only values are compared. The caller compares the fingerprints of the data and the parameters of the models.
    """
    old, new = dict(_leaves(resolved_values(old_config))), dict(_leaves(resolved_values(new_config)))
    lanes = ("training", "gradient_lanes")
    for values in (old, new):
        if values.get(lanes) == "auto":
            values[lanes] = 1  # a single-process run resolves "auto" to 1, and a resume keeps that number
    altering: list[Change] = []
    free: list[Change] = []
    for path in dict.fromkeys([*old, *new]):
        if old.get(path) != new.get(path):
            key = plain(path)
            is_altering = alters(key) == "yes" and any(_has_effect(key, config) for config in (old_config, new_config))
            change = Change(".".join(map(str, path)), old.get(path), new.get(path))
            (altering if is_altering else free).append(change)
    return ConfigChanges(tuple(altering), tuple(free))


def changes_from(config_toml: str, new_config: RunConfig) -> ConfigChanges:
    """Return the changes from the config in a checkpoint to the config that resumes it.

    Args:
        config_toml: Config in the checkpoint, as :func:`to_toml` wrote it.
        new_config: Config of the resuming run. In keys of `DECIDED_BY_RUNS`, "auto" means the value in the checkpoint.

    Raises:
        ConfigError: The checkpoint's config has keys or values that this version does not know.
    """
    old_config = with_decisions(config_from_toml(config_toml), DECIDED_BY_RUNS)
    return compare(old_config, with_decisions(new_config, {key: old_config.value(key) for key in DECIDED_BY_RUNS}))


def _has_effect(key: str, config: RunConfig) -> bool:
    """Return whether a key has an effect, given the other values of a config."""
    if disabling_keys(schema_key(key), config):
        return False
    if key == "training.num_train_epochs":
        return config.training.max_steps <= 0 and config.optimizer.depends_on_length
    if key == "training.max_steps":
        return config.optimizer.depends_on_length
    return True


@dataclass(frozen=True, slots=True)
class Difference:
    """Differences between two configs, by their effect on the results.

    Attributes:
        altering: Changes that alter the results.
        by_contents: Changes that alter the results only if the contents of the named files differ.
        free: Changes that do not alter the results.
    """

    altering: tuple[Change, ...]
    by_contents: tuple[Change, ...]
    free: tuple[Change, ...]

    @property
    def is_empty(self) -> bool:
        return not (self.altering or self.by_contents or self.free)


def difference(old: RunConfig, new: RunConfig) -> Difference:
    """Return the differences between two runs' configs. Unlike for a resume, their models and data may differ."""
    changes = compare(old, new)
    altering = list(changes.altering)
    by_contents: list[Change] = []
    free: list[Change] = []
    for change in changes.free:
        key = plain(parse_path(change.key))
        if _changes_length(key, old, new):
            altering.append(change)
        else:
            (by_contents if is_by_contents(change) else free).append(change)
    return Difference(tuple(altering), tuple(by_contents), tuple(free))


def is_by_contents(change: Change) -> bool:
    """Return whether a change alters results only if the files that the key names have different contents."""
    return alters(plain(parse_path(change.key))) == "by contents"


def _changes_length(key: str, old: RunConfig, new: RunConfig) -> bool:
    """Return whether a key changes the length of a run. A resume may change the length."""
    if key == "training.max_steps":
        return True
    return key == "training.num_train_epochs" and min(old.training.max_steps, new.training.max_steps) <= 0


def _leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield (path, value) for every value that is neither a table nor a list of tables."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif plain(path) in ARRAY_TABLES:
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    elif value is not None:
        yield path, value


def load_run_config(path: Path) -> RunConfig:
    """Return the config in a file, or the resolved config of the run in an ``output_dir``.

    Raises:
        ConfigError: No config exists there, or it is invalid.
    """
    if not path.is_dir():
        if path.name == RESOLVED_NAME and path.is_file():
            return config_from_toml(path.read_text(encoding="utf-8"), str(path))
        return load_config(path).config
    file = path / RESOLVED_NAME
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        problem = Problem(
            "", f"there is no {RESOLVED_NAME} in this folder", "Give a config file, or the output_dir of a run"
        )
        raise ConfigError(str(path), [problem]) from None
    return config_from_toml(text, str(file))


# Replacing values


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Return a config with some values replaced, without validation.

    Args:
        values: Value by dotted key, such as ``"model.revision"``.
    """
    for key, value in values.items():
        table, _, leaf = key.partition(".")
        if config.value(key) != value:  # assigning even an equal value marks the key as set by the user
            new_table = getattr(config, table).model_copy(update={leaf: value})
            config = config.model_copy(update={table: new_table})
    return config


def with_decisions(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Return a config in which a run's choices replace "auto", except in keys without effect.

    Args:
        values: Value by key, for keys of `DECIDED_BY_RUNS`.
    """
    return with_values(config, {key: value for key, value in values.items() if _is_undecided(config, key)})


def with_commit(config: RunConfig, hub: HubModel | None) -> RunConfig:
    """Return a config that contains the hub commit of its model. ``hub`` is None if the model is a folder."""
    return config if hub is None else with_values(config, {"model.revision": hub.commit})


def _is_undecided(config: RunConfig, key: str) -> bool:
    """Return whether a key has an effect and is still "auto", so that a run must decide its value."""
    return not disabling_keys(key, config) and bool(config.value(key) == "auto")
