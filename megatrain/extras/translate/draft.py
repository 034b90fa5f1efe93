"""State of a translation: the config keys set so far, and the tool's keys that are lost or not needed."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatrain.base.other_tools import KEYS, Row, Tool
from megatrain.config.keys import KEYS as OUR_KEYS
from megatrain.config.keys import leaf_schema, parse_path, plain
from megatrain.extras.translate.read import Source, TranslationError, exists

NO_EQUIVALENT = "no key here does this"
#: Values that disable an unknown key, so that it can be ignored.
_OFF_VALUES: tuple[Any, ...] = (None, False, "", [], {}, "no", "none", "auto")


@dataclass(frozen=True, slots=True)
class TranslatedValue:
    """The value of one config key.

    Attributes:
        tool_key: Key of the tool that sets it, or "".
        note: Comment in the written config.
        is_path: Whether the value is a path relative to the working directory of the other tool.
        is_placeholder: Whether the value is an example that the user must replace, because the file has no value.
    """

    value: Any
    tool_key: str = ""
    note: str = ""
    is_path: bool = False
    is_placeholder: bool = False


@dataclass(frozen=True, slots=True)
class OmittedKey:
    """A key of the tool that the translation omits, with the reason."""

    tool_key: str
    value: Any
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {"key": self.tool_key, "value": self.value, "why": self.reason}


@dataclass
class Translation:
    """State of a translation. Rules fill it, and :func:`translate_file` finally makes it valid.

    Attributes:
        source: File or command line to translate.
        base: Working directory of the other tool, from which relative paths in the source are resolved.
        entries: Values by dotted config key; array tables have an index in the key.
        lost_keys: Keys of the tool that have no equivalent.
        unneeded_keys: Keys of the tool that are not needed.
        answered: Paths of the tool's values that a rule or a table row has read.
        toml: Text of the translated, valid config; "" until the translation ends.
    """

    source: Source
    base: Path
    entries: dict[str, TranslatedValue] = field(default_factory=dict)
    lost_keys: list[OmittedKey] = field(default_factory=list)
    unneeded_keys: list[OmittedKey] = field(default_factory=list)
    answered: set[str] = field(default_factory=set)
    toml: str = ""

    @property
    def tool(self) -> Tool:
        return self.source.tool

    @property
    def placeholders(self) -> Mapping[str, TranslatedValue]:
        """Entries whose values are examples that the user must replace, by config key."""
        return {key: entry for key, entry in self.entries.items() if entry.is_placeholder}

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "tool": self.tool,
            "toml": self.toml,
            "values": {
                key: {"value": entry.value, "from": entry.tool_key, "note": entry.note}
                for key, entry in self.entries.items()
            },
            "no_equivalent": [omitted.to_json() for omitted in self.lost_keys],
            "not_needed": [omitted.to_json() for omitted in self.unneeded_keys],
            "to_fill_in": list(self.placeholders),
        }

    # Values of the tool's file

    def get(self, path: str, default: Any = None) -> Any:
        """Return the tool's value at a dotted path, or the default. Mark it as answered unless it is a table."""
        value = self.peek(path)
        if not _contains_tables(value):
            self.answered.add(path)
        return default if value is None else value

    def peek(self, path: str) -> Any:
        """Return the tool's value at a dotted path, or None, without marking it as answered."""
        value: Any = self.source.values
        for part in path.split("."):
            value = as_mapping(value).get(part)
        return value

    def section(self, path: str) -> Section:
        """Return the tool's table at a dotted path. It is empty if the value is not a table, which is then lost."""
        return Section(self, path, as_mapping(self.peek(path)))

    def rows(self, conversion: str) -> dict[str, Row]:
        """Return the table rows with this kind of conversion, by the tool's key."""
        return {tool_key: row for tool_key, row in KEYS[self.tool].items() if row.conversion == conversion}

    # Config keys

    def put(self, config_key: str, value: Any, tool_key: str = "", note: str = "", *, is_path: bool = False) -> None:
        """Set a config key."""
        self.entries[config_key] = TranslatedValue(as_number(value, config_key), tool_key, note, is_path)

    def put_path(self, config_key: str, value: Any, tool_key: str = "", note: str = "") -> None:
        """Set a key to a path or a hub name. The text is a path if it looks like one or exists on this machine."""
        text = str(value)
        is_path = text.startswith((".", "/", "~")) or config_key == "output_dir" or exists(self.base / text)
        self.put(config_key, text, tool_key, note, is_path=is_path)

    def fill_in(self, config_key: str, value: Any, note: str) -> None:
        """Set a key to an example that the user must replace."""
        self.entries[config_key] = TranslatedValue(value, "", note, False, True)

    def fill_in_model(self) -> None:
        """Set the model to an example that the user must replace, unless it is already set."""
        if "model.model_name_or_path" not in self.entries:
            self.fill_in("model.model_name_or_path", "path/to/model", "a Hugging Face folder")

    def fill_in_data(self) -> None:
        """Set the training data to an example that the user must replace."""
        self.fill_in("data.train.0.path", "data/train.jsonl", "a file, glob or folder, or the hub name of a data set")

    def default(self, values: Mapping[str, Any]) -> None:
        """Set each unset key to the tool's default, if this differs from the config's default."""
        for config_key, value in values.items():
            if config_key not in self.entries and leaf_schema(config_key).get("default") != value:
                self.put(config_key, value, note=f"{self.source.title}'s default")

    # Keys that are left out

    def omit(self, tool_key: str, reason: str, value: Any = None) -> None:
        """List a key of the tool as lost, because it has no equivalent."""
        self.lost_keys.append(OmittedKey(tool_key, value, reason))

    def omit_if_on(self, tool_key: str, reason: str, value: Any) -> None:
        """List a key as lost, unless its value disables it."""
        if value not in _OFF_VALUES:
            self.omit(tool_key, reason, value)

    def omit_unanswered(self) -> None:
        """List as lost all values that no rule has read. Reading one key of a table does not mark its other keys."""
        read_paths = self.answered | {omitted.tool_key for omitted in (*self.lost_keys, *self.unneeded_keys)}
        for path, value in list(_leaves(self.source.values, "", read_paths)):
            if value is not None and value != "auto":
                self.omit(path, NO_EQUIVALENT, value)

    def omit_auto(self, reason: str) -> None:
        """List as lost all values "auto", except in tables that are not needed."""
        for path, value in list(_leaves(self.source.values, "", self.rows("unneeded"))):
            if value == "auto":
                self.omit(path, reason, value)

    def drop(self, tool_key: str, reason: str, value: Any = None) -> None:
        """List a key of the tool as not needed here."""
        self.unneeded_keys.append(OmittedKey(tool_key, value, reason))

    def refuse(self, problem: str, remedy: str = "") -> TranslationError:
        """Return the error for an unsupported kind of training."""
        return TranslationError(self.source.path, problem, remedy)


