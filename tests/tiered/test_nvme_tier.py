from __future__ import annotations

import errno
import json
import os
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr

from oracles.disk import bytes_on_disk
from tiered import CapacityError, GpuTier, KiB, LockedError, MiB, NvmeTier, RamTier, TieredError, TransferError
from tiered.ext import ReadOnlyTier, ReadPart, Slot, SourceTier, UnifiedTier
from tiered.file_io import sync_paths
from tiered.tiers.health import WearLimitError
from tiered.tiers.layout import files_of, own_attributes


def take(tier: NvmeTier, nbytes: int, key: str = "layer.0/weight") -> Slot:
    slot = tier.allocate(nbytes, name=key, home=True)
    assert slot is not None
    return slot


def fill(tier: NvmeTier, slot: Slot, value: int) -> None:
    """Write ``value`` to every byte of a slot's files, the way a link does."""
    for file in files_of(slot).files:
        fd = tier.open_for_write(file)
        os.close(fd)
        assert file.path.stat().st_nlink == 1, "a file that a snapshot links must not be written"
        file.path.write_bytes(bytes([value]) * file.nbytes)


def contents(tree: Path, key: str) -> set[int]:
    """Read an array with zarr, and return the set of its byte values."""
    return set(np.unique(np.asarray(zarr.open_array(tree / key, mode="r")[:]).view(np.uint8)).tolist())


def test_files_are_preallocated_and_the_ledger_counts_them_whole(tmp_path: Path) -> None:
    tier = NvmeTier([tmp_path], MiB)
    slot = take(tier, 10_000)
    assert slot.slot_bytes == tier.slot_bytes(10_000) == 12288 == tier.usage().used_bytes
    (file,) = files_of(slot).files
    assert file.path == tmp_path / "live/layer.0/weight/c/0"
    assert file.path.stat().st_size == 12288
    assert 12288 <= file.path.stat().st_blocks * 512 <= 2 * 12288
    (tmp_path / "other").touch(mode=0o644)
    assert file.path.stat().st_mode == (tmp_path / "other").stat().st_mode, "readable for every user"
    tier.free(slot)
    assert tier.usage().used_bytes == 0 and tier.usage().high_water_bytes == 12288
    assert not (tmp_path / "live/layer.0").exists(), "groups without blocks are removed"
    with pytest.raises(AssertionError):
        tier.free(slot)
    tier.close()


def test_eight_files_are_flushed_at_once() -> None:
    together, flushed = threading.Barrier(8, timeout=60), set[str]()

    def wait(path: Path) -> None:
        together.wait()
        flushed.add(path.name)

    sync_paths(map(Path, "abcdefgh"), wait)
    assert flushed == set("abcdefgh")


def test_every_level_opens_with_zarr(tmp_path: Path) -> None:
    tier = NvmeTier([tmp_path], MiB)
    slot = take(tier, 24, "model/layer.0/weight")
    tier.describe(slot, (3, 4), torch.bfloat16)
    live = zarr.open_group(tmp_path, mode="r")["live"]
    assert isinstance(live, zarr.Group)
    assert [name for name, _ in live.groups()] == ["model"]
    array = live["model/layer.0/weight"]
    assert isinstance(array, zarr.Array)
    assert array.shape == (12,) and str(array.dtype) == "uint16"
    own = own_attributes(json.loads((tmp_path / "live/model/layer.0/weight/zarr.json").read_text()))
    assert own is not None and own["logical_dtype"] == "bfloat16" and own["shape"] == [3, 4]
    tier.close()


def test_empty_block(tmp_path: Path) -> None:
    tier = NvmeTier([tmp_path], MiB)
    slot = take(tier, 0)
    tier.describe(slot, (0, 4), torch.float32)
    assert slot.slot_bytes == 0
    assert zarr.open_array(tmp_path / "live/layer.0/weight", mode="r").shape == (0,)
    tier.snapshots.take(slot, "1")
    tier.snapshots.adopt(slot, "1")
    tier.snapshots.drop("1")
    tier.free(slot)
    tier.close()


