"""Errors in the OpenAI shape: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Container, MutableMapping
from http import HTTPStatus
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

_TYPES = {
    400: "invalid_request_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """The error document for an HTTP status; ``param`` is the field at fault."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def encode_error_event(status: int, message: str) -> bytes:
    """The error as an event of a stream that has begun, as OpenAI clients read it."""
    return b"data: " + json.dumps(error_body(status, message)).encode() + b"\n\n"


def named_error(raw: bytes, status: int, fields: Container[str]) -> bytes:
    """An engine app's error body in the OpenAI shape: class of error by its status, the field by its name.

    ``fields`` are those of the request: where the engine names none, it is the first that its message
    mentions. What is no error body is given back as it is.
    """
    try:
        error = json.loads(raw)["error"]
        message, param = str(error["message"]), error.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        return raw
    if param is None:
        words = re.findall(r"[a-z_]+", message.replace("conversation", "messages"))
        param = next((word for word in words if word in fields), None)
    else:
        param = str(param).removeprefix("body.")
    return json.dumps(error_body(status, message, param)).encode()


async def send_json(
    send: Send, status: int, body: Any, headers: tuple[tuple[bytes, bytes], ...] = ()
) -> None:
    """A whole JSON response."""
    payload = json.dumps(body).encode()
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(payload)).encode()),
                *headers,
            ],
        }
    )
    await send({"type": "http.response.body", "body": payload})


async def send_error(
    send: Send,
    status: int,
    message: str,
    param: str | None = None,
    retry_after_s: int | None = None,
    close: bool = False,
) -> None:
    """A whole error response.

    With ``retry_after_s`` the client is told when to come again; with ``close`` its connection ends (the rest
    of its body is not wanted).
    """
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if retry_after_s is not None:
        headers += ((b"retry-after", str(retry_after_s).encode()),)
    if close:
        headers += ((b"connection", b"close"),)
    await send_json(send, status, error_body(status, message or HTTPStatus(status).phrase, param), headers)
