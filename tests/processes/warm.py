"""Python programs as processes of their own that start at once: forked from one that has imported the libraries.

Torch, transformers and megatrain take a new interpreter five seconds of a core. ``Popen`` and ``run`` here take what
those of ``subprocess`` take; a command ``[sys.executable, ...]`` is forked from a server, which imports once for each
process of pytest and starts no thread. All else of a process is real: pid, signals, terminal, exit status. Tests whose
subject is the start itself, what is imported, or resident memory use ``subprocess``.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
PRELOADED = (
    "torch",
    "transformers",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.trainer",
    "megatrain.trainer",
    "megatrain.optim.kernels",
    "megatrain.optim.adafactor_kernels",
    "megatrain.report",
    "megatrain_tier_cli.main",
    "megatrain_tier_cli.run",
)
_PR_SET_CHILD_SUBREAPER = 36
_SOCKET = "WARM_PYTHON_SOCKET"
"""Variable that tells a program started here where the server is: its own children start warm as well."""
_WITHOUT_VALUE = ("-P", "-u", "-B")
_SIGNATURE = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
_server: subprocess.Popen[bytes] | None = None
_pid = os.getpid()


class Popen(subprocess.Popen[Any]):
    """``subprocess.Popen``; the process is forked from the server where the command is Python's.

    Args:
        is_terminal: its stdin is the controlling terminal of its session.
        ignored: signals that it starts with ignored, as ``nohup`` does.
    """

    def __init__(
        self, command: Any, *arguments: Any, is_terminal: bool = False, ignored: Sequence[int] = (), **options: Any
    ) -> None:
        self._extras = {"is_terminal": is_terminal, "ignored": list(ignored)}
        super().__init__(command, *arguments, **options)

    def _execute_child(self, *arguments: Any) -> None:
        given = _SIGNATURE.bind(self, *arguments).arguments
        command = given["args"]
        is_python = not isinstance(command, str | bytes) and command[0] == sys.executable
        if sys.platform != "linux" or not is_python or given["preexec_fn"] or given["pass_fds"] or given["shell"]:
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        streams = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        request = {
            "words": [os.fspath(word) for word in command[1:]],
            "cwd": os.fspath(given["cwd"] or Path.cwd()),
            "environment": dict(os.environ if given["env"] is None else given["env"]),
            "is_new_session": given["start_new_session"],
            **self._extras,
        }
        self.pid = _ask(request, [number if fd == -1 else fd for number, fd in enumerate(streams)])
        self._child_created = True
        pipes = (given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run(command: Sequence[str | Path], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and return what it printed; it is killed after ``timeout`` seconds."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with Popen(list(command), **{**streams, **options}) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _ask(request: dict[str, Any], streams: Sequence[int]) -> int:
    """Let the server start a process, and adopt it: return the pid of a child of this process."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(_address())
        payload = json.dumps(request).encode()
        # The new process goes to the nearest subreaper when the process between it and the server ends, which is
        # before the server answers. Not for longer: orphans of programs under test belong to init.
        _set_subreaper(True)
        try:
            socket.send_fds(connection, [len(payload).to_bytes(8, "little")], list(streams))
            connection.sendall(payload)
            answer = connection.recv(8)
        finally:
            _set_subreaper(False)
    if len(answer) != 8:
        raise RuntimeError("the server of warm processes is gone")
    return int.from_bytes(answer, "little")


def _set_subreaper(is_one: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(is_one), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _address() -> str:
    """Return where the server listens; start it where there is none yet."""
    global _server
    if _server is None and _SOCKET not in os.environ:
        path = Path(tempfile.mkdtemp(prefix="warm-"), "socket")
        # It ends when this process does, which then holds the other end of its stdin no more.
        _server = subprocess.Popen(
            [sys.executable, __file__, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
        )
        assert _server.stdout is not None
        if _server.stdout.readline() != b"ready\n":
            raise RuntimeError("the server of warm processes did not start")
        os.environ[_SOCKET] = str(path)
        atexit.register(_close)
    return os.environ[_SOCKET]


def _close() -> None:
    if _server is not None and _pid == os.getpid():
        _server.communicate()


def _serve(path: Path) -> dict[str, Any]:
    """Fork a process for each request; return in that process, with what it is to do."""
    del sys.path[0]  # the folder of this file
    sys.path.insert(0, str(ROOT))
    for name in PRELOADED:
        importlib.import_module(name)
    del sys.path[0]
    assert threading.active_count() == 1, threading.enumerate()
    gc.freeze()  # a collection in a child would copy every page
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        listener.bind(str(path))
        listener.listen()
        selector.register(listener, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        os.write(1, b"ready\n")
        while True:
            if any(key.fd == 0 for key, _ in selector.select()):  # its other end is closed: pytest is gone
                shutil.rmtree(path.parent, ignore_errors=True)
                sys.exit()
            connection, _ = listener.accept()
            with connection:
                request = _fork(connection)
            if request is not None:
                return request


def _fork(connection: socket.socket) -> dict[str, Any] | None:
    """Answer a request with the pid of a new process; return what it asked for in that process, None in the server."""
    head, streams, _, _ = socket.recv_fds(connection, 8, 3)
    with connection.makefile("rb") as file:
        request: dict[str, Any] = json.loads(file.read(int.from_bytes(head, "little")))
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            os.close(writer)
            request["streams"] = streams
            return request
        os.write(writer, pid.to_bytes(8, "little"))
        os._exit(0)
    os.waitpid(between, 0)  # now the process between is gone, and whoever asked is the parent
    connection.sendall(os.read(reader, 8))
    for fd in (reader, writer, *streams):
        os.close(fd)
    return None


def _become(request: dict[str, Any]) -> None:
    """Take streams, folder, environment and session as a new interpreter would have them."""
    for number, fd in enumerate(request["streams"]):
        os.dup2(fd, number)
        os.close(fd)
    if request["is_new_session"]:
        os.setsid()
    if request["is_terminal"]:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1 if os.isatty(1) else -1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stdout.reconfigure(write_through=bool(os.environ.get("PYTHONUNBUFFERED")))
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    subprocess.Popen = Popen  # type: ignore[misc]


def _start(words: Sequence[str]) -> None:
    """Run what the words of a command line name, as the interpreter does."""
    is_safe_path = False
    while words[0] in (*_WITHOUT_VALUE, "-W"):
        is_safe_path |= words[0] == "-P"
        if words[0] == "-W":
            warnings._setoption(words[1])  # type: ignore[attr-defined]
        words = words[2 if words[0] == "-W" else 1 :]
    if words[0] == "-m":
        sys.argv = ["-m", *words[2:]]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path[:0] = [] if is_safe_path else [""]
        exec(compile(words[1], "<string>", "exec"), vars(sys.modules["__main__"]))
    elif not words[0].startswith("-"):
        sys.argv = list(words)
        sys.path[:0] = [] if is_safe_path else [str(Path(words[0]).resolve().parent)]
        runpy.run_path(words[0], run_name="__main__")
    else:
        raise ValueError(f"a process that starts warm takes no {words[0]}")


def _finish(words: Sequence[str]) -> NoReturn:
    """Run a program and end as the interpreter does, but for tearing all modules down: that takes two seconds."""
    code: Any = 0
    try:
        _start(words)
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    import torch

    _request = _serve(Path(sys.argv[1]))
    _become(_request)
    _finish(_request["words"])
