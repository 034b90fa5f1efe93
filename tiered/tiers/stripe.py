"""Striping: splits slots into chunk files, and assigns the files to drives in proportion to the drives' rates."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from tiered.units import PAGE_BYTES, MiB, round_up

#: On a single path, large files are written fastest. On several drives, small files balance the load.
SINGLE_PATH_CHUNK_BYTES = 512 * MiB
STRIPED_CHUNK_BYTES = 16 * MiB
_MAX_PARTS_OF_SMALL_BLOCK = 16


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Files of a slot: ``len(path_indices)`` files of ``chunk_bytes`` each, ordered like the contents.

    Attributes:
        chunk_bytes: size of every file (the last file is padded), a positive multiple of 4096.
        path_indices: index of the path of each file.
    """

    chunk_bytes: int
    path_indices: tuple[int, ...]

    @property
    def slot_bytes(self) -> int:
        return self.chunk_bytes * len(self.path_indices)


def check_rates(rates: Sequence[float], num_paths: int) -> tuple[float, ...]:
    """Validate the rates and return them as a tuple.

    Raises:
        ValueError: there is not exactly one positive, finite rate per path.
    """
    if len(rates) != num_paths or not all(0 < rate < math.inf for rate in rates):
        raise ValueError(f"need one positive rate for each of the {num_paths} paths, got {list(rates)}")
    return tuple(rates)


@functools.lru_cache(maxsize=256)
def plan_chunks(nbytes: int, rates: tuple[float, ...], max_chunk_bytes: int | None = None) -> ChunkPlan:
    """Split a slot for ``nbytes`` of contents into files on paths with these rates.

    Chunks have equal sizes, so a slot has less than 4096 bytes of padding per file. A small block has smaller chunks,
    so that each path gets its share.

    Args:
        nbytes: bytes of contents. If 0, there are no files.
        rates: relative speed of each path, all positive.
        max_chunk_bytes: maximum file size, a multiple of 4096. Default: 512 MiB for one path, 16 MiB for several.
    """
    if max_chunk_bytes is None:
        max_chunk_bytes = SINGLE_PATH_CHUNK_BYTES if len(rates) == 1 else STRIPED_CHUNK_BYTES
    assert max_chunk_bytes > 0 and max_chunk_bytes % PAGE_BYTES == 0, max_chunk_bytes
    if nbytes == 0:
        return ChunkPlan(PAGE_BYTES, ())
    num_shares = 1 if len(rates) == 1 else min(_MAX_PARTS_OF_SMALL_BLOCK, round(sum(rates) / min(rates)))
    num_chunks = max(math.ceil(nbytes / max_chunk_bytes), min(num_shares, math.ceil(nbytes / PAGE_BYTES)))
    chunk_bytes = round_up(math.ceil(nbytes / num_chunks), PAGE_BYTES)
    return ChunkPlan(chunk_bytes, assign_chunks(math.ceil(nbytes / chunk_bytes), rates))


def assign_chunks(num_chunks: int, rates: tuple[float, ...]) -> tuple[int, ...]:
    """Assign chunks to paths so that in every prefix, each path is within one chunk of its proportional share.

    This is Tijdeman's rule for the chairman assignment problem: of the paths that are behind their share, the next
    chunk goes to the path that would first be a whole chunk behind.
    """
    if len(rates) == 1:
        return (0,) * num_chunks
    total = sum(Fraction(rate) for rate in rates)
    shares = [Fraction(rate) / total for rate in rates]
    slack = 1 - Fraction(1, 2 * len(shares) - 2)
    counts = [0] * len(shares)
    assignment: list[int] = []
    for position in range(1, num_chunks + 1):
        deficits = [share * position - count for share, count in zip(shares, counts, strict=True)]
        candidates = [path for path, chunks in enumerate(deficits) if chunks >= 1 - slack]
        path = min(candidates, key=lambda index: (slack - deficits[index]) / shares[index])
        counts[path] += 1
        assignment.append(path)
    return tuple(assignment)
