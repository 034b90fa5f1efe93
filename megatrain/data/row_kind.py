"""A kind of rows: how rows of a task become documents, and documents become micro-batches.

Each kind is one object in one file: `chat_rows.CHATS`, `text_rows.TEXTS`, `pair_rows.PAIRS`, `pair_rows.TEXT_PAIRS` and
`tagged_rows.ANSWERS`. The rest of this package asks the object and does not know which kinds exist. A task names its
kind in `megatrain/tasks/table.py`.
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
    """A document that is written to a data set.

    Attributes:
        begins_row: False for further documents of the same row.
        role: Role in its example. 0 for a document that is alone in it.
        value: Number behind the tokens that is no token, and whether it is trained.
    """

    coded: Encoded
    begins_row: bool = True
    role: int = 0
    value: tuple[int, bool] | None = None


class DocumentFacts(NamedTuple):
    """Numbers of a document of a data set; ``reference`` is its log-probability by the reference model, or 0."""

    role: int
    value: int
    reference: float


class RowKind:
    """Rows that are one document each. Other kinds override what differs.

    Attributes:
        recorded: Name in keys of caches and in fingerprints, which must not change. "" for single documents.
        reader: Format of the rows, which no other kind has. None if rows may have any format that "auto" knows.
        num_documents: Documents of an example, which share a micro-batch.
        num_values: Numbers behind the tokens of a document that are no tokens.
        only_text: Whether rows are plain text.
    """

    recorded = ""
    reader: RowReader | None = None
    num_documents = 1
    num_values = 0
    only_text = False

    def texts_of(self, row: DataRow) -> Sequence[PlainRow]:
        """Return the texts of a row that are tokenized.

        Raises:
            DataError: The row is not of this kind.
        """
        return [cast("PlainRow", row)]

    def titles_of(self, row: DataRow) -> Sequence[str]:
        """Return what previews call each of these texts."""
        return [cast("PlainRow", row).title]

    def fault_of(self, texts: Sequence[Encoded], row: DataRow, max_length: int) -> RowError | None:
        """Return why an example of these texts, each cut to ``max_length`` tokens, cannot be trained."""
        return None

    def documents_of(self, examples: Sequence[Example], max_length: int, last: Any) -> tuple[list[CodedDocument], Any]:
        """Return the documents of some examples, and ``last`` for the next call.

        Args:
            last: None in the first call.
        """
        return [CodedDocument(text) for _, (text,) in examples], None

    def collate(self, batch: Batch, facts: Sequence[DocumentFacts | None]) -> Batch:
        """Return a micro-batch with what losses read of its examples.

        Args:
            batch: Padded documents; all first documents of examples, then all second ones.
            facts: Numbers of the document of each row. None for rows that only fill the micro-batch.
        """
        return batch

    def summary(self, roles: npt.NDArray[np.uint8]) -> str:
        """Return the number of examples in words, given the roles of all documents."""
        return some(len(roles) // self.num_documents, "row")


def row_kind(name: str) -> RowKind:
    """Return a kind by the file of this package and the object there, as in "pair_rows.PAIRS"."""
    file, _, made = name.partition(".")
    return cast("RowKind", getattr(import_module(f"megatrain.data.{file}"), made))
