"""Sizes, rates and durations: constants, parsing and formatting.

Inside the package, all sizes are ``int`` bytes. Strings are only for input and output.
"""

from __future__ import annotations

import re

KiB, MiB, GiB, TiB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
PAGE_BYTES = 4096

_SIZE_UNITS = {
    "b": 1,
    "kib": KiB,
    "mib": MiB,
    "gib": GiB,
    "tib": TiB,
    "kb": KB,
    "mb": MB,
    "gb": GB,
    "tb": TB,
}
_DURATION_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER_AND_UNIT = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*")


def is_number(text: str) -> bool:
    """Return whether ``text`` consists only of the digits 0 to 9, so that ``int`` accepts it.

    ``str.isdigit`` is not enough: it accepts a superscript two, but ``int`` raises ``ValueError`` for this character.
    """
    return text.isascii() and text.isdecimal()


def round_up(nbytes: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``nbytes``."""
    return -(-nbytes // multiple) * multiple


def parse_size(text: str) -> int:
    """Convert a size such as ``"110GiB"`` (2**30) or ``"110GB"`` (10**9) to bytes.

    Raises:
        ValueError: the number or the unit is missing or invalid. The message shows a valid size.
    """
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None:
        amount = text.strip().replace("_", "")
        if re.fullmatch(r"[0-9]+(\.[0-9]+)?", amount):
            raise ValueError(f'{text.strip()} has no unit. Write "{amount}GiB" or "{amount}GB"')
        raise ValueError(f'"{text}" is not a size. Write for example "110GiB" or "110GB"')
    unit = _SIZE_UNITS.get(match[2].lower())
    if unit is None:
        raise ValueError(f'"{match[2]}" is not a unit of size. Use B, KiB, MiB, GiB, TiB, KB, MB, GB or TB')
    return int(float(match[1].replace("_", "")) * unit) if "." in match[1] else int(match[1].replace("_", "")) * unit


def format_size(nbytes: float) -> str:
    """Format ``nbytes`` in the largest binary unit that gives at least 1, e.g. ``"1.50 GiB"``."""
    for unit, name in ((TiB, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if abs(nbytes) >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{int(nbytes)} B"


def format_decimal_size(nbytes: float) -> str:
    """Format ``nbytes`` in MB, GB or TB, the units of drive endurance, e.g. ``"0.59 GB"``."""
    for unit, name in ((TB, "TB"), (GB / 10, "GB")):
        if abs(nbytes) >= unit:
            return f"{nbytes / (TB if name == 'TB' else GB):,.2f} {name}"
    return f"{nbytes / MB:.2f} MB"


def format_rate(bytes_per_s: float) -> str:
    """Format a rate in decimal GB/s, the unit in data sheets of drives and links."""
    return f"{bytes_per_s / GB:.2f} GB/s"


def parse_duration(text: str) -> float:
    """Convert a duration such as ``"45min"``, ``"90s"`` or ``"2h"`` to seconds.

    Raises:
        ValueError: the number is missing, or the unit is not s, min, h or d.
    """
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None or match[2].lower() not in _DURATION_UNITS:
        raise ValueError(f'"{text}" is not a duration. Write for example "45min", "90s" or "2h"')
    return float(match[1].replace("_", "")) * _DURATION_UNITS[match[2].lower()]


def format_duration(seconds: float) -> str:
    """Format a duration for people: ``"4.2 ms"``, ``"0.42 s"``, ``"12.3 s"``, ``"3m05s"``, ``"16h44m"``."""
    if 0 < seconds < 0.0995:
        return f"{1000 * seconds:.2g} ms"
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, remainder = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{remainder:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m"
