"""Drives that fail, return wrong data or die: EIO, short reads and writes, flipped bits, read-only file systems."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from tiered import CorruptBlockError, MiB, NvmeTier, RamTier, TieredStore, TransferError
from tiered.testing.faults import Fault, FaultyMover, flip_bit, make_faulty
from tiered.tiers.layout import ChunkFile, files_of
from tiered.tiers.nvme import Verify
from tiered.units import PAGE_BYTES

NUM_BYTES = 300_001


class Rig:
    """Store with three blocks whose home is a drive with faults. RAM has space for one block at a time."""

    def __init__(self, links, folder: Path, *faults: Fault, verify: Verify = "always") -> None:
        self.notices: list[str] = []
        self.tier = NvmeTier([folder], 8 * MiB, chunk_bytes=MiB // 8, verify=verify, on_notice=self.notices.append)
        self.ram = RamTier(MiB // 2, pin_memory=False)
        read, write, self.mover = links(self.tier, self.ram)
        self.store = TieredStore([self.ram, self.tier], links=[read, write])
        for number in range(3):
            self.store.register(f"block.{number}", (NUM_BYTES,), torch.uint8, home="nvme")
            self.put(number, number)
        self.store.wait_idle()
        self.mover.faults.extend(faults)

    def put(self, number: int, value: int) -> None:
        with self.store.acquire(f"block.{number}", "ram", "w") as lease:
            lease.tensor.fill_(value)
        self.store.evict(f"block.{number}", "ram")

    def get(self, number: int) -> set[int]:
        with self.store.acquire(f"block.{number}", "ram") as lease:
            values = set(lease.tensor.unique().tolist())
        self.store.evict(f"block.{number}", "ram").wait(60)
        return values


@pytest.fixture
def make_rig(tmp_path: Path, faulty_links):
    rigs: list[Rig] = []

    def make(*faults: Fault, verify: Verify = "always", folder: Path | None = None) -> Rig:
        rigs.append(Rig(faulty_links, folder or tmp_path / "store", *faults, verify=verify))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.store.close()


def test_eio_on_a_read_names_file_and_errno_and_the_next_try_works(make_rig) -> None:
    rig = make_rig(Fault("error", "read", errno.EIO, path="block.1/", times=1))
    with pytest.raises(TransferError, match=r"read failed: Input/output error \(EIO\).*dmesg") as caught:
        rig.get(1)
    assert caught.value.errno == errno.EIO and "block.1/c/" in str(caught.value.path)
    assert [rig.get(number) for number in range(3)] == [{0}, {1}, {2}]


def test_write_after_eio_succeeds_without_loss(make_rig) -> None:
    rig = make_rig(Fault("error", "write", errno.EIO, path="block.1/", skip=1, times=1))
    with rig.store.acquire("block.1", "ram", "w") as lease:
        lease.tensor.fill_(77)
    with pytest.raises(TransferError, match=r"write failed: Input/output error \(EIO\)") as caught:
        rig.store.evict("block.1", "ram").wait(60)
    assert caught.value.errno == errno.EIO
    assert any("'block.1' could not be written and stays in memory" in text for text in rig.notices)
    assert rig.get(1) == {77}
    rig.store.wait_idle()
    assert rig.store.where("block.1").keys() == {"nvme"}
    assert rig.get(1) == {77} and rig.store.verify() == 3 * NUM_BYTES


def test_failed_write_back_is_raised_to_the_waiting_caller(make_rig) -> None:
    rig = make_rig(Fault("error", "write", errno.EIO))
    rig.put(0, 100)
    with pytest.raises(TransferError, match="EIO"):
        rig.put(1, 101)
    rig.mover.faults.clear()
    rig.store.wait_idle()
    assert rig.get(0) == {100}


def test_unawaited_failed_write_back_is_raised_on_close(make_rig) -> None:
    rig = make_rig(Fault("error", "write", errno.EIO))
    rig.put(0, 100)
    for _ in range(2):
        with pytest.raises(TransferError, match="EIO"):
            rig.store.wait_idle()
    with pytest.raises(TransferError, match="EIO"):  # the write-back's error, not "tier too small"
        rig.store.reserve("ram", MiB // 2)
    rig.store.discard("block.0")
    rig.store.wait_idle()  # the discarded block needs no write-back
    rig.store.reserve("ram", MiB // 2)
    rig.store.reserve("ram", -MiB // 2)


def test_pinned_copy_is_written_again_after_a_failed_write_back(make_rig) -> None:
    rig = make_rig(Fault("error", "write", errno.EIO, times=1))
    rig.put(0, 100)
    rig.store.pin("block.0", "ram")
    rig.store.wait_idle()
    assert rig.store.where("block.0").keys() == {"nvme", "ram"}
    assert rig.store.verify(["block.0"]) == NUM_BYTES
    rig.store.unpin("block.0", "ram")


def test_a_short_write_changes_the_first_half_of_the_bytes(faulty_links, tmp_path: Path) -> None:
    tier = NvmeTier([tmp_path / "drive"], 8 * MiB)
    _, _, mover = faulty_links(tier, RamTier(MiB, pin_memory=False))
    file = ChunkFile(tmp_path / "chunk", 0, 4 * PAGE_BYTES)
    file.path.write_bytes(b"o" * file.nbytes)
    pages = torch.full((file.nbytes + PAGE_BYTES,), ord("n"), dtype=torch.uint8).numpy()
    start = -pages.ctypes.data % PAGE_BYTES  # a direct write needs an aligned address
    mover.faults = [Fault("short", "write")]
    mover.write(file, 0, memoryview(pages[start : start + file.nbytes]))
    assert file.path.read_bytes() == b"n" * (2 * PAGE_BYTES) + b"o" * (2 * PAGE_BYTES)


@pytest.mark.parametrize("on", ["read", "write"])
@pytest.mark.parametrize("kind", ["short", "flip"])
def test_silently_truncated_or_flipped_part_is_detected(make_rig, on: str, kind: str) -> None:
    """The drive reports success, so only the checksum finds the error."""
    rig = make_rig(Fault(kind, on, path="block.1/", skip=2, times=1, bit=12345))  # type: ignore[arg-type]
    if on == "write":
        rig.put(1, 50)
        rig.store.wait_idle()
    else:
        slot = rig.ram.allocate(NUM_BYTES, name="somebody", home=False)
        assert slot is not None
        rig.ram.tensor(slot, (NUM_BYTES,), torch.uint8).fill_(9)  # stays in RAM wherever the read writes nothing
        rig.ram.free(slot)
    with pytest.raises(CorruptBlockError, match=r"'block\.1' is damaged: .*block\.1/c/0' bytes 0 to") as caught:
        rig.get(1)
    assert caught.value.expected != caught.value.found and caught.value.generation is None
    assert rig.get(0) == {0} and rig.get(2) == {2}
    if on == "read":
        assert rig.get(1) == {1}, "the bytes on disk are whole: a second read is right"


def test_unverified_flip_is_found_only_by_verify(make_rig) -> None:
    rig = make_rig(Fault("flip", "write", path="block.1/", times=1), verify="resume")
    rig.put(1, 50)
    assert len(rig.get(1)) == 2
    with pytest.raises(CorruptBlockError):
        rig.store.verify(["block.1"])


def test_a_drive_that_becomes_read_only(small_drive, make_rig) -> None:
    """ext4 becomes read-only after a drive error. The test triggers such an error in the mounted file system."""
    rig = make_rig(folder=small_drive.store)
    rig.store.commit({}).wait(60)
    small_drive.make_read_only()
    assert rig.get(2) == {2}, "reads go on"
    rig.put(0, 100)
    with pytest.raises(TransferError, match="became read-only") as caught:
        rig.store.wait_idle()
    assert caught.value.errno == errno.EROFS and str(small_drive.store) in str(caught.value)
    with pytest.raises(TransferError):
        rig.store.commit({})
    with rig.store.acquire("block.0", "ram") as lease:
        assert set(lease.tensor.tolist()) == {100}, "the only copy of the newest bytes is in memory still"


def test_a_drive_that_dies_is_named(make_drive, tmp_path: Path, faulty_links) -> None:
    """A tier has two drives. After the first write-back, every access to the second drive fails."""
    drives = [make_drive(32 * MiB), make_drive(32 * MiB)]
    notices: list[str] = []
    tier = NvmeTier([d.store for d in drives], 16 * MiB, chunk_bytes=MiB // 8, on_notice=notices.append)
    with TieredStore([RamTier(4 * MiB, pin_memory=False), tier]) as store:
        store.register("block", (2 * MiB,), torch.uint8, home="nvme")
        with store.acquire("block", "ram", "w") as lease:
            lease.tensor.fill_(1)
        store.evict("block", "ram").wait(60)
        drives[1].die()
        with pytest.raises(TransferError, match=r"Input/output error \(EIO\)") as caught:
            store.acquire("block", "ram")
        assert caught.value.errno == errno.EIO
        assert str(caught.value.path).startswith(str(drives[1].store))
        with store.acquire("block", "ram", "w") as lease:
            lease.tensor.fill_(2)
        with pytest.raises(TransferError) as caught:
            store.evict("block", "ram").wait(60)
        assert str(caught.value.path).startswith(str(drives[1].store))
        assert any(str(drives[1].store) in text and "stays in memory" in text for text in notices)
    tier.close()


@pytest.mark.fault
def test_random_faults_never_lose_or_invent_bytes(tmp_path: Path, make_rig) -> None:
    """Each of a thousand operations on a drive with 160 random faults gives an error or the right values."""
    import random

    chance = random.Random(3)
    rig = make_rig()
    rig.mover.faults.extend(
        Fault(kind, on, errno.EIO, skip=chance.randrange(400), times=1, bit=chance.randrange(99_999))
        for kind in ("error", "error", "short", "flip")
        for on in ("read", "write")
        for _ in range(20)
    )
    newest: dict[int, set[int]] = {number: {number} for number in range(3)}
    num_errors = 0
    for value in range(1000):
        number = chance.randrange(3)
        try:
            if chance.random() < 0.4:
                rig.put(number, value % 256)  # an error is raised before this value is written
                newest[number] = {value % 256}
            else:
                assert rig.get(number) == newest[number]
        except (TransferError, CorruptBlockError) as error:
            num_errors += 1
            if isinstance(error, CorruptBlockError):
                rig.put(number, value % 256)  # replace the contents that the error reported as damaged
                newest[number] = {value % 256}
    assert num_errors > 20


def test_latency_is_slept_and_flips_are_on_disk(tmp_path: Path, faulty_links) -> None:
    """The fault injector delays calls, flips bits on disk, and adds faults to existing links."""
    naps: list[float] = []
    rig = Rig(faulty_links, tmp_path / "store", Fault("late", "read", latency_s=3.5, times=2), verify="off")
    rig.mover._sleep = naps.append
    assert rig.get(0) == {0} and naps == [3.5, 3.5]
    slot = rig.store._blocks["block.0"].home.slot
    assert slot is not None
    flip_bit(files_of(slot).files[1], 5)
    assert rig.get(0) == {0, 32}
    mover = make_faulty(rig.store._links, Fault("error", "read", errno.EIO, times=1))
    assert isinstance(mover.inner, FaultyMover) and mover.path == "posix-direct"
    with pytest.raises(TransferError):
        rig.get(0)
    rig.store.close()
