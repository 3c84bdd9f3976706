"""The engine core and its thread: what ends a request, what fails one request, what fails the engine."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from app.serve.engines.transformers_neuronx.contract import ContractError, Geometry
from app.serve.engines.transformers_neuronx.core import EngineCore
from app.serve.engines.transformers_neuronx.engine import AsyncEngine
from app.serve.engines.transformers_neuronx.metrics import EngineMetrics
from app.serve.engines.transformers_neuronx.request import (
    EngineDeadError,
    GenerationRequest,
    Output,
    RequestError,
    Sampling,
)
from app.serve.engines.transformers_neuronx.runner import DecodeEntry, Rows, warm_up
from app.serve.policy.costs import StepCosts
from app.serve.policy.stall import StallPolicy
from bench.tnx_emulation import EmulatedModel, LetterTokenizer, VirtualClock

GEOMETRY = Geometry(2, (32, 64), (16, 48), 40, (8,))
EOS = 39


def costs() -> StepCosts:
    return StepCosts({16: 5.0, 48: 9.0}, {32: 4.0, 64: 5.0}, {8: 4.0})


class ScriptedModel(EmulatedModel):
    """Says the letters of a script by position, whoever asks: the token at position p is ``script[p]``."""

    def __init__(self, script: Sequence[int]) -> None:
        super().__init__(GEOMETRY, costs(), VirtualClock())
        self.script = list(script)
        self.before: Callable[[str], None] = lambda _: None

    def _row(self, slot: int, length: int) -> Any:
        row = np.zeros(self.geometry.vocabulary, dtype=np.float32)
        row[self.script[length % len(self.script)]] = 5.0
        return row

    def context(self, slot: int, tokens: Sequence[int]) -> Rows:
        self.before("context")
        return super().context(slot, tokens)

    def decode(self, entries: Sequence[DecodeEntry]) -> Rows:
        self.before("decode")
        return super().decode(entries)


def letters(text: str) -> list[int]:
    return [ord(letter) - 97 for letter in text]


def new_core(model: EmulatedModel, queue_limit: int = 4) -> EngineCore:
    return EngineCore(
        model,
        LetterTokenizer(),
        costs(),
        policy=StallPolicy(tpot_slo_ms=50),
        eos=frozenset({EOS}),
        clock=model._clock,
        metrics=EngineMetrics(),
        queue_limit=queue_limit,
    )


def request(name: str = "r", prompt: Sequence[int] = (1, 2), **sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        name, tuple(prompt), Sampling(**{"max_tokens": 30, "temperature": 0.0, **sampling})
    )


def drain(core: EngineCore) -> dict[str, tuple[str, Output]]:
    """Run to the end: each request's whole text and last output."""
    texts: dict[str, str] = {}
    last: dict[str, Output] = {}
    while not core.idle:
        for output in core.step():
            texts[output.request_id] = texts.get(output.request_id, "") + output.text
            last[output.request_id] = output
    return {name: (texts[name], output) for name, output in last.items()}


def drain_text(core: EngineCore) -> tuple[str, Output]:
    return drain(core)["r"]


def test_a_stop_string_across_tokens_ends_the_text_before_it() -> None:
    core = new_core(ScriptedModel(letters("xxhelloworldagain")))
    core.add(request(stop=("ow",)))
    text, last = drain_text(core)
    assert text == "hell"
    assert (last.finish, last.stop_reason) == ("stop", "ow")


def test_held_back_text_comes_when_the_answer_ends_otherwise() -> None:
    core = new_core(ScriptedModel(letters("xxabcdef")))
    core.add(request(max_tokens=3, stop=("cq",)))
    text, last = drain_text(core)
    assert (text, last.finish) == ("abc", "length")


@pytest.mark.parametrize(("ignore", "finish"), [(False, "stop"), (True, "length")])
def test_the_end_of_sequence_token_ends_the_answer_and_is_no_text(ignore: bool, finish: str) -> None:
    core = new_core(ScriptedModel([0, 0, 1, 2, EOS, 3]))
    core.add(request(max_tokens=4, ignore_eos=ignore))
    text, last = drain_text(core)
    assert last.finish == finish
    assert text == ("bcn" + "d" if ignore else "bc")
    assert last.stop_reason is None


