"""A request at each stage: heartbeats, a client that leaves or does not read, limits on time, a death."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from app.serve.exchange import SWEEP_S
from tests.serve.client import TIMEOUT, wait_for

FREED_S = 0.1
PATHS = ["/v1/completions", "/v1/chat/completions", "/generate"]


class Connection:
    """One request on a bare socket, so that a test decides what is read and when it leaves."""

    def __init__(self, url: str, path: str, body: dict[str, Any], receive_buffer: int | None = None) -> None:
        host, port = url.removeprefix("http://").split(":")
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(20)
        self.socket.connect((host, int(port)))
        payload = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        self.socket.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(payload) + payload)
        self.got = b""

    def read_until(self, mark: bytes) -> bytes:
        """Read until ``mark`` came or the connection ended."""
        while mark not in self.got and (piece := self.socket.recv(4096)):
            self.got += piece
        return self.got

    def leave(self) -> None:
        """Go away, as a process that dies does."""
        self.socket.close()


def body_for(local: Any, path: str, **fields: Any) -> dict[str, Any]:
    """A long streaming request of the path's form."""
    if path == "/generate":
        return {"prompt": "x", "max_tokens": 3000, **fields}
    prompt = (
        {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    )
    return {"model": local.model, "stream": True, "max_tokens": 3000, "ignore_eos": True, **prompt, **fields}


@pytest.fixture
def timing(local: Any) -> Iterator[Any]:
    """The emulated engine's times, to be set; back to what they were afterwards."""
    scheduler = local.scheduler
    before, output = scheduler._timing, scheduler._output_tokens
    scheduler._output_tokens = 3000

    def set_times(ttft_s: float, itl_s: float) -> None:
        scheduler._timing = type(before)(ttft_s, itl_s)

    yield set_times
    scheduler._timing, scheduler._output_tokens = before, output
    wait_for(lambda: not scheduler.running and not scheduler.waiting, 5, "the engine is empty after a test")


def freed_after(scheduler: Any) -> float:
    """Seconds until no request is in the engine."""
    started = time.monotonic()
    while scheduler.running or scheduler.waiting:
        assert time.monotonic() - started < 5, "a client that left holds its slot"
        time.sleep(0.002)
    return time.monotonic() - started


def promptly(leave: Callable[[], float]) -> None:
    """It holds its bound; a machine that is busy with something else is given three tries."""
    tries: list[float] = []
    while not tries or (min(tries) >= FREED_S and len(tries) < 3):
        tries.append(leave())
    assert min(tries) < FREED_S, tries


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stage", ["prefill", "decoding"])
def test_a_client_that_leaves_frees_its_slot_at_once(local: Any, timing: Any, path: str, stage: str) -> None:
    timing(60.0 if stage == "prefill" else 0.0, 0.01)

    def leave() -> float:
        connection = Connection(local.url, path, body_for(local, path))
        wait_for(lambda: local.scheduler.running, 10, "it runs")
        if stage == "decoding":
            connection.read_until(b"Inf")
        connection.leave()
        return freed_after(local.scheduler)

    promptly(leave)


@pytest.mark.parametrize("path", PATHS)
def test_an_unstreamed_answer_ends_with_its_client(local: Any, timing: Any, path: str) -> None:
    timing(0.0, 0.01)
    fields = {} if path == "/generate" else {"stream": False}

    def leave() -> float:
        connection = Connection(local.url, path, body_for(local, path, **fields))
        wait_for(lambda: local.scheduler.running, 10, "it runs")
        connection.leave()
        return freed_after(local.scheduler)

    promptly(leave)


def test_a_client_that_leaves_the_queue_is_forgotten(local: Any, timing: Any) -> None:
    timing(60.0, 0.01)
    batch = local.settings.batch_size
    path = "/v1/completions"
    running = [Connection(local.url, path, body_for(local, path)) for _ in range(batch)]
    wait_for(lambda: len(local.scheduler.running) == batch, 10, "the batch is full")

    def leave() -> float:
        waiting = Connection(local.url, path, body_for(local, path))
        wait_for(lambda: local.front._admission.active == batch + 1, 10, "one more is taken on")
        waiting.leave()
        started = time.monotonic()
        while local.front._admission.active > batch:
            assert time.monotonic() - started < 5, "a client that left is still waited for"
            time.sleep(0.002)
        return time.monotonic() - started

    promptly(leave)
    assert not local.scheduler.waiting
    for connection in running:
        connection.leave()


def fill_socket(local: Any, url: str, front: Any) -> Connection:
    """A client that asks for more than the buffers hold, reads nothing, and now blocks the server."""
    body = body_for(local, "/v1/completions", n=8)
    connection = Connection(url, "/v1/completions", body, receive_buffer=4096)
    wait_for(lambda: any(item.blocked for item in front._sweeper._live), 20, "the server's write is blocked")
    return connection


def test_a_client_that_leaves_while_its_socket_is_full_frees_its_slots(local: Any, timing: Any) -> None:
    timing(0.0, 0.0005)

    def leave() -> float:
        connection = fill_socket(local, local.url, local.front)
        connection.leave()
        return freed_after(local.scheduler)

    promptly(leave)


def test_a_client_that_does_not_read_is_dropped_in_a_stated_time(local: Any, timing: Any) -> None:
    """Its slots are free and its connection is reset: nothing waits for it to read what is buffered."""
    timing(0.0, 0.0005)
    url, front = local.open(write_timeout_s=0.6)
    connection = fill_socket(local, url, front)
    started = time.monotonic()
    wait_for(lambda: not front._sweeper._live, 5, "it is dropped")
    assert time.monotonic() - started < 0.6 + SWEEP_S + 1.0
    freed_after(local.scheduler)
    wait_for(lambda: not front._sweeper._live, 5, "nothing is left of it")
    assert not local.servers[-1]._server.server_state.connections
    with pytest.raises(ConnectionResetError):
        while connection.socket.recv(65536):
            pass


def test_a_silent_stream_has_heartbeats_and_stays_whole(local: Any, timing: Any) -> None:
    """In prefill (before any head was due) and between tokens; OpenAI's client does not see them."""
    timing(0.9, 0.9)
    url, _ = local.open(heartbeat_s=0.3)
    connection = Connection(url, "/v1/completions", body_for(local, "/v1/completions", max_tokens=2))
    answer = connection.read_until(b"[DONE]\n\n").decode()
    head, _, stream = answer.partition("\r\n\r\n")
    assert "cache-control: no-cache, no-transform" in head
    assert "x-accel-buffering: no" in head
    before, _, after = stream.partition('"text":" Inf"')
    assert before.count(": keep-alive\n\n") >= 1
    assert after.count(": keep-alive\n\n") >= 1
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    chunks = client.completions.create(model=local.model, prompt="x", max_tokens=2, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == " Inferent"


def test_raw_text_has_no_heartbeats(local: Any, timing: Any) -> None:
    timing(0.9, 0.0)
    url, _ = local.open(heartbeat_s=0.2)
    response = httpx.post(url + "/generate", json={"prompt": "x", "max_tokens": 2}, timeout=TIMEOUT)
    assert response.text == " Inferent"


def test_a_frozen_engine_ends_its_stream_with_an_error_event(local: Any, timing: Any) -> None:
    timing(0.0, 0.01)
    url, _ = local.open(token_timeout_s=0.5)
    connection = Connection(url, "/v1/completions", body_for(local, "/v1/completions"))
    connection.read_until(b"Inf")
    timing(0.0, 2.0)
    stream = connection.read_until(b"[DONE]\n\n").decode()
    error = json.loads(stream.split("data: ")[-2].split("\n\n")[0])["error"]
    assert error["type"] == "timeout_error"
    assert "token_timeout_s=0.5" in error["message"]
    freed_after(local.scheduler)


def test_a_prefill_over_its_limit_is_answered_with_its_status(local: Any, timing: Any) -> None:
    timing(60.0, 0.0)
    url, _ = local.open(first_token_timeout_s=0.4)
    response = httpx.post(url + "/v1/completions", json=body_for(local, "/v1/completions"), timeout=TIMEOUT)
    assert response.status_code == 504
    assert "first_token_timeout_s" in response.json()["error"]["message"]


def test_a_body_that_does_not_come_is_not_waited_for(local: Any) -> None:
    url, _ = local.open(body_timeout_s=0.4)
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        answer = b""
        while piece := client.recv(4096):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"body_timeout_s" in answer


@contextlib.contextmanager
def dying(local: Any) -> Iterator[Any]:
    """Gives what kills the engine core as vLLM sees a death; afterwards it is another, living core."""
    core = local.engine.client.engine_core
    next_output = core.get_output_async

    async def die() -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        async def dead() -> Any:
            raise EngineDeadError

        core.resources.engine_dead = True
        core.get_output_async = dead

    try:
        yield lambda: asyncio.run_coroutine_threadsafe(die(), local.loop).result(10)
    finally:
        core.get_output_async = next_output
        core.resources.engine_dead = False

        async def revive() -> None:
            local.scheduler.abort([*local.scheduler.running])
            local.engine.client.output_handler = None

        asyncio.run_coroutine_threadsafe(revive(), local.loop).result(10)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_engine_that_dies_mid_stream_ends_it_with_an_error_event(
    local: Any, timing: Any, path: str
) -> None:
    timing(0.0, 0.05)
    connection = Connection(local.url, path, body_for(local, path))
    connection.read_until(b"Inf")
    with dying(local) as kill:
        kill()
        stream = connection.read_until(b"[DONE]\n\n").decode()
        error = json.loads(stream.split("data: ")[-2].split("\n\n")[0])["error"]
        assert set(error) >= {"message", "type", "param", "code"}
        assert error["message"]
        refused = httpx.post(local.url + path, json=body_for(local, path), timeout=TIMEOUT)
        assert refused.status_code == 503
        assert "died" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "10"


def test_an_engine_that_dies_before_the_first_token_is_answered_with_503(local: Any, timing: Any) -> None:
    """Nothing was sent, so whoever routed the request here may try it elsewhere."""
    timing(60.0, 0.0)
    connection = Connection(local.url, "/v1/completions", body_for(local, "/v1/completions"))
    short = Connection(local.url, "/v1/completions", body_for(local, "/v1/completions", n=1))
    wait_for(lambda: len(local.scheduler.running) == 2, 10, "they run")
    with dying(local) as kill:
        kill()
        timing(0.0, 0.0)
        local.scheduler.abort(list(local.scheduler.running)[1:])
        for request in local.scheduler.running.values():
            request.first_at = 0.0
        answer = connection.read_until(b"}}").decode()
    assert answer.startswith("HTTP/1.1 503 ")
    assert "retry-after: 10" in answer
    short.leave()
