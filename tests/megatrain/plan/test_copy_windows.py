"""The number of copy buffers, computed by sums over uses, equals a count that enumerates all windows."""

from __future__ import annotations

import random

import pytest

from megatrain.plan.copy_windows import CopyWindows, TickCopies


def by_hand(copies: list[TickCopies], num_ticks: int) -> dict[int, list[int]]:
    """Return each window's buffers by size: one for each held block, and enough for one passing group per tick."""
    sizes = {size for tick in copies for group in (tick.held, *tick.passing) for size in group.values()}
    largest = {
        size: max([0, *(list(group.values()).count(size) for tick in copies for group in tick.passing)])
        for size in sizes
    }
    found: dict[int, list[int]] = {size: [] for size in sizes}
    for start in range(len(copies)):
        window = [copies[(start + number) % len(copies)] for number in range(num_ticks)]
        held = {key: size for tick in window for key, size in tick.held.items()}
        passing = {key: size for tick in window for group in tick.passing for key, size in group.items()}
        for size in sizes:
            passes = min([*passing.values()].count(size), num_ticks * largest[size])
            found[size].append([*held.values()].count(size) + passes)
    return found


@pytest.mark.parametrize("seed", range(50))
def test_copy_windows_match_a_direct_count(seed: int) -> None:
    source = random.Random(seed)
    sizes = {f"copy {number}": source.choice([1, 2, 3]) for number in range(source.randint(1, 8))}

    def group() -> dict[str, int]:
        return {key: size for key, size in sizes.items() if source.random() < 0.3}

    copies = [TickCopies(group(), [group() for _ in range(source.randint(0, 3))]) for _ in range(source.randint(1, 12))]
    windows = CopyWindows(copies)
    for num_ticks in range(1, len(copies) + 1):
        expected = by_hand(copies, num_ticks)
        assert {size: [*counts] for size, counts in windows.buffer_counts(num_ticks).items()} == expected
        assert windows.max_buffer_counts(num_ticks) == {size: max(counts) for size, counts in expected.items()}
