"""Records this process's operations on the files in a folder as a ``Recording``.

The recorder replaces ``open`` and functions of ``os``. To check that no operation was missed, tests replay the
recording with ``Recording.disk``, and compare the result with the folder.
"""

from __future__ import annotations

import builtins
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fakes.recorded_disk import ROOT, Names, Operation, Recording, Resize, Sync, Write, scan


class _Recorder:
    """Thread-safe recorder of the effects of file operations. The operations run one at a time."""

    def __init__(self, root: Path) -> None:
        self.root = os.path.realpath(root)
        self.lock = threading.RLock()
        disk, self.numbers = scan(root)
        self.recording = Recording(Path(self.root), disk)
        self.now = disk.copy()  # tracks only names, not file contents
        self.next_number = len(self.numbers)

    # -- paths -------------------------------------------------------------------------------------------------

    def inside(self, path: Any, dir_fd: int | None = None) -> str | None:
        """Return ``path`` relative to the recorded folder, or None if it is outside the folder."""
        text = os.fsdecode(path)
        if dir_fd is not None:
            text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
        text = os.path.abspath(text)
        return text[len(self.root) + 1 :] if text.startswith(self.root + "/") else None

    def at(self, relative: str) -> tuple[int, str, int | None]:
        """Return the parent's number, the name in it, and the item's number (None if the path does not exist)."""
        *parts, name = relative.split("/")
        folder = ROOT
        for part in parts:
            folder = self.now.folders[folder][part]
        return folder, name, self.now.folders[folder].get(name)

    def of(self, fd: int) -> int | None:
        """Return the number of an open file or folder, or None if it is outside the recorded folder."""
        if not os.readlink(f"/proc/self/fd/{fd}").startswith(self.root):
            return None
        status = os.fstat(fd)
        return self.numbers.get((status.st_dev, status.st_ino))

    def place(self, fd: int) -> str:
        return os.readlink(f"/proc/self/fd/{fd}").removeprefix(self.root).lstrip("/")

    # -- operations --------------------------------------------------------------------------------------------------

    def note(self, operation: Operation) -> None:
        if isinstance(operation, Names):
            self.now.rename(operation.changes)
        self.recording.operations.append(operation)

    def made(self, relative: str, target: str | None = None) -> None:
        """Record a new file, folder or link."""
        status = os.lstat(os.path.join(self.root, relative))
        number, self.next_number = self.next_number, self.next_number + 1
        self.numbers[(status.st_dev, status.st_ino)] = number  # the inode number may have belonged to a deleted file
        if target is not None:
            self.recording.new.links[number] = target
        elif os.path.isdir(os.path.join(self.root, relative)):
            self.recording.new.folders[number] = {}
            self.now.folders[number] = {}
        else:
            self.recording.new.files[number] = bytearray()
        folder, name, _ = self.at(relative)
        self.note(Names(((folder, name, number),), relative))

    def wrote(self, fd: int, offset: int, data: bytes) -> None:
        number = self.of(fd)
        if number is not None and data:
            self.note(Write(number, offset, data, self.place(fd)))


Calls = dict[str, Callable[..., Any]]


def _replacements(recorder: _Recorder) -> Calls:
    """Return replacements for ``os`` functions that record their effects, by function name."""
    own = (
        _creation_calls(recorder) | _rename_calls(recorder) | _write_calls(recorder) | _resize_and_flush_calls(recorder)
    )
    return {name: _serialize_calls(recorder, function) for name, function in own.items()}


