"""Micro-batches: their labels, shifted to the positions that predict them, and their transfer to the device."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatrain.base.batch_keys import IGNORED_LABEL, LOSS_PREFIX
from megatrain.engine.device.device_kernels import has_sync_reads
from megatrain.engine.device.host_io import HostMirror, Staging

#: Labelled positions of a micro-batch, and their labels.
LabelledRows = tuple[Tensor, Tensor]


def shifted_labels(labels: Tensor) -> Tensor:
    """Return the next token's label for every position, and -100 for the last position, as in transformers."""
    return torch.nn.functional.pad(labels, (0, 1), value=IGNORED_LABEL)[..., 1:]


def count_labels(labels: Tensor) -> int:
    """Return the number of labelled positions. ``labels`` must be on the host."""
    return int(np.count_nonzero(labels.numpy() != IGNORED_LABEL))


def labelled_rows(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the labelled positions [N] and their labels [N].

    Args:
        labels: Shifted labels [B * S], on the host.
    """
    values = labels.numpy()
    rows = np.flatnonzero(values != IGNORED_LABEL)
    return torch.from_numpy(rows), torch.from_numpy(values[rows])


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
        self.mirror = HostMirror() if has_sync_reads(device) else None

    def upload(
        self,
        micro_batches: Mapping[int, Mapping[str, Tensor]],
        host_rows: Mapping[int, LabelledRows],
        host_inputs: Mapping[int, Mapping[str, Tensor]] = MappingProxyType({}),
    ) -> tuple[dict[int, dict[str, Any]], dict[int, LabelledRows], dict[int, dict[str, Tensor]]]:
        """Copy micro-batches, labelled rows and inputs of the loss to the compute device, without a host sync.

        Args:
            micro_batches: Host tensors, by number. Pass all at once, because a second call waits for earlier copies.
            host_rows: Labelled positions and their labels, by number.
            host_inputs: Results of ``Loss.read``, by number; empty if the loss needs no inputs.

        Returns:
            Device copies of the three arguments, by number. Micro-batch keys with prefix ``LOSS_PREFIX`` are omitted.
        """
        host_tensors = {
            (index, key): value
            for index, batch in micro_batches.items()
            for key, value in batch.items()
            if not key.startswith(LOSS_PREFIX)
        }
        loss_tensors: dict[tuple[int, int, str], Tensor] = {}
        for index, (positions, labels) in host_rows.items():
            loss_tensors |= {(index, 0, "positions"): positions, (index, 0, "labels"): labels}
            loss_tensors |= {(index, 1, name): tensor for name, tensor in host_inputs.get(index, {}).items()}
        copies = self._staging.upload({**host_tensors, **loss_tensors})
        batches: dict[int, dict[str, Any]] = {index: {} for index in micro_batches}
        for (index, key), tensor in host_tensors.items():
            batches[index][key] = copies[index, key]
            if self.mirror is not None:
                self.mirror.register(copies[index, key], tensor)
        rows = {index: (copies[index, 0, "positions"], copies[index, 0, "labels"]) for index in host_rows}
        loss_inputs = {i: {name: copies[i, 1, name] for name in host_inputs.get(i, {})} for i in host_rows}
        return batches, rows, loss_inputs

    def forget(self) -> None:
        """Drop the host copies at the end of the pass."""
        if self.mirror is not None:
            self.mirror.forget()
