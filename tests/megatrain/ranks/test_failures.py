"""If a rank fails, dies or hangs, all ranks end within seconds with one message, with or without a launcher."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from processes import launch_program, rank_program
from processes.ranks import start_ranks, started

LIMIT_S = 40.0  # limit for hanging tests; others take at most four seconds on an idle machine
HOST = socket.gethostname()


def launched(size: int, folder: Path, *ways: str) -> AbstractContextManager[Any]:
    """Start ranks with the project's launcher."""
    return started([launch_program.__file__, size, rank_program.__file__, folder, *ways])


def launch(size: int, folder: Path, *ways: str) -> tuple[int, str, str]:
    with launched(size, folder, *ways) as process:
        out, err = process.communicate(timeout=LIMIT_S)
        return process.returncode, out, err


def alone(size: int, folder: Path, *ways: str) -> tuple[list[int], str]:
    """Start ranks without a launcher, as srun does. Return their exit codes and error output."""
    ranks = start_ranks([[rank_program.__file__, folder, *ways]] * size)
    end_s, said = time.monotonic() + LIMIT_S, ""
    try:
        for process in ranks:
            if f"{ranks.index(process)}:stop" not in ways:
                process.wait(max(0.1, end_s - time.monotonic()))
    finally:
        for process in ranks:
            process.kill()
            said += process.communicate(timeout=5)[1]
    return [process.returncode for process in ranks], said


def errors(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error: ")]


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


ONE_RANK: Sequence[tuple[str, int, str]] = (
    ("1:raise", 4, rf"rank 1 \(on {HOST}\): the rows are wrong"),
    ("0:raise", 4, "the rows are wrong"),  # rank 0's errors with exit code 4 apply to all ranks
    ("1:kill", 1, rf"rank 1 \(on {HOST}\): was ended by SIGKILL"),
    ("1:stop", 1, rf"rank 1 \(on {HOST}\): has sent no heartbeat for \d+ s"),
    ("0:stop", 1, rf"rank 0 \(on {HOST}\): has (not answered|sent no heartbeat) for \d+ s"),
    ("1:exit", 9, rf"rank 1 \(on {HOST}\): ended with exit code 9, without a message"),
    ("1:early", 7, rf"rank 1 \(on {HOST}\): ended with exit code 7, without a message"),
    ("1:differs", 4, r"the ranks do not have the same config: lr is 1 on rank 0, but 2 on rank 1. Give all"),
)


IN_CI = ("1:raise", "1:kill", "0:stop", "1:differs")


@pytest.mark.parametrize(
    ("way", "code", "says"),
    [pytest.param(*case, id=case[0], marks=() if case[0] in IN_CI else pytest.mark.slow) for case in ONE_RANK],
)
def test_one_rank_ends_all(tmp_path: Path, way: str, code: int, says: str) -> None:
    exit_code, _, err = launch(3, tmp_path, way)
    (told,) = errors(err)
    assert re.match(f"error: {says}", told), err
    assert exit_code == code, err
    for file in tmp_path.glob("pid*"):
        assert is_gone(int(file.read_text())), (file, err)


@pytest.mark.parametrize(
    ("way", "code", "says"),
    [
        pytest.param("1:raise", 4, "rank 1 .*the rows are wrong", marks=pytest.mark.slow),
        ("1:kill", 1, "rank 1 .*has ended without a message"),
        pytest.param("0:kill", 1, "rank 0 .*has ended without a message", marks=pytest.mark.slow),
        pytest.param("1:stop", 1, "rank 1 .*has sent no heartbeat", marks=pytest.mark.slow),
        ("0:stop", 1, "rank 0 .*has (not answered|sent no heartbeat)"),
    ],
)
def test_ranks_without_a_launcher_watch_each_other(tmp_path: Path, way: str, code: int, says: str) -> None:
    patience = ["*:patient"] if "kill" in way else []  # a broken collective is detected before a missing heartbeat
    codes, err = alone(3, tmp_path, way, *patience)
    culprit = int(way[0])
    assert [each for rank, each in enumerate(codes) if rank != culprit] == [code, code], err
    (told,) = errors(err)
    assert re.match(f"error: {says}", told), err


def wait_until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.02)


@pytest.mark.parametrize("reached", ["launcher", pytest.param("rank 0", marks=pytest.mark.slow), "rank 1"])
def test_a_stop_reaches_all_ranks_after_the_same_step(tmp_path: Path, reached: str) -> None:
    with launched(2, tmp_path, "*:slow") as process:
        wait_until(lambda: all((tmp_path / f"at_step_2_{rank}").exists() for rank in (0, 1)))
        pid = process.pid if reached == "launcher" else int((tmp_path / f"pid{reached[-1]}").read_text())
        os.kill(pid, signal.SIGTERM)
        out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75, err
    assert re.fullmatch(r"stopped after step \d+\n", out), out
    assert not errors(err)


def test_a_second_stop_ends_ranks_that_cannot_end_themselves(tmp_path: Path) -> None:
    """Rank 1 is suspended, and rank 0 waits for it in a collective, where no signal handler runs."""
    with launched(2, tmp_path, "*:slow", "1:stop") as process:
        wait_until((tmp_path / "pid1").exists)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        time.sleep(0.7)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1 and len(errors(err)) == 1, err


def test_ranks_do_not_outlive_their_launcher(tmp_path: Path) -> None:
    with launched(2, tmp_path, "*:slow") as process:
        wait_until(lambda: all((tmp_path / f"at_step_2_{rank}").exists() for rank in (0, 1)))
        process.kill()
        process.wait()
        pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in (0, 1)]
        wait_until(lambda: all(map(is_gone, pids)))


def test_notices_of_a_successful_run_are_printed(tmp_path: Path) -> None:
    code, out, err = launch(3, tmp_path, "2:notice")
    assert (code, out, err) == (0, "rank 2: the drive is full\n", "")
