"""Keys of earlier versions: what to write instead, and checkpoints whose config has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["RETIRED", "without_retired"]

_RECOMPUTE = (
    'training.recompute says what the backward computes again: write "auto", "full", "selective" or "none", or '
    '"selective:4" and "none:4" for the last 4 layers alone'
)
#: Key -> what to write. None of them changed a result, so a checkpoint that has one is continued without it.
RETIRED: Mapping[str, str] = {"advanced.keep_graphs": _RECOMPUTE, "advanced.save_attention": _RECOMPUTE}


def without_retired(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a config that an earlier version wrote without the keys that are gone."""
    return {
        key: without_retired(value, f"{prefix}{key}.") if isinstance(value, Mapping) else value
        for key, value in values.items()
        if prefix + key not in RETIRED
    }