def test_striped_block_reads_whole_from_the_first_path(tmp_path: Path) -> None:
    tier = NvmeTier([tmp_path / "a", tmp_path / "b"], 8 * MiB, rates=[2, 1], chunk_bytes=64 * KiB)
    slot = take(tier, 600 * KiB)
    tier.describe(slot, (600 * KiB,), torch.uint8)
    files = files_of(slot).files
    assert [file.offset for file in files] == [i * 60 * KiB for i in range(10)]
    assert sum(file.path_index == 0 for file in files) in (6, 7)
    expected = np.empty(600 * KiB, dtype=np.uint8)
    for number, file in enumerate(files):
        assert file.path.is_relative_to(tmp_path / "ab"[file.path_index]) and not file.path.is_symlink()
        file.path.write_bytes(bytes([number]) * file.nbytes)
        expected[file.offset : file.offset + file.nbytes] = number
    assert np.array_equal(zarr.open_array(tmp_path / "a/live/layer.0/weight", mode="r")[:], expected)
    tier.free(slot)
    assert not any((tmp_path / "b/live").rglob("*"))
    tier.close()


@pytest.mark.parametrize("key", ["", "a//b", "../x", "a/..", "/abs", "a/zarr.json"])
def test_names_unusable_as_folders_are_refused(tmp_path: Path, key: str) -> None:
    tier = NvmeTier([tmp_path / "t"], MiB)
    with pytest.raises(ValueError, match="segment"):
        tier.allocate(1, name=key, home=True)
    assert tier.usage().used_bytes == 0
    tier.close()


def test_nested_and_duplicate_block_names_are_refused(tmp_path: Path) -> None:
    tier = NvmeTier([tmp_path], MiB)
    slot = take(tier, 1, "a/b")
    for key in ("a/b", "a", "a/b/c", "a/b/c/0"):
        with pytest.raises(ValueError, match=r"already|inside another"):
            tier.allocate(1, name=key, home=True)
    tier.free(slot)
    assert tier.allocate(1, name="a", home=True) is not None
    tier.close()


def test_full_drive_is_refused_with_path_and_errno_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = NvmeTier([tmp_path / "a", tmp_path / "b"], MiB, chunk_bytes=4096)
    real = os.posix_fallocate
    num_calls = 0

    def raise_enospc_from_third_call(fd: int, offset: int, nbytes: int) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls >= 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", raise_enospc_from_third_call)
    with pytest.raises(TransferError, match="No space left") as caught:
        tier.allocate(16384, name="layer.0/weight", home=True)
    assert caught.value.errno == errno.ENOSPC
    assert str(caught.value.path).startswith(str(tmp_path))
    assert tier.usage().used_bytes == 0
    monkeypatch.setattr(os, "posix_fallocate", real)
    assert bytes_on_disk(tmp_path) == tier.pool_bytes <= 2 * 4096
    assert take(tier, 16384).slot_bytes == 16384
    tier.close()


def test_full_drive_gives_up_kept_files_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = NvmeTier([tmp_path], MiB)
    for slot in [take(tier, nbytes, key=f"layer.{nbytes}") for nbytes in (65536, 8192)]:
        tier.free(slot)
    assert tier.pool_bytes == 73728
    real = os.posix_fallocate

    def raise_enospc_while_files_are_kept(fd: int, offset: int, nbytes: int) -> None:
        if tier.pool_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", raise_enospc_while_files_are_kept)
    assert take(tier, 4096).slot_bytes == 4096
    assert tier.pool_bytes == 0
    tier.close()


def test_freed_files_are_reused_and_never_exceed_the_capacity(tmp_path: Path) -> None:
    tier = NvmeTier([tmp_path], 64 * KiB)
    slot = take(tier, 40 * KiB)
    inode = files_of(slot).files[0].path.stat().st_ino
    tier.free(slot)
    assert tier.pool_bytes == 40 * KiB
    again = take(tier, 40 * KiB, "other")
    assert files_of(again).files[0].path.stat().st_ino == inode
    tier.free(again)
    small = take(tier, 20 * KiB)
    assert tier.pool_bytes == 40 * KiB
    large = take(tier, 30 * KiB, "large")
    assert tier.pool_bytes == 0
    assert bytes_on_disk(tmp_path) == tier.usage().used_bytes == small.slot_bytes + large.slot_bytes
    tier.close()


