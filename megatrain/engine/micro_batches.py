"""Micro-batches: their labels, shifted to the positions that predict them, and their transfer to the device."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatrain.base.batch_keys import IGNORED_LABEL, LOSS_PREFIX
from megatrain.engine.device.device_kernels import reads_sync_host
from megatrain.engine.device.host_io import HostMirror, Staging

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


class MicroBatches:
    """Transfer of a pass's micro-batches to the compute device.

    Attributes:
        mirror: Host mirror of the transferred tensors; None if reading device tensors does not synchronize the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._staging = Staging(device)
        self.mirror = HostMirror() if reads_sync_host(device) else None

    def place(
        self,
        micro_batches: Mapping[int, Mapping[str, Tensor]],
        labelled: Mapping[int, LabelledRows],
        read_by_loss: Mapping[int, Mapping[str, Tensor]] = MappingProxyType({}),
    ) -> tuple[dict[int, dict[str, Any]], dict[int, LabelledRows], dict[int, dict[str, Tensor]]]:
        """Copy micro-batches, labelled rows and inputs of the loss to the compute device, without a host sync.

        Args:
            micro_batches: Host tensors of all micro-batches, by number. A second call waits for earlier copies.
            labelled: Labelled positions and their labels, by number.
            read_by_loss: Results of ``Loss.read``, by number; empty if the loss needs no inputs.

        Returns:
            Device copies of the three arguments, by number. Inputs of the loss are omitted from micro-batches.
        """
        host = {
            (number, key): value
            for number, batch in micro_batches.items()
            for key, value in batch.items()
            if not key.startswith(LOSS_PREFIX)
        }
        for_loss: dict[tuple[int, int, str], Tensor] = {}
        for number, (positions, labels) in labelled.items():
            for_loss |= {(number, 0, "positions"): positions, (number, 0, "labels"): labels}
            for_loss |= {(number, 1, name): tensor for name, tensor in read_by_loss.get(number, {}).items()}
        placed = self._staging.upload({**host, **for_loss})
        batches: dict[int, dict[str, Any]] = {number: {} for number in micro_batches}
        for (number, key), tensor in host.items():
            batches[number][key] = placed[number, key]
            if self.mirror is not None:
                self.mirror.register(placed[number, key], tensor)
        rows = {number: (placed[number, 0, "positions"], placed[number, 0, "labels"]) for number in labelled}
        read = {number: {name: placed[number, 1, name] for name in read_by_loss.get(number, {})} for number in labelled}
        return batches, rows, read

    def forget(self) -> None:
        """Drop the host copies at the end of the pass."""
        if self.mirror is not None:
            self.mirror.forget()
