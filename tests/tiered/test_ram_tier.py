from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tiered import MiB, RamTier, TransferError
from tiered.ext import HostSlab, Slot
from tiered.tiers import ram as slab_module


def take(tier: RamTier, nbytes: int) -> Slot:
    slot = tier.allocate(nbytes, name="block", home=False)
    assert slot is not None
    return slot


def test_padding_of_a_reused_slot_is_zero() -> None:
    tier = RamTier(MiB)
    slot = take(tier, 8192)
    tier.tensor(slot, (8192,), torch.uint8).fill_(255)
    tier.free(slot)
    slot = take(tier, 5000)
    assert int(tier.tensor(slot, (8192,), torch.uint8)[5000:].sum()) == 0


def test_out_of_memory_error_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_module, "_GROWTH_S", 0.0)
    monkeypatch.setattr(slab_module, "_advise", lambda address, nbytes, advice: 12)
    tier = RamTier(MiB)
    with pytest.raises(TransferError, match="fewer bytes") as caught:
        tier.allocate(4096, name="layer.0/weight", home=True)
    assert caught.value.errno == 12
    assert tier.usage().used_bytes == 0
    with pytest.raises(TransferError, match="no memory for the buffers of copies"):
        tier.keep_buffers({4096: 2})
    assert tier.usage().used_bytes == 0


def test_slab_creation_and_release_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_module, "_register", lambda address, nbytes: time.sleep(0.01) or True)
    monkeypatch.setattr(slab_module, "_unregister", lambda address: None)
    tier = RamTier(MiB, pin_memory=True)
    begin_s = time.perf_counter()
    first, second = take(tier, 8192), take(tier, 300 * 1024)
    elapsed_s = time.perf_counter() - begin_s
    assert tier.made_bytes == 308 * 1024
    assert 0 < tier.populate_s < elapsed_s - tier.pin_s and 0.02 <= tier.pin_s < elapsed_s
    tier.free(first)
    tier.free(second)
    take(tier, 8192)
    assert (tier.num_drops, tier.made_bytes) == (0, 308 * 1024), "an existing slab is reused"
    take(tier, 900 * 1024)
    assert tier.num_drops == 1, "there was no space next to the unused one"


def test_growing_machine_memory_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, totals = [12, 12, 0], iter([8, 8, 16, 16, 24, 24])
    populated = []

    def advise(address: int, nbytes: int, advice: int) -> int:
        if advice != slab_module._MADV_POPULATE_WRITE:
            return 0
        populated.append(nbytes)
        return answers.pop(0)

    monkeypatch.setattr(slab_module, "_advise", advise)
    monkeypatch.setattr(slab_module, "_managed_ram_kb", lambda: next(totals))
    take(RamTier(MiB), 4096)
    assert populated == [4096] * 3 and not answers


def test_failed_slab_part_stops_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def advise(address: int, nbytes: int, advice: int) -> int:
        if advice == slab_module._MADV_POPULATE_WRITE:
            tried.append(address)
            return 12
        return 0

    monkeypatch.setattr(slab_module, "_advise", advise)
    monkeypatch.setattr(slab_module, "_GROWTH_S", 0.0)
    monkeypatch.setattr(slab_module, "_POPULATE_BYTES", 4096)
    monkeypatch.setattr(slab_module, "_MAX_POPULATE_THREADS", 1)
    with pytest.raises(TransferError, match="fewer bytes"):
        RamTier(MiB).allocate(MiB, name="a", home=True)
    assert len(tried) == 2, "again after the size of memory is read; then no part tries"


def test_slabs_prefer_the_numa_node_of_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    device = tmp_path / "0000:3b:00.0"
    device.mkdir()
    (device / "numa_node").write_text("1\n")
    nodes = tmp_path / "has_memory"
    nodes.write_text("0-1\n")
    monkeypatch.setattr(slab_module, "_PCI_DEVICES", tmp_path)
    monkeypatch.setattr(slab_module, "_NODES_WITH_MEMORY", nodes)
    monkeypatch.setattr(slab_module.torch.cuda, "get_device_properties", lambda device: seen)
    found = slab_module._gpu_node.__wrapped__
    assert found(0) == 1
    (device / "numa_node").write_text("-1\n")
    assert found(0) is None, "the machine does not report it"
    nodes.write_text("0\n")
    assert found(0) is None
    # Node 0 exists on every machine, so the kernel must accept the hint, and for exactly this slab.
    slab = HostSlab(64 * 4096)
    before = policies_of(slab)
    slab_module._prefer_node(slab.address, slab.nbytes, 0)
    assert (before, policies_of(slab)) == (["default"], ["prefer:0"])


def policies_of(slab: HostSlab) -> list[str]:
    """Return the NUMA policy of each mapping that begins in a slab."""
    lines = [line.split() for line in Path("/proc/self/numa_maps").read_text().splitlines()]
    return [words[1] for words in lines if slab.address <= int(words[0], 16) < slab.address + slab.nbytes]


def test_closed_tier_keeps_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_module, "huge_pages_allowed", lambda: True)
    tier = RamTier(16 * MiB, pin_memory=False)
    large, small, used = take(tier, 6 * MiB), take(tier, MiB), take(tier, 4 * MiB)
    assert (tier.huge_page_bytes, tier.made_bytes, tier.num_unpinned_slabs) == (10 * MiB, 11 * MiB, 0)
    tier.free(large)
    tier.free(small)
    assert (tier.huge_page_bytes, tier.num_drops) == (10 * MiB, 0), "kept for reuse"
    take(tier, 8 * MiB)
    assert (tier.huge_page_bytes, tier.num_drops, tier.made_bytes) == (12 * MiB, 1, 19 * MiB)
    tier.close()
    assert tier._spare_pages.nbytes == 0
    tier.free(used)
    assert (tier.huge_page_bytes, tier.num_drops) == (8 * MiB, 3)
    assert tier._spare_pages.nbytes == 0, "a lease that outlives the store also returns its memory"


def test_refused_huge_pages_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_module, "huge_pages_allowed", lambda: False)
    tier = RamTier(16 * MiB, pin_memory=False)
    tier.free(take(tier, 6 * MiB))
    assert tier.huge_page_bytes == 0
    tier.close()
    assert tier.huge_page_bytes == 0
