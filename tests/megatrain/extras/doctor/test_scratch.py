"""Scratch folders are removed however the work ends, and unusable folders are refused with a reason."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain.extras.doctor import drives
from megatrain.extras.doctor.drives import UnusablePathError, check_path, interrupt_on_termination, scratch_folder


def test_scratch_folder_is_removed_with_its_contents(tmp_path: Path) -> None:
    with scratch_folder(tmp_path) as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "file").write_bytes(b"x")
        assert folder.parent == tmp_path
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_scratch_folder_is_removed_after_errors(tmp_path: Path, error: type[BaseException]) -> None:
    def work() -> None:
        with scratch_folder(tmp_path) as folder:
            (folder / "file").write_bytes(b"x")
            raise error

    with pytest.raises(error):
        work()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_scratch_folder_is_removed_on_sigterm(tmp_path: Path, number: signal.Signals) -> None:
    def work() -> None:
        with interrupt_on_termination(), scratch_folder(tmp_path) as folder:
            (folder / "file").write_bytes(b"x")
            signal.raise_signal(number)

    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        work()
    assert os.listdir(tmp_path) == []
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("where", ["made", "removed"])
def test_signal_during_creation_or_removal_is_deferred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def then_interrupt(work: Callable[..., object]) -> Callable[..., object]:
        def interrupted(*arguments: object, **more: object) -> object:
            result = work(*arguments, **more)
            signal.raise_signal(signal.SIGINT)
            return result

        return interrupted

    module, name = (drives.tempfile, "mkdtemp") if where == "made" else (shutil, "rmtree")
    monkeypatch.setattr(module, name, then_interrupt(getattr(module, name)))
    with pytest.raises(KeyboardInterrupt), scratch_folder(tmp_path) as folder:
        assert folder.exists()
    monkeypatch.undo()
    assert os.listdir(tmp_path) == []


def test_signals_that_are_ignored_stay_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupt_on_termination(), scratch_folder(tmp_path):
            signal.raise_signal(signal.SIGHUP)
    finally:
        assert signal.signal(signal.SIGHUP, before) is signal.SIG_IGN


def test_scratch_folder_works_in_a_thread(tmp_path: Path) -> None:
    made: list[bool] = []

    def work() -> None:
        with interrupt_on_termination(), scratch_folder(tmp_path) as folder:
            made.append(folder.exists())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert made == [True]
    assert os.listdir(tmp_path) == []


def test_paths_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnusablePathError, match="does not exist"):
        check_path(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(UnusablePathError, match="is not a folder"):
        check_path(tmp_path / "file")
    with pytest.raises(UnusablePathError, match="cannot be written"):
        check_path(Path("/proc"))
    assert check_path(tmp_path) > drives.MIN_FREE_BYTES
    monkeypatch.setattr(drives, "MIN_FREE_BYTES", 1 << 60)
    with pytest.raises(UnusablePathError, match=r"has .* of free space, but the measurement needs"):
        check_path(tmp_path)
    assert os.listdir(tmp_path) == ["file"]
