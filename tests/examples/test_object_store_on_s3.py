"""Tests the object tier with a local S3 server. Needs s3fs and moto."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from oracles.example_files import Objects
from tiered.testing import LinkSuite, StoreSuite, TierSuite

s3fs = pytest.importorskip("s3fs", reason="pip install s3fs moto flask flask-cors py-partiql-parser, 140 MB")
pytest.importorskip("moto", reason="pip install s3fs moto flask flask-cors py-partiql-parser, 140 MB")


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    """Start a local S3 server and create a bucket. Yield the fsspec options to connect to the server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    options = {"key": "k", "secret": "s", "endpoint_url": f"http://127.0.0.1:{port}", "use_listings_cache": False}
    try:
        deadline_s = time.monotonic() + 60
        while not is_listening(port):
            assert server.poll() is None and time.monotonic() < deadline_s, "the server did not start"
            time.sleep(0.1)
        s3fs.S3FileSystem(**options).mkdir("bucket")
        yield options
    finally:
        server.terminate()
        server.wait(30)


def is_listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


class ObjectsInS3(Objects):
    url = "s3://bucket/scratch"
    num_operations = 60
    seeds = (0,)

    @pytest.fixture(autouse=True)
    def _server(self, s3: dict[str, Any]) -> None:
        self.storage_options = s3


@pytest.mark.filterwarnings("default")  # warnings of the libraries are not errors
class TestObjectsInS3(ObjectsInS3, TierSuite): ...


@pytest.mark.filterwarnings("default")
class TestObjectLinksInS3(ObjectsInS3, LinkSuite): ...


@pytest.mark.filterwarnings("default")
class TestStoreOfObjectsInS3(ObjectsInS3, StoreSuite): ...
