"""Differences between two configs, sorted by their effect on the results of a resumed run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatrain.base.toml import format_value

__all__ = ["Change", "ConfigChanges"]


@dataclass(frozen=True, slots=True)
class Change:
    """A key whose value differs between two configs.

    Attributes:
        key: Dotted key, e.g. ``optimizer.groups.0.learning_rate``.
        before: Value in the first config, as parsed from TOML. None if not set.
        now: Value in the second config, in the same form.
    """

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        old, new = ("not set" if value is None else format_value(value) for value in (self.before, self.now))
        return f"{self.key}: {old} -> {new}"


@dataclass(frozen=True, slots=True)
class ConfigChanges:
    """All keys whose values differ, in the order of the config.

    Attributes:
        altering: Changes that affect the results of the run.
        free: Changes that do not affect the results.
    """

    altering: tuple[Change, ...]
    free: tuple[Change, ...]
