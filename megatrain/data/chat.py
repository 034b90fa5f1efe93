"""Tokenization of rows, with loss masks. Checks that the tokens in the loss decode to exactly the assistant's text."""

from __future__ import annotations

import itertools
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

from megatrain.data.formats import Conversation, Document, PlainRow, PromptCompletion, Tokenized
from megatrain.data.images import ImageRef, ImageSpan
from megatrain.data.masks import EMPTY, NO_PLACE, PART_LEFT_OUT, REMEDY, ChatRenderer, MessageSpan, texts_in
from megatrain.data.messages import with_text_arguments
from megatrain.data.rows_report import RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from megatrain.data.images import ImageProcessor

TrainOn = Literal["assistant", "last_assistant", "completion", "all"]
Offsets = Sequence[tuple[int, int]]
_PROBE = "qzsentinel"


@dataclass(frozen=True, slots=True)
class TokenizedRow:
    """Tokens of one row.

    Attributes:
        trained: Loss mask, one flag per token. The first flag is false, because no token predicts the first token.
        is_text: Whether the row is plain text. Plain text can be split into several documents.
        untrained_turns: Reason for each assistant turn that should be in the loss but cannot be.
        num_turns: Number of assistant turns that should be in the loss.
        left_out: Fields of the row that the chat template does not render.
        special_tokens: Special tokens that occur in the row's text.
        is_start: Whether these tokens start a plain text. Large text files are read in pieces.
        is_end: Whether these tokens end a plain text.
        image_tokens: Index range of each image's tokens.
    """

    tokens: list[int]
    trained: list[bool]
    is_text: bool
    untrained_turns: tuple[str, ...] = ()
    is_start: bool = True
    is_end: bool = True
    images: tuple[ImageRef, ...] = ()
    image_tokens: tuple[range, ...] = ()
    num_turns: int = 0
    left_out: tuple[str, ...] = ()
    special_tokens: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _RowText:
    """Text to tokenize for one row.

    Attributes:
        finish: Function that converts the text's tokens and character offsets to the row's tokens. Raises RowError.
        has_special: Whether the tokenizer adds its special tokens around the text.
        has_offsets: Whether ``finish`` needs each token's character offsets.
    """

    finish: Callable[[list[int], Offsets], TokenizedRow]
    text: str = ""
    has_special: bool = True
    has_offsets: bool = False
    special_tokens: tuple[str, ...] = ()

    @property
    def options(self) -> tuple[bool, bool]:
        """Tokenizer options. Texts with equal options are tokenized in one call."""
        return self.has_special, self.has_offsets


@dataclass(frozen=True, slots=True)
class _RenderedRow:
    """A rendered conversation.

    Attributes:
        plain: Rendered text before the image placeholders were inserted.
        inserted: Positions of the image placeholders in ``text``.
    """

    row: Conversation
    plain: str
    text: str
    inserted: Sequence[ImageSpan]
    images: tuple[ImageRef, ...]
    left_out: tuple[str, ...]


