"""``run --detach``: the run in a session of its own, and what both sides of the start tell each other."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from .main import EXIT_FAILED, RunFailedError
from .spinner import Spinner

if TYPE_CHECKING:
    from .output import RunOutput

__all__ = ["run_detached", "tell_started"]

#: Holds the number of the descriptor that a detached run tells its start on.
_VARIABLE = "MEGATRAIN_TIER_DETACHED"
_POLL_S = 0.1
_STOP_S = 10.0


def tell_started(output: RunOutput, output_dir: Path) -> None:
    """Say that training starts, where somebody waits for it: all that can be checked before was found good.

    From now on ``output_dir`` is the run's: its log lies there.
    """
    from megatrain.run_folder import LOG_NAME

    log = output_dir / LOG_NAME
    number = os.environ.pop(_VARIABLE, None)
    if number is None:
        output.goes_to(log)
        return
    output.move_to(log)
    with contextlib.suppress(OSError, ValueError):  # who started this may have gone; the run goes on
        os.write(int(number), json.dumps({"output_dir": str(output_dir), "log": str(log)}).encode())
        os.close(int(number))


def run_detached(words: Sequence[str], *, as_json: bool) -> int:
    """Start ``run`` with these arguments in a session of its own, and wait until it trains.

    What it says until then is shown here, on stderr.

    Returns:
        0 once it trains. If it ended before: its exit code, that of a start that failed.
    """
    assert __package__ is not None
    command = [sys.executable, "-m", __package__, "run", *words]
    started, tell = os.pipe()
    # No pipe for what it says: this process ends, and the run must not find its output broken.
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            pass_fds=[tell],
            start_new_session=True,
            env={**os.environ, _VARIABLE: str(tell)},
        )
        os.close(tell)
        try:
            told = _wait(process, said, started, as_json=as_json)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
            raise RunFailedError("interrupted before the run began; it was ended", EXIT_FAILED) from None
        finally:
            os.close(started)
    if not told:
        code = process.wait()
        return code if code >= 0 else 128 - code  # as shells do for a process that a signal ended
    facts = json.loads(told)
    if as_json:
        click.echo(json.dumps({"pid": process.pid, **facts}))
        return 0
    folder = os.path.relpath(facts["output_dir"])
    folder = folder if len(folder) < len(facts["output_dir"]) else facts["output_dir"]
    click.echo(f"training in the background, process {process.pid}")
    click.echo(f"log     {facts['log']}")
    click.echo(f"follow  megatrain-tier status --follow {folder}")
    click.echo(f"stop    megatrain-tier stop {folder}")
    # It is nobody's child to wait for any more: without this, Python would warn of it.
    process.returncode = 0
    return 0


def _wait(process: subprocess.Popen[bytes], said: IO[bytes], started: int, *, as_json: bool) -> bytes:
    """Show what the run says until it trains or has ended; return what it told, nothing in the latter case."""
    shown, told = 0, b""
    with Spinner("starting", is_shown=not as_json) as spinner:
        while True:
            is_ready = bool(select.select([started], [], [], _POLL_S)[0])
            part = os.read(started, 4096) if is_ready else b""
            told += part
            is_over = is_ready and not part  # closed by the run, or with it
            text = os.pread(said.fileno(), 1 << 20, shown)
            if text:
                shown += len(text)
                with spinner.hidden():
                    click.echo(text.decode(errors="replace"), nl=False, err=True)
            if is_over and not text:
                return told
