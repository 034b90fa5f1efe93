"""Durations as a config writes them: ``"45min"``, ``"90s"``, ``"1h30min"``. Seconds everywhere inside."""

from __future__ import annotations

import math
import re
from decimal import Decimal

from tiered.units import parse_duration

_PARTS = re.compile(r"(?:\s*[0-9][0-9_]*(?:\.[0-9]+)?\s*[A-Za-z]+)+\s*")
_PART = re.compile(r"[0-9][0-9_]*(?:\.[0-9]+)?\s*[A-Za-z]+")
_EXAMPLES = 'Write for example "45min", "90s" or "1h30min"'


def parse_interval(value: object) -> float:
    """Return the seconds that a duration above 0 names; several parts are added.

    Raises:
        ValueError: not text, no unit, an unknown unit, or nothing; the text says what to write.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError(f'{value} has no unit. Write "{value}min" or "{value}s"')
    if not isinstance(value, str) or _PARTS.fullmatch(value) is None:
        shown = f'"{value}" is' if isinstance(value, str) else "this is"
        raise ValueError(f"{shown} not a duration. {_EXAMPLES}")
    seconds = sum(parse_duration(part) for part in _PART.findall(value))
    if not 0 < seconds < math.inf:
        raise ValueError(f'"{value}" is not a duration above 0. {_EXAMPLES}')
    return seconds


def exact_duration(seconds: float) -> str:
    """Return a duration so that :func:`parse_interval` gives the same number back."""
    if seconds != int(seconds):
        return f"{Decimal(repr(seconds)):f}s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [f"{count}{unit}" for count, unit in ((hours, "h"), (minutes, "min"), (rest, "s")) if count]
    return "".join(parts)
