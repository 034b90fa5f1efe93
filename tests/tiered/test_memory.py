from __future__ import annotations

import errno
import gc
import mmap
import random
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tiered import MiB, RamTier
from tiered.errors import CapacityError
from tiered.tiers import ram as slab_module
from tiered.tiers.base import Ledger, Slot
from tiered.tiers.pool import SlabPool
from tiered.tiers.ram import HostSlab, SparePages, huge_pages_allowed


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def is_mapped(address: int) -> bool:
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in ranges)


@pytest.mark.parametrize("nbytes", [1, 4096, 5000, MiB, 2 * MiB, 3 * MiB + 1])
def test_slab_is_rounded_aligned_zeroed_and_writable(nbytes: int) -> None:
    slab = HostSlab(nbytes)
    assert slab.nbytes == -(-nbytes // 4096) * 4096
    assert slab.tensor.numel() == slab.nbytes
    assert slab.address % (2 * MiB if nbytes >= 2 * MiB else 4096) == 0
    assert slab.has_huge_pages == (nbytes >= 2 * MiB and huge_pages_allowed())
    assert int(slab.tensor.sum()) == 0
    slab.tensor.fill_(7)
    assert bytes(slab.view(slab.nbytes - 4, slab.nbytes)) == b"\7\7\7\7"
    slab.close()
    slab.close()


def test_slab_memory_is_resident_from_the_start_and_gone_after_close() -> None:
    before = resident_bytes()
    slab = HostSlab(64 * MiB)
    assert resident_bytes() - before >= 60 * MiB
    slab.close()
    assert resident_bytes() - before <= 8 * MiB


def test_a_live_tensor_keeps_the_memory_mapped() -> None:
    slab = HostSlab(4 * MiB)
    tensor = slab.tensor.view(torch.float32)
    tensor.fill_(2.0)
    slab.close()
    gc.collect()
    assert float(tensor.sum()) == 2.0 * MiB
    with pytest.raises(AssertionError, match="after close"):
        _ = slab.tensor


def test_kernel_without_populate_falls_back_to_touching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_module, "_advise", lambda address, nbytes, advice: errno.EINVAL)
    before = resident_bytes()
    slab = HostSlab(16 * MiB)
    assert not slab.has_huge_pages
    assert 15 * MiB <= resident_bytes() - before <= 20 * MiB
    slab.close()


