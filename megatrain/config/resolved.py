"""A config with every default filled in, as TOML that reproduces the run: written to a file, and read back."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
import tomllib
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from megatrain.config.explain import explain_error
from megatrain.config.keys import dotted
from megatrain.config.problems import ConfigError, Problem
from megatrain.config.schema import RunConfig

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pydantic_core import ErrorDetails

FILE_NAME = "config.resolved.toml"
_NEWER = "A newer version of megatrain-tier wrote it: upgrade"


def to_toml(config: RunConfig) -> str:
    """Return ``config`` as TOML. Loading it gives an equal config."""
    lines: list[str] = []
    _write_table(resolved_values(config), "", lines)
    return "\n".join(lines).lstrip("\n") + "\n"


def resolved_values(config: RunConfig) -> dict[str, Any]:
    """Return the nested tables of ``config``, without keys that others of it replace."""
    values = config.model_dump(mode="python")
    if config.training.train_batch_tokens is not None:
        del values["training"]["per_device_train_batch_size"]
        del values["training"]["gradient_accumulation_steps"]
    return values


def config_from_toml(text: str, source: str = "the config in the checkpoint") -> RunConfig:
    """Return the config that :func:`to_toml` wrote. No file is looked at; keys that it lacks have their default.

    Args:
        source: where the text is from, for messages.

    Raises:
        ConfigError: it is no TOML, or has keys or values that this version does not know.
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        problem = Problem("", f"this is not TOML: {error}", "It is damaged; use another checkpoint")
        raise ConfigError(source, [problem]) from None
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        problems = [_unknown_here(detail, values) for detail in error.errors(include_url=False)]
        raise ConfigError(source, [problem for problem in problems if problem is not None]) from None


def _unknown_here(detail: ErrorDetails, values: Mapping[str, Any]) -> Problem | None:
    """Return the problem behind one complaint about a config that was valid where it was written."""
    key = dotted(detail["loc"])
    if detail["type"] == "extra_forbidden":
        return Problem(key, f"unknown key `{key}`", _NEWER)
    problem = explain_error(detail, values)
    return None if problem is None else Problem(problem.key, problem.message, _NEWER)


def write_resolved(config: RunConfig) -> Path:
    """Make ``output_dir`` and write ``config.resolved.toml`` there, atomically. Return its path.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    path = config.output_dir / FILE_NAME
    partial = path.with_suffix(".toml.partial")
    try:
        config.output_dir.mkdir(parents=True, exist_ok=True)
        partial.write_text(to_toml(config), encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise _unwritable(config, error) from error
    return path


def check_writable(config: RunConfig) -> None:
    """Find out whether ``output_dir`` can be written, by writing an empty file; nothing stays behind.

    Raises:
        ConfigError: the folder cannot be made or written.
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


def _write_table(table: dict[str, Any], name: str, lines: list[str]) -> None:
    """Append a table: its values first, then the tables inside it, as TOML wants them."""
    inner: list[tuple[str, Any]] = []
    for key, value in table.items():
        if value is None or (key in ("nvme", "train", "eval") and not value):
            continue  # TOML has no null, and no way to write an empty array of tables
        is_table = isinstance(value, dict) and not _is_free_table(name, key)
        if is_table or (isinstance(value, list | tuple) and value and isinstance(value[0], dict)):
            inner.append((key, value))
        elif not (isinstance(value, dict) and not value):
            lines.append(f"{key} = {format_value(value)}")
    for key, value in inner:
        full = f"{name}.{key}" if name else key
        for item in value if isinstance(value, list | tuple) else (value,):
            header = f"[[{full}]]" if isinstance(value, list | tuple) else f"[{full}]"
            lines.extend(("", header))
            _write_table(item, full, lines)


def _is_free_table(table: str, key: str) -> bool:
    return f"{table}.{key}" in ("data.eval.columns", "data.train.columns", "optimizer.lr_scheduler_kwargs")


def format_value(value: Any) -> str:
    """Return a value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        assert math.isfinite(value), value
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(format_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {format_value(item)}" for key, item in value.items()) + " }"
    # A JSON string is a TOML basic string, except that TOML also wants DEL escaped.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
