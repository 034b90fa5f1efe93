"""Commands in a real terminal: their first and last output, Ctrl-C, and a terminal that closes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from megatrain.base.owner import find_owner
from megatrain.run.folder import committed_step
from megatrain.run.status import read_status
from processes import warm
from processes.saved_run import ROOT, SavedRun, command_group, command_words, end

DEADLINE_S = 240.0
MANY = 100_000
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "30"}


class Terminal:
    """Process with a controlling terminal, which the test reads, types into and closes.

    Args:
        ignored: Signals that the process ignores from its start, as under ``nohup``.
        is_cold: Whether to start a new interpreter, which imports everything, instead of a fork (``processes.warm``).
    """

    def __init__(self, words: list[str], *, ignored: tuple[signal.Signals, ...] = (), is_cold: bool = False) -> None:
        self.text = ""
        self._master, slave = pty.openpty()

        def prepare() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            for number in ignored:
                signal.signal(number, signal.SIG_IGN)

        options: Any = {"preexec_fn": prepare} if is_cold else {"is_terminal": True, "ignored": ignored}
        self.process = (subprocess if is_cold else warm).Popen(
            words, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, cwd=ROOT, env=ENVIRONMENT, **options
        )
        os.close(slave)

    def wait_for(self, pattern: str) -> None:
        """Read until the pattern appears in the output."""
        self._read(lambda: re.search(pattern, self.text) is not None)
        assert re.search(pattern, self.text), self.text

    def wait(self) -> int:
        """Read the output until the process ends, and return the exit code."""
        self._read(lambda: False)
        return self.process.wait(DEADLINE_S)

    def _read(self, is_enough: Callable[[], bool]) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while not is_enough():
            assert time.monotonic() < end_s, self.text
            if select.select([self._master], [], [], 0.1)[0]:
                try:
                    part = os.read(self._master, 65536)
                except OSError:  # the last process on this terminal has ended
                    return
                if not part:
                    return
                self.text += part.decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def close(self) -> None:
        """Close the terminal, as if the user closed its window."""
        master, self._master = self._master, -1
        if master >= 0:
            os.close(master)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE_S)


def screen(text: str) -> list[str]:
    """Return the lines that a terminal shows after this text. The last item says whether the cursor is visible."""
    lines, row, column, cursor = [""], 0, 0, "visible"
    for match in re.finditer(r"\x1b\[([0-9;?]*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)", text):
        value, kind, back, feed, plain = match.groups()
        if kind == "A":
            row = max(0, row - int(value or 1))
        elif kind == "K":
            lines[row] = "" if value == "2" else lines[row][:column]
        elif kind in ("l", "h") and value == "?25":
            cursor = "hidden" if kind == "l" else "visible"
        elif back:
            column = 0
        elif feed:
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif plain:
            lines[row] = lines[row][:column].ljust(column) + plain + lines[row][column + len(plain) :]
            column += len(plain)
    return [*(line.rstrip() for line in lines), cursor]


def python_words(package: str, words: list[str], before: str) -> list[str]:
    """Return the command line of a process that runs test code and then a command."""
    code = f"{before}\nimport runpy, sys\nsys.argv = {['megatrain-tier', *words]!r}\n"
    return [sys.executable, "-c", f"{code}runpy.run_module({package!r}, run_name='__main__')"]


AT_TORCH = """
import os, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers"):
            os.write(2, b"[HEAVY]")
            DO
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize("command", ["run", "plan", "check"])
def test_first_line_appears_before_heavy_imports(command: str, cli_package: str) -> None:
    words = python_words(cli_package, [command, "examples/01_tiny.toml"], AT_TORCH.replace("DO", "os._exit(7)"))
    with Terminal(words, is_cold=True) as terminal:
        assert terminal.wait() == 7
    before = terminal.text.partition("[HEAVY]")[0]
    assert "importing torch" in before and re.search("[\u2800-\u28ff] ", before), terminal.text


