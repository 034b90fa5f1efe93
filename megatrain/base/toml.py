"""Formatting of values in TOML syntax, for files and messages."""

from __future__ import annotations

import datetime
import json
import re
from typing import Any

__all__ = ["format_value"]

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def format_value(value: Any) -> str:
    """Return a value as TOML, on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float | datetime.date | datetime.time):
        return str(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(format_value(item) for item in value) + "]"
    if isinstance(value, dict):
        if not value:
            return "{}"
        names = {key: key if _BARE_KEY.fullmatch(key) else format_value(key) for key in value}
        return "{ " + ", ".join(f"{names[key]} = {format_value(item)}" for key, item in value.items()) + " }"
    # A JSON string is also a TOML basic string, except that TOML requires DEL to be escaped.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
