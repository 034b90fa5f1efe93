"""The bytes written to a path are counted over its lifetime, even across crashes, and never exceed the limit."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from processes import warm
from tiered import GiB, KiB, MiB, NvmeTier, RamTier, TieredError, TieredStore
from tiered.tiers.health import WEAR_NAME, WearCounter, WearLimitError

NUM_BYTES = 256 * KiB


def open_store(folder: Path, num_paths: int = 1, limits: list[int | None] | None = None) -> TieredStore:
    paths = [folder / str(number) for number in range(num_paths)]
    tier = NvmeTier(paths, 4 * MiB, chunk_bytes=64 * KiB, max_written_bytes=limits, on_notice=lambda text: None)
    return TieredStore([RamTier(4 * MiB, pin_memory=False), tier])


def write(store: TieredStore, value: int, key: str = "block") -> None:
    with store.acquire(key, "ram", "w") as lease:
        lease.tensor.fill_(value)
    store.evict(key, "ram").wait(60)


def count(folder: Path, path: int = 0) -> int:
    return int(json.loads((folder / str(path) / WEAR_NAME).read_text())["written_bytes"])


def test_write_count_continues_across_runs(tmp_path: Path) -> None:
    for number in range(3):
        with open_store(tmp_path, 2) as store:
            store.register("block", (NUM_BYTES,), torch.uint8, home="nvme")
            write(store, number)
            most_bytes = (number + 1) * NUM_BYTES + GiB
            assert GiB <= count(tmp_path) <= most_bytes, "while it runs the file is ahead of the truth"
            assert sum(store.stats().written_bytes.values()) == NUM_BYTES
        assert count(tmp_path, 0) + count(tmp_path, 1) == (number + 1) * NUM_BYTES
    with open_store(tmp_path, 2):
        pass
    assert count(tmp_path, 0) + count(tmp_path, 1) == 3 * NUM_BYTES


def test_run_without_writes_counts_no_bytes(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.register("block", (NUM_BYTES,), torch.uint8, home="nvme")
    assert not (tmp_path / "0" / WEAR_NAME).exists()


@pytest.mark.parametrize("limited", [0, 1])
def test_write_limit_is_kept_without_loss(tmp_path: Path, limited: int) -> None:
    limits: list[int | None] = [None, None]
    limits[limited] = NUM_BYTES + 100
    with open_store(tmp_path, 2, limits) as store:
        store.register("block", (NUM_BYTES,), torch.uint8, home="nvme")
        write(store, 1)
        write(store, 2)
        before = store.stats().written_bytes
        with pytest.raises(WearLimitError, match="max_written") as caught:
            write(store, 3)
        assert (caught.value.limit_bytes, caught.value.written_bytes) == (NUM_BYTES + 100, NUM_BYTES)
        assert caught.value.path == str(tmp_path / str(limited)) and caught.value.need_bytes == NUM_BYTES // 2
        assert store.stats().written_bytes == before, "no byte was written to the other path"
        with pytest.raises(WearLimitError):
            store.wait_idle()
        with store.acquire("block", "ram") as lease:
            assert set(lease.tensor.tolist()) == {3}
    assert count(tmp_path, limited) == NUM_BYTES
    limits[limited] = 2 * NUM_BYTES
    with open_store(tmp_path, 2, limits) as store:
        store.register("block", (NUM_BYTES,), torch.uint8, home="nvme")
        write(store, 4)
        write(store, 5)
        with pytest.raises(WearLimitError):
            write(store, 6)


def fill_blocks_in_turn(store: TieredStore) -> None:
    for number in range(8):
        with store.acquire(f"block.{number % 4}", "ram", "w") as lease:
            lease.tensor.fill_(number)


def test_waiting_write_observes_the_limit(tmp_path: Path) -> None:
    tier = NvmeTier([tmp_path / "0"], 4 * MiB, max_written_bytes=[3 * NUM_BYTES], on_notice=lambda text: None)
    with TieredStore([RamTier(2 * NUM_BYTES, pin_memory=False), tier]) as store:
        for number in range(4):
            store.register(f"block.{number}", (NUM_BYTES,), torch.uint8, home="nvme")
        with pytest.raises(WearLimitError):
            fill_blocks_in_turn(store)


def test_commits_of_ram_blocks_are_counted_as_writes(tmp_path: Path) -> None:
    with open_store(tmp_path, limits=[3 * NUM_BYTES]) as store:
        store.register("block", (NUM_BYTES,), torch.uint8, home="ram")
        for number in range(3):
            write_in_ram(store, number)
            store.commit({}).wait(60)
        with pytest.raises(WearLimitError):
            store.commit({}).wait(60)
    assert count(tmp_path) == 3 * NUM_BYTES
    tiers = [RamTier(4 * MiB, pin_memory=False)]
    with TieredStore.open(str(tmp_path / "0"), tiers) as store, store.acquire("block", "ram") as lease:
        assert set(lease.tensor.tolist()) == {2}


def write_in_ram(store: TieredStore, value: int) -> None:
    with store.acquire("block", "ram", "w") as lease:
        lease.tensor.fill_(value)


@pytest.mark.fault
def test_killed_run_never_underestimates_the_write_count(tmp_path: Path) -> None:
    script = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]
from test_wear import *
store = open_store(Path({str(tmp_path)!r}))
store.register("block", (NUM_BYTES,), torch.uint8, home="nvme")
for number in range(10**6):
    write(store, number % 251)
    print(number, flush=True)
"""
    root = Path(__file__).parents[2]
    total = 0
    for _ in range(3):
        with warm.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=root) as process:
            assert process.stdout is not None
            while int(process.stdout.readline()) < 20:
                pass
            process.send_signal(signal.SIGKILL)
            written = 21 + sum(1 for _ in process.stdout)
        assert total + written * NUM_BYTES <= count(tmp_path) <= total + (written + 1) * NUM_BYTES + GiB
        total = count(tmp_path)


