"""Streams through the whole path: client, Serve's proxy, replica, emulated engine."""

from __future__ import annotations

import itertools
import statistics
import threading
import time

import httpx
import openai
import pytest

from app.serve.engines.emulated import PASSAGE
from tests.serve.client import Stream, gauge, post, stream, wait_for
from tests.serve.conftest import App

ITL_MS = 40.0


@pytest.fixture(scope="module")
def app(emulated: App) -> App:
    return emulated


def chat(app: App, **fields: object) -> dict[str, object]:
    return {"model": app.model, "messages": [{"role": "user", "content": "What is Inferentia2?"}], **fields}


def completion(app: App, **fields: object) -> dict[str, object]:
    return {"model": app.model, "prompt": "Inferentia2 is", **fields}


def test_chat_stream_gives_each_token_as_it_is_made(app: App) -> None:
    result = stream(app.url, "/v1/chat/completions", chat(app, max_tokens=20))
    assert result.status == 200
    assert result.headers["content-type"].startswith("text/event-stream")
    assert result.headers["cache-control"] == "no-cache, no-transform"
    assert result.headers["x-accel-buffering"] == "no"
    assert PASSAGE.startswith(result.text), "tokens lost or out of order"
    assert result.finish_reasons == ["length"]
    assert result.done
    times = result.token_times
    assert len(times) == 20
    assert times[0] >= 0.12
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert statistics.median(gaps) == pytest.approx(ITL_MS / 1000, rel=0.5)
    assert sum(gap < 0.005 for gap in gaps) < len(gaps) / 2, f"chunks came in bunches: {gaps}"


def test_completion_stream_reports_usage(app: App) -> None:
    result = stream(
        app.url,
        "/v1/completions",
        completion(app, max_tokens=7, stream_options={"include_usage": True}),
    )
    usage = result.events[-1]["usage"]
    assert usage["completion_tokens"] == 7
    assert usage["total_tokens"] == usage["prompt_tokens"] + 7
    assert result.events[-1]["choices"] == []
    assert result.done


def test_unstreamed_answers_are_whole(app: App) -> None:
    answer = post(app.url, "/v1/chat/completions", chat(app, max_tokens=6)).json()
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "length"
    assert PASSAGE.startswith(choice["message"]["content"])
    assert answer["usage"]["completion_tokens"] == 6


def test_stop_string_ends_the_answer_before_it(app: App) -> None:
    result = stream(app.url, "/v1/completions", completion(app, max_tokens=50, stop=[" memory"]))
    assert result.finish_reasons == ["stop"]
    assert result.text == PASSAGE.split(" memory")[0]
    wait_for(
        lambda: gauge(app.url, "vllm:num_requests_running") == 0, 5, "the slot is free after a stop string"
    )


def test_models_are_listed_with_their_limit(app: App) -> None:
    models = httpx.get(app.url + "/v1/models").json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in models] == [(app.model, 512)]


def test_generate_streams_raw_text(app: App) -> None:
    pieces: list[tuple[float, str]] = []
    with httpx.stream(
        "POST", app.url + "/generate", json={"prompt": "Inferentia2", "max_tokens": 10}
    ) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-accel-buffering"] == "no"
        for piece in response.iter_text():
            pieces.append((time.monotonic(), piece))
    text = "".join(piece for _, piece in pieces)
    assert PASSAGE.startswith(text)
    assert len(text.split()) >= 5
    assert len(pieces) >= 5
    assert pieces[-1][0] - pieces[0][0] >= 5 * ITL_MS / 1000


def test_request_id_is_the_clients_or_new(app: App) -> None:
    given = httpx.post(
        app.url + "/v1/completions", json=completion(app, max_tokens=1), headers={"x-request-id": "abc-123"}
    )
    assert given.headers.get_list("x-request-id") == ["abc-123"]
    assert given.json()["id"] == "cmpl-abc-123"
    first, second = (httpx.get(app.url + "/healthz").headers["x-request-id"] for _ in range(2))
    assert first != second


def test_openai_client_streams(app: App) -> None:
    client = openai.OpenAI(base_url=app.url + "/v1", api_key="none", max_retries=0)
    text = ""
    for chunk in client.chat.completions.create(
        model=app.model, messages=[{"role": "user", "content": "Hello"}], max_tokens=8, stream=True
    ):
        text += chunk.choices[0].delta.content or ""
    assert text and PASSAGE.startswith(text)


def test_a_client_that_leaves_frees_its_slot(app: App) -> None:
    """At every stage: generating, and waiting in the queue behind a full batch."""
    leave = threading.Event()

    def reader() -> None:
        with httpx.stream(
            "POST",
            app.url + "/v1/completions",
            json=completion(app, max_tokens=490, stream=True, ignore_eos=True),
        ) as response:
            for _ in response.iter_lines():
                if leave.is_set():
                    return

    threads = [threading.Thread(target=reader) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_for(lambda: gauge(app.url, "vllm:num_requests_running") == 4, 10, "four requests run")
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(app.url + "/v1/completions", json=completion(app, max_tokens=5), timeout=1.0)
    wait_for(
        lambda: gauge(app.url, "vllm:num_requests_waiting") == 0, 5, "the one that waited and left is gone"
    )
    assert gauge(app.url, "vllm:num_requests_running") == 4
    leave.set()
    for thread in threads:
        thread.join(20)
    wait_for(lambda: gauge(app.url, "vllm:num_requests_running") == 0, 5, "all slots are free")


def test_beyond_the_queue_is_answered_at_once(app: App) -> None:
    """Batch 4 and queue 4 are full: the ninth is told to come again, the others are served."""
    results: list[Stream] = []

    def ask() -> None:
        results.append(stream(app.url, "/v1/completions", completion(app, max_tokens=30)))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    held = ("neuronfleet_admission_running", "neuronfleet_admission_queue_length")
    wait_for(lambda: sum(gauge(app.url, name) for name in held) == 8, 10, "four requests run and four wait")
    started = time.monotonic()
    refused = post(app.url, "/v1/completions", completion(app, max_tokens=1))
    assert time.monotonic() - started < 1.0
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    error = refused.json()["error"]
    assert error["code"] == 503
    assert "queue 4" in error["message"]
    for thread in threads:
        thread.join(30)
    assert [result.finish_reasons for result in results] == [["length"]] * 8
