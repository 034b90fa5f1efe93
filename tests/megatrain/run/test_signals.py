"""Signals of a run: requests to stop, immediate stops, and a closed terminal."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from megatrain.base.progress import Activity
from megatrain.run import signals
from megatrain.run.signals import RunSignals


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    numbers = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_a_closed_terminal_asks_for_a_stop_and_never_ends_the_run_at_once() -> None:
    """SIGHUP may come from the kernel, from the shell, or during the save after an earlier stop request."""
    activity = Activity()
    with RunSignals(stops_after_step=True, activity=activity) as heard:
        for _ in range(3):
            send(signal.SIGHUP)
        assert heard.stop_requested and heard.is_hung_up
        assert activity.notice.startswith("stopping after this step"), "for `status` in another terminal"
    with RunSignals(stops_after_step=True) as heard:
        send(signal.SIGTERM)
        assert heard.stop_requested and not heard.is_hung_up
        heard._request_s = -1e9  # long ago
        send(signal.SIGHUP)
    with RunSignals(stops_after_step=True, is_stuck=lambda: True) as heard:  # the run saves once there is space
        send(signal.SIGHUP)
        assert heard.stop_requested


def test_stop_interrupts_a_stuck_run_at_once() -> None:
    with RunSignals(stops_after_step=True, is_stuck=lambda: True), pytest.raises(KeyboardInterrupt):
        send(signal.SIGTERM)
    with RunSignals(stops_after_step=True) as heard:
        heard.end_steps()
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGTERM)


def test_sigterm_right_after_sighup_is_not_a_second_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    with RunSignals(stops_after_step=True) as heard:
        send(signal.SIGHUP)
        send(signal.SIGTERM)  # a session that ends sends both signals
        monkeypatch.setattr(signals, "SAME_STOP_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGTERM)
        assert heard.stop_requested


def test_an_ignored_hangup_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with RunSignals(stops_after_step=True) as heard:
        send(signal.SIGHUP)
        assert not heard.stop_requested


def test_without_saves_a_closed_terminal_ends_the_run() -> None:
    with RunSignals(stops_after_step=False), pytest.raises(KeyboardInterrupt):
        send(signal.SIGHUP)


@pytest.mark.parametrize("is_watched", [True, False])
def test_stop_notice_goes_to_the_live_view_if_present(is_watched: bool, capfd: pytest.CaptureFixture[str]) -> None:
    activity = Activity()
    activity.is_watched = is_watched
    with RunSignals(stops_after_step=True, activity=activity):
        send(signal.SIGTERM)
        assert "stopping after this step, and saving" in activity.notice
    assert ("stopping after this step" in capfd.readouterr().err) != is_watched
    assert not activity.notice


class _EndsWithASignal:
    def __del__(self) -> None:
        send(signal.SIGTERM)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupt_lost_in_a_destructor_is_raised_after_the_step() -> None:
    """Python discards a ``KeyboardInterrupt`` that a signal handler raises inside a destructor."""
    with RunSignals(stops_after_step=False) as heard:
        heard.reraise_interrupt()  # no signal yet
        _EndsWithASignal()
        with pytest.raises(KeyboardInterrupt):
            heard.reraise_interrupt()
