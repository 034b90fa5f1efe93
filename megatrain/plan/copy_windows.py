"""Number of buffers of each size that copies need in consecutive ticks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_NEVER = -(1 << 40)


@dataclass(slots=True)
class TickCopies:
    """Copies of one tick in a tier, as slot bytes by key.

    Attributes:
        held: Copies held for the whole tick, or staying until a later tick.
        passing: Copies in groups that the tick leases one at a time.
    """

    held: dict[str, int]
    passing: list[dict[str, int]]


class CopyWindows:
    """Counter of the buffers that consecutive ticks need. The next step's first tick follows the last tick.

    All held copies exist at the same time. One passing group per tick also counts, so that the next group can arrive
    while the previous group is in use.
    """

    def __init__(self, copies: Sequence[TickCopies]) -> None:
        self._num_ticks = len(copies)
        in_group = Counter[int]()
        kinds: dict[tuple[bool, int], int] = {}  # (whether it passes, size) -> index of the kind
        last: dict[tuple[bool, str], int] = {}
        uses: list[tuple[int, int, int]] = []  # (tick, tick of the copy's previous use, index of the kind)
        keys: list[tuple[bool, str]] = []
        for number, of_tick in enumerate(copies):
            for passes, group in ((False, of_tick.held), *((True, group) for group in of_tick.passing)):
                for key, size in group.items():
                    kind = kinds.setdefault((passes, size), len(kinds))
                    uses.append((number, last.get((passes, key), _NEVER), kind))
                    keys.append((passes, key))
                    last[passes, key] = number
            for group in of_tick.passing:
                for size, count in Counter(group.values()).items():
                    in_group[size] = max(in_group[size], count)
        ticks, before, kind_of_use = np.array(uses, dtype=np.int64).reshape(-1, 3).T
        # Append a second step, whose first uses follow the last uses of the first step.
        afresh = np.array([last[key] for key in keys], dtype=np.int64)
        again = np.where(before == _NEVER, afresh, before + self._num_ticks)
        self._ticks = np.concatenate([ticks, ticks + self._num_ticks])
        self._before = np.concatenate([before, again])
        self._kinds = np.concatenate([kind_of_use, kind_of_use])
        self._in_group, self._kind_of = in_group, kinds

    def counts(self, num_ticks: int) -> dict[int, NDArray[np.int64]]:
        """Return the number of buffers that ``num_ticks`` ticks need, by size and first tick."""
        # Count a copy once per window, at its first use. The window must begin after the copy's previous use.
        first = np.maximum(np.maximum(self._before + 1, self._ticks - num_ticks + 1), 0)
        stop = np.minimum(self._ticks + 1, self._num_ticks)
        counted = first < stop
        changes = np.zeros((len(self._kind_of), self._num_ticks + 1), dtype=np.int64)
        np.add.at(changes, (self._kinds[counted], first[counted]), 1)
        np.subtract.at(changes, (self._kinds[counted], stop[counted]), 1)
        present = changes.cumsum(axis=1)[:, :-1]
        found: dict[int, NDArray[np.int64]] = {}
        for (passes, size), kind in self._kind_of.items():
            of_kind = np.minimum(present[kind], num_ticks * self._in_group[size]) if passes else present[kind]
            found[size] = found[size] + of_kind if size in found else of_kind
        return found

    def most(self, num_ticks: int) -> dict[int, int]:
        """Return the largest number of buffers that any ``num_ticks`` consecutive ticks need, by size."""
        return {size: int(counts.max()) for size, counts in self.counts(num_ticks).items()}
