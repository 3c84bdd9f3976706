"""The own encoder of event streams against vLLM's own generator, over a corpus of requests: the same bytes.

When a client or this machine is slow, vLLM hands over several tokens in one event, so how a text is cut into
events is a matter of time. Compared are each choice's events with their text taken out, equal neighbours
once, and the text as it was escaped.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import httpx
import pytest

from tests.serve.client import TIMEOUT

_USAGE = {"stream_options": {"include_usage": True}}
_PLAIN: list[dict[str, Any]] = [
    {},
    {"max_tokens": 1},
    {"n": 3},
    {"stop": [" memory", "once"]},
    {"stop": " large", "include_stop_str_in_output": True},
    {"stop_token_ids": [30], "ignore_eos": True},
    {"max_tokens": 300},  # ends itself by the end-of-sequence token
    {"max_tokens": 20, "min_tokens": 20},
    {"skip_special_tokens": False, "max_tokens": 300},
    {"temperature": 0, "seed": 7, "user": "someone", "metadata": {"k": "v"}},
    _USAGE,
    {"n": 2, **_USAGE},
    {"stream_options": {"include_usage": False}},
    {"stream_options": {"continuous_usage_stats": True}},
]
_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
_COMPLETIONS = [
    *({"prompt": "Inferentia2 is", **fields} for fields in _PLAIN),
    {"prompt": "naïve ☃ 日本語 😀\u2028\x7f"},
    {"prompt": [5, 6, 7]},
]
_HELLO = [{"role": "user", "content": 'Say "naïve ☃ 😀"\n'}]
_CHATS = [
    *({"messages": _HELLO, **fields} for fields in _PLAIN),
    {"messages": [{"role": "system", "content": "Be brief."}, *_HELLO]},
    {"messages": _HELLO, "max_completion_tokens": 5},
    {"messages": _HELLO, "response_format": {"type": "text"}},
]
_SAID = re.compile(r'("(?:text|content)":)"((?:[^"\\]|\\.)*)"')
CLIENT = httpx.Client(timeout=TIMEOUT)
_METHODS = {
    "/v1/completions": ("openai_serving_completion", "completion_stream_generator"),
    "/v1/chat/completions": ("openai_serving_chat", "chat_completion_stream_generator"),
}
# The emulated passage, with what needs escapes or more than one byte or token for a character.
_HARD = (
    ' "quotes" \\ back\\slash\t\ttabs\nlines\r\x01\x1f\x7f naïve ☃ 日本語 😀 \u2028 <b>&amp;</b> data: x\n\n'
)


def _choices(url: str, path: str, body: dict[str, Any]) -> dict[str, tuple[list[str], str]]:
    """The events without their text, and the text, of each choice (of the stream itself: ``""``)."""
    response = CLIENT.post(url + path, json=body, headers={"x-request-id": "same"})
    assert response.status_code == 200, response.text
    text = re.sub(r'"created":\d+', '"created":0', response.text)
    assert text.endswith("\n\n")
    found: dict[str, tuple[list[str], list[str]]] = {}
    for event in text.split("\n\n"):
        index = re.search(r'"choices":\[\{"index":(\d+)', event)
        events, texts = found.setdefault(index[1] if index else "", ([], []))
        if said := _SAID.search(event):
            texts.append(said[2])
        events.append(_SAID.sub(r'\1""', event))
    return {
        key: ([event for event, _ in itertools.groupby(events)], "".join(texts))
        for key, (events, texts) in found.items()
    }


@pytest.fixture(scope="module", params=["passage", "hard"])
def engine(local: Any, request: pytest.FixtureRequest) -> Any:
    scheduler = local.scheduler
    before = scheduler._passage
    if request.param == "hard":
        scheduler._passage = local.engine.client.get_tokenizer().encode(_HARD, add_special_tokens=False)
    yield local
    scheduler._passage = before


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(("/v1/completions", body) for body in _COMPLETIONS),
        *(("/v1/chat/completions", body) for body in _CHATS),
    ],
    ids=lambda value: value if isinstance(value, str) else json.dumps(value)[-60:],
)
def test_streams_are_vllms_byte_for_byte(engine: Any, path: str, body: dict[str, Any]) -> None:
    body = {"model": engine.model, "stream": True, "max_tokens": 40, **body}
    ours = _choices(engine.url, path, body)
    name, method = _METHODS[path]
    serving = getattr(engine.engine.app.state, name)
    encoder = serving.__dict__.pop(method)
    try:
        theirs = _choices(engine.url, path, body)
    finally:
        setattr(serving, method, encoder)
    assert ours == theirs


@pytest.mark.parametrize("path", list(_METHODS))
def test_plain_streams_take_the_encoder(local: Any, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this, the comparison above could compare vLLM with itself."""
    name, method = _METHODS[path]
    encoder = getattr(getattr(local.engine.app.state, name), method)
    own: list[Any] = []
    real = encoder._own

    def noted(*args: Any, **kwargs: Any) -> Any:
        own.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(encoder, "_own", noted)
    prompt = {"prompt": "x"} if path == "/v1/completions" else {"messages": _HELLO}
    chat = path == "/v1/chat/completions"
    unusual: list[dict[str, Any]] = [
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"return_token_ids": True},
        {"echo": True},
        {"logprobs": True} if chat else {"logprobs": 1},
        {"tools": _TOOLS, "tool_choice": "none"} if chat else {"prompt": ["one", "two"]},
    ]
    for fields in (*_PLAIN, *unusual):
        before = len(own)
        body = {"model": local.model, "stream": True, "max_tokens": 3, **prompt, **fields}
        response = CLIENT.post(local.url + path, json=body)
        assert response.status_code == 200, response.text
        assert response.text.endswith("data: [DONE]\n\n")
        assert len(own) - before == (fields in unusual), fields