def test_a_stop_token_is_named() -> None:
    core = new_core(ScriptedModel([0, 0, 1, 2, 3]))
    core.add(request(stop_token_ids=frozenset({2})))
    text, last = drain_text(core)
    assert (text, last.finish, last.stop_reason) == ("b", "stop", 2)


def test_the_context_limit_ends_the_answer() -> None:
    core = new_core(ScriptedModel([1]))
    core.add(request(prompt=[1] * 60, max_tokens=1000))
    text, last = drain_text(core)
    assert (len(text), last.finish) == (4, "length")


def test_logprobs_come_with_each_token() -> None:
    core = new_core(ScriptedModel([0, 0, 1, 2, 3]))
    core.add(request(max_tokens=2, logprobs=2))
    outputs = [output for _ in range(4) for output in core.step()]
    found = [item for output in outputs for item in output.logprobs]
    assert [item.token for item in found] == [1, 2]
    exact = 5 - math.log(math.exp(5) + 39)
    assert found[0].logprob == pytest.approx(exact)
    assert found[0].top[0] == (1, pytest.approx(exact))


def test_all_that_is_wrong_with_a_request_is_said_at_once() -> None:
    core = new_core(ScriptedModel([1]))
    with pytest.raises(RequestError, match=r"max_tokens 0.*64 tokens; expected 1 to 63.*vocabulary of 40"):
        core.add(request(prompt=[40] * 64, max_tokens=0))
    with pytest.raises(RequestError, match="0 tokens"):
        core.add(request(prompt=[]))
    assert core.idle


def test_without_chunks_the_longest_prompt_is_the_largest_context_bucket() -> None:
    assert Geometry(2, (32, 64), (16, 48), 40).longest_prompt == 48
    assert GEOMETRY.longest_prompt == 63
    with pytest.raises(
        ContractError, match=r"slots 0.*token_buckets \[64, 32\].*chunk_sizes \[20\] are over 16"
    ):
        Geometry(0, (64, 32), (16, 48), 40, (20,))


def test_a_full_queue_refuses_and_an_id_in_use_too() -> None:
    core = new_core(ScriptedModel([1]), queue_limit=2)
    core.add(request("a"))
    with pytest.raises(RequestError, match="in use"):
        core.add(request("a"))
    core.add(request("b"))
    with pytest.raises(RequestError, match="2 requests wait already"):
        core.add(request("c"))


def test_unusable_logits_fail_their_own_request_alone() -> None:
    model = ScriptedModel([1])
    row = model._row

    def poisoned(slot: int, length: int) -> Any:
        result = row(slot, length)
        return result * np.nan if slot == 1 and length == 5 else result

    model._row = poisoned  # type: ignore[method-assign]
    core = new_core(model)
    for name, count in (("a", 6), ("b", 4), ("c", 3)):
        core.add(request(name, max_tokens=count))
    ended = drain(core)
    reasons = {name: output.finish for name, (_, output) in ended.items()}
    assert sorted(reasons.values()) == ["error", "length", "length"]
    failed = next(output for _, output in ended.values() if output.finish == "error")
    assert "nan" in str(failed.error)
    assert core.dead_reason is None
    assert core.metrics.counts.running == 0


def test_a_prompt_that_the_contract_refuses_fails_alone() -> None:
    model = ScriptedModel([1])
    core = new_core(model)
    core.add(request("good", max_tokens=8))
    core.step()
    model.before = lambda kind: (
        (_ for _ in ()).throw(AssertionError("invalid input")) if kind == "context" else None
    )
    core.add(request("bad"))
    ended = drain(core)
    assert ended["good"][1].finish == "length"
    assert ended["bad"][1].finish == "error"
    assert "invalid input" in str(ended["bad"][1].error)


@pytest.mark.parametrize("kind", ["context", "decode"])
def test_a_device_error_is_the_end_of_the_engine_and_all_requests_are_told(kind: str) -> None:
    model = ScriptedModel([1])
    core = new_core(model)
    core.add(request("a"))
    core.add(request("b"))
    if kind == "context":
        core.step()

    def fail(step: str) -> None:
        if step == kind:
            raise RuntimeError("nrt_execute failed")

    model.before = fail
    while not core.idle:
        outputs = core.step()
    assert {output.request_id for output in outputs} <= {"a", "b"}
    assert all(output.finish == "error" and "nrt_execute" in str(output.error) for output in outputs)
    assert "nrt_execute" in str(core.dead_reason)
    with pytest.raises(EngineDeadError):
        core.add(request("c"))


