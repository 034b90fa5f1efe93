"""Rows to tokens with a loss mask that is proven: what is trained decodes to exactly what the assistant wrote."""

from __future__ import annotations

import itertools
import unicodedata
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

from megatrain.data.formats import Conversation, Document, PlainRow, PromptCompletion, Tokenized
from megatrain.data.images import ImageRef, Inserted
from megatrain.data.labels import encode_labelled
from megatrain.data.masks import EMPTY, REMEDY, ChatRenderer, MessageSpan
from megatrain.data.messages import with_text_arguments
from megatrain.data.rows_report import RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from megatrain.data.images import ImageProcessor
    from megatrain.data.labels import Classified, Labelled, Labels, Tagged

TrainOn = Literal["assistant", "last_assistant", "completion", "all"]
Offsets = Sequence[tuple[int, int]]
_PROBE = "qzsentinel"


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of one row.

    Attributes:
        tokens: ids.
        trained: for each token, whether the loss asks for it. Never true for the first: nothing predicts it.
        is_text: whether it is plain text, which may be cut into pieces.
        untrained_turns: why turns of the assistant are not trained that should be, one sentence each.
        is_start: whether plain text begins here; a large file comes in parts.
        is_end: whether plain text ends here.
        images: Images of the row, in order.
        image_tokens: which tokens stand for each of them.
    """

    tokens: list[int]
    trained: list[bool]
    is_text: bool
    untrained_turns: tuple[str, ...] = ()
    is_start: bool = True
    is_end: bool = True
    images: tuple[ImageRef, ...] = ()
    image_tokens: tuple[range, ...] = ()

    @property
    def num_trained(self) -> int:
        return sum(self.trained)


@dataclass(frozen=True, slots=True)
class _Texts:
    """What has to be tokenized for one row.

    Attributes:
        plain: with the special tokens that the tokenizer puts around texts.
        bare: without them.
        chat: without them, and with offsets.
        row: the conversation as it was rendered.
        rendered: the conversation before what stands for images was put into it.
        inserted: where that stands.
        images: that it stands for.
    """

    plain: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    chat: tuple[str, ...] = ()
    row: Conversation | None = None
    rendered: str = ""
    inserted: Sequence[Inserted] = ()
    images: tuple[ImageRef, ...] = ()


class RowEncoder:
    """Turns rows into tokens and masks with one tokenizer.

    Args:
        tokenizer: a fast tokenizer; its chat template is used for conversations.
        train_on: "assistant": every assistant turn; "last_assistant": the last one; "completion": what follows the
            prompt, in a plain conversation the last turn; "all": every token.
        images: prepares the images of rows; None: rows with images are refused.
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
        self._renderer: ChatRenderer | None = None
        self._end_of_turn: int | None = None
        self._end_text = ""
        special = set(tokenizer.all_special_ids) | {
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        if tokenizer.bos_token_id != tokenizer.eos_token_id:
            special.discard(tokenizer.bos_token_id)
        self._ends = frozenset(special)

    @cached_property
    def start_tokens(self) -> tuple[int, ...]:
        """Return what the tokenizer puts before every text, mostly ``<bos>``; () for nothing."""
        bare, whole = self._tokens("a", special=False), self._tokens("a")
        for count in range(len(whole) - len(bare) + 1):
            if whole[count : count + len(bare)] == bare:
                return tuple(whole[:count])
        return ()

    def encode(self, row: PlainRow) -> Encoded:
        """Return the tokens of a row.

        Raises:
            RowError: the chat template refuses it, or its mask cannot be proven.
            DataError: it is a conversation and the tokenizer has no chat template.
        """
        (result,) = self.encode_many([row])
        if isinstance(result, RowError):
            raise result
        return result

    def encode_many(self, rows: Sequence[PlainRow | RowError]) -> Iterator[Encoded | RowError]:
        """Yield the tokens of each row, or why it cannot be trained. The texts are tokenized together, on all cores.

        Args:
            rows: errors among them are passed on.

        Raises:
            DataError: there is a conversation and the tokenizer has no chat template.
        """
        texts = [_encodable(row, self._texts_of(row)) for row in rows]
        ready = [each for each in texts if isinstance(each, _Texts)]
        plain = iter(self._batch([text for each in ready for text in each.plain], special=True))
        bare = iter(self._batch([text for each in ready for text in each.bare], special=False))
        chats = [text for each in ready for text in each.chat]
        coded: Any = (
            self._tokenizer(chats, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            if chats
            else {}
        )
        offsets = iter(zip(coded.get("input_ids", ()), coded.get("offset_mapping", ()), strict=True))
        for row, each in zip(rows, texts, strict=True):
            if isinstance(each, RowError):
                yield each
                continue
            ids = [*(next(plain) for _ in each.plain), *(next(bare) for _ in each.bare)]
            try:
                if each.row is not None:
                    yield self._finish_conversation(each.row, each, *next(offsets))
                elif isinstance(row, PromptCompletion):
                    yield self._finish_completion(row, ids)
                elif isinstance(row, Document):
                    yield self._finish_document(row, ids)
                elif isinstance(row, Tokenized):
                    yield _finish_tokenized(row)
            except RowError as error:
                yield error

    def encode_labelled(
        self, rows: Sequence[Classified | Tagged | RowError], labels: Labels, max_length: int
    ) -> Iterator[Labelled | RowError]:
        """Yield the tokens and labels of each row; see ``megatrain.data.labels``."""
        return encode_labelled(rows, self._tokenizer, labels, max_length)

    def _batch(self, texts: list[str], *, special: bool) -> list[list[int]]:
        ids = self._tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"] if texts else []
        assert isinstance(ids, list), type(ids)
        return ids

    def _texts_of(self, row: PlainRow | RowError) -> _Texts | RowError:
        if isinstance(row, RowError):
            return row
        if isinstance(row, Tokenized):
            return _Texts()
        if isinstance(row, Document):
            texts = (row.text,) if row.text else ()
            return _Texts(plain=texts) if row.is_start else _Texts(bare=texts)
        if isinstance(row, PromptCompletion):
            if not row.completion.strip():
                return _Texts()
            return _Texts((row.prompt + row.completion, row.prompt) if row.prompt else (row.completion,))
        renderer = self._ready_renderer()
        try:
            text = renderer.render(row.messages, row.where, tools=row.tools)
        except RowError as error:
            if not any(message.get("tool_calls") for message in row.messages):
                return error
            try:  # some families want the arguments of calls as text
                row = replace(row, messages=with_text_arguments(row.messages))
                text = renderer.render(row.messages, row.where, tools=row.tools)
            except RowError:
                return error
        try:
            return self._with_images(row, text)
        except RowError as error:
            return error

    def _with_images(self, row: Conversation, text: str) -> _Texts:
        if self._images is None:
            if row.images:
                raise RowError(
                    row.where,
                    "the row has images, and the run reads none",
                    'Take an image-text model and write model.images = "frozen", or remove the row',
                    reason='a row has images, and the run reads none (model.images = "off")',
                )
            return _Texts(chat=(text,), row=row)
        refs = tuple(named.ref() for named in row.images)
        whole, inserted = self._images.insert(text, refs, row.where)
        return _Texts(chat=(whole,), row=row, rendered=text, inserted=inserted, images=refs)

    def _tokens(self, text: str, *, special: bool = True) -> list[int]:
        ids = self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        assert isinstance(ids, list), type(ids)
        return ids

    def _with_end(self, tokens: list[int]) -> list[int]:
        end = self._tokenizer.eos_token_id
        return [*tokens, end] if isinstance(end, int) and tokens[-1:] != [end] else tokens

    def _finish_document(self, row: Document, coded: list[list[int]]) -> Encoded:
        tokens = coded[0] if coded else []
        if not row.is_end:
            tokens = self._without_end(tokens)
        elif tokens or not row.is_start:
            tokens = self._with_end(tokens)
        trained = [not row.is_start, *([True] * len(tokens))][: len(tokens)]
        return Encoded(tokens, trained, True, is_start=row.is_start, is_end=row.is_end)

    def _finish_completion(self, row: PromptCompletion, coded: list[list[int]]) -> Encoded:
        """Take both texts verbatim; the completion's tokens are those that follow the prompt's."""
        if not coded:
            return _encoded([], [])
        whole = self._without_end(coded[0])
        prompt = self._without_end(coded[1]) if row.prompt else whole[: len(self.start_tokens)]
        if whole[: len(prompt)] == prompt:
            completion = whole[len(prompt) :]
        else:  # a token crosses the border; keep the prompt as it will be at inference
            completion = self._tokens(row.completion, special=False)
        if not _same_text(self._decode(completion), row.completion):
            raise RowError(
                row.where,
                "the tokens of `completion` do not decode to its text, so the loss mask cannot be proven",
                "Move the border between prompt and completion to a space or line end",
            )
        tokens = self._with_end([*prompt, *completion])
        keep = self._train_on == "all"
        return _encoded(tokens, [keep] * len(prompt) + [True] * (len(tokens) - len(prompt)))

    def _without_end(self, tokens: list[int]) -> list[int]:
        """Remove an end token that the tokenizer itself appends to every text, as the T5 family does."""
        end = self._tokenizer.eos_token_id
        return tokens[:-1] if len(tokens) > 1 and tokens[-1] == end else tokens

    def _finish_conversation(self, row: Conversation, texts: _Texts, tokens: list[int], offsets: Offsets) -> Encoded:
        coded = self._masked_conversation(row, texts, tokens, offsets)
        if not texts.inserted:
            return coded
        places = [_touching(each.after, offsets) for each in texts.inserted]
        trained = list(coded.trained)
        for place in places:
            trained[place.start : place.stop] = [False] * len(place)
        return replace(coded, trained=trained, images=texts.images, image_tokens=tuple(places))

    def _masked_conversation(self, row: Conversation, texts: _Texts, tokens: list[int], offsets: Offsets) -> Encoded:
        text = texts.chat[0]
        by_default = self._train_on == "all"
        turns = [index for index, flag in enumerate(row.flags) if flag is False] if by_default else self._chosen(row)
        turns = [index for index in turns if row.messages[index]["role"] == "assistant"]
        if by_default and not turns:
            return _encoded(tokens, [True] * len(tokens))
        # Turns are found in the text without images, which templates are rendered to again and again.
        plain = texts.rendered or text
        spans = self._ready_renderer().assistant_spans(row.messages, plain, row.where, turns, row.tools)
        spans = {index: _moved(span, texts.inserted) for index, span in spans.items()}
        trained = [by_default] * len(tokens)
        for span in spans.values():
            if isinstance(span, MessageSpan):
                for at in self._tokens_of(span, text, offsets, tokens, row.where):
                    trained[at] = not by_default
        reasons = {index: why for index, why in spans.items() if isinstance(why, str)}
        serious = [(index, why) for index, why in reasons.items() if why != EMPTY]
        if serious and (by_default or len(reasons) == len(turns)):
            index, why = serious[0]
            raise RowError(
                row.where,
                f"message {index + 1} cannot be told from the rest: {why}",
                REMEDY,
                reason=f"no turn of the assistant can be told from the rest: {why}",
            )
        if not by_default:
            tokens, trained = self._with_end_of_turn(tokens, trained)
        return _encoded(tokens, trained, tuple(reasons.values()))

    def _with_end_of_turn(self, tokens: list[int], trained: list[bool]) -> tuple[list[int], list[bool]]:
        """End a last turn that the template leaves open: else the model would not learn to stop."""
        end = self._end_of_turn if self._end_of_turn is not None else self._tokenizer.eos_token_id
        shown = (index for index in reversed(range(len(tokens))) if self._decode(tokens[index : index + 1]).strip())
        last = next(shown, None)
        if last is None or not isinstance(end, int) or not trained[last] or tokens[last] in self._ends:
            return tokens, trained
        return [*tokens[: last + 1], end], [*trained[: last + 1], True]

    def _chosen(self, row: Conversation) -> list[int]:
        """Return the turns that are trained: those that train_on names, except where the row itself says otherwise."""
        turns = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
        named = [i for i in turns if i >= row.trained_from]
        if self._train_on == "last_assistant" or (self._train_on == "completion" and not row.trained_from):
            named = named[-1:]
        if not row.flags:
            return named
        return [i for i in turns if row.flags[i] or (row.flags[i] is None and i in named)]

    def _tokens_of(self, span: MessageSpan, text: str, offsets: Offsets, tokens: Sequence[int], where: str) -> range:
        """Return the indices of a span's tokens and its end-of-turn token, after proving that they are its text."""
        inside = _overlapping(span, offsets)
        for i in inside:
            start, end = offsets[i]
            if text[start : span.start].strip() or text[span.end : end].strip():
                raise RowError(
                    where,
                    f"the token {text[start:end]!r} joins text of the assistant and of the chat template",
                    "Use a template that puts a special token or white space between them",
                    reason="a token joins text of the assistant and of the chat template",
                )
        if not inside and text[span.start : span.end].strip():
            raise RowError(where, f"no token stands for what the assistant wrote in message {span.message + 1}")
        for is_special, group in itertools.groupby(inside, key=lambda i: tokens[i] in self._ends):
            part = list(group)
            found = self._decode([tokens[i] for i in part])
            written = text[offsets[part[0]][0] : offsets[part[-1]][1]]
            if not is_special and not _same_text(found, written):
                raise RowError(
                    where,
                    f"the trained tokens decode to {_short(found)}, but the assistant wrote {_short(written)}",
                    "The tokenizer changes this text; remove the row",
                    reason="the trained tokens do not decode to what the assistant wrote",
                )
        if not inside:
            return range(0)
        return range(inside[0], self._end_of_span(span, inside, text, offsets, tokens))

    def _end_of_span(
        self, span: MessageSpan, inside: Sequence[int], text: str, offsets: Offsets, tokens: Sequence[int]
    ) -> int:
        """Return the index after the end-of-turn token of a span, or after its last token if there is none."""
        after = inside[-1] + 1
        usual = (self._end_of_turn, self._tokenizer.eos_token_id)
        shown = next((i for i in reversed(inside) if text[slice(*offsets[i])].strip()), inside[-1])
        if tokens[shown] in usual:  # markers enclose the end of turn, too
            return after
        at = after  # white space before the end of turn has to be produced too
        while at < len(tokens) and not text[slice(*offsets[at])].strip():
            at += 1
        if at < len(tokens) and (tokens[at] in usual or (tokens[at] in self._ends and tokens[shown] not in self._ends)):
            at += 1
            return at + (tokens[at : at + 1] == [self._tokenizer.eos_token_id] != tokens[at - 1 : at])
        end = span.end + len(self._end_text)
        if self._end_text and text.startswith(self._end_text, span.end):
            at = after
            while at < len(tokens) and offsets[at][1] < end:
                at += 1
            if at < len(tokens) and offsets[at][1] == end:
                return at + 1
        return after

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.backend_tokenizer.decode(list(tokens), skip_special_tokens=False))

    def _ready_renderer(self) -> ChatRenderer:
        """Make the renderer on first use, and learn from a probe what ends a turn of the assistant."""
        if self._renderer is None:
            self._renderer = ChatRenderer(self._tokenizer, in_parts=self._images is not None)
            self._learn_end(self._renderer)
        return self._renderer

    def _learn_end(self, renderer: ChatRenderer) -> None:
        """See what follows the assistant's text: a special token, or text that a tokenizer without it spells out."""
        turn = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": _PROBE}]
        try:
            text = renderer.render(turn * 2, "")
        except RowError:
            return
        border = text.find(_PROBE) + len(_PROBE)
        coded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        for token, (start, end) in zip(coded["input_ids"], coded["offset_mapping"], strict=True):
            if start >= border and text[start:end].strip():
                if token in self._ends:
                    self._end_of_turn = int(token)
                    return
                break
        last = text[text.rfind(_PROBE) + len(_PROBE) :].rstrip()
        self._end_text = last if text.startswith(last, border) else ""


def _encodable(row: PlainRow | RowError, texts: _Texts | RowError) -> _Texts | RowError:
    """Return the texts, or the error of a row whose text is no Unicode: JSON can hold half of a surrogate pair."""
    if isinstance(row, RowError) or isinstance(texts, RowError):
        return texts
    try:
        for text in (*texts.plain, *texts.bare, *texts.chat):
            text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        problem = f"the text holds {half} alone, which is half of a character"
        return RowError(row.where, problem, reason="the text holds half of a character")
    return texts


def _overlapping(span: MessageSpan, offsets: Offsets) -> list[int]:
    """Return the tokens that hold a character of a span. Offsets begin in order: only those near it are looked at."""
    first = bisect_left(offsets, span.start, key=itemgetter(0))
    while first and offsets[first - 1][1] > span.start:
        first -= 1
    last = bisect_left(offsets, span.end, lo=first, key=itemgetter(0))
    return [i for i in range(first, last) if offsets[i][0] < offsets[i][1] and offsets[i][1] > span.start]


def _moved(span: MessageSpan | str, inserted: Sequence[Inserted]) -> MessageSpan | str:
    """Return where a span of a text is once what stands for images was put into it."""
    if isinstance(span, str):
        return span
    start = end = 0
    for each in inserted:
        gained = each.after.stop - each.before.stop
        start, end = (gained if each.before.stop <= at else had for at, had in ((span.start, start), (span.end, end)))
    return MessageSpan(span.message, span.start + start, span.end + end)


def _touching(characters: range, offsets: Offsets) -> range:
    """Return the tokens that hold any of some characters, in one run."""
    first = bisect_left(offsets, characters.start, key=itemgetter(0))
    while first and offsets[first - 1][1] > characters.start:
        first -= 1
    return range(first, bisect_left(offsets, characters.stop, lo=first, key=itemgetter(0)))


def _finish_tokenized(row: Tokenized) -> Encoded:
    tokens = list(row.tokens)
    if row.trained is None:
        return Encoded(tokens, [False, *([True] * len(tokens))][: len(tokens)], True)
    return _encoded(tokens, list(row.trained))


def _encoded(tokens: list[int], trained: list[bool], untrained_turns: tuple[str, ...] = ()) -> Encoded:
    assert len(tokens) == len(trained), (len(tokens), len(trained))
    return Encoded(tokens, [False, *trained[1:]] if trained else [], False, untrained_turns)


def _same_text(found: str, written: str) -> bool:
    """Compare texts without the white space around them, which neighbouring tokens may own."""
    found, written = found.strip(), written.strip()
    return found == written or unicodedata.normalize("NFKC", found) == unicodedata.normalize("NFKC", written)


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
