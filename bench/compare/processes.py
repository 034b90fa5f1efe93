"""A side of a comparison: a separate process that runs steps on request."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.common import ROOT

#: Startup time limit. A peer may compile its operators at the first start, which takes minutes.
START_TIMEOUT_S = 1200.0
STEP_TIMEOUT_S = 300.0


class SideFailedError(Exception):
    """Error for a side that ended or did not answer in time. The message contains the last lines of its output."""


class SideProcess:
    """Process of a side, as a context manager that kills the process and all its children on exit.

    Args:
        python: Interpreter of the process.
        job: Fields of the side's job.
        log: File for the output of the process.
        worker: Module in this folder whose `main` answers each input line with a line of JSON.

    Attributes:
        about: Facts that the side reported when it was ready.
    """

    def __init__(self, python: str, job: Mapping[str, Any], log: Path, worker: str = "worker") -> None:
        self._log = log
        bin_folder = str(Path(python).absolute().parent)  # the peers expect ninja in the PATH
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PATH": os.pathsep.join([bin_folder, os.environ.get("PATH", os.defpath)]),
            "GOMP_SPINCOUNT": "20000",  # otherwise idle threads of one side take CPU time from the other side
        }
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [python, "-P", "-c", f"from bench.compare import {worker}; {worker}.main()", json.dumps(job)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                start_new_session=True,
            )
        try:
            self.about = self._answer(START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> SideProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def steps(self, num_steps: int) -> dict[str, Any]:
        """Make the side run consecutive steps, and return its measurements.

        Raises:
            SideFailedError: The side ended or hung.
        """
        return self.ask(str(num_steps), STEP_TIMEOUT_S * num_steps)

    def ask(self, line: str, timeout_s: float) -> dict[str, Any]:
        """Send a line to the side, and return its answer.

        Raises:
            SideFailedError: The side ended or hung.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n".encode())
        except BrokenPipeError as error:
            raise self._failure("ended") from error
        return self._answer(timeout_s)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            raise self._failure(f"said nothing for {timeout_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)  # it prints its last lines after closing this pipe
            raise self._failure("ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failure(self, what: str) -> SideFailedError:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return SideFailedError(f"{what}: {' | '.join(line.strip() for line in lines[-3:])[-500:]}")

    def close(self) -> None:
        """Kill the side's process group, and wait until it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def import_failure(python: str, module: str) -> str:
    """Return the reason why an interpreter cannot import a module, or "" if it can."""
    command = [python, "-P", "-c", f"import {module}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S, cwd=ROOT)
    except OSError as error:
        return f"{python}: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"import {module} did not end"
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return lines[-1] if done.returncode else ""