class RowEncoder:
    """Converter of rows to tokens and loss masks.

    Args:
        tokenizer: A fast tokenizer. Conversations are rendered with its chat template.
        train_on: Text in the loss. "assistant": every assistant turn. "last_assistant": the last assistant turn.
            "all": every token. "completion": the text after the prompt; without a prompt, the conversation's last turn.
        images: Processor for the rows' images, or None to reject rows with images.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        train_on: TrainOn = "assistant",
        images: ImageProcessor | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._images = images
        if images is not None and tokenizer.chat_template is None:
            tokenizer.chat_template = images.chat_template
        self._train_on = train_on
        special = set(tokenizer.all_special_ids) | {
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        if tokenizer.bos_token_id != tokenizer.eos_token_id:
            special.discard(tokenizer.bos_token_id)
        self._end_ids = frozenset(special)
        named = {*tokenizer.all_special_tokens, *(tokenizer.convert_ids_to_tokens(sorted(special)))}
        longest_first = sorted((str(name) for name in named if name), key=lambda name: (-len(name), name))
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @cached_property
    def start_tokens(self) -> tuple[int, ...]:
        """Tokens that the tokenizer adds before every text, usually ``<bos>`` or nothing."""
        return self._added_tokens[0]

    @cached_property
    def _added_tokens(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Tokens that the tokenizer adds before and after every text."""
        bare, whole = self._tokenize("a", special=False), self._tokenize("a")
        for count in range(len(whole) - len(bare) + 1):
            if whole[count : count + len(bare)] == bare:
                return tuple(whole[:count]), tuple(whole[count + len(bare) :])
        return (), ()

    def encode_many(self, rows: Sequence[PlainRow | RowError]) -> Iterator[TokenizedRow | RowError]:
        """Yield each row's tokens, or the error that makes the row unusable. Tokenize on all cores.

        Args:
            rows: Rows and errors. Each error is yielded unchanged.

        Raises:
            DataError: A row is a conversation, but the tokenizer has no chat template.
        """
        texts = [_check_unicode(row, self._prepare_text(row)) for row in rows]
        ready = [each for each in texts if isinstance(each, _RowText) and each.text]
        batches = {key: [each.text for each in ready if each.options == key] for key in {e.options for e in ready}}
        encoded = {options: self._tokenize_all(found, *options) for options, found in batches.items()}
        for each in texts:
            if isinstance(each, RowError):
                yield each
                continue
            tokens, offsets = next(encoded[each.options]) if each.text else ([], [])
            try:
                yield replace(each.finish(tokens, offsets), special_tokens=each.special_tokens)
            except RowError as error:
                yield error

    def _tokenize_all(
        self, texts: list[str], has_special: bool, has_offsets: bool
    ) -> Iterator[tuple[list[int], Offsets]]:
        found: Any = self._tokenizer(
            texts, add_special_tokens=has_special, return_offsets_mapping=has_offsets, verbose=False
        )
        return zip(found["input_ids"], found["offset_mapping"] if has_offsets else itertools.repeat(()), strict=False)

    def _prepare_text(self, row: PlainRow | RowError) -> _RowText | RowError:
        if isinstance(row, RowError):
            return row
        if isinstance(row, Tokenized):
            return _RowText(partial(_finish_tokenized, row))
        if isinstance(row, Document):
            special = self._find_special_tokens(row.text)
            return _RowText(partial(self._finish_document, row), row.text, row.is_start, special_tokens=special)
        if isinstance(row, PromptCompletion):
            text = row.prompt + row.completion if row.completion.strip() else ""
            finish, special = partial(self._finish_completion, row), self._find_special_tokens(text)
            return _RowText(finish, text, has_offsets=True, special_tokens=special)
        try:
            rendered = self._render(row)
        except RowError as error:
            return error
        contents = "\n".join(text for message in rendered.row.messages for text in texts_in(message))
        finish, special = partial(self._finish_conversation, rendered), self._find_special_tokens(contents)
        return _RowText(finish, rendered.text, has_special=False, has_offsets=True, special_tokens=special)

    def _render(self, row: Conversation) -> _RenderedRow:
        """Render a conversation, and insert its image tokens. Raises RowError."""
        renderer = self._renderer
        try:
            plain = renderer.render(row.messages, row.where, tools=row.tools)
        except RowError as error:
            if not any(message.get("tool_calls") for message in row.messages):
                raise
            try:  # some chat templates expect the arguments of tool calls as a JSON string
                row = replace(row, messages=with_text_arguments(row.messages))
                plain = renderer.render(row.messages, row.where, tools=row.tools)
            except RowError:
                raise error from None
        text, inserted, images = self._insert_images(row, plain)
        left_out = renderer.find_omitted_fields(row.messages, plain, row.where, row.tools)
        return _RenderedRow(row, plain, text, inserted, images, left_out)

    def _find_special_tokens(self, text: str) -> tuple[str, ...]:
        """Return the distinct special tokens that occur in a text."""
        return tuple(dict.fromkeys(self._special.findall(text)))

    def _insert_images(self, row: Conversation, text: str) -> tuple[str, Sequence[ImageSpan], tuple[ImageRef, ...]]:
        if self._images is None:
            if row.images:
                raise RowError(
                    row.where,
                    "the row has images, but the run does not read images",
                    'Use an image-text model and set model.images = "frozen", or remove the row',
                    reason='a row has images, but the run does not read images (model.images = "off")',
                )
            return text, (), ()
        refs = tuple(named.ref() for named in row.images)
        return *self._images.insert(text, refs, row.where), refs

    def _tokenize(self, text: str, *, special: bool = True) -> list[int]:
        ids = self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        assert isinstance(ids, list), type(ids)
        return ids

    def _append_eos(self, tokens: list[int]) -> list[int]:
        end = self._tokenizer.eos_token_id
        return [*tokens, end] if isinstance(end, int) and tokens[-1:] != [end] else tokens

    def _finish_document(self, row: Document, tokens: list[int], _: Offsets) -> TokenizedRow:
        if not row.is_end:
            tokens = self._strip_end_tokens(tokens) if row.is_start else tokens
        elif tokens or not row.is_start:
            tokens = self._append_eos(tokens)
        trained = [not row.is_start, *([True] * len(tokens))][: len(tokens)]
        return TokenizedRow(tokens, trained, True, is_start=row.is_start, is_end=row.is_end)

    def _finish_completion(self, row: PromptCompletion, tokens: list[int], offsets: Offsets) -> TokenizedRow:
        """Return the tokens of a prompt and its completion. Every token with completion text is in the loss."""
        if not tokens:
            return _make_encoded([], [])
        tokens = self._strip_end_tokens(tokens)
        text, boundary = row.prompt + row.completion, len(row.prompt)
        begin = len(self.start_tokens) if tuple(tokens[: len(self.start_tokens)]) == self.start_tokens else 0
        first = begin
        if boundary:
            first = next((i for i in range(begin, len(tokens)) if offsets[i][1] > boundary), len(tokens))
        if self._is_same_text(self._decode(tokens[begin:]), text):
            # Offsets can omit a token's trailing white space, so the previous token may already have completion text.
            while first > begin and text.startswith(before := self._decode(tokens[begin:first])):
                if len(before) <= boundary:
                    break
                first -= 1
        elif first == len(tokens) or not self._is_same_fragment(
            self._decode(tokens[first:]), text[offsets[first][0] :]
        ):
            found = self._decode(tokens[first:])
            raise RowError(
                row.where,
                f"the tokens of `completion` decode to {_shorten(found)}, but the row has {_shorten(row.completion)}",
                "The tokenizer changes this text; remove the row",
                reason="the tokens of `completion` do not decode to its text",
            )
        keep = self._train_on == "all"
        trained = [keep] * first + [True] * (len(tokens) - first)
        tokens = self._append_eos(tokens)
        return _make_encoded(tokens, [*trained, True][: len(tokens)])

    def _strip_end_tokens(self, tokens: list[int]) -> list[int]:
        """Remove the end tokens that some tokenizers add after every text, for example T5's."""
        end = self._added_tokens[1]
        return tokens[: -len(end)] if end and tuple(tokens[-len(end) :]) == end else tokens

    def _finish_conversation(self, rendered: _RenderedRow, tokens: list[int], offsets: Offsets) -> TokenizedRow:
        encoded = replace(self._mask_conversation(rendered, tokens, offsets), left_out=rendered.left_out)
        if not rendered.inserted:
            return encoded
        image_ranges = [_find_touching_tokens(each.after, offsets) for each in rendered.inserted]
        trained = list(encoded.trained)
        for image_range in image_ranges:
            trained[image_range.start : image_range.stop] = [False] * len(image_range)
        return replace(encoded, trained=trained, images=rendered.images, image_tokens=tuple(image_ranges))

    def _mask_conversation(self, rendered: _RenderedRow, tokens: list[int], offsets: Offsets) -> TokenizedRow:
        row, text = rendered.row, rendered.text
        by_default = self._train_on == "all"
        turns = (
            [index for index, flag in enumerate(row.flags) if flag is False]
            if by_default
            else self._turns_to_train(row)
        )
        turns = [index for index in turns if row.messages[index]["role"] == "assistant"]
        if by_default and not turns:
            return _make_encoded(tokens, [True] * len(tokens))
        # Search the text without image tokens, because the search renders the template many times.
        spans = self._renderer.assistant_spans(row.messages, rendered.plain, row.where, turns, row.tools)
        spans = {index: _shift_span(span, rendered.inserted) for index, span in spans.items()}
        trained = [by_default] * len(tokens)
        for span in spans.values():
            if isinstance(span, MessageSpan):
                for at in self._find_span_tokens(span, text, offsets, tokens, row.where):
                    trained[at] = not by_default
        reasons = {index: why for index, why in spans.items() if isinstance(why, str)}
        if any(name.endswith("tool_calls") for name in rendered.left_out):
            why = NO_PLACE if "tool_calls" in rendered.left_out else PART_LEFT_OUT
            reasons.update({index: why for index in reasons if row.messages[index].get("tool_calls")})
        serious = [(index, why) for index, why in reasons.items() if why != EMPTY]
        if serious and (by_default or len(reasons) == len(turns)):
            index, why = serious[0]
            raise RowError(
                row.where,
                f"message {index + 1} cannot be separated from the rest: {why}",
                REMEDY if why not in (NO_PLACE, PART_LEFT_OUT) else "Set model.chat_template to a template with tools",
                reason=f"no turn of the assistant can be separated from the rest: {why}",
            )
        if not by_default:
            tokens, trained = self._close_last_turn(tokens, trained)
        return _make_encoded(tokens, trained, tuple(reasons.values()), len(turns))

    def _close_last_turn(self, tokens: list[int], trained: list[bool]) -> tuple[list[int], list[bool]]:
        """Append an end token if the template leaves the last turn open, so that the model learns to stop."""
        end = self._turn_end[0] if self._turn_end[0] is not None else self._tokenizer.eos_token_id
        shown = (index for index in reversed(range(len(tokens))) if self._decode(tokens[index : index + 1]).strip())
        last = next(shown, None)
        if last is None or not isinstance(end, int) or not trained[last] or tokens[last] in self._end_ids:
            return tokens, trained
        return [*tokens[: last + 1], end], [*trained[: last + 1], True]

    def _turns_to_train(self, row: Conversation) -> list[int]:
        """Return the indices of the messages in the loss. Flags in the row override ``train_on``."""
        turns = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
        named = [i for i in turns if i >= row.trained_from]
        if self._train_on == "last_assistant" or (self._train_on == "completion" and not row.trained_from):
            named = named[-1:]
        if not row.flags:
            return named
        return [i for i in turns if row.flags[i] or (row.flags[i] is None and i in named)]

    def _find_span_tokens(
        self, span: MessageSpan, text: str, offsets: Offsets, tokens: Sequence[int], where: str
    ) -> range:
        """Return the indices of a span's tokens and end-of-turn token. Verify that they decode to the span's text.

        Raises:
            RowError: The tokens decode to different text, or a token also contains text of the chat template.
        """
        inside = _find_overlapping_tokens(span, offsets)
        for i in inside:
            start, end = offsets[i]
            if text[start : span.start].strip() or text[span.end : end].strip():
                raise RowError(
                    where,
                    f"the token {text[start:end]!r} contains text of both the assistant and the chat template",
                    "Use a template that puts a special token or white space between them",
                    reason="a token contains text of both the assistant and the chat template",
                )
        if not inside and text[span.start : span.end].strip():
            raise RowError(where, f"no token contains the assistant's text in message {span.message + 1}")
        for is_special, group in itertools.groupby(inside, key=lambda i: tokens[i] in self._end_ids):
            part = list(group)
            found = self._decode([tokens[i] for i in part])
            written = text[offsets[part[0]][0] : offsets[part[-1]][1]]
            if not is_special and not self._is_same_fragment(found, written):
                raise RowError(
                    where,
                    f"the trained tokens decode to {_shorten(found)}, but the assistant wrote {_shorten(written)}",
                    "The tokenizer changes this text; remove the row",
                    reason="the trained tokens do not decode to what the assistant wrote",
                )
        if not inside:
            return range(0)
        return range(inside[0], self._find_span_end(span, inside, text, offsets, tokens))

    def _find_span_end(
        self, span: MessageSpan, inside: Sequence[int], text: str, offsets: Offsets, tokens: Sequence[int]
    ) -> int:
        """Return the index after a span's end-of-turn token, or after its last token if it has no end-of-turn token."""
        after = inside[-1] + 1
        end_token, end_text = self._turn_end
        usual = (end_token, self._tokenizer.eos_token_id)
        shown = next((i for i in reversed(inside) if text[slice(*offsets[i])].strip()), inside[-1])
        if tokens[shown] in usual:  # the span already includes the end-of-turn token
            return after
        at = after  # white space before the end-of-turn token is also in the loss
        while at < len(tokens) and not text[slice(*offsets[at])].strip():
            at += 1
        if at < len(tokens) and (
            tokens[at] in usual or (tokens[at] in self._end_ids and tokens[shown] not in self._end_ids)
        ):
            at += 1
            return at + (tokens[at : at + 1] == [self._tokenizer.eos_token_id] != tokens[at - 1 : at])
        end = span.end + len(end_text)
        if end_text and text.startswith(end_text, span.end):
            at = after
            while at < len(tokens) and offsets[at][1] < end:
                at += 1
            if at < len(tokens) and offsets[at][1] == end:
                return at + 1
        return after

    def _is_same_text(self, found: str, written: str) -> bool:
        """Return whether texts are equal after NFKC normalization, except for white space next to special tokens."""
        if found == written:
            return True
        found, written = (unicodedata.normalize("NFKC", text) for text in (found, written))
        if found == written:
            return True
        around = re.compile(rf"\s*({self._special.pattern})\s*")
        return around.sub(r"\1", found) == around.sub(r"\1", written)

    def _is_same_fragment(self, found: str, written: str) -> bool:
        """Return whether two fragments are equal up to white space at their ends, which adjacent tokens can contain."""
        return self._is_same_text(found.strip(), written.strip())

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.backend_tokenizer.decode(list(tokens), skip_special_tokens=False))

    @cached_property
    def _renderer(self) -> ChatRenderer:
        return ChatRenderer(self._tokenizer, in_parts=self._images is not None)

    @cached_property
    def _turn_end(self) -> tuple[int | None, str]:
        """Id of the token that ends an assistant turn, or None; and the end-of-turn text if the end is plain text."""
        turn = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": _PROBE}]
        try:
            text = self._renderer.render(turn * 2, "")
        except RowError:
            return None, ""
        boundary = text.find(_PROBE) + len(_PROBE)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            if start >= boundary and text[start:end].strip():
                if token in self._end_ids:
                    return int(token), ""
                break
        last = text[text.rfind(_PROBE) + len(_PROBE) :].rstrip()
        return None, last if text.startswith(last, boundary) else ""


