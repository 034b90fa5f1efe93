"""The reference of the config file, made from the schema: ``python -m megatrain.config.document > docs/config.md``."""

from __future__ import annotations

import typing
from types import UnionType
from typing import Any, Literal

from megatrain.config.fields import (
    CacheFolder,
    CopyRule,
    Duration,
    GraphCount,
    Packing,
    PlainSize,
    Preference,
    PrefetchSize,
    Rate,
    ResumeSource,
)
from megatrain.config.keys import ARRAY_TABLES, nested_model
from megatrain.config.schema import RunConfig
from megatrain.config.sizes import Size, exact_size

if typing.TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

_INTRODUCTION = """\
# Config file

Made from the schema by `python -m megatrain.config.document > docs/config.md`; do not edit by hand.

The file is TOML. Later values win: defaults < CONFIG < each `-c FILE` < `--set KEY=VALUE`. Tables merge, arrays are
replaced. In `--set`, a last name that is unique is enough (`--set learning_rate=2e-5`); items of a list have numbers
(`--set data.train.0.max_samples=100`). Paths are relative to the file they stand in, those in `--set` to the current
directory. Sizes need a unit: `"120GiB"` (2^30), `"120GB"` (10^9), and `"90%"` where a share makes sense; so do
durations: `"45min"`, `"30s"`, `"1h30min"`. Every problem is reported at once, with its line, and exit code 2.
`output_dir/config.resolved.toml` holds every default and reproduces the run.
"""
_NAMED_TYPES: tuple[tuple[Any, str], ...] = (
    (Preference, '"auto" or list of tiers'),
    (PrefetchSize, '"auto", "unlimited" or size'),
    (GraphCount, '"auto" or whole number'),
    (CopyRule, 'true, false, whole number or "last"'),
    (Packing, 'true, false or "concat"'),
    (PlainSize, "size"),
    (Rate, "size per second"),
    (Duration, "duration"),
    (ResumeSource, '"auto", "no" or path'),
    (CacheFolder, '"auto", "none" or path'),
)


def to_markdown() -> str:
    """Return the reference as Markdown."""
    parts = [_INTRODUCTION, *_tables(RunConfig, "")]
    return "\n".join(parts)


def _tables(model: type[BaseModel], name: str) -> list[str]:
    """Return the sections of a table and of the tables inside it."""
    title = f"[[{name}]]" if name in ARRAY_TABLES else f"[{name}]" if name else "Top of the file"
    rows, inner = [], []
    hints = typing.get_type_hints(model, include_extras=True)
    for key, field in model.model_fields.items():
        nested = nested_model(field.annotation)
        if nested is None:
            cells = (f"`{key}`", _type(hints[key]), _default(field, hints[key]), _cell(field.description or ""))
            rows.append(f"| {' | '.join(cells)} |")
        else:
            inner.extend(_tables(nested, f"{name}.{key}" if name else key))
    header = [
        "",
        f"## `{title}`" if name else f"## {title}",
        "",
        "| key | values | default | meaning |",
        "|---|---|---|---|",
    ]
    return [*(header if rows else []), *rows, *inner]


def _type(annotation: Any) -> str:
    for known, text in _NAMED_TYPES:
        if annotation == known:
            return text
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return ", ".join(_toml(value) for value in arguments)
    if origin in (typing.Union, UnionType):
        return _type(next(argument for argument in arguments if argument is not type(None)))
    if origin is tuple:
        return f"list of {_type(arguments[0])}s".replace("texts", "text")
    if origin is dict:
        return "table"
    if annotation is Size:
        return 'size, percentage or "auto"'
    return {str: "text", int: "whole number", float: "number", bool: "true, false"}.get(annotation, "path")


def _default(field: FieldInfo, annotation: Any) -> str:
    if field.is_required():
        return "see meaning" if (field.description or "").startswith(("Default:", "Order of")) else "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None:
        return "not set"
    if annotation == PlainSize:
        return _toml(exact_size(value))
    return _toml(value.text if isinstance(value, Size) else value)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "`true`" if value else "`false`"
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, tuple):
        return "`[" + ", ".join(f'"{item}"' for item in value) + "]`"
    return "`{}`" if value == {} else f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    print(to_markdown())
