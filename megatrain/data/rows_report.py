"""Reports of the rows that were read and dropped, with reasons; errors of data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any, Literal


class DataError(Exception):
    """Training data cannot be used; the text names the file and row, the cause and the remedy.

    Attributes:
        where: file, and row or line if known.
    """

    def __init__(self, where: str, problem: str, remedy: str = "") -> None:
        self.where = where
        super().__init__((f"{where}: " if where else "") + problem + (f". {remedy}" if remedy else ""))


class RowError(DataError):
    """One row cannot be trained. It is dropped and counted, unless ``data.bad_rows`` is "error".

    Attributes:
        reason: the problem without details of this row, for counting.
    """

    def __init__(self, where: str, problem: str, remedy: str = "", *, reason: str = "") -> None:
        super().__init__(where, problem, remedy or "Fix or remove the row")
        self.reason = reason or problem


class EmptyFileError(RowError):
    """One of several files is empty. It is skipped and counted, but no row is lost."""

    def __init__(self, where: str) -> None:
        super().__init__(where, "the file is empty", "Remove it or fill it")


#: Share of a source that may be dropped or cut without a warning.
WARN_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Dropped:
    """Rows, turns of conversations, or files that are not trained for one reason.

    Attributes:
        example: file and row of the first one.
    """

    reason: str
    count: int
    example: str

    @property
    def skipped(self) -> str:
        """Text about skipped empty files."""
        return f"{some(self.count, 'empty file')} skipped (first: {self.example})"


@dataclass(slots=True)
class SourceCounts:
    """Counts of the rows of one source, by outcome.

    Attributes:
        num_truncated: conversations cut to max_length.
        num_too_long: rows dropped for their length.
        num_untrained: rows dropped because none of their tokens would be trained.
        num_bad: rows dropped because they cannot be trained.
        num_rows_lost: rows that are dropped or cut, counted once each.
        num_tokens: Tokens of all rows that could be tokenized, before cutting.
        num_tokens_lost: Tokens of these rows that are in no document.
        num_turns: Assistant turns that should be trained, in rows that are kept.
        num_turns_lost: Assistant turns that should be trained but are not, in rows that are kept.
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
    def share_lost(self) -> float:
        """Return the largest dropped or cut share: of rows, of tokens, or of turns."""
        return max(
            self.num_rows_lost / max(1, self.num_rows),
            self.num_tokens_lost / max(1, self.num_tokens),
            self.share_of_turns_lost,
        )

    @property
    def share_of_turns_lost(self) -> float:
        """Return the share of untrained assistant turns, in rows that are kept."""
        return self.num_turns_lost / max(1, self.num_turns)

    def __sub__(self, before: SourceCounts) -> SourceCounts:
        return SourceCounts(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))

    def __str__(self) -> str:
        rows, tokens = self.num_rows_lost / max(1, self.num_rows), self.num_tokens_lost / max(1, self.num_tokens)
        parts = [
            f"{count:,} {what}"
            for count, what in (
                (self.num_truncated, "cut to data.max_length"),
                (self.num_too_long, "dropped as too long"),
                (self.num_untrained, "dropped without a trained token"),
                (self.num_bad, "dropped as they cannot be trained"),
            )
            if count
        ]
        text = (
            f"{self.num_rows_lost:,} of {some(self.num_rows, 'row')} ({rows:.1%}) and {tokens:.1%} of the tokens are "
        )
        rows_lost = f"{text}dropped or cut: {', '.join(parts)}" if self.num_rows_lost else ""
        of_all = f"{self.num_turns_lost:,} of {some(self.num_turns, 'turn')} ({self.share_of_turns_lost:.1%})"
        turns_lost = f"{of_all} of the assistant are not trained" if self.num_turns_lost else ""
        return "; ".join(filter(None, (rows_lost, turns_lost)))


