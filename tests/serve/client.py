"""What tests need of a streaming client: every chunk with the time at which it came."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

TIMEOUT = httpx.Timeout(120.0, connect=10.0)


@dataclass
class Stream:
    """A finished stream. ``times`` are seconds since the request was sent, one for each event."""

    status: int
    headers: httpx.Headers
    events: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    done: bool = False

    @property
    def text(self) -> str:
        """What the model said, from chat or completion chunks."""
        parts = []
        for event in self.events:
            for choice in event.get("choices", ()):
                parts.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
        return "".join(parts)

    @property
    def token_times(self) -> list[float]:
        """When the chunks that carry text came."""
        return [
            at
            for at, event in zip(self.times, self.events, strict=True)
            if any(c.get("text") or c.get("delta", {}).get("content") for c in event.get("choices", ()))
        ]

    @property
    def finish_reasons(self) -> list[str]:
        """Finish reasons in the order in which they came."""
        return [
            c["finish_reason"] for e in self.events for c in e.get("choices", ()) if c.get("finish_reason")
        ]


def stream(url: str, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Stream:
    """POST and read a whole stream of server-sent events."""
    started = time.monotonic()
    with (
        httpx.Client(timeout=TIMEOUT) as client,
        client.stream("POST", url + path, json={**body, "stream": True}, headers=headers) as response,
    ):
        result = Stream(response.status_code, response.headers)
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                result.done = True
                continue
            result.times.append(time.monotonic() - started)
            result.events.append(json.loads(line.removeprefix("data: ")))
    return result


def post(url: str, path: str, body: Any) -> httpx.Response:
    """POST JSON."""
    return httpx.post(url + path, json=body, timeout=TIMEOUT)


def gauge(url: str, name: str) -> float:
    """The sum of a metric over its label sets, from /metrics."""
    text = httpx.get(url + "/metrics", timeout=TIMEOUT).text
    values = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? ([0-9.e+-]+)$", text, re.MULTILINE)
    assert values, f"no metric {name} in /metrics"
    return sum(float(value) for value in values)


def wait_for(condition: Any, timeout_s: float, what: str) -> None:
    """Poll until ``condition()`` holds."""
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, f"{what} did not come true within {timeout_s} s"
        time.sleep(0.05)
