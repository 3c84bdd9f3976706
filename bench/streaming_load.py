"""The streaming benchmark's load: clients that ask for streams one after another and time every token."""

from __future__ import annotations

import asyncio
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

TOKENS = 200
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Load:
    """What one run saw; times in seconds. ``lost`` counts streams that ended without their last event.

    Streams that run at the end are read to theirs. A server that lags puts several tokens in one event, so
    tokens are counted by whole streams and ``events`` beside them.
    """

    seconds: float = 0.0
    tokens: int = 0
    events: int = 0
    lost: int = 0
    server_cpu_s: float = 0.0
    client_cpu_s: float = 0.0
    ttft: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and its descendants that live."""
    parents: dict[int, list[int]] = {}
    used: dict[int, float] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            values = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        number = int(stat.parent.name)
        parents.setdefault(int(values[1]), []).append(number)
        used[number] = (int(values[11]) + int(values[12])) / _TICKS
    total, left = 0.0, [pid]
    while left:
        number = left.pop()
        total += used.get(number, 0.0)
        left += parents.get(number, [])
    return total


async def _client(port: int, payload: bytes, until: float, load: Load) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        while time.monotonic() < until:
            started = last = time.monotonic()
            writer.write(payload)
            first, tail = True, b""
            while b"data: [DONE]" not in tail or not tail.endswith(b"0\r\n\r\n"):
                piece = await reader.read(65536)
                if not piece:
                    load.lost += 1
                    return
                now = time.monotonic()
                events = piece.count(b'"text":')
                tail = (tail + piece)[-64:]
                if events:
                    (load.ttft if first else load.gaps).append(now - (started if first else last))
                    first, last = False, now
                    load.events += events
            load.tokens += TOKENS
    finally:
        writer.close()


async def _run(port: int, clients: int, seconds: float, model: str, load: Load) -> None:
    body = json.dumps(
        {"model": model, "prompt": "x", "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
    )
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    payload = f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()
    until = time.monotonic() + seconds
    await asyncio.gather(*(_client(port, payload, until, load) for _ in range(clients)))


def run_load(port: int, pid: int, clients: int, seconds: float, model: str) -> Load:
    """Load the server on ``port`` (process ``pid``) for ``seconds``."""
    import uvloop

    load = Load()
    server, own, started = cpu_s(pid), time.process_time(), time.monotonic()
    uvloop.run(_run(port, clients, seconds, model, load))
    load.seconds = time.monotonic() - started
    load.server_cpu_s, load.client_cpu_s = cpu_s(pid) - server, time.process_time() - own
    return load