@dataclass(frozen=True, slots=True)
class DataReport:
    """Counts of all rows, by outcome.

    Attributes:
        num_documents: documents to train on (rows, or pieces of long text).
        num_truncated: conversations cut to max_length.
        num_too_long: conversations dropped for their length.
        num_untrained: rows dropped because none of their tokens would be trained.
        num_trained_tokens: Tokens with a loss.
        first_untrained: file and row of the first row in ``num_untrained``, or "".
        dropped: rows that cannot be trained, by reason, the most frequent first.
        untrained_turns: untrained assistant turns in rows that are kept, by reason.
        sources: counts of each source, in order.
        empty_files: the empty files; None if there are none.
        left_out: fields of rows that the chat template does not show; the field is the reason.
        special_tokens: special tokens in the texts of rows; the token is the reason.
        unread: columns of rows that their format does not read; the column is the reason.
    """

    num_rows: int
    num_documents: int
    num_truncated: int
    num_too_long: int
    num_untrained: int
    num_tokens: int
    num_trained_tokens: int
    dropped: tuple[Dropped, ...] = ()
    untrained_turns: tuple[Dropped, ...] = ()
    first_untrained: str = ""
    sources: tuple[SourceCounts, ...] = ()
    empty_files: Dropped | None = None
    left_out: tuple[Dropped, ...] = ()
    special_tokens: tuple[Dropped, ...] = ()
    unread: tuple[Dropped, ...] = ()

    def remarks(self) -> Iterator[tuple[Literal["warning", "note"], str]]:
        """Yield (severity, text) of the messages about fields, columns and special tokens."""
        calls = [each for each in self.left_out if each.reason.split()[-1] in ("tool_calls", "tools")]
        for count, group in itertools.groupby(calls, key=lambda each: each.count):
            same = list(group)
            names, rows = " / ".join(each.reason for each in same), f"{count:,} of {some(self.num_rows, 'row')}"
            yield (
                "warning",
                f"the chat template has no place for {names} ({rows}; first: {same[0].example}): set "
                "model.chat_template to a template with tools",
            )
        for each in self.left_out:
            if each not in calls:
                yield (
                    "note",
                    f"the chat template leaves out `{each.reason}` of {some(each.count, 'row')} (first: "
                    f"{each.example})",
                )
        if self.unread:
            names = ", ".join(f"`{each.reason}` ({some(each.count, 'row')})" for each in self.unread[:8])
            more = f" and {len(self.unread) - 8} others" if len(self.unread) > 8 else ""
            yield "note", f"columns that are not read: {names}{more}"
        for each in self.special_tokens:
            yield (
                "note",
                f"the text of {some(each.count, 'row')} holds {each.reason}, which the tokenizer reads as its special "
                f"token, as in transformers (first: {each.example})",
            )

    @property
    def num_dropped(self) -> int:
        """Number of rows without any trained token, for all reasons."""
        return self.num_too_long + self.num_untrained + sum(each.count for each in self.dropped)

    def __str__(self) -> str:
        share = 100.0 * self.num_trained_tokens / max(1, self.num_tokens)
        text = f"{some(self.num_rows, 'row')}, {some(self.num_documents, 'document')}, {self.num_tokens:,} tokens"
        text += f" ({share:.1f}% trained)"
        for count, what in (
            (self.num_truncated, "truncated"),
            (self.num_too_long, "dropped as too long"),
            (self.num_untrained, f"dropped without a trained token (first: {self.first_untrained})"),
        ):
            if count:
                text += f", {count:,} {what}"
        if self.empty_files is not None:
            text += f", {self.empty_files.skipped}"
        for each in self.dropped:
            text += f"\n  {some(each.count, 'row')} dropped: {each.reason} (first: {each.example})"
        for each in self.untrained_turns:
            text += f"\n  {some(each.count, 'turn')} not trained: {each.reason} (first: {each.example})"
        for severity, remark in self.remarks():
            text += f"\n  {'warning: ' if severity == 'warning' else ''}{remark}"
        return text

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> DataReport:
        """Return the report from the output of :meth:`to_json`."""
        lists = {name: tuple(Dropped(**each) for each in values.get(name, ())) for name in _LISTS}
        sources = tuple(SourceCounts(**each) for each in values["sources"])
        empty = values.get("empty_files")
        empty_files = None if empty is None else Dropped(**empty)
        return cls(**{**values, **lists, "sources": sources, "empty_files": empty_files})


