"""Rows with labels: a text and its class, words and their tags; and how documents of a dataset hold them.

A document holds its labels behind its tokens, so that files, caches and checksums of datasets know of no others: one
number for the whole text (``HAS_LABEL``), or as many as there are tokens (``HAS_TAGS``). What is trained is told by the
mask, of labels as of tokens. A micro-batch has them as ``labels`` one place later than what they belong to, as the next
token is to the one that predicts it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from megatrain.base.batch_keys import IGNORED_LABEL
from megatrain.data.messages import field_names, kind
from megatrain.data.rows_report import DataError, RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = [
    "HAS_LABEL",
    "HAS_TAGS",
    "Classified",
    "Labelled",
    "Labels",
    "Tagged",
    "as_number",
    "classified_row",
    "encode_labelled",
    "of_number",
    "tagged_row",
]

#: Added to the role of a document: its last number is no token but a label; its second half are the tokens' labels.
HAS_LABEL, HAS_TAGS = 4, 8
#: Names of the column with tags, in data sets of the hub.
_TAGS = ("tags", "ner_tags", "pos_tags", "chunk_tags", "labels")


@dataclass(frozen=True, slots=True)
class Classified:
    """A text and its class, by number or by name; None: it has none."""

    text: str
    label: int | str | None
    where: str
    unread: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Tagged:
    """Words and the class of each, by number or by name; None: it has none."""

    words: tuple[str, ...]
    tags: tuple[int | str | None, ...]
    where: str
    unread: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Labelled:
    """Tokens of a row with labels.

    Attributes:
        tokens: ids, at most so many as were asked for.
        labels: one for the text, or one for each token; -100: none.
        num_tokens: tokens before they were cut.
    """

    tokens: list[int]
    labels: list[int]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Labels:
    """The classes of a task.

    Attributes:
        names: In the order of their numbers.
        level: What has one: a whole text, or each word of it.
    """

    names: tuple[str, ...]
    level: Literal["sequence", "token"]

    def number(self, label: int | str | None, where: str) -> int:
        """Return the number of a class; -100 for none.

        Raises:
            DataError: there is no such class.
        """
        if label is None or label in (-1, IGNORED_LABEL):
            return IGNORED_LABEL
        if isinstance(label, str):
            if label in self.names:
                return self.names.index(label)
            listed = ", ".join(self.names[:8]) + (" ..." if len(self.names) > 8 else "")
            raise DataError(where, f'the label "{label}" is none of classify.labels ({listed})', "Add it there, or fix")
        if not 0 <= label < len(self.names):
            last = len(self.names) - 1
            raise DataError(
                where, f"the label {label} is no number from 0 to {last}", "Name a class for it in classify.labels"
            )
        return label


def as_number(value: float) -> int:
    """Return the 32 bits of a number, in the place of a label."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def of_number(bits: int) -> float:
    """Return the number that ``as_number`` was given, rounded to fp32."""
    return float(struct.unpack("<f", struct.pack("<i", bits))[0])


# -- from the fields of a row -------------------------------------------------------------------------------------


def classified_row(value: Mapping[str, Any], where: str, names: Mapping[str, str]) -> Classified:
    """Return a text and its class.

    Args:
        value: field -> value.
        where: file and row, for errors.
        names: our field -> theirs.

    Raises:
        DataError: a field is not there, or the label is no class.
        RowError: a field holds something that it must not.
    """
    text, label = _field(value, where, names["text"]), _field(value, where, names["label"])
    if not isinstance(text, str):
        raise RowError(where, f"`{names['text']}` must be text, this is {kind(text)}")
    return Classified(text, _label(label, where, names["label"]), where)


def tagged_row(value: Mapping[str, Any], where: str, names: Mapping[str, str]) -> Tagged:
    """Return words and their classes; arguments and errors as of `classified_row`."""
    tags_name = next((name for name in (names["tags"], *_TAGS) if name in value), names["tags"])
    words, tags = _field(value, where, names["tokens"]), _field(value, where, tags_name)
    for name, given in ((names["tokens"], words), (tags_name, tags)):
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise RowError(where, f"`{name}` must be a list, this is {kind(given)}")
    if len(words) != len(tags):
        text = f"`{names['tokens']}` has {len(words)} words, and `{tags_name}` {len(tags)} tags"
        raise RowError(where, text, reason=f"`{tags_name}` is not as long as the words")
    if not all(isinstance(word, str) for word in words):
        raise RowError(where, f"`{names['tokens']}` must be words")
    return Tagged(tuple(words), tuple(_label(tag, where, tags_name) for tag in tags), where)


def _field(value: Mapping[str, Any], where: str, name: str) -> Any:
    if name not in value:
        advice = 'If it has another name, write for example columns = { text = "sentence", label = "class" }'
        raise DataError(where, f"no field `{name}`; the row has {field_names(value)}", advice)
    return value[name]


def _label(value: object, where: str, name: str) -> int | str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    advice = "megatrain.hf.offloaded(Trainer) trains what is not a class of several: scores, and several labels at once"
    raise DataError(where, f"`{name}` must be a class, by name or number; this is {kind(value)}", advice)


# -- into tokens ---------------------------------------------------------------------------------------------------


def encode_labelled(
    rows: Sequence[Classified | Tagged | RowError],
    tokenizer: PreTrainedTokenizerFast,
    labels: Labels,
    max_length: int,
) -> Iterator[Labelled | RowError]:
    """Yield the tokens and labels of each row, cut as the tokenizer cuts texts: what ends them stays.

    The first token of a word has its class, the others none, as in the examples of transformers.

    Raises:
        DataError: there is no such class.
    """
    ready = [row for row in rows if not isinstance(row, RowError)]
    texts = [row.text if isinstance(row, Classified) else " ".join(row.words) for row in ready]
    whole = iter(_tokens(tokenizer, texts))
    cut = iter(_tokens(tokenizer, texts, truncation=True, max_length=max_length))
    for row in rows:
        if isinstance(row, RowError):
            yield row
            continue
        num_tokens, (ids, offsets) = len(next(whole)[0]), next(cut)
        if isinstance(row, Classified):
            found = [labels.number(row.label, row.where)]
        else:
            found = _of_tokens(row, offsets, labels)
        if not ids or all(label == IGNORED_LABEL for label in found):
            yield RowError(row.where, "the row has no label" if ids else "the row has no text")
            continue
        yield Labelled(ids, found, num_tokens)


def _tokens(
    tokenizer: PreTrainedTokenizerFast, texts: list[str], **options: Any
) -> list[tuple[list[int], list[tuple[int, int]]]]:
    if not texts:
        return []
    coded: Any = tokenizer(texts, return_offsets_mapping=True, verbose=False, **options)
    return list(zip(coded["input_ids"], coded["offset_mapping"], strict=True))


def _of_tokens(row: Tagged, offsets: Sequence[tuple[int, int]], labels: Labels) -> list[int]:
    """Return the class of each token of words joined by spaces; -100 for all but the first token of a word."""
    word_at = [number for number, word in enumerate(row.words) for _ in range(len(word) + 1)]
    found: list[int] = []
    before = -1
    for start, stop in offsets:
        number = word_at[stop - 1] if stop > start else -1
        is_first = number not in (-1, before)
        found.append(labels.number(row.tags[number], row.where) if is_first else IGNORED_LABEL)
        before = number if number != -1 else before
    return found
