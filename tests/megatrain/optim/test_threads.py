from __future__ import annotations

import threading

import pytest

from megatrain.optim.threads import KernelThreads, cut


def test_ranges_are_consecutive_and_complete() -> None:
    assert list(cut(5, 25, elements=8)) == [(5, 13), (13, 21), (21, 25)]
    assert list(cut(5, 5)) == []


def test_one_thread_computes_on_the_caller() -> None:
    names: list[str] = []
    KernelThreads(1).run([lambda: names.append(threading.current_thread().name)] * 3)
    assert names == [threading.current_thread().name] * 3


def test_every_call_is_made_once() -> None:
    threads, done = KernelThreads(4), []
    threads.run([lambda index=index: done.append(index) for index in range(100)])  # type: ignore[misc]
    threads.close()
    assert sorted(done) == list(range(100))


def test_calls_run_at_the_same_time() -> None:
    threads, barrier = KernelThreads(2), threading.Barrier(2, timeout=30)
    threads.run([lambda: (barrier.wait(), None)[1], lambda: (barrier.wait(), None)[1]])
    threads.close()
    assert not barrier.broken


@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_error_of_a_call_reaches_the_caller_and_the_threads_stay_usable(num_threads: int) -> None:
    threads, done = KernelThreads(num_threads), []

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        threads.run([fail, lambda: None, fail])
    threads.run([lambda: done.append(1), lambda: done.append(2)])
    threads.close()
    assert sorted(done) == [1, 2]


def test_closed_threads_start_again() -> None:
    threads, done = KernelThreads(2), []
    threads.close()
    threads.run([lambda: done.append(1), lambda: done.append(2)])
    threads.close()
    threads.close()
    assert sorted(done) == [1, 2]
