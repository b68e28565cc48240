"""Logging of llmc's processes: lines of text, or of JSON for log collectors.

Both include the id of the request being served (`REQUEST_ID`). A record's `fields` (passed as
`extra={"fields": {...}}`) are additional JSON keys; in text they are part of the message.
"""

from __future__ import annotations

import json
import logging
import os
import time
from contextvars import ContextVar

FORMATS = ("text", "json")
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)


def set_up_logging(level: str, form: str) -> None:
    """Log to stderr: llmc's own records from `level` up, those of libraries from warnings up."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter(TEXT))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("llmc").setLevel(level.upper())


class TextFormatter(logging.Formatter):
    """Appends the request's id to the message, before a traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        text = super().formatMessage(record)
        request_id = REQUEST_ID.get()
        return text if request_id is None else f"{text} id={request_id}"


class JsonFormatter(logging.Formatter):
    """One object per line: time (UTC, ISO 8601), level, logger, pid, message, id and fields."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "pid": os.getpid(),
            "message": record.getMessage(),
        }
        request_id = REQUEST_ID.get()
        if request_id is not None:
            line["request_id"] = request_id
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # repr: a value that is not JSON-serializable must not lose the line
        return json.dumps(line, ensure_ascii=False, default=repr)
