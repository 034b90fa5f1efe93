"""Directory locks: lock files that are deleted while in use, and file systems without locks or link counts."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tiered import GiB, LockedError, MiB, NvmeTier, RamTier, TieredStore
from tiered.errors import LockingError, UnusableDirectoryError
from tiered.locks import LOCK_NAME, Mount, has_open, holder_text, lock, lock_directory, mount_of, owner_in, unescape
from tiered.tiers.cleanup import measure_leftovers
from tiered.tiers.directory import TierDirectory

_OTHER_PROCESS = """
import sys
from tiered import NvmeTier, MiB, LockedError
try:
    NvmeTier([sys.argv[1]], MiB)
except LockedError:
    sys.exit(7)
"""


def refuse_locks(monkeypatch: pytest.MonkeyPatch, number: int = errno.ENOLCK) -> None:
    """Make ``flock`` fail as on a file system without locks."""

    def refuse(fd: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)


def make_store(path: Path) -> TieredStore:
    return TieredStore([RamTier(MiB, pin_memory=False), NvmeTier([path], GiB)])


def test_deleted_lock_file_admits_no_second_process(tmp_path: Path) -> None:
    with make_store(tmp_path):
        (tmp_path / LOCK_NAME).unlink()
        command = [sys.executable, "-c", _OTHER_PROCESS, str(tmp_path)]
        assert subprocess.run(command, check=False, timeout=60).returncode == 7
    TierDirectory(tmp_path).close()


@pytest.mark.parametrize("replaces", [False, True])
def test_commit_without_its_lock_is_refused(tmp_path: Path, replaces: bool) -> None:
    with make_store(tmp_path) as store:
        store.put("x", torch.arange(9.0))
        store.commit().wait()
        (tmp_path / LOCK_NAME).unlink()
        if replaces:
            (tmp_path / LOCK_NAME).touch()
        with pytest.raises(LockedError, match="deleted or replaced while in use"):
            store.commit().wait()
        assert store["x"].tolist() == list(range(9))
    with TieredStore.open(str(tmp_path), [RamTier(MiB, pin_memory=False), NvmeTier([tmp_path], GiB)]) as store:
        assert store["x"].tolist() == list(range(9))


def test_commit_to_a_folder_without_a_tier_refuses(tmp_path: Path) -> None:
    with TieredStore([RamTier(MiB, pin_memory=False)], path=str(tmp_path)) as store:
        store.put("x", torch.arange(9.0))
        store.commit().wait()
        (tmp_path / LOCK_NAME).unlink()
        with pytest.raises(LockedError, match="deleted or replaced while in use"):
            store.commit().wait()


def test_lock_file_deleted_before_locking_is_recreated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, deleted = fcntl.flock, []

    def delete_first(fd: int, operation: int) -> None:
        if not deleted:
            deleted.append(os.fstat(fd).st_ino)
            (tmp_path / LOCK_NAME).unlink()
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", delete_first)
    lock = lock_directory(tmp_path)
    lock.check()
    assert f"process {os.getpid()} on" in (tmp_path / LOCK_NAME).read_text()
    lock.release()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_locking_error_names_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    refuse_locks(monkeypatch, number)
    with pytest.raises(LockingError) as caught:
        NvmeTier([tmp_path], MiB)
    text, mount = str(caught.value), mount_of(tmp_path.resolve())
    assert f"'{tmp_path / LOCK_NAME}' cannot be locked: {os.strerror(number)}" in text
    assert f"{mount.kind} of {mount.source}, mounted at {mount.point}" in text and "local drive" in text
    assert caught.value.errno == number


def test_owner_is_read_without_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = lock_directory(tmp_path)
    refuse_locks(monkeypatch)
    mine = f"process {os.getpid()} on {socket.gethostname()}"
    assert (holder_text(tmp_path) or "").startswith(mine)
    lock.release()
    assert holder_text(tmp_path) is None
    for text, is_held in ((mine, False), ("process 1 on elsewhere", True), ("", False)):
        (tmp_path / LOCK_NAME).write_text(text)
        assert (holder_text(tmp_path) is not None) == is_held, text
    (tmp_path / LOCK_NAME).write_text("")
    assert measure_leftovers(tmp_path).owner is None


def test_a_file_system_that_counts_no_links_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.stat

    def count_one(path: int | str | Path, **options: object) -> os.stat_result:
        found = real(path, **options)  # type: ignore[arg-type]
        return os.stat_result([*found[:3], 1, *found[4:]])

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", count_one)
        with pytest.raises(UnusableDirectoryError, match="does not count the links of a file"):
            TierDirectory(tmp_path)
    directory = TierDirectory(tmp_path)  # the refusal released the lock
    directory.close()
    assert not any((tmp_path / ".pool").iterdir())


def test_a_file_system_that_refuses_links_can_hold_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: object, target: object, **options: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), source, None, target)

    monkeypatch.setattr(os, "link", refuse)
    with make_store(tmp_path) as store:
        store.put("x", torch.arange(9.0))
        with pytest.raises(OSError, match="cannot be linked into generation"):
            store.commit().wait()
        assert store["x"].tolist() == list(range(9))


@pytest.mark.parametrize("name", ["a\u2028b", "a\u0085b", "a\rb", "a\x0cb", "a\x1cb"])
def test_mount_table_is_split_at_newlines_only(tmp_path: Path, name: str) -> None:
    mounts = tmp_path / "mountinfo"
    line = f"22 21 8:2 / /mnt/{name} rw - tmpfs tmpfs rw\n"
    mounts.write_bytes(b"21 1 8:1 / / rw - ext4 /dev/root rw\n" + line.encode())
    assert mount_of(Path(f"/mnt/{name}/x"), mounts).kind == "tmpfs"
    assert mount_of(Path("/mnt"), mounts).kind == "ext4"


def test_innermost_and_last_mount_contains_a_path(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw\n"
        "22 21 8:2 / /data rw shared:2 master:1 - xfs /dev/a rw\n"
        "23 22 8:3 / /data/my\\040drive rw - nfs4 server:/a\\134b rw\n"
        "24 21 8:4 / /data rw - btrfs /dev/b rw\n"
        "a damaged line\n"
    )
    assert {path: mount_of(Path(path), mounts) for path in ("/data/x", "/data/my drive/x", "/database", "/data")} == {
        "/data/x": Mount("/data", "btrfs", "/dev/b"),
        "/data/my drive/x": Mount("/data/my drive", "nfs4", "server:/a\\b"),
        "/database": Mount("/", "ext4", "/dev/root"),
        "/data": Mount("/data", "btrfs", "/dev/b"),
    }
    assert mount_of(Path("/data"), tmp_path / "missing") == Mount("/", "unknown", "unknown")
    assert unescape("a\\040b\\011c\\09") == "a b\tc\\09"


def test_owner_is_read_from_the_text_of_a_lock() -> None:
    texts = ("process 12 on host-a, since 2026", "process 7 on b", "process x on b", "")
    assert [owner_in(text) for text in texts] == [(12, "host-a"), (7, "b"), (None, None), (None, None)]


def test_open_files_of_a_process_are_found(tmp_path: Path) -> None:
    for name in ("open", "closed"):
        (tmp_path / name).touch()
    with (tmp_path / "open").open():
        assert has_open(os.getpid(), tmp_path / "open") and not has_open(os.getpid(), tmp_path / "closed")
    assert not has_open(os.getpid(), tmp_path / "open")
    with pytest.raises(FileNotFoundError):
        has_open(os.getpid(), tmp_path / "missing")


def test_locks_are_shared_or_exclusive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fds = [os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT) for _ in range(3)]
    lock(fds[0], tmp_path, shared=True)
    lock(fds[1], tmp_path, shared=True)
    with pytest.raises(BlockingIOError):
        lock(fds[2], tmp_path)
    os.close(fds[0])
    os.close(fds[1])
    lock(fds[2], tmp_path)
    refuse_locks(monkeypatch, errno.EACCES)
    with pytest.raises(BlockingIOError) as caught:
        lock(fds[2], tmp_path)
    assert (caught.value.errno, caught.value.filename) == (errno.EACCES, str(tmp_path))
    seen: list[int] = []
    monkeypatch.setattr(fcntl, "flock", lambda fd, operation: seen.append(operation))
    for shared in (False, True):
        for blocking in (False, True):
            lock(fds[2], tmp_path, shared=shared, blocking=blocking)
    os.close(fds[2])
    exclusive, non_blocking = fcntl.LOCK_EX, fcntl.LOCK_NB
    assert seen == [exclusive | non_blocking, exclusive, fcntl.LOCK_SH | non_blocking, fcntl.LOCK_SH]


def test_no_descriptor_of_a_lock_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def num_open() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before, real, deleted = num_open(), fcntl.flock, []
    lock_directory(tmp_path).release()
    held = lock_directory(tmp_path)
    num_held = num_open()
    with pytest.raises(LockedError):
        lock_directory(tmp_path)
    assert holder_text(tmp_path) is not None and num_open() == num_held
    held.release()
    assert holder_text(tmp_path) is None and num_open() == before

    def delete_first(fd: int, operation: int) -> None:
        real(fd, operation)
        if len(deleted) < 3:
            deleted.append((tmp_path / LOCK_NAME).unlink(missing_ok=True))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", delete_first)
        lock_directory(tmp_path).release()
    assert len(deleted) == 3 and num_open() == before
    with monkeypatch.context() as patch:
        refuse_locks(patch)
        with pytest.raises(LockingError):
            lock_directory(tmp_path)
    assert num_open() == before
