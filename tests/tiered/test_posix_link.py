from __future__ import annotations

import errno
import functools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

from tiered import KiB, MiB, NvmeTier, RamTier, TransferError
from tiered.ext import Link, Slot
from tiered.links.files import FileEngine, FileReadLink, FileWriteLink, PosixMover
from tiered.tiers.layout import files_of


class Rig:
    """NVMe and RAM tiers, with links in both directions. Even small blocks have several parts, of 64 KiB each."""

    def __init__(self, paths: list[Path], *, chunk_bytes: int | None = None, direct_io: bool = True) -> None:
        self.nvme = NvmeTier(paths, 64 * MiB, chunk_bytes=chunk_bytes, direct_io=direct_io)
        self.ram = RamTier(64 * MiB)
        engine = FileEngine(self.nvme, PosixMover(self.nvme), part_bytes=64 * KiB)
        self.read = FileReadLink(self.nvme, self.ram, engine)
        self.write = FileWriteLink(self.ram, self.nvme, engine)

    def ram_slot(self, nbytes: int) -> Slot:
        slot = self.ram.allocate(nbytes, name="block", home=False)
        assert slot is not None
        return slot

    def home(self, nbytes: int, key: str = "layer/weight") -> Slot:
        slot = self.nvme.allocate(nbytes, name=key, home=True)
        assert slot is not None
        return slot

    def store(self, tensor: torch.Tensor, home: Slot) -> None:
        slot = self.ram_slot(home.nbytes)
        self.ram.tensor(slot, tensor.shape, tensor.dtype).copy_(tensor)
        self.write.submit(slot, home, home.nbytes).wait(30)
        self.ram.free(slot)

    def load(self, home: Slot, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        slot = self.ram_slot(home.nbytes)
        self.ram.tensor(slot, (home.nbytes,), torch.uint8).fill_(0xEE)
        self.read.submit(home, slot, home.nbytes).wait(30)
        tensor = self.ram.tensor(slot, shape, dtype).clone()
        self.ram.free(slot)
        return tensor

    def close(self) -> None:
        for part in (self.read, self.write, self.read, self.ram, self.nvme):
            part.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig([tmp_path / "a"], chunk_bytes=256 * KiB)
    yield made
    made.close()


@pytest.mark.parametrize("num_paths", [1, 2, 3])
@pytest.mark.parametrize("direct_io", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.uint8])
@pytest.mark.parametrize("num_elements", [0, 1, 1024, 300_001])
def test_blocks_come_back_and_zarr_reads_the_same_bytes(
    tmp_path: Path, num_paths: int, direct_io: bool, dtype: torch.dtype, num_elements: int
) -> None:
    paths = [tmp_path / str(number) for number in range(num_paths)]
    rig = Rig(paths, chunk_bytes=128 * KiB, direct_io=direct_io)
    nbytes = num_elements * dtype.itemsize
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    tensor = raw.view(dtype) if nbytes else torch.empty(0, dtype=dtype)
    home = rig.home(nbytes)
    rig.nvme.describe(home, (num_elements,), dtype)
    rig.store(tensor, home)
    assert rig.load(home, (num_elements,), dtype).dtype == dtype
    assert torch.equal(rig.load(home, (nbytes,), torch.uint8), raw)
    stored = np.asarray(zarr.open_array(paths[0] / "live/layer/weight", mode="r")[:])
    assert stored.tobytes() == raw.numpy().tobytes()
    assert rig.read.path == ("posix-direct" if direct_io else "posix-buffered")
    rig.close()


def test_counters_count_contents_not_padding(tmp_path: Path) -> None:
    rig = Rig([tmp_path / "a", tmp_path / "b"], chunk_bytes=64 * KiB)
    assert isinstance(rig.read, Link) and isinstance(rig.write, Link)
    home = rig.home(300_001)
    begin_s = time.perf_counter()
    rig.store(torch.ones(300_001, dtype=torch.uint8), home)
    rig.load(home, (300_001,), torch.uint8)
    elapsed_s = time.perf_counter() - begin_s
    for link in (rig.read, rig.write):
        usage = link.usage()
        assert (usage.num_bytes, usage.num_transfers, usage.inflight_bytes) == (300_001, 1, 0)
        assert 0 < usage.busy_s <= elapsed_s
    written = rig.nvme.bytes_written_by_path()
    assert sum(written.values()) == 300_001
    assert set(written) == {str(tmp_path / "a"), str(tmp_path / "b")} and all(written.values())
    rig.close()