def test_warm_up_runs_every_graph_and_measures_it() -> None:
    clock = VirtualClock()
    measured = warm_up(EmulatedModel(GEOMETRY, costs(), clock), clock)
    assert measured.as_dict() == {graph: pytest.approx(values) for graph, values in costs().as_dict().items()}


class RealTimeModel(ScriptedModel):
    """Takes its time for real, and can be made to wait."""

    def __init__(self, script: Sequence[int], step_s: float = 0.001) -> None:
        super().__init__(script)
        self.step_s = step_s
        self.go = threading.Event()
        self.go.set()
        self.before = self._wait

    def _wait(self, _: str) -> None:
        assert self.go.wait(10)
        time.sleep(self.step_s)


@asynccontextmanager
async def running(model: ScriptedModel, noted: list[int] | None = None) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(new_core(model, queue_limit=100), (noted if noted is not None else []).append)
    try:
        yield engine
    finally:
        await asyncio.to_thread(engine.shutdown)


async def collect(engine: AsyncEngine, wanted: GenerationRequest) -> str:
    return "".join([output.text async for output in engine.generate(wanted)])


async def test_many_streams_at_once_each_whole() -> None:
    noted: list[int] = []
    async with running(RealTimeModel(letters("abcdefgh")), noted) as engine:
        texts = await asyncio.gather(*(collect(engine, request(str(n), max_tokens=5)) for n in range(20)))
        assert texts == ["cdefg"] * 20
        assert sum(noted) == 100
        assert engine._core.metrics.counts.running == 0


async def test_a_cancelled_consumer_frees_its_slot_while_others_go_on() -> None:
    async with running(RealTimeModel(letters("abcdefgh"), 0.005)) as engine:
        tasks = [asyncio.create_task(collect(engine, request(str(n), max_tokens=30))) for n in range(4)]
        await asyncio.sleep(0.03)
        for task in tasks[:2]:
            task.cancel()
        assert [len(text) for text in await asyncio.gather(*tasks[2:])] == [30, 30]
        await asyncio.gather(*tasks[:2], return_exceptions=True)
        assert engine._core.metrics.counts.finished == {"abort": 2, "length": 2}
        assert (engine._core.metrics.counts.running, engine._core.metrics.counts.waiting) == (0, 0)


async def test_a_waiting_request_is_cancelled_before_it_costs_anything() -> None:
    model = RealTimeModel([1])
    async with running(model) as engine:
        busy = [asyncio.create_task(collect(engine, request(str(n), max_tokens=20))) for n in range(2)]
        await asyncio.sleep(0.01)
        with pytest.raises(asyncio.TimeoutError):
            model.go.clear()
            await asyncio.wait_for(collect(engine, request("late")), 0.02)
        model.go.set()
        await asyncio.gather(*busy)
        assert engine._core.metrics.counts.prompt_tokens == 4


async def test_a_dead_engine_tells_every_stream_and_takes_no_more() -> None:
    model = RealTimeModel([1], 0.002)
    async with running(model) as engine:
        tasks = [asyncio.create_task(collect(engine, request(str(n)))) for n in range(3)]
        await asyncio.sleep(0.02)

        def fail(_: str) -> None:
            raise RuntimeError("nrt_execute failed")

        model.before = fail
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, EngineDeadError) and "nrt_execute" in str(result) for result in results)
        assert "nrt_execute" in str(engine.dead_reason)
        with pytest.raises(EngineDeadError):
            await collect(engine, request("more"))


async def test_shutdown_ends_what_runs() -> None:
    async with running(RealTimeModel([1], 0.002)) as engine:
        task = asyncio.create_task(collect(engine, request(max_tokens=30)))
        await asyncio.sleep(0.01)
        await asyncio.to_thread(engine.shutdown)
        with pytest.raises(EngineDeadError, match="shut down"):
            await task
