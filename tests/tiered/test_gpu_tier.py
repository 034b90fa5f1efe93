"""GpuTier in host memory, and the default links between tiers. Tests that need a device are in tests/gpu."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from tiered import GpuTier, MiB, NvmeTier, RamTier, Tier
from tiered.links.base import HostLink
from tiered.links.cuda import CudaLink
from tiered.links.files import FileReadLink, FileWriteLink
from tiered.links.route import default_links
from tiered.tiers.gpu import DeviceBuffer, buffer_of


def test_host_memory_has_no_streams() -> None:
    tier = GpuTier(4096, device="cpu")
    slot = tier.allocate(1000, name="block", home=False)
    assert slot is not None and slot.slot_bytes == 1024
    tier.record_use([slot])
    assert tier.current_stream() is None
    tier.free(slot)
    tier.close()


class Event:
    """Stand-in for a device event. The test decides when it completes."""

    def __init__(self) -> None:
        self.is_done = False

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.is_done = True


class Stream:
    def __init__(self) -> None:
        self.waited_for: list[Event] = []

    def wait_event(self, event: Event) -> None:
        self.waited_for.append(event)


def test_buffer_keeps_events_until_they_complete() -> None:
    buffer, first, second, stream = DeviceBuffer(torch.empty(0)), Event(), Event(), Stream()
    buffer.add_event(first, "compute")
    buffer.add_event(second, "copies")
    buffer.order_before(stream)
    assert stream.waited_for == [first, second]
    first.is_done = True
    third, fourth = Event(), Event()
    buffer.add_event(third, "compute")
    assert buffer.pending_events == {"copies": second, "compute": third}
    buffer.add_event(fourth, "copies")
    assert buffer.pending_events == {"copies": fourth, "compute": third}, "the last event of a stream covers its others"
    buffer.wait()
    assert fourth.is_done and third.is_done and buffer.pending_events == {}


def test_events_added_during_a_wait_are_kept() -> None:
    buffer, later, other = DeviceBuffer(torch.empty(0)), Event(), Event()

    class Meanwhile(Event):
        def synchronize(self) -> None:
            super().synchronize()
            buffer.add_event(later, "compute")
            buffer.add_event(other, "copies")

    buffer.add_event(Meanwhile(), "compute")
    buffer.wait()
    assert buffer.pending_events == {"compute": later, "copies": other} and not buffer.is_idle()


def test_a_reused_buffer_keeps_its_pending_work() -> None:
    tier = GpuTier(4096, device="cpu")
    slot = tier.allocate(512, name="a", home=False)
    assert slot is not None
    event = Event()
    buffer_of(slot).add_event(event, "compute")
    tier.free(slot)
    again = tier.allocate(512, name="b", home=False)
    assert again is not None and buffer_of(again).pending_events == {"compute": event}
    tier.free(again)
    assert tier.allocate(4096, name="c", home=False) is not None
    assert event.is_done, "memory is freed only after the work that uses it"


def test_routes_between_neighbours_start_no_thread(tmp_path: Path) -> None:
    num_threads = threading.active_count()
    gpu, ram, nvme = GpuTier(MiB, device="cpu"), RamTier(MiB), NvmeTier([tmp_path], MiB)
    links = default_links([gpu, ram, nvme])
    assert [(link.src, link.dst, type(link)) for link in links] == [
        ("ram", "gpu", HostLink),
        ("gpu", "ram", HostLink),
        ("nvme", "ram", FileReadLink),
        ("ram", "nvme", FileWriteLink),
    ]
    assert [type(link) for link in default_links([GpuTier(MiB), ram])] == [CudaLink, CudaLink]
    assert [type(link) for link in default_links([RamTier(MiB, name="hot"), ram])] == [HostLink, HostLink]
    assert default_links([ram]) == []
    assert threading.active_count() == num_threads
    assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    for link in links:
        link.close()
    nvme.close()


def test_tiers_without_a_link_between_them_are_refused(tmp_path: Path) -> None:
    nvme = NvmeTier([tmp_path], MiB)
    refused: list[list[Tier]] = [
        [GpuTier(MiB, device="cpu"), nvme],
        [nvme, RamTier(MiB)],
        [GpuTier(MiB), nvme],
    ]
    for tiers in refused:
        with pytest.raises(ValueError, match="put a RamTier between"):
            default_links(tiers)
    with pytest.raises(ValueError, match="CUDA device"):
        CudaLink(RamTier(MiB, name="a"), RamTier(MiB, name="b"))
    with pytest.raises(ValueError, match="host memory"):
        HostLink(RamTier(MiB), GpuTier(MiB))
    nvme.close()


def test_three_tiers_on_one_machine_move_bytes_up_and_down(tmp_path: Path) -> None:
    gpu, ram, nvme = GpuTier(MiB, device="cpu"), RamTier(MiB), NvmeTier([tmp_path], MiB)
    links = {(link.src, link.dst): link for link in default_links([gpu, ram, nvme])}
    slots = [tier.allocate(10_000, name="block", home=tier is nvme) for tier in (gpu, ram, nvme)]
    top, middle, bottom = slots
    assert top is not None and middle is not None and bottom is not None
    contents = (torch.arange(10_000) % 249).to(torch.uint8)
    gpu.tensor(top, (10_000,), torch.uint8).copy_(contents)
    links["gpu", "ram"].submit(top, middle, 10_000).wait(30)
    links["ram", "nvme"].submit(middle, bottom, 10_000).wait(30)
    for tier, slot in ((gpu, top), (ram, middle)):
        tier.tensor(slot, (10_000,), torch.uint8).zero_()
    links["nvme", "ram"].submit(bottom, middle, 10_000).wait(30)
    links["ram", "gpu"].submit(middle, top, 10_000).wait(30)
    assert torch.equal(gpu.tensor(top, (10_000,), torch.uint8), contents)
    for link in links.values():
        link.close()
    nvme.close()
