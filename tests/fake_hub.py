"""A Hugging Face hub on a loopback port, with the few answers that the hub's own client needs."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from services.loader.files import Progress
from services.loader.hub import Hub
from services.loader.hub_names import HubFile, HubListing

COMMIT = "c0ffee" + "0" * 34
LARGE_BYTES = 4096  # files from this size on are kept as the hub keeps large ones


class FakeHub:
    """Serves repositories: {"org/name": {path: content}}. `damaged` are sent otherwise than listed;
    answers with those in `cut` break off after so many bytes, one after the other."""

    def __init__(self, repos: Mapping[str, Mapping[str, bytes]]) -> None:
        self.repos = repos
        self.damaged: dict[str, bytes] = {}
        self.cut: dict[str, list[int]] = {}
        self.commit = COMMIT
        self.served: list[tuple[str, int]] = []  # path, first byte
        hub = self

        class Handler(_Handler):
            of = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


def hub_in_memory(repos: Mapping[str, Mapping[str, bytes]], damaged: Mapping[str, bytes]) -> Hub:
    """The same answers without a server and without the processes that would ask it."""

    def list_files(repo: str, revision: str) -> HubListing:
        files = {path: _hub_file(path, body) for path, body in repos[repo].items()}
        return HubListing(COMMIT, files)

    def fetch(
        repo: str, commit: str, files: Sequence[HubFile], folder: Path, progress: Progress
    ) -> None:
        for file in files:
            (folder / file.path).parent.mkdir(exist_ok=True)
            (folder / file.path).write_bytes(damaged.get(file.path, repos[repo][file.path]))

    return Hub(list_files, fetch)


def _hub_file(path: str, body: bytes) -> HubFile:
    is_large = len(body) >= LARGE_BYTES
    digests = (_etag(body), None) if is_large else (None, _etag(body))
    return HubFile(path, len(body), *digests)


class _Handler(BaseHTTPRequestHandler):
    of: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Not on standard error."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path):
            self._list(match[1], match[2])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(match[1], match[3], with_body=with_body)
        else:
            self._refuse("EntryNotFound")

    def _list(self, repo: str, revision: str) -> None:
        if repo not in self.of.repos:
            self._refuse("RepoNotFound")
        elif revision not in ("main", "v1", self.of.commit):
            self._refuse("RevisionNotFound")
        else:
            files = [_listed(path, body) for path, body in self.of.repos[repo].items()]
            found = {"id": repo, "modelId": repo, "sha": self.of.commit, "siblings": files}
            self._send(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

    def _file(self, repo: str, path: str, *, with_body: bool) -> None:
        body = self.of.repos.get(repo, {}).get(path)
        if body is None:
            self._refuse("EntryNotFound")
            return
        headers = {
            "ETag": f'"{_etag(body)}"',
            "X-Repo-Commit": self.of.commit,
            "Accept-Ranges": "bytes",
        }
        sent = self.of.damaged.get(path, body)
        if not with_body:
            self._send(200, sent, headers, with_body=False)
            return
        start = 0
        if match := re.fullmatch(r"bytes=(\d+)-\d*", self.headers.get("Range") or ""):
            start = int(match[1])
            headers["Content-Range"] = f"bytes {start}-{len(sent) - 1}/{len(sent)}"
        self.of.served.append((path, start))
        cuts = self.of.cut.get(path)
        cut = cuts.pop(0) if cuts else None
        self._send(206 if start else 200, sent[start:], headers, cut=cut)

    def _refuse(self, code: str) -> None:
        self._send(404, b"", {"X-Error-Code": code, "X-Error-Message": f"{code} on this hub"})

    def _send(
        self,
        status: int,
        body: bytes,
        headers: Mapping[str, str],
        *,
        with_body: bool = True,
        cut: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True


def _etag(body: bytes) -> str:
    if len(body) >= LARGE_BYTES:
        return hashlib.sha256(body).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


def _listed(path: str, body: bytes) -> dict[str, object]:
    listed: dict[str, object] = {"rfilename": path, "size": len(body), "blobId": _etag(body)}
    if len(body) >= LARGE_BYTES:
        lfs = {"sha256": _etag(body), "size": len(body), "pointerSize": 134}
        listed |= {"blobId": "0" * 40, "lfs": lfs}
    return listed
