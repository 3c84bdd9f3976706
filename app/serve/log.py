"""Structured logs of the serving side: one JSON object a line, on standard error.

Every line of a request carries its ``request_id``; every line of a replica carries ``replica``. Prompts,
answers and header values never appear.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Any

LOGGER_NAME = "neuronfleet.serve"
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {
    "message",
    "asctime",
    "taskName",
    "vllm_process_name",  # vLLM adds it to every record of the process
}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``time`` (UTC, milliseconds), ``level``, ``event``, then the extras."""

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        """Fields given by ``extra=`` follow the fixed ones; an exception is put in ``exception``."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **self._fields,
        }
        line.update(
            {
                key: value
                for key, value in record.__dict__.items()
                if key not in _STANDARD and not key.startswith("_ray_")
            }
        )
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logging(**fields: Any) -> logging.Logger:
    """Set up the serving logger once a process; ``fields`` appear on each of its lines, and so do the
    instance and the environment on a host (its units' environment names them)."""
    for key in ("instance_id", "environment"):
        if value := os.environ.get(f"NEURONFLEET_{key.upper()}"):
            fields.setdefault(key, value)
    logger = logging.getLogger(LOGGER_NAME)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(fields))
    logger.handlers[:] = [handler]
    return logger


def serving_logger() -> logging.Logger:
    """The serving logger, as :func:`configure_logging` set it up."""
    return logging.getLogger(LOGGER_NAME)