@dataclass(frozen=True, slots=True)
class Section:
    """A table in the tool's file that records which keys a rule reads.

    Attributes:
        path: Path of the table, such as ``datasets[0]``.
        paths: Paths of values outside ``path``, by name.
    """

    draft: Translation
    path: str
    values: Mapping[str, Any]
    paths: Mapping[str, str] = field(default_factory=dict)

    def path_of(self, name: str) -> str:
        """Return the path of a value in the tool's file."""
        return self.paths.get(name, f"{self.path}.{name}")

    def get(self, name: str) -> Any:
        """Return a value. Mark it as answered unless it is a table."""
        value = self.values.get(name)
        if not _contains_tables(value):
            self.draft.answered.add(self.path_of(name))
        return value

    def section(self, name: str) -> Section:
        """Return a nested table. If the value is not a table, ``omit_unanswered`` lists it as lost."""
        return Section(self.draft, f"{self.path}.{name}", as_mapping(self.values.get(name)))


def _contains_tables(value: Any) -> bool:
    """Return whether a value is or contains a table, whose keys are answered individually."""
    return isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(item, Mapping) for item in value))


def _leaves(value: Any, path: str, skipped: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each leaf outside of ``skipped``, except in tables with ``enabled: false``."""
    if path in skipped:
        return
    if not _contains_tables(value):
        yield path, value
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]", skipped)
    elif value.get("enabled") is not False:
        for name, item in value.items():
            yield from _leaves(item, f"{path}.{name}" if path else name, skipped)


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Return the value if it is a mapping, otherwise an empty mapping."""
    return value if isinstance(value, Mapping) else {}


def as_list(value: Any) -> list[Any]:
    """Return a list unchanged, None as an empty list, and any other value as a list with one item."""
    return value if isinstance(value, list) else [] if value is None else [value]


def plain_key(key: str) -> str:
    """Return a key without the indices of array tables."""
    return plain(parse_path(key))


def as_number(value: Any, config_key: str) -> Any:
    """Convert text to a number if the config key requires a number, because YAML parses 1e-5 as text."""
    name = plain_key(config_key)
    if isinstance(value, str) and name in OUR_KEYS and leaf_schema(name).get("type") in ("number", "integer"):
        try:
            number = float(value)
        except ValueError:
            return value
        if not math.isfinite(number):
            return value
        return int(number) if leaf_schema(name)["type"] == "integer" and number.is_integer() else number
    return value
