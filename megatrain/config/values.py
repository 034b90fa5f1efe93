"""Problems with single values that the schema rejects, with their remedies."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from megatrain.base.errors import Problem
from megatrain.base.toml import format_value
from megatrain.config.keys import (
    ARRAY_TABLES,
    KEYS,
    TABLES,
    allowed_values,
    describe_allowed,
    dotted,
    first_required,
    header,
    how_to_fill_in,
    is_required,
    plain,
)
from megatrain.config.retired import RETIRED_CHOICES

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}
_NUMBER = re.compile(r"[+-]?[0-9][0-9_]*(\.[0-9_]+)?([eE][+-]?[0-9]+)?")
_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text in quotes",
    "is_instance_of": "text in quotes",  # a path
    "tuple_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
}


def explain_error(detail: ErrorDetails) -> Problem | None:
    """Return the problem for one validation error, or None if another error covers it."""
    path = _field_path(detail["loc"])
    key, name, kind, value = dotted(path), plain(path), detail["type"], detail["input"]
    schema, context = KEYS.get(name, {}), detail.get("ctx", {})
    shown = f"{key} = {format_value(value)}"
    if kind == "default_factory_not_called":
        return None  # the default is the value of another key, whose problem is reported
    if kind == "missing":
        return _explain_missing(key, name)
    if _takes_flag(schema) and _is_quoted_flag(value):
        return Problem(key, f"{shown} is text", f"Write it without quotes: {value.strip().lower()}")
    if "x-wrong" in schema:
        return Problem(key, f"{shown} {schema['x-wrong']}", schema["x-write"])
    if "propertyNames" in schema and detail["loc"][-1] == "[key]":
        names = ", ".join(schema["propertyNames"]["enum"])
        return Problem(
            key, f"{key}: `{value}` is not a field of a row", f'Write FIELD = "COLUMN", where FIELD is one of {names}'
        )
    if kind in ("literal_error", "enum"):
        return _explain_choice(key, shown, value, str(context.get("expected", "")))
    if kind == "value_error":
        return _explain_unit(key, name, shown, value, str(context.get("error", detail["msg"])))
    if kind in _BOUNDS:
        bound, words = _BOUNDS[kind]
        return Problem(key, f"{shown} is out of range", f"It must be {words} {context[bound]:g}")
    if kind == "too_short" and value:
        return None  # each wrong item is reported
    if kind in ("too_short", "string_too_short") or (kind == "is_instance_of" and value == ""):
        is_needed = name in TABLES or is_required(name)
        return Problem(key, f"{shown} is empty", how_to_fill_in(name) if is_needed else "Leave the key out or fill it")
    if kind == "string_unicode":  # bytes that are not text in the encoding of the process
        text = f"{key} = {value!a} contains bytes that this process cannot decode"
        return Problem(key, text, "Use a UTF-8 locale (export LC_ALL=C.UTF-8, or PYTHONUTF8=1) and UTF-8 names")
    if kind == "finite_number":
        return Problem(key, f"{shown} is not a finite number", describe_allowed(name))
    if kind in _KINDS:
        return _explain_type(key, name, shown, value, _KINDS[kind])
    return Problem(key, f"{shown}: {detail['msg']}", describe_allowed(name) if name in KEYS else "")


def _explain_missing(key: str, name: str) -> Problem:
    """Return the problem of a missing key. For a missing table, return the problem of its first required key."""
    if name in TABLES:
        inner = first_required(name)
        table = inner.rpartition(".")[0]
        key = table if table in ARRAY_TABLES else inner
    return Problem(key, f"`{key}` is missing", how_to_fill_in(name))


def _takes_flag(schema: Mapping[str, Any]) -> bool:
    return "const" not in schema and any(each.get("type") == "boolean" for each in (schema, *schema.get("anyOf", ())))


def _is_quoted_flag(value: object) -> bool:
    return isinstance(value, str) and value.strip().lower() in ("true", "false")


def _field_path(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Return the path of a key without the parts that pydantic appends: union branches and list items."""
    for length in range(1, len(location) + 1):
        if plain(location[:length]) in KEYS:
            return location[:length]
    return location


