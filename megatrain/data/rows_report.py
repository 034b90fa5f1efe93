"""Errors in training data, and reports on the rows that were read or dropped, with reasons."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any, Literal


class DataError(Exception):
    """Error in training data. The message states the file and row, the cause and the remedy.

    Attributes:
        location: File, and the row or line if known.
    """

    def __init__(self, location: str, problem: str, remedy: str = "") -> None:
        self.location = location
        super().__init__((f"{location}: " if location else "") + problem + (f". {remedy}" if remedy else ""))


class RowError(DataError):
    """Error in one row. The row is dropped and counted, or the error ends the run if ``data.bad_rows`` is "error".

    Attributes:
        reason: The problem without details of the row, so that equal problems can be counted together.
    """

    def __init__(self, location: str, problem: str, remedy: str = "", *, reason: str = "") -> None:
        super().__init__(location, problem, remedy or "Fix or remove the row")
        self.reason = reason or problem


class EmptyFileError(RowError):
    """Error for an empty file among several files. The file is skipped and counted, but no row is lost."""

    def __init__(self, location: str) -> None:
        super().__init__(location, "the file is empty", "Remove it or fill it")


#: Fraction of a source that can be dropped or truncated without a warning.
WARN_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class DropCount:
    """Number of rows, conversation turns or files that share a reason.

    Attributes:
        example: File and row of the first occurrence.
    """

    reason: str
    count: int
    example: str

    @property
    def skip_message(self) -> str:
        """Message about the skipped empty files."""
        return f"{pluralize(self.count, 'empty file')} skipped (first: {self.example})"


@dataclass(slots=True)
class SourceCounts:
    """Counts of a source's rows, tokens and assistant turns.

    Attributes:
        num_truncated: Rows truncated to ``max_length``.
        num_too_long: Rows dropped because they are too long.
        num_untrained: Rows dropped because none of their tokens are in the loss.
        num_bad: Rows dropped because of a ``RowError``.
        num_rows_lost: Rows that are dropped or truncated.
        num_tokens: Tokens of all rows before truncation. Rows that could not be tokenized are not counted.
        num_tokens_lost: Tokens in ``num_tokens`` that are in no document.
        num_turns: Assistant turns that should be in the loss. Only kept rows are counted.
        num_turns_lost: Turns in ``num_turns`` that cannot be in the loss.
    """

    num_rows: int = 0
    num_truncated: int = 0
    num_too_long: int = 0
    num_untrained: int = 0
    num_bad: int = 0
    num_rows_lost: int = 0
    num_tokens: int = 0
    num_tokens_lost: int = 0
    num_turns: int = 0
    num_turns_lost: int = 0

    @property
    def lost_share(self) -> float:
        """The largest of three fractions, 0 to 1: lost rows, lost tokens and lost assistant turns."""
        return max(
            self.num_rows_lost / max(1, self.num_rows),
            self.num_tokens_lost / max(1, self.num_tokens),
            self.turns_lost_share,
        )

    @property
    def turns_lost_share(self) -> float:
        """Fraction of the assistant turns that cannot be in the loss. Only kept rows are counted."""
        return self.num_turns_lost / max(1, self.num_turns)

    def __sub__(self, other: SourceCounts) -> SourceCounts:
        return SourceCounts(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __str__(self) -> str:
        rows, tokens = self.num_rows_lost / max(1, self.num_rows), self.num_tokens_lost / max(1, self.num_tokens)
        parts = [
            f"{count:,} {label}"
            for count, label in (
                (self.num_truncated, "truncated to data.max_length"),
                (self.num_too_long, "dropped as too long"),
                (self.num_untrained, "dropped without a trained token"),
                (self.num_bad, "dropped because of an error"),
            )
            if count
        ]
        row_share = f"{self.num_rows_lost:,} of {pluralize(self.num_rows, 'row')} ({rows:.1%})"
        row_loss = f"{row_share} and {tokens:.1%} of the tokens are dropped or truncated: {', '.join(parts)}"
        rows_lost = row_loss if self.num_rows_lost else ""
        turn_share = f"{self.num_turns_lost:,} of {pluralize(self.num_turns, 'turn')} ({self.turns_lost_share:.1%})"
        turns_lost = f"{turn_share} of the assistant are not trained" if self.num_turns_lost else ""
        return "; ".join(filter(None, (rows_lost, turns_lost)))


@dataclass(frozen=True, slots=True)
class DataReport:
    """Counts of all rows, with reasons. ``SourceCounts`` describes the counts of dropped and truncated rows.

    Attributes:
        num_documents: Number of documents to train on. Each is a row or a piece of a long text.
        num_trained_tokens: Number of tokens in the loss.
        first_untrained: File and row of the first row that has no token in the loss, or "".
        dropped: Rows that cannot be used for training, by reason. The most frequent reason comes first.
        untrained_turns: Assistant turns that cannot be in the loss, by reason. Only kept rows are counted.
        sources: Counts of each source, in order.
        empty_files: Number of empty files, or None if there are none.
        left_out: Rows with a field that the chat template does not render, by field.
        special_tokens: Rows whose text contains a special token, by token.
        unread: Rows with a column that their format does not read, by column.
    """

    num_rows: int
    num_documents: int
    num_truncated: int
    num_too_long: int
    num_untrained: int
    num_tokens: int
    num_trained_tokens: int
    dropped: tuple[DropCount, ...] = ()
    untrained_turns: tuple[DropCount, ...] = ()
    first_untrained: str = ""
    sources: tuple[SourceCounts, ...] = ()
    empty_files: DropCount | None = None
    left_out: tuple[DropCount, ...] = ()
    special_tokens: tuple[DropCount, ...] = ()
    unread: tuple[DropCount, ...] = ()

    def remarks(self) -> Iterator[tuple[Literal["warning", "note"], str]]:
        """Yield (severity, message) for each remark about fields, columns and special tokens."""
        calls = [entry for entry in self.left_out if entry.reason.split()[-1] in ("tool_calls", "tools")]
        for count, group in itertools.groupby(calls, key=lambda entry: entry.count):
            entries = list(group)
            names, rows = " / ".join(e.reason for e in entries), f"{count:,} of {pluralize(self.num_rows, 'row')}"
            yield (
                "warning",
                f"the chat template has no place for {names} ({rows}; first: {entries[0].example}): set "
                "model.chat_template to a template with tools",
            )
        for entry in self.left_out:
            if entry not in calls:
                yield (
                    "note",
                    f"the chat template leaves out `{entry.reason}` of {pluralize(entry.count, 'row')} (first: "
                    f"{entry.example})",
                )
        if self.unread:
            names = ", ".join(f"`{entry.reason}` ({pluralize(entry.count, 'row')})" for entry in self.unread[:8])
            suffix = f" and {len(self.unread) - 8} others" if len(self.unread) > 8 else ""
            yield "note", f"ignored columns: {names}{suffix}"
        for entry in self.special_tokens:
            yield (
                "note",
                f"the text of {pluralize(entry.count, 'row')} contains {entry.reason}, which the tokenizer reads as a "
                f"special token, as in transformers (first: {entry.example})",
            )

    @property
    def num_dropped(self) -> int:
        """Total number of dropped rows."""
        return self.num_too_long + self.num_untrained + sum(entry.count for entry in self.dropped)

    def __str__(self) -> str:
        share = 100.0 * self.num_trained_tokens / max(1, self.num_tokens)
        kinds = (" (a text file is one row)", " (pieces of texts, or answers)")
        row_note, note = kinds if self.num_documents > self.num_rows else ("", "")
        text = f"{pluralize(self.num_rows, 'row')}{row_note}, {pluralize(self.num_documents, 'document')}{note}, "
        text += f"{self.num_tokens:,} tokens ({share:.1f}% trained)"
        for count, label in (
            (self.num_truncated, "truncated"),
            (self.num_too_long, "dropped as too long"),
            (self.num_untrained, f"dropped without a trained token (first: {self.first_untrained})"),
        ):
            if count:
                text += f", {count:,} {label}"
        if self.empty_files is not None:
            text += f", {self.empty_files.skip_message}"
        for entry in self.dropped:
            text += f"\n  {pluralize(entry.count, 'row')} dropped: {entry.reason} (first: {entry.example})"
        for entry in self.untrained_turns:
            text += f"\n  {pluralize(entry.count, 'turn')} not trained: {entry.reason} (first: {entry.example})"
        for severity, remark in self.remarks():
            text += f"\n  {'warning: ' if severity == 'warning' else ''}{remark}"
        return text

    def to_json(self) -> dict[str, Any]:
        """Return the report as a dict that JSON can represent."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> DataReport:
        """Create a report from the output of :meth:`to_json`."""
        lists = {name: tuple(DropCount(**entry) for entry in values.get(name, ())) for name in _LISTS}
        sources = tuple(SourceCounts(**entry) for entry in values["sources"])
        empty_count = values.get("empty_files")
        empty_files = None if empty_count is None else DropCount(**empty_count)
        return cls(**{**values, **lists, "sources": sources, "empty_files": empty_files})


