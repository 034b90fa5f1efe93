"""Base of config tables. A table is a frozen pydantic model, in which each field holds all facts about one key.

Each table belongs to the package that reads it (``megatrain.optim.table``). ``megatrain.config.schema`` combines the
tables. Table modules must import fast.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    WithJsonSchema,
)
from pydantic_core import CoreSchema

from megatrain.base.sizes import (
    DURATION_SCHEMA,
    RATE_SCHEMA,
    SIZE_SCHEMA,
    Size,
    dump_duration,
    dump_size,
    parse_interval,
    parse_rate,
)
from tiered.units import parse_size

__all__ = [
    "HF",
    "HF_AXOLOTL",
    "Alters",
    "ConfigPath",
    "Duration",
    "Listed",
    "PlainSize",
    "Rate",
    "Table",
    "all_alter",
    "as_names",
    "as_tuple",
    "explain",
    "key",
    "mark_path",
    "mask_secrets",
    "parse_bytes",
]

T = TypeVar("T")

# JSON Schema covers type, bounds, description, examples and default. This project's own keywords begin with x-.

#: Whether a different value changes the results of a resumed run. "no": keys about placement, output and retention. "by
#: contents": keys that select weights, which the checkpoint contains, or data, which is compared by fingerprint. In a
#: new run, these keys do change the results.
Alters = Literal["yes", "by contents", "no"]
HF = "transformers, TRL, LLaMA-Factory"
HF_AXOLOTL = "transformers, TRL, LLaMA-Factory, Axolotl"


def key(
    description: str,
    default: Any = ...,
    *,
    alters: Alters | None = None,
    same_name: str = "",
    used_if: Mapping[str, Sequence[str | bool]] | None = None,
    **field_options: Any,
) -> Any:
    """Return the pydantic field of a key.

    Args:
        description: One or two sentences for the reference, ``config explain`` and editors.
        default: Default value. Without it, the key is required.
        alters: Whether a different value changes the results of a resumed run. None to use the table's value.
        same_name: Tools in which the key has the same name and meaning.
        used_if: Another key in the table, mapped to the values for which this key has an effect.
        field_options: Further arguments of ``pydantic.Field``: bounds, ``examples``, ``default_factory``.
    """
    extra: dict[str, Any] = {"x-alters": alters, "x-same-name": same_name, "x-used-if": used_if}
    if default is not ...:
        field_options["default"] = default
    return Field(description=description, json_schema_extra={k: v for k, v in extra.items() if v}, **field_options)


def all_alter(alters: Alters) -> dict[str, Any]:
    """Return JSON Schema keywords for a table. They apply to its keys and to the tables inside it."""
    return {"x-alters": alters}


@dataclass(frozen=True, eq=False)
class _SchemaKeywords:
    """Type annotation that adds keywords to the JSON Schema."""

    keywords: Mapping[str, Any]

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), **self.keywords}


def explain(problem: str, remedy: str) -> _SchemaKeywords:
    """Return an annotation with the error message for wrong values: ``KEY = VALUE <problem>. <remedy>``."""
    return _SchemaKeywords({"x-wrong": problem, "x-write": remedy})


def mark_path(*special_values: str, name: str | None = None) -> _SchemaKeywords:
    """Return the annotation for a path, which is made absolute unless it is a special value or a name on the hub.

    Args:
        special_values: Values that are not paths.
        name: Pattern for names on the hub. A value that matches is such a name unless it is an existing file.
    """
    return _SchemaKeywords({"x-path": {"words": special_values, "name": name}})


class Table(BaseModel):
    """Base class of all tables. Immutable; rejects unknown keys and does not convert types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


# Kinds of values


def as_tuple(value: object) -> object:
    """Convert a TOML list to a tuple. Return any other value unchanged."""
    return tuple(value) if isinstance(value, list) else value


def as_names(value: object) -> object:
    """Convert one name, several names or "none" to a tuple. Handle any other value like :func:`as_tuple`."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return as_tuple(value)
    return tuple(dict.fromkeys(name for name in names if name != "none"))


def mask_secrets(url: str) -> str:
    """Return a URL in which passwords and signatures are replaced by three stars."""
    masked = re.sub(r"(://)\S*:\S*@", r"\1***@", url)  # match slashes, because S3 keys may contain them
    return re.sub(r"\?[^/]*=.*", "?***", masked) if "://" in url else url


def parse_bytes(value: object) -> object:
    """Convert a size with a unit, such as "4GB", to a number of bytes."""
    if isinstance(value, str):
        return parse_size(value)
    return Size.parse(value).nbytes  # rejects a number without a unit


def _as_path(value: object) -> object:
    return Path(value) if isinstance(value, str) and value else value


Listed = Annotated[tuple[T, ...], BeforeValidator(as_tuple)]
ConfigPath = Annotated[
    Path,
    BeforeValidator(_as_path),
    PlainSerializer(str),
    WithJsonSchema({"type": "string", "minLength": 1}),
    mark_path(),
]
PlainSize = Annotated[int, BeforeValidator(parse_bytes), PlainSerializer(dump_size), WithJsonSchema(dict(SIZE_SCHEMA))]
Rate = Annotated[
    float,
    BeforeValidator(parse_rate),
    PlainSerializer(lambda rate: dump_size(round(rate)) + "/s"),
    WithJsonSchema(dict(RATE_SCHEMA)),
]
Duration = Annotated[
    float, BeforeValidator(parse_interval), PlainSerializer(dump_duration), WithJsonSchema(dict(DURATION_SCHEMA))
]
