"""Differences between two configs, sorted by their effect on the results of a resumed run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatrain.base.toml import format_value

__all__ = ["Change", "ConfigChanges"]


@dataclass(frozen=True, slots=True)
class Change:
    """One key with two values.

    Attributes:
        key: Dotted key, e.g. ``optimizer.groups.0.learning_rate``.
        before: Value in the first config, as parsed from TOML. None if not set.
        now: Value in the second config, in the same form.
    """

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        before, now = ("not set" if value is None else format_value(value) for value in (self.before, self.now))
        return f"{self.key}: {before} -> {now}"


@dataclass(frozen=True, slots=True)
class ConfigChanges:
    """All keys with different values, in the order of the config.

    Attributes:
        altering: Changes that affect the numbers that the run computes.
        free: Changes that do not affect the results.
    """

    altering: tuple[Change, ...]
    free: tuple[Change, ...]
