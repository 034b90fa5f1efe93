"""Starts Python processes immediately, by forking a process that has already imported everything.

A new interpreter needs five seconds of CPU time to import torch, transformers and megatrain. ``Popen`` and ``run`` of
this module take the same arguments as ``subprocess``, but fork commands ``[sys.executable, ...]`` from a server. Each
pytest process has one server, which imports everything, plans one run and starts no threads. The forked processes are
real, with their own pid, signals, terminal and exit status. Tests of startup, imports or resident memory use
``subprocess`` instead.
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
import secrets
import selectors
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
    "transformers.conversion_mapping",
    "rich.live",
    "rich.progress",
    "rich.table",
    "megatrain.api",
    "megatrain.training.run_check",
    "megatrain.training.trainer",
    "megatrain.optim.kernels",
    "megatrain.extras.report",
    "megatrain_tier_cli.main",
    "megatrain_tier_cli.run",
    "oracles.traces",
)
#: Config of a run that the server plans once, to fill caches. This takes a second of CPU time.
PLANNED = """task = "pretrain"
output_dir = "{folder}/out"
device = "cpu"
[model]
model_name_or_path = "{root}/examples/quickstart/model"
train_from_scratch = true
[data]
max_length = 32
[[data.train]]
path = "{root}/examples/quickstart/loomings.txt"
[training]
per_device_train_batch_size = 2
[tiers.ram]
size = "1GiB"
"""
_PR_SET_CHILD_SUBREAPER = 36
_WITHOUT_VALUE = ("-P", "-u", "-B")
_SIGNATURE = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
_address = ""
"""Address of this process's server, or "" before its start. Abstract: no file is left."""


class Popen(subprocess.Popen[Any]):
    """``subprocess.Popen`` that forks Python commands from the server.

    Args:
        is_terminal: Whether stdin becomes the controlling terminal of the session.
        ignored: Signals to ignore from the start, as with ``nohup``.
        with_children: Whether Python programs that the process starts are also forked from a warm server.
    """

    def __init__(
        self,
        command: Any,
        *arguments: Any,
        is_terminal: bool = False,
        ignored: Sequence[int] = (),
        with_children: bool = False,
        **options: Any,
    ) -> None:
        self._extras = {"is_terminal": is_terminal, "ignored": list(ignored), "with_children": with_children}
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


class _WithChildren(Popen):
    def __init__(self, command: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(command, *arguments, with_children=True, **options)


def run(command: Sequence[str | Path], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program and return its result. Kill the program after ``timeout`` seconds."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with Popen(list(command), **{**streams, **options}) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _ask(request: dict[str, Any], streams: Sequence[int]) -> int:
    """Start a process through the server, adopt it as a child, and return its pid."""
    if not _address:
        _start_server()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(_address)
        payload = json.dumps(request).encode()
        # The intermediate process ends before the server answers. The new process is then adopted by the nearest
        # subreaper above the server, which must be this process. After that, init must adopt tested programs' orphans.
        _set_subreaper(True)
        try:
            socket.send_fds(connection, [len(payload).to_bytes(8, "little")], list(streams))
            connection.sendall(payload)
            answer = connection.recv(8)
        finally:
            _set_subreaper(False)
    if len(answer) != 8:
        raise RuntimeError("the server of warm processes is gone")
    pid = int.from_bytes(answer, "little")
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # raises an error if it is not our child
    return pid


def _set_subreaper(is_subreaper: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(is_subreaper), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _start_server() -> None:
    global _address
    listener = _listen()
    # The server ends when this process ends, because the server's stdin is then closed.
    server = subprocess.Popen(
        [sys.executable, __file__, str(listener.fileno())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[listener.fileno()],
        cwd=ROOT,
    )
    listener.close()
    assert server.stdout is not None
    if server.stdout.readline() != b"ready\n":
        raise RuntimeError("the server of warm processes did not start")
    owner = os.getpid()
    atexit.register(lambda: server.communicate() if os.getpid() == owner else None)


def _listen() -> socket.socket:
    """Choose a new ``_address``, and return a socket that listens there for requests of this process."""
    global _address
    _address = f"\0warm-{os.getpid()}-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(_address)
    listener.listen()
    return listener


def _preload() -> None:
    sys.path[:1] = [str(ROOT), str(ROOT / "tests")]  # replace the folder of this file
    for name in PRELOADED:
        importlib.import_module(name)
    if not torch.backends.cuda.is_built():  # in CUDA builds, a plan starts autograd threads, which a fork loses
        _plan_once()
    del sys.path[:2]
    assert threading.active_count() == 1, threading.enumerate()
    gc.freeze()  # otherwise, a garbage collection in a child would copy every memory page


def _plan_once() -> None:
    """Plan one run. This loads the update kernels, and fills caches of transformers and of torch's fake tensors."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from megatrain.config import load_config
    from megatrain.plan.planner import plan_run
    from megatrain.plan.stepping import warm_up
    from megatrain.training.resolve import resolve

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.toml")
        path.write_text(PLANNED.format(folder=folder, root=ROOT))
        warm_up(plan_run(resolve(load_config(path).config)))
    get_checkpoint_conversion_mapping("llama")


def _keep_traces() -> None:
    """Use the shared traces (``oracles.traces``) if the process that sent the request uses them."""
    from megatrain.plan import traced

    traces: Any = sys.modules["oracles.traces"]
    if traces.FOLDER in os.environ:
        traced.trace_visits = traces.keeping(traced.trace_visits)


def _serve(listener: socket.socket, owner: int) -> dict[str, Any]:
    """Fork a process for each request. Return the request in the new process; never return in the server.

    Args:
        owner: File descriptor that reaches end-of-file when the process that sends requests has ended.
    """
    with listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(owner, selectors.EVENT_READ)
        while True:
            if any(key.fd == owner for key, _ in selector.select()):
                os._exit(0)
            connection, _ = listener.accept()
            with connection:
                request = _fork(connection)
            if request is not None:
                os.close(owner)
                return request


def _fork(connection: socket.socket) -> dict[str, Any] | None:
    """Answer a request with the pid of a new process. Return the request in that process, or None in the server."""
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
    os.waitpid(between, 0)  # after this, the requester is the parent of the new process
    connection.sendall(os.read(reader, 8))
    for fd in (reader, writer, *streams):
        os.close(fd)
    return None


def _become(request: dict[str, Any]) -> list[str]:
    """Set streams, working directory, environment and session as requested. Return the command line to run."""
    if request["with_children"]:
        listener, (reader, writer) = _listen(), os.pipe()
        if os.fork() == 0:  # this fork is the server for the program's own children
            os.close(writer)
            nothing = os.open(os.devnull, os.O_RDWR)
            for fd in (*request["streams"], 0, 1, 2):
                os.dup2(nothing, fd)  # do not keep the program's streams open: readers wait for end-of-file
            return _become(_serve(listener, reader))
        listener.close()
        os.close(reader)
        subprocess.Popen = _WithChildren  # type: ignore[misc]
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
    _keep_traces()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1 if os.isatty(1) else -1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stdout.reconfigure(write_through=bool(os.environ.get("PYTHONUNBUFFERED")))
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    words: list[str] = request["words"]
    return words


def _start(words: Sequence[str]) -> None:
    """Run the program of a command line as the interpreter would."""
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
    """Run a program and exit like the interpreter, but skip the teardown of modules, which takes two seconds."""
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

    _preload()
    _listener = socket.socket(fileno=int(sys.argv[1]))
    os.write(1, b"ready\n")
    _finish(_become(_serve(_listener, os.dup(0))))
