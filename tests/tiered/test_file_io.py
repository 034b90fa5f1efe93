"""Files and folders below the tiers: what is flushed, replaced and refused."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiered import GenerationError
from tiered.durable.manifest import Manifest, forget_current, forget_generation, make_current, write_manifest
from tiered.file_io import (
    checksum,
    create_text_file,
    flush_contents,
    folder_clashes,
    make_folder,
    opened,
    pieces,
    read_all,
    read_document_file,
    replace_file,
    sync_paths,
    write_all,
)
from tiered.tiers.directory import write_document
from tiered.tiers.layout import group_document
from tiered.units import MiB

Operations = Callable[[], list[tuple[str, ...]]]


@pytest.fixture
def operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Operations:
    """Record flushes, renames, links and removals. The function returns and forgets them, with relative paths."""
    seen: list[tuple[str, ...]] = []

    def name(path: Any) -> str:
        full = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.path.abspath(path)
        return os.path.relpath(full, tmp_path)

    def watch(call: str, num_paths: int) -> None:
        real = getattr(os, call)

        def watched(*arguments: Any, **options: Any) -> Any:
            if call != "unlink" or os.path.lexists(arguments[0]):
                paths = arguments[1:] if call == "symlink" else arguments[:num_paths]
                seen.append((call, *map(name, paths)))
            return real(*arguments, **options)

        monkeypatch.setattr(os, call, watched)

    for call, num_paths in (("fsync", 1), ("fdatasync", 1), ("replace", 2), ("symlink", 2), ("unlink", 1)):
        watch(call, num_paths)

    def take() -> list[tuple[str, ...]]:
        found = list(seen)
        seen.clear()
        return found

    return take


def test_manifest_is_flushed_before_it_becomes_current(tmp_path: Path, operations: Operations) -> None:
    write_document(tmp_path, group_document({"page_bytes": 4096}))
    assert operations() == [("replace", "zarr.tmp", "zarr.json")]
    folder, show = "snap/00000003", [("symlink", "latest.tmp"), ("replace", "latest.tmp", "latest")]
    document = [("fsync", "zarr.tmp"), ("replace", "zarr.tmp", "zarr.json"), ("fsync", ".")]
    top = [("fsync", "MANIFEST.tmp"), ("replace", "MANIFEST.tmp", "MANIFEST.json"), ("fsync", ".")]
    write_manifest(tmp_path, Manifest(3, ()))
    assert operations() == [
        ("fsync", f"{folder}/MANIFEST.tmp"),
        ("replace", f"{folder}/MANIFEST.tmp", f"{folder}/MANIFEST.json"),
        ("fsync", folder),
        ("fsync", "snap"),
        ("fsync", "."),
        *top,
        *show,
        *document,
    ]
    assert os.readlink(tmp_path / "latest") == "snap/00000003"
    make_current(tmp_path, 2)
    assert operations() == [*top, *show, *document]
    assert os.readlink(tmp_path / "latest") == "snap/00000002"
    forget_current(tmp_path)
    assert operations() == [("unlink", "MANIFEST.json"), ("unlink", "latest"), *document, ("fsync", ".")]
    forget_generation(tmp_path, 3)
    assert operations() == [("unlink", f"{folder}/MANIFEST.json"), ("fsync", folder)]
    forget_generation(tmp_path, 3)
    assert operations() == []


def test_only_durable_replacements_are_flushed(tmp_path: Path, operations: Operations) -> None:
    path = tmp_path / "notes.json"
    (tmp_path / "notes.tmp").write_text("left by a crash, and longer than the new text")
    replace_file(path, "ä")
    assert operations() == [("unlink", "notes.tmp"), ("replace", "notes.tmp", "notes.json")]
    assert path.read_bytes() == "ä".encode()
    replace_file(path, "b", durable=True)
    assert operations() == [("fsync", "notes.tmp"), ("replace", "notes.tmp", "notes.json"), ("fsync", ".")]
    flush_contents(path)
    assert operations() == [("fdatasync", "notes.json")]
    assert path.read_text() == "b"


def test_failed_replacement_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "folder.json"
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(path, "text")
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder.json"]


def test_new_text_file_does_not_follow_a_link(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with create_text_file(tmp_path / "link") as file:
        file.write("new")
    assert (tmp_path / "target").read_text() == "precious" and (tmp_path / "link").read_text() == "new"


def test_parents_of_new_folders_are_flushed(tmp_path: Path, operations: Operations) -> None:
    (tmp_path / "a").mkdir()
    make_folder(tmp_path / "a/b/c")
    assert operations() == [("fsync", "a/b"), ("fsync", "a")]
    make_folder(tmp_path / "a/b/c")
    assert operations() == [] and (tmp_path / "a/b/c").is_dir()


@pytest.mark.parametrize("num_paths", [0, 1, 63, 64, 65, 200])
def test_each_path_is_flushed_once(num_paths: int) -> None:
    flushed, lock = list[str](), threading.Lock()

    def flush(path: Path) -> None:
        with lock:
            flushed.append(path.name)

    sync_paths((Path(str(number)) for number in range(num_paths)), flush)
    assert sorted(flushed, key=int) == [str(number) for number in range(num_paths)]


def test_failed_flush_is_raised() -> None:
    def flush(path: Path) -> None:
        if path.name == "3":
            raise OSError(errno.EIO, "bad drive", str(path))

    with pytest.raises(OSError, match="bad drive"):
        sync_paths([Path(str(number)) for number in range(6)], flush)


def test_overlapping_folders_are_listed(tmp_path: Path) -> None:
    for name in ("a", "ab", "c"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a/deep")
    names = ("a", "ab", "a/deep", "c", "a/../c", "link", "a/deep/x", ".")
    assert list(folder_clashes([tmp_path / name for name in names])) == [
        (2, 0, "lies inside"),
        (4, 3, "is the same folder as"),
        (5, 0, "lies inside"),
        (5, 2, "is the same folder as"),
        (6, 0, "lies inside"),
        (6, 2, "lies inside"),
        (6, 5, "lies inside"),
        *((7, index, "contains") for index in range(7)),
    ]
    assert list(folder_clashes([tmp_path / "a", tmp_path / "ab", tmp_path / "c"])) == []


def test_documents_are_regular_files_of_limited_size(tmp_path: Path) -> None:
    path = tmp_path / "document"
    path.write_bytes(b"12345")
    assert read_document_file(path) == read_document_file(path, 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 B") as caught:
        read_document_file(path, 4)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    path.write_bytes(b"")
    assert read_document_file(path, 0) == b""
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(OSError, match="not a regular file") as caught:
            read_document_file(tmp_path / name)
        assert caught.value.errno == errno.EINVAL
    with pytest.raises(FileNotFoundError):
        read_document_file(tmp_path / "missing")
    with pytest.raises(OSError, match="more than 10 B"):
        read_document_file(Path("/proc/self/status"), 10)  # Its size in the file system is 0.
    assert read_document_file(Path("/proc/self/comm"), 16).endswith(b"\n")


def test_errors_in_an_open_file_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    with pytest.raises(OSError, match="Input/output error") as caught, opened(path, os.O_RDONLY) as fd:
        raise OSError(errno.EIO, "Input/output error")
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(path))
    with pytest.raises(OSError, match="other") as caught, opened(path, os.O_RDONLY):
        raise OSError(errno.EIO, "Input/output error", "other")
    assert caught.value.filename == "other"
    with pytest.raises(GenerationError, match="unchanged"), opened(path, os.O_RDONLY) as fd:
        raise GenerationError("unchanged")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_reads_stop_at_the_end_of_a_file(tmp_path: Path) -> None:
    contents = bytes(range(256)) * 40  # two and a half pages
    (tmp_path / "file").write_bytes(contents)
    fd = os.open(tmp_path / "file", os.O_RDWR)
    try:
        for size, offset, count in (
            (4096, 0, 4096),
            (8192, 4096, 6144),
            (16384, 0, 10240),
            (4096, 12288, 0),
            (0, 0, 0),
        ):
            buffer = bytearray(b"\xee" * size)
            assert read_all(fd, memoryview(buffer), offset) == count
            assert buffer == contents[offset : offset + count] + b"\xee" * (size - count)
        write_all(fd, memoryview(b"new"), 5000)
    finally:
        os.close(fd)
    assert (tmp_path / "file").read_bytes() == contents[:5000] + b"new" + contents[5003:]


def test_pieces_cover_a_block() -> None:
    size = 16 * MiB
    assert [list(pieces(nbytes)) for nbytes in (0, 1, size, 2 * size + 5)] == [
        [],
        [(0, 1)],
        [(0, size)],
        [(0, size), (size, 2 * size), (2 * size, 2 * size + 5)],
    ]
    assert checksum(b"ab", b"", b"cd") == checksum(b"abcd") != checksum(b"cd", b"ab")
