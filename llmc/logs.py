"""How llmc's processes log: lines of text, or of JSON for a program that collects them.

Both name the request that is being served (`REQUEST_ID`). A record's `fields` (given with
`extra={"fields": {...}}`) are further keys of its JSON; in text they are part of the message.
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
    """llmc's own records from `level` on, those of libraries from warnings on, all to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter(TEXT))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("llmc").setLevel(level.upper())


class TextFormatter(logging.Formatter):
    """The request's id at the end of the message, before a traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        text = super().formatMessage(record)
        request_id = REQUEST_ID.get()
        return text if request_id is None else f"{text} id={request_id}"


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC, ISO 8601), level, logger, pid, message, request_id, fields."""

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
        # what can't be written as JSON must not lose the line
        return json.dumps(line, ensure_ascii=False, default=repr)
