"""Problems with single values that the schema rejects, and their remedies."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
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
    example_line,
    first_required,
    header,
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
    "is_instance_of": "text in quotes",  # pydantic's error type for paths
    "tuple_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "finite_number": "a finite number",
}


@dataclass(frozen=True, slots=True)
class _RejectedValue:
    """Value that the schema rejects, with the reason.

    Attributes:
        key: Dotted key of the value.
        name: Key without the numbers of array tables.
        kind: Type of the error in pydantic.
        context: Facts about the error: its ``error`` text, a bound, or the allowed values.
    """

    key: str
    name: str
    value: Any
    kind: str
    context: Mapping[str, Any]

    @property
    def config_line(self) -> str:
        """Config line that sets the value."""
        return f"{self.key} = {format_value(self.value)}"

    def problem(self, text: str, remedy: str) -> Problem:
        """Return the problem ``KEY = VALUE <text>``."""
        return Problem(self.key, f"{self.config_line} {text}", remedy)


def explain_error(detail: ErrorDetails) -> Problem | None:
    """Return the problem for one validation error, or None if another error covers it."""
    path = _field_path(detail["loc"])
    kind, value, context = detail["type"], detail["input"], {"error": detail["msg"], **detail.get("ctx", {})}
    rejected = _RejectedValue(dotted(path), plain(path), value, kind, context)
    schema = KEYS.get(rejected.name, {})
    if kind == "default_factory_not_called":
        return None  # the default depends on another key, whose error is reported
    if kind == "missing":
        return _explain_missing(rejected)
    if isinstance(value, str) and value.strip().lower() in ("true", "false") and _accepts_boolean(schema):
        return rejected.problem("is text", f"Write it without quotes: {value.strip().lower()}")
    if "x-wrong" in schema:
        return rejected.problem(schema["x-wrong"], schema["x-write"])
    if "propertyNames" in schema and detail["loc"][-1] == "[key]":
        text = f"{rejected.key}: `{value}` is not a field of a row"
        names = ", ".join(schema["propertyNames"]["enum"])
        return Problem(rejected.key, text, f'Write FIELD = "COLUMN", where FIELD is one of {names}')
    if kind == "too_short" and value:
        return None  # another error reports each wrong item
    if kind in ("literal_error", "enum"):
        return _explain_choice(rejected)
    if kind == "value_error":
        return _explain_unit(rejected)
    if kind in _BOUNDS:
        bound, words = _BOUNDS[kind]
        return rejected.problem("is out of range", f"It must be {words} {context[bound]:g}")
    if kind in ("too_short", "string_too_short") or (kind == "is_instance_of" and value == ""):
        is_needed = rejected.name in TABLES or is_required(rejected.name)
        remedy = example_line(rejected.name) if is_needed else "Leave the key out or fill it"
        return rejected.problem("is empty", remedy)
    if kind == "string_unicode":  # bytes that are invalid in the encoding of the process
        text = f"{rejected.key} = {value!a} contains bytes that this process cannot decode"
        remedy = "Use a UTF-8 locale (export LC_ALL=C.UTF-8, or PYTHONUTF8=1) and UTF-8 names"
        return Problem(rejected.key, text, remedy)
    if kind in _KINDS:
        return _explain_type(rejected)
    remedy = describe_allowed(rejected.name) if rejected.name in KEYS else ""
    return Problem(rejected.key, f"{rejected.config_line}: {detail['msg']}", remedy)


def _explain_missing(rejected: _RejectedValue) -> Problem:
    """Return the problem for a missing key. For a missing table, return the problem for its first required key."""
    key = rejected.key
    if rejected.name in TABLES:
        inner = first_required(rejected.name)
        table = inner.rpartition(".")[0]
        key = table if table in ARRAY_TABLES else inner
    return Problem(key, f"`{key}` is missing", example_line(rejected.name))


def _accepts_boolean(schema: Mapping[str, Any]) -> bool:
    return "const" not in schema and any(part.get("type") == "boolean" for part in (schema, *schema.get("anyOf", ())))


def _field_path(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Return a key's path without the parts that pydantic appends: union branches and list items."""
    for length in range(1, len(location) + 1):
        if plain(location[:length]) in KEYS:
            return location[:length]
    return location


