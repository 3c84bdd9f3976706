"""The transformers-neuronx engine in a real Ray Serve replica: SmolLM2 over the CPU contract, real HTTP."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.serve.client import TIMEOUT, gauge, post, stream, wait_for
from tests.serve.conftest import App, Deploy

# Ray's workers inherit the environment that Ray was started in, by the first test that needs it.
os.environ.update(NEURONFLEET_TNX_CONTRACT="cpu", NEURONFLEET_TNX_CHUNK_SIZES="16")

CHAT = "/v1/chat/completions"


def question(text: str, max_tokens: int) -> dict[str, object]:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def app(deploy: Deploy) -> App:
    """One replica with two slots."""
    return deploy(
        profile="transformers-neuronx-2.25", batch_size="2", max_model_len="128", buckets=["64", "128"]
    )


def test_streams_share_the_slots_and_each_comes_token_by_token(app: App) -> None:
    questions = ["What is the capital of France?", "Name a colour.", "Count to five."]
    alone = [post(app.url, CHAT, question(text, 12)).json() for text in questions]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda text: stream(app.url, CHAT, question(text, 12)), questions))
    for whole, streamed in zip(alone, together, strict=True):
        assert streamed.done and streamed.finish_reasons == ["length"]
        assert streamed.text == whole["choices"][0]["message"]["content"]
        assert whole["usage"]["completion_tokens"] == 12
        assert len(streamed.token_times) > 6
    assert "Paris" in together[0].text


def test_the_replica_is_ready_lists_its_model_and_serves_the_raw_form(app: App) -> None:
    assert httpx.get(app.url + "/readyz", timeout=TIMEOUT).status_code == 200
    models = httpx.get(app.url + "/v1/models", timeout=TIMEOUT).json()
    assert [item["id"] for item in models["data"]] == [app.model]
    body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    assert "Paris" in post(app.url, "/generate", body).text
    refused = post(app.url, CHAT, question("long " * 200, 4))
    assert refused.status_code == 400
    assert "127" in refused.json()["error"]["message"]


def test_a_client_that_goes_away_frees_its_slot(app: App) -> None:
    body = {**question("Tell me a long story.", 90), "stream": True}
    with (
        httpx.Client(timeout=TIMEOUT) as client,
        client.stream("POST", app.url + CHAT, json=body) as response,
    ):
        lines = (line for line in response.iter_lines() if line.startswith("data:"))
        for _ in range(3):
            next(lines)
        assert gauge(app.url, "neuronfleet_tnx_requests_running") == 1
    idle = lambda: gauge(app.url, "neuronfleet_tnx_requests_running") == 0  # noqa: E731
    wait_for(idle, 5, "an empty engine after a disconnect")
    text = httpx.get(app.url + "/metrics", timeout=TIMEOUT).text
    assert 'requests_finished_total{reason="abort"} 1.0' in text