def _serialize_calls(recorder: _Recorder, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        with recorder.lock:
            return function(*arguments, **options)

    return call


def _creation_calls(recorder: _Recorder) -> Calls:
    real = {name: getattr(os, name) for name in ("open", "mkdir", "symlink")}

    def open_(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        relative = recorder.inside(path, dir_fd)
        is_new = relative is not None and bool(flags & os.O_CREAT) and recorder.at(relative)[2] is None
        fd: int = real["open"](path, flags, mode, dir_fd=dir_fd)
        if is_new and relative is not None:
            recorder.made(relative)
        elif flags & os.O_TRUNC and (number := recorder.of(fd)) is not None:
            recorder.note(Resize(number, 0, False, recorder.place(fd)))
        return fd

    def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        real["mkdir"](path, mode, dir_fd=dir_fd)
        if (relative := recorder.inside(path, dir_fd)) is not None:
            recorder.made(relative)

    def symlink(target: Any, path: Any, target_is_directory: bool = False, *, dir_fd: int | None = None) -> None:
        real["symlink"](target, path, target_is_directory, dir_fd=dir_fd)
        if (relative := recorder.inside(path, dir_fd)) is not None:
            recorder.made(relative, os.fsdecode(target))

    return {"open": open_, "mkdir": mkdir, "symlink": symlink}


def _rename_calls(recorder: _Recorder) -> Calls:
    removing, renaming = ("rmdir", "unlink", "remove"), ("rename", "replace")
    real = {name: getattr(os, name) for name in (*removing, *renaming, "link")}

    def remover(name: str) -> Callable[..., None]:
        def remove(path: Any, *, dir_fd: int | None = None) -> None:
            real[name](path, dir_fd=dir_fd)
            if (relative := recorder.inside(path, dir_fd)) is not None:
                folder, last, _ = recorder.at(relative)
                recorder.note(Names(((folder, last, None),), relative))

        return remove

    def renamer(name: str) -> Callable[..., None]:
        def rename(path: Any, target: Any) -> None:
            real[name](path, target)
            old, new = recorder.inside(path), recorder.inside(target)
            if old is None and new is None:
                return
            assert old is not None and new is not None, f"renamed across the border of what is recorded: {path}"
            (folder, last, number), (new_folder, new_last, was) = recorder.at(old), recorder.at(new)
            if number != was:  # if both names are links to the same file, a rename changes nothing
                recorder.note(Names(((new_folder, new_last, number), (folder, last, None)), new))

        return rename

    def link(path: Any, target: Any, **options: Any) -> None:
        real["link"](path, target, **options)
        if (new := recorder.inside(target)) is not None:
            old = recorder.inside(path)
            assert old is not None and not options, f"linked from outside what is recorded: {path}"
            folder, last, _ = recorder.at(new)
            recorder.note(Names(((folder, last, recorder.at(old)[2]),), new))

    own = {name: remover(name) for name in removing} | {name: renamer(name) for name in renaming}
    return own | {"link": link}


def _write_calls(recorder: _Recorder) -> Calls:
    real = {name: getattr(os, name) for name in ("write", "writev", "pwrite", "pwritev", "sendfile")}

    def write(fd: int, data: Any) -> int:
        done: int = real["write"](fd, data)
        if recorder.of(fd) is not None:
            recorder.wrote(fd, os.lseek(fd, 0, os.SEEK_CUR) - done, bytes(data)[:done])
        return done

    def writev(fd: int, parts: Any) -> int:
        done: int = real["writev"](fd, parts)
        if recorder.of(fd) is not None:
            recorder.wrote(fd, os.lseek(fd, 0, os.SEEK_CUR) - done, b"".join(map(bytes, parts))[:done])
        return done

    def pwrite(fd: int, data: Any, offset: int) -> int:
        done: int = real["pwrite"](fd, data, offset)
        recorder.wrote(fd, offset, bytes(data)[:done])
        return done

    def pwritev(fd: int, parts: Any, offset: int, flags: int = 0) -> int:
        done: int = real["pwritev"](fd, parts, offset, flags)
        recorder.wrote(fd, offset, b"".join(map(bytes, parts))[:done])
        return done

    def sendfile(out_fd: int, in_fd: int, offset: int, count: int) -> int:
        done: int = real["sendfile"](out_fd, in_fd, offset, count)
        if recorder.of(out_fd) is not None:
            data = os.pread(in_fd, done, offset)
            recorder.wrote(out_fd, os.lseek(out_fd, 0, os.SEEK_CUR) - done, data)
        return done

    return {function.__name__: function for function in (write, writev, pwrite, pwritev, sendfile)}


def _resize_and_flush_calls(recorder: _Recorder) -> Calls:
    flushing = ("fsync", "fdatasync")
    real = {name: getattr(os, name) for name in (*flushing, "ftruncate", "posix_fallocate")}

    def syncer(name: str) -> Callable[[int], None]:
        def sync(fd: int) -> None:
            real[name](fd)
            if (number := recorder.of(fd)) is not None:
                recorder.note(Sync(number, recorder.place(fd)))

        return sync

    def ftruncate(fd: int, nbytes: int) -> None:
        real["ftruncate"](fd, nbytes)
        if (number := recorder.of(fd)) is not None:
            recorder.note(Resize(number, nbytes, False, recorder.place(fd)))

    def posix_fallocate(fd: int, offset: int, nbytes: int) -> None:
        real["posix_fallocate"](fd, offset, nbytes)
        if (number := recorder.of(fd)) is not None:
            recorder.note(Resize(number, offset + nbytes, True, recorder.place(fd)))

    return {name: syncer(name) for name in flushing} | {"ftruncate": ftruncate, "posix_fallocate": posix_fallocate}


def _recording_open(recorder: _Recorder) -> Callable[..., Any]:
    """Return a replacement for ``open`` whose files record every write."""
    real = io.open

    class RecordedFile(io.FileIO):
        def write(self, data: Any) -> int:
            with recorder.lock:
                offset = self.tell()
                done = super().write(data)
                recorder.wrote(self.fileno(), offset, bytes(data)[:done])
            return done

        def truncate(self, size: int | None = None) -> int:
            with recorder.lock:
                size = super().truncate(size)
                if (number := recorder.of(self.fileno())) is not None:
                    recorder.note(Resize(number, size, False, recorder.place(self.fileno())))
            return size

    def open_(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        if not set(mode) & set("wax+") or opener is not None:
            return real(file, mode, buffering, encoding, errors, newline, closefd, opener)
        raw = RecordedFile(file, mode.replace("t", ""), closefd, opener=lambda path, flags: os.open(path, flags, 0o666))
        if buffering == 0:
            return raw
        buffered: Any = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffered
        text = io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)
        text.mode = mode  # type: ignore[misc]
        return text

    return open_


@contextmanager
def record(root: Path) -> Iterator[Recording]:
    """Record this process's operations on the files below ``root`` within the context."""
    recorder = _Recorder(root)
    replaced = [(os, name, function) for name, function in _replacements(recorder).items()]
    replaced += [(module, "open", _recording_open(recorder)) for module in (io, builtins)]
    before = [(module, name, getattr(module, name)) for module, name, _ in replaced]
    for module, name, function in replaced:
        setattr(module, name, function)
    try:
        yield recorder.recording
    finally:
        for module, name, function in before:
            setattr(module, name, function)
