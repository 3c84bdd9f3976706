"""Request bodies before any engine sees them: bounded while they are read, JSON in UTF-8, sane in size.

What a field means is the engine's server app's to say; here is refused what would cost work or memory first.
"""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from app.serve.errors import Receive, Scope

MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_CHOICES = 128
MAX_LISTED = 1024
_LISTS = ("bad_words", "stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids", "tools")
_CHOICES = ("n", "best_of")


class BodyTooLarge(ValueError):
    """The request's body is over the limit."""


class BadBody(ValueError):
    """The body cannot be served; ``param`` names the field at fault, if it is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


async def read_body(receive: Receive, scope: Scope | None = None, limit: int = MAX_BODY_BYTES) -> bytes:
    """The whole request body.

    Raises:
        BodyTooLarge: it is over ``limit`` bytes, or says so beforehand; the rest is not read.
        ConnectionError: the client went away.
    """
    if scope is not None:
        for name, value in scope["headers"]:
            if name.lower() == b"content-length" and value.isdigit() and int(value) > limit:
                raise BodyTooLarge(f"the request body of {int(value)} bytes is over {limit} bytes")
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client went away")
        body += message.get("body", b"")
        if len(body) > limit:
            raise BodyTooLarge(f"the request body is over {limit} bytes")
        if not message.get("more_body", False):
            return bytes(body)


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
        BadBody: it is none, with the place of the fault.
    """
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        raise BadBody(f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    try:
        document = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise BadBody(f"the body is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise BadBody(f"the body is a JSON {_kind(document)}; expected an object with the request's fields")
    return document


def check_sizes(document: dict[str, Any], vocabulary: int | None = None) -> None:
    """Refuse what no honest request has.

    Raises:
        BadBody: the first field at fault, with the number that was given and the limit.
    """
    stops = document.get("stop")
    if isinstance(stops, list) and len(stops) > MAX_STOP_STRINGS:
        raise BadBody(f"stop has {len(stops)} strings; at most {MAX_STOP_STRINGS} are taken", "stop")
    for text in [stops] if isinstance(stops, str) else stops if isinstance(stops, list) else ():
        if isinstance(text, str) and len(text) > MAX_STOP_CHARACTERS:
            raise BadBody(
                f"a stop string has {len(text)} characters; at most {MAX_STOP_CHARACTERS} are taken", "stop"
            )
    for name in _CHOICES:
        given = document.get(name)
        if isinstance(given, int) and not isinstance(given, bool) and not 1 <= given <= MAX_CHOICES:
            raise BadBody(f"{name} is {given}; expected 1 to {MAX_CHOICES}", name)
    for name in _LISTS:
        given = document.get(name)
        if isinstance(given, list | dict) and len(given) > MAX_LISTED:
            raise BadBody(f"{name} has {len(given)} entries; at most {MAX_LISTED} are taken", name)
    if vocabulary is not None:
        _check_tokens(document.get("prompt"), vocabulary)


def _check_tokens(prompt: Any, vocabulary: int) -> None:
    if not isinstance(prompt, list) or not prompt:
        return
    for item in prompt:
        if isinstance(item, list):
            _check_tokens(item, vocabulary)
        elif isinstance(item, int) and not 0 <= item < vocabulary:
            raise BadBody(
                f"token id {item} in prompt is out of range; expected 0 to {vocabulary - 1}", "prompt"
            )


def _kind(value: Any) -> str:
    names = {list: "array", str: "string", int: "number", float: "number", bool: "boolean"}
    return names.get(type(value), "null")
