"""Wrong configs, derived from the schema: wrong types, ranges and choices; misspelled, misplaced and missing keys."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from wrong_inputs.workplace import CONFIG_NAME, Workplace, WrongInput, numbered

from megatrain.base.other_tools import PLANNED_KEYS, TRANSLATIONS
from megatrain.config.keys import ARRAY_TABLES, FREE_TABLES, KEYS, TABLES, full_keys_of_leaf, is_required, leaf_schema

COMMANDS = ("check", "plan")
CODE = 2
SEED = 20261121
#: TOML literal -> its value, or None for a date. Together, the literals cover the types of TOML.
VALUES: dict[str, object] = {
    '"no-such-value"': "no-such-value", "7": 7, "-7.5": -7.5, "true": True, "[7]": [7], "[[]]": [[]],
    "{ x = 1 }": {"x": 1}, "1979-05-27": None,
}  # fmt: skip
_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,), "number": (int, float), "string": (str,), "boolean": (bool,), "array": (list,), "object": (dict,)
}  # fmt: skip
_BAD_SIZES = ('"12"', "12", '"12 parsecs"', '"-1GiB"', '""', '"GiB"', '"1,5GiB"')
_BAD_TEXTS = {  # first example in a key's schema -> similar but wrong TOML literals
    "110GiB": _BAD_SIZES,
    "auto": (*_BAD_SIZES, '"0GiB"', '"0%"', '"150%"', '"%"'),
    "45min": ('"45"', "45", '"45 fortnights"', '"0s"', '"-45min"', '""', '"min"'),
    "2.0GB/s": ('"5"', "5", '"5GB"', '"5 parsecs/s"', '"0GB/s"', '""'),
}
#: Keys that are not tested with wrong types, because a wrong value also causes a second error.
_NO_TYPE_CHECK = frozenset({"config_version"})


def accepts(schema: Mapping[str, Any], value: object) -> bool:
    """Return whether the schema of a key allows a value."""
    if "anyOf" in schema:
        return any(accepts(kind, value) for kind in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        choices = schema.get("enum", [schema.get("const")])
        return any(type(choice) is type(value) and choice == value for choice in choices)
    kinds = _TYPES[schema["type"]]
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        return False
    if isinstance(value, str):
        return re.search(schema.get("pattern", ""), value) is not None and len(value) >= schema.get("minLength", 0)
    if isinstance(value, list):
        return len(value) >= schema.get("minItems", 0) and all(accepts(schema["items"], item) for item in value)
    if isinstance(value, dict):
        names = schema.get("propertyNames", {})
        return all(accepts(names, key) for key in value) if names else True
    return isinstance(value, bool) or _is_within(schema, value)


def _is_within(schema: Mapping[str, Any], value: Any) -> bool:
    return bool(
        value >= schema.get("minimum", -math.inf)
        and value > schema.get("exclusiveMinimum", -math.inf)
        and value <= schema.get("maximum", math.inf)
        and value < schema.get("exclusiveMaximum", math.inf)
        and (value % schema["multipleOf"] == 0 if "multipleOf" in schema else True)
    )


def wrong_type(schema: Mapping[str, Any]) -> list[str]:
    """Return values that the schema forbids, as TOML literals."""
    return [text for text, value in VALUES.items() if not accepts(schema, value)]


def out_of_range(schema: Mapping[str, Any]) -> list[str]:
    """Return values just outside the bounds, as TOML literals."""
    found = [str(schema[name] + step) for name, step in (("minimum", -1), ("maximum", 1)) if name in schema]
    found += [str(schema[name]) for name in ("exclusiveMinimum", "exclusiveMaximum") if name in schema]
    if "multipleOf" in schema:
        found.append(str(schema.get("minimum", 0) + 1))
    if schema.get("type") == "number":
        found += ["nan", "inf"]
    if schema.get("minLength"):
        found.append('""')
    if schema.get("minItems"):
        found.append("[]")
    return found


def near_choice(schema: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return (a choice with its last letter doubled, the choice), or None if all choices are short."""
    kinds = schema.get("anyOf", [schema])
    choices = [choice for kind in kinds for choice in kind.get("enum", [kind.get("const")])]
    long = [choice for choice in choices if isinstance(choice, str) and len(choice) > 3]
    return (f'"{long[-1]}{long[-1][-1]}"', long[-1]) if long else None


def misspelled(name: str) -> str:
    """Return a name with its two middle letters swapped. If they are equal, insert the same letter again."""
    middle = len(name) // 2
    if name[middle - 1] == name[middle]:
        return name[:middle] + name[middle] + name[middle:]
    return name[: middle - 1] + name[middle] + name[middle - 1] + name[middle + 1 :]


def _put(key: str, value: str) -> Any:
    def spoil(work: Workplace) -> Sequence[str]:
        work.config.put(key, value)
        return CONFIG_NAME, work.config.line(key), key.rpartition(".")[2]

    return spoil