def test_reservations_share_the_ledger(tmp_path: Path) -> None:
    tier = NvmeTier([tmp_path], 64 * KiB)
    tier.free(take(tier, 40 * KiB))
    tier.reserve(60 * KiB)
    assert tier.pool_bytes == 0, "kept files must be removed for a reservation"
    assert tier.allocate(8192, name="b", home=True) is None
    with pytest.raises(CapacityError):
        tier.reserve(5000)
    tier.reserve(-60 * KiB)
    assert tier.usage().used_bytes == 0
    tier.close()


# -- ownership -------------------------------------------------------------------------------------------------


def test_a_directory_in_use_names_its_owner(tmp_path: Path) -> None:
    tier = NvmeTier([tmp_path / "a"], MiB)
    with pytest.raises(LockedError, match=f"process {os.getpid()} on"):
        NvmeTier([tmp_path / "b", tmp_path / "a"], MiB)
    tier.close()
    NvmeTier([tmp_path / "b", tmp_path / "a"], MiB).close()


@pytest.mark.parametrize("document", [None, "{}", "not json", '{"attributes": {}}'])
def test_foreign_directories_are_refused_and_not_touched(tmp_path: Path, document: str | None) -> None:
    (tmp_path / "live").mkdir()
    (tmp_path / "live/precious").write_text("data")
    if document is not None:
        (tmp_path / "zarr.json").write_text(document)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(TieredError, match="not made by tiered"):
        NvmeTier([tmp_path], MiB)
    assert sorted(tmp_path.rglob("*")) == before


def test_newer_format_is_refused(tmp_path: Path) -> None:
    NvmeTier([tmp_path], MiB).close()
    document = json.loads((tmp_path / "zarr.json").read_text())
    document["attributes"]["megatrain"]["format"] = 99
    (tmp_path / "zarr.json").write_text(json.dumps(document))
    with pytest.raises(TieredError, match="upgrade"):
        NvmeTier([tmp_path], MiB)


def test_file_at_the_directory_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TieredError, match="cannot be created"):
        NvmeTier([tmp_path / "file"], MiB)


def test_paths_must_be_given_and_differ(tmp_path: Path) -> None:
    for paths in ([], [tmp_path, tmp_path / "x" / ".."]):
        with pytest.raises(ValueError, match="different paths"):
            NvmeTier(paths, MiB)
    with pytest.raises(ValueError, match="multiple of 4096"):
        NvmeTier([tmp_path / "t"], MiB, chunk_bytes=1000)


def test_leftovers_of_a_dead_run_are_recycled_and_snapshots_kept(tmp_path: Path) -> None:
    tier = NvmeTier([tmp_path], MiB)
    kept, lost = take(tier, 8192, "kept"), take(tier, 16384, "lost")
    for slot, value in ((kept, 1), (lost, 2)):
        tier.describe(slot, (slot.nbytes,), torch.uint8)
        fill(tier, slot, value)
    tier.snapshots.take(kept, "00000001")
    (tmp_path / ".pool/4096").mkdir(parents=True)
    (tmp_path / ".pool/4096/9").write_text("half-made")
    tier.close()
    tier = NvmeTier([tmp_path], MiB)
    assert not (tmp_path / "live").exists()
    assert tier.pool_bytes == 16384 and tier.snapshots.nbytes == 8192
    assert contents(tmp_path / "snap/00000001", "kept") == {1}
    assert bytes_on_disk(tmp_path) == 16384 + 8192
    tier.close()
    tier = NvmeTier([tmp_path], 20 * KiB)
    assert tier.pool_bytes == 0, "kept files beyond a smaller capacity are removed"
    tier.close()


