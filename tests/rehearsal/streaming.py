"""What a streamed answer must be, read off the wire."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx


@dataclass
class Stream:
    """The chunks of a streamed chat completion with the time at which each came, in seconds."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    done: bool = False
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return "".join(
            chunk["choices"][0]["delta"].get("content") or "" for chunk in self.chunks if chunk["choices"]
        )

    @property
    def content_times(self) -> list[float]:
        return [
            when
            for when, chunk in zip(self.times, self.chunks, strict=True)
            if chunk["choices"] and chunk["choices"][0]["delta"].get("content")
        ]

    @property
    def finish_reasons(self) -> list[str]:
        reasons = [chunk["choices"][0].get("finish_reason") for chunk in self.chunks if chunk["choices"]]
        return [reason for reason in reasons if reason]


def chat(url: str, question: str, *, max_tokens: int = 64) -> Stream:
    """Stream one chat completion with a plain HTTP client: nothing between the test and the bytes."""
    model = httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "temperature": 0,
        "max_tokens": max_tokens,
    }
    stream = Stream()
    started = time.monotonic()
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as response:
        assert response.status_code == 200, response.read()
        stream.headers = dict(response.headers)
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                stream.done = True
                continue
            assert not stream.done, "a chunk after [DONE]"
            stream.times.append(time.monotonic() - started)
            stream.chunks.append(json.loads(data))
    return stream


def held_back(stream: Stream, *, span_s: float = 0.3) -> str:
    """Why a stream does not count as streamed, empty if it does.

    It does with several chunks, the last ``span_s`` after the first, and fewer than half of them within
    5 ms of the one before.
    """
    times = stream.content_times
    close = sum(1 for before, after in pairwise(times) if after - before <= 0.005)
    if len(times) < 4:
        return f"{len(times)} chunks: {stream.text!r}"
    if times[-1] - times[0] < span_s:
        return f"the last chunk came less than {span_s} s after the first: {times}"
    if close >= (len(times) - 1) / 2:
        return f"chunks came in bunches: {times}"
    return ""


def assert_really_streamed(ask: Callable[[], Stream], *, span_s: float = 0.3, tries: int = 8) -> Stream:
    """Ask until a stream comes evenly, and give it.

    What holds tokens back holds them back each time; a machine of two cores that is busy with two hosts
    bunches one stream or another. Whole and in order must each of them be.
    """
    reasons = []
    for _ in range(tries):
        stream = ask()
        assert stream.done
        assert len({chunk["id"] for chunk in stream.chunks}) == 1
        reason = held_back(stream, span_s=span_s)
        if not reason:
            return stream
        reasons.append(reason)
    raise AssertionError("\n".join(reasons))


SHORT_ANSWER_SPAN_S = 0.06
"""The short answer is eight engine steps: a current CPU makes one in some 18 ms, an older one in 55 ms."""
