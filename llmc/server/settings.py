"""Options of the HTTP server, including limits that protect clients from one another."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llmc.errors import CheckpointError, ConfigError, reason_of
from llmc.startup.adapter_files import find_adapter, rank_of

_ORIGIN = re.compile(r"https?://[A-Za-z0-9.\[\]:-]+")
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")
MAX_PROMPTS = 256  # prompts in one completions call
MAX_SEQUENCES = 512  # prompts times n in one call


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How the server listens, which clients it accepts, and its timeouts in seconds."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None  # a Unix socket's path, instead of host and port
    ssl_certfile: str | None = None  # PEM: serve HTTPS; the chain, and optionally the key
    ssl_keyfile: str | None = None  # PEM
    ssl_ca_certs: str | None = None  # PEM: clients need a certificate signed by one of these CAs
    root_path: str = ""  # prefix under which a proxy serves us, such as /llm; stripped if present
    stream_interval: int = 1  # tokens per choice between two events of a stream
    api_workers: int = 1  # processes that serve HTTP; several share the socket
    served_model_names: Sequence[str] = ()  # the first appears in responses; empty: its own name
    lora_modules: Mapping[str, str] = field(default_factory=dict)  # adapter name -> its files
    runtime_lora_dir: str | None = None  # adapters in it can be loaded over HTTP; None: none can
    model_idle_timeout_s: float | None = None  # several models: unload one idle for this long
    model_memory: int | None = None  # bytes that several models may use together; None: no limit
    batch_dir: str | None = None  # folder of files and batches; None: disabled
    api_keys: Sequence[str] = ()  # empty: no key is needed
    admin_api_key: str | None = None  # for the operator's routes; None: they are disabled
    profile_dir: str = "profiles"  # where /stop_profile writes
    salt_by_api_key: bool = False  # callers with different keys share no cached prefixes
    allowed_hosts: Sequence[str] = ()  # further Host names to accept on loopback without keys
    allowed_origins: Sequence[str] = ()  # of web pages that may call: scheme://host:port, or *
    max_body_bytes: int = 8 * 1024 * 1024
    max_image_body_bytes: int = 32 * 1024 * 1024  # used instead for a model that reads images
    max_header_bytes: int = 64 * 1024
    max_headers: int = 100
    body_timeout_s: float = 30.0
    keep_alive_s: float = 15.0  # silence after which a stream gets a comment
    stalled_reader_s: float = 30.0  # then the client is disconnected and its request aborted
    idle_connection_s: int = 30
    shutdown_timeout_s: float = 30.0
    access_log: bool = True
    vllm_metrics: bool = False  # /metrics also uses vLLM's names
    otlp_traces_endpoint: str | None = None  # URL of an OTLP/HTTP collector; None: no traces
    ui: bool = True  # the page at /
    certificate: bool = False  # the architecture check runs, or has run, alongside the server

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
            raise ConfigError("admin_api_key must not be empty or one of the clients' keys")
        if not all(self.served_model_names):
            raise ConfigError("--served-model-name must not be empty")
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
                "adapters can't be loaded at run time with several API processes; leave out "
                "--runtime-lora-dir or --api-workers"
            )
        if self.batch_dir is not None and self.api_workers > 1:
            raise ConfigError(
                "files and batches need a single API process; leave out --batch-dir or "
                "--api-workers"
            )
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allowed origin {origin!r} must be like https://app.example.com, "
                    "http://localhost:3000, or * for any web page"
                )


def has_opentelemetry() -> bool:
    """Whether the packages of the extra `otel` are installed."""
    try:
        needed = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")
        return all(importlib.util.find_spec(name) is not None for name in needed)
    except ModuleNotFoundError:  # a parent package is missing
        return False


def rank_of_adapter(name: str, path: str) -> int:
    """The largest rank of an adapter of `lora_modules`; a hub id is downloaded. ConfigError if
    there is none."""
    try:
        return rank_of(find_adapter(path))
    except (CheckpointError, OSError) as error:
        raise ConfigError(f"--lora-modules {name}={path}: {reason_of(error)}") from error
