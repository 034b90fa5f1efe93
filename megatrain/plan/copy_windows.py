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
        max_per_group = Counter[int]()
        kind_indices: dict[tuple[bool, int], int] = {}  # (whether it passes, size) -> index of the kind
        last_ticks: dict[tuple[bool, str], int] = {}
        uses: list[tuple[int, int, int]] = []  # (tick, tick of the copy's previous use, index of the kind)
        keys: list[tuple[bool, str]] = []
        for tick, tick_copies in enumerate(copies):
            for passes, group in ((False, tick_copies.held), *((True, group) for group in tick_copies.passing)):
                for key, size in group.items():
                    kind = kind_indices.setdefault((passes, size), len(kind_indices))
                    uses.append((tick, last_ticks.get((passes, key), _NEVER), kind))
                    keys.append((passes, key))
                    last_ticks[passes, key] = tick
            for group in tick_copies.passing:
                for size, count in Counter(group.values()).items():
                    max_per_group[size] = max(max_per_group[size], count)
        ticks, previous_ticks, kinds = np.array(uses, dtype=np.int64).reshape(-1, 3).T
        # Append a second step, whose first uses follow the last uses of the first step.
        final_ticks = np.array([last_ticks[key] for key in keys], dtype=np.int64)
        next_previous_ticks = np.where(previous_ticks == _NEVER, final_ticks, previous_ticks + self._num_ticks)
        self._ticks = np.concatenate([ticks, ticks + self._num_ticks])
        self._previous_ticks = np.concatenate([previous_ticks, next_previous_ticks])
        self._kinds = np.concatenate([kinds, kinds])
        self._max_per_group, self._kind_indices = max_per_group, kind_indices

    def buffer_counts(self, num_ticks: int) -> dict[int, NDArray[np.int64]]:
        """Return the number of buffers that ``num_ticks`` ticks need, by size and first tick."""
        # Count a copy once in each window of ticks: at its first use, in windows that begin after its previous use.
        starts = np.maximum(np.maximum(self._previous_ticks + 1, self._ticks - num_ticks + 1), 0)
        stops = np.minimum(self._ticks + 1, self._num_ticks)
        is_counted = starts < stops
        changes = np.zeros((len(self._kind_indices), self._num_ticks + 1), dtype=np.int64)
        np.add.at(changes, (self._kinds[is_counted], starts[is_counted]), 1)
        np.subtract.at(changes, (self._kinds[is_counted], stops[is_counted]), 1)
        copies = changes.cumsum(axis=1)[:, :-1]
        result: dict[int, NDArray[np.int64]] = {}
        for (passes, size), kind in self._kind_indices.items():
            num_buffers = np.minimum(copies[kind], num_ticks * self._max_per_group[size]) if passes else copies[kind]
            result[size] = result[size] + num_buffers if size in result else num_buffers
        return result

    def max_buffer_counts(self, num_ticks: int) -> dict[int, int]:
        """Return the largest number of buffers that any ``num_ticks`` consecutive ticks need, by size."""
        return {size: int(counts.max()) for size, counts in self.buffer_counts(num_ticks).items()}