def test_short_counts_are_continued(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    real_read, real_write = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: real_read(fd, [views[0][:4096]], offset))
    monkeypatch.setattr(os, "pwritev", lambda fd, views, offset: real_write(fd, [views[0][:8192]], offset))
    home = rig.home(100_000)
    tensor = torch.arange(100_000) % 253
    rig.store(tensor.to(torch.uint8), home)
    assert torch.equal(rig.load(home, (100_000,), torch.uint8), tensor.to(torch.uint8))


def test_truncated_file_error_names_its_path(rig: Rig) -> None:
    home = rig.home(100_000)
    rig.store(torch.ones(100_000, dtype=torch.uint8), home)
    path = files_of(home).files[0].path
    os.truncate(path, 4096)
    with pytest.raises(TransferError, match="is truncated") as caught:
        rig.load(home, (100_000,), torch.uint8)
    assert caught.value.path == str(path) and caught.value.tier == "nvme"
    assert rig.read.usage().num_bytes == 0 and rig.read.usage().inflight_bytes == 0


def test_missing_file_raises_instead_of_reading_zeros(rig: Rig) -> None:
    home = rig.home(5000)
    path = files_of(home).files[0].path
    path.unlink()
    with pytest.raises(TransferError, match="No such file") as caught:
        rig.load(home, (5000,), torch.uint8)
    assert caught.value.errno == errno.ENOENT and caught.value.path == str(path)
    path.touch()


