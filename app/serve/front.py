"""The replica's HTTP front: a thin ASGI layer before the engine's server app.

It answers health, readiness and ``/generate`` itself, lets through the paths of the public surface and no
others (vLLM's app has more, among them some that steer the engine), gives every request an id, refuses bad
bodies, bounds what is taken on and how long each stage takes, ends a request at once when its client leaves,
and logs one line for each. It never holds a token back.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Coroutine
from dataclasses import fields
from typing import Any

from app.node.topology.metrics import TopologyCollector
from app.node.topology.model import TOPOLOGY_PATH
from app.serve.admission_factory import make_admission
from app.serve.admission_queue import Admission, Overloaded
from app.serve.admission_request import NeverFits
from app.serve.bodies import MAX_BODY_BYTES, BadBody, BodyTooLarge, check_sizes, parse_object, read_body
from app.serve.engines.base import Engine
from app.serve.engines.vllm_engine import new_request_id
from app.serve.errors import Receive, Scope, Send, encode_error_event, send_error, send_json
from app.serve.exchange import Exchange, StageLimits, StageTimeout, Sweeper
from app.serve.generate import generate
from app.serve.log import serving_logger
from app.serve.readiness import Readiness
from app.serve.settings import ReplicaSettings
from app.serve.sse import outlet

GENERATING = frozenset(
    {"/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"}
)
PASSED = frozenset({"/v1/models", "/tokenize", "/detokenize", "/metrics", "/version"}) | (
    GENERATING - {"/generate"}
)
OWN = frozenset({"/generate", "/healthz", "/readyz"})
_TAKEN = PASSED | {"/generate"}
_QUIET = frozenset({"/healthz", "/readyz", "/metrics"})
_REQUEST_ID = b"x-request-id"
_MAX_REQUEST_ID = 128
TRANSPORT = "neuronfleet.transport"
"""Scope extension by which our own server gives the connection: one whose client does not read can be cut."""


class Front:
    """ASGI app of one replica."""

    def __init__(
        self,
        engine: Engine,
        readiness: Readiness,
        admission: Admission,
        replica: str = "",
        limits: StageLimits | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self._engine = engine
        self._readiness = readiness
        self._admission = admission
        self._replica = replica
        self._limits = limits or StageLimits()
        self._max_body_bytes = max_body_bytes
        self._vocabulary = _vocabulary(engine)
        self._sweeper = Sweeper()
        self._log = serving_logger()
        self.draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection event: lifespan goes to the engine's app, HTTP is served here."""
        if scope["type"] != "http":
            await self._engine.app(scope, receive, send)
            return
        request_id = _request_id(scope)
        path = str(scope["path"])
        exchange = Exchange(send, request_id, self._limits, heartbeats=path.startswith("/v1/"))
        try:
            if scope["method"] == "POST" and path in _TAKEN:
                await self._supervise(self._post(scope, path, receive, exchange), exchange, scope)
            else:
                await self._route(scope, path, receive, exchange.send)
        except ConnectionError:
            pass  # the client went away: nobody is left to answer
        except Exception:
            self._log.exception("request failed", extra={"request_id": request_id, "path": path})
            if exchange.begun:
                raise  # the stream has begun: break it, so that the client sees it is not whole
            await exchange.restart()
            await send_error(exchange.send, 500, f"the engine failed on this request; its id is {request_id}")
        finally:
            if path not in _QUIET:
                self._log.info(
                    "request", extra={"method": scope["method"], "path": path, **exchange.summary()}
                )

    async def _route(self, scope: Scope, path: str, receive: Receive, send: Send) -> None:
        if path == "/healthz":
            await send_json(send, 200, {"status": "alive", "replica": self._replica})
        elif path == "/readyz":
            await self._ready(send)
        elif path not in PASSED and path not in OWN:
            served = ", ".join(sorted(PASSED | OWN))
            await send_error(send, 404, f"there is no {path} here; served are {served}")
        elif path == "/generate":
            await send_error(send, 405, 'POST {"prompt": "…"} to /generate')
        elif path == "/metrics":
            await self._admission.metrics.joined(self._engine.app, scope, receive, send)
        else:
            await self._engine.app(scope, receive, send)

    async def _supervise(self, work: Coroutine[Any, Any, None], exchange: Exchange, scope: Scope) -> None:
        """Run a request's work; end it when a stage takes too long, and tell the client why."""
        task = asyncio.ensure_future(work)
        over: list[StageTimeout] = []

        def end(timeout: StageTimeout) -> None:
            over.append(timeout)
            exchange.end(task)

        exchange.cancel = end
        self._sweeper.add(exchange)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():  # it is this request as a whole that Serve cancels: its client left
                exchange.end(task)
                await asyncio.wait({task})
                raise
        finally:
            self._sweeper.remove(exchange)
        if over:
            exchange.gone.clear()
            await self._tell_timeout(exchange, over[0], scope)

    async def _tell_timeout(self, exchange: Exchange, over: StageTimeout, scope: Scope) -> None:
        transport = scope.get("extensions", {}).get(TRANSPORT)
        if not exchange.begun:
            await exchange.restart()
            await send_error(exchange.send, over.status, str(over), close=over.status == 408)
        elif exchange.streaming and not exchange.blocked and str(scope["path"]).startswith("/v1/"):
            await exchange.write(encode_error_event(over.status, str(over)))
            await exchange.send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
        elif transport is not None:
            # A close would wait for the client to read what is buffered, here and in the kernel.
            linger = struct.pack("ii", 1, 0)
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            transport.abort()
            await asyncio.sleep(0.001)  # the server learns of it
        else:
            raise over

    async def _post(self, scope: Scope, path: str, receive: Receive, exchange: Exchange) -> None:
        send = exchange.send
        document: dict[str, Any] = {}
        try:
            raw = await read_body(receive, scope, self._max_body_bytes)
            exchange.body_read = True
            if path != "/generate":
                document = parse_object(raw)
                check_sizes(document, self._vocabulary)
        except BodyTooLarge as error:
            await send_error(send, 413, str(error), close=True)
            return
        except BadBody as error:
            await send_error(send, 400, str(error), error.param)
            return
        receive_app = _replay(raw, exchange.gone)
        watch = asyncio.ensure_future(self._watch(receive, exchange, asyncio.current_task()))
        token = outlet.set(exchange)
        try:
            if path in GENERATING:
                asked = document if path != "/generate" else _object_or_empty(raw)
                ticket = await self._admission.request(path, asked, scope["headers"])
                exchange.account = ticket.note
                async with ticket:
                    await self._generating(scope, path, receive_app, exchange, document)
            else:
                await self._engine.app(scope, receive_app, send)
        except NeverFits as error:
            await send_error(send, 400, str(error), error.param)
        except Overloaded as error:
            await send_error(send, error.status, str(error), retry_after_s=error.retry_after_s)
        finally:
            outlet.reset(token)
            watch.cancel()

    async def _watch(self, receive: Receive, exchange: Exchange, task: asyncio.Task[Any] | None) -> None:
        """End the work when the client leaves, whatever it is at: waiting, in prefill, decoding, writing."""
        while (await receive())["type"] != "http.disconnect":
            pass
        if task is not None and not exchange.gone.is_set():
            exchange.end(task)

    async def _generating(
        self, scope: Scope, path: str, receive: Receive, exchange: Exchange, document: dict[str, Any]
    ) -> None:
        dead = self._engine.dead_reason()
        if dead is None:
            if path == "/generate":
                await generate(self._engine, receive, exchange.send, f"generate-{_request_id(scope)}")
            else:
                exchange.fields = document
                await self._engine.app(scope, receive, exchange.send)
            dead = exchange.broken
            if dead is None:
                return
            await exchange.restart()
        await send_error(exchange.send, 503, f"{dead}; this replica is being replaced", retry_after_s=10)

    async def _ready(self, send: Send) -> None:
        if self.draining:
            await send_error(send, 503, "not ready: this replica is draining")
            return
        verdict = await self._readiness.check()
        if verdict.ready:
            body = {"status": "ready", "by": verdict.by, "token_age_s": verdict.token_age_s}
            await send_json(send, 200, body)
            return
        self._log.warning("not ready", extra={"reason": verdict.reason, "by": verdict.by})
        await send_error(send, 503, f"not ready: {verdict.reason}")


