"""The replica's front over the emulated engine and our own server, in this process: no Ray, real HTTP.

Tests reach into the engine (kill it, freeze it, count its slots) and may put vLLM's own generators back.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from app.serve.direct import DirectServer
from app.serve.engines.base import start_engine
from app.serve.front import Front, front_for
from app.serve.readiness import Readiness, TokenWatch
from app.serve.settings import ReplicaSettings


@dataclass
class Local:
    """A running front. ``url`` is its address; ``engine`` and ``front`` live in ``loop``."""

    url: str
    model: str
    engine: Any
    front: Front
    loop: asyncio.AbstractEventLoop
    settings: ReplicaSettings
    servers: list[DirectServer] = field(default_factory=list)

    @property
    def scheduler(self) -> Any:
        """The emulated core's scheduler: its ``running`` and ``waiting``."""
        return self.engine.client.engine_core._scheduler

    def open(self, **limits: float) -> tuple[str, Front]:
        """Another front over the same engine with other limits, and its URL."""
        return asyncio.run_coroutine_threadsafe(self._open(limits), self.loop).result(20)

    async def _open(self, limits: dict[str, float]) -> tuple[str, Front]:
        front = make_front(self.engine, self.settings.model_copy(update=limits))
        server = DirectServer(front, "127.0.0.1", 0, 75)
        await server.start()
        self.servers.append(server)
        return f"http://127.0.0.1:{server.port}", front


def make_front(engine: Any, settings: ReplicaSettings) -> Front:
    """The front as a replica makes it, but for the canary."""

    async def canary() -> None: ...

    readiness = Readiness(TokenWatch(), canary, engine.dead_reason, 10.0, 4.0)
    return front_for(engine, readiness, settings, "local")


@contextlib.contextmanager
def local_front(model_dir: Path, **settings: Any) -> Iterator[Local]:
    """Start the engine and serve it until the block ends."""
    values = {"profile": "emulated", "model_dir": str(model_dir), "model_name": "SmolLM2-135M-Instruct"}
    chosen = ReplicaSettings.model_validate({**values, **settings})
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> Local:
        engine: Any = await start_engine(chosen, lambda tokens: None)
        front = make_front(engine, chosen)
        server = DirectServer(front, "127.0.0.1", 0, 75)
        await server.start()
        url = f"http://127.0.0.1:{server.port}"
        return Local(url, chosen.model_name, engine, front, loop, chosen, [server])

    local = asyncio.run_coroutine_threadsafe(start(), loop).result(240)
    try:
        yield local
    finally:
        for server in local.servers:
            asyncio.run_coroutine_threadsafe(server.drain(1), loop).result(20)
        loop.call_soon_threadsafe(local.engine.shutdown)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
