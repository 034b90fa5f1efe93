"""Tokenization of rows, with verified loss masks: the tokens in the loss must decode to the assistant's text."""

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
from megatrain.data.masks import EMPTY_TEXT, OMITTED_CALLS, PARTIAL_CALLS, REMEDY, ChatRenderer, MessageSpan, iter_texts
from megatrain.data.messages import arguments_to_text
from megatrain.data.rows_report import RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from megatrain.data.images import ImageProcessor

TrainOn = Literal["assistant", "last_assistant", "completion", "all"]
Offsets = Sequence[tuple[int, int]]
_PROBE = "qzsentinel"


@dataclass(frozen=True, slots=True)
class TokenizedRow:
    """Tokens of a row, or of one of its texts if it has several.

    Attributes:
        trained: Loss mask, one flag per token. A text's first flag is false, because no token predicts the first token.
        is_text: Whether the row is plain text. Plain text can be split into several documents.
        untrained_turns: One reason for each assistant turn that should be in the loss but cannot be.
        num_turns: Number of assistant turns that should be in the loss.
        omitted_fields: Fields of the row that the chat template does not render.
        special_tokens: Special tokens that occur in the row's text.
        is_start: Whether this is the first piece of a text. Large text files are read in pieces.
        is_end: Whether this is the last piece of a text.
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
    omitted_fields: tuple[str, ...] = ()
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
        plain_text: Rendered text before the image tokens were inserted.
        image_spans: Position of each image's placeholder in ``plain_text``, and of its tokens in ``text``.
    """

    row: Conversation
    plain_text: str
    text: str
    image_spans: Sequence[ImageSpan]
    images: tuple[ImageRef, ...]
    omitted_fields: tuple[str, ...]


