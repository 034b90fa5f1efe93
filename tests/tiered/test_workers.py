"""``Workers``, the threads that serve a link."""

from __future__ import annotations

import functools
import threading

import pytest

from tiered.links.base import Workers


def test_workers_run_urgent_jobs_first_and_drain_on_close() -> None:
    workers = Workers(1, "test")
    gate = threading.Event()
    ran: list[tuple[str, int]] = []

    def block() -> None:
        gate.wait(60)

    workers.submit(block)
    for number in range(3):
        workers.submit(functools.partial(ran.append, ("write", number)), urgent=False)
        workers.submit(functools.partial(ran.append, ("read", number)))
    gate.set()
    workers.close()
    assert ran == [("read", 0), ("read", 1), ("read", 2), ("write", 0), ("write", 1), ("write", 2)]


def test_urgent_jobs_leave_a_thread_for_patient_jobs() -> None:
    workers = Workers(3, "test", num_reserved=1)
    gate, patient_ran, num_holding = threading.Event(), threading.Event(), threading.Semaphore(0)

    def hold() -> None:
        num_holding.release()
        gate.wait(60)

    for _ in range(2):
        workers.submit(hold)
    assert num_holding.acquire(timeout=60) and num_holding.acquire(timeout=60)
    with workers._changed:  # the third thread looks for work only after both jobs are queued
        workers.submit(hold)
        workers.submit(patient_ran.set, urgent=False)
    assert patient_ran.wait(60), "two urgent jobs run: the third thread is for the patient one"
    gate.set()
    workers.close()


def test_raising_job_is_reported_and_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
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
