"""One request's way out: stream headers, heartbeats, limits on time, and the end of what hangs.

A stream's head is held until its first event or heartbeat, so that an engine that fails before the first
token still gets an honest status. No token is ever held. One sweep over all live exchanges does the timing:
no timer for each request, nothing for each token but a time stamp.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

from app.serve.errors import Send, named_error

HEARTBEAT = b": keep-alive\n\n"
SWEEP_S = 0.25
_GRACE_S = 0.02
_STREAM_HEADERS = (
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)


@dataclass(frozen=True)
class StageLimits:
    """How long each stage of a request may take, in seconds; each is a replica setting of the same name.

    They are looked at every :data:`SWEEP_S` seconds, so each may be that much late.
    """

    heartbeat_s: float = 15.0
    body_timeout_s: float = 30.0
    first_token_timeout_s: float = 600.0
    token_timeout_s: float = 60.0
    write_timeout_s: float = 20.0
    request_timeout_s: float = 3600.0


class StageTimeout(Exception):
    """A stage took longer than its limit; ``status`` fits an answer that has not begun."""

    def __init__(self, message: str, status: int = 504) -> None:
        super().__init__(message)
        self.status = status


class Exchange:
    """Watches and completes one response.

    ``heartbeats``: comments are allowed in its event stream. ``fields``, once set, are the request's: errors
    of the engine's app then name the one at fault. ``on_body`` sees each piece of the answer.
    """

    def __init__(self, send: Send, request_id: str, limits: StageLimits, heartbeats: bool) -> None:
        self._send = send
        self._request_id = request_id
        self._limits = limits
        self._heartbeats = heartbeats
        self._started = self._last_write = time.monotonic()
        self._last_token: float | None = None
        self._first_byte: float | None = None
        self._sending_since: float | None = None
        self._held: Any = None
        self._bytes = 0
        self._beat: asyncio.Task[None] | None = None
        self.streaming = False
        self.finished = False
        self.body_read = False
        self.status: int | None = None
        self.ended_by: str | None = None
        self.broken: str | None = None
        self.fields: Container[str] | None = None
        self.on_body: Callable[[bytes], None] | None = None
        self.gone = asyncio.Event()
        self._rewrite = False
        self.account: Callable[[bytes], None] | None = None
        self.cancel: Callable[[StageTimeout], None] | None = None

    @property
    def begun(self) -> bool:
        """Whether anything went to the client."""
        return self.status is not None and self._held is None

    def end(self, task: asyncio.Task[None]) -> None:
        """End the work of a request: what it still says goes nowhere.

        The app first sees its client leave, and ends what it started (vLLM's handlers are tasks that a mere
        cancellation leaves behind); then whatever is left is cancelled.
        """
        self.gone.set()
        asyncio.get_running_loop().call_later(_GRACE_S, task.cancel)

    async def send(self, message: Any) -> None:
        """Pass a message of vLLM's app on."""
        if self.gone.is_set():
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = list(message.get("headers", ()))
            self.streaming = _is_stream(headers)
            message = {**message, "headers": _marked(headers) if self.streaming else headers}
            self._rewrite = self.fields is not None and 400 <= message["status"] < 500
            if (self.streaming and self.status == 200) or self._rewrite:
                self._held = message
                return
            await self._out(message)
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        if not body and more:
            return
        if self._rewrite and not more:
            body = named_error(body, self.status or 400, self.fields or ())
            kept = [item for item in self._held["headers"] if item[0].lower() != b"content-length"]
            self._held["headers"] = [*kept, (b"content-length", str(len(body)).encode())]
            message = {**message, "body": body}
        if self.broken is not None and self._held is not None:
            return  # no event came before the engine failed: the front answers instead
        if body:
            self._note(body)
        if self._held is not None:
            await self._release()
        self.finished = not more
        await self._out(message)

    async def write(self, event: bytes) -> None:
        """One event of a stream, straight to the connection."""
        if self.gone.is_set():
            return
        self._note(event)
        if self._held is not None:
            await self._release()
        await self._out({"type": "http.response.body", "body": event, "more_body": True})

    async def restart(self) -> None:
        """Forget a head that was held: another answer takes its place."""
        self._held, self.status, self.streaming, self.fields = None, None, False, None

    def _note(self, body: bytes) -> None:
        now = self._last_token = time.monotonic()
        if self._first_byte is None:
            self._first_byte = now
        self._bytes += len(body)
        if self.account is not None and self.status == 200:
            self.account(body)
        if self.on_body is not None:
            self.on_body(body)

    async def _release(self) -> None:
        held, self._held = self._held, None
        await self._out(held)

    async def _out(self, message: Any) -> None:
        self._sending_since = self._last_write = time.monotonic()
        await self._send(message)
        self._sending_since = None

    def sweep(self, now: float) -> None:
        """Beat if the stream is silent; end what is over a limit."""
        if self.gone.is_set() or (self.finished and self._sending_since is None):
            return
        over = self._over(now)
        if over is not None:
            if self.cancel is not None:
                cancel, self.cancel = self.cancel, None
                self.ended_by = str(over)
                cancel(over)
        elif (
            self._heartbeats
            and self.streaming
            and self._sending_since is None
            and now - self._last_write >= self._limits.heartbeat_s
        ):
            self._beat = asyncio.ensure_future(self._heartbeat())

    async def _heartbeat(self) -> None:
        try:
            if self._held is not None:
                await self._release()
            await self._out({"type": "http.response.body", "body": HEARTBEAT, "more_body": True})
        except (RuntimeError, OSError):
            pass  # the response ended, or the client left, in this very moment

    def _over(self, now: float) -> StageTimeout | None:
        limits = self._limits
        if not self.body_read:
            if now - self._started > limits.body_timeout_s:
                return StageTimeout(
                    f"the request body did not come within body_timeout_s={limits.body_timeout_s:g} s", 408
                )
            return None
        if self._sending_since is not None:
            if now - self._sending_since > limits.write_timeout_s:
                return StageTimeout(
                    f"the client read nothing for write_timeout_s={limits.write_timeout_s:g} s, with its "
                    "buffers full: its stream was dropped"
                )
        elif self.streaming and self._last_token is not None:
            if now - self._last_token > limits.token_timeout_s:
                return StageTimeout(
                    f"the engine gave no further token for token_timeout_s={limits.token_timeout_s:g} s"
                )
        elif self.streaming and now - self._started > limits.first_token_timeout_s:
            return StageTimeout(
                f"no token came within first_token_timeout_s={limits.first_token_timeout_s:g} s (queue and "
                "prefill)"
            )
        if now - self._started > limits.request_timeout_s:
            return StageTimeout(f"the request took longer than {limits.request_timeout_s:g} s")
        return None

    @property
    def blocked(self) -> bool:
        """Whether the client does not take what is written."""
        return self._sending_since is not None

    def summary(self) -> dict[str, Any]:
        """The request's line; times in ms. ``status`` is None if the client left before an answer."""
        first = None if self._first_byte is None else round((self._first_byte - self._started) * 1000, 1)
        line = {
            "request_id": self._request_id,
            "status": self.status,
            "first_byte_ms": first,
            "duration_ms": round((time.monotonic() - self._started) * 1000, 1),
            "bytes": self._bytes,
        }
        return line if self.ended_by is None else {**line, "ended_by": self.ended_by}


class Sweeper:
    """Looks at every live exchange a few times a second, while there are any."""

    def __init__(self) -> None:
        self._live: set[Exchange] = set()
        self._task: asyncio.Task[None] | None = None

    def add(self, exchange: Exchange) -> None:
        """Watch it from now on."""
        self._live.add(exchange)
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._run())

    def remove(self, exchange: Exchange) -> None:
        """It is over."""
        self._live.discard(exchange)

    async def _run(self) -> None:
        while self._live:
            await asyncio.sleep(SWEEP_S)
            now = time.monotonic()
            for exchange in list(self._live):
                exchange.sweep(now)


def _is_stream(headers: list[tuple[bytes, bytes]]) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers
    )


def _marked(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """A stream is marked as not to be buffered or changed. (Serve's proxy adds the request id itself.)"""
    replaced = {name for name, _ in _STREAM_HEADERS}
    return [item for item in headers if item[0].lower() not in replaced] + list(_STREAM_HEADERS)
