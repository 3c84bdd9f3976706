"""How far a fetch has come, for the log and for ``neuronfleet status``."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.node.host import RUN_DIR

PROGRESS_PATH = RUN_DIR / "fetch.json"
Tell = Callable[[int, int], None]
"""Told every second how many bytes are there, and how many there are in all."""
_WINDOW_S = 10.0
_FILE_EVERY_S = 1.0

log = logging.getLogger(__name__)


class Progress:
    """Bytes of an artifact that are on the disk. ``path`` is kept up to date while it is used with ``with``.

    The document: ``digest``, ``state`` (``fetching``, ``whole``, ``failed``), ``bytes``, ``total_bytes``,
    ``rate_bytes_per_s`` (what came over the network in the last ten seconds; over the whole time once it has
    ended), ``updated`` (seconds since the epoch).
    """

    def __init__(self, digest: str, path: Path | None, log_every_s: float, tell: Tell | None = None) -> None:
        self.total = 0
        self._digest, self._path, self._log_every_s, self._told = digest, path, log_every_s, tell
        self._held = self._received = 0
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._samples: deque[tuple[float, int]] = deque([(self._started, 0)])
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="fetch-progress", daemon=True)

    def received(self, count: int) -> None:
        """``count`` bytes came over the network."""
        with self._lock:
            self._received += count

    def held(self, count: int) -> None:
        """``count`` bytes were on the disk already (negative: they, or some that came, are thrown away)."""
        with self._lock:
            self._held += count

    def rate(self) -> float:
        """Bytes a second over the last ten seconds."""
        now, received = time.monotonic(), self._received
        with self._lock:
            self._samples.append((now, received))
            while len(self._samples) > 2 and self._samples[1][0] < now - _WINDOW_S:
                self._samples.popleft()
            then, before = self._samples[0]
        return (received - before) / max(now - then, 1e-6)

    def as_fields(self, rate: float) -> dict[str, Any]:
        """For a log line: MB done and in all, MB/s."""
        return {
            "done_mb": round((self._held + self._received) / 1e6),
            "total_mb": round(self.total / 1e6),
            "mb_per_s": round(rate / 1e6),
        }

    def __enter__(self) -> Progress:
        self._write("fetching", 0.0)
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        rate = self._received / max(time.monotonic() - self._started, 1e-6)
        self._write("failed" if kind else "whole", rate)
        if not kind:
            log.info("artifact is whole", extra={"digest": self._digest, **self.as_fields(rate)})

    def _tell(self) -> None:
        logged = time.monotonic()
        while not self._stop.wait(min(_FILE_EVERY_S, self._log_every_s)):
            rate = self.rate()
            self._write("fetching", rate)
            if time.monotonic() - logged >= self._log_every_s:
                logged = time.monotonic()
                log.info("fetching", extra=self.as_fields(rate))

    def _write(self, state: str, rate: float) -> None:
        if self._told:
            self._told(self._held + self._received, self.total)
        if self._path is None:
            return
        document = {
            "digest": self._digest,
            "state": state,
            "bytes": self._held + self._received,
            "total_bytes": self.total,
            "rate_bytes_per_s": round(rate),
            "updated": time.time(),
        }
        try:
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text(json.dumps(document))
            temporary.replace(self._path)
        except OSError as error:
            # Nobody is served by a fetch that ends because its progress cannot be shown.
            log.warning("progress cannot be written", extra={"path": str(self._path), "reason": str(error)})
            self._path = None


def read_progress(digest: str, path: Path = PROGRESS_PATH) -> dict[str, Any]:
    """What the last fetch of ``digest`` said; empty when there is none on this boot."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) and document.get("digest") == digest else {}
