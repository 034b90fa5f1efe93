"""The kinds of values that tables of the config hold: sizes, durations, paths, lists, and the table itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from megatrain.config.durations import exact_duration, parse_interval
from megatrain.config.sizes import Size, exact_size, parse_rate
from tiered.units import parse_size

TierName = Literal["gpu", "ram", "nvme"]
AUTO_SIZE = Size("auto")


def as_tuple(value: object) -> object:
    """Return a list of TOML as a tuple, anything else as it is."""
    return tuple(value) if isinstance(value, list) else value


def _as_path(value: object) -> object:
    return Path(value) if isinstance(value, str) and value else value


def _as_placement(value: object) -> object:
    """Accept "auto", one tier, or several in order of preference."""
    if isinstance(value, str) and value != "auto":
        return (value,)
    return as_tuple(value)


def _as_source(value: object) -> object:
    """Accept true and false, as other tools write "auto" and "no"."""
    return {True: "auto", False: "no"}[value] if isinstance(value, bool) else value


def _as_reports(value: object) -> object:
    """Accept one name, several, or "none"."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple):
        return value
    return tuple(dict.fromkeys(name for name in names if name != "none"))


def _plain_size(value: object) -> object:
    if isinstance(value, str):
        return parse_size(value)
    return Size.parse(value).nbytes  # a bare number: refused with the advice to add a unit


def _prefetch(value: object) -> object:
    """Return None for "unlimited", "auto", or bytes."""
    if value in ("auto", "unlimited") or (isinstance(value, int) and value == 0 and not isinstance(value, bool)):
        return value
    if isinstance(value, str) and value.strip() == "0":
        return 0
    return _plain_size(value)


def _graph_count(value: object) -> object:
    if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise ValueError(f'{value!r} is no number of layers. Write "auto" or a whole number at least 0')
    return value


def _copy_rule(value: object) -> object:
    if isinstance(value, bool) or value == "last" or (isinstance(value, int) and value >= 1):
        return value
    raise ValueError(
        f'{value!r} is no rule for copies. Write true (every checkpoint), 5 (every fifth one), "last" or false'
    )


def _packing(value: object) -> object:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        raise ValueError(f'"{value}" is text. Write it without quotes: {value.lower()}')
    if value != "concat" and not isinstance(value, bool):
        raise ValueError(f'{value!r} is no way to pack. Write true, false or "concat"')
    return value


StringTuple = Annotated[tuple[str, ...], BeforeValidator(as_tuple)]
ConfigPath = Annotated[Path, BeforeValidator(_as_path), PlainSerializer(str)]
PlainSize = Annotated[int, BeforeValidator(_plain_size), PlainSerializer(exact_size)]
Rate = Annotated[float, BeforeValidator(parse_rate), PlainSerializer(lambda rate: exact_size(round(rate)) + "/s")]
Duration = Annotated[float, BeforeValidator(parse_interval), PlainSerializer(exact_duration)]
Preference = Annotated[
    Literal["auto"] | Annotated[tuple[TierName, ...], Field(min_length=1)], BeforeValidator(_as_placement)
]
PrefetchSize = Annotated[
    Literal["auto", "unlimited"] | Annotated[int, Field(ge=0)],
    BeforeValidator(_prefetch),
    PlainSerializer(lambda value: value if isinstance(value, str) else exact_size(value) if value else "0"),
]
GraphCount = Annotated[Literal["auto"] | Annotated[int, Field(ge=0)], BeforeValidator(_graph_count)]
#: Of which checkpoints there are whole copies: all or none, each so many-th, or the last of a run.
CopyRule = Annotated[bool | Annotated[int, Field(ge=1)] | Literal["last"], BeforeValidator(_copy_rule)]
Packing = Annotated[bool | Literal["concat"], BeforeValidator(_packing)]
ReportTargets = Annotated[tuple[Literal["jsonl", "tensorboard", "wandb"], ...], BeforeValidator(_as_reports)]
#: "auto", "none" or a path.
CacheFolder = Annotated[str, Field(min_length=1, json_schema_extra={"format": "path"})]
#: "auto", "no" or a path.
ResumeSource = Annotated[str, BeforeValidator(_as_source), Field(min_length=1)]


class Table(BaseModel):
    """Base of every table: immutable, unknown keys refused, no silent conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
