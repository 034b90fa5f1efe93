"""Rows to documents of tokens, written as they come: nothing but the last few rows is held in RAM."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, cast

import xxhash

from megatrain.base.batch_keys import IGNORED_LABEL
from megatrain.data.chat import Encoded, RowEncoder
from megatrain.data.formats import Conversation, Document, PlainRow, Preference, PromptCompletion, Row, Tokenized
from megatrain.data.images import ImageRef, refs_to_bytes
from megatrain.data.margins import HAS_MARGIN, as_number
from megatrain.data.masks import TEMPLATE_FILE
from megatrain.data.rows_report import DataError, RowCounts, RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_tokenizer(name_or_path: str, *, chat_template: str = "auto") -> PreTrainedTokenizerFast:
    """Open a fast tokenizer. No code of the folder is run.

    Args:
        name_or_path: a folder with ``tokenizer.json``.
        chat_template: "auto" for the tokenizer's own, or the path of a .jinja file.

    Raises:
        DataError: no such folder, no ``tokenizer.json`` in it, or one that cannot be opened.
    """
    from transformers import AutoTokenizer

    folder = Path(name_or_path)
    if not folder.is_dir():
        advice = "Check model.model_name_or_path"
        if not folder.is_absolute():
            advice = (
                f"Download the model first, for example: hf download {name_or_path} --local-dir models/{folder.name}"
            )
        raise DataError(name_or_path, "there is no such folder", advice)
    if not (folder / "tokenizer.json").is_file():
        raise DataError(
            name_or_path,
            "there is no tokenizer.json: only fast tokenizers are read",
            "Set model.tokenizer_name_or_path if it is in another folder",
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # from_pretrained raises whatever its many readers raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            name_or_path, f"the tokenizer cannot be opened: {reason}", "Check tokenizer.json and tokenizer_config.json"
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(name_or_path, "this tokenizer reports no offsets of its tokens: only fast tokenizers are read")
    if chat_template != "auto":
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
            setattr(tokenizer, TEMPLATE_FILE, chat_template)
        except (OSError, UnicodeDecodeError) as error:
            reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error.strerror)
            raise DataError(
                chat_template, f"the chat template cannot be read: {reason}", "Save it as UTF-8 text, or name another"
            ) from None
    return cast("PreTrainedTokenizerFast", tokenizer)


def pad_token_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the id that fills rows: the pad token, else end of text, else 0. It is never trained or attended."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(token, int):
            return token
    return 0


Overlong = Literal["truncate", "drop", "error"]
_ROWS_AT_ONCE = 512  # tokenized together; more keeps more cores busy and more RAM
_CHARACTERS_AT_ONCE = 1 << 20
_FLUSH_TOKENS = 1 << 20
_FLUSH_IMAGE_BYTES = 1 << 26
_NUM_CONTENTS = 3  # tokens, masks and starts: what a run sees of the data


@dataclass(frozen=True, slots=True)
class EncodingOptions:
    """What decides, beside the rows and the tokenizer, what is trained.

    Attributes:
        max_length: tokens of a document at most.
        overlong: what happens to longer conversations. Longer plain text is cut into pieces.
        bad_rows: "drop": rows that cannot be trained are counted; "error": the first ends it all.
        only_text: refuse rows that are no plain text (and no tokens).
        joins_texts: texts are joined and cut to pieces of exactly ``max_length``, but for the last one of a source.
        preferences: rows are compared answers ("pairs"), compared texts that get one number each ("texts"), or judged
            answers ("answers"); "": they are neither.
    """

    max_length: int
    overlong: Overlong = "truncate"
    bad_rows: Literal["drop", "error"] = "drop"
    only_text: bool = False
    joins_texts: bool = False
    preferences: Literal["", "pairs", "texts", "answers"] = ""


#: What a document is in an example of preferences, which is two documents: a chosen and a rejected answer; or an answer
#: (good: CHOSEN, bad: REJECTED), and its prompt with the answer of another example.
PLAIN, CHOSEN, REJECTED, MISMATCHED = range(4)
#: The bits of a role that say so. `HAS_MARGIN` says that a document has a margin.
WHAT_IT_IS = 3


class TokenWriter:
    """Writes documents one after the other: int32 tokens, one byte of mask for each, int64 starts, and whether a row.

    Args:
        files: where tokens, masks, starts, and a byte for each document go: whether it begins a row; then the images of
            documents (``refs_to_bytes``), and where those of each begin; a byte for the role of each. Not closed.
        before_write: called before each write with the total bytes written once it is done.
    """

    def __init__(self, files: Sequence[BinaryIO], before_write: Callable[[int], None] = lambda nbytes: None) -> None:
        self._files = files
        self._before_write = before_write
        self._tokens, self._trained, self._starts = array("i"), bytearray(), array("q", [0])
        self._begins_row, self._roles = bytearray(), bytearray()
        self._images, self._image_starts, self._images_end = bytearray(), array("q", [0]), 0
        self._images_digest = xxhash.xxh3_64()
        self._digests = tuple(xxhash.xxh3_64() for _ in files[:_NUM_CONTENTS])
        self._roles_digest: xxhash.xxh3_64 | None = None  # of preferences
        self._flushed_tokens = 0
        self.nbytes = 0
        self.num_documents = 0
        self.num_trained_tokens = 0
        self.largest_id = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents so far."""
        return self._flushed_tokens + len(self._tokens)

    @property
    def content(self) -> str:
        """Checksum of all that was flushed, as ``content_checksum`` makes it of tokens, masks and starts."""
        digests = self._digests if not self._images_end else (*self._digests, self._images_digest)
        roles = () if self._roles_digest is None else (self._roles_digest,)
        return "-".join(digest.hexdigest() for digest in (*digests, *roles))

    @property
    def num_image_bytes(self) -> int:
        """Size of the images' references so far."""
        return self._images_end

    def add(
        self,
        tokens: list[int],
        trained: list[bool],
        *,
        begins_row: bool = True,
        images: Sequence[ImageRef] = (),
        role: int = PLAIN,
        labels: Sequence[int] = (),
    ) -> None:
        """Append a document; ``begins_row`` is false for the later pieces of a text that was cut.

        With labels (-100: none) these are what is trained, and ``trained`` says nothing.
        """
        assert len(tokens) == len(trained), (len(tokens), len(trained))
        self.largest_id = max(self.largest_id, max(tokens, default=0))
        self._tokens.extend(tokens)
        self._trained.extend([False] * len(trained) if labels else trained)
        self._tokens.extend(0 if label == IGNORED_LABEL else label for label in labels)
        self._trained.extend(label != IGNORED_LABEL for label in labels)
        self._starts.append(self.num_tokens)
        self._begins_row.append(begins_row)
        self._roles.append(role)
        self._images += refs_to_bytes(images)
        self._image_starts.append(self._images_end + len(self._images))
        for ref in images:
            self._images_digest.update(f"{self.num_documents} {ref.checksum}\n".encode())
        self.num_documents += 1
        if len(self._tokens) >= _FLUSH_TOKENS or len(self._images) >= _FLUSH_IMAGE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is held. Raises OSError."""
        held = (
            self._tokens.tobytes(),
            bytes(self._trained),
            self._starts.tobytes(),
            bytes(self._begins_row),
            bytes(self._images),
            self._image_starts.tobytes(),
            bytes(self._roles),
        )
        self.num_trained_tokens += sum(self._trained)
        self.nbytes += sum(map(len, held))
        self._before_write(self.nbytes)
        for digest, content in zip(self._digests, held[:_NUM_CONTENTS], strict=True):
            digest.update(content)
        if any(self._roles):
            self._roles_digest = self._roles_digest or xxhash.xxh3_64()
            self._roles_digest.update(bytes(self._roles))
        for file, content in zip(self._files, held, strict=True):
            file.write(content)
        self._flushed_tokens += len(self._tokens)
        self._tokens, self._trained, self._starts = array("i"), bytearray(), array("q")
        self._begins_row, self._roles = bytearray(), bytearray()
        self._images_end += len(self._images)
        self._images, self._image_starts = bytearray(), array("q")


@dataclass(frozen=True, slots=True)
class CutDocument:
    """A document that was cut out of a text.

    Attributes:
        trained: which tokens have a loss.
        num_repeated: tokens at its start that are not of the text there, but repeated from its beginning.
    """

    tokens: list[int]
    trained: list[bool]
    num_repeated: int


class TextCutter:
    """Cuts texts into pieces of at most ``max_length`` tokens; what is left over waits for the next part of a text.

    Where a text begins with the tokens that the tokenizer puts before texts (``<bos>``), each of its pieces does:
    models of that kind rest their attention on it. The first token of the text itself in a later piece is not trained:
    what is before it in the text is not there to predict it.

    Args:
        max_length: tokens of a piece, the ones before it included.
        start_tokens: Tokens that the tokenizer puts in front of a text; () for none.
        joins: texts follow each other in a piece, and only :meth:`finish` cuts a short one. The first token of a text
            is trained where another text is before it.
    """

    def __init__(self, max_length: int, start_tokens: Sequence[int] = (), *, joins: bool = False) -> None:
        self._max_length, self._joins = max_length, joins
        self._start_tokens = list(start_tokens) if len(start_tokens) < max_length - 1 else []
        self._tokens: list[int] = []
        self._trained: list[bool] = []
        self._repeated: list[int] = []  # before each further piece of this text
        self._is_first = True

    def cut(self, coded: Encoded) -> Iterator[CutDocument]:
        """Yield the pieces that are whole with this part of a text, and at its end the last one."""
        trained = coded.trained
        if coded.is_start:
            self._repeated = self._start_tokens if self._begins(coded.tokens) else []
            self._is_first = self._is_first or not self._joins
            if self._joins and self._tokens:
                trained = [True] * len(trained[:1]) + trained[1:]
        self._tokens += coded.tokens
        self._trained += trained
        yield from self._pieces(is_end=coded.is_end and not self._joins)

    def finish(self) -> Iterator[CutDocument]:
        """Yield what is left of joined texts; the next one begins anew."""
        yield from self._pieces(is_end=True)
        self._is_first = True

    def _begins(self, tokens: Sequence[int]) -> bool:
        return list(tokens[: len(self._start_tokens)]) == self._start_tokens

    def _pieces(self, *, is_end: bool) -> Iterator[CutDocument]:
        at = 0
        while True:
            ahead = self._tokens[at : at + len(self._start_tokens)]
            before = [] if self._is_first or self._begins(ahead) else self._repeated
            end = at + self._max_length - len(before)
            if end > len(self._tokens) and not (is_end and at < len(self._tokens)):
                break
            trained = self._trained[at:end]
            trained[0] = False  # nothing in this piece predicts it
            yield CutDocument([*before, *self._tokens[at:end]], [*([False] * len(before)), *trained], len(before))
            self._is_first = False
            at = min(end, len(self._tokens))
        del self._tokens[:at], self._trained[:at]


class Encoder:
    """Encodes the rows of one source after the other into a :class:`TokenWriter`.

    Args:
        options: lengths, and what is refused.
        on_rows: called with the number of rows after every few hundred.
    """

    def __init__(
        self,
        encoder: RowEncoder,
        writer: TokenWriter,
        options: EncodingOptions,
        on_rows: Callable[[int], None] = lambda count: None,
    ) -> None:
        self.counts = RowCounts()
        self._encoder = encoder
        self._writer = writer
        self._options = options
        self._on_rows = on_rows
        self._cutter = TextCutter(options.max_length, encoder.start_tokens, joins=options.joins_texts)
        self._open_is_kept = False  # of the text of which only parts have been read
        self._answer_before: tuple[list[int], list[bool]] | None = None

    def add_rows(self, rows: Iterable[Row | RowError]) -> None:
        """Encode rows and write what is trained of them.

        Args:
            rows: and the errors of rows that could not be read, in their place.

        Raises:
            DataError: a row is too long and ``overlong`` is "error", a row is no text though ``only_text`` asks for it,
                or as ``RowEncoder.encode_many``.
            OSError: writing failed.
            RowError: a row cannot be trained and ``bad_rows`` is "error".
        """
        for batch in _batches(rows):
            for row in batch:
                if not isinstance(row, RowError):
                    self.counts.add_unread(row.unread, row.where)
            if self._options.only_text:
                _check_text(batch)
            if self._options.preferences:
                self._add_preferences(batch)
                self._on_rows(self.counts.num_rows)
                continue
            plain = [row for row in batch if not isinstance(row, Preference)]
            assert len(plain) == len(batch), "preferences are read for losses over them alone"
            for row, coded in zip(plain, self._encoder.encode_many(plain), strict=True):
                if isinstance(coded, RowError):
                    if self._options.bad_rows == "error":
                        raise coded
                    self.counts.drop(coded)
                else:
                    self._add(coded, row.where)
            self._on_rows(self.counts.num_rows)

    def _add(self, coded: Encoded, where: str) -> None:
        self.counts.add_remarks(coded.left_out, coded.special_tokens, where)
        if coded.is_text:
            self._add_text(coded, where)
            return
        counts, max_length = self.counts, self._options.max_length
        num_kept = min(len(coded.tokens), max_length)
        counts.num_rows += 1
        counts.num_tokens += len(coded.tokens)
        if len(coded.tokens) > max_length:
            if self._options.overlong == "error":
                raise DataError(
                    where,
                    f"{len(coded.tokens)} tokens are more than data.max_length = {max_length}",
                    'Raise it, or write overlong = "truncate" or "drop"',
                )
            counts.num_rows_lost += 1
            if self._options.overlong == "drop":
                counts.num_too_long += 1
                counts.num_tokens_lost += len(coded.tokens)
                return
            if any(image.start < max_length < image.stop for image in coded.image_tokens):
                self._leave_out_cut_image(where)
                counts.num_tokens_lost += len(coded.tokens)
                return
            counts.num_truncated += 1
            counts.num_tokens_lost += len(coded.tokens) - num_kept
        trained = coded.trained[:max_length]
        if any(trained):
            images = [
                ref for ref, place in zip(coded.images, coded.image_tokens, strict=True) if place.stop <= max_length
            ]
            self._writer.add(coded.tokens[:max_length], trained, images=images)
            counts.add_turns(coded.num_turns, coded.untrained_turns, where)
        else:
            counts.num_rows_lost += len(coded.tokens) <= max_length  # else it is counted already, as cut
            counts.num_tokens_lost += num_kept
            self._leave_untrained(where)

    # -- preferences -------------------------------------------------------------------------------------------

    def _add_preferences(self, batch: Sequence[Row | RowError]) -> None:
        """Write two documents for each example of some rows."""
        plain = [each for row in batch for each in _answers_of(row, self._options.preferences)]
        coded = iter(self._encoder.encode_many(plain))
        judged: list[tuple[Encoded, bool]] = []
        for row in batch:
            found = [next(coded) for _ in _answers_of(row, self._options.preferences)]
            kept = self._kept_answers(found, "" if isinstance(row, RowError) else row.where)
            if not kept:
                continue
            assert isinstance(row, Preference)
            if self._options.preferences != "answers":
                is_text = self._options.preferences == "texts"
                for each, role in zip(kept, (CHOSEN, REJECTED), strict=True):
                    labels = [as_number(row.margin) if role == CHOSEN else IGNORED_LABEL]
                    self._writer.add(
                        each.tokens,
                        each.trained,
                        begins_row=role == CHOSEN,
                        role=role | HAS_MARGIN if is_text else role,
                        labels=labels if is_text else (),
                    )
            else:
                judged += zip(kept, (row.is_good, False), strict=False)
        if judged:
            self._add_judged(judged)

    def _kept_answers(self, found: Sequence[Encoded | RowError], where: str) -> list[Encoded]:
        """Return the answers of a row as they are trained; none where the row is dropped."""
        counts, options = self.counts, self._options
        error = next((each for each in found if isinstance(each, RowError)), None)
        whole = [each for each in found if isinstance(each, Encoded)]
        cut = [
            replace(each, tokens=each.tokens[: options.max_length], trained=each.trained[: options.max_length])
            for each in whole
        ]
        if error is None and len(cut) == 2 and cut[0].tokens == cut[1].tokens:
            is_cut = any(len(each.tokens) > options.max_length for each in whole)
            same = "the two answers are the same" + (" where data.max_length cuts them" if is_cut else " as tokens")
            error = RowError(where, same, "Raise data.max_length" if is_cut else "")
        if error is not None:
            if options.bad_rows == "error":
                raise error
            counts.drop(error)
            return []
        num_before, num_kept = (sum(len(each.tokens) for each in several) for several in (whole, cut))
        counts.num_rows += 1
        counts.num_tokens += num_before
        if num_kept < num_before:
            longest = max(len(each.tokens) for each in whole)
            if options.overlong == "error":
                raise DataError(
                    where,
                    f"{longest} tokens are more than data.max_length = {options.max_length}",
                    'Raise it, or write overlong = "truncate" or "drop"',
                )
            counts.num_rows_lost += 1
            if options.overlong == "drop":
                counts.num_too_long += 1
                counts.num_tokens_lost += num_before
                return []
            counts.num_truncated += 1
            counts.num_tokens_lost += num_before - num_kept
        self.counts.add_remarks(
            dict.fromkeys(name for each in whole for name in each.left_out),
            dict.fromkeys(name for each in whole for name in each.special_tokens),
            where,
        )
        if all(any(each.trained) for each in cut):
            for each in whole:
                counts.add_turns(each.num_turns, each.untrained_turns, where)
            return cut
        counts.num_rows_lost += num_kept == num_before
        counts.num_tokens_lost += num_kept
        self._leave_untrained(where)
        return []

    def _add_judged(self, judged: Sequence[tuple[Encoded, bool]]) -> None:
        """Write answers that are judged, each followed by its prompt with the answer before it.

        The first one of these rows gets the last one's, as TRL turns the answers of a batch; if it is alone, that of
        the rows before.
        """
        parts = [_split_answer(each) for each, _ in judged]
        before = parts[-1][1] if len(parts) > 1 or self._answer_before is None else self._answer_before
        for (each, is_good), (prompt, answer) in zip(judged, parts, strict=True):
            self._writer.add(each.tokens, each.trained, role=CHOSEN if is_good else REJECTED)
            tokens = [*prompt, *before[0]][: self._options.max_length]
            trained = [*([False] * len(prompt)), *before[1]][: self._options.max_length]
            self._writer.add(tokens, trained, begins_row=False, role=MISMATCHED)
            before = answer
        self._answer_before = parts[-1][1]

    def _leave_out_cut_image(self, where: str) -> None:
        """Count a row that data.max_length would cut within an image."""
        error = RowError(
            where,
            f"data.max_length = {self._options.max_length} would cut it within an image",
            "Raise it, or make the images smaller",
            reason="data.max_length would cut it within an image",
        )
        if self._options.bad_rows == "error":
            raise error
        self.counts.num_rows -= 1  # counted again with the reason
        self.counts.num_rows_lost -= 1
        self.counts.drop(error)

    def _leave_untrained(self, where: str) -> None:
        if self._options.bad_rows == "error":
            raise RowError(where, "no token of this row would be trained", "Fix or remove the row, or raise max_length")
        self.counts.leave_untrained(where)

    def _add_text(self, coded: Encoded, where: str) -> None:
        self.counts.num_tokens += len(coded.tokens)
        self._add_pieces(self._cutter.cut(coded))
        self._open_is_kept |= self._options.joins_texts and bool(coded.tokens)
        if coded.is_end:
            self.counts.num_rows += 1
            if not self._open_is_kept:
                self.counts.num_rows_lost += 1
                self._leave_untrained(where)
            self._open_is_kept = False

    def end_source(self) -> None:
        """Say that the rows from here on are of the next source, whose texts are not joined to those before."""
        self._add_pieces(self._cutter.finish())
        self._open_is_kept = False
        self.counts.end_source()

    def _add_pieces(self, pieces: Iterable[CutDocument]) -> None:
        for piece in pieces:
            if any(piece.trained):
                begins_row = self._options.joins_texts or not self._open_is_kept
                self._writer.add(piece.tokens, piece.trained, begins_row=begins_row)
                self._open_is_kept = True
            else:
                self.counts.num_tokens_lost += len(piece.tokens) - piece.num_repeated


def _batches(rows: Iterable[Row | RowError]) -> Iterator[list[Row | RowError]]:
    """Yield rows in lists: many short ones, few long ones."""
    batch: list[Row | RowError] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += num_characters(row)
        if len(batch) == _ROWS_AT_ONCE or size >= _CHARACTERS_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


#: What is wrong with a row that the loss cannot compare, and what to do.
LONE_ANSWER = (
    "the row has one answer with a label, and the loss compares two",
    'Write loss_type = "kto" in [preference]',
)


def _answers_of(
    row: Row | RowError, preferences: Literal["", "pairs", "texts", "answers"]
) -> list[PlainRow | RowError]:
    """Return the answers of a row, each with its prompt.

    Raises:
        DataError: the row is not of the kind that the loss takes.
    """
    if not isinstance(row, Preference):
        return [row]
    if row.rejected is not None:
        return [row.answer, row.rejected]
    if preferences != "answers":
        raise DataError(row.where, *LONE_ANSWER)
    return [row.answer]


def _split_answer(coded: Encoded) -> tuple[list[int], tuple[list[int], list[bool]]]:
    """Return the tokens of the prompt; and those of the answer with their mask."""
    first = coded.trained.index(True)
    return coded.tokens[:first], (coded.tokens[first:], coded.trained[first:])


def num_characters(row: Row | RowError) -> int:
    """Return about how many characters a row has."""
    if isinstance(row, Preference):
        return num_characters(row.answer) + (0 if row.rejected is None else num_characters(row.rejected))
    if isinstance(row, Document):
        return len(row.text)
    if isinstance(row, PromptCompletion):
        return len(row.prompt) + len(row.completion)
    if isinstance(row, Conversation):
        return sum(len(message["content"]) for message in row.messages)
    return len(row.tokens) if isinstance(row, Tokenized) else 0


def _check_text(rows: list[Row | RowError]) -> None:
    for row in rows:
        if isinstance(row, Conversation | PromptCompletion):
            raise DataError(row.where, 'task = "pretrain" trains plain text, this row is not', 'Write task = "sft"')
