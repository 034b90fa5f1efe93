"""Reading and writing blocks, or rows of blocks, by name without leases; iterating over prefetched leases."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tiered import (
    Access,
    BlockNotFoundError,
    CapacityError,
    CopyState,
    CorruptBlockError,
    GpuTier,
    KiB,
    LeaseError,
    MiB,
    NvmeTier,
    RamTier,
    Schedule,
    TieredStore,
    TransferError,
    UninitializedBlockError,
    by_name,
)
from tiered.tiers.nvme import Verify


def make_store(path: Path, ram: int = MiB, nvme: int = 8 * MiB, verify: Verify = "resume") -> TieredStore:
    return TieredStore(
        [RamTier(ram, pin_memory=False), NvmeTier([path / "a", path / "b"], nvme, chunk_bytes=16 * KiB, verify=verify)]
    )


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("home", ["ram", "nvme", None])
def test_put_tensor_round_trips(home: str | None, dtype: torch.dtype, tmp_path: Path) -> None:
    wanted = numbers(7, 33, dtype=dtype)
    with make_store(tmp_path) as store:
        spec = store.put("a/b", wanted.T.contiguous().T, home=home)  # not contiguous
        assert spec.home == (home or "nvme") and "a/b" in store and "a" not in store and list(store) == ["a/b"]
        assert torch.equal(store["a/b"], wanted)
        found = store["a/b"]
        found.zero_()
        assert torch.equal(store["a/b"], wanted), "a copy"
        store.put("a/b", wanted + 1)
        store.evict("a/b", "ram").wait(10)
        assert torch.equal(store["a/b"], wanted + 1)
        store.put("number", torch.tensor(3.5))
        assert store["number"] == 3.5
        store.commit().wait(10)
    with TieredStore.open(str(tmp_path / "a"), make_tiers(tmp_path)) as store:
        assert torch.equal(store["a/b"], wanted + 1)


def make_tiers(path: Path) -> list[Any]:
    return [RamTier(MiB, pin_memory=False), NvmeTier([path / "a", path / "b"], 8 * MiB, chunk_bytes=16 * KiB)]


def test_failed_put_leaves_no_block(tmp_path: Path) -> None:
    with make_store(tmp_path, ram=64 * KiB) as store:
        with pytest.raises(CapacityError):
            store.put("a", numbers(1000, 100))  # fits on the drive, but not in RAM on its way there
        assert "a" not in store
        store.put("a", numbers(10, 10))
        for other, home in ((numbers(10, 11), None), (numbers(10, 10).double(), None), (numbers(10, 10), "ram")):
            with pytest.raises(ValueError, match=r"'a' has .* unregister the block first"):
                store.put("a", other, home=home)
        with pytest.raises(BlockNotFoundError):
            store["b"]
        store.register("c", (4,), torch.float32, home="nvme")
        with pytest.raises(UninitializedBlockError):
            store["c"]
        with pytest.raises(UninitializedBlockError):
            store.read_rows("c", 0, 1)


@pytest.mark.parametrize("verify", ["off", "resume", "always"])
@pytest.mark.parametrize("shape", [(2000, 33), (3001,), (5, 7, 1000)])
def test_row_reads_transfer_no_block(shape: tuple[int, ...], verify: Verify, tmp_path: Path) -> None:
    wanted = numbers(*shape)
    with make_store(tmp_path, verify=verify) as store:
        store.put("a", wanted)
        for is_in_ram in (True, False):
            if not is_in_ram:
                store.evict("a", "ram").wait(10)
            before = store.stats()
            for start, stop in ((0, shape[0]), (0, 0), (shape[0], shape[0]), (1, 2), (shape[0] // 3, shape[0] - 1)):
                assert torch.equal(store.read_rows("a", start, stop), wanted[start:stop])
            window = store.stats() - before
            assert sum(link.num_bytes for link in window.links.values()) == 0
            assert (store.where("a").get("ram") is None) != is_in_ram
        for start, stop in ((-1, 1), (2, 1), (0, shape[0] + 1)):
            with pytest.raises(ValueError, match=f"has {shape[0]} rows: rows {start} to {stop} are out of range"):
                store.read_rows("a", start, stop)
        store.put("number", torch.tensor(1.0))
        with pytest.raises(ValueError, match="no rows"):
            store.read_rows("number", 0, 1)


def test_put_replaces_the_newest_copy_where_it_is() -> None:
    """Only the GPU tier has the newest contents, so `put` writes there and moves nothing."""
    with TieredStore([GpuTier(MiB, device="cpu"), RamTier(MiB, pin_memory=False)]) as store:
        store.put("a", numbers(10), home="ram")
        with store.acquire("a", "gpu", "rw") as lease:
            lease.tensor.zero_()
        before = store.stats()
        store.put("a", numbers(10) + 1)
        assert store.where("a") == {"gpu": CopyState.DIRTY, "ram": CopyState.STALE}
        assert not any(link.num_bytes for link in (store.stats() - before).links.values())
        assert torch.equal(store["a"], numbers(10) + 1)


def test_writer_waits_for_a_row_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_range, reads, may_read = by_name.read_range, threading.Event(), threading.Event()

    def read_later(*arguments: Any) -> int:
        reads.set()
        assert may_read.wait(60)
        return read_range(*arguments)

    monkeypatch.setattr(by_name, "read_range", read_later)
    wanted, found = numbers(200, 33), []
    with make_store(tmp_path) as store:
        store.put("a", wanted)
        store.evict("a", "ram").wait(10)
        reader = threading.Thread(target=lambda: found.append(store.read_rows("a", 3, 9)))
        reader.start()
        assert reads.wait(60)
        waits, wait = threading.Event(), store._movement.changed.wait

        def wait_for_the_read(timeout: float | None = None) -> bool:
            waits.set()  # under the lock, so the reader cannot end before this thread waits
            assert wait(10), "the end of the read was not signalled"
            return True

        monkeypatch.setattr(store._movement.changed, "wait", wait_for_the_read)
        threading.Thread(target=lambda: waits.wait(60) and may_read.set()).start()
        with store.acquire("a", "ram", "w") as lease:
            lease.tensor.zero_()
        reader.join(60)
        assert torch.equal(found[0], wanted[3:9]) and not store["a"].any()


def test_a_block_larger_than_memory_can_be_read(tmp_path: Path) -> None:
    wanted = numbers(512, 256)
    with make_store(tmp_path) as store:
        store.put("a", wanted)
        store.commit().wait(10)
    tiers = [RamTier(128 * KiB, pin_memory=False), *make_tiers(tmp_path)[1:]]
    with TieredStore.open(str(tmp_path / "a"), tiers) as store:
        assert torch.equal(store["a"], wanted) and torch.equal(store.read_rows("a", 500, 510), wanted[500:510])
        with pytest.raises(CapacityError):
            store.write_rows("a", 0, wanted[:1])


def test_rows_are_written(tmp_path: Path) -> None:
    wanted = numbers(300, 50)
    with make_store(tmp_path) as store:
        for home in ("ram", "nvme"):
            store.put(home, wanted, home=home)
            store.evict(home, "ram").wait(10)
            store.write_rows(home, 7, wanted[:20])
            store.write_rows(home, 299, wanted[3:4])
            expected = wanted.clone()
            expected[7:27], expected[299:] = wanted[:20], wanted[3:4]
            assert torch.equal(store.read_rows(home, 0, 300), expected)
            store.evict(home, "ram").wait(10)
            assert torch.equal(store.read_rows(home, 0, 300), expected) and torch.equal(store[home], expected)
            for start, rows in ((290, wanted[:20]), (0, wanted[:2, :40]), (0, wanted[:2].double())):
                with pytest.raises(ValueError, match="rows"):
                    store.write_rows(home, start, rows)
            with store.acquire(home, "ram"), pytest.raises(LeaseError):
                store.write_rows(home, 0, wanted[:1])


def test_row_errors_name_the_rows_and_the_block(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        store.put("a", numbers(300, 50))
        store.put("scalar", torch.tensor(1.0))
        for key, start, rows, message in (
            ("a", 290, numbers(20, 50), "block 'a' has 300 rows: rows 290 to 310 are out of range"),
            ("a", -1, numbers(1, 50), "block 'a' has 300 rows: rows -1 to 0 are out of range"),
            ("a", 3, numbers(2, 40), "block 'a' has rows of (50,) of torch.float32, not (2, 40) of torch.float32"),
            (
                "a",
                3,
                numbers(2, 50).double(),
                "block 'a' has rows of (50,) of torch.float32, not (2, 50) of torch.float64",
            ),
            ("scalar", 0, numbers(1), "block 'scalar' is a scalar: it has no rows"),
        ):
            with pytest.raises(ValueError) as caught:
                store.write_rows(key, start, rows)
            assert str(caught.value) == message
        store.write_rows("a", 280, numbers(20, 50))
        store.write_rows("a", 300, numbers(0, 50))
        assert store.read_rows("a", 300, 300).shape == (0, 50)
        text = "block 'a' has shape (300, 50), torch.float32 and home 'nvme', not (2, 3), torch.int16 and 'ram'"
        with pytest.raises(ValueError) as caught:
            store.put("a", torch.zeros(2, 3, dtype=torch.int16), home="ram")
        assert str(caught.value) == f"{text}: convert it, or unregister the block first (del store['a'])"


def test_read_rows_detects_damage(tmp_path: Path) -> None:
    with make_store(tmp_path, verify="always") as store:
        store.put("a", numbers(2000, 33))
        store.evict("a", "ram").wait(10)
        file = tmp_path / "a/live/a/c/0"
        contents = bytearray(file.read_bytes())
        contents[9] ^= 1
        file.write_bytes(contents)
        with pytest.raises(CorruptBlockError, match="'a' is damaged"):
            store.read_rows("a", 5, 6)
    with make_store(tmp_path / "cut") as store:
        store.put("a", numbers(2000, 33))
        store.evict("a", "ram").wait(10)
        file = tmp_path / "cut/a/live/a/c/0"
        os.truncate(file, 4096)
        with pytest.raises(TransferError, match="is truncated"):
            store.read_rows("a", 40, 50)
        file.unlink()
        with pytest.raises(TransferError, match="ENOENT"):
            store.read_rows("a", 40, 50)


@pytest.mark.parametrize("mode", ["r", "rw"])
def test_stream_prefetches_as_far_as_space_allows(mode: Any, tmp_path: Path) -> None:
    """Each block crosses the link once, and prefetched blocks arrive before they are requested."""
    num_blocks, block_bytes = 16, 64 * KiB
    with make_store(tmp_path, ram=4 * block_bytes) as store:
        keys = [f"layers.{number}" for number in range(num_blocks)]
        for number, key in enumerate(keys):
            store.put(key, torch.full((block_bytes // 4,), float(number)))
        for key in keys:
            store.evict(key, "ram").wait(10)
        before = store.stats()
        for number, lease in enumerate(store.stream(keys, "ram", mode)):
            assert lease.key == keys[number] and (lease.tensor == number).all()
            store.wait_idle()  # lets all prefetches arrive
            ahead = [key for key in keys[number + 1 :] if store.where(key).get("ram") is not None]
            assert len(ahead) == min(3, num_blocks - number - 1), (number, ahead)
            if mode == "rw":
                lease.tensor.add_(100)
        window = store.stats() - before
        assert window.links["nvme->ram"].num_bytes == num_blocks * block_bytes
        assert window.prefetch_wasted == 0
        assert window.prefetch_on_time in (num_blocks - 1, num_blocks)  # the first block may also arrive in time
        assert store[keys[-1]][0] == num_blocks - 1 + (100 if mode == "rw" else 0)


def test_leaving_a_stream_loop_releases_its_lease(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        for key in "abc":
            store.put(key, numbers(10, 10))
        for lease in store.stream("abc", "ram", "rw"):
            lease.tensor.zero_()
            break
        del lease
        assert store["a"].sum() == 0
        store.put("a", numbers(10, 10))  # works because no lease is left
        with pytest.raises(BlockNotFoundError):
            next(store.stream(["a", "d"], "ram"))
        with pytest.raises(ValueError, match="ssd"):
            next(store.stream("a", "ssd"))
        store.set_schedule(Schedule([Access(0, "a", "ram")]))
        with pytest.raises(ValueError, match="prefetches by a schedule"):
            next(store.stream("a", "ram"))
        store.set_schedule(None)
        assert [lease.key for lease in store.stream("abca", "ram")] == list("abca")
        assert store.where("a")["nvme"] is CopyState.STALE


@pytest.mark.parametrize("size", ["4GiB", 0.5])
def test_invalid_byte_size_is_refused(size: Any, tmp_path: Path) -> None:
    for make in (lambda: RamTier(size, pin_memory=False), lambda: NvmeTier([tmp_path], size)):
        with pytest.raises(ValueError, match=r"such as 4 \* tiered.GiB"):
            make()
    NvmeTier([tmp_path], MiB).close()  # the refused tiers hold no lock on the folder
