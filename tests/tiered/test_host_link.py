from __future__ import annotations

import functools
import threading

import pytest
import torch

from tiered.errors import TransferError
from tiered.links.base import Link
from tiered.links.host import HostLink
from tiered.links.workers import Workers
from tiered.tiers.base import Slot
from tiered.tiers.ram import RamTier
from tiered.units import MiB


def slot_of(tier: RamTier, nbytes: int) -> Slot:
    slot = tier.allocate(nbytes, name="block", home=False)
    assert slot is not None
    return slot


def test_copies_exactly_the_contents_and_counts_them() -> None:
    fast, slow = RamTier(MiB, name="fast"), RamTier(MiB, name="slow")
    link = HostLink(slow, fast)
    assert isinstance(link, Link)
    source, target = slot_of(slow, 10_000), slot_of(fast, 10_000)
    slow.tensor(source, (10_000,), torch.uint8).copy_(torch.arange(10_000) % 251)
    link.submit(source, target, 10_000).wait(10)
    assert torch.equal(fast.tensor(target, (10_000,), torch.uint8), slow.tensor(source, (10_000,), torch.uint8))
    usage = link.usage()
    assert (usage.num_bytes, usage.num_transfers, usage.inflight_bytes, usage.path) == (10_000, 1, 0, "host")
    assert usage.busy_s > 0
    link.close()
    link.close()


def test_empty_copy_finishes() -> None:
    fast, slow = RamTier(MiB, name="fast"), RamTier(MiB, name="slow")
    link = HostLink(slow, fast)
    transfer = link.submit(slot_of(slow, 0), slot_of(fast, 0), 0)
    transfer.wait(10)
    assert transfer.done()
    link.close()


def test_failure_ends_the_transfer_with_the_error() -> None:
    fast, slow = RamTier(MiB, name="fast"), RamTier(MiB, name="slow")
    link = HostLink(slow, fast)
    transfer = link.submit(slot_of(slow, 100), slot_of(fast, 100), 5000)
    with pytest.raises(TransferError, match="slow->fast"):
        transfer.wait(10)
    assert link.usage().num_bytes == 0 and link.usage().inflight_bytes == 0
    link.close()


def test_workers_run_urgent_jobs_first_and_drain_on_close() -> None:
    workers = Workers(1, "test")
    gate = threading.Event()
    ran: list[tuple[str, int]] = []

    def block() -> None:
        gate.wait()

    workers.submit(block)
    for number in range(3):
        workers.submit(functools.partial(ran.append, ("write", number)), urgent=False)
        workers.submit(functools.partial(ran.append, ("read", number)))
    gate.set()
    workers.close()
    assert ran == [("read", 0), ("read", 1), ("read", 2), ("write", 0), ("write", 1), ("write", 2)]


def test_urgent_jobs_leave_a_thread_to_those_that_wait() -> None:
    workers = Workers(3, "test", num_patient=1)
    gate, patient_ran, num_holding = threading.Event(), threading.Event(), threading.Semaphore(0)

    def hold() -> None:
        num_holding.release()
        gate.wait(60)

    for _ in range(2):
        workers.submit(hold)
    assert num_holding.acquire(timeout=60) and num_holding.acquire(timeout=60)
    with workers._changed:  # the third thread looks only when both jobs are queued
        workers.submit(hold)
        workers.submit(patient_ran.set, urgent=False)
    assert patient_ran.wait(60), "two urgent jobs run: the third thread is for the patient one"
    gate.set()
    workers.close()


def test_a_raising_job_is_reported_and_costs_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: reported.append(args.exc_type))
    workers, ran = Workers(1, "test"), threading.Event()

    def fail() -> None:
        raise ValueError("job")

    workers.submit(fail)
    workers.submit(ran.set)
    workers.close()
    assert ran.is_set()
    assert reported == [ValueError]
