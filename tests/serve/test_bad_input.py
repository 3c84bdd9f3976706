"""Bad requests at the front: the OpenAI shape, the field named, and no work done for them."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest

from tests.serve.client import TIMEOUT

CLIENT = httpx.Client(timeout=TIMEOUT)
_HI = [{"role": "user", "content": "x"}]
_COMPLETIONS = "/v1/completions"
_CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (_COMPLETIONS, b'{"model":', None),
        (_COMPLETIONS, b'{"prompt": "\xff"}', None),
        (_COMPLETIONS, b"[1]", None),
        (_COMPLETIONS, b"null", None),
        (_COMPLETIONS, b"", None),
        (_COMPLETIONS, b'{"prompt": "\\ud800"}', None),
        (_COMPLETIONS, b'{"prompt": ' + b"[" * 100_000, None),
        (_COMPLETIONS, b'{"prompt": "x", "temperature": NaN}', None),
        (_COMPLETIONS, {}, "prompt"),
        (_COMPLETIONS, {"prompt": ""}, "prompt"),
        (_COMPLETIONS, {"prompt": []}, "prompt"),
        (_COMPLETIONS, {"prompt": 5}, "prompt"),
        (_COMPLETIONS, {"prompt": [99_999_999]}, "prompt"),
        (_COMPLETIONS, {"prompt": [[1], [-1]]}, "prompt"),
        (_COMPLETIONS, {"prompt": "x", "max_tokens": -5}, "max_tokens"),
        (_COMPLETIONS, {"prompt": "x", "max_tokens": 10**30}, "max_tokens"),
        (_COMPLETIONS, {"prompt": "x", "max_tokens": "many"}, "max_tokens"),
        (_COMPLETIONS, {"prompt": "x", "min_tokens": 10**9}, "min_tokens"),
        (_COMPLETIONS, {"prompt": "x", "temperature": -1}, "temperature"),
        (_COMPLETIONS, {"prompt": "x", "top_p": 5}, "top_p"),
        (_COMPLETIONS, {"prompt": "x", "top_k": -7}, "top_k"),
        (_COMPLETIONS, {"prompt": "x", "presence_penalty": 1e9}, "presence_penalty"),
        (_COMPLETIONS, {"prompt": "x", "n": 0}, "n"),
        (_COMPLETIONS, {"prompt": "x", "n": 100_000}, "n"),
        (_COMPLETIONS, {"prompt": "x", "logprobs": 100_000}, "logprobs"),
        (_COMPLETIONS, {"prompt": "x", "stop": ["a"] * 5000}, "stop"),
        (_COMPLETIONS, {"prompt": "x", "stop": "a" * 5000}, "stop"),
        (_COMPLETIONS, {"prompt": "x", "stop": [1]}, "stop"),
        (_COMPLETIONS, {"prompt": "x", "logit_bias": {"999999999": 1}}, "logit_bias"),
        (_COMPLETIONS, {"prompt": "x", "stop_token_ids": [-1]}, "stop_token_ids"),
        (_COMPLETIONS, {"prompt": "x", "stream": "maybe"}, "stream"),
        (_CHAT, {}, "messages"),
        (_CHAT, {"messages": "hi"}, "messages"),
        (_CHAT, {"messages": []}, "messages"),
        (_CHAT, {"messages": _HI, "tools": "x"}, "tools"),
        (_CHAT, {"messages": _HI, "top_logprobs": 5}, "top_logprobs"),
        (_CHAT, {"messages": _HI, "response_format": {"type": "json_schema"}}, "response_format"),
        ("/tokenize", b"{", None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_field_at_fault_is_named(local: Any, path: str, body: Any, param: str | None) -> None:
    content = body if isinstance(body, bytes) else json.dumps({"model": local.model, **body})
    headers = {"content-type": "application/json"}
    response = CLIENT.post(local.url + path, content=content, headers=headers)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    named = None if error["param"] is None else error["param"].split(".")[0]
    assert named == param, error
    assert not local.scheduler.running and not local.scheduler.waiting


def test_an_unknown_model_is_named(local: Any) -> None:
    body = {"model": "gpt-9", "prompt": "x"}
    response = CLIENT.post(local.url + _COMPLETIONS, json=body)
    assert response.status_code == 404
    assert response.json()["error"]["param"] == "model"


def test_unknown_fields_are_ignored_as_by_vllm(local: Any) -> None:
    body = {"model": local.model, "prompt": "x", "max_tokens": 1, "no_such_field": 1}
    assert CLIENT.post(local.url + _COMPLETIONS, json=body).status_code == 200


@pytest.mark.parametrize(
    "framing", [b"content-length: 9000000000\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n"]
)
def test_an_enormous_body_is_refused_before_it_is_read(local: Any, framing: bytes) -> None:
    """By its length when it says it, else when the limit is passed; the connection then ends."""
    host, port = local.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" + framing
        )
        sent = 0
        if b"chunked" in framing:
            piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
            try:
                while sent < 64 * 1024 * 1024:
                    client.sendall(piece)
                    sent += 0x10000
            except OSError:
                pass  # refused while it was being sent
        answer = b""
        try:
            while got := client.recv(65536):
                answer += got
        except ConnectionResetError:
            pass  # what was still on its way when the connection ended
    assert sent < 16 * 1024 * 1024
    if sent == 0:
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b'"invalid_request_error"' in answer
