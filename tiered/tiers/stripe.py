"""Cuts a slot into chunk files and deals them to drives in proportion to their rates. Pure functions."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from tiered.units import PAGE_BYTES, MiB, round_up

#: One path: few large files (writes are fastest so). Several: small enough to balance the drives.
SINGLE_PATH_CHUNK_BYTES = 512 * MiB
STRIPED_CHUNK_BYTES = 16 * MiB
_MAX_PARTS_OF_SMALL_BLOCK = 16


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """How a slot is cut: ``len(path_of_chunk)`` files of ``chunk_bytes`` each, in the order of the contents.

    Attributes:
        chunk_bytes: size of every file (the last one padded); a multiple of 4096, and > 0 even without files.
        path_of_chunk: index of the path that holds each file.
    """

    chunk_bytes: int
    path_of_chunk: tuple[int, ...]

    @property
    def slot_bytes(self) -> int:
        return self.chunk_bytes * len(self.path_of_chunk)


def check_rates(rates: Sequence[float], num_paths: int) -> tuple[float, ...]:
    """Return the rates as a tuple.

    Raises:
        ValueError: not one positive, finite rate per path.
    """
    if len(rates) != num_paths or not all(0 < rate < math.inf for rate in rates):
        raise ValueError(f"need one positive rate for each of the {num_paths} paths, got {list(rates)}")
    return tuple(rates)


@functools.lru_cache(maxsize=256)
def plan_chunks(nbytes: int, rates: tuple[float, ...], max_chunk_bytes: int | None = None) -> ChunkPlan:
    """Return the cut of a slot for ``nbytes`` of contents over paths with these rates.

    Chunks are equal in size, so the padding of the whole slot stays below 4096 bytes per file. A block too small
    for many chunks of the usual size is cut finer, so that each path gets its share of it.

    Args:
        nbytes: bytes of contents, >= 0 (0: no files).
        rates: relative speed of each path, all > 0.
        max_chunk_bytes: largest file, a multiple of 4096; default 512 MiB for one path, 16 MiB for several.
    """
    if max_chunk_bytes is None:
        max_chunk_bytes = SINGLE_PATH_CHUNK_BYTES if len(rates) == 1 else STRIPED_CHUNK_BYTES
    assert max_chunk_bytes > 0 and max_chunk_bytes % PAGE_BYTES == 0, max_chunk_bytes
    if nbytes == 0:
        return ChunkPlan(PAGE_BYTES, ())
    num_shares = 1 if len(rates) == 1 else min(_MAX_PARTS_OF_SMALL_BLOCK, round(sum(rates) / min(rates)))
    num_chunks = max(math.ceil(nbytes / max_chunk_bytes), min(num_shares, math.ceil(nbytes / PAGE_BYTES)))
    chunk_bytes = round_up(math.ceil(nbytes / num_chunks), PAGE_BYTES)
    return ChunkPlan(chunk_bytes, deal(math.ceil(nbytes / chunk_bytes), rates))


def deal(num_chunks: int, rates: tuple[float, ...]) -> tuple[int, ...]:
    """Return the path of each chunk such that every prefix is within one chunk of proportional, for every path.

    This is Tijdeman's rule for the chairman assignment problem: of the paths that are
    behind their share, the one that would first fall a whole chunk behind gets the next.
    """
    if len(rates) == 1:
        return (0,) * num_chunks
    total = sum(Fraction(rate) for rate in rates)
    shares = [Fraction(rate) / total for rate in rates]
    slack = 1 - Fraction(1, 2 * len(shares) - 2)
    counts = [0] * len(shares)
    dealt: list[int] = []
    for position in range(1, num_chunks + 1):
        due = [share * position - count for share, count in zip(shares, counts, strict=True)]
        behind = [path for path, chunks in enumerate(due) if chunks >= 1 - slack]
        path = min(behind, key=lambda index: (slack - due[index]) / shares[index])
        counts[path] += 1
        dealt.append(path)
    return tuple(dealt)
