"""Stores with many blocks: the work of one call does not grow with the number of blocks."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch

from tiered import GiB, NvmeTier, RamTier, TieredStore


def num_calls_of_register(store: TieredStore, key: str, home: str) -> int:
    """Return the number of Python and C functions that one ``register`` calls."""
    num_calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        store.register(key, (8,), torch.float32, home=home)
    finally:
        sys.setprofile(None)
    return num_calls


def test_registering_a_block_does_not_look_at_the_others(tmp_path: Path) -> None:
    with TieredStore([RamTier(GiB, pin_memory=False), NvmeTier([tmp_path], GiB)]) as store:
        for home in ("ram", "nvme"):
            for number in range(10):
                store.register(f"{home}.few.{number}", (8,), torch.float32, home=home)
            of_few = num_calls_of_register(store, f"{home}.few", home)
            for number in range(200):
                store.register(f"{home}.many.{number}", (8,), torch.float32, home=home)
            assert num_calls_of_register(store, f"{home}.many", home) <= of_few + 20
