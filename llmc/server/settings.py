"""Options of the HTTP server, with the limits that keep one client from hurting the others."""

from __future__ import annotations

import importlib.util
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
    model_idle_timeout_s: float | None = None  # several models: then an idle one is unloaded
    model_memory: int | None = None  # bytes that several models may take together; None: any
    batch_dir: str | None = None  # folder of files and batches; None: there are none
    api_keys: Sequence[str] = ()  # empty: anyone who reaches the port
    admin_api_key: str | None = None  # for the operator's routes; None: nobody may use them
    profile_dir: str = "profiles"  # where /stop_profile writes
    salt_by_api_key: bool = False  # callers of different keys share no cached prefixes
    allowed_hosts: Sequence[str] = ()  # further Host names to accept on loopback without keys
    allowed_origins: Sequence[str] = ()  # of web pages that may call: scheme://host:port, or *
    max_body_bytes: int = 8 * 1024 * 1024
    max_image_body_bytes: int = 32 * 1024 * 1024  # in its place, for a model that reads images
    max_header_bytes: int = 64 * 1024
    max_headers: int = 100
    body_timeout_s: float = 30.0
    keep_alive_s: float = 15.0  # a comment on a quiet stream
    stalled_reader_s: float = 30.0  # then the client is disconnected and its request aborted
    idle_connection_s: int = 30
    shutdown_timeout_s: float = 30.0
    access_log: bool = True
    vllm_metrics: bool = False  # /metrics has vLLM's names too
    otlp_traces_endpoint: str | None = None  # URL that takes OTLP over HTTP; None: no traces
    ui: bool = True  # the page at /
    certificate: bool = False  # the architecture's check runs, or has run, beside the server

    @property
    def scheme(self) -> str:
        return "https" if self.ssl_certfile else "http"

    def __post_init__(self) -> None:
        if not self.ssl_certfile and (self.ssl_keyfile or self.ssl_ca_certs):
            raise ConfigError("ssl_keyfile and ssl_ca_certs need a certificate: ssl_certfile")
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                "otlp_traces_endpoint must be a URL like http://localhost:4318/v1/traces, "
                f"got {endpoint!r}"
            )
        if endpoint is not None and not has_opentelemetry():
            raise ConfigError(
                "traces need OpenTelemetry's SDK and exporter: pip install 'llmc-engine[otel]'"
            )
        if self.admin_api_key is not None and self.admin_api_key in ("", *self.api_keys):
            raise ConfigError(
                "admin_api_key must not be empty, nor one of the keys that clients have"
            )
        if self.root_path and not _ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError(f"root_path must be like /llm/v2, got {self.root_path!r}")
        for name in ("stream_interval", "api_workers"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a positive integer, got {value!r}")
        timeout = self.model_idle_timeout_s
        if timeout is not None and not timeout > 0:
            raise ConfigError(f"model_idle_timeout must be more than 0 seconds, got {timeout}")
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


def has_opentelemetry() -> bool:
    """Whether the packages of the extra `otel` are there."""
    try:
        needed = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")
        return all(importlib.util.find_spec(name) is not None for name in needed)
    except ModuleNotFoundError:  # of a parent package
        return False
