"""The keys that exist, taken from the schema, and the nearest one to a key that does not."""

from __future__ import annotations

import difflib
import typing
from functools import cache
from types import UnionType
from typing import Any

from pydantic import BaseModel

from megatrain.config.schema import RunConfig
from megatrain.translate.names import ALWAYS_ON, NOT_YET, TRANSLATIONS

if typing.TYPE_CHECKING:
    from collections.abc import Iterator

#: Tables whose keys the user chooses; their contents are checked by the schema.
FREE_TABLES = frozenset({"data.eval.columns", "data.train.columns", "optimizer.lr_scheduler_kwargs"})
#: Array tables; a number after their name is the index of a table.
ARRAY_TABLES = frozenset({"data.eval", "data.train", "optimizer.groups", "tiers.nvme"})
Path = tuple[str | int, ...]
_TOP = "at the top of the file, before the first table"


def nested_model(annotation: Any) -> type[BaseModel] | None:
    """Return the table class inside an annotation such as ``tuple[DatasetConfig, ...]``, if there is one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (tuple, typing.Annotated, typing.Union, UnionType):
        for argument in typing.get_args(annotation):
            model = nested_model(argument)
            if model is not None:
                return model
    return None


def _walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, bool]]:
    for name, field in model.model_fields.items():
        nested = nested_model(field.annotation)
        yield prefix + name, nested is not None
        if nested is not None:
            yield from _walk(nested, f"{prefix}{name}.")


@cache
def known_keys() -> frozenset[str]:
    """Return every dotted key that holds a value, without the numbers of array tables."""
    return frozenset(name for name, is_table in _walk(RunConfig, "") if not is_table)


@cache
def known_tables() -> frozenset[str]:
    """Return every dotted name of a table, without the numbers of array tables."""
    return frozenset(name for name, is_table in _walk(RunConfig, "") if is_table)


def dotted(path: Path) -> str:
    """Return a path as users write it: ``("data", "train", 0, "path")`` -> ``"data.train.0.path"``."""
    return ".".join(str(part) for part in path)


def plain(path: Path) -> str:
    """Return a path without the numbers of array tables, as :func:`known_keys` has it."""
    return ".".join(part for part in path if isinstance(part, str))


def full_keys_of_leaf(leaf: str) -> list[str]:
    """Return the dotted keys whose last part is ``leaf``, sorted; a key outside array tables hides those inside.

    Keys of ``[[data.train]]`` hide those of ``[[data.eval]]``, which has them all.
    """
    found = {key for key in known_keys() if key.rsplit(".", 1)[-1] == leaf}
    keys = sorted(found - {key.replace("data.train.", "data.eval.") for key in found if key.startswith("data.train.")})
    outside = [key for key in keys if key.rpartition(".")[0] not in ARRAY_TABLES]
    return outside if len(outside) == 1 else keys


def has_advice(path: Path) -> bool:
    """Return whether an unknown key is another tool's, or ours in another table."""
    leaf = str(path[-1])
    return plain(path) in NOT_YET or leaf in TRANSLATIONS or bool(full_keys_of_leaf(leaf))


def advice_for_unknown(path: Path) -> str:
    """Return what to write instead of a key that does not exist, or ""."""
    name, leaf = plain(path), str(path[-1])
    if name in NOT_YET:
        return "This release does not have it yet; leave it out"
    homes = full_keys_of_leaf(leaf)
    if len(homes) == 1:
        table, _, key = homes[0].rpartition(".")
        if leaf in TRANSLATIONS and TRANSLATIONS[leaf].ours != homes[0]:
            return f"Did you mean {homes[0]}? {TRANSLATIONS[leaf].advice()}"
        place = f"in [[{table}]]" if table in ARRAY_TABLES else f"in [{table}]"
        return f"`{key}` belongs {place if table else _TOP}: write {homes[0]}"
    if leaf in TRANSLATIONS:
        return TRANSLATIONS[leaf].advice()
    if homes:
        return "Did you mean " + " or ".join(homes) + "?"
    if leaf in ALWAYS_ON:
        return f"It is always on here ({ALWAYS_ON[leaf]}); leave it out"
    near = _nearest(path)
    return f"Did you mean {near}?" if near else ""


def advice_without_match(path: Path) -> str:
    """Return what to do about a key that is like none that is known: which ones may stand in its place."""
    table = plain(path[:-1])
    inside = sorted(key for key in known_keys() | known_tables() if key.rpartition(".")[0] == table)
    where = f"[{table}] has" if table else "The top of the file has"
    names = ", ".join(key.rpartition(".")[2] for key in inside)
    return f"Leave it out. {where} {names}" if inside else "Leave it out"


def _nearest(path: Path) -> str:
    """Return the known key or table that looks most like an unknown one: in the same table first."""
    table, leaf = plain(path[:-1]), str(path[-1])
    everything = known_keys() | known_tables()
    same_table = {key.rsplit(".", 1)[-1]: key for key in everything if key.rpartition(".")[0] == table}
    found = difflib.get_close_matches(leaf, sorted(same_table), n=1, cutoff=0.6)
    if found:
        return dotted((*path[:-1], found[0]))
    leaves = {key.rsplit(".", 1)[-1]: key for key in sorted(known_keys())}
    found = difflib.get_close_matches(leaf, sorted(leaves), n=1, cutoff=0.75)
    return leaves[found[0]] if found else ""
