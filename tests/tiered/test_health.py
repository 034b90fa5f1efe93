"""Rules for full, slow and worn drives, with their whole messages. The tests control the clock and the errors."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tiered import GiB, KiB, MiB, NvmeTier
from tiered.durable.ownership import StoreIdentity
from tiered.tiers import health
from tiered.tiers.health import FullDrives, PathMeter, PathRates, WearCounter, WearLimitError, count_writes
from tiered.tiers.layout import files_of


def full(number: int = errno.ENOSPC) -> OSError:
    return OSError(number, "the text of the call")


def failing(*errors: OSError) -> Callable[[], str]:
    """Return a function that raises these errors in turn, and then returns a text."""
    left = list(errors)

    def operation() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return operation


def test_paused_writes_notify_once_for_each_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "RETRY_S", 0.001)
    notices: list[str] = []
    drives = FullDrives("pause", notices.append, {"/a": 3 * MiB, "/b": 5}.__getitem__)
    drives.wait("/a", 2 * MiB, full())
    drives.wait("/a", 9 * MiB, full())
    assert drives.is_waiting
    drives.wait("/b", 7, full(errno.EDQUOT))
    drives.mark_writable("/a")
    drives.mark_writable("/a")
    drives.mark_writable("/c")
    assert drives.is_waiting
    assert drives.retry("/b", 6, failing(full(), full())) == "done"
    assert not drives.is_waiting
    assert drives.retry("/b", 6, failing(full())) == "done"
    rest = "there and the run resumes automatically"
    assert notices == [
        f"the drive of '/a' is full (No space left on device): paused, nothing is lost. Free at least 3.00 MiB {rest}",
        f"the drive of '/b' is full (Disk quota exceeded): paused, nothing is lost. Free at least 7 B {rest}",
        "the drive of '/a' has free space again: the run resumes",
        "the drive of '/b' has free space again: the run resumes",
        f"the drive of '/b' is full (No space left on device): paused, nothing is lost. Free at least 6 B {rest}",
        "the drive of '/b' has free space again: the run resumes",
    ]


def test_other_errors_and_other_rules_do_not_wait() -> None:
    notices: list[str] = []
    for rule, error in (("pause", full(errno.EIO)), ("error", full()), ("error", full(errno.EDQUOT))):
        drives = FullDrives(rule, notices.append)  # type: ignore[arg-type]
        with pytest.raises(OSError, match="the text of the call") as caught:
            drives.retry("/a", 5, failing(error))
        assert caught.value is error and not drives.is_waiting and notices == []


def test_no_write_waits_after_giving_up() -> None:
    notices: list[str] = []
    drives = FullDrives("pause", notices.append)
    drives.give_up()
    with pytest.raises(OSError, match="the text of the call"):
        drives.retry("/a", 5, failing(full()))
    assert len(notices) == 1, "the event is set, so the wait ends at once"


def test_rates_of_reads_and_writes_are_exact() -> None:
    now_s, news = [50.0], list[str]()
    meter = PathMeter(window_bytes=400, clock_s=lambda: now_s[0])
    assert meter.rates() == PathRates(0.0, 0.0, 0.0, 0.0)

    def move(nbytes: int, seconds: float, *, is_write: bool) -> None:
        with meter.measure(nbytes, is_write=is_write, on_slow=news.append):
            now_s[0] += seconds
        now_s[0] += 1000  # idle

    move(300, 2, is_write=False)
    assert meter.rates() == PathRates(150.0, 0.0, 0.0, 0.0)
    move(100, 6, is_write=True)
    assert meter.rates() == PathRates(150.0, 100 / 6, 50.0, 50.0)
    move(800, 2, is_write=True)
    assert meter.rates() == PathRates(150.0, 112.5, 400.0, 225.0)
    for _ in range(2):
        move(400, 1, is_write=False)
    assert meter.rates() == PathRates(1100 / 4, 112.5, 400.0, 400.0)
    move(400, 3, is_write=False)  # exactly a third of the usual rate
    assert meter.rates() == PathRates(1500 / 7, 112.5, 400 / 3, 400.0)
    move(400, 4, is_write=False)
    assert (news, meter.rates()) == ([], PathRates(1900 / 11, 112.5, 100.0, 400.0))
    move(500, 5, is_write=False)
    assert news == ["100 B/s over the last 500 B, usually 400 B/s"]
    move(400, 4, is_write=False)
    assert len(news) == 1
    move(400, 1, is_write=False)
    for _ in range(2):
        move(400, 4, is_write=False)
    assert news[1:] == ["100 B/s over the last 400 B, usually 400 B/s"]


def test_write_counts_are_saved_ahead_of_the_writes(tmp_path: Path) -> None:
    def saved() -> dict[str, int]:
        document: dict[str, int] = json.loads((tmp_path / "WEAR.json").read_text())
        return document

    counter = WearCounter(tmp_path, ahead_bytes=100)
    assert counter.written_bytes == 0 and not (tmp_path / "WEAR.json").exists()
    counter.close()
    assert not (tmp_path / "WEAR.json").exists()
    found = []
    for nbytes in (30, 100, 1, 0, 200):
        counter.add(nbytes)
        found.append((counter.written_bytes, saved()["written_bytes"]))
    assert found == [(30, 130), (130, 130), (131, 231), (131, 231), (331, 431)]
    counter.close()
    assert saved() == {"format": 1, "written_bytes": 331}
    assert WearCounter(tmp_path).written_bytes == 331
    WearCounter(tmp_path).add(1)
    assert saved()["written_bytes"] == 332 + GiB


def test_write_beyond_any_limit_counts_nowhere(tmp_path: Path) -> None:
    counters = []
    for name, limit in (("a", 1000), ("b", None), ("c", 5000)):
        (tmp_path / name).mkdir()
        counters.append(WearCounter(tmp_path / name, limit))
    count_writes(counters, {0: 400, 1: 10**9, 2: 4000})
    with pytest.raises(WearLimitError) as caught:
        count_writes(counters, {0: 500, 1: 7, 2: 1001})
    assert [counter.written_bytes for counter in counters] == [400, 10**9, 4000]
    path, error = tmp_path / "c", caught.value
    assert (error.path, error.limit_bytes, error.written_bytes, error.need_bytes) == (str(path), 5000, 4000, 1001)
    assert str(error) == (
        f"'{path}' has a lifetime limit of 5000 bytes written (4.88 KiB, max_written), and 4000 (3.91 KiB) are used: "
        "1001 B more would exceed it. Nothing was written. Raise max_written of this path, or name a path on another "
        "drive; WEAR.json in the path has the count"
    )
    count_writes(counters, {0: 600, 2: 1000})
    assert [counter.written_bytes for counter in counters] == [1000, 10**9, 5000]


def test_pause_asks_for_the_space_of_all_planned_files(tmp_path: Path) -> None:
    """The tier needs its slots, its share of the reservation, and documents of snapshots, minus the existing files."""
    page = 4096
    tier = NvmeTier([tmp_path / "a", tmp_path / "b"], MiB, rates=[3, 1], chunk_bytes=page)
    for key in ("x", "y"):
        slot = tier.allocate(4 * page, name=key, home=True)
        assert slot is not None
        assert [file.path_index for file in files_of(slot).files].count(0) == 3
    assert [tier._outstanding_bytes(path) for path in tier.paths] == [0, 0], "nothing is reserved for snapshots"
    tier.reserve(16 * page)
    documents = 3 * (2 * 4 * page + 16 * page)  # two snapshots, and one that is being removed
    assert [tier._outstanding_bytes(path) for path in tier.paths] == [12 * page + documents, 4 * page + documents]
    tier.describe(slot, (4 * page,), torch.uint8)
    tier.snapshots.mark("1", StoreIdentity("0" * 32, tmp_path))
    tier.snapshots.take(slot, "1")
    tier.snapshots.replace_if_linked(files_of(slot).files[0])
    assert tier._outstanding_bytes(tier.paths[files_of(slot).files[0].path_index]) == 11 * page + documents
    tier.reserve(-16 * page)
    tier.close()


def test_notices_with_the_same_key_are_shown_once(tmp_path: Path) -> None:
    notices: list[str] = []
    tier = NvmeTier([tmp_path / "a", tmp_path / "b"], 64 * KiB, name="drives", on_notice=notices.append)
    for _ in range(2):
        tier.notice("always")
        tier.notice("once", key="k")
        tier.stop_direct_io()
    tier.notice("again", key="k")
    tier.notice("other", key="l")
    buffered = (
        f"a file system of tier 'drives' ({tmp_path / 'a'}, {tmp_path / 'b'}) does not support O_DIRECT, so files use "
        "the kernel's cache, which is slower and takes memory"
    )
    assert notices == ["always", "once", buffered, "always", "other"]
    assert (tier.io_path, tier.is_direct) == ("posix-buffered", False)
    tier.count_written(1, 30)
    tier.count_written(0, 4)
    tier.count_written(1, 5)
    assert tier.bytes_written_by_path() == {str(tmp_path / "a"): 4, str(tmp_path / "b"): 35}
    tier.close()
