"""The replica's own HTTP server: what a client reads was written by the process that made the token.

Serve starts, checks and stops the replica as ever; only the bytes do not pass its proxy. The server listens
on the host's one port, in the replica's own event loop, and ends with it: new requests are refused while it
drains, running streams may end.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.serve.front import TRANSPORT, Front

SEND_BUFFER_BYTES = 256 * 1024
"""What the kernel holds for one client that does not read. With the server's own 64 KiB it bounds a stream's
memory; then the engine's output waits as one merged text."""
_BACKLOG = 4096


class DirectServerError(RuntimeError):
    """The port cannot be listened on; the message says why and what to do."""


class _Protocol(HttpToolsProtocol):
    """Gives each request its connection, so that it can be cut."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {TRANSPORT: self.transport}  # type: ignore[dict-item]


class _Server(uvicorn.Server):
    """Signals are Ray's: a replica is stopped by Serve."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class DirectServer:
    """HTTP for one replica on ``host``:``port``, in the running event loop."""

    def __init__(self, front: Front, host: str, port: int, keep_alive_s: int) -> None:
        self._front = front
        self._socket = listening_socket(host, port)
        self.port = int(self._socket.getsockname()[1])
        config = uvicorn.Config(
            front,
            http=_Protocol,
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=keep_alive_s,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen; returns when requests are taken."""
        self._task = asyncio.ensure_future(self._server.serve([self._socket]))
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise DirectServerError("the server ended while it started")
            await asyncio.sleep(0.01)

    async def drain(self, timeout_s: float) -> None:
        """Say that this replica is not ready, take no new connection, and let running requests end."""
        self._front.draining = True
        if self._task is None:
            return
        self._server.config.timeout_graceful_shutdown = max(1, int(timeout_s))
        self._server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


def listening_socket(host: str, port: int) -> socket.socket:
    """A bound socket, with small buffers for those it accepts.

    Raises:
        DirectServerError: the port is taken.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise DirectServerError(
            f"the replica cannot listen on {host}:{port} ({error.strerror}); with front_door=direct a host "
            "has one replica and no Serve proxy on that port"
        ) from error
    listener.setblocking(False)
    return listener
