"""The replica's HTTP front: a thin ASGI layer before vLLM's server app.

It answers health, readiness and ``/generate`` itself, lets through the paths of the public surface and no
others (vLLM's app has more, among them some that steer the engine), gives every request an id, marks streams
as not to be buffered, bounds what is taken on, and logs one line for each request. It never holds a chunk
back.
"""

from __future__ import annotations

import time
from typing import Any

from app.serve.admission import Admission, Overloaded
from app.serve.engines.base import Engine
from app.serve.engines.vllm_engine import new_request_id
from app.serve.errors import Receive, Scope, Send, send_error, send_json
from app.serve.generate import generate
from app.serve.log import serving_logger
from app.serve.readiness import Readiness

GENERATING = frozenset(
    {"/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"}
)
PASSED = frozenset({"/v1/models", "/tokenize", "/detokenize", "/metrics", "/version"}) | (
    GENERATING - {"/generate"}
)
OWN = frozenset({"/generate", "/healthz", "/readyz"})
_QUIET = frozenset({"/healthz", "/readyz", "/metrics"})
_STREAM_HEADERS = (
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)
_REQUEST_ID = b"x-request-id"
_MAX_REQUEST_ID = 128


class Front:
    """ASGI app of one replica."""

    def __init__(self, engine: Engine, readiness: Readiness, admission: Admission, replica: str = "") -> None:
        self._engine = engine
        self._readiness = readiness
        self._admission = admission
        self._replica = replica
        self._log = serving_logger()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection event: lifespan goes to vLLM's app, HTTP is served here."""
        if scope["type"] != "http":
            await self._engine.app(scope, receive, send)
            return
        request_id = _request_id(scope)
        exchange = _Exchange(send, request_id)
        path = str(scope["path"])
        try:
            await self._route(scope, path, receive, exchange.send, request_id)
        except ConnectionError:
            pass  # the client went away while its body was read; nobody is left to answer
        except Exception:
            self._log.exception("request failed", extra={"request_id": request_id, "path": path})
            if exchange.status is not None:
                raise  # the stream has begun: break it, so that the client sees it is not whole
            message = f"the engine failed on this request; its id is {request_id}"
            await send_error(exchange.send, 500, message)
        finally:
            if path not in _QUIET:
                self._log.info(
                    "request", extra={"method": scope["method"], "path": path, **exchange.summary()}
                )

    async def _route(self, scope: Scope, path: str, receive: Receive, send: Send, request_id: str) -> None:
        if path == "/healthz":
            await send_json(send, 200, {"status": "alive", "replica": self._replica})
        elif path == "/readyz":
            await self._ready(send)
        elif path not in PASSED and path not in OWN:
            served = ", ".join(sorted(PASSED | OWN))
            await send_error(send, 404, f"there is no {path} here; served are {served}")
        elif path in GENERATING and scope["method"] == "POST":
            try:
                with self._admission.admit():
                    await self._generating(scope, path, receive, send, request_id)
            except Overloaded as error:
                await send_error(send, 503, str(error), retry_after_s=error.retry_after_s)
        elif path == "/generate":
            await send_error(send, 405, 'POST {"prompt": "…"} to /generate')
        else:
            await self._engine.app(scope, receive, send)

    async def _generating(
        self, scope: Scope, path: str, receive: Receive, send: Send, request_id: str
    ) -> None:
        dead = self._engine.dead_reason()
        if dead is not None:
            await send_error(send, 503, f"{dead}; this replica is being replaced", retry_after_s=10)
        elif path == "/generate":
            await generate(self._engine, receive, send, f"generate-{request_id}")
        else:
            await self._engine.app(scope, receive, send)

    async def _ready(self, send: Send) -> None:
        verdict = await self._readiness.check()
        if verdict.ready:
            body = {"status": "ready", "by": verdict.by, "token_age_s": verdict.token_age_s}
            await send_json(send, 200, body)
            return
        self._log.warning("not ready", extra={"reason": verdict.reason, "by": verdict.by})
        await send_error(send, 503, f"not ready: {verdict.reason}")


class _Exchange:
    """Watches and completes one response on its way out."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self._started = time.monotonic()
        self._first_byte: float | None = None
        self._bytes = 0
        self.status: int | None = None

    async def send(self, message: Any) -> None:
        """Pass a message on; at the start, with a stream's headers."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": _complete(list(message.get("headers", ())))}
        elif body := message.get("body"):
            if self._first_byte is None:
                self._first_byte = time.monotonic()
            self._bytes += len(body)
        await self._send(message)

    def summary(self) -> dict[str, Any]:
        """The request's line; times in ms. ``status`` is None if the client left before an answer."""
        first = None if self._first_byte is None else round((self._first_byte - self._started) * 1000, 1)
        return {
            "request_id": self._request_id,
            "status": self.status,
            "first_byte_ms": first,
            "duration_ms": round((time.monotonic() - self._started) * 1000, 1),
            "bytes": self._bytes,
        }


def _complete(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """A stream is marked as not to be buffered. (Serve's proxy adds the request id itself.)"""
    names = {name.lower(): value for name, value in headers}
    if names.get(b"content-type", b"").startswith(b"text/event-stream"):
        replaced = {name for name, _ in _STREAM_HEADERS}
        headers = [item for item in headers if item[0].lower() not in replaced]
        headers += _STREAM_HEADERS
    return headers


def _request_id(scope: Scope) -> str:
    """The request's id: the client's if it is plain, else a new one, put in the scope for vLLM's app."""
    given = next((value for name, value in scope["headers"] if name.lower() == _REQUEST_ID), b"")
    text = given.decode("latin-1")
    if not (0 < len(text) <= _MAX_REQUEST_ID and text.isascii() and text.isprintable()):
        text = new_request_id("req")
        others = [item for item in scope["headers"] if item[0].lower() != _REQUEST_ID]
        scope["headers"] = [*others, (_REQUEST_ID, text.encode())]
    return text
