"""Drives that are full from the start or fill up during the work, on small real file systems."""

from __future__ import annotations

import contextlib
import errno
import re
import threading
from pathlib import Path
from typing import Literal

import pytest
import torch

from tiered import GenerationReader, MiB, NvmeTier, RamTier, TieredStore, TransferError
from tiered.durable.manifest import current_generation
from tiered.testing.faults import Fault

NUM_BLOCKS, NUM_ELEMENTS = 6, MiB // 2 + 1000  # slightly more than 2 MiB per block, in three files


class Notices:
    """Collected notices of a tier. A test can wait for a notice."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._changed = threading.Condition()

    def __call__(self, text: str) -> None:
        with self._changed:
            self.texts.append(text)
            self._changed.notify_all()

    def wait_for(self, part: str) -> str:
        with self._changed:
            assert self._changed.wait_for(lambda: any(part in text for text in self.texts), 60), self.texts
            return next(text for text in self.texts if part in text)


def open_store(path: Path, on_full: Literal["pause", "error"], notices: Notices) -> TieredStore:
    tier = NvmeTier([path], 40 * MiB, chunk_bytes=MiB, on_full=on_full, on_notice=notices)
    return TieredStore([RamTier(8 * MiB, pin_memory=False), tier])


def work(store: TieredStore, round_number: int, blocks: range = range(NUM_BLOCKS)) -> None:
    """Change the blocks and evict them. RAM has space for only three of the six blocks."""
    for number in blocks:
        with store.acquire(f"block.{number}", "ram", "rw") as lease:
            lease.tensor.mul_(1.25).add_(number + round_number)
        store.evict(f"block.{number}", "ram")


def start(store: TieredStore) -> None:
    for number in range(NUM_BLOCKS):
        store.register(f"block.{number}", (NUM_ELEMENTS,), torch.float32, home="nvme")
        with store.acquire(f"block.{number}", "ram", "w") as lease:
            lease.tensor.copy_(torch.arange(NUM_ELEMENTS).float().mul_(number))
    work(store, 1)


def contents(store: TieredStore) -> list[torch.Tensor]:
    result = []
    for number in range(NUM_BLOCKS):
        with store.acquire(f"block.{number}", "ram") as lease:
            result.append(lease.tensor.clone())
    return result


def expected(tmp_path: Path, num_rounds: int) -> list[torch.Tensor]:
    """Return the results of the same work on a drive with free space."""
    with open_store(tmp_path / "roomy", "error", Notices()) as store:
        start(store)
        for number in range(2, num_rounds + 1):
            work(store, number)
        return contents(store)


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_a_drive_too_small_for_a_block_is_refused_when_it_is_registered(small_drive) -> None:
    with open_store(small_drive.store, "pause", Notices()) as store:
        small_drive.fill(leave_bytes=5 * MiB)
        store.register("fits", (MiB,), torch.uint8, home="nvme")
        before = small_drive.free_bytes()
        with pytest.raises(TransferError, match=r"no files for 8\.00 MiB of block 'large'.*Free space") as caught:
            store.register("large", (8 * MiB,), torch.uint8, home="nvme")
        assert caught.value.errno == errno.ENOSPC and str(small_drive.store) in str(caught.value)
        with store.acquire("fits", "ram", "w") as lease:
            lease.tensor.fill_(7)
        store.evict("fits", "ram").wait(60)
        nvme = store.tier("nvme")
        assert isinstance(nvme, NvmeTier)
        assert nvme.usage().used_bytes == MiB, "the refused block charges nothing"
        assert small_drive.free_bytes() + nvme.pool_bytes >= before - MiB // 4, "its finished files are kept for reuse"
        with store.acquire("fits", "ram") as lease:
            assert set(lease.tensor.tolist()) == {7}


def test_full_drive_after_a_commit_pauses_and_resumes_bitwise_equal(small_drive, quick_retry, tmp_path: Path) -> None:
    """After a commit, every write needs a new file, but another program has taken the space."""
    notices = Notices()
    with open_store(small_drive.store, "pause", notices) as store:
        start(store)
        store.commit({"round": 1}).wait(60)
        small_drive.fill(leave_bytes=4 * MiB)
        worker = threading.Thread(target=work, args=(store, 2))
        worker.start()
        text = notices.wait_for("is full")
        assert str(small_drive.store) in text and "paused" in text
        assert worker.is_alive()
        small_drive.make_room()
        worker.join(60)
        assert not worker.is_alive()
        notices.wait_for("free space again")
        work(store, 3)
        store.wait_idle()
        assert same(contents(store), expected(tmp_path, 3))
        assert sum("is full" in text for text in notices.texts) == 1
        nvme = store.tier("nvme")
        assert isinstance(nvme, NvmeTier)
        assert nvme.snapshots.nbytes == NUM_BLOCKS * nvme.slot_bytes(4 * NUM_ELEMENTS), (
            "each file was replaced once, whatever the number of tries"
        )
        store.commit({"round": 3}).wait(60)
    tiers = [RamTier(8 * MiB, pin_memory=False), NvmeTier([small_drive.store], 40 * MiB)]
    with TieredStore.open(str(small_drive.store), tiers) as store:
        assert same(contents(store), expected(tmp_path / "again", 3))


def work_and_wait(store: TieredStore) -> None:
    for number in range(2, 4):
        work(store, number)
    store.wait_idle()


def test_full_drive_error_keeps_the_last_commit(small_drive, tmp_path: Path) -> None:
    with open_store(small_drive.store, "error", Notices()) as store:
        start(store)
        store.commit({"round": 1}).wait(60)
        small_drive.fill(leave_bytes=4 * MiB)
        with pytest.raises(TransferError, match="Free space on that drive") as caught:
            work_and_wait(store)
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.path is not None and caught.value.path.startswith(str(small_drive.store / "live/block."))
    small_drive.make_room()
    tiers = [RamTier(8 * MiB, pin_memory=False), NvmeTier([small_drive.store], 40 * MiB)]
    with TieredStore.open(str(small_drive.store), tiers) as store:
        assert same(contents(store), expected(tmp_path, 1))


def test_failed_write_back_is_retried_once_space_is_free(small_drive, tmp_path: Path) -> None:
    """After a failed write-back, the changed copy stays in memory, and the write-back is retried."""
    notices = Notices()
    with open_store(small_drive.store, "error", notices) as store:
        start(store)
        store.commit({"round": 1}).wait(60)
        small_drive.fill(leave_bytes=MiB // 2)
        work(store, 2, range(2))
        with pytest.raises(TransferError, match="No space left"):
            store.wait_idle()
        assert any("stays in memory" in text for text in notices.texts)
        small_drive.make_room()
        work(store, 2, range(2, NUM_BLOCKS))
        store.wait_idle()
        assert all("ram" not in store.where(f"block.{number}") for number in range(NUM_BLOCKS))
        assert same(contents(store), expected(tmp_path, 2))


def interrupt_paused_store(drive, notices: Notices) -> None:
    with open_store(drive.store, "pause", notices) as store:
        start(store)
        store.commit({"round": 1}).wait(60)
        drive.fill()
        work(store, 2, range(2))
        notices.wait_for("paused")
        raise KeyboardInterrupt


def test_interrupted_run_does_not_wait_for_a_full_drive(small_drive, quick_retry) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupt_paused_store(small_drive, Notices())
    assert current_generation(small_drive.store) == 1


def test_commit_of_blocks_in_memory_waits_for_space(small_drive, quick_retry) -> None:
    notices = Notices()
    with open_store(small_drive.store, "pause", notices) as store:
        store.register("block", (4 * MiB,), torch.uint8, home="ram")
        with store.acquire("block", "ram", "w") as lease:
            lease.tensor.fill_(5)
        small_drive.fill(leave_bytes=MiB)
        commit = store.commit({})
        notices.wait_for("paused")
        small_drive.make_room()
        commit.wait(60)
        notices.wait_for("free space again")
    with TieredStore.open(str(small_drive.store), [RamTier(8 * MiB, pin_memory=False)]) as store:
        assert store.acquire("block", "ram").tensor.unique().tolist() == [5]


def memory_store(path: Path, on_full: Literal["pause", "error"], notices: Notices) -> TieredStore:
    """Return a store with all blocks in RAM. Its generations are on a drive that no tier uses."""
    ram = RamTier(8 * MiB, pin_memory=False)
    store = TieredStore([ram], path=str(path), on_full=on_full, on_notice=notices)
    for number in range(2):
        store.register(f"block.{number}", (2 * MiB,), torch.uint8, home="ram")
    write_memory(store, 5)
    return store


def write_memory(store: TieredStore, value: int) -> None:
    for number in range(2):
        with store.acquire(f"block.{number}", "ram", "w") as lease:
            lease.tensor.fill_(value)


def test_generation_directory_waits_for_space(small_drive, quick_retry) -> None:
    notices = Notices()
    with memory_store(small_drive.store, "pause", notices) as store:
        store.commit({}).wait(60)
        write_memory(store, 6)
        small_drive.fill(leave_bytes=3 * MiB)  # enough for the first block only
        commit = store.commit({})
        notices.wait_for("paused")
        assert not commit.is_done and current_generation(small_drive.store) == 1
        small_drive.make_room()
        commit.wait(60)
        notices.wait_for("free space again")
    assert list(GenerationReader(small_drive.store, 2).problems()) == []


def test_first_commit_waits_on_a_completely_full_drive(small_drive, quick_retry) -> None:
    notices = Notices()
    with memory_store(small_drive.path / "run/out", "pause", notices) as store:
        (small_drive.path / "run/out").mkdir(parents=True)
        fill_to_the_last_byte(small_drive)
        commits = []
        worker = threading.Thread(target=lambda: commits.append(store.commit({})))
        worker.start()
        notices.wait_for("paused")
        small_drive.make_room()
        worker.join(60)
        commits[0].wait(60)
    assert list(GenerationReader(small_drive.path / "run/out").problems()) == []


def test_wait_for_space_can_be_aborted(small_drive, quick_retry) -> None:
    notices = Notices()
    with memory_store(small_drive.store, "pause", notices) as store:
        store.commit({}).wait(60)
        small_drive.fill()
        commit = store.commit({})
        assert "at least 4.00 MiB" in notices.wait_for("paused"), "the size of both blocks, not only of the first"
        store.give_up_waiting()
        with pytest.raises(TransferError, match="cannot be written: No space left"):
            commit.wait(60)
        assert current_generation(small_drive.store) == 1
    assert list(GenerationReader(small_drive.store).problems()) == []


def test_generation_commit_on_a_full_drive_can_raise(small_drive) -> None:
    with memory_store(small_drive.store, "error", Notices()) as store:
        store.commit({}).wait(60)
        small_drive.fill()
        with pytest.raises(TransferError, match="No space left"):
            store.commit({}).wait(60)
        small_drive.make_room()
        store.commit({}).wait(60)
    assert list(GenerationReader(small_drive.store, 2).problems()) == []


def test_reusable_files_are_removed_for_a_commit(small_drive) -> None:
    tier = NvmeTier([small_drive.store], 40 * MiB, on_notice=Notices())
    with TieredStore([RamTier(8 * MiB, pin_memory=False), tier]) as store:
        store.register("freed", (12 * MiB,), torch.uint8, home="nvme")
        store.unregister("freed")
        store.register("block", (4 * MiB,), torch.uint8, home="ram")
        with store.acquire("block", "ram", "w") as lease:
            lease.tensor.fill_(5)
        small_drive.fill(leave_bytes=MiB)
        assert tier.pool_bytes == 12 * MiB
        store.commit({}).wait(60)
        assert tier.pool_bytes == 0 and tier.snapshots.nbytes == 4 * MiB
    assert list(GenerationReader(small_drive.store).problems()) == []


def fill_to_the_last_byte(drive) -> None:
    drive.fill()
    with (drive.path / "filler").open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    assert drive.free_bytes() < 4096


def test_hard_links_wait_for_space(small_drive, quick_retry) -> None:
    """Hard links need new folders, and new folders need space."""
    notices = Notices()
    with open_store(small_drive.store, "pause", notices) as store:
        start(store)
        store.wait_idle()
        fill_to_the_last_byte(small_drive)
        commits = []
        worker = threading.Thread(target=lambda: commits.append(store.commit({})))
        worker.start()
        notices.wait_for("paused")
        small_drive.make_room()
        worker.join(60)
        assert not worker.is_alive()
        commits[0].wait(60)
        figures = commits[0].figures
        assert figures.linked_bytes > figures.nbytes == NUM_BLOCKS * 4 * NUM_ELEMENTS and figures.written_bytes == 0
    assert list(GenerationReader(small_drive.store).problems()) == []


def test_requested_space_suffices_for_the_whole_run(small_drive, quick_retry) -> None:
    """The first write that fails is a 4 KiB document, but the notice asks for enough space for all blocks."""
    notices = Notices()
    with open_store(small_drive.store, "pause", notices) as store:
        start(store)
        store.reserve("nvme", 2 * store.tier("nvme").usage().used_bytes)  # for the two generations that are kept
        store.wait_idle()
        fill_to_the_last_byte(small_drive)

        def commit_and_work() -> None:
            for number in range(2, 5):
                store.commit({"round": number}).wait(60)
                work(store, number)

        worker = threading.Thread(target=commit_and_work)
        worker.start()
        text = notices.wait_for("paused")
        number, unit = re.search(r"Free at least ([\d.]+) ([KM]iB)", text).groups()  # type: ignore[union-attr]
        small_drive.make_room(round(float(number) * {"KiB": 1024, "MiB": MiB}[unit]))
        worker.join(20)
        store.give_up_waiting()
        assert not worker.is_alive(), notices.texts
        assert sum("is full" in text for text in notices.texts) == 1, notices.texts


def test_pause_with_a_simulated_full_drive(tmp_path: Path, faulty_links, quick_retry) -> None:
    """The same pause without a mounted drive: a simulated drive is full for the first five writes."""
    notices = Notices()
    tier = NvmeTier([tmp_path / "store"], 40 * MiB, on_full="pause", on_notice=notices)
    ram = RamTier(8 * MiB, pin_memory=False)
    read, write, mover = faulty_links(tier, ram, Fault("error", "write", errno.ENOSPC, times=5))
    with TieredStore([ram, tier], links=[read, write]) as store:
        start(store)
        store.wait_idle()
        assert same(contents(store), expected(tmp_path, 1))
        assert mover.faults[0].num_calls > 5
    assert re.search(r"is full \(No space left on device\): paused", " ".join(notices.texts))
