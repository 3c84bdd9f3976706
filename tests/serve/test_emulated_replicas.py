"""Two replicas behind one port: both serve."""

from __future__ import annotations

import threading

import httpx
import pytest

from tests.serve.client import Stream, stream
from tests.serve.conftest import App, Deploy


@pytest.fixture(scope="module")
def app(deploy: Deploy) -> App:
    return deploy(replicas=2, emulated_ttft_ms="10", emulated_itl_ms="20", batch_size="2", queue_limit="8")


def test_both_replicas_serve(app: App) -> None:
    seen = {httpx.get(app.url + "/healthz").json()["replica"] for _ in range(40)}
    assert len(seen) == 2
    results: list[Stream] = []

    def ask() -> None:
        body = {"model": app.model, "prompt": "x", "max_tokens": 30, "ignore_eos": True}
        results.append(stream(app.url, "/v1/completions", body))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [result.finish_reasons for result in results] == [["length"]] * 8
    assert {result.text for result in results} == {results[0].text}
