"""Loader of batches for optimizer steps. The next batch depends only on the seed and the position."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatrain.base.batch_keys import IGNORED_LABEL
from megatrain.data.packing import pack_documents
from megatrain.data.row_kind import DocumentFacts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from megatrain.data.dataset import TokenDataset
    from megatrain.data.images import ImageProcessor
    from megatrain.data.scores import TeacherScores

# Functions import torch only when they need it, because a preview of rows works without torch.
_SHUFFLE, _PACK = 0, 1  # indices of random streams; megatrain.data.dataset uses streams 2 and 3


@dataclass(frozen=True, slots=True)
class LoaderPosition:
    """Position of a loader: its complete state in a checkpoint. The next step is ``step`` of epoch ``epoch``.

    Attributes:
        cursor: Position in the streams as JSON, or None if the data is not streamed.
    """

    epoch: int = 0
    step: int = 0
    cursor: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class StepBatch:
    """All micro-batches of an optimizer step.

    Attributes:
        micro_batches: Model inputs, with int64 ``input_ids`` and ``labels`` of shape ``(rows, tokens)``. Packed rows
            have ``position_ids`` that restart with each document, as Hugging Face expects. Unpacked rows contain one
            document, padded on the right, and have an ``attention_mask``. Rows with images also have their processor's
            outputs. The row kind adds the inputs that its losses need.
        num_real_tokens: Number of tokens in the step, excluding padding.
        num_trained_tokens: Number of labels in the step that are not -100.
        position: Loader position after this batch.
    """

    micro_batches: list[dict[str, torch.Tensor]]
    num_real_tokens: int
    num_trained_tokens: int
    epoch: int
    position: LoaderPosition


def order_of_epoch(data_seed: int, epoch: int, num_rows: int) -> npt.NDArray[np.int64]:
    """Return the row numbers of an epoch in shuffled order."""
    return np.random.default_rng((data_seed, _SHUFFLE, epoch)).permutation(num_rows).astype(np.int64)


class BatchLoader:
    """Infinite iterator over the batches of optimizer steps. Each epoch uses every document once.

    Every step has ``num_micro_batches`` micro-batches of ``micro_batch_size`` rows. An epoch's last step is padded with
    empty rows, which are not in the loss. Rows are assigned to micro-batches round-robin, so that the empty rows are
    spread evenly.

    Args:
        micro_batch_size: Rows per micro-batch. Must be a multiple of the number of documents per example.
        max_length: Tokens in a packed row. Unpacked rows are padded to the micro-batch's longest row.
        packing: Whether a row can contain several documents.
        data_seed: Random seed for the packing and the order.
        image_processor: Processor of the documents' images, or None if they have none.
        teacher: Scores to add to each micro-batch (``TEACHER_KEYS``), or None if the run has no teacher.

    Attributes:
        reference: The reference model's log-probability of each document's answer, or None to use zeros.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        *,
        micro_batch_size: int,
        num_micro_batches: int,
        max_length: int,
        packing: bool,
        data_seed: int,
        pad_token_id: int = 0,
        position: LoaderPosition = LoaderPosition(),
        image_processor: ImageProcessor | None = None,
        teacher: TeacherScores | None = None,
    ) -> None:
        assert min(micro_batch_size, num_micro_batches) > 0, (micro_batch_size, num_micro_batches)
        self._dataset = dataset
        together = self._rows_per_example = dataset.kind.num_documents
        assert together == 1 or (micro_batch_size % together == 0 and not packing), micro_batch_size
        self._micro_batch_size = micro_batch_size // together
        self.reference: npt.NDArray[np.float32] | None = None
        self._num_micro_batches = num_micro_batches
        self._max_length = max_length
        self._packing = packing
        self._data_seed = data_seed
        self._pad_token_id = pad_token_id
        self._images, self._teacher = image_processor, teacher
        assert image_processor is None or not packing
        self._members, self._row_starts = self._assign_rows()
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None
        self._position = LoaderPosition()
        self.seek(position)

    @property
    def dataset(self) -> TokenDataset:
        """Documents that this loader reads."""
        return self._dataset

    @property
    def num_rows(self) -> int:
        """Number of rows in an epoch."""
        return len(self._row_starts) - 1

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps in an epoch."""
        return -(-self.num_rows // (self._micro_batch_size * self._num_micro_batches))

    @property
    def position(self) -> LoaderPosition:
        """Position before the next batch."""
        return self._position

    def num_steps(self, num_train_epochs: float, max_steps: int | None = None) -> int:
        """Return a run's number of steps: ``max_steps`` if set, else the steps of all epochs, rounded up."""
        return max_steps if max_steps is not None else max(1, math.ceil(num_train_epochs * self.steps_per_epoch))

    def seek(self, position: LoaderPosition) -> None:
        """Continue from ``position``. This takes constant time, because no data is read."""
        assert position.epoch >= 0, position
        assert 0 <= position.step < self.steps_per_epoch, (position, self.steps_per_epoch)
        self._position = position

    def __iter__(self) -> Iterator[StepBatch]:
        return self

    def __next__(self) -> StepBatch:
        epoch, step = self._position.epoch, self._position.step
        rows_per_step = self._micro_batch_size * self._num_micro_batches
        order = self._order_of(epoch)
        chosen = [self._row(row) for row in order[step * rows_per_step : (step + 1) * rows_per_step]]
        chosen.extend([[]] * (rows_per_step - len(chosen)))
        micro_batches = [
            self.micro_batch(chosen[first :: self._num_micro_batches]) for first in range(self._num_micro_batches)
        ]
        last = step + 1 == self.steps_per_epoch
        self._position = LoaderPosition(epoch + 1, 0) if last else LoaderPosition(epoch, step + 1)
        together = range(self._rows_per_example)
        num_real_tokens = sum(self._length(doc + number) for row in chosen for doc in row for number in together)
        self._dataset.release_pages()
        return StepBatch(
            micro_batches,
            num_real_tokens=num_real_tokens,
            num_trained_tokens=sum(int((batch["labels"] != IGNORED_LABEL).sum()) for batch in micro_batches),
            epoch=epoch,
            position=self._position,
        )

    def fingerprint(self) -> str:
        """Return a checksum of all data that a run uses, including the teacher's scores."""
        own = self._dataset.fingerprint()
        return own if self._teacher is None else f"{own}-{self._teacher.fingerprint()}"

    def rows(self, start: int, stop: int) -> list[list[int]]:
        """Return the documents of rows ``start`` to ``stop``. The rows are numbered in their order before shuffling."""
        return [self._row(row) for row in range(start, stop)]

    def micro_batch(self, rows: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        """Return a micro-batch, as described in ``StepBatch``. Each item of ``rows`` lists one row's documents."""
        batch = self._pack_rows(rows) if self._packing else self._make_unpacked(rows)
        if self._teacher is None:
            return batch
        keys = [[(self._dataset.key_of(document), self._length(document)) for document in row] for row in rows]
        return batch | self._teacher.batch_scores(keys, batch["input_ids"].shape[1])

    def _length(self, document: int) -> int:
        return self._dataset.num_tokens_of(document)

    def _assign_rows(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Assign the documents to rows. All epochs have the same rows, in different orders.

        Returns:
            The concatenated documents of all rows, and the index of each row's first document, followed by the end.
        """
        documents = self._dataset.epoch_documents(self._data_seed)
        if not self._packing:
            return documents, np.arange(len(documents) + 1, dtype=np.int64)
        shuffled = np.random.default_rng((self._data_seed, _PACK)).permutation(len(documents))
        documents = documents[shuffled]
        rows = pack_documents(documents, self._dataset.lengths()[documents], self._max_length)
        self._dataset.release_pages()
        return rows

    def _row(self, row: int) -> list[int]:
        """Return a row's documents."""
        return [int(document) for document in self._members[self._row_starts[row] : self._row_starts[row + 1]]]

    def _order_of(self, epoch: int) -> npt.NDArray[np.int64]:
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, order_of_epoch(self._data_seed, epoch, self.num_rows)
        return self._order[1]

    def _read_document(self, index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return a document's token ids and labels."""
        start = int(self._dataset.starts[index])
        part = slice(start, start + self._length(index))
        tokens = self._dataset.tokens[part].astype(np.int64)
        return tokens, np.where(self._dataset.trained[part], tokens, IGNORED_LABEL)

    def _pack_rows(self, rows: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        """Return rows of exactly ``max_length`` tokens. A row's padding forms a further document without labels."""
        import torch

        shape = (len(rows), self._max_length)
        input_ids = np.full(shape, self._pad_token_id, dtype=np.int64)
        labels = np.full(shape, IGNORED_LABEL, dtype=np.int64)
        position_ids = np.empty(shape, dtype=np.int64)
        for number, row in enumerate(rows):
            at = 0
            for document in row:
                tokens, wanted = self._read_document(document)
                part = slice(at, at + len(tokens))
                input_ids[number, part], labels[number, part] = tokens, wanted
                position_ids[number, part] = np.arange(len(tokens))
                at += len(tokens)
            position_ids[number, at:] = np.arange(self._max_length - at)
        arrays = {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}
        return {name: torch.from_numpy(values) for name, values in arrays.items()}

    def _make_unpacked(self, rows: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        """Return rows of one document each. All examples' first documents come first, then all second documents."""
        documents = [[first + number for first in row] for number in range(self._rows_per_example) for row in rows]
        facts = [self._facts(row[0]) if row else None for row in documents]
        return self._dataset.kind.collate(self._pad_rows(documents), facts)

    def _facts(self, document: int) -> DocumentFacts:
        dataset = self._dataset
        return DocumentFacts(
            int(dataset.roles[document]) if len(dataset.roles) else 0,
            int(dataset.tokens[int(dataset.starts[document + 1]) - 1]) if dataset.kind.num_values else 0,
            0.0 if self.reference is None else float(self.reference[document]),
        )

    @property
    def rows_in_order(self) -> int:
        """Number of documents in each micro-batch that :meth:`in_order` returns."""
        return self._micro_batch_size * self._rows_per_example

    def in_order(self, first: int) -> dict[str, torch.Tensor] | None:
        """Return a micro-batch of the documents starting at ``first``, in data order; None after the last document."""
        rows = self.rows_in_order
        documents = [[document] for document in range(first, min(first + rows, len(self._dataset)))]
        return self._pad_rows([*documents, *([[]] * (rows - len(documents)))]) if documents else None

    def _pad_rows(self, rows: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        """Return one document per row, padded on the right to the micro-batch's longest row."""
        import torch

        documents = [self._read_document(row[0]) if row else None for row in rows]
        shape = (len(rows), max((len(document[0]) for document in documents if document is not None), default=1))
        input_ids = np.full(shape, self._pad_token_id, dtype=np.int64)
        labels = np.full(shape, IGNORED_LABEL, dtype=np.int64)
        attention_mask = np.zeros(shape, dtype=np.int64)
        attention_mask[:, 0] = 1  # let empty rows attend to one token, because softmax needs at least one
        for number, document in enumerate(documents):
            if document is not None:
                part = slice(0, len(document[0]))
                input_ids[number, part], labels[number, part] = document
                attention_mask[number, part] = 1
        arrays = {"input_ids": input_ids, "labels": labels, "attention_mask": attention_mask}
        batch = {name: torch.from_numpy(values) for name, values in arrays.items()}
        if self._images is None:
            return batch
        tokens = [[] if document is None else document[0].tolist() for document in documents]
        images = [self._dataset.images_of(row[0]) if row else [] for row in rows]
        return batch | self._images.inputs(tokens, images, shape[1])