@pytest.mark.parametrize("has_populate", [True, False])
def test_several_threads_make_a_large_slab_resident(has_populate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    advise, asked, threads = slab_module._advise, [], set()
    both_are_there = threading.Barrier(2, timeout=30)

    def watched(address: int, nbytes: int, advice: int) -> int:
        if advice != slab_module._MADV_POPULATE_WRITE:
            return advise(address, nbytes, advice)
        if threading.current_thread() not in threads:
            threads.add(threading.current_thread())
            both_are_there.wait()
        asked.append((address, nbytes))
        return advise(address, nbytes, advice) if has_populate else errno.EINVAL

    monkeypatch.setattr(slab_module, "_advise", watched)
    monkeypatch.setattr(slab_module, "_POPULATE_BYTES", 4 * MiB)
    monkeypatch.setattr(slab_module.os, "sched_getaffinity", lambda process: {0, 1})
    before = resident_bytes()
    slab = HostSlab(17 * MiB + 4096)
    assert 16 * MiB <= resident_bytes() - before <= 22 * MiB and len(threads) == 2
    ends = [slab.address, *(address + nbytes for address, nbytes in sorted(asked))]
    assert [address for address, _ in sorted(asked)] == ends[:-1] and ends[-1] == slab.address + slab.nbytes
    slab.close()


def test_partial_out_of_memory_raises_os_error(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[int] = []

    def advise(address: int, nbytes: int, advice: int) -> int:
        if advice == slab_module._MADV_POPULATE_WRITE and address not in parts:
            parts.append(address)
        return errno.ENOMEM if address in parts[1:2] else 0

    monkeypatch.setattr(slab_module, "_GROWTH_S", 0.0)
    monkeypatch.setattr(slab_module, "_advise", advise)
    monkeypatch.setattr(slab_module, "_POPULATE_BYTES", 4 * MiB)
    with pytest.raises(OSError, match="memory"):
        HostSlab(16 * MiB)


def test_out_of_memory_raises_os_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_module, "_advise", lambda address, nbytes, advice: errno.ENOMEM)
    with pytest.raises(OSError, match="memory"):
        HostSlab(4096)


def test_page_locking_without_a_device_gives_unpinned_memory() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a device")
    assert not HostSlab(4096, pin=True).is_pinned


def test_page_lock_ends_before_the_memory_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: set[int] = set()

    def register(address: int, nbytes: int) -> bool:
        locked.add(address)
        return True

    def unregister(address: int) -> None:
        if is_mapped(address):
            locked.remove(address)

    monkeypatch.setattr(slab_module, "_register", register)
    monkeypatch.setattr(slab_module, "_unregister", unregister)
    slab = HostSlab(4096, pin=True)
    assert slab.is_pinned and locked == {slab.address}
    slab.close()
    assert not slab.is_pinned and not locked
    forgotten = HostSlab(4096, pin=True)
    assert locked == {forgotten.address}
    del forgotten
    gc.collect()
    assert not locked, "an unclosed slab must not stay registered"


class Recorder:
    """Factory for numbered buffers. It tracks the bytes of all live buffers."""

    def __init__(self) -> None:
        self.alive: dict[int, int] = {}
        self.max_bytes = 0
        self.num_made = 0
        self.lock = threading.Lock()

    def make(self, nbytes: int) -> int:
        with self.lock:
            self.num_made += 1
            self.alive[self.num_made] = nbytes
            self.max_bytes = max(self.max_bytes, sum(self.alive.values()))
            return self.num_made

    def drop(self, buffer: int) -> None:
        with self.lock:
            del self.alive[buffer]


def test_pool_reuses_same_size_and_drops_before_making() -> None:
    recorder = Recorder()
    pool = SlabPool(ledger := Ledger("pool", 100), recorder.make, recorder.drop)
    first = pool.take(60)
    assert first == 1
    assert pool.take(60) is None
    pool.give(60, first)
    assert ledger.used_bytes == 0 and pool.pooled_bytes == 60
    assert pool.take(60) == 1
    pool.give(60, first)
    assert pool.take(50) == 2
    assert recorder.max_bytes == 60
    assert ledger.usage().high_water_bytes == 60
    pool.close()
    pool.give(50, 2)
    assert not recorder.alive


def test_pool_drops_the_largest_first() -> None:
    recorder = Recorder()
    pool = SlabPool(Ledger("pool", 100), recorder.make, recorder.drop)
    buffers = {size: pool.take(size) for size in (10, 50, 30)}
    for size, buffer in buffers.items():
        assert buffer is not None
        pool.give(size, buffer)
    pool.take(40)
    assert sorted(recorder.alive.values()) == [10, 30, 40]


def test_pool_reservations_share_the_ledger() -> None:
    recorder = Recorder()
    pool = SlabPool(ledger := Ledger("pool", 100), recorder.make, recorder.drop)
    buffer = pool.take(40)
    assert buffer is not None
    pool.give(40, buffer)
    pool.reserve(80)
    assert not recorder.alive, "a pooled buffer must be freed for a reservation"
    with pytest.raises(CapacityError):
        pool.reserve(21)
    assert pool.take(30) is None
    pool.reserve(-80)
    with pytest.raises(AssertionError):
        pool.reserve(-1)
    assert ledger.used_bytes == 0 and ledger.usage().high_water_bytes == 80


def test_failed_allocation_leaves_the_ledger_unchanged() -> None:
    def fail(nbytes: int) -> int:
        raise OSError(errno.ENOMEM, "no memory")

    pool: SlabPool[int] = SlabPool(ledger := Ledger("pool", 100), fail, lambda buffer: None)
    with pytest.raises(OSError, match="no memory"):
        pool.take(10)
    assert ledger.used_bytes == 0


def test_pool_never_exceeds_capacity_under_threads() -> None:
    recorder = Recorder()
    pool = SlabPool(ledger := Ledger("pool", 1000), recorder.make, recorder.drop)

    def work(seed: int) -> None:
        chance = random.Random(seed)
        held: list[tuple[int, int]] = []
        for _ in range(500):
            size = chance.choice([10, 70, 130, 333])
            buffer = pool.take(size) if chance.random() < 0.6 else None
            if buffer is not None:
                held.append((size, buffer))
            elif held:
                pool.give(*held.pop(chance.randrange(len(held))))
        for item in held:
            pool.give(*item)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert 667 < recorder.max_bytes <= 1000, "333 are refused only if fewer are free"
    assert ledger.used_bytes == 0
    assert sum(recorder.alive.values()) == pool.pooled_bytes


def test_kept_buffers_are_made_at_once_and_dropped_last() -> None:
    recorder = Recorder()
    pool = SlabPool(ledger := Ledger("pool", 100), recorder.make, recorder.drop)
    home = pool.take(10)
    assert home is not None
    pool.keep({10: 3, 40: 1})  # one buffer of 10 bytes is in use
    assert sorted(recorder.alive.values()) == [10, 10, 10, 40] and recorder.num_made == 4
    assert ledger.usage().high_water_bytes == 10, "kept buffers count as free"
    others = [pool.take(15), pool.take(15)]
    for other in others:
        assert other is not None
        pool.give(15, other)
    assert not pool.has(25) and pool.has(40), "no two buffers of 15 are freed for one that is not kept"
    taken = pool.take(25)
    assert taken is not None
    assert sorted(recorder.alive.values()) == [10, 10, 10, 25, 40], "the unrequested ones are freed"
    pool.give(25, taken)
    pool.take(90)
    assert sorted(recorder.alive.values()) == [10, 90], "a buffer that fits the free bytes is given, kept or not"


def test_kept_buffers_are_limited_by_space() -> None:
    recorder = Recorder()
    pool = SlabPool(Ledger("pool", 100), recorder.make, recorder.drop)
    pool.keep({30: 5})
    assert sorted(recorder.alive.values()) == [30, 30, 30]
    pool.reserve(50)
    assert sorted(recorder.alive.values()) == [30]
    assert pool.has(30) and not pool.has(60)


def test_idle_then_longest_returned_buffer_is_reused() -> None:
    busy: set[int] = set()
    recorder = Recorder()
    pool = SlabPool(Ledger("pool", 100), recorder.make, recorder.drop, lambda buffer: buffer not in busy)
    first, second, third = (pool.take(10) for _ in range(3))
    for buffer in (first, second, third):
        assert buffer is not None
        busy.add(buffer)
        pool.give(10, buffer)
    assert pool.take(10) == first
    assert third is not None
    busy.remove(third)
    assert pool.take(10) == third
    assert pool.take(10) == second


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_slab_reuses_the_pages_of_a_closed_one() -> None:
    spare = SparePages(64 * MiB)
    first = HostSlab(5 * MiB, spare_pages=spare)
    first.tensor.fill_(7)
    before = resident_bytes()
    first.close()
    assert spare.nbytes == 4 * MiB and -2 * MiB <= resident_bytes() - before <= -MiB // 2, "the rest is not a huge page"
    second = HostSlab(9 * MiB, spare_pages=spare)
    assert (spare.nbytes, spare.moved_bytes) == (0, 4 * MiB)
    assert 3 * MiB <= resident_bytes() - before <= 5 * MiB
    assert bool((second.tensor[: 4 * MiB] == 7).all()) and not second.tensor[4 * MiB :].any()
    second.tensor.fill_(1)
    second.close()
    before, faults = resident_bytes(), page_faults()
    third = HostSlab(8 * MiB, spare_pages=spare)
    third.tensor.fill_(2)
    assert page_faults() - faults < 64 and -MiB <= resident_bytes() - before <= MiB
    third.close()
    spare.close()
    assert spare.nbytes == 0 and -9 * MiB <= resident_bytes() - before <= -7 * MiB


def test_pages_of_a_live_tensor_are_not_moved() -> None:
    spare = SparePages(64 * MiB)
    slab = HostSlab(4 * MiB, spare_pages=spare)
    tensor, view = slab.tensor.view(torch.float32)[5:], slab.view(0, 4096)
    tensor.fill_(3)
    slab.close()
    del view
    assert spare.nbytes == 0
    other = HostSlab(4 * MiB, spare_pages=spare)
    other.tensor.zero_()
    assert float(tensor.sum()) == 3 * (MiB - 5)


def test_resident_memory_stays_within_the_tier_capacity() -> None:
    draw, tier, reserved = random.Random(0), RamTier(48 * MiB), 0
    held: list[Slot] = []
    before = resident_bytes()
    for _ in range(300):
        if draw.random() < 0.5 and held:
            tier.free(held.pop(draw.randrange(len(held))))
        elif draw.random() < 0.1:
            tier.reserve(-reserved)
            reserved = draw.randrange(min(8 * MiB, tier.usage().free_bytes) + 1)
            tier.reserve(reserved)
        elif slot := tier.allocate(draw.choice([1, 3, 5, 13, 21]) * MiB + 4096, name="block", home=False):
            held.append(slot)
            tier.tensor(slot, (slot.nbytes,), torch.uint8).fill_(1)
        assert 0 <= tier._spare_pages.nbytes <= tier._pool.free_bytes
        assert -MiB <= resident_bytes() - before <= 50 * MiB - reserved
    assert 100 * MiB < tier._spare_pages.moved_bytes < 300 * 21 * MiB
    for slot in held:
        tier.free(slot)
    tier.close()
    assert tier._spare_pages.nbytes == 0 and -MiB <= resident_bytes() - before <= 4 * MiB


def test_reservation_releases_spare_pages() -> None:
    tier = RamTier(16 * MiB)
    slot = tier.allocate(14 * MiB, name="large", home=False)
    assert slot is not None
    tier.free(slot)
    small = tier.allocate(4 * MiB, name="small", home=False)
    assert small is not None and 8 * MiB <= tier._spare_pages.nbytes <= 10 * MiB
    before = resident_bytes()
    tier.reserve(12 * MiB)
    assert tier._spare_pages.nbytes == 0 and -11 * MiB <= resident_bytes() - before <= -8 * MiB


def test_refused_page_move_ends_moves_without_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    tier, calls, move = RamTier(48 * MiB), [0], slab_module._move_pages
    before = resident_bytes()

    def refuse_third(source: int, target: int, nbytes: int) -> bool:
        calls[0] += 1
        return calls[0] != 3 and move(source, target, nbytes)

    monkeypatch.setattr(slab_module, "_move_pages", refuse_third)
    for nbytes in (44 * MiB, 30 * MiB, 40 * MiB):
        slot = tier.allocate(nbytes, name="block", home=False)
        assert slot is not None
        tier.tensor(slot, (nbytes,), torch.uint8).fill_(1)
        assert nbytes - 2 * MiB <= resident_bytes() - before <= nbytes + 2 * MiB
        tier.free(slot)
    assert (calls[0], tier._spare_pages.moved_bytes, tier._spare_pages.nbytes) == (3, 4 * MiB, 0)


def test_no_spare_pages_are_kept_if_pages_cannot_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_module, "_pages_can_move", lambda: False)
    assert not SparePages(MiB).keep(mmap.mmap(-1, 4 * MiB), 0, 4 * MiB)


_FEW_ADDRESSES = """
import resource
from pathlib import Path
from tiered import MiB, RamTier
tier = RamTier(400 * MiB, pin_memory=False)
tier.free(tier.allocate(4 * MiB, name="first", home=False))
(now,) = (int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (now * 1024 + 780 * MiB,) * 2)
for size in (380, 300, 300, 200, 100, 380):
    tier.free(tier.allocate(size * MiB, name="block", home=False))
"""


def test_spare_pages_are_released_if_addresses_are_scarce() -> None:
    subprocess.run([sys.executable, "-c", _FEW_ADDRESSES], check=True, timeout=80)


def test_units_grow_with_the_tier() -> None:
    """Each unit of spare pages may be a separate mapping, and a process can have only 65,530 mappings."""
    spare = SparePages(1 << 40)
    HostSlab(64 * MiB, spare_pages=spare).close()
    assert spare.nbytes == 0
    HostSlab(130 * MiB, spare_pages=spare).close()
    assert spare.nbytes == 128 * MiB
    spare.close()
