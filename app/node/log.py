"""Structured log lines: one JSON object a line, with the host, the unit and the environment in each."""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime

# Attributes that every LogRecord has; what a call passes as ``extra=`` comes beside them.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """``time`` (UTC, ISO 8601), ``level``, the host's own fields, ``message``, and ``extra=``."""

    def __init__(self) -> None:
        super().__init__()
        names = {
            "unit": "NEURONFLEET_UNIT",
            "instance_id": "NEURONFLEET_INSTANCE_ID",
            "environment": "NEURONFLEET_ENVIRONMENT",
        }
        self._context = {key: os.environ[name] for key, name in names.items() if os.environ.get(name)}

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON; an exception becomes ``error``, its traceback ``traceback``."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            **self._context,
            "message": record.getMessage(),
            **{key: value for key, value in vars(record).items() if key not in _STANDARD},
        }
        if record.exc_info and record.exc_info[1] is not None:
            line["error"] = f"{type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class _PlainFormatter(logging.Formatter):
    """For a person at a terminal: the message and its extras."""

    def format(self, record: logging.LogRecord) -> str:
        extras = " ".join(f"{key}={value}" for key, value in vars(record).items() if key not in _STANDARD)
        text = f"{record.levelname.lower():7} {record.getMessage()}" + (f"  [{extras}]" if extras else "")
        return text + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


def set_up_logging() -> None:
    """Log to standard error: JSON lines, or plain lines when it is a terminal."""
    handler = logging.StreamHandler()
    handler.setFormatter(_PlainFormatter() if sys.stderr.isatty() else JsonFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # They tell of each credential look-up and each request at INFO.
    for name in ("botocore", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)
