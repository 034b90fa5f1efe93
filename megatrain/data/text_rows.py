"""Row kind for plain text or tokens. Each text is split into documents of at most ``max_length`` tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatrain.data.formats import Conversation, DataRow, PlainRow, PromptCompletion
from megatrain.data.row_kind import RowKind
from megatrain.data.rows_report import DataError

if TYPE_CHECKING:
    from megatrain.data.chat import TokenizedRow


class TextRows(RowKind):
    """Row kind for plain text."""

    is_text = True

    def texts_of(self, row: DataRow) -> Sequence[PlainRow]:
        """Return the row's text. Raises DataError if the row is not plain text."""
        if isinstance(row, Conversation | PromptCompletion):
            raise DataError(row.location, 'task = "pretrain" needs plain text, and this row is not', 'Set task = "sft"')
        return super().texts_of(row)


TEXTS = TextRows()


@dataclass(frozen=True, slots=True)
class CutDocument:
    """A document that contains one piece of a text.

    Attributes:
        trained: Loss mask.
        num_repeated: Number of tokens at the start that repeat the text's start tokens.
    """

    tokens: list[int]
    trained: list[bool]
    num_repeated: int


class TextCutter:
    """Splitter of texts into pieces of at most ``max_length`` tokens. Keeps an incomplete piece for the next call.

    If a text begins with the tokenizer's start tokens (``<bos>``), all of its pieces begin with them. The model uses
    them as an attention sink. A piece's first token is not in the loss, because the tokens that predict it are in the
    previous piece.

    Args:
        max_length: Maximum tokens in a piece, including start tokens.
        start_tokens: Tokens that the tokenizer puts before every text.
        join_texts: Whether to concatenate texts, so that all pieces except the last have ``max_length`` tokens. A
            text's first token is in the loss if another text precedes it in the piece.
    """

    def __init__(self, max_length: int, start_tokens: Sequence[int] = (), *, join_texts: bool = False) -> None:
        self._max_length, self._join_texts = max_length, join_texts
        self._start_tokens = list(start_tokens) if len(start_tokens) < max_length - 1 else []
        self._tokens: list[int] = []
        self._trained: list[bool] = []
        self._repeated_tokens: list[int] = []  # start tokens to repeat in this text's later pieces
        self._is_first = True

    def cut(self, text: TokenizedRow) -> Iterator[CutDocument]:
        """Yield the pieces that this part of a text completes. Without joining, the end of a text completes a piece."""
        trained = text.trained
        if text.is_start:
            self._repeated_tokens = self._start_tokens if self._has_start_tokens(text.tokens) else []
            self._is_first = self._is_first or not self._join_texts
            if self._join_texts and self._tokens:
                trained = [True] * len(trained[:1]) + trained[1:]
        self._tokens += text.tokens
        self._trained += trained
        yield from self._iter_pieces(is_end=text.is_end and not self._join_texts)

    def finish(self) -> Iterator[CutDocument]:
        """Yield the remainder of the joined texts. The next text starts a new piece."""
        yield from self._iter_pieces(is_end=True)
        self._is_first = True

    def _has_start_tokens(self, tokens: Sequence[int]) -> bool:
        return list(tokens[: len(self._start_tokens)]) == self._start_tokens

    def _iter_pieces(self, *, is_end: bool) -> Iterator[CutDocument]:
        start = 0
        while True:
            next_tokens = self._tokens[start : start + len(self._start_tokens)]
            prefix = [] if self._is_first or self._has_start_tokens(next_tokens) else self._repeated_tokens
            end = start + self._max_length - len(prefix)
            if end > len(self._tokens) and not (is_end and start < len(self._tokens)):
                break
            trained = self._trained[start:end]
            trained[0] = False  # not in the loss, because the tokens that predict it are not in this piece
            yield CutDocument([*prefix, *self._tokens[start:end]], [*([False] * len(prefix)), *trained], len(prefix))
            self._is_first = False
            start = min(end, len(self._tokens))
        del self._tokens[:start], self._trained[:start]
