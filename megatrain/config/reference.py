"""Descriptions of keys, for ``config explain`` and ``docs/config.md``: values, default, effect and other names.

``python -m megatrain.config.reference > docs/config.md`` writes the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatrain.base.errors import ConfigError, Problem
from megatrain.base.other_tools import ACCEPTED_KEYS, TRANSFORMERS_4, TRANSLATIONS
from megatrain.base.toml import format_value
from megatrain.config.keys import (
    KEYS,
    TABLES,
    allowed_values,
    alters,
    full_keys_of_leaf,
    header,
    is_required,
    leaf_schema,
    parse_path,
    plain,
    schema_key,
)
from megatrain.config.unknown import advice_for_unknown

_INTRODUCTION = """\
# Config file

Generated from the schema by `python -m megatrain.config.reference > docs/config.md`; do not edit by hand.

The file is TOML. Later values win: defaults < CONFIG < each `-c FILE` < `--set KEY=VALUE`. Tables are merged, arrays
are replaced. In `--set`, the last part of a key is enough if it is unique (`--set learning_rate=2e-5`); items of a
list have numbers (`--set data.train.0.max_samples=100`). Paths in a file are relative to that file, and paths in
`--set` to the current directory. Sizes need a unit: `"120GiB"` (2^30) or `"120GB"` (10^9); some keys also accept a
share such as `"90%"`. Durations need units too: `"45min"`, `"30s"`, `"1h30min"`. All problems are reported together,
each with its line, and the exit code is 2. `output_dir/config.resolved.toml` contains all defaults and reproduces the
run.
"""


@dataclass(frozen=True, slots=True)
class KeyDescription:
    """Description of one key for users.

    Attributes:
        values: Allowed values, as text.
        default: Default as TOML, or the reason why the key has none.
        alters: Effect of a different value on results: "yes", "no" or "by contents". With "by contents", results change
            only if the contents of the model or data change.
        other_names: (tool, name in this tool, note) for each name in another tool.
        example: Lines of TOML.
    """

    key: str
    meaning: str
    values: str
    default: str
    alters: str
    other_names: tuple[tuple[str, str, str], ...]
    example: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the description as JSON values."""
        names = [{"tool": tool, "name": name, "note": note} for tool, name, note in self.other_names]
        return {
            "key": self.key,
            "meaning": self.meaning,
            "values": self.values,
            "default": self.default,
            "alters_results": self.alters,
            "other_names": names,
            "schema": leaf_schema(self.key),
        }


#: Keys of other tools that quantize a model while loading it.
_QUANTIZED = frozenset(
    {"load_in_4bit", "load_in_8bit", "quantization_bit", "quantization_method", "bnb_4bit_quant_type"}
)
_QUANTIZED_FOLDERS = (
    "name one of bitsandbytes' nf4, int4, fp8 or mxfp4 in model_name_or_path, and write [lora]. Nothing else is needed"
)


def find_keys(name: str) -> tuple[list[str], str]:
    """Return the keys that match a name, and a note about its meaning in another tool, or "".

    Args:
        name: Dotted key, last part of a key, table, or name of a key in another tool.

    Raises:
        ConfigError: No key has this name.
    """
    key = schema_key(name.strip().strip("[]"))
    if key in KEYS:
        return [key], ""
    if key in TABLES:
        return [known_key for known_key in KEYS if known_key.startswith(f"{key}.")], ""
    leaf = key.rpartition(".")[2]
    full_keys = sorted(full_key for full_key in KEYS if full_key.rpartition(".")[2] == leaf)
    if full_keys and leaf == key:
        preferred = full_keys_of_leaf(leaf)
        return preferred if len(preferred) == 1 else full_keys, ""
    if leaf in ("wandb", "tensorboard"):
        return ["logging.report_to"], f'`{leaf}` is a value: write report_to = ["jsonl", "{leaf}"] in [logging]'
    if leaf in TRANSLATIONS and (config_key := TRANSLATIONS[leaf].config_key):
        return find_keys(config_key)[0], TRANSLATIONS[leaf].advice()
    if leaf in ACCEPTED_KEYS:
        return [ACCEPTED_KEYS[leaf]], f"`{leaf}` is the name in {TRANSFORMERS_4}; here: {ACCEPTED_KEYS[leaf]}"
    if leaf in _QUANTIZED:
        note = f"`{leaf}`: QLoRA is [lora] with a folder that is already quantized: {_QUANTIZED_FOLDERS}"
        return ["model.model_name_or_path", "lora.r"], note
    advice = advice_for_unknown(tuple(name.split(".")))
    raise ConfigError("the config", [Problem(name, f"there is no key `{name}`", advice or "All keys: config schema")])


def describe_key(key: str) -> KeyDescription:
    """Return the description of one of :data:`megatrain.config.keys.KEYS`."""
    schema = KEYS[key]
    return KeyDescription(
        key=key,
        meaning=schema["description"],
        values=allowed_values(schema),
        default=_default(key, "see above"),
        alters=alters(key),
        other_names=tuple(_other_names(key)),
        example=_example(key),
    )


def _default(key: str, stated_default: str) -> str:
    """Return the default of a key as TOML, or the reason why it has none.

    Args:
        stated_default: Text to return for a key whose description already states the default.
    """
    schema = KEYS[key]
    if "default" in schema:
        return format_value(schema["default"])
    if "Default:" in schema["description"]:
        return stated_default
    return "required" if is_required(key) else "not set"


def _other_names(key: str) -> Iterator[tuple[str, str, str]]:
    if "x-same-name" in KEYS[key]:
        yield KEYS[key]["x-same-name"], key.rpartition(".")[2], "the same name"
    for old_name, config_key in ACCEPTED_KEYS.items():
        if config_key == key:
            yield TRANSFORMERS_4, old_name, "accepted"
    for name, translation in TRANSLATIONS.items():
        if translation.config_key and plain(parse_path(translation.config_key)) == key:
            yield translation.tool, name, translation.note


def _example(key: str) -> tuple[str, ...]:
    schema, (table, _, leaf) = KEYS[key], key.rpartition(".")
    value = schema.get("default")
    if value in (None, "auto", [], {}):
        kinds = [schema, *schema.get("anyOf", [])]
        value = next((example for kind in kinds for example in kind.get("examples", ()) if example != value), value)
    if value in (None, [], {}):
        return ()
    return (*((header(table),) if table else ()), f"{leaf} = {format_value(value)}")


def to_markdown() -> str:
    """Return the reference of all keys as Markdown."""
    parts = [_INTRODUCTION]
    for table in ("", *TABLES):
        rows = [_row(key) for key in KEYS if key.rpartition(".")[0] == table]
        title = f"`{header(table)}`" if table else "Top of the file"
        if rows:
            parts += ["", f"## {title}", "", "| key | values | default | meaning |", "|---|---|---|---|", *rows]
    return "\n".join(parts)


def _row(key: str) -> str:
    cells = (allowed_values(KEYS[key]), _default(key, "see meaning"), KEYS[key]["description"])
    values, default, meaning = (text.replace("|", "\\|").replace("<", "&lt;") for text in cells)
    values = re.sub(r'"[^"]*"', r"`\g<0>`", values)
    default_text = f"`{default}`" if "default" in KEYS[key] else default
    return f"| `{key.rpartition('.')[2]}` | {values} | {default_text} | {meaning} |"


if __name__ == "__main__":
    print(to_markdown())