def test_invalid_config_is_reported_before_torch_is_imported(cli_package: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('task = "sft"\nlearning_rte = 1\n')
    words = python_words(cli_package, ["run", str(tmp_path / "run.toml")], AT_TORCH.replace("DO", "pass"))
    with Terminal(words, is_cold=True) as terminal:
        assert terminal.wait() == 2
    assert "learning_rte" in terminal.text and "[HEAVY]" not in terminal.text
    assert screen(terminal.text)[0].startswith("error:"), "the spinner is gone"


def test_ctrl_c_during_the_start_leaves_no_process(cli_package: str) -> None:
    code = AT_TORCH.replace("DO", "import time; time.sleep(60)")
    with Terminal(python_words(cli_package, ["plan", "examples/01_tiny.toml"], code), is_cold=True) as terminal:
        terminal.wait_for(r"\[HEAVY\]")
        terminal.wait_for("importing torch  2 s")  # the line is updated during the import
        terminal.type("\x03")
        assert terminal.wait() == 1
    assert [line for line in screen(terminal.text) if line] == ["interrupted; nothing saved", "visible"]


OUTPUT = """
import contextlib, os, sys, time
import click
from pathlib import Path
from {package}.terminal import RunOutput
with RunOutput() as output:
    click.echo("before")
    with contextlib.suppress(OSError):  # a terminal that closes ends the read with EIO on some kernels
        sys.stdin.readline()
    for _ in range(600):
        print("lost \\x1b[1mwords\\x1b[0m", flush=True)
        if output.is_lost:
            break
        time.sleep(0.1)
    print("early", flush=True)
    output.set_log_file(Path({log!r}))
    print("late", flush=True)
    os.system("echo of a child >&2")
sys.stderr.write("the end\\n")
sys.exit(75)
"""


@pytest.mark.parametrize("kind", ["terminal", "pipe"])
def test_output_continues_in_the_log(kind: str, cli_package: str, tmp_path: Path) -> None:
    """Writing fails with EIO on a closed terminal and EPIPE on a closed pipe. The log has all output from then on."""
    log = tmp_path / "run.log"
    code = OUTPUT.format(package=cli_package, log=str(log))
    words = [sys.executable, "-c", code]
    if kind == "terminal":
        with Terminal(words, ignored=(signal.SIGHUP,), is_cold=True) as terminal:
            terminal.wait_for("before")
            terminal.close()
            assert terminal.process.wait(DEADLINE_S) == 75
    else:
        pipe = subprocess.PIPE
        process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, cwd=ROOT, env=ENVIRONMENT)
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"before\n"
        process.stdout.close()
        process.stdin.close()
        assert process.wait(DEADLINE_S) == 75
    lines = log.read_text().splitlines()
    assert lines[0].startswith("-- output of process ")
    assert lines[1:] == ["lost words", "early", "late", "of a child", "the end"]


def test_lost_keys_of_an_import_appear_once_on_a_terminal(tmp_path: Path) -> None:
    """Comments in the printed TOML list them."""
    path = tmp_path / "theirs.yaml"
    path.write_text("base_model: org/model\ndatasets: [{path: d.jsonl, type: alpaca}]\nrope_theta: 5\n")
    toml = CliRunner().invoke(command_group(), ["import", str(path)]).stdout
    with Terminal([*command_words(), "import", str(path)]) as terminal:
        assert terminal.wait() == 0
    assert "rope_theta" in toml
    assert screen(terminal.text) == [*toml.splitlines(), "translated 3 values of Axolotl", "", "visible"]


@pytest.fixture
def run(untrained: SavedRun, tmp_path: Path) -> SavedRun:
    return untrained.copy(tmp_path / "w")


def words_of(run: SavedRun, *options: str, **config: object) -> list[str]:
    return [*command_words(), "run", str(run.write_config(**config)), *options]  # type: ignore[arg-type]


