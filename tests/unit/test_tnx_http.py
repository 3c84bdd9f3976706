"""The transformers-neuronx engine's OpenAI server app over real HTTP, with an emulated model in real time."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import uvicorn

from app.serve.engines.transformers_neuronx.api import OpenAIApp
from app.serve.engines.transformers_neuronx.contract import Geometry
from app.serve.engines.transformers_neuronx.core import EngineCore
from app.serve.engines.transformers_neuronx.engine import AsyncEngine
from app.serve.engines.transformers_neuronx.metrics import EngineMetrics
from app.serve.engines.transformers_neuronx.runner import DecodeEntry, Rows
from app.serve.policy.costs import StepCosts
from app.serve.policy.stall import StallPolicy
from bench.tnx_emulation import EmulatedModel, VirtualClock

GEOMETRY = Geometry(2, (64, 256), (32, 128), 128, (16,))
EOS = 3


class CharacterTokenizer:
    """One token a character of ASCII, and a chat template of two words."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) % 128 for letter in text]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(token) for token in token_ids if not (skip_special_tokens and token < 32))

    def apply_chat_template(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool, tokenize: bool
    ) -> str:
        if messages[0]["role"] not in ("user", "system"):
            raise ValueError("conversations begin with the user")
        return "".join(f"{item['role'][0]}:{item['content']};" for item in messages) + "a:"


class AlphabetModel(EmulatedModel):
    """Says the alphabet over and over, a letter every few milliseconds."""

    step_s = 0.004
    fails = False

    def _row(self, slot: int, length: int) -> Any:
        row = np.zeros(self.geometry.vocabulary, dtype=np.float32)
        row[ord("a") + length % 26] = 9.0
        return row

    def decode(self, entries: Sequence[DecodeEntry]) -> Rows:
        if self.fails:
            raise RuntimeError("nrt_execute failed")
        time.sleep(self.step_s)
        return super().decode(entries)