#: Tasks that generate samples during training.
_ONLINE_TASKS = ("grpo", "ppo", "rloo", "online_dpo", "gspo", "dapo")
#: Equivalent value in this project, by (key, value in another tool).
_ALIASES = {("preference.loss_type", "dpo"): "sigmoid"}


def _explain_choice(rejected: _RejectedValue) -> Problem:
    key, value, expected = rejected.key, rejected.value, str(rejected.context.get("expected", ""))
    retired = RETIRED_CHOICES.get((key.rpartition(".")[2], str(value)))
    if retired is not None:
        return rejected.problem("is no longer supported", retired)
    choices = re.findall(r"'([^']*)'", expected) or [expected]
    alias = _ALIASES.get((key, str(value).lower()))
    suggestions = [alias] if alias else difflib.get_close_matches(str(value), choices, n=1, cutoff=0.6)
    remedy = f'Did you mean "{suggestions[0]}"? ' if suggestions else ""
    if key == "task" and str(value).lower() in _ONLINE_TASKS:
        remedy = "TRL trains it with megatrain.hf.offloaded(GRPOTrainer). "
    if alias:
        remedy = f'Write "{alias}", which is {str(value).upper()}. '
    choice_list = ", ".join(f'"{choice}"' for choice in choices) if re.search("'", expected) else expected
    return rejected.problem("is not allowed", f"{remedy}Write {'one of ' if len(choices) > 1 else ''}{choice_list}")


def _explain_unit(rejected: _RejectedValue) -> Problem:
    """Return the problem with a size, rate or duration. For text and positive numbers, include the parser's reason."""
    key, name, value = rejected.key, rejected.name, rejected.value
    schema, reason = KEYS[name], str(rejected.context["error"])
    words = [f'"{word}"' for word in ("auto", "unlimited") if f'"{word}"' in allowed_values(schema)]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, str) or (is_number and cast("float", value) > 0):
        suffix = f", or {' or '.join(words)}" if words and "is not a size" in reason else ""
        return Problem(key, f"{key} = {reason}{suffix}" if "size" in name else f"{key}: {reason}{suffix}")
    example = next((text for text in schema.get("examples", ()) if text != "auto"), "2GiB")
    return rejected.problem("is not text with a unit", f'Write {" or ".join([*words, "text"])} such as "{example}"')


def _explain_type(rejected: _RejectedValue) -> Problem:
    name, value, expected = rejected.name, rejected.value, _KINDS[rejected.kind]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, str) and expected in ("a number", "a whole number") and _NUMBER.fullmatch(value.strip()):
        return rejected.problem("is text", f"Write it without quotes: {value.strip()}")
    if is_number and expected == "text in quotes":
        return rejected.problem("is a number", f'Write it in quotes: "{value}"')
    if isinstance(value, float) and expected == "a whole number" and math.isfinite(value):
        if 0 < value < 1 and name.endswith("_steps"):
            return rejected.problem("is a share of all steps, which transformers takes", "Write a number of steps")
        choices = dict.fromkeys((math.floor(value), math.ceil(value)))
        return rejected.problem("is not a whole number", "Write " + " or ".join(map(str, choices)))
    if expected == "a list" and isinstance(value, dict) and name in TABLES:
        text = f"{rejected.key} is a table, not a list of tables"
        return Problem(rejected.key, text, f"Write [[{rejected.key}]] with two brackets")
    if name not in KEYS:
        return rejected.problem("is not a table", f"Write {header(name)} and its keys below it")
    items = KEYS[name].get("items", {})
    if expected == "a list" and type(value) is {"string": str, "integer": int}.get(items.get("type")):
        return rejected.problem("is not a list", f"Write [{format_value(value)}]")
    return rejected.problem(f"is not {expected}", describe_allowed(name))
