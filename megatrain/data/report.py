"""What became of the rows of a dataset: counts, and what was left out with reasons and first examples."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from megatrain.data.errors import RowError


@dataclass(frozen=True, slots=True)
class Dropped:
    """Rows, or turns of conversations, that are not trained for one reason.

    Attributes:
        reason: a sentence. count: how many. example: file and row of the first.
    """

    reason: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class DataReport:
    """What became of the rows.

    Attributes:
        num_rows: rows read. num_documents: what is trained on (rows, or pieces of long text).
        num_truncated: conversations cut to max_length. num_too_long: conversations dropped for their length.
        num_untrained: rows dropped because no token of theirs would be trained.
        num_tokens, num_trained_tokens: in all documents together.
        first_untrained: file and row of the first of those, or "".
        dropped: rows that cannot be trained, by reason, the most frequent first.
        untrained_turns: turns of the assistant that are left untrained in rows that are kept, by reason.
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

    @property
    def num_dropped(self) -> int:
        """Rows of which nothing is trained, for whatever reason."""
        return self.num_too_long + self.num_untrained + sum(each.count for each in self.dropped)

    def __str__(self) -> str:
        share = 100.0 * self.num_trained_tokens / max(1, self.num_tokens)
        text = f"{_some(self.num_rows, 'row')}, {_some(self.num_documents, 'document')}, {self.num_tokens:,} tokens"
        text += f" ({share:.1f}% trained)"
        for count, what in (
            (self.num_truncated, "truncated"),
            (self.num_too_long, "dropped as too long"),
            (self.num_untrained, "dropped without a trained token"),
        ):
            if count:
                text += f", {count:,} {what}"
        for each in self.dropped:
            text += f"\n  {each.count:,} rows dropped: {each.reason} (first: {each.example})"
        for each in self.untrained_turns:
            text += f"\n  {each.count:,} turns not trained: {each.reason} (first: {each.example})"
        return text

    def to_json(self) -> dict[str, Any]:
        """Return the report as values of JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> DataReport:
        """Return the report that :meth:`to_json` wrote."""
        lists = {name: tuple(Dropped(**each) for each in values[name]) for name in ("dropped", "untrained_turns")}
        return cls(**{**values, **lists})


@dataclass
class RowCounts:
    """Counts that grow while rows are encoded."""

    num_rows: int = 0
    num_truncated: int = 0
    num_too_long: int = 0
    num_untrained: int = 0
    first_untrained: str = ""
    first_error: RowError | None = None
    _dropped: dict[str, list[Any]] = field(default_factory=dict)
    _turns: dict[str, list[Any]] = field(default_factory=dict)

    def drop(self, error: RowError) -> None:
        """Count a row that cannot be trained."""
        self.num_rows += 1
        self.first_error = self.first_error or error
        self._dropped.setdefault(error.reason, [0, error.where])[0] += 1

    def leave_untrained(self, where: str) -> None:
        """Count a row of which no token would be trained."""
        self.num_untrained += 1
        self.first_untrained = self.first_untrained or where

    def leave_turn(self, reason: str, where: str) -> None:
        """Count a turn that is not trained in a row that is."""
        self._turns.setdefault(reason, [0, where])[0] += 1

    def report(self, num_documents: int, num_tokens: int, num_trained_tokens: int) -> DataReport:
        """Return the counts as they stand."""

        def listed(counts: dict[str, list[Any]]) -> tuple[Dropped, ...]:
            found = [Dropped(reason, count, example) for reason, (count, example) in counts.items()]
            return tuple(sorted(found, key=lambda each: -each.count))

        return DataReport(
            self.num_rows,
            num_documents,
            self.num_truncated,
            self.num_too_long,
            self.num_untrained,
            num_tokens,
            num_trained_tokens,
            listed(self._dropped),
            listed(self._turns),
            self.first_untrained,
        )


def _some(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
