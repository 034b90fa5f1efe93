"""A translation on its way: our keys with their values, and what became of each of theirs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatrain.config.combinations import find_bad_combinations
from megatrain.config.explain import explain_error
from megatrain.config.json_schema import leaf_schema
from megatrain.config.keys import ARRAY_TABLES, FREE_TABLES, dotted, known_keys, plain
from megatrain.config.schema import RunConfig
from megatrain.translate.source import Source, TranslationError

#: Values with which a key that we know nothing of switches nothing on.
_OFF: tuple[Any, ...] = (None, False, "", [], {}, "no", "none", "auto")


@dataclass(frozen=True, slots=True)
class Entry:
    """One value of ours.

    Attributes:
        value: as TOML has it.
        theirs: their key, "" where they have none.
        note: what a person should know of it.
        is_path: a path that is relative to the folder in which the tool was started.
        to_fill_in: the value is an example, theirs does not say it.
    """

    value: Any
    theirs: str = ""
    note: str = ""
    is_path: bool = False
    to_fill_in: bool = False


@dataclass(frozen=True, slots=True)
class Left:
    """One of their keys that is not in the translation, and why."""

    theirs: str
    value: Any
    why: str


@dataclass
class Draft:
    """What is known so far.

    Attributes:
        source: what is translated.
        base: the folder that its paths are relative to.
        entries: dotted key of ours, array tables with numbers -> value.
        lost: keys of theirs that have no equivalent.
        unneeded: those that nothing is needed for here.
    """

    source: Source
    base: Path
    entries: dict[str, Entry] = field(default_factory=dict)
    lost: list[Left] = field(default_factory=list)
    unneeded: list[Left] = field(default_factory=list)

    def put(self, ours: str, value: Any, theirs: str = "", note: str = "", *, is_path: bool = False) -> None:
        """Set one of our keys."""
        self.entries[ours] = Entry(_number(value, ours), theirs, note, is_path)

    def put_path(self, ours: str, value: Any, theirs: str = "", note: str = "") -> None:
        """Set a key that is a path, or the name of a model or data set on the hub: what exists here is a path."""
        text = str(value)
        is_path = text.startswith((".", "/", "~")) or ours == "output_dir" or exists(self.base / text)
        self.put(ours, text, theirs, note, is_path=is_path)

    def fill_in(self, ours: str, value: Any, note: str) -> None:
        """Set a key to an example that a person has to replace."""
        self.entries[ours] = Entry(value, "", note, False, True)

    def lose(self, theirs: str, why: str, value: Any = None) -> None:
        """Note that one of their keys has no equivalent."""
        self.lost.append(Left(theirs, value, why))

    def drop(self, theirs: str, why: str, value: Any = None) -> None:
        """Note that nothing is needed here for one of their keys."""
        self.unneeded.append(Left(theirs, value, why))

    def default(self, values: Mapping[str, Any]) -> None:
        """Set what the tool does where its file says nothing, and what would be different here."""
        for ours, value in values.items():
            if ours not in self.entries and plain_key(ours) in known_keys():
                default = leaf_schema(plain_key(ours)).get("default")
                if default != value:
                    self.put(ours, value, note=f"{self.source.title}'s default")

    def refuse(self, problem: str, remedy: str = "") -> TranslationError:
        """Return the error of a file that asks for what is not done here."""
        return TranslationError(self.source.path, problem, remedy)


Rule = Callable[[Draft, str, Any], None]


def apply(draft: Draft, rules: Mapping[str, Rule], values: Mapping[str, Any], prefix: str = "") -> None:
    """Let the rule of each key decide; a key without one that is on has no equivalent."""
    for name, value in values.items():
        rule = rules.get(name)
        if value is None:
            continue
        if rule is not None:
            rule(draft, prefix + name, value)
        elif value not in _OFF:
            draft.lose(prefix + name, "nothing like it here", value)


def same(ours: str, note: str = "") -> Rule:
    """Return the rule of a key with the same values."""
    return lambda draft, theirs, value: draft.put(ours, value, theirs, note)


def path(ours: str) -> Rule:
    """Return the rule of a key that names a folder, a file, or something on the hub."""
    return lambda draft, theirs, value: draft.put_path(ours, value, theirs)


def choice(ours: str, values: Mapping[Any, Any], otherwise: str) -> Rule:
    """Return the rule of a key whose values have other names here; ``otherwise`` says why another one is lost."""

    def rule(draft: Draft, theirs: str, value: Any) -> None:
        if isinstance(value, str | bool | int) and value in values:
            if values[value] is not None:
                draft.put(ours, values[value], theirs)
        else:
            draft.lose(theirs, otherwise, value)

    return rule


def unneeded(why: str) -> Rule:
    """Return the rule of a key that nothing is needed for here."""
    return lambda draft, theirs, value: draft.drop(theirs, why, value)


def lost(why: str) -> Rule:
    """Return the rule of a key that has no equivalent; one that is off is not missed."""

    def rule(draft: Draft, theirs: str, value: Any) -> None:
        if value not in _OFF:
            draft.lose(theirs, why, value)

    return rule


def ignored(draft: Draft, theirs: str, value: Any) -> None:
    """Be the rule of a key that another rule has looked at."""


def settle(draft: Draft) -> RunConfig:
    """Take out what this release cannot do until the rest is a valid config; return it.

    Raises:
        TranslationError: something that a config needs cannot be had.
    """
    for key in [key for key in draft.entries if schema_key(key) not in known_keys()]:
        _take_out(draft, key, f"this release has no {plain_key(key)}")
    while True:
        problems = _problems(draft)
        if isinstance(problems, RunConfig):
            return problems
        found = False
        for key, why in problems:
            for entry in _entries_behind(draft, key):
                found = True
                _take_out(draft, entry, why)
        if not found:
            raise draft.refuse("no valid config comes of it: " + "; ".join(why for _, why in problems))


def _problems(draft: Draft) -> RunConfig | list[tuple[str, str]]:
    values = nested({key: entry.value for key, entry in draft.entries.items()})
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        details = error.errors(include_url=False)
        found = [(dotted(detail["loc"]), explain_error(detail, values)) for detail in details]
        return [(problem.key if problem else key, str(problem or key)) for key, problem in found]
    bad = [problem for problem in find_bad_combinations(config) if problem.key != "output_dir"]
    return [(problem.key, f"{problem.message}. {problem.remedy}".rstrip(". ")) for problem in bad] or config


def _entries_behind(draft: Draft, key: str) -> list[str]:
    """Return the entries that a problem is about: of that key, inside of it, or around it."""
    if key == "optimizer.lr_scheduler_kwargs" and key not in draft.entries:
        key = "optimizer.lr_scheduler_type"
    while key:
        inside = [name for name in draft.entries if name == key or name.startswith(f"{key}.")]
        optional = [name for name in inside if not draft.entries[name].to_fill_in]
        if optional:
            return optional if len(optional) == 1 or inside == [key] else []
        key = key.rpartition(".")[0]
    return []


def _take_out(draft: Draft, key: str, why: str) -> None:
    entry = draft.entries.pop(key)
    if entry.theirs:
        draft.lose(entry.theirs, why, entry.value)


def exists(path: Path) -> bool:
    """Return whether something is there; a text that cannot be a path is nothing."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def is_file(path: Path) -> bool:
    """Return whether a file is there; a text that cannot be a path is none."""
    return exists(path) and path.is_file()


