from __future__ import annotations

import signal
import threading
import time
from functools import partial

import pytest

from megatrain.optim import threads as kernel_threads
from megatrain.optim.threads import KernelThreads, cut, elements_per_call, group_calls, num_update_threads


def test_ranges_are_consecutive_and_complete() -> None:
    assert list(cut(5, 25, elements=8)) == [(5, 13), (13, 21), (21, 25)]
    assert list(cut(5, 5)) == []


def test_calls_are_grouped_in_order_and_completely() -> None:
    assert group_calls([3, 3, 3, 9, 1], max_elements=9) == [(0, 3), (3, 4), (4, 5)]
    assert group_calls([0, 0], max_elements=1) == [(0, 2)]
    assert group_calls([], max_elements=1) == []
    for num_threads in (1, 2, 7):
        for num_elements in (0, 1, 10**5, 10**7, 10**9):
            assert elements_per_call(num_elements, num_threads) >= 1
    sizes = ((10**9, 1), (10**9, 2), (8 * 100_000 + 1, 2), (12 * 100_000, 3), (8 << 16, 2), (0, 1))
    assert [elements_per_call(*each) for each in sizes] == [10**9, 1 << 20, 100_001, 100_000, 1 << 16, 1]


@pytest.mark.parametrize(("num_cores", "with_gpu"), [(1, 1), (2, 1), (3, 1), (4, 2), (16, 14)])
def test_two_cores_stay_free_next_to_a_gpu(num_cores: int, with_gpu: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_threads, "default_num_threads", lambda: num_cores)
    assert num_update_threads("cuda") == with_gpu
    assert num_update_threads("cpu") == num_cores


def test_one_thread_computes_on_the_caller() -> None:
    names: list[str] = []
    KernelThreads(1).run([lambda: names.append(threading.current_thread().name)] * 3)
    assert names == [threading.current_thread().name] * 3


def test_every_call_is_made_once() -> None:
    threads, done = KernelThreads(4), []
    threads.run([lambda index=index: done.append(index) for index in range(100)])  # type: ignore[misc]
    threads.close()
    assert sorted(done) == list(range(100))


def test_torch_operation_threads_run_each_call_once() -> None:
    threads, done, makers = KernelThreads(3, is_interleaved=True), list[int](), set[int]()

    def call(index: int) -> None:
        done.append(index)
        makers.add(threading.get_native_id())
        time.sleep(0.001)

    for _ in range(2):
        threads.run([partial(call, index) for index in range(100)])
    assert sorted(done) == sorted([*range(100)] * 2)
    assert 2 <= len(makers) <= 3, "no other threads in the second run"
    threads.close()


@pytest.mark.parametrize("number", [0, 3, 9])
def test_error_on_a_torch_thread_is_raised_after_the_others_end(number: int) -> None:
    threads, done = KernelThreads(2, is_interleaved=True), list[int]()

    def call(index: int) -> None:
        if index == number:
            raise OverflowError(f"call {index}")
        done.append(index)

    with pytest.raises(OverflowError, match=f"call {number}"):
        threads.run([partial(call, index) for index in range(10)])
    assert number not in done
    threads.run([partial(call, 100 + index) for index in range(10)])
    assert {100 + index for index in range(10)} <= set(done)


def test_interrupt_during_torch_operations_is_raised_after_all_calls() -> None:
    """Python prints and drops an exception that a signal raises inside a C callback, so it must not be raised there."""
    threads, num_answered, num_tries = KernelThreads(2, is_interleaved=True), 0, 40
    before = signal.getsignal(signal.SIGINT)
    for number in range(num_tries):
        done = list[int]()
        timer = threading.Timer(1e-4 * number, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        try:
            timer.start()
            while timer.is_alive():
                done.clear()
                threads.run([partial(done.append, 1)] * 8)
            time.sleep(0.1)
        except KeyboardInterrupt:
            num_answered += 1
            assert len(done) in (0, 8)
        timer.join()
        assert signal.getsignal(signal.SIGINT) is before
    assert num_answered == num_tries
    threads.close()


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
