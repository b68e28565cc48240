"""How messages cross process boundaries: msgpack over ZeroMQ, lines of JSON over pipes.

    frontend --Hello, AddRequest, AbortRequest, GetState, Operate, FrontendGone--> engine (ZeroMQ)
             <--------- EngineOutputs, EngineState, OperationResult, Disconnected ---------
    engine   --PhaseBegins, Phase, Ready, Failed--> main process           (its report pipe)

A message has three parts: the version, the name of its type, and the dataclass itself. Types are
decoded strictly and run their own checks (SamplingParams, EngineConfig), so a decoded message is as
valid as one created locally. The version is a digest of all message types: processes of different
installations notice that at once and never misread each other. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from llmc import __version__
from llmc.config import EngineConfig
from llmc.engine.messages import (
    AbortRequest,
    AddRequest,
    EngineOutputs,
    EngineState,
    EngineStats,
    GetState,
    Operate,
    OperationResult,
)
from llmc.errors import ConfigError, LlmcError
from llmc.model_info import ModelInfo, Phase, PhaseBegins

T = TypeVar("T")


class WireError(LlmcError):
    """A message that can't be read: it has another version, or is not one of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A frontend has connected. The answer is EngineOutputs with the engine's statistics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendGone:
    """Sent by the main process: another frontend has died, so its requests must be aborted."""

    frontend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnected:
    """The engine has dropped this frontend and its requests; it must say Hello again."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The engine process accepts requests."""

    info: ModelInfo
    stats: EngineStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """An exception that ended the engine process, in a form that another process can read."""

    kind: str
    message: str
    trace: str
    errno: int | None = None
    filename: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOrder:
    """What to load and where to listen. The engine exits when its standard input ends."""

    config: EngineConfig
    folder: str  # private to these processes; removed by the engine if the main process is killed
    address: str
    log_level: str
    log_format: str


TO_ENGINE = (Hello, AddRequest, AbortRequest, GetState, Operate, FrontendGone)
TO_FRONTEND = (EngineOutputs, EngineState, OperationResult, Disconnected)
REPORTS = (PhaseBegins, Phase, Ready, Failed)


def _to_plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise ConfigError(
        f"{value!r} can't be sent to the engine process; run with the engine in this process"
    )


def _from_plain(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    if kind is object:  # a field that may hold anything; what was sent is plain
        return value
    raise NotImplementedError(f"{kind.__name__} can't be received from another process")


def _version() -> str:
    types = (*TO_ENGINE, *TO_FRONTEND, *REPORTS, EngineOrder)
    _, parts = msgspec.json.schema_components(types, schema_hook=lambda kind: {"type": "string"})
    # Descriptions are docstrings, which don't affect the format.
    text = msgspec.json.encode(_without_descriptions(parts), order="sorted")
    return f"{__version__}-{hashlib.blake2b(text, digest_size=6).hexdigest()}"


def _without_descriptions(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if k != "description" or not isinstance(v, str)}
        return {name: _without_descriptions(item) for name, item in kept.items()}
    return [_without_descriptions(item) for item in value] if isinstance(value, list) else value


VERSION = _version()
_MSGPACK = msgspec.msgpack.Encoder(enc_hook=_to_plain)
_JSON = msgspec.json.Encoder(enc_hook=_to_plain)


def pack(message: object) -> list[bytes]:
    """The frames of a ZeroMQ message."""
    return [VERSION.encode(), type(message).__name__.encode(), _MSGPACK.encode(message)]


class Unpacker(Generic[T]):
    """Decodes the messages of one direction, which have one of `types`."""

    def __init__(self, types: Sequence[type]) -> None:
        self._decoders: dict[bytes, msgspec.msgpack.Decoder[Any]] = {
            kind.__name__.encode(): msgspec.msgpack.Decoder(kind, dec_hook=_from_plain)
            for kind in types
        }

    def __call__(self, frames: Sequence[bytes]) -> T:
        if len(frames) != 3:
            raise WireError(f"a message has {len(frames)} parts; it must have 3")
        version, kind, payload = frames
        if version != VERSION.encode():
            raise WireError(_other_version(version[:80].decode("utf-8", "replace")))
        if kind not in self._decoders:
            raise WireError(f"a message has the unknown kind {kind[:80]!r}")
        try:
            message: T = self._decoders[kind].decode(payload)
        except msgspec.DecodeError as exc:  # a ValidationError is one
            raise WireError(f"a message can't be read: {exc}") from None
        return message


def to_line(message: object) -> bytes:
    """One line of JSON for a pipe."""
    return _JSON.encode((VERSION, type(message).__name__, message)) + b"\n"


def from_line(line: bytes, *types: type) -> Any:
    """The message of a line, which must be of one of `types`."""
    try:
        version, name, payload = msgspec.json.decode(line, type=tuple[str, str, msgspec.Raw])
        if version != VERSION:
            raise WireError(_other_version(version))
        kind = next((kind for kind in types if kind.__name__ == name), None)
        if kind is None:
            raise WireError(f"a line has the unknown kind {name!r:.80}")
        return msgspec.json.decode(payload, type=kind, dec_hook=_from_plain)
    except msgspec.DecodeError as exc:
        raise WireError(f"a line can't be read: {exc}") from None


def _other_version(theirs: str) -> str:
    return (
        f"the other process uses version {theirs!r} and this one {VERSION!r}, so they belong to "
        "different installations of llmc; restart the server"
    )