def _check_unicode(row: PlainRow | RowError, texts: _RowText | RowError) -> _RowText | RowError:
    """Return the texts, or an error if they contain a lone surrogate. JSON can express surrogates, UTF-8 cannot."""
    if isinstance(row, RowError) or isinstance(texts, RowError):
        return texts
    try:
        texts.text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        problem = f"the text contains a lone surrogate ({half}), which is half of a character"
        return RowError(row.where, problem, reason="the text contains a lone surrogate")
    return texts


def _find_overlapping_tokens(span: MessageSpan, offsets: Offsets) -> list[int]:
    """Return the indices of the nonempty tokens that overlap a span."""
    touching = _find_touching_tokens(range(span.start, span.end), offsets)
    return [i for i in touching if offsets[i][0] < offsets[i][1] and offsets[i][1] > span.start]


def _shift_span(span: MessageSpan | str, inserted: Sequence[ImageSpan]) -> MessageSpan | str:
    """Move a span to account for the image placeholders inserted into its text."""
    if isinstance(span, str):
        return span
    start = end = 0
    for each in inserted:
        gained = each.after.stop - each.before.stop
        start, end = (gained if each.before.stop <= at else had for at, had in ((span.start, start), (span.end, end)))
    return MessageSpan(span.message, span.start + start, span.end + end)


def _find_touching_tokens(characters: range, offsets: Offsets) -> range:
    """Return the index range of the tokens that overlap a character range. ``offsets`` must be sorted by start."""
    first = bisect_left(offsets, characters.start, key=itemgetter(0))
    while first and offsets[first - 1][1] > characters.start:
        first -= 1
    return range(first, bisect_left(offsets, characters.stop, lo=first, key=itemgetter(0)))


def _finish_tokenized(row: Tokenized, *_: object) -> TokenizedRow:
    tokens = list(row.tokens)
    if row.trained is None:
        return TokenizedRow(tokens, [False, *([True] * len(tokens))][: len(tokens)], True)
    return _make_encoded(tokens, list(row.trained))


def _make_encoded(
    tokens: list[int], trained: list[bool], untrained_turns: tuple[str, ...] = (), num_turns: int = 0
) -> TokenizedRow:
    assert len(tokens) == len(trained), (len(tokens), len(trained))
    return TokenizedRow(tokens, [False, *trained[1:]] if trained else [], False, untrained_turns, num_turns=num_turns)


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
