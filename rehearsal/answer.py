"""Ask the deployed model something and show its answer as it comes, timing every chunk."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import openai

QUESTION = "What is the capital of France?"


@dataclass(frozen=True)
class Answer:
    """A streamed answer: its text, and when each chunk came, in seconds after the request."""

    text: str
    chunk_times_s: tuple[float, ...]
    finish_reason: str | None

    @property
    def first_token_s(self) -> float:
        return self.chunk_times_s[0] if self.chunk_times_s else float("nan")


def ask(
    url: str,
    *,
    question: str = QUESTION,
    show: Callable[[str], None],
    max_tokens: int = 48,
    authority: Path | None = None,
) -> Answer:
    """Stream a chat completion from ``url`` (no path) with the ``openai`` package.

    Args:
        show: called with each piece of text as it arrives.
        authority: certificate (PEM) that an ``https`` endpoint is trusted by; None: the system's.

    Raises:
        openai.OpenAIError: the endpoint refused or the stream broke.
    """
    trust = ssl.create_default_context(cafile=authority) if authority else True
    http = openai.DefaultHttpxClient(verify=trust)
    client = openai.OpenAI(
        base_url=f"{url}/v1", api_key="none", timeout=120.0, max_retries=0, http_client=http
    )
    model = client.models.list().data[0].id
    started = time.monotonic()
    pieces: list[str] = []
    times: list[float] = []
    finish = None
    with client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        stream=True,
        temperature=0.0,
        max_tokens=max_tokens,
    ) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                if choice.delta.content:
                    times.append(time.monotonic() - started)
                    pieces.append(choice.delta.content)
                    show(choice.delta.content)
                finish = choice.finish_reason or finish
    return Answer("".join(pieces), tuple(times), finish)