def value_cases() -> Iterator[WrongInput]:
    """Yield every key with values of the wrong type, values out of range, and bad choices, sizes or durations."""
    generator = random.Random(SEED)
    for key in sorted(KEYS):
        schema = leaf_schema(key)
        types = [] if key in _NO_TYPE_CHECK else wrong_type(schema)
        for value in sorted(generator.sample(types, min(2, len(types)))):
            yield WrongInput(f"{key} = {value}", "config: wrong type", CODE, _put(key, value), COMMANDS)
        for value in out_of_range(schema):
            yield WrongInput(f"{key} = {value}", "config: out of range", CODE, _put(key, value), COMMANDS)
        near = near_choice(schema)
        if near is not None and not accepts(schema, near[0].strip('"')):
            yield WrongInput(f"{key} = {near[0]}", "config: bad choice", CODE, _put(key, near[0]), COMMANDS)
        example = str(next(iter(schema.get("examples", [""]))))
        bad = _BAD_TEXTS.get(example, ())
        for value in sorted(generator.sample(bad, min(3, len(bad))) if example in ("110GiB", "auto") else bad):
            yield WrongInput(f"{key} = {value}", "config: bad size or duration", CODE, _put(key, value), COMMANDS)


def name_cases() -> Iterator[WrongInput]:
    """Yield misspelled keys and tables, keys in the wrong table, keys of other tools, and keys of later releases."""
    for key in sorted(KEYS):
        yield _renamed(key)
    for table in sorted(TABLES.keys() - ARRAY_TABLES):
        yield _renamed_table(table)
    generator = random.Random(SEED)
    tables = sorted(TABLES)
    misplaced = set()  # keys of different tables may have the same last part
    for key in sorted(generator.sample(sorted(KEYS), 30)):
        leaf, home = key.rpartition(".")[2], key.rpartition(".")[0]
        there = [table for table in tables if table != home and f"{table}.{leaf}" not in KEYS]
        misplaced.add((leaf, generator.choice(there)))
    for leaf, table in sorted(misplaced):
        yield _in_other_table(leaf, table)
    for leaf in sorted(TRANSLATIONS)[::3]:  # test_other_tools.py tests all of them
        yield _of_other_tool(leaf)
    for key in sorted(PLANNED_KEYS):
        yield WrongInput(f"{key} (later release)", "config: other tool's key", CODE, _unknown(key), COMMANDS)


def _unknown(key: str, *parts: str) -> Any:
    def spoil(work: Workplace) -> Sequence[str]:
        work.config.put(key, "1")
        return CONFIG_NAME, work.config.line(key), f"unknown key `{numbered(key)}`", *parts

    return spoil


def _renamed(key: str) -> WrongInput:
    table, _, leaf = key.rpartition(".")
    wrong = misspelled(leaf)
    full = f"{table}.{wrong}" if table else wrong
    kind = "config: misspelled key"
    return WrongInput(f"{full} (for {leaf})", kind, CODE, _unknown(full, f"Did you mean {numbered(key)}?"), COMMANDS)


def _renamed_table(table: str) -> WrongInput:
    outer, _, leaf = table.rpartition(".")
    wrong = f"{outer}.{misspelled(leaf)}" if outer else misspelled(leaf)

    def spoil(work: Workplace) -> Sequence[str]:
        work.config.put(f"{wrong}.no_such_key", "1")
        return CONFIG_NAME, work.config.line(wrong), f"unknown table `{wrong}`", f"Did you mean {table}?"

    return WrongInput(f"[{wrong}]", "config: misspelled table", CODE, spoil, COMMANDS)


def _in_other_table(leaf: str, table: str) -> WrongInput:
    homes = full_keys_of_leaf(leaf)
    spoil = _unknown(f"{table}.{leaf}", homes[0])
    return WrongInput(f"{table}.{leaf} (of another table)", "config: key in a wrong table", CODE, spoil, COMMANDS)


def _of_other_tool(leaf: str) -> WrongInput:
    ours = TRANSLATIONS[leaf].config_key
    spoil = _unknown(leaf, *([ours] if ours else []))
    return WrongInput(f"{leaf} (another tool's)", "config: other tool's key", CODE, spoil, COMMANDS)


def missing_cases() -> Iterator[WrongInput]:
    """Yield one config for each required key, without this key."""
    for key in sorted(KEYS):
        if is_required(key) and key not in FREE_TABLES:
            yield _without(key)


def _without(key: str) -> WrongInput:
    table = key.rpartition(".")[0]

    def spoil(work: Workplace) -> Sequence[str]:
        work.config.drop(key)
        if not table or table not in ARRAY_TABLES:
            return CONFIG_NAME, f"`{key}` is missing"
        return CONFIG_NAME, work.config.line(table), f"`{numbered(key)}` is missing"

    return WrongInput(f"no {key}", "config: missing key", CODE, spoil, COMMANDS)


def cases() -> Iterator[WrongInput]:
    yield from value_cases()
    yield from name_cases()
    yield from missing_cases()
