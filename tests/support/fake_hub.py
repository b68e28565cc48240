"""A hub on 127.0.0.1 with models and adapters, for huggingface_hub; it can break downloads."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

COMMIT = "a" * 40
MODEL = "owner/tiny"
FILES = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 100_000}
GGUF_MODEL = "owner/tiny-GGUF"
GGUF_FILES = {
    name: b"GGUF" + name.encode()
    for name in (
        *("README.md", "mmproj-tiny-F16.gguf", "tiny-Q4_K_M.gguf", "tiny-UD-Q4_K_M.gguf"),
        *("tiny-Q8_0.gguf", "BF16/tiny-BF16-00001-of-00002.gguf"),
        *("BF16/tiny-BF16-00002-of-00002.gguf", "tiny-F32-00001-of-00002.gguf"),
    )
}
PICKLED_MODEL = "owner/tiny-old"
PICKLED_FILES = {
    name: name.encode()
    for name in (
        *("config.json", "pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin"),
        *("pytorch_model-00002-of-00002.bin", "training_args.bin", "tf_model.h5"),
    )
}
ADAPTERS = {  # a repository with an adapter -> its files
    "owner/poems": ("README.md", "adapter_config.json", "adapter_model.safetensors"),
    "owner/poems-old": ("adapter_config.json", "adapter_model.bin", "training_args.bin"),
    "owner/poems-GGUF": ("README.md", "poems-f16.gguf"),
}
REPOSITORIES = {
    MODEL: FILES,
    GGUF_MODEL: GGUF_FILES,
    PICKLED_MODEL: PICKLED_FILES,
    **{name: {file: file.encode() for file in files} for name, files in ADAPTERS.items()},
}


class Hub(ThreadingHTTPServer):
    breaks_at: int | None = None  # bytes of the large file, after which the connection ends
    ranges: list[str]
    num_asked = 0

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
        self.server.num_asked += 1
        path = unquote(self.path.partition("?")[0])
        for model, files in REPOSITORIES.items():
            if path.startswith(f"/api/models/{model}/tree/"):
                tree = [_entry(files[name]) | {"type": "file", "path": name} for name in files]
                return self._json(tree, with_body)
            if path.startswith(f"/api/models/{model}/") or path == f"/api/models/{model}":
                siblings = [{"rfilename": name} for name in files]
                found = {"id": model, "sha": COMMIT, "siblings": siblings}
                return self._json(found, with_body)
            name = path.partition(f"/{model}/resolve/")[2].partition("/")[2]
            if name in files:
                return self._file(files[name], with_body)
        self.send_error(404)

    def _json(self, value: Any, with_body: bool) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"}, with_body)

    def _file(self, content: bytes, with_body: bool) -> None:
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


def _entry(content: bytes) -> dict[str, Any]:
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