class Server:
    """The app behind uvicorn on a loopback port."""

    def __init__(self) -> None:
        costs = StepCosts({32: 4.0, 128: 8.0}, {64: 4.0, 256: 4.0}, {16: 4.0})
        self.model = AlphabetModel(GEOMETRY, costs, VirtualClock())
        self.metrics = EngineMetrics()
        tokenizer = CharacterTokenizer()
        core = EngineCore(
            self.model,
            tokenizer,
            costs,
            policy=StallPolicy(),
            eos=frozenset({EOS}),
            clock=time.monotonic,
            metrics=self.metrics,
        )
        self.engine = AsyncEngine(core)
        app = OpenAIApp(self.engine, tokenizer, self.metrics, model="alphabet", context_limit=256)
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        self._server.should_exit = True
        await self._task
        await asyncio.to_thread(self.engine.shutdown)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_a_chat_streams_token_by_token_and_counts(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="alphabet",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=30,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, times, finish, usage, role = "", [], None, None, None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            role = choice.delta.role or role
            if choice.delta.content:
                text += choice.delta.content
                times.append(time.monotonic())
            finish = choice.finish_reason or finish
    assert (text, finish, role) == ("hijklmnopqrstuvwxyzabcdefghijk", "length", "assistant")
    assert times[-1] - times[0] > 20 * AlphabetModel.step_s, "the text must come as it is generated"
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (7, 30)


async def test_a_completion_comes_whole_with_stop_and_logprobs(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="alphabet", prompt="xyz", max_tokens=20, stop=["hi"], logprobs=2, temperature=0
    )
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == ("defg", "stop")
    assert choice.logprobs is not None and choice.logprobs.tokens == list("defghi")
    assert choice.logprobs.text_offset == list(range(6))
    assert answer.usage is not None and answer.usage.completion_tokens == 6
    chat = await client.chat.completions.create(
        model="alphabet",
        messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        max_completion_tokens=2,
        temperature=0,
        logprobs=True,
        top_logprobs=1,
    )
    assert chat.choices[0].message.content == "hi"
    content = chat.choices[0].logprobs and chat.choices[0].logprobs.content
    assert content and [item.token for item in content] == ["h", "i"]
    assert content[0].top_logprobs[0].token == "h"


async def test_models_and_metrics(client: openai.AsyncOpenAI, server: Server) -> None:
    assert [model.id async for model in await client.models.list()] == ["alphabet"]
    await client.completions.create(model="alphabet", prompt=[100, 101], max_tokens=3)
    async with httpx.AsyncClient(base_url=server.url) as plain:
        text = (await plain.get("/metrics")).text
    assert "neuronfleet_tnx_generation_tokens_total 3.0" in text
    assert "neuronfleet_tnx_requests_running 0.0" in text
    assert 'neuronfleet_tnx_step_seconds_count{graph="context"} 1.0' in text


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("completions", "{", 400, "JSON"),
        ("completions", {"prompt": "a", "temperature": "hot", "max_tokens": "x"}, 400, "temperature"),
        ("completions", {"prompt": "a" * 300}, 400, "300 tokens; expected 1 to 255"),
        ("completions", {"prompt": ""}, 400, "0 tokens"),
        ("completions", {"prompt": ["a", "b"]}, 400, "2 prompts"),
        ("completions", {"prompt": "a", "n": 2, "logit_bias": {"1": 2}}, 400, "n 2 is not supported"),
        ("completions", {"prompt": "a", "top_k": 1000, "top_p": 0}, 400, "top_k 1000"),
        ("completions", {"prompt": "a", "model": "other"}, 404, "'other' is not served"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "tool", "content": "x"}]}, 400, "begin with the user"),
        ("chat/completions", {"messages": [{"content": "x"}]}, 400, '"role"'),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "must be text",
        ),
        ("embeddings", {}, 404, "no /v1/embeddings"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_requests_are_refused_in_the_openai_shape(
    server: Server, path: str, body: Any, status: int, words: str, stream: bool
) -> None:
    content = body if isinstance(body, str) else json.dumps({**body, "stream": stream})
    async with httpx.AsyncClient(base_url=server.url) as plain:
        answer = await plain.post(f"/v1/{path}", content=content)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]
    assert server.metrics.counts.running == 0


async def test_a_client_that_goes_away_frees_its_slot(server: Server) -> None:
    body = {"prompt": "abc", "max_tokens": 200, "stream": True}
    async with httpx.AsyncClient(base_url=server.url) as plain:
        async with plain.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data:"):
                    break
        for _ in range(200):
            if server.metrics.counts.finished.get("abort"):
                break
            await asyncio.sleep(0.01)
        assert server.metrics.counts.finished == {"abort": 1}
        assert server.metrics.counts.running == 0
        waiting = [asyncio.create_task(plain.post("/v1/completions", json={**body, "stream": False}))]
        await asyncio.sleep(0.05)
        waiting[0].cancel()
        for _ in range(200):
            if server.metrics.counts.finished.get("abort") == 2:
                break
            await asyncio.sleep(0.01)
        assert server.metrics.counts.finished == {"abort": 2}


async def test_an_engine_that_dies_ends_the_stream_with_an_error_and_no_done(server: Server) -> None:
    body = {"prompt": "abc", "max_tokens": 200, "stream": True}
    lines = []
    async with (
        httpx.AsyncClient(base_url=server.url) as plain,
        plain.stream("POST", "/v1/completions", json=body) as answer,
    ):
        async for line in answer.aiter_lines():
            lines += [line] if line else []
            server.model.fails = len(lines) > 3
    assert "nrt_execute failed" in json.loads(lines[-1].removeprefix("data: "))["error"]["message"]
    assert "data: [DONE]" not in lines
    async with httpx.AsyncClient(base_url=server.url) as plain:
        answer = await plain.post("/v1/completions", json={"prompt": "abc"})
    assert answer.status_code == 503
