"""The schema as JSON Schema: editors complete and check config files with it (taplo, VS Code)."""

from __future__ import annotations

import typing
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from megatrain.config import fields
from megatrain.config.keys import ARRAY_TABLES, nested_model
from megatrain.config.schema import RunConfig
from megatrain.config.sizes import Size, exact_size

if typing.TYPE_CHECKING:
    from pydantic import BaseModel

#: Name of the file that ``init`` writes beside a config, and that the first line of the config names.
FILE_NAME = "megatrain-tier.schema.json"
TITLE = "Config of megatrain-tier"

_SIZE = r"^\s*[0-9][0-9_]*(\.[0-9]+)?\s*([kKmMgGtT][iI]?)?[bB]\s*$"
_SHARE = r"^\s*[0-9]+(\.[0-9]+)?\s*%\s*$"
_DURATION = r"^(\s*[0-9][0-9_]*(\.[0-9]+)?\s*(s|S|min|Min|MIN|h|H|d|D))+\s*$"
_REPORTS = ["jsonl", "tensorboard", "wandb"]
_TIERS = {"type": "string", "enum": ["gpu", "ram", "nvme"]}
_PLAIN_SIZE = {"type": "string", "pattern": _SIZE, "examples": ["110GiB", "110GB"]}

#: Kinds of values that are text in the file and numbers inside.
_NAMED_TYPES: tuple[tuple[Any, dict[str, Any]], ...] = (
    (fields.PlainSize, _PLAIN_SIZE),
    (fields.Rate, {"type": "string", "pattern": _SIZE.replace(r"\s*$", r"\s*/\s*s\s*$"), "examples": ["2.0GB/s"]}),
    (fields.Duration, {"type": "string", "pattern": _DURATION, "examples": ["45min"]}),
    (
        fields.Preference,
        {"anyOf": [{"const": "auto"}, _TIERS, {"type": "array", "items": _TIERS, "minItems": 1}]},
    ),
    (fields.PrefetchSize, {"anyOf": [{"enum": ["auto", "unlimited", "0", 0]}, _PLAIN_SIZE]}),
    (fields.CopyRule, {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 1}, {"const": "last"}]}),
    (fields.Packing, {"anyOf": [{"type": "boolean"}, {"const": "concat"}]}),
    (fields.GraphCount, {"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 0}]}),
    (
        fields.ReportTargets,
        {"anyOf": [{"enum": [*_REPORTS, "none"]}, {"type": "array", "items": {"enum": _REPORTS}}]},
    ),
    (fields.ResumeSource, {"anyOf": [{"type": "string", "minLength": 1}, {"type": "boolean"}]}),
    (
        Size,
        {
            "anyOf": [{"const": "auto"}, {"type": "string", "pattern": _SHARE}, _PLAIN_SIZE],
            "examples": ["auto", "110GiB", "90%"],
        },
    ),
)
_PLAIN_TYPES: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    Path: {"type": "string", "minLength": 1},
}
_BOUNDS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "multiple_of": "multipleOf",
}
#: Keys that the schema demands and the loader fills in.
_FILLED_IN = frozenset({"run_name", "data_seed"})


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a config file, made from the config's own schema."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": TITLE,
        **_table(RunConfig, ""),
        "description": "A training run of megatrain-tier. `megatrain-tier config explain KEY` says more of a key.",
    }


def leaf_schema(key: str) -> dict[str, Any]:
    """Return the schema of one key: its type and bounds, its description and its default.

    Args:
        key: dotted, without the numbers of array tables; one of :func:`megatrain.config.keys.known_keys`.
    """
    model, leaf = _home(key)
    return _leaf(model.model_fields[leaf], _hints(model)[leaf])


def is_required(key: str) -> bool:
    """Return whether a table that has this key must hold it."""
    model, leaf = _home(key)
    return model.model_fields[leaf].is_required() and leaf not in _FILLED_IN


def _home(key: str) -> tuple[type[BaseModel], str]:
    model: type[BaseModel] = RunConfig
    *tables, leaf = key.split(".")
    for name in tables:
        nested = nested_model(model.model_fields[name].annotation)
        assert nested is not None, key
        model = nested
    return model, leaf


@cache
def _hints(model: type[BaseModel]) -> dict[str, Any]:
    return typing.get_type_hints(model, include_extras=True)


def _table(model: type[BaseModel], name: str) -> dict[str, Any]:
    hints = _hints(model)
    properties: dict[str, Any] = {}
    required = []
    for key, field in model.model_fields.items():
        nested = nested_model(field.annotation)
        full = f"{name}.{key}" if name else key
        if nested is None:
            properties[key] = _leaf(field, hints[key])
        elif full in ARRAY_TABLES:
            array = {"type": "array", "items": _table(nested, full), "description": field.description}
            properties[key] = _bounded(array, field.metadata)
        else:
            properties[key] = {**_table(nested, full), "description": field.description}
        if field.is_required() and key not in _FILLED_IN:
            required.append(key)
    table = {"type": "object", "additionalProperties": False, "properties": properties}
    return {**table, "required": required} if required else table


def _leaf(field: FieldInfo, annotation: Any) -> dict[str, Any]:
    schema = _bounded(_type(annotation), field.metadata)
    if field.description:
        schema["description"] = field.description
    default = None if field.is_required() else field.get_default(call_default_factory=True, validated_data={})
    if default is not None:
        schema["default"] = _plain(default, annotation)
    return schema


def _type(annotation: Any) -> dict[str, Any]:
    for known, schema in _NAMED_TYPES:
        if annotation == known:
            return dict(schema)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _bounded(_type(arguments[0]), arguments[1:])
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, UnionType):
        kinds = [_type(argument) for argument in arguments if argument is not type(None)]
        return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    if origin is tuple:
        return {"type": "array", "items": _type(arguments[0])}
    if origin is dict:
        names, values = arguments
        allowed = {"propertyNames": _type(names)} if typing.get_origin(names) is Literal else {}
        return {"type": "object", "additionalProperties": _type(values), **allowed}
    return dict(_PLAIN_TYPES[annotation])


def _bounded(schema: dict[str, Any], metadata: typing.Iterable[Any]) -> dict[str, Any]:
    """Return ``schema`` with the bounds that pydantic checks. A text that stands for a number has none of its own."""
    if "pattern" in schema or "anyOf" in schema:
        return schema
    is_list = schema.get("type") == "array"
    for entry in metadata:
        if isinstance(entry, BeforeValidator):
            continue
        for part in entry.metadata if isinstance(entry, FieldInfo) else (entry,):
            for ours, theirs in _BOUNDS.items():
                if (bound := getattr(part, ours, None)) is not None:
                    schema[theirs] = bound
            if (shortest := getattr(part, "min_length", None)) is not None:
                schema["minItems" if is_list else "minLength"] = shortest
    return schema


def _plain(value: Any, annotation: Any) -> Any:
    """Return a default as it is written in the file."""
    if isinstance(value, Size):
        return value.text
    if isinstance(value, Path):
        return str(value)
    if annotation == fields.PlainSize:
        return exact_size(value)
    return list(value) if isinstance(value, tuple) else value
