from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tiered import KiB, MiB
from tiered.durable.arrays import read_range, write_range
from tiered.file_io import Digest, checksum, opened
from tiered.tiers.ram import HostSlab

SIZES = [1, 4095, 4096, 4097, 70_000, 4 * MiB, 4 * MiB + 1, 9 * MiB + 4096 + 17]


def memory(nbytes: int, *, aligned: bool) -> torch.Tensor:
    """Return host memory with or without O_DIRECT alignment."""
    slab = HostSlab(nbytes + 4096).tensor
    return slab[:nbytes] if aligned else slab[64 : 64 + nbytes]


def round_trip(path: Path, nbytes: int, *, aligned: bool) -> None:
    data = memory(nbytes, aligned=aligned)
    data.copy_(torch.arange(nbytes).mul_(7).remainder_(251).to(torch.uint8))
    with opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
        assert write_range(fd, 8192, data) == checksum(data.numpy().data)
    padding = -nbytes % 4096
    assert path.read_bytes() == bytes(8192) + bytes(data.numpy().data) + bytes(padding)
    out = memory(nbytes, aligned=not aligned).zero_()
    for into in (out, data.clone().zero_(), None):
        found = Digest()
        with opened(path, os.O_RDONLY) as fd:
            assert read_range(fd, 8192, nbytes, into, found) == nbytes
        assert found.hexdigest() == checksum(data.numpy().data)
        assert into is None or torch.equal(into, data)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("nbytes", SIZES)
def test_direct_io_round_trips_any_size_and_alignment(nbytes: int, aligned: bool, tmp_path: Path) -> None:
    round_trip(tmp_path / "file", nbytes, aligned=aligned)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("where", ["open", "pwritev", "preadv"])
def test_file_systems_without_o_direct_fall_back_to_buffered(
    where: str, aligned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems refuse O_DIRECT when a file is opened, others when it is read or written."""
    real_open, refused = os.open, []

    def open_refused(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if where == "open" and flags & os.O_DIRECT:
            refused.append(path)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *rest, **options)

    def refuse_direct(name: str) -> None:
        real = getattr(os, name)

        def refusing(fd: int, *rest: Any) -> Any:
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                refused.append(fd)
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(fd, *rest)

        monkeypatch.setattr(os, name, refusing)

    monkeypatch.setattr(os, "open", open_refused)
    if where != "open":
        refuse_direct(where)
    round_trip(tmp_path / "file", 300 * KiB + 5, aligned=aligned)
    assert refused


def test_io_errors_are_propagated(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), opened(tmp_path / "no", os.O_RDONLY):
        pass
    (tmp_path / "file").write_bytes(bytes(4096))
    with opened(tmp_path / "file", os.O_RDONLY) as fd, pytest.raises(OSError, match="Bad file descriptor"):
        write_range(fd, 0, memory(4096, aligned=True))


@pytest.mark.parametrize("nbytes", [0, 100, 4096, 5000, 70_000])
@pytest.mark.parametrize("aligned", [True, False])
def test_read_of_a_truncated_file_stops_at_its_end(nbytes: int, aligned: bool, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes([5]) * nbytes)
    for into in (memory(80_000, aligned=aligned), None):
        digest = Digest()
        with opened(tmp_path / "file", os.O_RDONLY) as fd:
            assert read_range(fd, 0, 80_000, into, digest) == nbytes
        assert digest.hexdigest() == checksum(bytes([5]) * nbytes)
