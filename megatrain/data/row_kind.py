"""Base class of row kinds. A row kind converts a task's rows to documents, and documents to micro-batches.

The kinds are the objects `row_kind.CHATS`, `text_rows.TEXTS`, `pair_rows.PAIRS`, `pair_rows.TEXT_PAIRS` and
`tagged_rows.ANSWERS`. The rest of this package only calls the methods of `RowKind` and does not distinguish between
kinds. The table in `megatrain/tasks/table.py` selects the kind for each task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from megatrain.data.rows_report import RowError, pluralize

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from megatrain.data.chat import TokenizedRow
    from megatrain.data.formats import DataRow, PlainRow, RowReader

    Batch = dict[str, Tensor]
    #: A row and its tokenized texts. Each text is truncated to ``max_length`` tokens.
    Example = tuple[DataRow, Sequence[TokenizedRow]]


@dataclass(frozen=True, slots=True)
class TokenDocument:
    """A tokenized document, before it is written to a dataset.

    Attributes:
        begins_row: Whether this is the first document of a row.
        role: Role of the document in its example, or 0 if the example has only one document.
        value: Extra value to store after the tokens, and the value's flag in the loss mask. None for no extra value.
    """

    text: TokenizedRow
    begins_row: bool = True
    role: int = 0
    value: tuple[int, bool] | None = None


class DocumentFacts(NamedTuple):
    """A document's role, extra value and reference log-probability. Each is 0 if the document does not have it."""

    role: int
    value: int
    reference: float


class RowKind:
    """Base class of row kinds. The base class converts each row to one document.

    Attributes:
        key_name: Name of the kind in cache keys and fingerprints. It must never change. "" if each row is one document.
        reader: Reader of the rows, or None if rows can have any format that "auto" detects.
        num_documents: Number of documents per example. They always share a micro-batch.
        num_values: Number of extra values stored after a document's tokens.
        is_text: Whether all rows are plain text.
    """

    key_name = ""
    reader: RowReader | None = None
    num_documents = 1
    num_values = 0
    is_text = False

    def texts_of(self, row: DataRow) -> Sequence[PlainRow]:
        """Return the texts to tokenize for a row. Raises DataError if the row is of a different kind."""
        return [cast("PlainRow", row)]

    def titles_of(self, row: DataRow) -> Sequence[str]:
        """Return the titles of a row's texts in previews."""
        return [cast("PlainRow", row).title]

    def rejection(self, texts: Sequence[TokenizedRow], row: DataRow, max_length: int) -> RowError | None:
        """Return an error if the texts, truncated to ``max_length`` tokens, cannot be used together, else None."""
        return None

    def documents_of(self, examples: Sequence[Example], max_length: int, state: Any) -> tuple[list[TokenDocument], Any]:
        """Convert examples to documents. Return the documents, and the value of ``state`` for the next call.

        Args:
            state: State that the previous call returned, or None in the first call.
        """
        return [TokenDocument(text) for _, (text,) in examples], None

    def collate(self, batch: Batch, facts: Sequence[DocumentFacts | None]) -> Batch:
        """Add the inputs that this kind's losses need to a micro-batch.

        Args:
            batch: Padded documents. All examples' first documents come first, then all second documents.
            facts: Facts about the document in each row. None for empty rows that fill up the micro-batch.
        """
        return batch

    def summary(self, roles: npt.NDArray[np.uint8]) -> str:
        """Return the number of examples as text, for example "3 rows", from the roles of all documents."""
        return pluralize(len(roles) // self.num_documents, "row")


#: Row kind for conversations, prompts with completions, plain texts and token lists. Each row becomes one document.
CHATS = RowKind()


def row_kind(name: str) -> RowKind:
    """Return the row kind with a module and object name, for example "pair_rows.PAIRS"."""
    module_name, _, object_name = name.partition(".")
    return cast("RowKind", getattr(import_module(f"megatrain.data.{module_name}"), object_name))
