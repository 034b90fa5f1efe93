"""Keys of blocks: the names of weights, state, gradients, activations, results and caches in a store."""

from __future__ import annotations

from collections.abc import Container, Mapping
from itertools import count, takewhile

from tiered import BlockRecord


def weight_key(layout: str) -> str:
    return f"{layout}/weight"


def key_layout(key: str) -> str:
    """Return the name of the layout to which the key of a weight, state or gradient belongs."""
    return key.rpartition("/")[0]


def state_key(layout: str, state: str) -> str:
    return f"{layout}/{state}"


def gradient_key(layout: str, use_site: int) -> str:
    return f"{layout}/grad.{use_site}"


def part_keys(key: str, num_parts: int) -> list[str]:
    """Return one key per part, or ``key`` itself if there is only one part."""
    return [key] if num_parts == 1 else [f"{key}.{part}" for part in range(num_parts)]


def stored_keys(key: str, records: Container[str]) -> list[str]:
    """Return the stored keys of a block: ``key`` itself, or the keys of its parts in order, or no keys."""
    if key in records:
        return [key]
    return list(takewhile(records.__contains__, (f"{key}.{part}" for part in count())))


def stored_parts(key: str, records: Mapping[str, BlockRecord]) -> list[tuple[range, str]]:
    """Return the stored blocks of a weight or a state, each with its range of elements."""
    parts, start = [], 0
    for part_key in stored_keys(key, records):
        stop = start + records[part_key].shape[0]
        parts.append((range(start, stop), part_key))
        start = stop
    return parts


def key_kind(key: str) -> str:
    """Return the kind of block that a key names, for example ``weight``, ``low``, ``m`` or ``grad``."""
    return key.rpartition("/")[2].partition(".")[0]


def activation_key(visit: int, micro_batch: int, index: int) -> str:
    return f"activations/{visit}/{micro_batch}.{index}"


def results_key(visit: int, micro_batch: int) -> str:
    return f"activations/{visit}/{micro_batch}.results"


def cache_key(visit: int, micro_batch: int) -> str:
    return f"cache/{visit}/{micro_batch}"
