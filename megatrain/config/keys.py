"""All keys and tables of the config with their properties, read from pydantic's JSON Schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from megatrain.base.table import Alters
from megatrain.base.toml import format_value
from megatrain.config.schema import RunConfig

#: Name of the schema file that ``init`` writes next to a config. The config's first line refers to it.
SCHEMA_FILE_NAME = "megatrain-tier.schema.json"
SCHEMA_TITLE = "Config of megatrain-tier"

Schema = dict[str, Any]
Path = tuple[str | int, ...]
#: Wording for each JSON Schema keyword in a sentence about allowed values.
_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
    "multipleOf": "a multiple of",
}
_TYPES = {"integer": "whole number", "number": "number", "string": "text"}


# Traversal of the schema


class _TomlSchema(GenerateJsonSchema):
    """Generator of the JSON Schema of a TOML file. TOML has no null, so a nullable type has the schema of its value."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        return (
            self.generate_inner(schema["schema"])
            if schema.get("default", ...) is None
            else super().default_schema(schema)
        )

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _without_references(node: Any, tables: Mapping[str, Schema]) -> Any:
    """Return a schema in which each reference is replaced by the table that it refers to."""
    if isinstance(node, list):
        return [_without_references(item, tables) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        table = tables[node["$ref"].rpartition("/")[2]]
        # Keep the field's description, because the table's docstring is for readers of the code.
        node = {**{name: table[name] for name in table if name not in ("title", "description")}, **node}
        del node["$ref"]
    if "pattern" in node:
        node = {name: value for name, value in node.items() if name not in ("ge", "multiple_of")}
    return {name: _without_references(value, tables) for name, value in node.items()}


def _make_schema() -> Schema:
    # Serialization mode shows defaults as users write them: "5GB" instead of 5000000000.
    schema = RunConfig.model_json_schema(mode="serialization", schema_generator=_TomlSchema)
    tables = schema.pop("$defs")
    resolved: Schema = _without_references(schema, tables)
    return resolved


def _walk(table: Schema, prefix: str = "", alters: str | None = None) -> Iterator[tuple[str, Schema]]:
    """Yield (dotted name, schema) of every key and table in order, with a table before its contents.

    A key without its own ``x-alters`` inherits the value of its table.
    """
    alters = table.get("x-alters", alters)
    for leaf, schema in table["properties"].items():
        item_schema = schema.get("items", schema)
        if "properties" in item_schema:
            yield prefix + leaf, schema
            yield from _walk(item_schema, f"{prefix}{leaf}.", alters)
        else:
            yield prefix + leaf, {"x-alters": alters, **schema, "x-required": leaf in table.get("required", ())}


_SCHEMA = _make_schema()
_ALL = dict(_walk(_SCHEMA))
#: Every key and table, in the order of the config.
NAMES = tuple(_ALL)
#: Schema of each key and table by dotted name without the numbers of array tables, in the order of the config.
KEYS: Mapping[str, Schema] = {name: schema for name, schema in _ALL.items() if "x-required" in schema}
TABLES: Mapping[str, Schema] = {name: schema for name, schema in _ALL.items() if "x-required" not in schema}
#: Array tables. In a dotted name, a number after the name of an array table is an index.
ARRAY_TABLES = frozenset(name for name, schema in TABLES.items() if schema["type"] == "array")
#: Keys whose value is a table with names that the user chooses. The schema checks the contents of these tables.
FREE_TABLES = frozenset(name for name, schema in KEYS.items() if schema.get("type") == "object")


def _without_extensions(node: Any) -> Any:
    """Return a schema without this project's keywords, which begin with x-."""
    if isinstance(node, list):
        return [_without_extensions(item) for item in node]
    if isinstance(node, dict):
        return {name: _without_extensions(value) for name, value in node.items() if not name.startswith("x-")}
    return node


def json_schema() -> Schema:
    """Return the JSON Schema with which editors (taplo, VS Code) complete and check a config file."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **_without_extensions(_SCHEMA),
        "title": SCHEMA_TITLE,
        "description": "A training run of megatrain-tier. `megatrain-tier config explain KEY` describes a key.",
    }


def leaf_schema(key: str) -> Schema:
    """Return the JSON Schema of one of :data:`KEYS`: type, bounds, description and default."""
    schema: Schema = _without_extensions(KEYS[key])
    return schema


def is_required(key: str) -> bool:
    """Return whether a key must be set wherever its table appears."""
    required: bool = KEYS[key]["x-required"]
    return required


def alters(key: str) -> Alters:
    """Return whether a different value of a key alters a run's results. Accepts keys inside :data:`FREE_TABLES`."""
    effect: Alters | None = KEYS[schema_key(key)]["x-alters"]
    assert effect is not None, f"{key}: neither the key nor its table states whether it alters results"
    return effect


def used_if(key: str) -> Mapping[str, Sequence[Any]]:
    """Return the conditions for a key to have an effect: the required values of other keys, by dotted key."""
    table = key.rpartition(".")[0]
    return {f"{table}.{other}": values for other, values in KEYS[key].get("x-used-if", {}).items()}


# Names


def dotted(path: Path) -> str:
    """Return a path as users write it: ``("data", "train", 0, "path")`` -> ``"data.train.0.path"``."""
    return ".".join(str(part) for part in path)


def plain(path: Path) -> str:
    """Return a path without the numbers of array tables, as in :data:`KEYS`."""
    return ".".join(part for part in path if isinstance(part, str))


def parse_path(name: str) -> Path:
    """Return the path of a dotted name, the inverse of :func:`dotted`."""
    return tuple(int(part) if part.isdecimal() else part for part in name.split("."))


def schema_key(name: str) -> str:
    """Return a key's name without numbers. For a key inside one of :data:`FREE_TABLES`, return the table's name."""
    name = plain(parse_path(name))
    return next((table for table in FREE_TABLES if name.startswith(f"{table}.")), name)


def full_keys_of_leaf(leaf: str) -> list[str]:
    """Return the dotted keys whose last part is ``leaf``, sorted.

    If exactly one key is outside array tables, only this key is returned. Keys of ``[[data.eval]]`` are omitted if
    ``[[data.train]]`` has the same keys.
    """
    hits = {key for key in KEYS if key.rsplit(".", 1)[-1] == leaf}
    keys = sorted(hits - {key.replace("data.train.", "data.eval.") for key in hits if key.startswith("data.train.")})
    plain_keys = [key for key in keys if key.rpartition(".")[0] not in ARRAY_TABLES]
    return plain_keys if len(plain_keys) == 1 else keys


def header(table: str) -> str:
    """Return the header line of a table: ``"[data]"``, ``"[[data.train]]"``."""
    return f"[[{table}]]" if table in ARRAY_TABLES else f"[{table}]"


# Allowed values, in words


def allowed_values(schema: Mapping[str, Any]) -> str:
    """Return the values that a schema or a part of a schema allows, such as ``true, false or "concat"``."""
    choices = list(dict.fromkeys(_choices(schema)))
    return " or ".join([", ".join(choices[:-1]), choices[-1]] if len(choices) > 1 else choices)


def _choices(schema: Mapping[str, Any]) -> Iterator[str]:
    kind = schema.get("type")
    if "x-path" in schema:
        path = schema["x-path"]
        yield from (format_value(word) for word in path["words"])
        yield from ["a path"] if path["name"] is None else ["a path", "a name on the hub"]
    elif "anyOf" in schema:
        for option in schema["anyOf"]:
            yield from _choices(option)
    elif "enum" in schema or "const" in schema:
        yield from (format_value(value) for value in schema.get("enum", [schema.get("const")]))
    elif kind == "boolean":
        yield from ("true", "false")
    elif "pattern" in schema:
        example = schema["examples"][0]
        yield f"{'a share' if example.endswith('%') else 'text'} such as {format_value(example)}"
    elif kind == "array":
        yield "list of " + allowed_values(schema["items"]).replace("number", "numbers")
    elif kind == "object":
        names = schema.get("propertyNames", {}).get("enum")
        yield "table" + (f" with any of {', '.join(names)}" if names else "")
    else:
        bounds = ", ".join(f"{words} {schema[name]:g}" for name, words in _BOUNDS.items() if name in schema)
        yield f"{_TYPES[schema['type']]} {bounds}".rstrip()


def describe_allowed(key: str) -> str:
    """Return advice about valid values for one of :data:`KEYS`, for the message about a wrong value."""
    words, default = allowed_values(KEYS[key]), KEYS[key].get("default")
    if words == "text":
        words = "text in quotes"
    elif words.startswith(("whole number", "number", "list of", "table")):
        words = f"a {words}"
    return f"Write {words}" + (f", for example {format_value(default)}" if default not in (None, [], {}) else "")


def first_required(table: str) -> str:
    """Return the first required key inside a table."""
    return next(key for key in KEYS if key.startswith(f"{table}.") and is_required(key))


def example_line(name: str) -> str:
    """Return advice with an example line for a missing required key, or for a missing table with a required key."""
    key = first_required(name) if name in TABLES else name
    table, _, leaf = key.rpartition(".")
    examples = KEYS[key]["examples"] if "examples" in KEYS[key] else KEYS[key]["enum"]
    line = " or ".join(f"{leaf} = {format_value(value)}" for value in examples)
    if name in TABLES:
        return f"Write {header(table)} and below it {line}"
    location = ("below its" if table in ARRAY_TABLES else "under") + f" {header(table)}" if table else "at the top"
    return f"Write {line} {location}"
