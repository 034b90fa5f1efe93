"""Tests of the kvikio engine that need an NVIDIA driver or the stand-in. ``test_kvikio_link.py`` runs them in a
separate process, so that no other test loads the stand-in."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import zarr

import tiered.links.kvikio as engine_module
from oracles.tiered_run import EXAMPLES, TieredRun, config_text, run_config
from tiered import KiB, MiB, NvmeTier, RamTier, Tier, TieredStore, TransferError
from tiered.ext import Slot
from tiered.links.files import FileEngine, FileReadLink, FileWriteLink, PartMover, PosixMover
from tiered.links.kvikio import KvikioMover
from tiered.links.probe import _DeviceMemory, may_open_driver
from tiered.links.route import make_mover
from tiered.testing import LinkSuite
from tiered.tiers.gpu import DeviceBuffer
from tiered.tiers.layout import ChunkFile, files_of
from tiered.tiers.nvme import Verify
from tiered.tiers.ram import HostSlab
from tiered.units import round_up


@pytest.fixture(scope="session", autouse=True)
def driver() -> None:
    """Load the driver or its stand-in before kvikio does. The dynamic loader then gives kvikio the same library."""
    torch.cuda.is_available()  # torch caches its answer before the stand-in is loaded
    path = os.environ.get("STAND_IN_LIBCUDA")
    library = ctypes.CDLL(path or "libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    assert library.cuInit(0) == 0


class Rig:
    """NVMe and RAM tiers, with links in both directions that use the same mover.

    Parts have 64 KiB and files at most 256 KiB, so that even small blocks have several of each.
    """

    def __init__(self, paths: list[Path], *, verify: Verify = "resume", direct_io: bool = True) -> None:
        self.nvme = NvmeTier(
            paths, 64 * MiB, chunk_bytes=256 * KiB, engine="kvikio", verify=verify, direct_io=direct_io
        )
        self.ram = RamTier(64 * MiB)
        self.use(make_mover(self.nvme))

    def use(self, mover: PartMover) -> None:
        self.mover = mover
        engine = FileEngine(self.nvme, mover, part_bytes=64 * KiB)
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

    def load(self, home: Slot) -> torch.Tensor:
        slot = self.ram_slot(home.nbytes)
        self.ram.tensor(slot, (home.nbytes,), torch.uint8).fill_(0xEE)
        self.read.submit(home, slot, home.nbytes).wait(30)
        tensor = self.ram.tensor(slot, (home.nbytes,), torch.uint8).clone()
        self.ram.free(slot)
        return tensor

    def close_links(self) -> None:
        self.read.close()
        self.write.close()

    def close(self) -> None:
        self.close_links()
        self.ram.close()
        self.nvme.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig([tmp_path / "a"])
    assert isinstance(made.mover, KvikioMover)
    yield made
    made.close()


def random_bytes(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("num_paths", [1, 3])
@pytest.mark.parametrize("direct_io", [True, False])
@pytest.mark.parametrize("nbytes", [0, 1, 4096, 4097, 64 * KiB, 262_145, 1_000_003])
def test_bytes_match_posix_and_zarr_reads_them(tmp_path: Path, num_paths: int, direct_io: bool, nbytes: int) -> None:
    paths = [tmp_path / str(number) for number in range(num_paths)]
    rig = Rig(paths, direct_io=direct_io)
    raw = random_bytes(nbytes)
    home = rig.home(nbytes)
    rig.nvme.describe(home, (nbytes,), torch.uint8)
    rig.store(raw, home)
    assert torch.equal(rig.load(home), raw)
    stored = np.asarray(zarr.open_array(paths[0] / "live/layer/weight", mode="r")[:])
    assert stored.tobytes() == raw.numpy().tobytes()
    assert rig.read.path == rig.write.path == "kvikio-posix"
    assert sum(rig.nvme.bytes_written_by_path().values()) == nbytes
    rig.close_links()
    rig.use(PosixMover(rig.nvme))
    assert torch.equal(rig.load(home), raw)
    rig.store(raw.flip(0), home)
    rig.close_links()
    rig.use(KvikioMover(rig.nvme))
    assert torch.equal(rig.load(home), raw.flip(0))
    rig.close()


class _Range:
    """Range of device memory, like a slice of a device tensor."""

    def __init__(self, whole: _DeviceMemory, start: int, stop: int) -> None:
        self._nbytes = stop - start
        address = whole.__cuda_array_interface__["data"][0] + start
        self.__cuda_array_interface__ = {
            **whole.__cuda_array_interface__,
            "shape": (stop - start,),
            "data": (address, False),
        }

    def __len__(self) -> int:
        return self._nbytes


class _OnDevice(DeviceBuffer):
    """Buffer in memory that the driver allocated. torch cannot access it if the driver is the stand-in."""

    memory: _DeviceMemory

    @contextmanager
    def view(self, start: int, stop: int) -> Iterator[Any]:
        yield _Range(self.memory, start, stop)


@pytest.mark.parametrize("direct_io", [True, False])
@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 64 * KiB, 262_145, 1_000_003])
def test_device_memory_and_files_exchange_bytes(tmp_path: Path, direct_io: bool, nbytes: int) -> None:
    """The engine moves blocks with several parts and files. Only the driver copies to and from device memory."""
    rig = Rig([tmp_path / "a", tmp_path / "b"], direct_io=direct_io)
    slot_bytes = round_up(nbytes, 4 * KiB)
    buffer = _OnDevice(torch.empty(0))
    buffer.memory = _DeviceMemory(ctypes.CDLL(os.environ.get("STAND_IN_LIBCUDA") or "libcuda.so.1"), slot_bytes)
    slot, home, raw = Slot("gpu", nbytes, slot_bytes, buffer), rig.home(nbytes), random_bytes(nbytes)
    rig.store(raw, home)
    rig.read.submit(home, slot, nbytes).wait(30)
    assert buffer.memory.read()[:nbytes] == raw.numpy().tobytes()
    assert files_of(home).checksums is not None
    buffer.memory.write(raw.flip(0).numpy().tobytes() + bytes(slot_bytes - nbytes))
    rig.write.submit(slot, home, nbytes).wait(30)
    assert torch.equal(rig.load(home), raw.flip(0))
    assert files_of(home).checksums is None, "its bytes were never in RAM"
    rig.close()


def test_writing_a_frozen_block_leaves_the_snapshot(rig: Rig, tmp_path: Path) -> None:
    home = rig.home(600_000)
    rig.nvme.describe(home, (600_000,), torch.uint8)
    rig.store(torch.ones(600_000, dtype=torch.uint8), home)
    assert set(rig.load(home).tolist()) == {1}  # the files are now open for reading and writing
    rig.nvme.snapshots.take(home, "1")
    rig.store(torch.full((600_000,), 2, dtype=torch.uint8), home)
    assert rig.nvme.snapshots.nbytes == home.slot_bytes
    assert set(rig.load(home).tolist()) == {2}
    frozen = zarr.open_array(tmp_path / "a/snap/1/layer/weight", mode="r")[:]
    assert np.unique(np.asarray(frozen)).tolist() == [1]


def test_checksums_are_taken_and_compared(tmp_path: Path) -> None:
    with TieredStore([RamTier(4 * MiB), NvmeTier([tmp_path], 8 * MiB, engine="kvikio", verify="always")]) as store:
        store.register("block", (300_001,), torch.float32, home="nvme")
        with store.acquire("block", "ram", "w") as lease:
            lease.tensor.fill_(0.5)
        store.evict("block", "ram")
        with store.acquire("block", "ram") as lease:
            assert (lease.tensor == 0.5).all()
        store.evict("block", "ram")
        (file,) = (tmp_path / "live/block/c").iterdir()
        with open(file, "r+b") as damaged:
            damaged.seek(1000)
            damaged.write(b"\x55")
        with pytest.raises(Exception, match="damaged") as caught, store.acquire("block", "ram"):
            raise AssertionError("a damaged block was leased")
        assert type(caught.value).__name__ == "CorruptBlockError"


def test_truncated_file_error_names_its_path(rig: Rig) -> None:
    home = rig.home(100_000)
    rig.store(torch.ones(100_000, dtype=torch.uint8), home)
    path = files_of(home).files[0].path
    os.truncate(path, 4096)
    with pytest.raises(TransferError, match="is truncated") as caught:
        rig.load(home)
    assert (caught.value.path, caught.value.tier, caught.value.offset) == (str(path), "nvme", 4096)


def test_missing_file_raises_instead_of_reading_zeros(rig: Rig) -> None:
    home = rig.home(5000)
    path = files_of(home).files[0].path
    path.unlink()
    with pytest.raises(TransferError, match="No such file") as caught:
        rig.load(home)
    assert (caught.value.errno, caught.value.path) == (errno.ENOENT, str(path))
    path.touch()


def test_system_errors_keep_their_errno(rig: Rig) -> None:
    import resource
    import signal

    home = rig.home(300_000)
    limits, action = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (128 * KiB, limits[1]))
    try:
        with pytest.raises(TransferError, match="write failed: File too large") as caught:
            rig.store(torch.ones(300_000, dtype=torch.uint8), home)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, action)
    assert caught.value.errno == errno.EFBIG
    assert caught.value.path in [str(file.path) for file in files_of(home).files]
    assert caught.value.offset in (128 * KiB, 192 * KiB)
    rig.store(torch.full((300_000,), 9, dtype=torch.uint8), home)
    assert set(rig.load(home).tolist()) == {9}


def test_open_files_are_bounded_and_deleted_ones_are_closed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_MAX_HANDLES", 4)
    mover = rig.mover
    assert isinstance(mover, KvikioMover)
    homes = [rig.home(4096, f"block.{number}") for number in range(10)]
    for home in homes:
        rig.store(torch.ones(4096, dtype=torch.uint8), home)
    assert len(mover._handles) == 4
    files_of(homes[-1]).files[0].path.unlink()
    rig.load(homes[0])
    deleted = [handle for handle in mover._handles.values() if os.fstat(handle.file.fileno()).st_nlink == 0]
    assert not deleted and 1 <= len(mover._handles) <= 4
    files_of(homes[-1]).files[0].path.touch()
    handles = list(mover._handles.values())
    rig.close_links()
    assert all(handle.file.closed for handle in handles)


def test_the_least_recently_used_file_is_closed_first(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_MAX_HANDLES", 2)
    assert isinstance(rig.mover, KvikioMover)
    homes = [rig.home(4096, f"block.{number}") for number in range(3)]
    for number in (0, 1, 0, 2):
        rig.store(torch.ones(4096, dtype=torch.uint8), homes[number])
    used = {file.path.stat().st_ino for number in (0, 2) for file in files_of(homes[number]).files}
    assert {inode for _, inode, _ in rig.mover._handles} == used


def test_concurrent_transfers_share_few_file_handles(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_MAX_HANDLES", 2)  # fewer than are in use at the same time
    tensors = [torch.full((70_000 + number,), number, dtype=torch.uint8) for number in range(20)]
    homes = [rig.home(tensor.numel(), f"block.{number}") for number, tensor in enumerate(tensors)]
    threads = [threading.Thread(target=rig.store, args=pair) for pair in zip(tensors, homes, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for tensor, home in zip(tensors, homes, strict=True):
        assert torch.equal(rig.load(home), tensor)


def test_unaligned_memory_is_refused(rig: Rig) -> None:
    (file,) = files_of(rig.home(64 * KiB)).files
    slab = HostSlab(64 * KiB)
    for start, stop, offset in ((1, 4097, 0), (0, 4097, 0), (0, 4096, 512)):
        with slab.view(start, stop) as view, pytest.raises(AssertionError, match="not aligned"):
            rig.mover.write(file, offset, view)
    slab.close()


def test_kvikio_refuses_forked_processes(rig: Rig) -> None:
    (file,) = files_of(rig.home(4096)).files
    rig.store(torch.ones(4096, dtype=torch.uint8), rig.home(4096, "other"))  # starts kvikio's threads
    slab = HostSlab(4096)
    receiver, sender = os.pipe()
    child = _fork()
    if child == 0:
        os.write(sender, _try_to_read(rig.mover, file, slab).encode())
        os._exit(0)
    os.close(sender)
    with open(receiver, encoding="utf-8") as answer:
        assert "forked" in answer.read()
    os.waitpid(child, 0)
    slab.close()


def _fork() -> int:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns about other threads, which run on purpose
        return os.fork()


def _try_to_read(mover: PartMover, file: ChunkFile, slab: HostSlab) -> str:
    try:
        with slab.view(0, 4096) as view:
            mover.read(file, 0, view)
    except TransferError as error:
        return str(error)
    return "it was read"


def test_kvikio_uses_our_settings_and_log_path(rig: Rig) -> None:
    import kvikio.defaults

    settings = {name: kvikio.defaults.get(name) for name in ("task_size", "bounce_buffer_size")}
    assert settings == {"task_size": 16 * MiB, "bounce_buffer_size": 16 * MiB}
    assert kvikio.defaults.get("num_threads") >= 4
    assert kvikio.defaults.get("auto_direct_io_read") and kvikio.defaults.get("auto_direct_io_write")
    if not may_open_driver():
        assert kvikio.defaults.get("compat_mode") == kvikio.CompatMode.ON
    assert os.environ["CUFILE_LOGFILE_PATH"].endswith("/cufile.log")
    assert not Path("cufile.log").exists()


def test_file_run_is_bit_identical_to_ram_run(tmp_path: Path) -> None:
    def train(name: str, **options: Any) -> TieredRun:
        text = config_text(tmp_path / name, EXAMPLES / "quickstart" / "model", **options)
        text = text.replace("[data]", "train_from_scratch = true\n[data]", 1)
        return run_config(text, tmp_path / name, num_steps=2)

    on_drive = 'weights = "nvme"\noptimizer = "nvme"\ngradients = "nvme"\nactivations = "nvme"'
    ram, files = train("ram", nvme=0), train("files", tiers='engine = "kvikio"\nverify = "always"', placement=on_drive)
    assert files.moved is not None
    links = files.moved.links
    assert {(name, link.path) for name, link in links.items()} == {
        ("nvme->ram", "kvikio-posix"),
        ("ram->nvme", "kvikio-posix"),
    }
    assert all(link.num_bytes > 0 for link in links.values())
    assert (files.losses, files.grad_norms) == (ram.losses, ram.grad_norms)
    assert files.digests == ram.digests and files.digests


class TestKvikioLinks(LinkSuite):
    @pytest.fixture(autouse=True)
    def _path(self, tmp_path: Path) -> None:
        self.path = tmp_path / "a"

    def make_tier(self, capacity_bytes: int) -> Tier:
        return NvmeTier([self.path], capacity_bytes, engine="kvikio")

    def fail_transfers(self, fast: Tier, slow: Tier) -> AbstractContextManager[object]:
        broken = mock.Mock(side_effect=OSError(errno.EIO, "Input/output error"))
        return mock.patch.multiple(KvikioMover, read=broken, write=broken)