#: Names of the report's attributes that list counts by reason.
_LISTS = ("dropped", "untrained_turns", "left_out", "special_tokens", "unread")


def check_losses(report: DataReport, names: Sequence[str], max_dropped: float) -> list[str]:
    """Return a warning for each source whose ``lost_share`` is above ``WARN_SHARE``.

    Args:
        names: Name of each source in messages.

    Raises:
        DataError: A source's ``lost_share`` is above ``max_dropped``.
    """
    warnings = []
    for name, counts in zip(names, report.sources, strict=True):
        share = counts.lost_share
        is_cut = counts.num_truncated + counts.num_too_long > 0
        remedy = "Raise data.max_length" if is_cut else "Fix the rows"
        if share == counts.turns_lost_share:
            remedy = "Set model.chat_template to a template that renders them completely"
        if share > max_dropped:
            raise DataError(
                name,
                f"{counts}. That is more than data.max_dropped = {max_dropped:g}",
                f"{remedy} (`megatrain-tier data stats CONFIG` shows the reasons), or accept the loss: set max_dropped "
                f"= {math.ceil(100 * share) / 100:g} in [data]",
            )
        if share > WARN_SHARE:
            warnings.append(f"{name}: {counts}. {remedy}: `megatrain-tier data stats CONFIG` shows the reasons")
    return warnings


