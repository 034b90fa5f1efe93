"""A flipped bit in a block's contents on disk is found. The error names the block, the file and the byte range."""

from __future__ import annotations

import os
import random
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tiered import BlockNotFoundError, CorruptBlockError, GenerationError, MiB, NvmeTier, RamTier, Tier, TieredStore
from tiered.testing.faults import flip_bit
from tiered.tiers.layout import HomeFiles, files_of
from tiered.tiers.nvme import Verify

SIZES = {"large": 18 * MiB + 4321, "layer.0/weight": 300_001, "layer.0/m": 4096, "layer.1/weight": 70_000, "tiny": 1}


def open_store(folder: Path, num_paths: int, verify: Verify) -> TieredStore:
    paths = [folder / f"drive{number}" for number in range(num_paths)]
    tier = NvmeTier(paths, 64 * MiB, chunk_bytes=MiB if num_paths > 1 else None, verify=verify)
    return TieredStore([RamTier(64 * MiB, pin_memory=False), tier])


def fill(store: TieredStore, key: str, seed: int) -> torch.Tensor:
    tensor = torch.randint(0, 256, (SIZES[key],), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    with store.acquire(key, "ram", "w") as lease:
        lease.tensor.copy_(tensor)
    store.evict(key, "ram").wait(60)
    return tensor


def fill_all(store: TieredStore) -> dict[str, torch.Tensor]:
    for key, nbytes in SIZES.items():
        store.register(key, (nbytes,), torch.uint8, home="nvme")
    return {key: fill(store, key, seed) for seed, key in enumerate(SIZES)}


def read(store: TieredStore, key: str) -> torch.Tensor:
    with store.acquire(key, "ram") as lease:
        tensor = lease.tensor.clone()
    store.evict(key, "ram").wait(60)
    return tensor


def files(store: TieredStore, key: str) -> HomeFiles:
    slot = store._blocks[key].home.slot
    assert slot is not None
    return files_of(slot)


def assert_error_names_damage(error: CorruptBlockError, key: str, path: Path, offset: int) -> None:
    """Assert that the error names the block, the file, and ranges of at most 16 MiB that contain the damaged byte."""
    assert error.key == key and f"'{key}'" in str(error)
    ranges = re.findall(r"'([^']+)' bytes (\d+) to (\d+)", error.place)
    assert any(name == str(path) and int(start) <= offset < int(stop) for name, start, stop in ranges), error.place
    assert sum(int(stop) - int(start) for _, start, stop in ranges) <= 16 * MiB


@pytest.fixture(params=[1, 3], ids=["one path", "striped"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TieredStore]:
    with open_store(tmp_path, request.param, "always") as made:
        yield made


def homes_of(store: TieredStore, tree: str = "live") -> dict[str, HomeFiles]:
    """Return the files of all blocks, in ``live`` or in a snapshot."""
    homes = {}
    for key in SIZES:
        home = files(store, key)
        moved = [replace(f, path=Path(str(f.path).replace("/live/", f"/{tree}/"))) for f in home.files]
        homes[key] = HomeFiles(key, home.chunk_bytes, tuple(moved))
    return homes


def flips(homes: Mapping[str, HomeFiles], num: int, seed: int) -> Iterator[tuple[str, Path, int, bool]]:
    """Repeat: flip a random bit, yield (block, file, byte offset, whether contents changed), and flip the bit back.

    Blocks alternate. Every fourth flip is in the padding after the block's contents, if there is padding.
    """
    chance = random.Random(seed)
    for number in range(num):
        key = list(SIZES)[number % len(SIZES)]
        home, nbytes = homes[key], SIZES[key]
        start, stop = (nbytes, home.nbytes) if number % 4 == 0 and home.nbytes > nbytes else (0, nbytes)
        position = chance.randrange(start, stop)
        file = home.files[position // home.chunk_bytes]
        bit = 8 * (position - file.offset) + chance.randrange(8)
        flip_bit(file, bit)
        yield key, file.path, bit // 8, position < nbytes
        flip_bit(file, bit)


def test_every_flipped_bit_is_named_at_the_read(store: TieredStore) -> None:
    expected = fill_all(store)
    num_damaged = num_padding = 0
    for key, path, offset, is_damage in flips(homes_of(store), 130, seed=5):
        if is_damage:
            with pytest.raises(CorruptBlockError) as caught:
                read(store, key)
            assert_error_names_damage(caught.value, key, path, offset)
            num_damaged += 1
        else:
            assert torch.equal(read(store, key), expected[key]), "padding is not part of any contents"
            num_padding += 1
    assert (num_damaged, num_padding) == (103, 27)
    assert all(torch.equal(read(store, key), tensor) for key, tensor in expected.items())


def test_every_flipped_bit_is_named_on_demand(store: TieredStore) -> None:
    fill_all(store)
    assert store.verify() == sum(SIZES.values())
    for key, path, offset, is_damage in flips(homes_of(store), 40, seed=6):
        if is_damage:
            with pytest.raises(CorruptBlockError) as caught:
                store.verify()
            assert_error_names_damage(caught.value, key, path, offset)
            others = [other for other in SIZES if other != key]
            assert store.verify(others) == sum(SIZES[other] for other in others)
        else:
            assert store.verify() == sum(SIZES.values())


@pytest.mark.parametrize("num_paths", [1, 3])
def test_every_flipped_bit_is_named_when_a_generation_is_opened(tmp_path: Path, num_paths: int) -> None:
    with open_store(tmp_path, num_paths, "resume") as store:
        expected = fill_all(store)
        store.commit({}).wait(60)
        homes = homes_of(store, "snap/00000001")

    def tiers() -> list[Tier]:
        paths = [tmp_path / f"drive{number}" for number in range(num_paths)]
        return [RamTier(64 * MiB, pin_memory=False), NvmeTier(paths, 64 * MiB)]

    for key, path, offset, is_damage in flips(homes, 25, seed=7):
        if is_damage:
            with pytest.raises(CorruptBlockError, match=f"'{key}' of generation 1 is damaged") as caught:
                TieredStore.open(str(tmp_path / "drive0"), tiers())
            assert_error_names_damage(caught.value, key, path, offset)
        else:
            with TieredStore.open(str(tmp_path / "drive0"), tiers()) as again:
                assert torch.equal(read(again, key), expected[key])


def test_adopted_contents_are_checked_at_every_read(tmp_path: Path) -> None:
    with open_store(tmp_path, 3, "resume") as store:
        expected = fill_all(store)
        store.commit({}).wait(60)
    tier = NvmeTier([tmp_path / f"drive{number}" for number in range(3)], 64 * MiB, chunk_bytes=MiB, verify="always")
    with TieredStore.open(str(tmp_path / "drive0"), [RamTier(64 * MiB, pin_memory=False), tier]) as store:
        for key, path, offset, is_damage in flips(homes_of(store), 20, seed=8):
            if is_damage:
                with pytest.raises(CorruptBlockError) as caught:
                    read(store, key)
                assert_error_names_damage(caught.value, key, path, offset)
            else:
                assert torch.equal(read(store, key), expected[key])
        assert store.verify() == sum(SIZES.values())


def test_verify_compares_only_current_file_contents(tmp_path: Path) -> None:
    with open_store(tmp_path, 1, "resume") as store:
        fill_all(store)
        store.register("in.ram", (100,), torch.uint8, home="ram")
        store.register("never", (100,), torch.uint8, home="nvme")
        with store.acquire("tiny", "ram", "rw") as lease:
            lease.tensor.add_(1)
            assert store.verify(["tiny", "in.ram", "never"]) == 0
        flip_bit(files(store, "tiny").files[0], 0)
        assert store.verify() == sum(SIZES.values()) - 1, "newer bytes are in RAM, so the bytes on disk do not count"
        store.evict("tiny", "ram").wait(60)
        assert store.verify() == sum(SIZES.values())
        with pytest.raises(BlockNotFoundError):
            store.verify(["nobody"])
        files(store, "tiny").files[0].path.unlink()
        with pytest.raises(GenerationError, match="missing"):
            store.verify(["tiny"])


def test_verify_off_takes_checksums_only_at_commits(tmp_path: Path) -> None:
    with open_store(tmp_path, 1, "off") as store:
        expected = fill_all(store)
        assert store.verify() == 0
        flip_bit(files(store, "layer.0/m").files[0], 77)
        assert not torch.equal(read(store, "layer.0/m"), expected["layer.0/m"]), "no comparison was requested"
        fill(store, "layer.0/m", 3)
        store.commit({}).wait(60)
        assert store.verify() == sum(SIZES.values())
        flip_bit(files(store, "layer.0/m").files[0], 77)
        with pytest.raises(CorruptBlockError):
            store.verify()


def test_block_under_verification_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, is_reading, may_read, found = os.preadv, threading.Event(), threading.Event(), []

    def held(*arguments: Any) -> int:
        is_reading.set()
        assert may_read.wait(60)
        return real(*arguments)

    with open_store(tmp_path, 1, "resume") as store:
        store.register("tiny", (1,), torch.uint8, home="nvme")
        fill(store, "tiny", 0)
        monkeypatch.setattr(os, "preadv", held)
        thread = threading.Thread(target=lambda: found.append(store.verify()), daemon=True)
        thread.start()
        assert is_reading.wait(60)
        with pytest.raises(TimeoutError, match="waiting for: lease"):
            store.acquire("tiny", "ram", "w", timeout_s=0)
        may_read.set()
        thread.join(60)
        assert found == [1]
        fill(store, "tiny", 1)
