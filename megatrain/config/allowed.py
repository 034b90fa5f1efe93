"""What a key may hold, in words, made from its JSON Schema."""

from __future__ import annotations

import json
from typing import Any

from megatrain.config.json_schema import leaf_schema

_BOUNDS = (
    ("minimum", "at least"),
    ("exclusiveMinimum", "above"),
    ("maximum", "at most"),
    ("exclusiveMaximum", "below"),
    ("multipleOf", "a multiple of"),
)
_TYPES = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"}


def allowed_values(schema: dict[str, Any]) -> str:
    """Return what a schema allows, e.g. ``"whole number at least 2"``.

    Args:
        schema: as :func:`megatrain.config.json_schema.leaf_schema` returns it.
    """
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(allowed_values(kind) for kind in schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return ", ".join(json.dumps(value) for value in schema.get("enum", [schema.get("const")]))
    if "pattern" in schema:
        return f"text such as {json.dumps(schema['examples'][0])}" if "examples" in schema else 'a share such as "90%"'
    if schema.get("type") == "array":
        return "list of " + allowed_values(schema["items"])
    if schema.get("type") == "object":
        names = schema.get("propertyNames", {}).get("enum")
        return "table" + (f" with any of {', '.join(names)}" if names else "")
    bounds = [f"{words} {schema[name]:g}" for name, words in _BOUNDS if name in schema]
    return " ".join([_TYPES[schema["type"]], *([", ".join(bounds)] if bounds else [])])


def what_to_write(key: str) -> str:
    """Return the advice for a value of a wrong kind: what the key may hold, and its default where there is one.

    Args:
        key: dotted, without the numbers of array tables; one of :func:`megatrain.config.keys.known_keys`.
    """
    schema = leaf_schema(key)
    words, default = allowed_values(schema), schema.get("default")
    if words == "text":
        words = "text in quotes"
    elif words.startswith(("whole number", "number", "list of", "table")):
        words = f"a {words}"
    return f"Write {words}" + (f", for example {json.dumps(default)}" if default not in (None, [], {}) else "")
