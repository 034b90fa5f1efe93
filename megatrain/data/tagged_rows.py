"""Row kind for labelled answers (KTO). Each prompt becomes two documents, one with its answer and one with another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatrain.data.formats import DataRow, PlainRow
from megatrain.data.pair_rows import CHOSEN, REJECTED, PairRows
from megatrain.data.preference_format import Preference
from megatrain.data.row_kind import TokenDocument

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from megatrain.data.chat import TokenizedRow
    from megatrain.data.row_kind import Example

#: Role of a prompt with another example's answer. Good answers have the role CHOSEN, bad answers the role REJECTED.
MISMATCHED = 3
#: An answer's tokens and loss mask.
_Answer = tuple[list[int], list[bool]]


class AnswerRows(PairRows):
    """Row kind for single answers with a label. A pair is treated as one good and one bad answer."""

    key_name = "answers"

    def texts_of(self, row: DataRow) -> Sequence[PlainRow]:
        """Return the row's answers, each with the prompt."""
        assert isinstance(row, Preference), row
        return row.answers

    def titles_of(self, row: DataRow) -> Sequence[str]:
        """Return "a good answer" or "a bad answer" for each answer of the row."""
        return ["a good answer" if is_good else "a bad answer" for is_good in _answer_labels(row)]

    def documents_of(self, examples: Sequence[Example], max_length: int, state: Any) -> tuple[list[TokenDocument], Any]:
        """Return two documents per answer: its prompt with the answer, and its prompt with the previous answer.

        The first prompt gets the last answer of these rows, because TRL also rotates the answers within a batch. If
        there is only one answer, its prompt gets ``state``, the last answer of the previous call.
        """
        labelled_texts = [pair for row, texts in examples for pair in zip(texts, _answer_labels(row), strict=True)]
        if not labelled_texts:
            return [], state
        documents = []
        parts = [_split_answer(text) for text, _ in labelled_texts]
        previous_answer = parts[-1][1] if len(parts) > 1 or state is None else state
        for (text, is_good), (prompt, answer) in zip(labelled_texts, parts, strict=True):
            documents.append(TokenDocument(text, role=CHOSEN if is_good else REJECTED))
            tokens = [*prompt, *previous_answer[0]][:max_length]
            trained = [*([False] * len(prompt)), *previous_answer[1]][:max_length]
            documents.append(TokenDocument(replace(text, tokens=tokens, trained=trained), False, MISMATCHED))
            previous_answer = answer
        return documents, parts[-1][1]

    def summary(self, roles: npt.NDArray[np.uint8]) -> str:
        """Return the numbers of good and bad answers as text."""
        num_good = int((roles[::2] == CHOSEN).sum())
        return f"{num_good:,} good and {len(roles) // 2 - num_good:,} bad answers"


def _answer_labels(row: DataRow) -> tuple[bool, ...]:
    """Return whether each of a row's answers is good."""
    assert isinstance(row, Preference), row
    return (row.is_good,) if row.rejected is None else (row.is_good, False)


def _split_answer(text: TokenizedRow) -> tuple[list[int], _Answer]:
    """Return the prompt's tokens, and the answer's tokens and loss mask."""
    start = text.trained.index(True)
    return text.tokens[:start], (text.tokens[start:], text.trained[start:])


ANSWERS = AnswerRows()
