"""Labels of a micro-batch: shifted, counted, and the rows of the trunk's output that have one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["count_labels", "doubles", "labelled_rows", "shifted_labels", "without_labels"]

_IGNORED = -100


def shifted_labels(labels: Tensor) -> Tensor:
    """Return for every position the label of the next token, -100 at the end, as transformers shifts them."""
    return torch.nn.functional.pad(labels, (0, 1), value=_IGNORED)[..., 1:]


def count_labels(shifted: Tensor) -> int:
    """Return how many positions have a label."""
    return int((shifted != _IGNORED).sum())


def labelled_rows(shifted: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the positions [N] that have a label and their labels [N], on a device.

    Args:
        shifted: [B * S].
    """
    rows = (shifted != _IGNORED).nonzero().squeeze(1)
    return rows.to(device), shifted[rows].to(device)


def without_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a micro-batch without its labels."""
    return {key: value for key, value in batch.items() if key != "labels"}


def doubles(losses: Sequence[Tensor]) -> list[float]:
    """Return loss terms in double precision, with one synchronisation."""
    if not losses:
        return []
    return [float(loss) for loss in torch.stack([loss.to(torch.float64) for loss in losses]).tolist()]
