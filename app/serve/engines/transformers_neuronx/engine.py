"""The engine as asyncio sees it: a thread does the device steps, each request is an async generator.

A device step blocks for milliseconds to seconds, so it has a thread of its own; requests, cancellations and
outputs cross between the two by queues, once a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable

from app.serve.engines.transformers_neuronx.core import EngineCore
from app.serve.engines.transformers_neuronx.request import (
    EngineDeadError,
    GenerationRequest,
    Output,
    RequestError,
)

_LOG = logging.getLogger(__name__)
_Command = Callable[[], list[Output]]


class AsyncEngine:
    """Runs an :class:`EngineCore` in a thread. To be made, used and shut down on one event loop.

    ``note_tokens`` is called on the loop with the number of tokens that each step gave.
    """

    def __init__(self, core: EngineCore, note_tokens: Callable[[int], None] = lambda _: None) -> None:
        self._core = core
        self._note_tokens = note_tokens
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, asyncio.Queue[Output]] = {}
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._dead: str | None = None
        self._thread = threading.Thread(target=self._run, name="tnx-engine", daemon=True)
        self._thread.start()

    @property
    def dead_reason(self) -> str | None:
        """Why no request can be served any more, or None."""
        if self._dead is None and not self._thread.is_alive():
            return "the engine's thread has ended"
        return self._dead

    def check(self, request: GenerationRequest) -> None:
        """Refuse what can never be served, before anything is sent to the client.

        Raises:
            RequestError: every problem of the request.
        """
        self._core.check(request)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Output, None]:
        """Outputs as they come; the last has ``finish`` set. Closing the generator cancels the request.

        Raises:
            RequestError: it cannot be served, or failed by itself.
            EngineDeadError: the engine is dead, or died.
        """
        if (reason := self.dead_reason) is not None:
            raise EngineDeadError(reason)
        if request.request_id in self._streams:
            raise RequestError(f"request id {request.request_id!r} is in use")
        self._core.check(request)
        stream: asyncio.Queue[Output] = asyncio.Queue()
        self._streams[request.request_id] = stream
        self._commands.put(lambda: self._add(request))
        output = None
        try:
            while output is None or output.finish is None:
                output = await stream.get()
                if output.finish == "error":
                    if (reason := self._dead) is not None:
                        raise EngineDeadError(reason)
                    raise RequestError(output.error or "the request failed")
                yield output
        finally:
            self._streams.pop(request.request_id, None)
            if output is None or output.finish is None:
                self._commands.put(lambda: self._abort(request.request_id))

    def shutdown(self) -> None:
        """End the thread after its present step; what runs is failed. May be called twice."""
        self._dead = self._dead or "the engine was shut down"
        self._commands.put(None)
        self._thread.join(timeout=30)
        if self._thread.is_alive():
            _LOG.error("the engine's thread still runs a step 30 s after it was told to stop")

    def _run(self) -> None:
        reason = "the engine was shut down"
        try:
            while True:
                outputs: list[Output] = []
                stopping = not self._take_commands(outputs)
                if not stopping:
                    outputs += self._core.step()
                    stopping = self._core.dead_reason is not None
                    reason = self._core.dead_reason or reason
                if stopping:
                    break
                self._send(outputs)
        except BaseException as error:
            _LOG.exception("the engine's thread failed")
            reason, outputs = f"the engine's thread failed: {error!r}", []
        self._send([*outputs, *self._core.abort_all(reason)], died=reason)

    def _take_commands(self, outputs: list[Output]) -> bool:
        """Do what is asked for; waits if there is nothing else to do. False: stop."""
        while not self._commands.empty() or self._core.idle:
            command = self._commands.get()
            if command is None:
                return False
            outputs += command()
            if outputs and self._core.idle:
                break  # tell before waiting again
        return True

    def _add(self, request: GenerationRequest) -> list[Output]:
        try:
            self._core.add(request)
        except (RequestError, EngineDeadError) as error:
            return [Output(request.request_id, finish="error", error=str(error))]
        return []

    def _abort(self, request_id: str) -> list[Output]:
        self._core.abort(request_id)
        return []

    def _send(self, outputs: list[Output], died: str | None = None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
            self._loop.call_soon_threadsafe(self._deliver, outputs, died)

    def _deliver(self, outputs: list[Output], died: str | None) -> None:
        if died is not None:
            self._dead = self._dead or died
        for output in outputs:
            if (stream := self._streams.get(output.request_id)) is not None:
                stream.put_nowait(output)
        if died is not None:
            for request_id, stream in self._streams.items():
                stream.put_nowait(Output(request_id, finish="error", error=died))
        if count := sum(len(output.tokens) for output in outputs):
            self._note_tokens(count)