class RowEncoder:
    """Converter of rows to tokens and loss masks.

    Args:
        tokenizer: A fast tokenizer. Conversations are rendered with its chat template.
        train_on: Text in the loss. "assistant": every assistant turn. "last_assistant": the last assistant turn.
            "all": every token. "completion": the text after the prompt; without a prompt, the conversation's last turn.
        image_processor: Processor for the rows' images, or None to reject rows with images.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        train_on: TrainOn = "assistant",
        image_processor: ImageProcessor | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._image_processor = image_processor
        if image_processor is not None and tokenizer.chat_template is None:
            tokenizer.chat_template = image_processor.chat_template
        self._train_on = train_on
        special_ids = set(tokenizer.all_special_ids) | {
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        if tokenizer.bos_token_id != tokenizer.eos_token_id:
            special_ids.discard(tokenizer.bos_token_id)
        self._end_ids = frozenset(special_ids)
        names = {*tokenizer.all_special_tokens, *(tokenizer.convert_ids_to_tokens(sorted(special_ids)))}
        sorted_names = sorted((str(name) for name in names if name), key=lambda name: (-len(name), name))
        self._special_pattern = re.compile("|".join(map(re.escape, sorted_names)) or r"(?!)")

    @cached_property
    def start_tokens(self) -> tuple[int, ...]:
        """Tokens that the tokenizer adds before every text, usually ``<bos>`` or nothing."""
        return self._added_tokens[0]

    @cached_property
    def _added_tokens(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Tokens that the tokenizer adds before and after every text."""
        plain_ids, full_ids = self._tokenize("a", add_special=False), self._tokenize("a")
        for count in range(len(full_ids) - len(plain_ids) + 1):
            if full_ids[count : count + len(plain_ids)] == plain_ids:
                return tuple(full_ids[:count]), tuple(full_ids[count + len(plain_ids) :])
        return (), ()

    def encode_many(self, rows: Sequence[PlainRow | RowError]) -> Iterator[TokenizedRow | RowError]:
        """Yield each row's tokens, or the error that makes the row unusable. Tokenize on all cores.

        Args:
            rows: Rows and errors. Each error is yielded unchanged.

        Raises:
            DataError: A conversation needs a chat template that is missing, or that uses too much time or memory.
        """
        row_texts = [_check_unicode(row, self._prepare_text(row)) for row in rows]
        texts = [text for text in row_texts if isinstance(text, _RowText) and text.text]
        batches = {key: [text.text for text in texts if text.options == key] for key in {t.options for t in texts}}
        encodings = {options: self._tokenize_all(batch, *options) for options, batch in batches.items()}
        for row_text in row_texts:
            if isinstance(row_text, RowError):
                yield row_text
                continue
            tokens, offsets = next(encodings[row_text.options]) if row_text.text else ([], [])
            try:
                yield replace(row_text.finish(tokens, offsets), special_tokens=row_text.special_tokens)
            except RowError as error:
                yield error

    def _tokenize_all(
        self, texts: list[str], has_special: bool, has_offsets: bool
    ) -> Iterator[tuple[list[int], Offsets]]:
        batch: Any = self._tokenizer(
            texts, add_special_tokens=has_special, return_offsets_mapping=has_offsets, verbose=False
        )
        return zip(batch["input_ids"], batch["offset_mapping"] if has_offsets else itertools.repeat(()), strict=False)

    def _prepare_text(self, row: PlainRow | RowError) -> _RowText | RowError:
        if isinstance(row, RowError):
            return row
        if isinstance(row, Tokenized):
            return _RowText(partial(_finish_tokenized, row))
        if isinstance(row, Document):
            special_tokens = self._find_special_tokens(row.text)
            return _RowText(partial(self._finish_document, row), row.text, row.is_start, special_tokens=special_tokens)
        if isinstance(row, PromptCompletion):
            text = row.prompt + row.completion if row.completion.strip() else ""
            finish, special_tokens = partial(self._finish_completion, row), self._find_special_tokens(text)
            return _RowText(finish, text, has_offsets=True, special_tokens=special_tokens)
        try:
            rendered = self._render(row)
        except RowError as error:
            return error
        contents = "\n".join(text for message in rendered.row.messages for text in iter_texts(message))
        finish, special_tokens = partial(self._finish_conversation, rendered), self._find_special_tokens(contents)
        return _RowText(finish, rendered.text, has_special=False, has_offsets=True, special_tokens=special_tokens)

    def _render(self, row: Conversation) -> _RenderedRow:
        """Render a conversation, and insert its image tokens. Raises RowError."""
        renderer = self._renderer
        try:
            plain_text = renderer.render(row.messages, row.location, tools=row.tools)
        except RowError as error:
            if not any(message.get("tool_calls") for message in row.messages):
                raise
            try:  # some chat templates expect the arguments of tool calls as a JSON string
                row = replace(row, messages=arguments_to_text(row.messages))
                plain_text = renderer.render(row.messages, row.location, tools=row.tools)
            except RowError:
                raise error from None
        text, image_spans, images = self._insert_images(row, plain_text)
        omitted_fields = renderer.find_omitted_fields(row.messages, plain_text, row.location, row.tools)
        return _RenderedRow(row, plain_text, text, image_spans, images, omitted_fields)

    def _find_special_tokens(self, text: str) -> tuple[str, ...]:
        """Return the distinct special tokens that occur in a text."""
        return tuple(dict.fromkeys(self._special_pattern.findall(text)))

    def _insert_images(self, row: Conversation, text: str) -> tuple[str, Sequence[ImageSpan], tuple[ImageRef, ...]]:
        if self._image_processor is None:
            if row.images:
                raise RowError(
                    row.location,
                    "the row has images, but the run does not read images",
                    'Use an image-text model and set model.images = "frozen", or remove the row',
                    reason='a row has images, but the run does not read images (model.images = "off")',
                )
            return text, (), ()
        refs = tuple(image.ref() for image in row.images)
        return *self._image_processor.insert(text, refs, row.location), refs

    def _tokenize(self, text: str, *, add_special: bool = True) -> list[int]:
        ids = self._tokenizer(text, add_special_tokens=add_special, verbose=False)["input_ids"]
        assert isinstance(ids, list), type(ids)
        return ids

    def _append_eos(self, tokens: list[int]) -> list[int]:
        eos_id = self._tokenizer.eos_token_id
        return [*tokens, eos_id] if isinstance(eos_id, int) and tokens[-1:] != [eos_id] else tokens

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
            return _make_row([], [])
        tokens = self._strip_end_tokens(tokens)
        text, boundary = row.prompt + row.completion, len(row.prompt)
        start = len(self.start_tokens) if tuple(tokens[: len(self.start_tokens)]) == self.start_tokens else 0
        split = start
        if boundary:
            split = next((i for i in range(start, len(tokens)) if offsets[i][1] > boundary), len(tokens))
        if self._is_same_text(self._decode(tokens[start:]), text):
            # Offsets can exclude a token's trailing white space. If it belongs to the completion, move `split` left.
            while split > start and text.startswith(prefix := self._decode(tokens[start:split])):
                if len(prefix) <= boundary:
                    break
                split -= 1
        elif split == len(tokens) or not self._is_same_fragment(
            self._decode(tokens[split:]), text[offsets[split][0] :]
        ):
            decoded = self._decode(tokens[split:])
            raise RowError(
                row.location,
                f"the tokens of `completion` decode to {_shorten(decoded)}, but the row has {_shorten(row.completion)}",
                "The tokenizer changes this text; remove the row",
                reason="the tokens of `completion` do not decode to its text",
            )
        trained = [self._train_on == "all"] * split + [True] * (len(tokens) - split)
        tokens = self._append_eos(tokens)
        return _make_row(tokens, [*trained, True][: len(tokens)])

    def _strip_end_tokens(self, tokens: list[int]) -> list[int]:
        """Remove the end tokens that some tokenizers, such as T5's, add after every text."""
        end_tokens = self._added_tokens[1]
        return tokens[: -len(end_tokens)] if end_tokens and tuple(tokens[-len(end_tokens) :]) == end_tokens else tokens

    def _finish_conversation(self, rendered: _RenderedRow, tokens: list[int], offsets: Offsets) -> TokenizedRow:
        tokenized = replace(self._mask_conversation(rendered, tokens, offsets), omitted_fields=rendered.omitted_fields)
        if not rendered.image_spans:
            return tokenized
        image_ranges = [_find_touching_tokens(span.expansion, offsets) for span in rendered.image_spans]
        trained = list(tokenized.trained)
        for image_range in image_ranges:
            trained[image_range.start : image_range.stop] = [False] * len(image_range)
        return replace(tokenized, trained=trained, images=rendered.images, image_tokens=tuple(image_ranges))

    def _mask_conversation(self, rendered: _RenderedRow, tokens: list[int], offsets: Offsets) -> TokenizedRow:
        row, text = rendered.row, rendered.text
        train_all = self._train_on == "all"
        turns = (
            [index for index, flag in enumerate(row.flags) if flag is False]
            if train_all
            else self._find_trained_turns(row)
        )
        turns = [index for index in turns if row.messages[index]["role"] == "assistant"]
        if train_all and not turns:
            return _make_row(tokens, [True] * len(tokens))
        # Search the text without image tokens, because the search compares it with renderings, which have none.
        spans = self._renderer.find_assistant_spans(row.messages, rendered.plain_text, row.location, turns, row.tools)
        spans = {index: _shift_span(span, rendered.image_spans) for index, span in spans.items()}
        trained = [train_all] * len(tokens)
        for span in spans.values():
            if isinstance(span, MessageSpan):
                for token_index in self._find_span_tokens(span, text, offsets, tokens, row.location):
                    trained[token_index] = not train_all
        reasons = {index: reason for index, reason in spans.items() if isinstance(reason, str)}
        if any(name.endswith("tool_calls") for name in rendered.omitted_fields):
            reason = OMITTED_CALLS if "tool_calls" in rendered.omitted_fields else PARTIAL_CALLS
            reasons.update({index: reason for index in reasons if row.messages[index].get("tool_calls")})
        failures = [(index, reason) for index, reason in reasons.items() if reason != EMPTY_TEXT]
        if failures and (train_all or len(reasons) == len(turns)):
            index, reason = failures[0]
            is_lost_call = reason in (OMITTED_CALLS, PARTIAL_CALLS)
            raise RowError(
                row.location,
                f"message {index + 1} cannot be separated from the rest: {reason}",
                "Set model.chat_template to a template with tools" if is_lost_call else REMEDY,
                reason=f"no turn of the assistant can be separated from the rest: {reason}",
            )
        if not train_all:
            tokens, trained = self._close_last_turn(tokens, trained)
        return _make_row(tokens, trained, tuple(reasons.values()), len(turns))

    def _close_last_turn(self, tokens: list[int], trained: list[bool]) -> tuple[list[int], list[bool]]:
        """Append an end token if the template leaves the last turn open, so that the model learns to stop."""
        end_id = self._turn_end[0] if self._turn_end[0] is not None else self._tokenizer.eos_token_id
        visible_indices = (i for i in reversed(range(len(tokens))) if self._decode(tokens[i : i + 1]).strip())
        index = next(visible_indices, None)
        if index is None or not isinstance(end_id, int) or not trained[index] or tokens[index] in self._end_ids:
            return tokens, trained
        return [*tokens[: index + 1], end_id], [*trained[: index + 1], True]

    def _find_trained_turns(self, row: Conversation) -> list[int]:
        """Return the indices of the messages in the loss. Flags in the row override ``train_on``."""
        turns = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
        default_turns = [i for i in turns if i >= row.loss_start]
        if self._train_on == "last_assistant" or (self._train_on == "completion" and not row.loss_start):
            default_turns = default_turns[-1:]
        if not row.flags:
            return default_turns
        return [i for i in turns if row.flags[i] or (row.flags[i] is None and i in default_turns)]

    def _find_span_tokens(
        self, span: MessageSpan, text: str, offsets: Offsets, tokens: Sequence[int], location: str
    ) -> range:
        """Return the indices of a span's tokens and end-of-turn token. Verify that the span's tokens decode correctly.

        Raises:
            RowError: No token contains the text, the tokens decode to other text, or one also contains template text.
        """
        indices = _find_overlapping_tokens(span, offsets)
        for i in indices:
            start, end = offsets[i]
            if text[start : span.start].strip() or text[span.end : end].strip():
                raise RowError(
                    location,
                    f"the token {text[start:end]!r} contains text of both the assistant and the chat template",
                    "Use a template that puts a special token or white space between them",
                    reason="a token contains text of both the assistant and the chat template",
                )
        if not indices and text[span.start : span.end].strip():
            raise RowError(location, f"no token contains the assistant's text in message {span.message + 1}")
        for is_special, group in itertools.groupby(indices, key=lambda i: tokens[i] in self._end_ids):
            part = list(group)
            decoded = self._decode([tokens[i] for i in part])
            original = text[offsets[part[0]][0] : offsets[part[-1]][1]]
            if not is_special and not self._is_same_fragment(decoded, original):
                raise RowError(
                    location,
                    f"the trained tokens decode to {_shorten(decoded)}, but the assistant wrote {_shorten(original)}",
                    "The tokenizer changes this text; remove the row",
                    reason="the trained tokens do not decode to what the assistant wrote",
                )
        if not indices:
            return range(0)
        return range(indices[0], self._find_span_end(span, indices, text, offsets, tokens))

    def _find_span_end(
        self, span: MessageSpan, indices: Sequence[int], text: str, offsets: Offsets, tokens: Sequence[int]
    ) -> int:
        """Return the index after a span's end-of-turn token, or after its last token if it has no end-of-turn token."""
        span_end = indices[-1] + 1
        end_token, end_text = self._turn_end
        end_ids = (end_token, self._tokenizer.eos_token_id)
        last_visible = next((i for i in reversed(indices) if text[slice(*offsets[i])].strip()), indices[-1])
        if tokens[last_visible] in end_ids:  # the span already includes the end-of-turn token
            return span_end
        index = span_end  # white space before the end-of-turn token is also in the loss
        while index < len(tokens) and not text[slice(*offsets[index])].strip():
            index += 1
        if index < len(tokens) and (
            tokens[index] in end_ids or (tokens[index] in self._end_ids and tokens[last_visible] not in self._end_ids)
        ):
            index += 1
            return index + (tokens[index : index + 1] == [self._tokenizer.eos_token_id] != tokens[index - 1 : index])
        text_end = span.end + len(end_text)
        if end_text and text.startswith(end_text, span.end):
            index = span_end
            while index < len(tokens) and offsets[index][1] < text_end:
                index += 1
            if index < len(tokens) and offsets[index][1] == text_end:
                return index + 1
        return span_end

    def _is_same_text(self, decoded: str, original: str) -> bool:
        """Return whether texts are equal after NFKC normalization, except for white space next to special tokens."""
        if decoded == original:
            return True
        decoded, original = (unicodedata.normalize("NFKC", text) for text in (decoded, original))
        if decoded == original:
            return True
        pattern = re.compile(rf"\s*({self._special_pattern.pattern})\s*")
        return pattern.sub(r"\1", decoded) == pattern.sub(r"\1", original)

    def _is_same_fragment(self, decoded: str, original: str) -> bool:
        """Return whether fragments are equal, except for white space at the ends, which adjacent tokens can contain."""
        return self._is_same_text(decoded.strip(), original.strip())

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.backend_tokenizer.decode(list(tokens), skip_special_tokens=False))

    @cached_property
    def _renderer(self) -> ChatRenderer:
        return ChatRenderer(self._tokenizer, use_parts=self._image_processor is not None)

    @cached_property
    def _turn_end(self) -> tuple[int | None, str]:
        """End of an assistant turn: (special token's id, ""), or (None, text) if the template ends turns with text."""
        messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": _PROBE}]
        try:
            text = self._renderer.render(messages * 2, "")
        except RowError:
            return None, ""
        boundary = text.find(_PROBE) + len(_PROBE)
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        for token, (start, end) in zip(encoding["input_ids"], encoding["offset_mapping"], strict=True):
            if start >= boundary and text[start:end].strip():
                if token in self._end_ids:
                    return int(token), ""
                break
        end_text = text[text.rfind(_PROBE) + len(_PROBE) :].rstrip()
        return None, end_text if text.startswith(end_text, boundary) else ""


