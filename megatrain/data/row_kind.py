"""A kind of rows: conversion of a task's rows to documents, and of documents to micro-batches.

Each kind is one object in one file: `chat_rows.CHATS`, `text_rows.TEXTS`, `pair_rows.PAIRS`, `pair_rows.TEXT_PAIRS` and
`tagged_rows.ANSWERS`. The rest of this package calls the object and does not distinguish kinds. A task names its kind
in `megatrain/tasks/table.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from megatrain.data.rows_report import RowError, some

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from megatrain.data.chat import Encoded
    from megatrain.data.formats import DataRow, PlainRow, RowReader

    Batch = dict[str, Tensor]
    #: A row, and the tokens of its texts, at most ``max_length`` of each.
    Example = tuple[DataRow, Sequence[Encoded]]

__all__ = ["CodedDocument", "DocumentFacts", "RowKind", "row_kind"]


@dataclass(frozen=True, slots=True)
class CodedDocument:
    """A document to be written to a data set.

    Attributes:
        begins_row: False for further documents of the same row.
        role: Role in its example. 0 for the only document of an example.
        value: Extra value after the tokens, and whether it is trained.
    """

    coded: Encoded
    begins_row: bool = True
    role: int = 0
    value: tuple[int, bool] | None = None


class DocumentFacts(NamedTuple):
    """Numbers of a document in a data set; ``reference`` is its log-probability by the reference model, or 0."""

    role: int
    value: int
    reference: float


class RowKind:
    """Rows of one document each. Other kinds override the differences.

    Attributes:
        recorded: Name in keys of caches and in fingerprints, which must not change. "" for single documents.
        reader: Format of the rows, unique to the kind. None if rows may have any format that "auto" detects.
        num_documents: Documents of an example, which share a micro-batch.
        num_values: Extra values after the tokens of a document.
        only_text: Whether rows are plain text.
    """

    recorded = ""
    reader: RowReader | None = None
    num_documents = 1
    num_values = 0
    only_text = False

    def texts_of(self, row: DataRow) -> Sequence[PlainRow]:
        """Return the texts of a row to be tokenized.

        Raises:
            DataError: The row is not of this kind.
        """
        return [cast("PlainRow", row)]

    def titles_of(self, row: DataRow) -> Sequence[str]:
        """Return the titles of these texts in previews."""
        return [cast("PlainRow", row).title]

    def rejection(self, texts: Sequence[Encoded], row: DataRow, max_length: int) -> RowError | None:
        """Return the error if an example of these texts, each cut to ``max_length`` tokens, cannot be trained."""
        return None

    def documents_of(self, examples: Sequence[Example], max_length: int, last: Any) -> tuple[list[CodedDocument], Any]:
        """Return the documents of some examples, and ``last`` for the next call.

        Args:
            last: None in the first call.
        """
        return [CodedDocument(text) for _, (text,) in examples], None

    def collate(self, batch: Batch, facts: Sequence[DocumentFacts | None]) -> Batch:
        """Return a micro-batch with the additional inputs of its losses.

        Args:
            batch: Padded documents; the first documents of all examples, then the second ones.
            facts: Numbers of the document of each row. None for rows that only fill the micro-batch.
        """
        return batch

    def summary(self, roles: npt.NDArray[np.uint8]) -> str:
        """Return the number of examples in words, given the roles of all documents."""
        return some(len(roles) // self.num_documents, "row")


def row_kind(name: str) -> RowKind:
    """Return a kind by its file in this package and its name there, as in "pair_rows.PAIRS"."""
    file, _, made = name.partition(".")
    return cast("RowKind", getattr(import_module(f"megatrain.data.{file}"), made))
