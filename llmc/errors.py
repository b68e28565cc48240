"""The errors that llmc raises on purpose, so that callers can tell their mistakes from ours.

    LlmcError
    +-- InvalidRequestError (also ValueError)   a prompt or a sampling parameter is wrong
    +-- ConfigError         (also ValueError)   a flag, an option or the environment is wrong
    |   +-- CheckpointError                     the model's files are missing, broken or unsupported
    +-- CompileError                            capture or a pass failed on this model
    +-- EngineDeadError                         the engine stopped and accepts no more requests
    |   +-- EngineAsleepError                   it was put to sleep, and can be woken
    |   +-- EngineShutDownError                 it was shut down on purpose
    +-- QueueFullError                          too many requests wait; try again later

A message says what is wrong, quotes the value, and says what to do, in one or two sentences.
"""

from __future__ import annotations


class LlmcError(Exception):
    """Base of all errors raised on purpose."""


class InvalidRequestError(LlmcError, ValueError):
    """A request can't be served as written.

    `param` names the offending field (OpenAI style: `messages[0].content`), `code` is the
    machine-readable reason that the HTTP API returns, e.g. `context_length_exceeded`.
    """

    def __init__(
        self, message: str, *, param: str | None = None, code: str = "invalid_value"
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ConfigError(LlmcError, ValueError):
    """An engine option, a flag or an environment variable is wrong."""


class CheckpointError(ConfigError):
    """The model directory or one of its files can't be used."""


class CompileError(LlmcError):
    """The model's graph could not be captured, or a pass that must match did not."""


class EngineDeadError(LlmcError):
    """The engine has stopped; the message says why."""


class EngineAsleepError(EngineDeadError):
    """The engine was put to sleep; it accepts requests again when it is woken."""


class EngineShutDownError(EngineDeadError):
    """The engine was shut down, or is about to be: nothing is wrong with it or with the request."""


class QueueFullError(LlmcError):
    """The engine's waiting queue is full."""


def reason_of(error: BaseException) -> str:
    """The message of another library's error on one line, with its type if it would be unclear."""
    text = " ".join(str(error).split())[:300]
    if not text or isinstance(error, LookupError):
        return f"{type(error).__name__}: {text}".removesuffix(": ")
    return text
