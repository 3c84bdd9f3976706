"""``POST /generate``, the tutorial's raw form: ``{"prompt": …}`` in, text as it is generated out.

The body of the answer is the text itself, in chunks (media type ``text/event-stream``, as the tutorial serves
it): what the client concatenates is the answer. The prompt is given to the model as it is, with no chat
template.
"""

from __future__ import annotations

import contextlib
import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.serve.bodies import BodyTooLarge as BodyTooLarge
from app.serve.bodies import read_body as read_body
from app.serve.engines.base import Engine, RequestRefused, TextRequest
from app.serve.errors import Receive, Send, send_error


class GenerateBody(BaseModel):
    """The request; ``max_tokens`` and ``temperature`` default to the tutorial's values."""

    model_config = ConfigDict(extra="forbid")

    prompt: str = Field(min_length=1)
    max_tokens: int = Field(default=512, ge=1)
    temperature: float = Field(default=0.7, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list, max_length=16)
    seed: int | None = None


def parse_body(raw: bytes) -> GenerateBody:
    """The request from its JSON.

    Raises:
        RequestRefused: what is wrong, with every field at fault.
    """
    try:
        document: Any = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(f'the body is not JSON ({error}); expected {{"prompt": "…"}}') from error
    try:
        return GenerateBody.model_validate(document)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in item['loc']) or 'body'}: {item['msg']}"
            for item in error.errors()
        )
        raise RequestRefused(
            f'{problems}; expected {{"prompt": "…"}} with optional max_tokens, temperature, top_p, stop, seed'
        ) from error


async def generate(engine: Engine, receive: Receive, send: Send, request_id: str) -> None:
    """Serve one request. Errors before the first token are answered; later ones break the stream."""
    try:
        body = parse_body(await read_body(receive))
    except RequestRefused as error:
        await send_error(send, 400, str(error))
        return
    except BodyTooLarge as error:
        await send_error(send, 413, str(error))
        return
    request = TextRequest(
        request_id=request_id,
        prompt=body.prompt,
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        stop=tuple(body.stop),
        seed=body.seed,
    )
    async with contextlib.aclosing(engine.stream_text(request)) as pieces:
        try:
            first = await anext(pieces, "")
        except RequestRefused as error:
            await send_error(send, 400, str(error))
            return
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": first.encode(), "more_body": True})
        async for piece in pieces:
            await send({"type": "http.response.body", "body": piece.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})