#: Tasks that generate samples during training.
_ONLINE_TASKS = ("grpo", "ppo", "rloo", "online_dpo", "gspo", "dapo")
#: (key, another tool's value) -> the value in this project.
_ALIASES = {("preference.loss_type", "dpo"): "sigmoid"}


def _explain_choice(key: str, shown: str, value: object, expected: str) -> Problem:
    retired = RETIRED_CHOICES.get((key.rpartition(".")[2], str(value)))
    if retired is not None:
        return Problem(key, f"{shown} is no longer supported", retired)
    choices = re.findall(r"'([^']*)'", expected) or [expected]
    alias = _ALIASES.get((key, str(value).lower()))
    near = [alias] if alias else difflib.get_close_matches(str(value), choices, n=1, cutoff=0.6)
    remedy = f'Did you mean "{near[0]}"? ' if near else ""
    if key == "task" and str(value).lower() in _ONLINE_TASKS:
        remedy = "TRL trains it with megatrain.hf.offloaded(GRPOTrainer). "
    if alias:
        remedy = f'Write "{alias}", which is {str(value).upper()}. '
    listed = ", ".join(f'"{choice}"' for choice in choices) if re.search("'", expected) else expected
    return Problem(key, f"{shown} is not allowed", f"{remedy}Write {'one of ' if len(choices) > 1 else ''}{listed}")


def _explain_unit(key: str, name: str, shown: str, value: object, reason: str) -> Problem:
    """Return the problem of a size, rate or duration, with the parser's reason for text and positive numbers."""
    schema = KEYS[name]
    words = [f'"{word}"' for word in ("auto", "unlimited") if f'"{word}"' in allowed_values(schema)]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, str) or (is_number and cast("float", value) > 0):
        more = f", or {' or '.join(words)}" if words and "is not a size" in reason else ""
        return Problem(key, f"{key} = {reason}{more}" if "size" in name else f"{key}: {reason}{more}")
    example = next((text for text in schema.get("examples", ()) if text != "auto"), "2GiB")
    return Problem(
        key, f"{shown} is not text with a unit", f'Write {" or ".join([*words, "text"])} such as "{example}"'
    )


def _explain_type(key: str, name: str, shown: str, value: object, wanted: str) -> Problem:
    if isinstance(value, str) and wanted in ("a number", "a whole number") and _NUMBER.fullmatch(value.strip()):
        return Problem(key, f"{shown} is text", f"Write it without quotes: {value.strip()}")
    if isinstance(value, int | float) and not isinstance(value, bool) and wanted == "text in quotes":
        return Problem(key, f"{shown} is a number", f'Write it in quotes: "{value}"')
    if isinstance(value, float) and wanted == "a whole number" and math.isfinite(value) and value == int(value):
        return Problem(key, f"{shown} is not a whole number", f"Write {int(value)}")
    if isinstance(value, float) and wanted == "a whole number" and 0 < value < 1 and name.endswith("_steps"):
        return Problem(key, f"{shown} is a share of all steps, which transformers takes", "Write a number of steps")
    if isinstance(value, float) and wanted == "a whole number" and math.isfinite(value):
        text = f"Write {math.floor(value)} or {math.ceil(value)}"
        return Problem(key, f"{shown} is not a whole number", text)
    if wanted == "a list" and isinstance(value, dict) and name in TABLES:
        return Problem(key, f"{key} is a table, not a list of tables", f"Write [[{key}]] with two brackets")
    if name not in KEYS:
        return Problem(key, f"{shown} is not a table", f"Write {header(name)} and its keys below it")
    items = KEYS[name].get("items", {})
    if wanted == "a list" and type(value) is {"string": str, "integer": int}.get(items.get("type")):
        return Problem(key, f"{shown} is not a list", f"Write [{format_value(value)}]")
    return Problem(key, f"{shown} is not {wanted}", describe_allowed(name))
