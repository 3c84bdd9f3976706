"""The OpenAI server app over the engine (ASGI): models, completions, chat completions, metrics.

The image that carries transformers-neuronx has no vLLM, whose server the other engines use. A client that
goes away cancels its request: by the server's disconnect message, or by the cancellation that Ray Serve
sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from app.serve.engines.base import RequestRefused
from app.serve.engines.transformers_neuronx.engine import AsyncEngine
from app.serve.engines.transformers_neuronx.metrics import EngineMetrics
from app.serve.engines.transformers_neuronx.openai_answers import Answer, event
from app.serve.engines.transformers_neuronx.openai_bodies import ChatBody, CompletionBody, parse
from app.serve.engines.transformers_neuronx.request import (
    EngineDeadError,
    GenerationRequest,
    Output,
    RequestError,
)
from app.serve.errors import Receive, Scope, Send, error_body, send_error, send_json
from app.serve.generate import BodyTooLarge, read_body

_KEEP_ALIVE_S = 15.0
_BODIES: dict[str, type[CompletionBody] | type[ChatBody]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
}


class OpenAIApp:
    """ASGI app of one engine. ``context_limit`` in tokens."""

    def __init__(
        self, engine: AsyncEngine, tokenizer: Any, metrics: EngineMetrics, *, model: str, context_limit: int
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._model = model
        self._context_limit = context_limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI connection."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            await self._route(str(scope["path"]), str(scope["method"]), receive, send)

    async def _route(self, path: str, method: str, receive: Receive, send: Send) -> None:
        if path in _BODIES and method == "POST":
            await self._generate(_BODIES[path], receive, send)
        elif path == "/v1/models" and method == "GET":
            entry = {"id": self._model, "object": "model", "owned_by": "neuronfleet", "root": self._model}
            models = [{**entry, "max_model_len": self._context_limit}]
            await send_json(send, 200, {"object": "list", "data": models})
        elif path == "/metrics" and method == "GET":
            content = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
            await send({"type": "http.response.start", "status": 200, "headers": [content]})
            await send({"type": "http.response.body", "body": self._metrics.text()})
        elif path in _BODIES or path in ("/v1/models", "/metrics"):
            await send_error(send, 405, f"{method} is not a method of {path}")
        else:
            await send_error(send, 404, f"there is no {path} in this engine")

    async def _generate(
        self, kind: type[CompletionBody] | type[ChatBody], receive: Receive, send: Send
    ) -> None:
        try:
            body = parse(kind, await read_body(receive))
            request = self._request(body)
        except RequestRefused as error:
            await send_error(send, 400, str(error))
            return
        except BodyTooLarge as error:
            await send_error(send, 413, str(error))
            return
        if body.model is not None and body.model != self._model:
            await send_error(send, 404, f"the model {body.model!r} is not served here; it is {self._model!r}")
            return
        answer = Answer(
            request.request_id,
            self._model,
            self._tokenizer,
            chat=kind is ChatBody,
            prompt_tokens=len(request.prompt),
        )
        answering = self._stream if body.stream else self._whole
        task = asyncio.ensure_future(answering(request, answer, body.include_usage, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not task.done():
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def _request(self, body: CompletionBody | ChatBody) -> GenerationRequest:
        prompt = body.prompt_tokens(self._tokenizer)
        request = GenerationRequest(
            uuid.uuid4().hex, prompt, body.sampling(self._context_limit - len(prompt))
        )
        try:
            self._engine.check(request)
        except RequestError as error:
            raise RequestRefused(str(error)) from error
        return request

    async def _whole(self, request: GenerationRequest, answer: Answer, _: bool, send: Send) -> None:
        last = None
        try:
            async with contextlib.aclosing(self._engine.generate(request)) as outputs:
                async for last in outputs:
                    answer.add(last)
        except (RequestError, EngineDeadError) as error:
            await send_error(send, 503 if isinstance(error, EngineDeadError) else 500, str(error))
            return
        if last is not None:
            await send_json(send, 200, answer.whole(last))

    async def _stream(
        self, request: GenerationRequest, answer: Answer, include_usage: bool, send: Send
    ) -> None:
        async def write(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        content = (b"content-type", b"text/event-stream; charset=utf-8")
        await send({"type": "http.response.start", "status": 200, "headers": [content]})
        if (opening := answer.opening()) is not None:
            await write(event(opening))
        try:
            async with contextlib.aclosing(self._engine.generate(request)) as outputs:
                async for output in _with_keep_alive(outputs):
                    if output is None:
                        await write(b": keep-alive\n\n")
                    elif (chunk := answer.chunk(output)) is not None:
                        await write(event(chunk))
        except (RequestError, EngineDeadError) as error:
            # The status is sent: the error is the last event, and no [DONE] follows it.
            await write(event(error_body(500, str(error))), more=False)
            return
        if include_usage:
            await write(event(answer.usage_chunk()))
        await write(b"data: [DONE]\n\n", more=False)


async def _with_keep_alive(outputs: AsyncGenerator[Output, None]) -> AsyncGenerator[Output | None, None]:
    """The outputs, and None whenever none came for a while (queued, or in a long prefill)."""
    step: asyncio.Future[Output] | None = None
    try:
        while True:
            step = asyncio.ensure_future(anext(outputs))
            while not (await asyncio.wait({step}, timeout=_KEEP_ALIVE_S))[0]:
                yield None
            try:
                output = step.result()
            except StopAsyncIteration:
                return
            yield output
    finally:
        if step is not None and not step.done():
            step.cancel()
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                await step


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
