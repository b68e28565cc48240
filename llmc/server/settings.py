"""Options of the HTTP server, with the limits that keep one client from hurting the others."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llmc.errors import ConfigError

_ORIGIN = re.compile(r"https?://[A-Za-z0-9.\[\]:-]+")
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")
MAX_PROMPTS = 256  # prompts in one completions call
MAX_SEQUENCES = 512  # prompts times n in one call


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How the server listens, which clients it accepts, and its timeouts in seconds."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None  # a Unix socket's path, in place of host and port
    ssl_certfile: str | None = None  # PEM: serve HTTPS; its chain, and its key if it is in there
    ssl_keyfile: str | None = None  # PEM
    ssl_ca_certs: str | None = None  # PEM: clients need a certificate that one of these signed
    root_path: str = ""  # where a proxy shows the server, such as /llm; taken off where it is sent
    stream_interval: int = 1  # tokens of a choice between two events of a stream
    api_workers: int = 1  # processes that answer HTTP; more than one share the socket
    served_model_names: Sequence[str] = ()  # the first is shown; empty: the model's own name
    lora_modules: Mapping[str, str] = field(default_factory=dict)  # directories by adapters' names
    runtime_lora_dir: str | None = None  # adapters inside may be loaded over HTTP; None: none
    batch_dir: str | None = None  # folder of files and batches; None: there are none
    api_keys: Sequence[str] = ()  # empty: anyone who reaches the port
    salt_by_api_key: bool = False  # callers of different keys share no cached prefixes
    allowed_hosts: Sequence[str] = ()  # further Host names to accept on loopback without keys
    allowed_origins: Sequence[str] = ()  # of web pages that may call: scheme://host:port, or *
    max_body_bytes: int = 8 * 1024 * 1024
    max_header_bytes: int = 64 * 1024
    max_headers: int = 100
    body_timeout_s: float = 30.0
    keep_alive_s: float = 15.0  # a comment on a quiet stream
    stalled_reader_s: float = 30.0  # then the client is disconnected and its request aborted
    idle_connection_s: int = 30
    shutdown_timeout_s: float = 30.0
    access_log: bool = True
    ui: bool = True  # the page at /
    certificate: bool = False  # the architecture's check runs, or has run, beside the server

    @property
    def scheme(self) -> str:
        return "https" if self.ssl_certfile else "http"

    def __post_init__(self) -> None:
        if not self.ssl_certfile and (self.ssl_keyfile or self.ssl_ca_certs):
            raise ConfigError("ssl_keyfile and ssl_ca_certs need a certificate: ssl_certfile")
        if self.root_path and not _ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError(f"root_path must be like /llm/v2, got {self.root_path!r}")
        for name in ("stream_interval", "api_workers"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a positive integer, got {value!r}")
        if self.runtime_lora_dir is not None and self.api_workers > 1:
            raise ConfigError(
                "adapters can't be loaded at run time into several API processes; leave "
                "--runtime-lora-dir or --api-workers out"
            )
        if self.batch_dir is not None and self.api_workers > 1:
            raise ConfigError(
                "files and batches are of one API process; leave --batch-dir or --api-workers out"
            )
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allowed origin {origin!r} must be like https://app.example.com, "
                    "http://localhost:3000, or * for any web page"
                )
