"""Parsing and formatting of sizes, rates and durations in a config, and their JSON Schema patterns.

A size is a number of bytes with a unit, a share of the machine's total, or "auto". A duration is in seconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from pydantic_core import CoreSchema, core_schema

from tiered.units import GB, MB, GiB, KiB, MiB, parse_duration, parse_size

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler

_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")
_EXACT_UNITS = ((GiB, "GiB"), (GB, "GB"), (MiB, "MiB"), (MB, "MB"), (KiB, "KiB"))
_RATE = re.compile(r"\s*(.+?)\s*/\s*s\s*")
_DURATION = re.compile(r"(?:\s*[0-9][0-9_]*(?:\.[0-9]+)?\s*[A-Za-z]+)+\s*")
_DURATION_PART = re.compile(r"[0-9][0-9_]*(?:\.[0-9]+)?\s*[A-Za-z]+")
_DURATION_EXAMPLES = 'Write for example "45min", "90s" or "1h30min"'

_SIZE_PATTERN = r"^\s*[0-9][0-9_]*(\.[0-9]+)?\s*([kKmMgGtT][iI]?)?[bB]\s*$"
_DURATION_PATTERN = r"^(\s*[0-9][0-9_]*(\.[0-9]+)?\s*(s|S|min|Min|MIN|h|H|d|D))+\s*$"
#: JSON Schemas of the values that this module parses.
SIZE_SCHEMA: Mapping[str, Any] = {"type": "string", "pattern": _SIZE_PATTERN, "examples": ["110GiB", "110GB"]}
SHARE_SCHEMA: Mapping[str, Any] = {"type": "string", "pattern": r"^\s*[0-9]+(\.[0-9]+)?\s*%\s*$", "examples": ["90%"]}
RATE_SCHEMA: Mapping[str, Any] = {
    "type": "string", "pattern": _SIZE_PATTERN.replace(r"\s*$", r"\s*/\s*s\s*$"), "examples": ["2.0GB/s"],
}  # fmt: skip
DURATION_SCHEMA: Mapping[str, Any] = {"type": "string", "pattern": _DURATION_PATTERN, "examples": ["45min"]}


@dataclass(frozen=True, slots=True)
class Size:
    """A size that can depend on the machine: ``nbytes``, a ``fraction`` of the total, or "auto" if both are None.

    Attributes:
        nbytes: Bytes, if the config has a size with a unit.
        fraction: Share of the machine's total, 0 to 1, if the config has a percentage.
    """

    text: str
    nbytes: int | None = None
    fraction: float | None = None

    @property
    def is_auto(self) -> bool:
        """Whether the planner chooses the size."""
        return self.nbytes is None and self.fraction is None

    def resolve(self, total_bytes: int, *, auto_bytes: int | None = None) -> int:
        """Return the size in bytes on a machine that has ``total_bytes``.

        Args:
            total_bytes: Size that corresponds to 100%.
            auto_bytes: Size that corresponds to "auto", or None for ``total_bytes``.
        """
        if self.nbytes is not None:
            return self.nbytes
        if self.fraction is not None:
            return int(total_bytes * self.fraction)
        return total_bytes if auto_bytes is None else auto_bytes

    @classmethod
    def parse(cls, value: object) -> Size:
        """Parse text into a size. Return a Size unchanged.

        Raises:
            ValueError: The value is not text, has no unit, or is out of range. The message states the remedy.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, bool) or not isinstance(value, str):
            if isinstance(value, int | float) and not isinstance(value, bool):
                raise ValueError(f'{value} has no unit. Write "{value}GiB" or "{value}GB"')
            raise ValueError('not a size. Write for example "110GiB", "90%" or "auto"')
        text = value.strip()
        if text == "auto":
            return cls(text)
        match = _PERCENT.fullmatch(text)
        if match is not None:
            fraction = float(match[1]) / 100.0
            if not 0.0 < fraction <= 1.0:
                raise ValueError(f'"{text}" is not a valid share. Write more than 0% and at most "100%"')
            return cls(text, fraction=fraction)
        nbytes = parse_size(text)
        if nbytes == 0:
            raise ValueError(f'"{text}" is zero. Write a size above 0')
        return cls(text, nbytes=nbytes)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.plain_serializer_function_ser_schema(lambda size: size.text)
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"const": "auto"}, SHARE_SCHEMA, SIZE_SCHEMA], "examples": ["auto", "110GiB", "90%"]}


def parse_rate(value: object) -> float:
    """Parse a rate such as ``"2.0GB/s"``, and return it in bytes per second.

    Raises:
        ValueError: The value is not a size per second, or is zero.
    """
    match = _RATE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f'{value!r} is not a rate. Write for example "2.0GB/s"')
    nbytes = parse_size(match[1])
    if nbytes == 0:
        raise ValueError(f'"{value}" is zero. Write a rate above 0, for example "2.0GB/s"')
    return float(nbytes)


def dump_size(nbytes: int) -> str:
    """Format a size with the largest unit that divides it, so that ``parse_size`` returns the same number."""
    for unit, name in _EXACT_UNITS:
        if nbytes and nbytes % unit == 0:
            return f"{nbytes // unit}{name}"
    return f"{nbytes}B"


def parse_interval(value: object) -> float:
    """Parse a positive duration such as ``"1h30min"``, and return it in seconds.

    Raises:
        ValueError: The value is not text, has a missing or unknown unit, or is zero. The message states the remedy.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError(f'{value} has no unit. Write "{value}min" or "{value}s"')
    if not isinstance(value, str) or _DURATION.fullmatch(value) is None:
        subject = f'"{value}" is' if isinstance(value, str) else "this is"
        raise ValueError(f"{subject} not a duration. {_DURATION_EXAMPLES}")
    seconds = sum(parse_duration(part) for part in _DURATION_PART.findall(value))
    if not 0 < seconds < math.inf:
        raise ValueError(f'"{value}" is not a duration above 0. {_DURATION_EXAMPLES}')
    return seconds


def dump_duration(seconds: float) -> str:
    """Format a duration so that :func:`parse_interval` returns the same number."""
    if seconds != int(seconds):
        return f"{Decimal(repr(seconds)):f}s"
    minutes, remainder = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [f"{count}{unit}" for count, unit in ((hours, "h"), (minutes, "min"), (remainder, "s")) if count]
    return "".join(parts)
