"""A function run with limits on time and memory returns its result, or raises an error that says what went wrong."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

from megatrain.base import limited
from megatrain.base.limited import LimitError, run_limited


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "MAX_CPU_S", 1)
    monkeypatch.setattr(limited, "MAX_EXTRA_BYTES", 256 << 20)


def test_the_result_comes_back_from_another_process() -> None:
    number, text = run_limited(lambda: [os.getpid(), "x" * 300_000])
    assert number != os.getpid() and text == "x" * 300_000


def test_catastrophic_regex_exceeds_the_cpu_time_limit() -> None:
    with pytest.raises(LimitError, match="more than 1 s of processor time"):
        run_limited(lambda: re.fullmatch(r"(([a-z_.0-9]+)+)+!", "model.layers.0.self_attn.q_proj"))


def test_huge_allocation_exceeds_the_memory_limit() -> None:
    with pytest.raises(LimitError, match="more than 256 MiB of memory"):
        run_limited(lambda: "a".center(9_999_999_999)[:1])


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGTERM, r"ended by signal 15 \(Terminated\)"),
        (signal.SIGKILL, r"killed \(SIGKILL\): .* memory is short"),
    ],
)
def test_error_names_the_signal_that_ended_the_child(number: signal.Signals, message: str) -> None:
    with pytest.raises(LimitError, match=message):
        run_limited(lambda: os.kill(os.getpid(), number))


def test_error_states_the_exit_status_of_the_child() -> None:
    with pytest.raises(LimitError, match="ended with exit status 3"):
        run_limited(lambda: os._exit(3))


def test_exception_in_the_child_is_reported() -> None:
    with pytest.raises(LimitError, match="fails with KeyError: 'role'"):
        run_limited(lambda: {}["role"])


def test_idle_child_is_killed_at_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "_WALL_S", 0.2)
    killed, kill = [], os.kill
    monkeypatch.setattr(os, "kill", lambda pid, number: [killed.append(pid), kill(pid, number)])
    with pytest.raises(LimitError, match=r"does not end within 0\.2 s"):
        run_limited(lambda: time.sleep(3600))
    (pid,) = killed
    assert not Path("/proc", str(pid)).exists(), "the process was reaped"


def test_run_limited_works_while_other_threads_run() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert run_limited(lambda: 7) == 7
    finally:
        stop.set()
        thread.join()
