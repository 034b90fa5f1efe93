"""Labels of a micro-batch, shifted so that each label is at the position that predicts it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatrain.base.batch_keys import IGNORED_LABEL

__all__ = ["LabelledRows", "count_labels", "labelled_rows", "shifted_labels", "without_labels"]

#: Labelled positions of a micro-batch, and their labels.
LabelledRows = tuple[Tensor, Tensor]


def shifted_labels(labels: Tensor) -> Tensor:
    """Return the next token's label for every position, and -100 for the last position, as in transformers."""
    return torch.nn.functional.pad(labels, (0, 1), value=IGNORED_LABEL)[..., 1:]


def count_labels(shifted: Tensor) -> int:
    """Return the number of labelled positions. ``shifted`` must be on the host."""
    return int(np.count_nonzero(shifted.numpy() != IGNORED_LABEL))


def labelled_rows(shifted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the labelled positions [N] and their labels [N].

    Args:
        shifted: Shifted labels [B * S], on the host.
    """
    labels = shifted.numpy()
    rows = np.flatnonzero(labels != IGNORED_LABEL)
    return torch.from_numpy(rows), torch.from_numpy(labels[rows])


def without_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a micro-batch without its labels."""
    return {key: value for key, value in batch.items() if key != "labels"}