def front_for(engine: Engine, readiness: Readiness, settings: ReplicaSettings, replica: str) -> Front:
    """The front of a replica with these settings."""
    limits = StageLimits(**{item.name: getattr(settings, item.name) for item in fields(StageLimits)})
    admission = make_admission(settings)
    if TOPOLOGY_PATH.exists():
        # A host with a plan: its warnings and the live binding reach whoever scrapes the replica.
        admission.metrics.registry.register(TopologyCollector())
    return Front(engine, readiness, admission, replica, limits, settings.max_body_bytes)


def _replay(raw: bytes, gone: asyncio.Event) -> Receive:
    """What the app receives: the body that was read, then whether the client left."""
    given = False

    async def receive() -> dict[str, Any]:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": raw, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    return receive


def _object_or_empty(raw: bytes) -> dict[str, Any]:
    """The body's fields, for the prediction; whoever serves it says what is wrong with it."""
    try:
        return parse_object(raw)
    except BadBody:
        return {}


def _vocabulary(engine: Engine) -> int | None:
    """How many token ids the model has, where the engine says it."""
    config = getattr(getattr(engine, "client", None), "model_config", None)
    return None if config is None else int(config.get_vocab_size())


def _request_id(scope: Scope) -> str:
    """The request's id: the client's if it is plain, else a new one, put in the scope for vLLM's app."""
    given = next((value for name, value in scope["headers"] if name.lower() == _REQUEST_ID), b"")
    text = given.decode("latin-1")
    if not (0 < len(text) <= _MAX_REQUEST_ID and text.isascii() and text.isprintable()):
        text = new_request_id("req")
        others = [item for item in scope["headers"] if item[0].lower() != _REQUEST_ID]
        scope["headers"] = [*others, (_REQUEST_ID, text.encode())]
    return text