def test_wear_file_is_advanced_in_steps(tmp_path: Path) -> None:
    counter = WearCounter(tmp_path, ahead_bytes=1000)
    on_disk = []
    for _ in range(30):
        counter.add(100)
        on_disk.append(json.loads((tmp_path / WEAR_NAME).read_text())["written_bytes"])
        assert counter.written_bytes <= on_disk[-1] <= counter.written_bytes + 1000
    assert len(set(on_disk)) == 3, "one write of the file per step, not per write"
    assert WearCounter(tmp_path).written_bytes == on_disk[-1]
    counter.close()
    counter.close()
    assert WearCounter(tmp_path).written_bytes == 3000


def test_count_is_disabled_if_it_cannot_be_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = WearCounter(tmp_path, ahead_bytes=1000)

    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="Read-only"):
        counter.add(100)
    assert counter.written_bytes == 0
    monkeypatch.undo()
    counter.add(100)
    monkeypatch.setattr(os, "replace", refuse)
    counter.close()
    monkeypatch.undo()
    assert WearCounter(tmp_path).written_bytes == 1100, "it may be too high, never too low"


@pytest.mark.parametrize("text", ["", "{}", '{"written_bytes": -1}', '{"written_bytes": "many"}', "[]"])
def test_unreadable_write_count_raises(tmp_path: Path, text: str) -> None:
    NvmeTier([tmp_path / "0"], MiB).close()
    (tmp_path / "0" / WEAR_NAME).write_text(text)
    for _ in range(2):  # the first attempt must release the lock
        with pytest.raises(TieredError, match=r"WEAR\.json.*delete it to count from zero"):
            NvmeTier([tmp_path / "0"], MiB)
    (tmp_path / "0" / WEAR_NAME).unlink()
    NvmeTier([tmp_path / "0"], MiB).close()
