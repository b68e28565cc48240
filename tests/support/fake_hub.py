"""A hub on 127.0.0.1 with one model, with what huggingface_hub needs; it can break downloads."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "a" * 40
MODEL = "owner/tiny"
FILES = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 100_000}


class Hub(ThreadingHTTPServer):
    breaks_at: int | None = None  # bytes of the large file, after which the connection ends
    ranges: list[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/models/{MODEL}/tree/"):
            self._json([_entry(name) | {"type": "file", "path": name} for name in FILES], with_body)
        elif path.startswith(f"/api/models/{MODEL}"):
            siblings = [{"rfilename": name} for name in FILES]
            self._json({"id": MODEL, "sha": COMMIT, "siblings": siblings}, with_body)
        elif (name := path.rpartition("/")[2]) in FILES and f"/{MODEL}/resolve/" in path:
            self._file(name, with_body)
        else:
            self.send_error(404)

    def _json(self, value: Any, with_body: bool) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"}, with_body)

    def _file(self, name: str, with_body: bool) -> None:
        content = FILES[name]
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        given = self.headers.get("Range", "")
        if not with_body or not given:
            self._send(200, content, headers, with_body)
            return
        self.server.ranges.append(given)
        start = int(given.removeprefix("bytes=").partition("-")[0])
        headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._send(206, content[start:], headers, with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if not with_body:
            return
        limit = self.server.breaks_at
        if limit is not None and len(body) > limit:
            self.wfile.write(body[:limit])
            self.close_connection = True
            return
        self.wfile.write(body)


def _entry(name: str) -> dict[str, Any]:
    content = FILES[name]
    return {"size": len(content), "oid": hashlib.sha1(content).hexdigest()}


@contextlib.contextmanager
def fake_hub() -> Iterator[Hub]:
    hub = Hub(("127.0.0.1", 0), _Handler)
    hub.ranges = []
    thread = threading.Thread(target=hub.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