def test_leftover_files_are_reused_without_name_clashes(tmp_path: Path) -> None:
    """A new file must not get the name of a kept file."""
    tier = NvmeTier([tmp_path], MiB)
    for key in ("a", "b"):
        take(tier, 8192, key)
    tier.close()
    tier = NvmeTier([tmp_path], MiB)
    assert tier.pool_bytes == 2 * 8192
    tier.free(take(tier, 8192, "a"))
    assert tier.pool_bytes == bytes_on_disk(tmp_path) == 2 * 8192
    tier.close()
    tier = NvmeTier([tmp_path], MiB)
    for _ in range(4):
        tier.free(take(tier, 8192, "a"))
        assert tier.pool_bytes == bytes_on_disk(tmp_path) == 2 * 8192
    for key in ("a", "b", "c"):
        take(tier, 8192, key)
    assert tier.usage().used_bytes == bytes_on_disk(tmp_path) == 3 * 8192 and tier.pool_bytes == 0
    tier.close()


@pytest.mark.parametrize("dies", [False, True])
def test_only_a_dead_run_is_reported(dies: bool, tmp_path: Path) -> None:
    tier = NvmeTier([tmp_path], MiB)
    take(tier, 8192)
    tier.close()
    if dies:  # the lock file that a dead process leaves names the process
        (tmp_path / "LOCK").write_text("process 1 on here, since then\n")
    notices: list[str] = []
    NvmeTier([tmp_path], MiB, on_notice=notices.append).close()
    assert ["dead run left (process 1 on here" in text for text in notices] == [True] * dies


def test_only_whole_files_of_the_pool_are_recovered(tmp_path: Path) -> None:
    NvmeTier([tmp_path], MiB).close()
    pool = tmp_path / ".pool"
    (pool / "4096/13").mkdir(parents=True)
    (pool / "8192").mkdir()
    contents = {"4096/1": 4096, "4096/12": 4096, "8192/3": 8192, "4096/x": 4096, "8192/4": 4096, "stray": 1, "5": 4096}
    for name, nbytes in contents.items():
        (pool / name).write_bytes(b"x" * nbytes)
    (pool / "link").symlink_to(tmp_path)
    for _ in range(2):
        tier = NvmeTier([tmp_path], MiB)
        assert tier.pool_bytes == 4096 + 4096 + 8192
        assert {str(path.relative_to(pool)) for path in pool.rglob("*") if path.is_file()} == {
            "4096/1",
            "4096/12",
            "8192/3",
        }
        assert (pool / "4096/13").is_dir() and not (pool / "link").is_symlink()
        for key in ("a", "b"):
            take(tier, 4096, key)
        assert tier.pool_bytes == 8192
        tier.close()
        (pool / "4096").mkdir(exist_ok=True)
        for name in ("1", "12"):
            (pool / "4096" / name).write_bytes(b"x" * 4096)
        for file in (tmp_path / "live").rglob("c/0"):
            file.unlink()
    tier = NvmeTier([tmp_path], MiB)
    tier.free(take(tier, 4096, "a"))
    (kept,) = {path.name for path in (pool / "4096").iterdir()} - {"13", "14"}
    assert kept in ("1", "12"), "no file gets a name that is in use"
    tier.close()


def test_sparse_file_is_not_kept_for_reuse(tmp_path: Path) -> None:
    """Space for the holes would be allocated only during a later write, when the drive may be full."""
    tier = NvmeTier([tmp_path], MiB)
    slots = {key: take(tier, 64 * KiB, key) for key in ("whole", "holes")}
    (file,) = files_of(slots["holes"]).files
    file.path.unlink()
    with file.path.open("wb") as made:
        made.truncate(64 * KiB)
    tier.close()
    tier = NvmeTier([tmp_path], MiB)
    assert tier.pool_bytes == bytes_on_disk(tmp_path) == 64 * KiB
    tier.close()


def test_write_refused_by_one_path_is_counted_on_no_path(tmp_path: Path) -> None:
    limits = [None, 10_000]
    tier = NvmeTier([tmp_path / "a", tmp_path / "b"], MiB, max_written_bytes=limits)
    tier.count_wear({0: 4096, 1: 4096})
    with pytest.raises(WearLimitError, match="10000 bytes"):
        tier.count_wear({0: 8192, 1: 8192})
    tier.close()
    counts = [json.loads((tmp_path / name / "WEAR.json").read_text())["written_bytes"] for name in "ab"]
    assert counts == [4096, 4096]