def test_first_write_error_ends_the_transfer_after_all_parts(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev

    def broken(fd: int, views: list[memoryview], offset: int) -> int:
        if offset == 128 * KiB:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", broken)
    home = rig.home(250_000)
    with pytest.raises(TransferError, match="write failed") as caught:
        rig.store(torch.ones(250_000, dtype=torch.uint8), home)
    assert (caught.value.errno, caught.value.offset) == (errno.EIO, 128 * KiB)
    monkeypatch.setattr(os, "pwritev", real)
    rig.store(torch.full((250_000,), 9, dtype=torch.uint8), home)
    assert set(rig.load(home, (250_000,), torch.uint8).tolist()) == {9}


def test_failed_writes_notify_once_for_each_kind_of_error(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notices: list[str] = []
    monkeypatch.setattr(rig.nvme, "_on_notice", notices.append)
    homes = [rig.home(5000, f"block.{number}") for number in range(3)]
    for number in (errno.EIO, errno.EIO, errno.EROFS):

        def refuse(*_: object, number: int = number) -> int:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", refuse)
            for home in homes[:2]:
                with pytest.raises(TransferError):
                    rig.store(torch.ones(5000, dtype=torch.uint8), home)
    unharmed, path = "committed generations are unaffected", tmp_path / "a/live/block.0/c/0"
    start = "block 'block.0' could not be written and stays in memory: write failed: "
    assert notices == [
        f"{start}Input/output error (EIO). The drive or its connection is failing: read the kernel's log (dmesg) and "
        f"check the drive; {unharmed} [nvme, {path}, offset 0]",
        f"{start}Read-only file system (EROFS). The file system became read-only, usually after the drive has failed: "
        f"read the kernel's log (dmesg), repair the file system and mount it again; {unharmed} "
        f"[nvme, {path}, offset 0]",
    ]


def test_other_exceptions_reach_the_waiter(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def confused(*arguments: Any) -> int:
        raise RuntimeError("confused")

    monkeypatch.setattr(os, "preadv", confused)
    with pytest.raises(TransferError, match="confused"):
        rig.load(rig.home(5000), (5000,), torch.uint8)


def test_o_direct_refused_at_the_first_transfer_falls_back(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    real = os.pwritev

    def refuse_direct(fd: int, views: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", refuse_direct)
    home = rig.home(600_000)
    tensor = (torch.arange(600_000) % 251).to(torch.uint8)
    rig.store(tensor, home)
    assert rig.write.path == "posix-buffered"
    assert torch.equal(rig.load(home, (600_000,), torch.uint8), tensor)


def test_writing_a_frozen_block_leaves_the_snapshot(rig: Rig, tmp_path: Path) -> None:
    home = rig.home(600_000)
    rig.nvme.describe(home, (600_000,), torch.uint8)
    rig.store(torch.ones(600_000, dtype=torch.uint8), home)
    rig.nvme.snapshots.take(home, "1")
    rig.store(torch.full((600_000,), 2, dtype=torch.uint8), home)
    assert rig.nvme.snapshots.nbytes == home.slot_bytes, "each file was replaced once, however many parts wrote it"
    assert set(rig.load(home, (600_000,), torch.uint8).tolist()) == {2}
    frozen = zarr.open_array(tmp_path / "a/snap/1/layer/weight", mode="r")[:]
    assert np.unique(np.asarray(frozen)).tolist() == [1]


def test_reads_overtake_queued_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig([tmp_path / "a"])
    engine = FileEngine(rig.nvme, PosixMover(rig.nvme), num_threads=1, part_bytes=64 * KiB)
    read, write = FileReadLink(rig.nvme, rig.ram, engine), FileWriteLink(rig.ram, rig.nvme, engine)
    homes = [rig.home(4096, f"block.{number}") for number in range(3)]
    slots = [rig.ram_slot(4096) for _ in range(3)]
    gate = threading.Event()
    order: list[str] = []
    real_write = os.pwritev

    def slow(fd: int, views: list[memoryview], offset: int) -> int:
        gate.wait(30)
        return real_write(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", slow)
    transfers = [write.submit(slot, home, 4096) for slot, home in zip(slots[:2], homes[:2], strict=True)]
    transfers.append(read.submit(homes[2], slots[2], 4096))
    for name, transfer in zip(("write 0", "write 1", "read"), transfers, strict=True):
        transfer.add_done_callback(functools.partial(lambda name, _: order.append(name), name))
    gate.set()
    for transfer in transfers:
        transfer.wait(30)
    assert order.index("read") < order.index("write 1")
    for link in (read, write):
        link.close()
    rig.close()


def test_link_works_after_the_other_direction_is_closed(rig: Rig) -> None:
    home = rig.home(1000)
    rig.read.close()
    rig.read.close()
    rig.store(torch.arange(250, dtype=torch.float32), home)
    assert files_of(home).checksums is not None


@pytest.mark.parametrize(("num_paths", "num_threads"), [(1, 8), (2, 8), (3, 12)])
def test_reads_and_writes_share_threads_that_end_with_both_links(
    num_paths: int, num_threads: int, tmp_path: Path
) -> None:
    def names() -> list[str]:
        threads = set(threading.enumerate()) - others
        return [thread.name for thread in threads if thread.name.startswith("tiered-nvme")]

    others = set(threading.enumerate())
    nvme, ram = NvmeTier([tmp_path / str(number) for number in range(num_paths)], MiB), RamTier(MiB, pin_memory=False)
    engine = FileEngine(nvme, PosixMover(nvme))
    assert (engine._workers._num_threads, engine._workers._max_urgent) == (num_threads, num_threads // 2)
    links = FileReadLink(nvme, ram, engine), FileWriteLink(ram, nvme, engine)
    for number, slot in enumerate(ram.allocate(4096, name="x", home=False) for _ in range(2)):
        home = nvme.allocate(4096, name=f"x.{number}", home=True)
        assert slot is not None and home is not None
        links[1].submit(slot, home, 4096).wait(60)
    assert len(names()) == 2
    links[0].close()
    links[0].close()
    assert len(names()) == 2, "the write link still needs them"
    links[1].close()
    assert names() == []
    nvme.close()
