"""A small server that speaks the Hugging Face hub's HTTP protocol for downloading and uploading a model."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_test"


@dataclass
class FakeHub:
    """State of the fake hub, and a record of the requests to it.

    Attributes:
        address: URL of the server.
        models: Files of each model, by model id. Requests for models of the owner ``gated`` are refused.
        commit: Commit hash of all models.
        asked: (method, path, range) of each request for file contents.
        cut: Offset at which every download of a file breaks off, by file name.
        sent: Uploaded contents, by model id and path.
        lfs: Contents of uploaded LFS files, by SHA-256.
    """

    address: str = ""
    models: dict[str, dict[str, bytes]] = field(default_factory=dict)
    commit: str = "c" * 40
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    cut: dict[str, int] = field(default_factory=dict)
    sent: dict[str, dict[str, bytes]] = field(default_factory=dict)
    lfs: dict[str, bytes] = field(default_factory=dict)

    def add(self, name: str, folder: Path) -> None:
        self.models[name] = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    state: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    # -- reading ---------------------------------------------------------------------------------------------------

    def do_HEAD(self) -> None:
        self._get(has_body=False)

    def do_GET(self) -> None:
        self._get(has_body=True)

    def _get(self, *, has_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        if match := re.fullmatch(r"/api/models/(.+?)/(?:revision|tree)/([^/]+)(?:/.*)?", path):
            self._listing(*match.groups(), is_tree="/tree/" in path)
        elif match := re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", path):
            self._file(*match.groups(), has_body=has_body)
        else:
            self._error(404, "EntryNotFound")

    def _refusal(self, name: str, revision: str) -> tuple[int, str] | None:
        if name.startswith("gated/"):
            return 403, "GatedRepo"
        if name not in self.state.models:
            return 401, "RepoNotFound"
        if revision not in ("main", self.state.commit):
            return 404, "RevisionNotFound"
        return None

    def _listing(self, name: str, revision: str, *, is_tree: bool) -> None:
        if refusal := self._refusal(name, revision):
            return self._error(*refusal)
        files = self.state.models[name]
        if is_tree:
            return self._json(
                [
                    {"type": "file", "path": path, "size": len(data), "oid": _git_sha(data)}
                    for path, data in files.items()
                ]
            )
        siblings = [{"rfilename": path} for path in files]
        return self._json({"id": name, "modelId": name, "sha": self.state.commit, "siblings": siblings, "tags": []})

    def _file(self, name: str, revision: str, path: str, *, has_body: bool) -> None:
        if refusal := self._refusal(name, revision):
            return self._error(*refusal)
        data = self.state.models[name].get(path)
        if data is None:
            return self._error(404, "EntryNotFound")
        wanted = self.headers.get("Range", "")
        if has_body:
            self.state.asked.append((self.command, path, wanted))
        first = int(match[1]) if (match := re.match(r"bytes=(\d+)-", wanted)) else 0
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(data) - first))
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", self.state.commit)
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if not has_body:
            return None
        end = self.state.cut.get(path)
        self.wfile.write(data[first:end])
        if end is not None:
            self.wfile.flush()
            self.connection.close()
            self.close_connection = True
        return None

    # -- writing ---------------------------------------------------------------------------------------------------

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._error(401, "")
        if path == "/api/repos/create":
            values = json.loads(body)
            name = f"{values['organization']}/{values['name']}" if values.get("organization") else values["name"]
            self.state.sent.setdefault(name, {})
            return self._json({"url": f"{self.state.address}/{name}", "name": name, "id": name})
        if match := re.fullmatch(r"/api/models/(.+?)/preupload/[^/]+", path):
            files = json.loads(body)["files"]
            return self._json(
                {
                    "files": [
                        {
                            "path": file["path"],
                            "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                            "shouldIgnore": False,
                        }
                        for file in files
                    ]
                }
            )
        if match := re.fullmatch(r"/(.+?)\.git/info/lfs/objects/batch", path):
            found = [
                {
                    **each,
                    "actions": {"upload": {"href": f"{self.state.address}/lfs/{each['oid']}", "header": {}}},
                }
                for each in json.loads(body)["objects"]
            ]
            return self._json({"transfer": "basic", "objects": found})
        if match := re.fullmatch(r"/api/models/(.+?)/commit/[^/]+", path):
            for line in body.splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    self.state.sent[match[1]][value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    self.state.sent[match[1]][value["path"]] = self.state.lfs[value["oid"]]
            url = f"{self.state.address}/{match[1]}/commit/{self.state.commit}"
            return self._json({"commitUrl": url, "commitOid": self.state.commit, "success": True})
        return self._error(404, "EntryNotFound")

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.state.lfs[hashlib.sha256(data).hexdigest()] = data
        self._json({})

    def _json(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _error(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _git_sha(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