def _check_unicode(row: PlainRow | RowError, row_text: _RowText | RowError) -> _RowText | RowError:
    """Return the row text, or an error if it has a lone surrogate, which JSON can represent but UTF-8 cannot."""
    if isinstance(row, RowError) or isinstance(row_text, RowError):
        return row_text
    try:
        row_text.text.encode()
    except UnicodeEncodeError as error:
        surrogate = f"\\u{ord(error.object[error.start]):04x}"
        problem = f"the text contains a lone surrogate ({surrogate}), which is half of a character"
        return RowError(row.location, problem, reason="the text contains a lone surrogate")
    return row_text


def _find_overlapping_tokens(span: MessageSpan, offsets: Offsets) -> list[int]:
    """Return the indices of the nonempty tokens that overlap a span."""
    candidates = _find_touching_tokens(range(span.start, span.end), offsets)
    return [i for i in candidates if offsets[i][0] < offsets[i][1] and offsets[i][1] > span.start]


def _shift_span(span: MessageSpan | str, image_spans: Sequence[ImageSpan]) -> MessageSpan | str:
    """Convert a span in the text without image tokens to the same span in the text with image tokens."""
    if isinstance(span, str):
        return span
    start_shift = end_shift = 0
    for image_span in image_spans:
        shift = image_span.expansion.stop - image_span.placeholder.stop
        start_shift = shift if image_span.placeholder.stop <= span.start else start_shift
        end_shift = shift if image_span.placeholder.stop <= span.end else end_shift
    return MessageSpan(span.message, span.start + start_shift, span.end + end_shift)


def _find_touching_tokens(characters: range, offsets: Offsets) -> range:
    """Return the index range of the tokens that overlap a character range. ``offsets`` must be sorted by start."""
    start = bisect_left(offsets, characters.start, key=itemgetter(0))
    while start and offsets[start - 1][1] > characters.start:
        start -= 1
    return range(start, bisect_left(offsets, characters.stop, lo=start, key=itemgetter(0)))


def _finish_tokenized(row: Tokenized, *_: object) -> TokenizedRow:
    tokens = list(row.tokens)
    if row.trained is None:
        return TokenizedRow(tokens, [False, *([True] * len(tokens))][: len(tokens)], True)
    return _make_row(tokens, list(row.trained))


def _make_row(
    tokens: list[int], trained: list[bool], untrained_turns: tuple[str, ...] = (), num_turns: int = 0
) -> TokenizedRow:
    assert len(tokens) == len(trained), (len(tokens), len(trained))
    return TokenizedRow(tokens, [False, *trained[1:]] if trained else [], False, untrained_turns, num_turns=num_turns)


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
