"""Wrong requests over the wire: the OpenAI error shape, with a message to act on."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.serve.client import post
from tests.serve.conftest import App


@pytest.fixture(scope="module")
def app(emulated: App) -> App:
    return emulated


def assert_openai_error(response: httpx.Response, status: int, *words: str) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    for word in words:
        assert word in error["message"], error


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": ""}, ("prompt",)),
        ({}, ("prompt", "required")),
        ({"prompt": "x", "max_tokens": 0, "temperature": 9}, ("max_tokens", "temperature")),
        ({"prompt": "x", "frequency": 1}, ("frequency",)),
        ([1], ("expected",)),
        ({"prompt": "word " * 600}, ("tokens", "512")),
    ],
)
def test_generate_names_what_is_wrong(app: App, body: Any, words: tuple[str, ...]) -> None:
    assert_openai_error(post(app.url, "/generate", body), 400, *words)


def test_generate_that_is_no_json(app: App) -> None:
    response = httpx.post(app.url + "/generate", content=b'{"prompt": ')
    assert_openai_error(response, 400, "not JSON")


def test_generate_body_over_the_limit(app: App) -> None:
    assert_openai_error(post(app.url, "/generate", {"prompt": "x" * 5_000_000}), 413, "4194304")


def test_generate_by_get(app: App) -> None:
    assert_openai_error(httpx.get(app.url + "/generate"), 405, "POST")


def test_unknown_path_lists_what_is_served(app: App) -> None:
    assert_openai_error(httpx.get(app.url + "/nothing"), 404, "/v1/chat/completions")


@pytest.mark.parametrize(
    "path", ["/scale_elastic_ep", "/docs", "/load", "/invocations", "/v1/load_lora_adapter"]
)
def test_the_engines_own_controls_are_not_reachable(app: App, path: str) -> None:
    assert_openai_error(httpx.post(app.url + path, json={}), 404)


def test_unknown_model(app: App) -> None:
    body = {"model": "gpt-9", "prompt": "x"}
    assert_openai_error(post(app.url, "/v1/completions", body), 404, "gpt-9")


def test_chat_without_messages(app: App) -> None:
    assert_openai_error(post(app.url, "/v1/chat/completions", {"model": app.model}), 400, "messages")


def test_prompt_that_can_never_fit(app: App) -> None:
    body = {"model": app.model, "prompt": "word " * 600, "max_tokens": 5}
    assert_openai_error(post(app.url, "/v1/completions", body), 400, "512")
