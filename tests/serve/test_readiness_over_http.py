"""/readyz follows tokens: a frozen engine is alive but not ready, and comes back by itself."""

from __future__ import annotations

import time

import httpx
import pytest

from tests.serve.client import TIMEOUT, post, wait_for
from tests.serve.conftest import App


@pytest.fixture(scope="module")
def app(emulated: App) -> App:
    return emulated


def ready(app: App) -> httpx.Response:
    return httpx.get(app.url + "/readyz", timeout=TIMEOUT)


def test_idle_is_ready_by_a_canary_and_then_by_its_token(app: App) -> None:
    time.sleep(0.7)
    first = ready(app)
    assert (first.status_code, first.json()["by"]) == (200, "canary")
    second = ready(app)
    assert (second.status_code, second.json()["by"]) == (200, "token")


def test_frozen_is_alive_but_not_ready(app: App) -> None:
    app.freeze.touch()
    try:
        time.sleep(0.7)
        started = time.monotonic()
        response = ready(app)
        assert time.monotonic() - started < 4
        assert response.status_code == 503
        assert "no token" in response.json()["error"]["message"]
        assert httpx.get(app.url + "/healthz").status_code == 200
    finally:
        app.freeze.unlink()
    wait_for(lambda: ready(app).status_code == 200, 10, "ready again after the freeze")
    answer = post(app.url, "/v1/completions", {"model": app.model, "prompt": "x", "max_tokens": 3})
    assert answer.json()["usage"]["completion_tokens"] == 3