class RowCounts:
    """Running counts of rows during encoding.

    Attributes:
        total: Counts of all sources so far.
        sources: Counts of each completed source.
    """

    def __init__(self) -> None:
        self.total, self._source_start = SourceCounts(), SourceCounts()
        self.sources: list[SourceCounts] = []
        self.first_untrained = ""
        self.first_error: RowError | None = None
        self._empty_files: DropCount | None = None
        self._reasons: dict[str, dict[str, DropCount]] = {name: {} for name in _LISTS}

    def drop(self, error: RowError) -> None:
        """Count a row that cannot be used for training, or an empty file."""
        if isinstance(error, EmptyFileError):
            old_count = self._empty_files or DropCount("the file is empty", 0, error.location)
            self._empty_files = replace(old_count, count=old_count.count + 1)
            return
        self.total.num_rows += 1
        self.total.num_rows_lost += 1
        self.total.num_bad += 1
        self.first_error = self.first_error or error
        self.record("dropped", [error.reason], error.location)

    def count_untrained(self, location: str) -> None:
        """Count a row that has no token in the loss."""
        self.total.num_untrained += 1
        self.first_untrained = self.first_untrained or location

    def add_turns(self, num_turns: int, reasons: Sequence[str], location: str) -> None:
        """Count the assistant turns of a kept row, and the reasons why some of them cannot be in the loss."""
        self.total.num_turns += num_turns
        self.total.num_turns_lost += len(reasons)
        self.record("untrained_turns", reasons, location)

    def record(self, name: str, reasons: Iterable[str], location: str) -> None:
        """Add one to the count of each reason in the report's list ``name``."""
        counts = self._reasons[name]
        for reason in reasons:
            old_count = counts.get(reason) or DropCount(reason, 0, location)
            counts[reason] = replace(old_count, count=old_count.count + 1)

    def end_source(self) -> None:
        """Store the counts of the source that has just been read completely."""
        self.sources.append(self.total - self._source_start)
        self._source_start = replace(self.total)

    def report(self, num_documents: int, num_tokens: int, num_trained_tokens: int) -> DataReport:
        """Return a report with the current counts."""
        total = self.total
        lists = {name: tuple(sorted(counts.values(), key=lambda e: -e.count)) for name, counts in self._reasons.items()}
        return DataReport(
            total.num_rows,
            num_documents,
            total.num_truncated,
            total.num_too_long,
            total.num_untrained,
            num_tokens,
            num_trained_tokens,
            first_untrained=self.first_untrained,
            sources=tuple(self.sources),
            empty_files=self._empty_files,
            **lists,
        )


def pluralize(count: int, noun: str) -> str:
    """Return a count followed by its noun, with a plural "s" if the count is not 1."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