#: Fields of a report that count reasons.
_LISTS = ("dropped", "untrained_turns", "left_out", "special_tokens", "unread")


def check_losses(report: DataReport, names: Sequence[str], max_dropped: float) -> list[str]:
    """Compare the loss of each source with ``WARN_SHARE`` and with the limit of the config.

    Args:
        names: Names of the sources in messages.
        max_dropped: ``data.max_dropped``.

    Returns:
        A warning for each source that loses more than ``WARN_SHARE``.

    Raises:
        DataError: a source loses more than ``max_dropped``.
    """
    warnings = []
    for name, counts in zip(names, report.sources, strict=True):
        share = counts.share_lost
        is_cut = counts.num_truncated + counts.num_too_long > 0
        mend = "Raise data.max_length" if is_cut else "Fix the rows"
        if share == counts.share_of_turns_lost:
            mend = "Set model.chat_template to a template that shows them whole"
        if share > max_dropped:
            raise DataError(
                name,
                f"{counts}. That is more than data.max_dropped = {max_dropped:g}",
                f"{mend} (`megatrain-tier data stats CONFIG` says why), or accept it: write max_dropped = "
                f"{math.ceil(100 * share) / 100:g} in [data]",
            )
        if share > WARN_SHARE:
            warnings.append(f"{name}: {counts}. {mend}: `megatrain-tier data stats CONFIG` says why")
    return warnings


class RowCounts:
    """Counters during the encoding of rows.

    Attributes:
        total: Counts of all sources so far.
        sources: Counts of each source that has ended.
    """

    def __init__(self) -> None:
        self.total, self._before = SourceCounts(), SourceCounts()
        self.sources: list[SourceCounts] = []
        self.first_untrained = ""
        self.first_error: RowError | None = None
        self._empty_files: Dropped | None = None
        self._reasons: dict[str, dict[str, Dropped]] = {name: {} for name in _LISTS}

    def drop(self, error: RowError) -> None:
        """Count a row that cannot be trained, or a file without rows."""
        if isinstance(error, EmptyFileError):
            before = self._empty_files or Dropped("the file is empty", 0, error.where)
            self._empty_files = replace(before, count=before.count + 1)
            return
        self.total.num_rows += 1
        self.total.num_rows_lost += 1
        self.total.num_bad += 1
        self.first_error = self.first_error or error
        self.note("dropped", [error.reason], error.where)

    def leave_untrained(self, where: str) -> None:
        """Count a row without any trained token."""
        self.total.num_untrained += 1
        self.first_untrained = self.first_untrained or where

    def add_turns(self, num_turns: int, untrained: Sequence[str], where: str) -> None:
        """Count the turns of a row that is kept, with the reasons of untrained ones."""
        self.total.num_turns += num_turns
        self.total.num_turns_lost += len(untrained)
        self.note("untrained_turns", untrained, where)

    def note(self, name: str, reasons: Iterable[str], where: str) -> None:
        """Count reasons, or names, in one of the lists of a report."""
        counts = self._reasons[name]
        for reason in reasons:
            before = counts.get(reason) or Dropped(reason, 0, where)
            counts[reason] = replace(before, count=before.count + 1)

    def end_source(self) -> None:
        """Mark the end of a source."""
        self.sources.append(self.total - self._before)
        self._before = replace(self.total)

    def report(self, num_documents: int, num_tokens: int, num_trained_tokens: int) -> DataReport:
        """Return the current counts."""
        total = self.total
        lists = {
            name: tuple(sorted(counts.values(), key=lambda each: -each.count)) for name, counts in self._reasons.items()
        }
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


def some(count: int, what: str) -> str:
    """Return a count with its noun."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"
