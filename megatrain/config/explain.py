"""The schema's complaints as sentences that say what to write."""

from __future__ import annotations

import difflib
import math
import re
import typing
from typing import TYPE_CHECKING, Any, cast

from megatrain.config.allowed import allowed_values, what_to_write
from megatrain.config.data_tables import ColumnName
from megatrain.config.json_schema import leaf_schema
from megatrain.config.keys import ARRAY_TABLES, dotted, known_keys, plain
from megatrain.config.problems import Problem

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic_core import ErrorDetails

_EXAMPLES = {
    "task": 'Write task = "sft" or task = "pretrain" at the top',
    "output_dir": 'Write output_dir = "outputs/first" at the top',
    "model": 'Write [model] and below it model_name_or_path = "path/to/model"',
    "model.model_name_or_path": 'Write model_name_or_path = "path/to/model" under [model]',
    "data": 'Write [[data.train]] and below it path = "data.jsonl"',
    "data.train": 'Write [[data.train]] and below it path = "data.jsonl"',
    "data.train.path": 'Write path = "data.jsonl" below its [[data.train]]',
    "data.eval.path": 'Write path = "held_out.jsonl" below its [[data.eval]]',
    "tiers.nvme.path": 'Write path = "state" below its [[tiers.nvme]]',
    "optimizer.groups.params": 'Write params = ["*norm*"] below its [[optimizer.groups]]',
}
_MISSING_NAMES = {"model": "model.model_name_or_path", "data": "data.train"}
_FILLED_IN = frozenset({"run_name", "data_seed"})
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


def explain_error(detail: ErrorDetails, values: Mapping[str, Any]) -> Problem | None:
    """Return the problem behind one complaint of the schema; None where another problem already covers it.

    Args:
        detail: what pydantic says.
        values: the tree that was checked.
    """
    path = _field_path(detail["loc"])
    key, name, kind = dotted(path), plain(path), detail["type"]
    value = detail["input"]
    shown = f"{key} = {_as_toml(value)}"
    if key in _FILLED_IN and key not in values:
        return None  # filled in from another key, which has the problem
    if kind == "missing":
        return Problem(
            _MISSING_NAMES.get(key, key), f"`{_MISSING_NAMES.get(key, key)}` is missing", _EXAMPLES.get(name, "")
        )
    context = detail.get("ctx", {})
    if name == "model.trust_remote_code":
        return Problem(key, f"{shown}: code in a model folder is never run here", "Leave the key out")
    if name.startswith("placement."):
        return Problem(
            key, f"{shown} is not a placement", 'Write "auto" or tiers in order of preference: ["ram", "nvme"]'
        )
    if name == "advanced.keep_graphs":
        return Problem(key, f"{shown} is no number of layers", 'Write a whole number at least 0, or "auto"')
    if name in ("data.train.columns", "data.eval.columns") and detail["loc"][-1] == "[key]":
        return Problem(
            key,
            f"{key}: `{value}` is not a field of ours",
            'Write ours = "yours", ours being one of ' + ", ".join(typing.get_args(ColumnName)),
        )
    if kind in ("literal_error", "enum"):
        return _explain_choice(key, shown, value, str(context.get("expected", "")))
    if kind == "value_error":
        return _explain_unit(key, name, shown, value, str(context.get("error", detail["msg"])))
    if kind in _BOUNDS:
        bound, words = _BOUNDS[kind]
        return Problem(key, f"{shown} is out of range", f"It must be {words} {context[bound]:g}")
    if kind == "too_short" and value:
        return None  # its items are wrong; each of them is reported
    if kind in ("too_short", "string_too_short"):
        return Problem(key, f"{shown} is empty", _EXAMPLES.get(name, "Leave the key out or fill it"))
    if kind == "finite_number":
        return Problem(key, f"{shown} is not a finite number", what_to_write(name))
    if kind == "is_instance_of" and value == "":
        return Problem(key, f"{shown} is empty", _EXAMPLES.get(name, "Write a path"))
    if kind in _KINDS:
        return _explain_type(key, name, shown, value, _KINDS[kind])
    return Problem(key, f"{shown}: {detail['msg']}", what_to_write(name) if name in known_keys() else "")


def _field_path(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Cut what pydantic adds after the key: the branch of a union, the item of a list."""
    for length in range(1, len(location) + 1):
        if plain(location[:length]) in known_keys():
            return location[:length]
    return location


def _explain_choice(key: str, shown: str, value: object, expected: str) -> Problem:
    choices = re.findall(r"'([^']*)'", expected) or [expected]
    near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.6)
    remedy = f'Did you mean "{near[0]}"? ' if near else ""
    listed = ", ".join(f'"{choice}"' for choice in choices) if re.search("'", expected) else expected
    return Problem(key, f"{shown} is not a choice", f"{remedy}Write {'one of ' if len(choices) > 1 else ''}{listed}")


def _explain_unit(key: str, name: str, shown: str, value: object, reason: str) -> Problem:
    """Return the problem of a size, rate or duration: what its reader says, unless the value is none of any kind."""
    schema = leaf_schema(name)
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
    if isinstance(value, str) and wanted == "true or false" and value.strip().lower() in ("true", "false"):
        return Problem(key, f"{shown} is text", f"Write it without quotes: {value.strip().lower()}")
    if isinstance(value, int | float) and not isinstance(value, bool) and wanted == "text in quotes":
        return Problem(key, f"{shown} is a number", f'Write it in quotes: "{value}"')
    if isinstance(value, float) and wanted == "a whole number" and math.isfinite(value) and value == int(value):
        return Problem(key, f"{shown} is not a whole number", f"Write {int(value)}")
    if wanted == "a list" and isinstance(value, dict) and name not in known_keys():
        return Problem(key, f"{key} is a table, not a list of tables", f"Write [[{key}]] with two brackets")
    if name not in known_keys():
        brackets = f"[[{name}]]" if name in ARRAY_TABLES else f"[{key}]"
        return Problem(key, f"{shown} is not a table", f"Write {brackets} and its keys below it")
    items = leaf_schema(name).get("items", {})
    if wanted == "a list" and type(value) is {"string": str, "integer": int}.get(items.get("type")):
        return Problem(key, f"{shown} is not a list", f"Write [{_as_toml(value)}]")
    return Problem(key, f"{shown} is not {wanted}", what_to_write(name))


def _as_toml(value: object) -> str:
    """Return a short TOML rendering of a value for messages."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_as_toml(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_as_toml(item)}" for key, item in value.items()) + " }"
    return str(value)
