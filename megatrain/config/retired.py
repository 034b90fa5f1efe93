"""Keys and values of earlier versions: their replacements, and the reading of checkpoints that have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["RETIRED", "RETIRED_CHOICES", "without_retired"]

_RECOMPUTE = (
    'training.recompute says what the backward computes again: write "auto", "full", "selective" or "none", or '
    '"selective:4" and "none:4" for the last 4 layers alone'
)
_CLASSIFY = (
    "Train classifiers with transformers' AutoModelForSequenceClassification or AutoModelForTokenClassification: "
    "call megatrain.offload(model, store), and use megatrain.hf.offloaded(Trainer) as the Trainer"
)
#: Key or table -> its replacement. None of them changes a result of a current task, so a checkpoint that has one
#: resumes without it.
RETIRED: Mapping[str, str] = {
    "advanced.keep_graphs": _RECOMPUTE,
    "advanced.save_attention": _RECOMPUTE,
    "classify": f"Leave the table out. {_CLASSIFY}",
}
#: (Last part of a key, a removed value) -> the replacement.
RETIRED_CHOICES: Mapping[tuple[str, str], str] = {
    ("task", "classify"): _CLASSIFY,
    ("format", "classification"): _CLASSIFY,
    ("format", "token_classification"): _CLASSIFY,
}


def without_retired(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a config of an earlier version, without removed keys."""
    return {
        key: without_retired(value, f"{prefix}{key}.") if isinstance(value, Mapping) else value
        for key, value in values.items()
        if prefix + key not in RETIRED
    }
