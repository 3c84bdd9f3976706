"""The daemon's control socket: what the rehearsal's own commands ask it, on ``HOME/control.sock``.

One JSON object a line each way: ``{"op": NAME, ...}`` is answered by ``{"ok": true, "result": ...}`` or
``{"ok": false, "error": TEXT}``. The socket is the owner's alone (mode 0600); hosts cannot reach it.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import socketserver
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rehearsal.interfaces import RehearsalError

log = logging.getLogger("rehearsal.control")
SOCKET_NAME = "control.sock"
_SLACK_S = 10.0

Operation = Callable[..., Any]


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def __init__(self, path: Path, operations: dict[str, Operation]) -> None:
        before = os.umask(0o177)
        try:
            super().__init__(str(path), _Handler)
        finally:
            os.umask(before)
        self.operations = operations


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        for line in self.rfile:
            try:
                request = json.loads(line)
                operation = self.server.operations.get(request.pop("op", ""))
                if operation is None:
                    raise ValueError(f"op must be one of: {', '.join(sorted(self.server.operations))}")
                answer = {"ok": True, "result": operation(**request)}
            except Exception as error:
                log.warning("control request failed: %s", error)
                answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
            try:
                self.wfile.write(json.dumps(answer, default=str).encode() + b"\n")
            except BrokenPipeError:
                return


class ControlServer:
    """Answers on the socket, in threads."""

    def __init__(self, home: Path, operations: dict[str, Operation]) -> None:
        self._path = home / SOCKET_NAME
        self._path.unlink(missing_ok=True)
        self._server = _Server(self._path, operations)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.25}, name="control", daemon=True
        )

    def start(self) -> None:
        """Serve."""
        self._thread.start()

    def stop(self) -> None:
        """Stop and remove the socket."""
        self._server.shutdown()
        self._server.server_close()
        self._path.unlink(missing_ok=True)


def ask(home: Path, op: str, *, timeout_s: float = 30.0, **arguments: Any) -> Any:
    """Ask the daemon of ``home``; see ``rehearsal.daemon.Daemon.operations`` for what it knows.

    Args:
        home: the rehearsal's home.
        op: the operation.
        timeout_s: how long the answer may take, beside the operation's own ``wait_s`` or ``timeout``.
        arguments: the operation's arguments.

    Raises:
        RehearsalError: no daemon answers there, or it refused.
    """
    patience = timeout_s + float(arguments.get("wait_s", 0.0)) + _SLACK_S
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(patience)
            connection.connect(str(home / SOCKET_NAME))
            connection.sendall(json.dumps({"op": op, **arguments}).encode() + b"\n")
            line = connection.makefile("rb").readline()
    except OSError as error:
        raise RehearsalError(f"no rehearsal daemon answers in {home} ({error}): is it up?") from error
    if not line:
        raise RehearsalError(f"the rehearsal daemon in {home} ended while it was asked for {op}")
    answer = json.loads(line)
    if not answer["ok"]:
        raise RehearsalError(f"the rehearsal daemon refused {op}: {answer['error']}")
    return answer["result"]
