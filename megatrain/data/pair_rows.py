"""Row kinds for pairs of answers. Each pair becomes two documents: the chosen answer, then the rejected answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatrain.base.batch_keys import DESIRABLE, IGNORED_LABEL, MARGIN, REFERENCE
from megatrain.data.formats import DataRow, PlainRow
from megatrain.data.preference_format import PREFERENCE, Preference
from megatrain.data.row_kind import DocumentFacts, RowKind, TokenDocument
from megatrain.data.rows_report import DataError, RowError, pluralize

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from megatrain.data.chat import TokenizedRow
    from megatrain.data.row_kind import Batch, Example

# Functions import numpy and torch only when they need them, so that configs can be read without them.

#: Roles of the better and the worse answer. Token caches store these values.
CHOSEN, REJECTED = 1, 2
#: Flag added to a document's role if a margin is stored after the document's tokens.
_HAS_MARGIN = 4


class PairRows(RowKind):
    """Row kind for pairs of answers. The losses of this kind compare the answers' log-probabilities."""

    key_name = "pairs"
    reader = PREFERENCE
    num_documents = 2

    def texts_of(self, row: DataRow) -> Sequence[PlainRow]:
        """Return the two answers, each with the prompt. Raises DataError if the row has only one answer."""
        assert isinstance(row, Preference), row
        if row.rejected is None:
            raise DataError(
                row.location,
                "the row has only one answer, with a label, but the loss compares two answers",
                'Set loss_type = "kto" in [preference]',
            )
        return row.answers

    def titles_of(self, row: DataRow) -> Sequence[str]:
        """Return the titles of the two answers."""
        return ("chosen", "rejected")

    def rejection(self, texts: Sequence[TokenizedRow], row: DataRow, max_length: int) -> RowError | None:
        """Return an error if both answers have the same first ``max_length`` tokens."""
        answer, *other_answers = [text.tokens[:max_length] for text in texts]
        if answer not in other_answers:
            return None
        is_cut = any(len(text.tokens) > max_length for text in texts)
        problem = "the two answers have the same tokens" + (" after truncation to data.max_length" if is_cut else "")
        return RowError(row.location, problem, "Raise data.max_length" if is_cut else "")

    def documents_of(self, examples: Sequence[Example], max_length: int, state: Any) -> tuple[list[TokenDocument], Any]:
        """Return two documents per pair: the chosen answer, then the rejected answer."""
        documents = []
        for _, (chosen, rejected) in examples:
            documents += [TokenDocument(chosen, True, CHOSEN), TokenDocument(rejected, False, REJECTED)]
        return documents, None

    def collate(self, batch: Batch, facts: Sequence[DocumentFacts | None]) -> Batch:
        """Add each answer's reference log-probability, and whether each example's first answer is desirable."""
        import torch

        reference = [0.0 if fact is None else fact.reference for fact in facts]
        is_good = [fact is not None and fact.role == CHOSEN for fact in facts[: len(facts) // 2]]
        return batch | {
            REFERENCE: torch.tensor(reference, dtype=torch.float32),
            DESIRABLE: torch.tensor(is_good, dtype=torch.bool),
        }

    def summary(self, roles: npt.NDArray[np.uint8]) -> str:
        """Return the number of pairs as text, for example "3 pairs"."""
        return pluralize(len(roles) // 2, "pair")


class TextPairRows(PairRows):
    """Row kind for pairs of texts with a margin. The losses of this kind compare the scores of two texts.

    The margin is stored after a document's tokens. Files, caches and checksums treat it as a token.
    """

    key_name = "texts"
    num_values = 1

    def documents_of(self, examples: Sequence[Example], max_length: int, state: Any) -> tuple[list[TokenDocument], Any]:
        """Return both texts of each pair. The loss mask selects the chosen text's margin and no tokens."""
        import numpy as np

        documents = []
        for row, (chosen, rejected) in examples:
            assert isinstance(row, Preference), row
            margin = int(np.float32(row.margin).view(np.int32))
            for text, role, value in ((chosen, CHOSEN, (margin, True)), (rejected, REJECTED, (0, False))):
                masked_text = replace(text, trained=[False] * len(text.tokens))
                documents.append(TokenDocument(masked_text, role == CHOSEN, role | _HAS_MARGIN, value))
        return documents, None

    def collate(self, batch: Batch, facts: Sequence[DocumentFacts | None]) -> Batch:
        """Replace the token labels with one label for each chosen text, and add the margins."""
        import numpy as np
        import torch

        half = len(facts) // 2
        labels = torch.full((len(facts), 2), IGNORED_LABEL, dtype=torch.int64)
        margins = torch.zeros(half, dtype=torch.float32)
        for index, fact in enumerate(facts[:half]):
            if fact is not None:
                labels[index, 1] = 0
                margins[index] = float(np.int32(fact.value).view(np.float32))
        return batch | {"labels": labels, MARGIN: margins}


PAIRS, TEXT_PAIRS = PairRows(), TextPairRows()
