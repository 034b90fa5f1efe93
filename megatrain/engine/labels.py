"""Labels of a micro-batch: shifted, counted, and the rows of the trunk's output that have one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["count_labels", "labelled_rows", "shifted_labels", "without_labels"]

_IGNORED = -100


def shifted_labels(labels: Tensor) -> Tensor:
    """Return for every position the label of the next token, -100 at the end, as transformers shifts them."""
    return torch.nn.functional.pad(labels, (0, 1), value=_IGNORED)[..., 1:]


def count_labels(shifted: Tensor) -> int:
    """Return how many positions have a label. By numpy: labels are looked at on the host, never on a device."""
    return int(np.count_nonzero(shifted.numpy() != _IGNORED))


def labelled_rows(shifted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions [N] that have a label and their labels [N].

    Args:
        shifted: [B * S], on the host.
    """
    labels = shifted.numpy()
    rows = np.flatnonzero(labels != _IGNORED)
    return torch.from_numpy(rows), torch.from_numpy(labels[rows])


def without_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a micro-batch without its labels."""
    return {key: value for key, value in batch.items() if key != "labels"}
