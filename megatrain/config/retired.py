"""Removed keys and values of earlier versions, and advice on what to use instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["RETIRED", "RETIRED_CHOICES", "drop_retired"]

_RECOMPUTE = (
    'training.recompute determines what the backward recomputes: write "auto", "full", "selective" or "none", or '
    '"selective:4" or "none:4" for only the last 4 layers'
)
_CLASSIFY = (
    "Train classifiers with transformers' AutoModelForSequenceClassification or AutoModelForTokenClassification: "
    "call megatrain.offload(model, store), and use megatrain.hf.offloaded(Trainer) as the Trainer"
)
#: Advice by removed key or table. Removed keys do not affect results of current tasks, so a resume ignores them.
RETIRED: Mapping[str, str] = {
    "advanced.keep_graphs": _RECOMPUTE,
    "advanced.save_attention": _RECOMPUTE,
    "classify": f"Leave the table out. {_CLASSIFY}",
}
#: Advice by the last part of a key and the removed value.
RETIRED_CHOICES: Mapping[tuple[str, str], str] = {
    ("task", "classify"): _CLASSIFY,
    ("format", "classification"): _CLASSIFY,
    ("format", "token_classification"): _CLASSIFY,
}


def drop_retired(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a config's values, as an earlier version wrote them, without the keys that have been removed since."""
    return {
        key: drop_retired(value, f"{prefix}{key}.") if isinstance(value, Mapping) else value
        for key, value in values.items()
        if prefix + key not in RETIRED
    }