def test_threads_never_push_the_disk_beyond_the_capacity(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    tier = NvmeTier(paths, 256 * KiB, chunk_bytes=8192)
    problems: list[str] = []

    def work(number: int) -> None:
        chance = random.Random(number)
        held: list[Slot] = []
        for step in range(60):
            slot = None
            if chance.random() < 0.6:
                slot = tier.allocate(chance.choice([3000, 9000, 20_000]), name=f"worker.{number}/{step}", home=True)
            if slot is not None:
                held.append(slot)
            elif held:
                tier.free(held.pop(chance.randrange(len(held))))
            with tier.snapshots.lock:
                on_disk = bytes_on_disk(*paths)
                if on_disk != tier.usage().used_bytes + tier.pool_bytes or on_disk > tier.capacity_bytes:
                    problems.append(f"{on_disk} on disk, {tier.usage()}, {tier.pool_bytes} kept")
        for slot in held:
            tier.free(slot)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not problems
    assert tier.usage().used_bytes == 0
    tier.close()


def test_drive_without_o_direct_is_used_buffered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = NvmeTier([tmp_path], MiB)
    (file,) = files_of(take(tier, 4096)).files
    real = os.open

    def refuse(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode)

    assert tier.io_path == "posix-direct"
    monkeypatch.setattr(os, "open", refuse)
    os.close(tier.open_for_read(file))
    assert tier.io_path == "posix-buffered"
    tier.close()


def test_attributes_of_tiers_are_fixed(tmp_path: Path) -> None:
    class Source:
        block_bytes = {"a": 300, "b": 21}  # noqa: RUF012

        def parts(self, key: str) -> list[ReadPart]:
            return []

    nvme = NvmeTier([tmp_path], MiB)
    tiers = [
        nvme,
        RamTier(2 * MiB),
        GpuTier(3 * MiB, device="cpu"),
        UnifiedTier(4 * MiB, device="cpu"),
        SourceTier(Source()),
    ]
    host = torch.device("cpu")
    found = [(t.name, t.capacity_bytes, t.alignment_bytes, t.device, t.durable, t.slot_bytes(5000)) for t in tiers]
    assert found == [
        ("nvme", MiB, 4096, None, True, 8192),
        ("ram", 2 * MiB, 4096, host, False, 8192),
        ("gpu", 3 * MiB, 512, host, False, 5120),
        ("ram", 4 * MiB, 4096, host, False, 8192),
        ("source", 321, 1, None, False, 5000),
    ]
    assert [isinstance(tier, ReadOnlyTier) and tier.is_read_only for tier in tiers] == [False] * 4 + [True]
    assert (nvme.verify, nvme.engine, nvme.past_ram, nvme.io_path) == ("resume", "posix", False, "posix-direct")
    for tier in tiers:
        tier.close()


def test_kept_files_of_all_paths_are_dropped(tmp_path: Path) -> None:
    tier = NvmeTier([tmp_path / "a", tmp_path / "b"], MiB, chunk_bytes=4096)
    slots = [take(tier, 4096, "one"), take(tier, 3 * 4096, "three")]
    tier.free(slots[0])
    assert tier.pool_bytes == 4096, "on one path"
    assert tier.snapshots.drop_kept_files() and tier.pool_bytes == 0
    assert not tier.snapshots.drop_kept_files()
    tier.free(slots[1])
    assert tier.pool_bytes == 3 * 4096
    assert tier.snapshots.drop_kept_files() and bytes_on_disk(tmp_path) == 0
    tier.close()


def test_closed_device_tier_drops_its_buffers() -> None:
    for tier in (GpuTier(MiB, device="cpu"), UnifiedTier(MiB, device="cpu")):
        slots = [tier.allocate(nbytes, name="block", home=False) for nbytes in (5000, 9000, 7000)]
        for slot in slots[:2]:
            assert slot is not None
            tier.free(slot)
        assert tier.num_drops == 0
        tier.close()
        assert tier.num_drops == 2
        assert slots[2] is not None
        tier.free(slots[2])
        assert tier.num_drops == 3 and tier.usage().used_bytes == 0
