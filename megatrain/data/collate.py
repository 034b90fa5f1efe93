"""Conversion of rows to micro-batches: tensors of token ids, labels, positions and masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megatrain.base.batch_keys import IGNORED_LABEL
from megatrain.data.packing import BatchShape
from megatrain.data.row_kind import DocumentFacts

if TYPE_CHECKING:
    import torch

    from megatrain.data.images import ImageProcessor
    from megatrain.data.scores import TeacherScores
    from megatrain.data.token_dataset import TokenDataset

# Functions import torch only when they need it, because row previews must work without torch.


@dataclass(frozen=True, eq=False)
class Collator:
    """Converter of rows to micro-batches.

    Attributes:
        image_processor: Processor of the documents' images, or None if they have none.
        teacher: Scores to add to each micro-batch (``TEACHER_KEYS``), or None if the run has no teacher.
        reference: The reference model's log-probability of each document's answer, or None to use zeros.
    """

    shape: BatchShape
    pad_token_id: int = 0
    image_processor: ImageProcessor | None = None
    teacher: TeacherScores | None = None
    reference: npt.NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        assert self.image_processor is None or not self.shape.packing

    def micro_batch(self, dataset: TokenDataset, rows: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        """Return a micro-batch, as described in ``StepBatch``. Each item of ``rows`` lists one row's documents."""
        batch = self._pack_rows(dataset, rows) if self.shape.packing else self._pad_examples(dataset, rows)
        if self.teacher is None:
            return batch
        keys = [[(dataset.document_key(document), dataset.length(document)) for document in row] for row in rows]
        return batch | self.teacher.batch_scores(keys, batch["input_ids"].shape[1])

    def pad_rows(self, dataset: TokenDataset, rows: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        """Return one document per row, padded on the right to the micro-batch's longest row."""
        import torch

        documents = [_read_document(dataset, row[0]) if row else None for row in rows]
        shape = (len(rows), max((len(document[0]) for document in documents if document is not None), default=1))
        input_ids = np.full(shape, self.pad_token_id, dtype=np.int64)
        labels = np.full(shape, IGNORED_LABEL, dtype=np.int64)
        attention_mask = np.zeros(shape, dtype=np.int64)
        attention_mask[:, 0] = 1  # let empty rows attend to one token, because softmax needs at least one
        for index, document in enumerate(documents):
            if document is not None:
                span = slice(0, len(document[0]))
                input_ids[index, span], labels[index, span] = document
                attention_mask[index, span] = 1
        arrays = {"input_ids": input_ids, "labels": labels, "attention_mask": attention_mask}
        batch = {name: torch.from_numpy(values) for name, values in arrays.items()}
        if self.image_processor is None:
            return batch
        tokens = [[] if document is None else document[0].tolist() for document in documents]
        images = [dataset.document_images(row[0]) if row else [] for row in rows]
        return batch | self.image_processor.make_inputs(tokens, images, shape[1])

    def _pack_rows(self, dataset: TokenDataset, rows: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        """Return rows of exactly ``max_length`` tokens. Each row's padding forms an extra document without labels."""
        import torch

        shape = (len(rows), self.shape.max_length)
        input_ids = np.full(shape, self.pad_token_id, dtype=np.int64)
        labels = np.full(shape, IGNORED_LABEL, dtype=np.int64)
        position_ids = np.empty(shape, dtype=np.int64)
        for index, row in enumerate(rows):
            start = 0
            for document in row:
                tokens, document_labels = _read_document(dataset, document)
                span = slice(start, start + len(tokens))
                input_ids[index, span], labels[index, span] = tokens, document_labels
                position_ids[index, span] = np.arange(len(tokens))
                start += len(tokens)
            position_ids[index, start:] = np.arange(shape[1] - start)
        arrays = {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}
        return {name: torch.from_numpy(values) for name, values in arrays.items()}

    def _pad_examples(self, dataset: TokenDataset, rows: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        """Return one document per row: every example's first document, then every example's second document."""
        offsets = range(dataset.kind.num_documents)
        documents = [[document + offset for document in row] for offset in offsets for row in rows]
        facts = [self._document_facts(dataset, row[0]) if row else None for row in documents]
        return dataset.kind.collate(self.pad_rows(dataset, documents), facts)

    def _document_facts(self, dataset: TokenDataset, document: int) -> DocumentFacts:
        return DocumentFacts(
            int(dataset.roles[document]) if len(dataset.roles) else 0,
            int(dataset.tokens[int(dataset.starts[document + 1]) - 1]) if dataset.kind.num_values else 0,
            0.0 if self.reference is None else float(self.reference[document]),
        )


def _read_document(dataset: TokenDataset, index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return a document's token ids and labels."""
    start = int(dataset.starts[index])
    span = slice(start, start + dataset.length(index))
    tokens = dataset.tokens[span].astype(np.int64)
    return tokens, np.where(dataset.trained[span], tokens, IGNORED_LABEL)
