"""moto's S3 server on the loopback address, behind a proxy that can cut, stall or refuse connections."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest


@dataclass
class Line:
    """Proxy in front of the server. It forwards all bytes until a fault is set.

    Attributes:
        port: Proxy's port on the loopback address.
        is_down: Whether every connection is closed immediately.
        stall_after: Number of bytes from clients after which connections stall, or None.
        cut_after: Number of bytes from clients after which one connection is cut, or None.
        stalled: Event that is set when a stall begins.
        num_cuts: Number of connections that were cut.
    """

    upstream: tuple[str, int]
    port: int = 0
    is_down: bool = False
    stall_after: int | None = None
    cut_after: int | None = None
    stalled: threading.Event = field(default_factory=threading.Event)
    num_cuts: int = 0
    _passed: int = 0
    _released: threading.Event = field(default_factory=threading.Event)

    def restore(self) -> None:
        """Clear all faults, and end stalls."""
        self.is_down, self.stall_after, self.cut_after, self._passed, self.num_cuts = False, None, None, 0, 0
        self._released.set()
        self._released, self.stalled = threading.Event(), threading.Event()

    def serve(self, listener: socket.socket) -> None:
        """Accept connections until the listener is closed. Runs in its own thread."""
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            if self.is_down:
                client.close()
                continue
            threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        """Forward one connection in both directions. Runs in its own thread."""
        with client, socket.create_connection(self.upstream) as server:
            back = threading.Thread(target=self._forward, args=(server, client, False), daemon=True)
            back.start()
            self._forward(client, server, True)
            back.join()

    def _forward(self, source: socket.socket, target: socket.socket, is_from_client: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self.is_down:
                    break
                if is_from_client:
                    self._passed += len(data)
                    if self.stall_after is not None and self._passed > self.stall_after:
                        self.stalled.set()
                        self._released.wait()
                        break
                    if self.cut_after is not None and self._passed > self.cut_after:
                        self.cut_after = None
                        self.num_cuts += 1
                        break
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@dataclass
class S3:
    """Proxy in front of the S3 server, and the server's own address."""

    line: Line
    direct: str

    def files(self) -> Any:
        """Return a file system that bypasses the proxy."""
        import s3fs

        return s3fs.S3FileSystem(
            key="k", secret="s", endpoint_url=self.direct, use_listings_cache=False, skip_instance_cache=True
        )


@contextlib.contextmanager
def s3_server() -> Iterator[S3]:
    """Run the server within the context, with a bucket named "bucket".

    Environment variables direct clients to the proxy.
    """
    pytest.importorskip("s3fs", reason='pip install -e ".[test]"')
    moto = pytest.importorskip("moto.server", reason='pip install -e ".[test]"')
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    listener = socket.create_server(("127.0.0.1", 0))
    line = Line((host, port), listener.getsockname()[1])
    threading.Thread(target=line.serve, args=(listener,), daemon=True).start()
    variables = {
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "very-secret-key",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{line.port}",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            patch.delenv(name, raising=False)
        found = S3(line, f"http://{host}:{port}")
        found.files().mkdir("bucket")
        yield found
        line.restore()
        listener.close()
        server.stop()
