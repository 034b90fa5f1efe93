"""Loader of batches for optimizer steps. The next batch depends only on the seed and the position."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatrain.base.batch_keys import IGNORED_LABEL
from megatrain.data.collate import Collator
from megatrain.data.row_order import LoaderPosition, RowOrder

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch


@dataclass(frozen=True)
class StepBatch:
    """All micro-batches of an optimizer step.

    Attributes:
        micro_batches: Model inputs, with int64 ``input_ids`` and ``labels`` of shape ``(rows, tokens)``. Rows of
            several documents have ``position_ids`` that restart with each document, as Hugging Face expects. Rows of
            one document are padded on the right and have an ``attention_mask``. Multimodal models also get their
            processor's outputs. The row kind adds the inputs that its losses need.
        num_real_tokens: Number of tokens in the step, excluding padding.
        num_trained_tokens: Number of labels in the step that are not -100.
        position: Loader position after this batch.
    """

    micro_batches: list[dict[str, torch.Tensor]]
    num_real_tokens: int
    num_trained_tokens: int
    epoch: int
    position: LoaderPosition


class BatchLoader:
    """Infinite iterator over the batches of optimizer steps.

    Rows are assigned to a step's micro-batches round-robin, so that empty rows (which have no loss) are spread evenly.

    Attributes:
        dataset: Documents of the run. Empty if the data is streamed.
        steps_per_epoch: Number of optimizer steps in an epoch.
        position: Position before the next batch.
    """

    def __init__(self, order: RowOrder, collator: Collator) -> None:
        self._order, self._collator = order, collator
        self.dataset, self.steps_per_epoch = order.dataset, order.steps_per_epoch
        self.seek(LoaderPosition())

    def num_steps(self, num_train_epochs: float, max_steps: int | None = None) -> int:
        """Return the number of steps in a run: ``max_steps`` if set, else the steps of all epochs, rounded up."""
        return max_steps if max_steps is not None else max(1, math.ceil(num_train_epochs * self.steps_per_epoch))

    def seek(self, position: LoaderPosition) -> None:
        """Continue from ``position``. This takes constant time, because no data is read before the next batch."""
        self.position, self._steps = position, self._order.steps(position)

    def use_reference(self, reference: npt.NDArray[np.float32]) -> None:
        """Add the reference model's log-probability of each document's answer to later batches."""
        self._collator = replace(self._collator, reference=reference)

    def __iter__(self) -> Iterator[StepBatch]:
        return self

    def __next__(self) -> StepBatch:
        step_rows, count = next(self._steps), self._collator.shape.num_micro_batches
        dataset, epoch = step_rows.dataset, self.position.epoch
        micro_batches = [self._collator.micro_batch(dataset, step_rows.rows[index::count]) for index in range(count)]
        offsets = range(dataset.kind.num_documents)
        documents = (document + offset for row in step_rows.rows for document in row for offset in offsets)
        num_real_tokens = sum(map(dataset.length, documents))
        dataset.release_pages()
        self.position = step_rows.position
        return StepBatch(
            micro_batches,
            num_real_tokens=num_real_tokens,
            num_trained_tokens=sum(int((batch["labels"] != IGNORED_LABEL).sum()) for batch in micro_batches),
            epoch=epoch,
            position=step_rows.position,
        )

    def fingerprint(self) -> str:
        """Return a checksum of all data that a run uses, including the teacher's scores."""
        fingerprint, teacher = self.dataset.fingerprint(), self._collator.teacher
        return fingerprint if teacher is None else f"{fingerprint}-{teacher.fingerprint()}"

    @property
    def ordered_batch_rows(self) -> int:
        """Number of documents in each micro-batch that :meth:`ordered_batch` returns."""
        return self._collator.shape.micro_batch_size

    def ordered_batch(self, start: int) -> dict[str, torch.Tensor] | None:
        """Return a micro-batch of the documents starting at ``start``, in data order; None after the last document."""
        rows = self.ordered_batch_rows
        documents = [[document] for document in range(start, min(start + rows, len(self.dataset)))]
        if not documents:
            return None
        return self._collator.pad_rows(self.dataset, [*documents, *([[]] * (rows - len(documents)))])