def test_ctrl_c_in_a_step_saves_and_restores_the_terminal(run: SavedRun) -> None:
    with Terminal(words_of(run, steps=MANY, checkpoint='save_strategy = "no"')) as terminal:
        terminal.wait_for(r"s/step \(mean\)")  # the view is drawn only a few times per second
        terminal.wait_for(r"now .{0,400}(update|forward|head|backward) ")
        terminal.type("\x03")
        assert terminal.wait() == 75
    *lines, cursor = screen(terminal.text)
    lines = [line for line in lines if line]
    step = committed_step(run.out)
    assert lines[-1] == f"interrupted at step {step}, saved: run the same command again to continue"
    assert cursor == "visible" and not any("^C" in line for line in lines), lines
    (ended,) = [number for number, line in enumerate(lines) if line.startswith("stopped ")]
    view = lines[ended - 5 : ended]  # the complete last view: figures, run, ram, speed
    assert any(re.match(rf"step {step}/100000  loss ", line) for line in view), lines
    assert not any(line.startswith("now ") for line in lines), "no further work is done"
    status = read_status(run.out)
    assert status is not None and (status.state, status.exit_code) == ("stopped", 75)


def test_closed_terminal_saves_and_output_continues_in_the_log(run: SavedRun) -> None:
    with Terminal(words_of(run, steps=MANY, checkpoint='save_strategy = "no"')) as terminal:
        terminal.wait_for(r"step .{0,40}2/100000")
        terminal.close()
        assert terminal.process.wait(DEADLINE_S) == 75
    step = committed_step(run.out)
    rows = [json.loads(line) for line in (run.out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "event" not in row][1:] == list(range(2, step + 1)) != []
    text = (run.out / "run.log").read_text()
    assert "the terminal was closed (SIGHUP): stopping after this step, and saving" in text
    assert f"saved  checkpoint at step {step}: " in text and "\x1b" not in text
    assert text.endswith(f"interrupted at step {step}, saved: run the same command again to continue\n")


def test_run_under_nohup_outlives_its_terminal(run: SavedRun) -> None:
    """SIGHUP is ignored, and every write to the terminal fails with EIO, but the run continues to its end."""
    with Terminal(words_of(run, steps=12), ignored=(signal.SIGHUP,)) as terminal:
        terminal.wait_for("fits")
        terminal.wait_for("start")
        terminal.close()
        assert terminal.process.wait(DEADLINE_S) == 0
    text = (run.out / "run.log").read_text()
    assert "\nstep 12/12 100.0% | loss " in text and "\ndone   12 steps" in text
    assert (run.out / "final").is_dir()


@pytest.fixture
def kill_run_at_teardown(run: SavedRun) -> Iterator[None]:
    yield
    owner = find_owner(run.out)
    if owner is not None and owner.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(owner.pid, signal.SIGKILL)


@pytest.mark.usefixtures("kill_run_at_teardown")
def test_follow_shows_a_run_of_another_process(run: SavedRun) -> None:
    process = run.start("--set", "logging.progress=none", steps=MANY, checkpoint='save_strategy = "no"')
    while (owner := find_owner(run.out)) is None:
        assert process.poll() is None
        time.sleep(0.05)

    follow = [*command_words(), "status", "--follow", str(run.out)]
    with Terminal(follow) as terminal:  # Ctrl-C ends the view, not the run
        terminal.wait_for("s/step")
        terminal.type("\x03")
        assert terminal.wait() == 0
    assert [line for line in screen(terminal.text) if line][-2:] == [
        f"the run continues in process {owner.pid}", "visible"
    ]  # fmt: skip
    assert find_owner(run.out) == owner

    with Terminal(follow) as terminal:
        terminal.wait_for("s/step")
        os.kill(owner.pid, signal.SIGTERM)
        assert terminal.wait() == 75, "the exit code of the run"
    assert f"stopped at step {committed_step(run.out)}" in terminal.text
    assert "interrupted at step" in process.communicate(timeout=DEADLINE_S)[1].splitlines()[-1]
    late = run.call("status", "--follow", run.out)
    assert late.exit_code == 75 and "stopped at step" in late.stdout


def test_follow_ends_if_the_run_is_killed(run: SavedRun) -> None:
    process = run.start(steps=MANY)
    try:
        while (status := read_status(run.out)) is None or not status.step:
            assert process.poll() is None
            time.sleep(0.05)
        follow = warm.Popen(
            [*command_words(), "status", "--follow", "--json", str(run.out)], cwd=ROOT, env=ENVIRONMENT,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert follow.stdout is not None
        assert json.loads(follow.stdout.readline())["state"] == "training"
        process.kill()
        assert follow.wait(DEADLINE_S) == 1
        follow.stdout.close()
    finally:
        end(process)
