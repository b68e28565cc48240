"""What crosses process borders, and in which version: msgpack over ZeroMQ, JSON lines over pipes.

    front --Hello, Submit, Cancel, Gone--> engine     (ZeroMQ, engine_host and remote)
          <------ News, Refused ----------
    engine --Speaking, PhaseEnded, Ready, Failed--> main process     (its report pipe)

The types are decoded strictly, SamplingParams with all its checks: what arrives is as good as what
was made here. Every message names the version, which is a digest of these types, so that processes
from two installations find out at once and never misread each other. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from llmc import __version__
from llmc.config import EngineConfig
from llmc.engine.messages import AddRequest, EngineStats, RequestUpdate
from llmc.errors import ConfigError, LlmcError
from llmc.model_info import ModelInfo, Phase

T = TypeVar("T")


class WireError(LlmcError):
    """A message that can't be read: another version, or not ours at all."""


# ---- front -> engine ----


class Hello(msgspec.Struct, frozen=True, tag="hello", array_like=True):
    """A front is there. The answer is News with the engine's numbers."""


class Submit(msgspec.Struct, frozen=True, tag="submit", array_like=True):
    request: AddRequest


class Cancel(msgspec.Struct, frozen=True, tag="cancel", array_like=True):
    request_id: str


class Gone(msgspec.Struct, frozen=True, tag="gone", array_like=True):
    """Another front is dead, says the main process: its requests are nobody's."""

    front: str


# ---- engine -> front ----


class News(msgspec.Struct, frozen=True, tag="news", array_like=True):
    updates: Sequence[RequestUpdate]
    stats: EngineStats


class Refused(msgspec.Struct, frozen=True, tag="refused", array_like=True):
    """The engine keeps nothing of this front; it must say Hello again."""

    reason: str


# ---- engine -> main process, while it starts and when it fails ----


class Speaking(msgspec.Struct, frozen=True, tag="speaking"):
    """The first line."""

    version: str


class PhaseEnded(msgspec.Struct, frozen=True, tag="phase"):
    phase: Phase


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    info: ModelInfo
    stats: EngineStats


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """An exception that ended the engine, as far as it can be told elsewhere."""

    kind: str
    message: str
    trace: str
    errno: int | None = None
    filename: str | None = None


# ---- main process -> its children, on their standard input ----


class EngineOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What to load and where to listen. The engine ends when its standard input does."""

    config: EngineConfig
    folder: str  # private to these processes; removed by the engine if the main process is killed
    address: str
    log_level: str
    log_format: str


FRONT_MESSAGES = Hello | Submit | Cancel | Gone
ENGINE_MESSAGES = News | Refused
REPORTS = Speaking | PhaseEnded | Ready | Failed


def _to_plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise ConfigError(
        f"{value!r} can't be sent to the engine process; run with the engine in this process"
    )


def _from_plain(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"{kind.__name__} can't be received from another process")


def _version() -> str:
    types = (FRONT_MESSAGES, ENGINE_MESSAGES, REPORTS, EngineOrder)
    _, parts = msgspec.json.schema_components(types, schema_hook=lambda kind: {"type": "string"})
    # Descriptions are docstrings, which may change without consequence.
    text = msgspec.json.encode(_without_descriptions(parts), order="sorted")
    return f"{__version__}-{hashlib.blake2b(text, digest_size=6).hexdigest()}"


def _without_descriptions(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if k != "description" or not isinstance(v, str)}
        return {name: _without_descriptions(item) for name, item in kept.items()}
    return [_without_descriptions(item) for item in value] if isinstance(value, list) else value


VERSION = _version()
_VERSION_FRAME = VERSION.encode()
_MSGPACK = msgspec.msgpack.Encoder(enc_hook=_to_plain)
_JSON = msgspec.json.Encoder(enc_hook=_to_plain)


def pack(message: object) -> list[bytes]:
    """The frames of a ZeroMQ message."""
    return [_VERSION_FRAME, _MSGPACK.encode(message)]


class Unpacker(Generic[T]):
    """Reads messages of one direction."""

    def __init__(self, types: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
            types, dec_hook=_from_plain
        )

    def __call__(self, frames: Sequence[bytes]) -> T:
        if len(frames) != 2:
            raise WireError(f"a message has {len(frames)} parts; it must have 2")
        if frames[0] != _VERSION_FRAME:
            raise WireError(other_version(frames[0][:80].decode("utf-8", "replace")))
        try:
            message: T = self._decoder.decode(frames[1])
        except msgspec.DecodeError as exc:  # a ValidationError is one
            raise WireError(f"a message can't be read: {exc}") from None
        return message


def to_line(message: object) -> bytes:
    """One line of JSON for a pipe."""
    return _JSON.encode(message) + b"\n"


def from_line(line: bytes, types: Any) -> Any:
    try:
        return msgspec.json.decode(line, type=types, dec_hook=_from_plain)
    except msgspec.DecodeError as exc:
        raise WireError(f"a line can't be read: {exc}") from None


def other_version(theirs: str) -> str:
    return (
        f"the other process speaks version {theirs!r} and this one {VERSION!r}: they come from two "
        "installations of llmc; stop the server and start it again"
    )
