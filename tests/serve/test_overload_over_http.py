"""Three times what the replica can do, over real HTTP: it goes on doing what it can, and says no at once."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass

import httpx
import numpy as np
import pytest

from tests.serve.client import gauge, post
from tests.serve.conftest import App, Deploy

BATCH, TTFT_MS, ITL_MS, TOKENS = 4, 100, 50, 20
SLO_S = 4.0
CAPACITY = BATCH / ((TTFT_MS + TOKENS * ITL_MS) / 1000)
"""Requests a second, by the emulated engine's set times: few, so that this machine's speed matters little."""


@pytest.fixture(scope="module")
def app(deploy: Deploy) -> App:
    return deploy(
        emulated_ttft_ms=str(TTFT_MS),
        emulated_itl_ms=str(ITL_MS),
        batch_size=str(BATCH),
        max_model_len="512",
        ttft_slo_ms=str(int(SLO_S * 1000)),
        expected_output_tokens=str(TOKENS),
        queue_limit="64",
    )


@dataclass(frozen=True)
class Answer:
    """Times in seconds since the request was sent."""

    status: int
    first_s: float
    whole_s: float
    tokens: int
    retry_after: int


async def ask(client: httpx.AsyncClient, app: App, key: str = "one") -> Answer:
    body = {"model": app.model, "prompt": "Inferentia2 is", "max_tokens": TOKENS, "stream": True}
    headers = {"authorization": f"Bearer {key}"}
    started, first, tokens = time.monotonic(), 0.0, 0
    async with client.stream("POST", app.url + "/v1/completions", json=body, headers=headers) as response:
        if response.status_code != 200:
            error = json.loads(await response.aread())["error"]
            assert error["code"] == response.status_code and error["message"]
        else:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    tokens += 1
                    first = first or time.monotonic() - started
        wait = int(response.headers.get("retry-after", 0))
        return Answer(response.status_code, first, time.monotonic() - started, tokens, wait)


async def load(app: App, rate: float, seconds: float) -> tuple[float, list[Answer]]:
    """Requests at random; gives tokens/s that came within the promise, and all answers."""
    rng = random.Random(7)
    limits = httpx.Limits(max_connections=500, max_keepalive_connections=500)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        tasks: list[asyncio.Task[Answer]] = []
        start = time.monotonic()
        at = start
        while at < start + seconds:
            at += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            tasks.append(asyncio.create_task(ask(client, app)))
        answers = await asyncio.gather(*tasks)
        took = time.monotonic() - start
    good = sum(answer.tokens for answer in answers if answer.status == 200 and answer.first_s <= SLO_S)
    return good / took, list(answers)


def test_overload_keeps_goodput_promise_and_honesty(app: App) -> None:
    """The margins are for a busy machine; in virtual time tests/unit/test_admission_queue.py has none."""

    async def scenario() -> None:
        at_capacity, _ = await load(app, CAPACITY, 7.0)
        overloaded, answers = await load(app, 3 * CAPACITY, 7.0)
        taken = [answer for answer in answers if answer.status == 200]
        refused = [answer for answer in answers if answer.status in (429, 503)]
        assert len(taken) + len(refused) == len(answers)
        assert all(answer.tokens >= TOKENS for answer in taken), "what was taken on came whole"
        assert overloaded >= 0.8 * at_capacity
        assert np.percentile([answer.first_s for answer in taken], 99) <= 1.2 * SLO_S
        assert len(refused) > len(taken) / 2
        assert np.percentile([answer.whole_s for answer in refused], 50) < 0.05
        assert np.percentile([answer.whole_s for answer in refused], 99) < 0.3
        assert all(answer.retry_after >= 1 for answer in refused)

    asyncio.run(scenario())
    assert gauge(app.url, "neuronfleet_admission_queue_length") == 0
    assert gauge(app.url, "neuronfleet_admission_refused_total") > 0
    assert gauge(app.url, "neuronfleet_admission_running") == 0


def test_what_never_fits_is_refused_with_the_numbers(app: App) -> None:
    prompt = {"model": app.model, "prompt": [5] * 600, "max_tokens": 4}
    refusal = post(app.url, "/v1/completions", prompt)
    assert refusal.status_code == 400
    error = refusal.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "prompt")
    assert "600" in error["message"] and "511" in error["message"]
    chat = {"model": app.model, "messages": [{"role": "user", "content": "Hello " * 20}], "max_tokens": 500}
    error = post(app.url, "/v1/chat/completions", chat).json()["error"]
    assert error["param"] == "max_tokens"
    assert "500" in error["message"] and "512" in error["message"]
