"""A store over real HTTP that fails as told: what S3 looks like from a host on a bad day. Loopback only."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_ERRORS = {"503": (503, "SlowDown"), "500": (500, "InternalError"), "403": (403, "AccessDenied")}


class FaultyServer(ThreadingHTTPServer):
    """``faults`` maps a key to the faults of its next requests, one each: ``503``, ``500``, ``403``,
    ``reset`` (half of the body, then RST), ``stall`` (half of the body, then nothing for ``stall_s``),
    ``flip`` (one bit is wrong). ``always`` maps a key to the fault of every request."""

    daemon_threads = True

    def __init__(self, content: dict[str, bytes], stall_s: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.content = content
        self.stall_s = stall_s
        self.faults: dict[str, list[str]] = {}
        self.always: dict[str, str] = {}
        self.requests: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Connections that break are what this server is for."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyServer

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        key = self.path.split("?")[0].removeprefix("/artifacts/")
        self.server.requests[key] += 1
        waiting = self.server.faults.get(key)
        fault = self.server.always.get(key) or (waiting.pop(0) if waiting else "")
        if fault in _ERRORS:
            self._refuse(*_ERRORS[fault], body)
        elif key not in self.server.content:
            self._refuse(404, "NoSuchKey", body)
        else:
            self._send(key, fault, body)

    def _refuse(self, status: int, code: str, body: bool) -> None:
        document = f"<Error><Code>{code}</Code><Message>as told</Message></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(document)))
        self.end_headers()
        if body:
            self.wfile.write(document)

    def _send(self, key: str, fault: str, body: bool) -> None:
        data = self.server.content[key]
        start, end = 0, len(data)
        if asked := self.headers.get("Range"):
            first, last = asked.removeprefix("bytes=").split("-")
            start, end = int(first), min(int(last) + 1, len(data))
            if start >= len(data):
                self._refuse(416, "InvalidRange", body)
                return
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        if not body:
            return
        part = bytearray(data[start:end])
        if fault == "flip":
            part[len(part) // 2] ^= 1
        if fault in ("reset", "stall"):
            part = part[: len(part) // 2]
        self.wfile.write(part)
        self.server.sent[key] += len(part)
        if fault == "stall":
            time.sleep(self.server.stall_s)
        if fault in ("reset", "stall"):
            self.wfile.flush()
            # Let what was sent arrive: a reset drops what the peer has not read.
            time.sleep(0.05)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True


@contextmanager
def serve(content: dict[str, bytes], stall_s: float = 1.5) -> Iterator[FaultyServer]:
    """A server on a free port of loopback for as long as the block lasts."""
    with FaultyServer(content, stall_s) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
