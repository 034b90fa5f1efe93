"""Every config key has a description and a JSON Schema that accepts the same values as the loader.

The validator below supports only the keywords that this schema uses.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.base.table import Table
from megatrain.config import ConfigError, load_config, to_toml
from megatrain.config.keys import KEYS, alters, json_schema, leaf_schema, schema_key
from megatrain.config.schema import RunConfig
from megatrain.data.table import DataConfig
from megatrain.engine.table import TrainingConfig
from megatrain.models.table import ModelConfig

EXAMPLES = Path(__file__).parents[3] / "examples"
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
}
BASE = """
task = "sft"
output_dir = "out"
[model]
model_name_or_path = "org/model"
[[data.train]]
path = "chat.jsonl"
"""


def schema_violations(schema: dict[str, Any], value: Any, where: str = "") -> list[str]:
    """Return how a value violates the schema. Every keyword of the schema must be in `known`."""
    known = {"type", "enum", "const", "anyOf", "pattern", "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"}
    known |= {"multipleOf", "minLength", "minItems", "items", "properties", "required", "additionalProperties"}
    known |= {"propertyNames", "description", "default", "examples", "title", "$schema"}
    assert set(schema) <= known, set(schema) - known
    found = []
    is_flag = isinstance(value, bool)
    if "type" in schema and (not isinstance(value, TYPES[schema["type"]]) or (is_flag and schema["type"] != "boolean")):
        return [f"{where}: {value!r} is no {schema['type']}"]
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{where}: {value!r} is not in {schema['enum']}")
    if "const" in schema and value != schema["const"]:
        found.append(f"{where}: {value!r} is not {schema['const']!r}")
    if "anyOf" in schema and all(schema_violations(one, value, where) for one in schema["anyOf"]):
        found.append(f"{where}: {value!r} is none of {schema['anyOf']}")
    if "pattern" in schema and not re.search(schema["pattern"], value):
        found.append(f"{where}: {value!r} does not match")
    number = value if isinstance(value, int | float) and not is_flag else None
    for word, is_good in (
        ("minimum", lambda bound: number >= bound),
        ("exclusiveMinimum", lambda bound: number > bound),
        ("maximum", lambda bound: number <= bound),
        ("exclusiveMaximum", lambda bound: number < bound),
        ("multipleOf", lambda bound: number % bound == 0),
    ):
        if word in schema and number is not None and not is_good(schema[word]):
            found.append(f"{where}: {value} breaks {word} {schema[word]}")
    if len(value if isinstance(value, str | list) else "x") < schema.get("minLength", schema.get("minItems", 0)):
        found.append(f"{where}: too short")
    if isinstance(value, list):
        for index, item in enumerate(value):
            found += schema_violations(schema.get("items", {}), item, f"{where}.{index}")
    if isinstance(value, dict):
        found += [f"{where}: no {name}" for name in schema.get("required", ()) if name not in value]
        for name, item in value.items():
            found += schema_violations(schema.get("propertyNames", {}), name, f"{where}.{name}")
            inner = schema.get("properties", {}).get(name, schema.get("additionalProperties", {}))
            found += (
                [f"{where}.{name} is unknown"] if inner is False else schema_violations(inner, item, f"{where}.{name}")
            )
    return found


def is_valid(folder: Path, text: str) -> bool:
    """Return whether the loader accepts a config."""
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    try:
        load_config(path)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("name", ["03_dpo.toml", "quickstart.toml", "02_sft.toml", "01_tiny.toml"])
def test_examples_and_resolved_configs_match_the_schema(name: str) -> None:
    path = EXAMPLES / name
    assert schema_violations(json_schema(), tomllib.loads(path.read_text(encoding="utf-8"))) == []
    resolved = tomllib.loads(to_toml(load_config(path).config))
    assert schema_violations(json_schema(), resolved) == []


@pytest.mark.parametrize("key", sorted(KEYS))
def test_every_key_has_a_description_and_a_valid_default(key: str) -> None:
    schema = leaf_schema(key)
    assert schema["description"]
    if "default" in schema:
        assert schema_violations(schema, schema["default"]) == []
    assert json.loads(json.dumps(schema)) == schema


@pytest.mark.parametrize(
    "line",
    [
        "[tiers.ram]\nsize = 110",
        '[tiers.ram]\nsize = "110"',
        '[tiers.ram]\nsize = "11X"',
        '[checkpoint]\nsave_interval = "45"',
        "[checkpoint]\nsave_interval = 45",
        '[placement]\nweights = "disk"',
        "[placement]\nweights = []",
        '[optimizer]\nlearning_rate = "1e-5"',
        "[optimizer]\nlearning_rate = 0",
        '[optimizer]\noptim = "adam"',
        "[training]\nmax_steps = 1.5",
        "[training]\nnum_steps = 5",
        '[advanced]\nprefetch = "1"',
        "[profile]\ntrace_steps = [0]",
        '[[tiers.nvme]]\nsize = "1GiB"',
        '[[tiers.nvme]]\npath = "x"\nrate = "2GB"',
        "[export]\nmax_shard_size = 5",
    ],
)
def test_schema_refuses_configs_that_the_loader_refuses(tmp_path: Path, line: str) -> None:
    assert not is_valid(tmp_path, BASE + line)
    assert schema_violations(json_schema(), tomllib.loads(BASE + line))


@pytest.mark.parametrize(
    "line",
    [
        '[tiers.ram]\nsize = "110 GiB"\npinned = "90%"',
        '[checkpoint]\nsave_interval = "1h30min"\nresume_from_checkpoint = false',
        '[placement]\nweights = "ram"\noptimizer = ["ram"]',
        '[advanced]\nprefetch = "unlimited"\nfile_size = "16MiB"',
        "[advanced]\nprefetch = 0",
        '[[tiers.nvme]]\npath = "x"\nrate = "2.0GB/s"\nmax_written = "200TB"',
        "[optimizer]\nlr_scheduler_kwargs = { num_cycles = 0.4 }",
        '[[optimizer.groups]]\nparams = ["a"]\nweight_decay = 0',
        "seed = 1\n",
    ],
)
def test_schema_accepts_configs_that_the_loader_accepts(tmp_path: Path, line: str) -> None:
    text = line + BASE if line.startswith("seed") else BASE + line
    assert is_valid(tmp_path, text)
    assert schema_violations(json_schema(), tomllib.loads(text)) == []


@given(st.from_regex(r"[0-9_]{1,4}(\.[0-9]{1,2})? ?[kMGTi]{0,2}[Bb]?", fullmatch=True))
def test_schema_and_parser_accept_the_same_sizes(text: str) -> None:
    from tiered import parse_size

    schema = leaf_schema("export.max_shard_size")
    try:
        parse_size(text)
    except ValueError:
        is_size = False
    else:
        is_size = True
    assert is_size == (not schema_violations(schema, text)), text


@pytest.mark.parametrize("key", sorted(KEYS))
def test_every_key_declares_whether_it_alters_results(key: str) -> None:
    assert alters(key) in ("yes", "by contents", "no")


@pytest.mark.parametrize("table", [RunConfig, ModelConfig, DataConfig, TrainingConfig])
def test_mixed_tables_do_not_declare_that_all_keys_alter_results(table: type[Table]) -> None:
    assert not table.model_config.get("json_schema_extra")


def test_keys_in_free_form_tables_map_to_the_table() -> None:
    assert schema_key("data.train.0.columns.prompt") == "data.train.columns"
    assert alters("data.train.0.columns.prompt") == "by contents"
    assert alters("optimizer.lr_scheduler_kwargs.num_cycles") == "yes"