def mapping(value: Any) -> Mapping[str, Any]:
    """Return a value that should hold names with values, or none of them where it is something else."""
    return value if isinstance(value, Mapping) else {}


def listed(value: Any) -> list[Any]:
    """Return a value that may be one or several as a list."""
    return value if isinstance(value, list) else [] if value is None else [value]


def plain_key(key: str) -> str:
    """Return a key without the numbers of array tables."""
    return plain(tuple(int(part) if part.isdecimal() else part for part in key.split(".")))


def schema_key(key: str) -> str:
    """Return what the schema calls a key: without numbers, and inside a table of free names that table."""
    name = plain_key(key)
    return next((table for table in FREE_TABLES if name.startswith(f"{table}.")), name)


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return tables of tables and lists from dotted keys; those of one list must come in order."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        at: Any = tree
        parts = key.split(".")
        for index, part in enumerate(parts[:-1]):
            if part.isdecimal():
                while len(at) <= int(part):
                    at.append({})
                at = at[int(part)]
            else:
                at = at.setdefault(part, [] if ".".join(parts[: index + 1]) in ARRAY_TABLES else {})
        at[parts[-1]] = value
    return tree


def relative(entry: Entry, base: Path, folder: Path) -> Any:
    """Return an entry's value as it is written in a config in ``folder``."""
    if not entry.is_path or Path(entry.value).expanduser().is_absolute():
        return entry.value
    return os.path.relpath(base / entry.value, folder)


def _number(value: Any, ours: str) -> Any:
    """Return text that YAML did not take for a number, such as 1e-5, as one where a number is wanted."""
    name = plain_key(ours)
    if isinstance(value, str) and name in known_keys() and leaf_schema(name).get("type") in ("number", "integer"):
        try:
            number = float(value)
        except ValueError:
            return value
        if not math.isfinite(number):
            return value
        return int(number) if leaf_schema(name)["type"] == "integer" and number.is_integer() else number
    return value
