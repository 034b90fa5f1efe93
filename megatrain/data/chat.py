"""Rows to tokens with a loss mask that is proven: what is trained decodes to exactly what the assistant wrote."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatrain.data.errors import DataError
from megatrain.data.formats import Completion, Conversation, Document, Row
from megatrain.data.masks import ChatRenderer, Span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TrainOn = Literal["assistant", "completion", "all"]
Offsets = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of one row.

    Attributes:
        tokens: ids.
        trained: for each token, whether the loss asks for it. Never true for the first: nothing predicts it.
        is_text: whether it is plain text, which may be cut into pieces.
    """

    tokens: list[int]
    trained: list[bool]
    is_text: bool

    @property
    def num_trained(self) -> int:
        return sum(self.trained)


class RowEncoder:
    """Turns rows into tokens and masks with one tokenizer.

    Args:
        tokenizer: a fast tokenizer; its chat template is used for conversations.
        train_on: "assistant": every assistant turn; "completion": the last one; "all": every token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, train_on: TrainOn = "assistant") -> None:
        self._tokenizer = tokenizer
        self._train_on = train_on
        self._renderer: ChatRenderer | None = None
        self._turn_ends: frozenset[int] = frozenset()
        self._special = frozenset(tokenizer.all_special_ids) | {
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        }

    def encode(self, row: Row) -> Encoded:
        """Return the tokens of a row.

        Raises:
            DataError: the chat template refuses it, or its mask cannot be proven.
        """
        if isinstance(row, Document):
            return self._encode_document(row)
        if isinstance(row, Completion):
            return self._encode_completion(row)
        return self._encode_conversation(row)

    def _tokens(self, text: str, *, special: bool = True) -> list[int]:
        ids = self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        assert isinstance(ids, list), type(ids)
        return ids

    def _with_end(self, tokens: list[int]) -> list[int]:
        end = self._tokenizer.eos_token_id
        return [*tokens, end] if isinstance(end, int) and tokens[-1:] != [end] else tokens

    def _encode_document(self, row: Document) -> Encoded:
        tokens = self._with_end(self._tokens(row.text)) if row.text else []
        return _encoded(tokens, [True] * len(tokens), is_text=True)

    def _encode_completion(self, row: Completion) -> Encoded:
        """Encode both texts verbatim; the completion's tokens are those that follow the prompt's."""
        if not row.completion.strip():
            return _encoded([], [], is_text=False)
        whole = self._without_end(self._tokens(row.prompt + row.completion))
        prompt = self._without_end(self._tokens(row.prompt)) if row.prompt else whole[: self._num_start_tokens()]
        if whole[: len(prompt)] == prompt:
            completion = whole[len(prompt) :]
        else:  # a token crosses the border; keep the prompt as it will be at inference
            completion = self._tokens(row.completion, special=False)
        if not _same_text(self._decode(completion), row.completion):
            raise DataError(
                row.where,
                "the tokens of `completion` do not decode to its text, so the loss mask cannot be proven",
                "Move the border between prompt and completion to a space or line end",
            )
        tokens = self._with_end([*prompt, *completion])
        keep = self._train_on == "all"
        return _encoded(tokens, [keep] * len(prompt) + [True] * (len(tokens) - len(prompt)), is_text=False)

    def _without_end(self, tokens: list[int]) -> list[int]:
        """Remove an end token that the tokenizer itself appends to every text, as the T5 family does."""
        end = self._tokenizer.eos_token_id
        return tokens[:-1] if len(tokens) > 1 and tokens[-1] == end else tokens

    def _num_start_tokens(self) -> int:
        return len(self._without_end(self._tokens("a"))) - len(self._tokens("a", special=False))

    def _encode_conversation(self, row: Conversation) -> Encoded:
        renderer = self._ready_renderer()
        text = renderer.render(row.messages, row.where)
        coded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        tokens: list[int] = coded["input_ids"]
        if self._train_on == "all" and not row.trained_from:
            return _encoded(tokens, [True] * len(tokens), is_text=False)
        trained = [False] * len(tokens)
        for span in renderer.assistant_spans(row.messages, text, row.where, self._chosen(row)):
            chosen = self._tokens_of(span, text, coded["offset_mapping"], tokens, row.where)
            for index in chosen:
                trained[index] = True
        return _encoded(tokens, trained, is_text=False)

    def _chosen(self, row: Conversation) -> list[int]:
        turns = [
            i for i, message in enumerate(row.messages) if message["role"] == "assistant" and i >= row.trained_from
        ]
        return turns[-1:] if self._train_on == "completion" and not row.trained_from else turns

    def _tokens_of(self, span: Span, text: str, offsets: Offsets, tokens: Sequence[int], where: str) -> list[int]:
        """Return the indices of a span's tokens and its end-of-turn token, after proving that they are its text."""
        inside = [i for i, (start, end) in enumerate(offsets) if start < end and start < span.end and end > span.start]
        for i in inside:
            start, end = offsets[i]
            if text[start : span.start].strip() or text[span.end : end].strip():
                raise DataError(
                    where,
                    f"the token {text[start:end]!r} joins text of the assistant and of the chat template",
                    "Use a template that puts a special token or white space between them",
                )
        found = self._decode([tokens[i] for i in inside])
        written = text[span.start : span.end]
        if not _same_text(found, written):
            raise DataError(
                where,
                f"the trained tokens decode to {_short(found)}, but the assistant wrote {_short(written)}",
                "The tokenizer changes this text; remove the row",
            )
        after = inside[-1] + 1 if inside else len(tokens)
        while after < len(tokens) and not text[offsets[after][0] : offsets[after][1]].strip():
            after += 1
        if after < len(tokens) and tokens[after] in self._turn_ends:
            return list(range(inside[0], after + 1))  # white space before the end of turn has to be produced too
        return inside

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _ready_renderer(self) -> ChatRenderer:
        """Make the renderer on first use, and learn from a probe which special token ends a turn of the assistant."""
        if self._renderer is None:
            self._renderer = ChatRenderer(self._tokenizer)
            ends = {self._tokenizer.eos_token_id} if isinstance(self._tokenizer.eos_token_id, int) else set()
            turn = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "qzsentinel"}]
            last = self._special_after_sentinel(self._renderer, turn)
            if last is not None:
                ends |= {last, self._special_after_sentinel(self._renderer, turn * 2) or last}
            self._turn_ends = frozenset(ends)
        return self._renderer

    def _special_after_sentinel(self, renderer: ChatRenderer, messages: list[dict[str, str]]) -> int | None:
        try:
            text = renderer.render(messages, "")
        except DataError:
            return None
        rest = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        border = text.find("qzsentinel") + len("qzsentinel")
        for token, (start, end) in zip(rest["input_ids"], rest["offset_mapping"], strict=True):
            if start >= border and text[start:end].strip():
                return int(token) if token in self._special else None
        return None


def _encoded(tokens: list[int], trained: list[bool], *, is_text: bool) -> Encoded:
    assert len(tokens) == len(trained), (len(tokens), len(trained))
    return Encoded(tokens, [False, *trained[1:]] if trained else [], is_text)


def _same_text(found: str, written: str) -> bool:
    """Compare texts without the white space around them, which neighbouring tokens may own."""
    found, written = found.strip(), written.strip()
    return found == written or unicodedata.normalize("NFKC", found) == unicodedata.normalize("NFKC", written)


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
