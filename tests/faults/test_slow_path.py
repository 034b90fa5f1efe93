"""If a path slows down, a notice names it and its rates. The tests control the clock."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from tiered import KiB, MiB, NvmeTier, RamTier
from tiered.testing.faults import Fault
from tiered.tiers.health import PathMeter


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def move(meter: PathMeter, clock: Clock, seconds: float, news: list[str], *, is_write: bool = False) -> None:
    with meter.measure(MiB, is_write=is_write, on_slow=news.append):
        clock.now_s += seconds


def test_two_consecutive_slow_windows_are_reported_once() -> None:
    clock, news = Clock(), list[str]()
    meter = PathMeter(window_bytes=4 * MiB, clock_s=clock)
    for number in range(5 * 4):
        move(meter, clock, 0.001, news, is_write=number % 2 == 0)
    assert meter.rates().recent_bytes_per_s == pytest.approx(MiB / 0.001)
    for _ in range(4):  # one slow window may be a coincidence
        move(meter, clock, 0.004, news)
    for _ in range(4):
        move(meter, clock, 0.0025, news)  # slower, but above a third of the usual rate
    for _ in range(4):
        move(meter, clock, 0.004, news)
    assert news == []
    for _ in range(12):
        move(meter, clock, 0.004, news)
    assert news == ["250.00 MiB/s over the last 4.00 MiB, usually 1000.00 MiB/s"], news
    rates = meter.rates()
    assert rates.recent_bytes_per_s == pytest.approx(MiB / 0.004)
    assert rates.usual_bytes_per_s == pytest.approx(MiB / 0.001), "slow windows do not become usual"


def test_a_path_that_was_never_fast_is_not_slow() -> None:
    clock, news = Clock(), list[str]()
    meter = PathMeter(window_bytes=4 * MiB, clock_s=clock)
    for number in range(12):
        move(meter, clock, 0.001 * (1 + number), news)
    assert news == [] and MiB / 0.012 <= meter.rates().usual_bytes_per_s <= MiB / 0.001


def test_concurrent_transfers_count_time_once() -> None:
    clock, news = Clock(), list[str]()
    meter = PathMeter(window_bytes=64 * MiB, clock_s=clock)
    with meter.measure(MiB, is_write=False, on_slow=news.append):
        clock.now_s += 1
        with meter.measure(MiB, is_write=True, on_slow=news.append):
            clock.now_s += 1
    clock.now_s += 100  # nothing in flight: the path is idle, not slow
    with contextlib.suppress(OSError), meter.measure(MiB, is_write=False, on_slow=news.append):
        clock.now_s += 2
        raise OSError("the drive refused")
    rates = meter.rates()
    assert rates.read_bytes_per_s == pytest.approx(MiB / 4), "a part that failed took time and moved nothing"
    assert rates.write_bytes_per_s == pytest.approx(MiB)
    assert rates.recent_bytes_per_s == rates.usual_bytes_per_s == 0.0, "no window is full yet"


def test_notice_names_the_slow_path(tmp_path: Path, faulty_links) -> None:
    clock, notices = Clock(), list[str]()
    tier = NvmeTier([tmp_path / "a", tmp_path / "b"], 8 * MiB, chunk_bytes=64 * KiB, on_notice=notices.append)
    tier.meters = [PathMeter(window_bytes=256 * KiB, clock_s=clock) for _ in tier.paths]
    ram = RamTier(8 * MiB, pin_memory=False)
    read, write, mover = faulty_links(tier, ram, num_threads=1)  # one thread, because all paths share the clock
    mover._sleep = lambda seconds: setattr(clock, "now_s", clock.now_s + seconds)
    mover.faults = [Fault("late", on, latency_s=0.001) for on in ("read", "write")]  # type: ignore[arg-type]
    home, slot = tier.allocate(MiB, name="block", home=True), ram.allocate(MiB, name="block", home=False)
    assert home is not None and slot is not None
    ram.tensor(slot, (MiB,), torch.uint8).fill_(1)
    for _ in range(12):
        write.submit(slot, home, MiB).wait(60)
    assert notices == []
    mover.faults.append(Fault("late", "write", path="/b/", latency_s=0.1))
    for _ in range(12):
        write.submit(slot, home, MiB).wait(60)
    assert len(notices) == 1 and f"path '{tmp_path / 'b'}' has slowed down" in notices[0], notices
    rates = tier.meters[1].rates()
    assert rates.usual_bytes_per_s / 200 < rates.recent_bytes_per_s < rates.usual_bytes_per_s / 3
    for part in (read, write, ram, tier):
        part.close()
