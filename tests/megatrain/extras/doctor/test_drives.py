"""A drive measurement moves the bytes that it reports, stays within its space, and leaves no files."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

from megatrain.extras.doctor import drives
from megatrain.extras.doctor.drives import DriveEffort, TierProbe, is_rotational, measure_drive
from tiered import MiB

BRIEF = DriveEffort(span_bytes=64 * MiB, turn_s=0.0, mixed_s=0.0)


def size_on_disk(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def test_drive_measurement_stays_within_its_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    read_and_write = TierProbe.read_and_write

    def watched(self: TierProbe, seconds: float) -> float:
        nonlocal most
        most = max(most, size_on_disk(tmp_path))
        return read_and_write(self, seconds)

    monkeypatch.setattr(TierProbe, "read_and_write", watched)
    effort = DriveEffort(64 * MiB, 0.0, 0.0, sustained_s=60.0, sustained_bytes=130 * MiB)
    result = measure_drive(tmp_path, effort)
    assert os.listdir(tmp_path) == []
    assert result.span_bytes == 64 * MiB
    assert 0 < most <= effort.span_bytes + MiB
    rates = [getattr(result.tier, what) for what in ("read", "write", "mixed")]
    assert min(rates) > 0
    assert result.sustained is not None
    assert result.sustained.nbytes == 192 * MiB  # the first whole round past the limit
    assert min(result.sustained.first, result.sustained.last) > 0
    assert result.free_bytes > 0


def test_brief_check_skips_the_long_write(tmp_path: Path) -> None:
    assert measure_drive(tmp_path, BRIEF).sustained is None


@pytest.mark.parametrize("method", ["read", "write", "read_and_write", "sustained_write"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(5, "Input/output error")], ids=["ctrl-c", "eio"])
def test_nothing_is_left_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, error: type[BaseException] | BaseException
) -> None:
    def fail(self: TierProbe, *arguments: object) -> float:
        raise error

    monkeypatch.setattr(TierProbe, method, fail)
    with pytest.raises((KeyboardInterrupt, OSError)):
        measure_drive(tmp_path, DriveEffort(64 * MiB, 0.0, 0.0, sustained_s=1.0, sustained_bytes=MiB))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("rate", "span"), [(40 * MiB, 64), (200 * MiB, 100), (4000 * MiB, 128)])
def test_a_slow_drive_is_measured_with_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: int, span: int
) -> None:
    """The probe uses as much data as the drive writes in half a second, within limits."""
    monkeypatch.setattr(TierProbe, "write", lambda self: float(rate))
    assert measure_drive(tmp_path, DriveEffort(128 * MiB, 0.0, 0.0)).span_bytes // MiB in (span, span // 8 * 8)
    assert os.listdir(tmp_path) == []


def test_measurement_shrinks_with_little_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drives, "check_path", lambda path: 256 * MiB)
    result = measure_drive(tmp_path, DriveEffort(1024 * MiB, 0.0, 0.0))
    assert result.span_bytes == 64 * MiB


def test_the_tier_moves_whole_blocks(tmp_path: Path) -> None:
    with TierProbe(tmp_path / "tier", 64 * MiB) as tier:
        before = tier._store.stats()
        tier.read()
        tier.write()
        tier.read_and_write(0.0)
        moved = tier._store.stats() - before
        assert moved.links["ram->nvme"].num_bytes == 2 * tier.nbytes
        assert 2 * tier.nbytes <= moved.links["nvme->ram"].num_bytes <= 2 * tier.nbytes + 2 * tier.nbytes // 8
        with tier._store.acquire("block0", "ram") as lease:
            assert int(lease.tensor.count_nonzero()) > 0.9 * lease.tensor.numel()


def test_partition_inherits_the_rotation_of_its_disk(tmp_path: Path) -> None:
    disk = tmp_path / "devices" / "sda"
    (disk / "sda1").mkdir(parents=True)
    (disk / "queue").mkdir()
    (disk / "queue" / "rotational").write_text("1\n")
    links = tmp_path / "block"
    links.mkdir()
    (links / "8:0").symlink_to(disk)
    (links / "8:1").symlink_to(disk / "sda1")
    assert is_rotational("8:0", links) is True
    assert is_rotational("8:1", links) is True
    assert is_rotational("0:27", links) is None
    (disk / "queue" / "rotational").write_text("0\n")
    assert is_rotational("8:1", links) is False


def pages(folder: Path) -> list[bytes]:
    """Return the 4 KiB pages of all files in a folder that are large enough to hold block contents."""
    found = [path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size >= MiB]
    return [contents[start : start + 4096] for contents in found for start in range(0, len(contents), 4096)]


def test_benchmark_pages_are_unique_and_incompressible(tmp_path: Path) -> None:
    """Otherwise drives and file systems that compress or deduplicate pages would seem faster than they are."""
    written: list[set[bytes]] = []
    with TierProbe(tmp_path / "tier", 16 * MiB) as tier:
        written.append(set(pages(tmp_path)))
        for write in (tier.write, lambda: tier.read_and_write(0.0), lambda: tier.sustained_write(0.0, 1)):
            write()
            written.append(set(pages(tmp_path)))
            assert len(written[-1]) == 16 * MiB // 4096
    assert len(set().union(*written)) == sum(map(len, written))
    sample = b"".join(sorted(written[0] | written[-1])[:256])
    assert len(zlib.compress(sample)) > 0.98 * len(sample)
