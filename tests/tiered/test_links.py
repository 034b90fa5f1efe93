"""Counters and errors of links that move bytes on threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tiered import GpuTier, LeaseError, MiB, NvmeTier, RamTier, TransferError
from tiered.ext import LinkUsage, Slot, ThreadedLink
from tiered.links import base
from tiered.links.base import HostLink, Meter
from tiered.links.route import default_links, direct_links


def test_meter_counts_moved_bytes_and_busy_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overlapping transfers count their time once. A failed transfer takes time and moves nothing."""
    now_s = [10.0]
    monkeypatch.setattr(base.time, "perf_counter", lambda: now_s[0])
    meter = Meter()
    found = [meter.usage("none")]
    meter.start(300)
    now_s[0] += 1
    meter.start(50)
    found.append(meter.usage("two"))
    now_s[0] += 2
    meter.end(300, moved=True)
    now_s[0] += 4
    found.append(meter.usage("one"))
    meter.end(50, moved=False)
    now_s[0] += 100
    found.append(meter.usage("idle"))
    meter.start(7)
    now_s[0] += 8
    meter.end(7, moved=True)
    found.append(meter.usage("end"))
    assert found == [
        LinkUsage(0, 0.0, 0, 0, "none"),
        LinkUsage(0, 1.0, 350, 0, "two"),
        LinkUsage(300, 7.0, 50, 1, "one"),
        LinkUsage(300, 7.0, 0, 1, "idle"),
        LinkUsage(307, 15.0, 0, 2, "end"),
    ]
    assert [usage.rate_bytes_per_s for usage in found[:2]] == [0.0, 0.0]
    assert found[4].rate_bytes_per_s == 307 / 15


@pytest.mark.parametrize(
    ("raised", "text", "number"),
    [
        (OSError(5, "bad drive"), "copy of 40 bytes failed: [Errno 5] bad drive [a->b]", 5),
        (ValueError("odd"), "copy of 40 bytes failed: odd [a->b]", None),
        (LeaseError("as it is"), "as it is", None),
    ],
)
def test_failed_move_ends_its_transfer(raised: Exception, text: str, number: int | None) -> None:
    moved: list[tuple[object, object, int]] = []

    def move(source: Slot, target: Slot, nbytes: int) -> None:
        moved.append((source.resource, target.resource, nbytes))
        if nbytes == 40:
            raise raised

    link = ThreadedLink("a", "b", move, path="test")
    slots = Slot("a", 64, 64, "source"), Slot("b", 64, 64, "target")
    link.submit(*slots, 30).wait(60)
    transfer = link.submit(*slots, 40)
    with pytest.raises(type(raised) if isinstance(raised, LeaseError) else TransferError) as caught:
        transfer.wait(60)
    assert str(caught.value) == text and getattr(caught.value, "errno", None) == number
    assert caught.value is raised or caught.value.__cause__ is raised
    assert (transfer.src, transfer.dst, transfer.nbytes, transfer.path) == ("a", "b", 40, "test")
    assert moved == [("source", "target", 30), ("source", "target", 40)]
    usage = link.usage()
    assert (usage.num_bytes, usage.inflight_bytes, usage.num_transfers, usage.path) == (30, 0, 1, "test")
    link.close()


def test_threads_start_with_the_first_transfers_and_stop_on_close() -> None:
    def names() -> list[str]:
        return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("tiered-fast-slow"))

    gate, num_running = threading.Event(), threading.Semaphore(0)

    def move(*_: Any) -> None:
        num_running.release()
        gate.wait(60)

    link, slot = ThreadedLink("fast", "slow", move, path="test", num_threads=3), Slot("fast", 1, 1, None)
    assert names() == []
    transfers = [link.submit(slot, slot, 1) for _ in range(5)]
    assert all(num_running.acquire(timeout=60) for _ in range(3)), "three jobs at once"
    assert names() == ["tiered-fast-slow-0", "tiered-fast-slow-1", "tiered-fast-slow-2"]
    assert link.usage().inflight_bytes == 5
    assert all(thread.daemon for thread in threading.enumerate() if thread.name in names())
    gate.set()
    link.close()
    for transfer in transfers:
        transfer.wait(0)
    assert names() == []
    link.close()


def test_host_link_copies_only_the_first_bytes() -> None:
    fast, slow = RamTier(MiB, name="fast", pin_memory=False), RamTier(MiB, name="slow", pin_memory=False)
    source = fast.allocate(9000, name="block", home=True)
    target = slow.allocate(9000, name="block", home=False)
    assert source is not None and target is not None
    fast.tensor(source, (9000,), torch.uint8).copy_(torch.arange(9000).to(torch.uint8))
    contents = slow.tensor(target, (9000,), torch.uint8).fill_(7)
    link = HostLink(fast, slow)
    link.submit(source, target, 5000).wait(60)
    assert torch.equal(contents[:5000], torch.arange(5000).to(torch.uint8)) and bool((contents[5000:] == 7).all())
    link.close()


def test_unlinkable_tiers_are_named(tmp_path: Any) -> None:
    ram, nvme = RamTier(MiB, pin_memory=False), NvmeTier([tmp_path], MiB)
    with pytest.raises(ValueError) as caught:
        HostLink(ram, nvme)
    assert str(caught.value) == "a host link needs tiers in host memory; tier 'nvme' is on None"
    with pytest.raises(ValueError) as caught:
        default_links([nvme, ram])
    assert str(caught.value) == (
        "no link connects tier 'ram' (RamTier) with a faster tier, such as 'nvme' (NvmeTier): put a RamTier between "
        "them, list tiers from fast to slow, or pass custom links"
    )
    gpu = GpuTier(MiB, device="cpu")
    (read, _) = (link for link in default_links([ram, nvme]) if "nvme" in (link.src, link.dst))
    with pytest.raises(ValueError) as caught:
        direct_links(gpu, nvme, read.engine)  # type: ignore[attr-defined]
    assert str(caught.value) == (
        "tier 'nvme' cannot read files directly into tier 'gpu', whose slots are multiples of 512 bytes: create it "
        "with alignment_bytes=4096"
    )
    names = [(link.src, link.dst, link.path) for link in default_links([gpu, ram, nvme])]
    assert names == [
        ("ram", "gpu", "host"),
        ("gpu", "ram", "host"),
        ("nvme", "ram", "posix-direct"),
        ("ram", "nvme", "posix-direct"),
    ]
    nvme.close()
