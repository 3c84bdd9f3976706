"""The Ray Serve deployment: one engine and its OpenAI server app in each replica, one hop from the proxy.

The ASGI app is bound late: it needs the engine, and the engine needs the replica's block of cores and its
event loop. Tokens therefore stream from the process that generates them; no handle lies between.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from ray import serve

from app.serve.binding import bind_replica, hold_artifact
from app.serve.direct import DirectServer
from app.serve.engines.base import Engine, TextRequest, start_engine
from app.serve.engines.vllm_engine import new_request_id
from app.serve.front import Front, front_for
from app.serve.log import configure_logging
from app.serve.readiness import Readiness, TokenWatch
from app.serve.settings import ReplicaSettings, resolve_settings

DEPLOYMENT_NAME = "engine"
_SWITCH_INTERVAL_S = 0.0005
"""How long another thread (a tokenizer's) may keep the interpreter from the event loop. Python's 5 ms took
the time to first token at saturation to 122 ms where this gave 22 (64 clients, two cores), at equal tokens/s.
"""


class EngineDied(RuntimeError):
    """The replica's engine can serve no more; Serve replaces the replica."""


@serve.deployment(name=DEPLOYMENT_NAME)
@serve.ingress()
class EngineReplica:
    """One replica. ``overrides`` are replica settings given at deployment; the rest is the host's own."""

    def __init__(self, overrides: dict[str, Any]) -> None:
        self._overrides = overrides
        self._engine: Engine | None = None
        self._server: DirectServer | None = None
        self._drain_s = 0

    async def __serve_build_asgi_app__(self) -> Front:
        """Bind, start the engine, and give the app over it; Serve calls it once, before any traffic."""
        started = time.monotonic()
        context = serve.get_replica_context()
        replica = str(context.replica_id.unique_id)
        log = configure_logging(replica=replica)
        binding = bind_replica()
        settings = resolve_settings(self._overrides)
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._artifact = hold_artifact(settings.model_dir)
        shown = {"profile": settings.profile, "model": settings.model_name, **binding.describe()}
        log.info("starting engine", extra=shown)
        watch = TokenWatch()
        engine = await start_engine(settings, watch.note)
        self._binding, self._engine = binding, engine
        readiness = Readiness(
            watch,
            canary=lambda: one_token(engine),
            dead_reason=engine.dead_reason,
            fresh_s=settings.ready_fresh_s,
            deadline_s=settings.ready_deadline_s,
        )
        await self._first_token(engine, settings)
        log.info("engine started", extra={**shown, "seconds": round(time.monotonic() - started, 1)})
        front = front_for(engine, readiness, settings, replica)
        if settings.front_door == "direct":
            self._server = DirectServer(front, settings.http_host, settings.http_port, settings.keep_alive_s)
            await self._server.start()
            self._drain_s = settings.drain_timeout_s
            log.info("listening", extra={"host": settings.http_host, "port": self._server.port})
        return front

    async def _first_token(self, engine: Engine, settings: ReplicaSettings) -> None:
        """A replica joins when it has given a token: the first is the slowest, and no client waits for it."""
        if settings.emulated_freeze_file is not None and settings.emulated_freeze_file.exists():
            return
        await one_token(engine)

    async def check_health(self) -> None:
        """Asked by Serve periodically; raising replaces the replica.

        Raises:
            EngineDied: the engine's processes ended. A slow or stuck engine is unready, not unhealthy.
        """
        reason = None if self._engine is None else self._engine.dead_reason()
        if reason is not None:
            raise EngineDied(reason)

    async def __del__(self) -> None:
        """End the engine with the replica; a direct replica's running streams may end first."""
        if self._server is not None:
            await self._server.drain(self._drain_s)
        if self._engine is not None:
            await asyncio.to_thread(self._engine.shutdown)


async def one_token(engine: Engine) -> None:
    """Generate one token: proof that the engine works."""
    request = TextRequest(request_id=new_request_id("canary"), prompt="Hello", max_tokens=1)
    async for _ in engine.stream_text(request):
        pass
