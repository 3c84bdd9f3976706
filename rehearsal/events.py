"""The rehearsal's event log: what happened, in order, for people and for conditions that wait on it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Kept in memory; the file keeps all. A rehearsal of a day makes some thousands.
_KEPT = 20_000


@dataclass(frozen=True)
class Happening:
    """One event: ``kind`` is ``subject.what`` (``instance.launched``, ``signal.received``)."""

    seq: int
    time: float
    kind: str
    message: str
    fields: dict[str, Any]

    def document(self) -> dict[str, Any]:
        """The event as the JSON that files and the control socket carry."""
        return {
            "seq": self.seq,
            "time": round(self.time, 3),
            "kind": self.kind,
            "message": self.message,
            **self.fields,
        }


class EventLog:
    """Append-only, thread-safe; ``since`` can wait for news."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._changed = threading.Condition()
        self._events: list[Happening] = []
        self._seq = 0

    def add(self, kind: str, message: str, **fields: Any) -> Happening:
        """Record an event and wake whoever waits; ``message`` is one line for a person."""
        with self._changed:
            self._seq += 1
            event = Happening(self._seq, time.time(), kind, message, fields)
            self._events.append(event)
            del self._events[:-_KEPT]
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps(event.document(), default=str) + "\n")
            self._changed.notify_all()
        return event

    def since(self, seq: int, wait_s: float = 0.0) -> list[Happening]:
        """Events after number ``seq``; waits up to ``wait_s`` seconds when there is none yet."""
        deadline = time.monotonic() + wait_s
        with self._changed:
            while self._seq <= seq:
                left = deadline - time.monotonic()
                if left <= 0:
                    return []
                self._changed.wait(left)
            return [event for event in self._events if event.seq > seq]

    def wait_until(self, condition: Callable[[], bool], timeout_s: float, poll_s: float = 0.5) -> bool:
        """Wait until ``condition`` holds, asked at every event and each ``poll_s`` seconds; False: timed out.

        ``condition`` runs without this log's lock, so it may take others.
        """
        deadline = time.monotonic() + timeout_s
        while not condition():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            with self._changed:
                self._changed.wait(min(left, poll_s))
        return True
