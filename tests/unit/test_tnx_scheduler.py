"""The transformers-neuronx scheduler over an emulated model in virtual time: properties of many requests."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.serve.engines.transformers_neuronx.contract import Geometry
from app.serve.engines.transformers_neuronx.core import EngineCore
from app.serve.engines.transformers_neuronx.metrics import EngineMetrics
from app.serve.engines.transformers_neuronx.request import GenerationRequest, Output, Sampling
from app.serve.engines.transformers_neuronx.sampling import generator_for, sample
from app.serve.policy.costs import StepCosts
from app.serve.policy.stall import StallPolicy
from bench.tnx_emulation import EmulatedModel, LetterTokenizer, VirtualClock

EOS = 7
CONTEXT_MS = {64: 12.0, 128: 20.0, 256: 45.0, 480: 110.0}
DECODE_MS = {128: 10.0, 256: 12.0, 512: 16.0}
CHUNK_MS = {16: 6.0, 48: 11.0}
WHOLE = Geometry(8, tuple(DECODE_MS), tuple(CONTEXT_MS), 64)
CHUNKED = Geometry(8, tuple(DECODE_MS), tuple(CONTEXT_MS), 64, tuple(CHUNK_MS))
SLO = StallPolicy(tpot_slo_ms=32.0)


def costs() -> StepCosts:
    return StepCosts(CONTEXT_MS, DECODE_MS, CHUNK_MS)


@dataclass
class Run:
    """One engine in virtual time, and what came out of it."""

    geometry: Geometry
    policy: StallPolicy
    clock: VirtualClock = field(default_factory=VirtualClock)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    text: dict[str, str] = field(default_factory=dict)
    ended: dict[str, Output] = field(default_factory=dict)
    first: list[str] = field(default_factory=list)
    token_times: dict[str, list[float]] = field(default_factory=dict)
    streaming: set[str] = field(default_factory=set)
    gap: list[float] = field(default_factory=list)
    gaps: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = EmulatedModel(self.geometry, costs(), self.clock)
        self.metrics = EngineMetrics()
        self.core = EngineCore(
            self.model,
            LetterTokenizer(),
            costs(),
            policy=self.policy,
            eos=frozenset({EOS}),
            clock=self.clock,
            metrics=self.metrics,
            queue_limit=100_000,
        )

    def note(self, outputs: list[Output]) -> None:
        for output in outputs:
            if output.tokens and output.request_id not in self.tokens:
                self.first.append(output.request_id)
            self.tokens.setdefault(output.request_id, []).extend(output.tokens)
            self.text[output.request_id] = self.text.get(output.request_id, "") + output.text
            if output.tokens:
                self.token_times.setdefault(output.request_id, []).append(self.clock.now)
                self.streaming.add(output.request_id)
            if output.finish is not None:
                self.streaming.discard(output.request_id)
                assert output.request_id not in self.ended, "ended twice"
                self.ended[output.request_id] = output

    def step(self) -> None:
        """One step; ``gaps`` collects the prefill units (ms) between decode steps while streams run."""
        prefills, before = self.metrics.counts.prefill_steps, self.clock.now
        if not self.streaming:
            self.gap = []
        streams = bool(self.streaming)
        self.note(self.core.step())
        if self.metrics.counts.prefill_steps > prefills:
            self.gap += [(self.clock.now - before) * 1000] if streams else []
        elif self.gap:
            self.gaps.append(self.gap)
            self.gap = []

    def finish(self) -> None:
        while not self.core.idle:
            before = self.clock.now
            self.step()
            assert self.clock.now > before, "a step that does nothing while requests wait"


def alone(model: EmulatedModel, request: GenerationRequest) -> list[int]:
    """The tokens that this request gets with nothing else in the engine, computed without an engine."""
    tokens = list(request.prompt)
    generator = generator_for(request)
    room = model.geometry.context_limit - len(request.prompt)
    for _ in range(min(request.sampling.max_tokens, room)):
        token = sample(model.logits_alone(tokens), request.sampling, generator)
        tokens.append(token)
        if token == EOS and not request.sampling.ignore_eos:
            break
    return tokens[len(request.prompt) :]


def some_request(number: int, rng: random.Random, longest: int = 450) -> GenerationRequest:
    kind = rng.random()
    length = 1 if kind < 0.05 else rng.randint(2, 60) if kind < 0.75 else rng.randint(60, longest)
    sampling = (
        Sampling(max_tokens=rng.randint(1, 24), temperature=0.0)
        if rng.random() < 0.7
        else Sampling(
            max_tokens=rng.randint(1, 24),
            temperature=rng.choice([0.3, 1.0, 2.0]),
            top_k=rng.choice([0, 1, 5, 40]),
            top_p=rng.choice([0.5, 0.9, 1.0]),
            seed=rng.randrange(2**63),
        )
    )
    return GenerationRequest(f"r{number}", tuple(rng.randrange(64) for _ in range(length)), sampling)


def stall_bound(geometry: Geometry, policy: StallPolicy) -> float:
    """What the policy promises: the largest budget, or the largest unit that could not be made smaller."""
    budget = policy.budget_ms(min(DECODE_MS.values()))
    if geometry.chunk_sizes:
        return max(budget, min(CONTEXT_MS.values()), min(CHUNK_MS.values()))
    return max(budget, *CONTEXT_MS.values())


@pytest.mark.parametrize("geometry", [CHUNKED, WHOLE], ids=["chunked", "whole"])
def test_ten_thousand_requests_with_cancellations(geometry: Geometry) -> None:
    """No slot leaks, no stall over the bound, each request's tokens as if it were alone, nobody starves."""
    rng = random.Random(5)
    run = Run(geometry, SLO)
    requests = [some_request(number, rng) for number in range(10_000)]
    arrival, at = [], 0.0
    for _ in requests:
        at += rng.expovariate(1 / 0.045)
        arrival.append(at)
    cancel_after = {
        request.request_id: rng.expovariate(1 / 0.4) for request in requests if rng.random() < 0.2
    }
    cancels: list[tuple[float, str]] = sorted(
        (when + cancel_after[request.request_id], request.request_id)
        for request, when in zip(requests, arrival, strict=True)
        if request.request_id in cancel_after
    )
    next_request = next_cancel = 0
    while next_request < len(requests) or not run.core.idle:
        while next_request < len(requests) and arrival[next_request] <= run.clock.now:
            run.core.add(requests[next_request])
            next_request += 1
        while next_cancel < len(cancels) and cancels[next_cancel][0] <= run.clock.now:
            running = run.metrics.counts.running
            output = run.core.abort(cancels[next_cancel][1])
            if output is not None:
                run.note([output])
                assert run.metrics.counts.running in (running, running - 1)
            next_cancel += 1
        if run.core.idle:
            run.clock.now = arrival[next_request]
            continue
        run.step()

    assert len(run.ended) == 10_000
    assert (run.metrics.counts.running, run.metrics.counts.waiting) == (0, 0)
    aborted = [name for name, output in run.ended.items() if output.finish == "abort"]
    assert len(aborted) > 500, "the test must really cancel in the middle"
    assert any(run.tokens[name] for name in aborted) and not all(run.tokens[name] for name in aborted)
    for request in requests:
        wanted = alone(run.model, request)
        got = run.tokens.get(request.request_id, [])
        if request.request_id in aborted:
            assert got == wanted[: len(got)]
        else:
            assert got == wanted
    assert run.metrics.counts.stall_ms_max <= stall_bound(geometry, SLO) + 1e-6
    assert run.metrics.counts.stalls > 1000
    budget = SLO.budget_ms(min(DECODE_MS.values()))
    assert all(len(gap) == 1 or sum(gap) <= budget + 1e-6 for gap in run.gaps)
    # All slots are still there: eight prompts at once run at once.
    for number in range(8):
        run.core.add(GenerationRequest(f"last{number}", (1, 2), Sampling(100, 0.0, ignore_eos=True)))
    while run.metrics.counts.waiting:
        run.step()
    assert run.metrics.counts.running == 8
    # Nobody is passed by more later arrivals than the policy allows (single tokens need no prefill).
    order = {request.request_id: number for number, request in enumerate(requests)}
    several = {request.request_id for request in requests if len(request.prompt) > 1}
    seen: list[int] = []
    for name in run.first:
        if name in several:
            assert sum(other > order[name] for other in seen[-200:]) <= SLO.max_overtakes
            seen.append(order[name])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_schedule_gives_each_request_its_own_tokens(data: st.DataObject) -> None:
    """Whatever the geometry, the policy, the mix and the moments of arrival and cancellation."""
    chunks = data.draw(st.sampled_from([(), (2,), (16,), (16, 48)]))
    geometry = Geometry(data.draw(st.integers(1, 5)), (64, 256), (48, 128, 256), 64, chunks)
    policy = StallPolicy(
        tpot_slo_ms=data.draw(st.sampled_from([None, 0.0, 15.0, 40.0, 500.0])),
        max_stall_ms=data.draw(st.sampled_from([None, 0.0, 25.0])),
        max_overtakes=data.draw(st.integers(0, 3)),
        patience_steps=data.draw(st.integers(1, 8)),
    )
    timing = StepCosts({48: 9.0, 128: 30.0, 256: 70.0}, {64: 8.0, 256: 14.0}, {2: 4.0, 16: 6.0, 48: 11.0})
    clock = VirtualClock()
    model = EmulatedModel(geometry, timing, clock)
    run = Run(CHUNKED, policy)
    run.geometry, run.clock, run.model = geometry, clock, model
    run.core = EngineCore(
        model,
        LetterTokenizer(),
        timing,
        policy=policy,
        eos=frozenset({EOS}),
        clock=clock,
        metrics=run.metrics,
    )
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    requests = {
        f"r{number}": some_request(number, rng, geometry.longest_prompt)
        for number in range(rng.randint(1, 12))
    }
    waiting = list(requests)
    while waiting or not run.core.idle:
        if waiting and rng.random() < 0.4:
            run.core.add(requests[waiting.pop(0)])
        if requests and rng.random() < 0.05:
            output = run.core.abort(rng.choice(list(requests)))
            run.note([output] if output else [])
        run.step()
    for name, request in requests.items():
        got, wanted = run.tokens.get(name, []), alone(model, request)
        assert got == (wanted[: len(got)] if run.ended[name].finish == "abort" else wanted)
    assert run.metrics.counts.running == 0


def test_a_long_prompt_stalls_streams_by_its_whole_prefill_when_first_come_is_first_served() -> None:
    """The control of the bound: without the policy, the same load stalls as long as the largest prefill."""
    worst = {}
    for name, policy in (("fcfs", StallPolicy(tpot_slo_ms=None)), ("policy", SLO)):
        run = Run(CHUNKED, policy)
        for number in range(4):
            run.core.add(GenerationRequest(f"s{number}", (1, 2, 3), Sampling(60, 0.0, ignore_eos=True)))
        for _ in range(20):
            run.step()
        run.core.add(GenerationRequest("long", tuple(range(60)) * 7, Sampling(4, 0.0)))
        run.finish()
        worst[name] = max(
            later - earlier
            for name, times in run.token_times.items()
            if name != "long"
            for earlier, later in itertools.pairwise(times)
        )
    assert worst["fcfs"] >= 0.110
    assert worst["policy"] <= SLO.tpot_slo_ms / 1000 + 1e-9


def test_unchunkable_prefills_keep_the_promise_over_time() -> None:
    """One prefill of 110 ms overruns a gap of 16 ms; the credit then lets decode catch up before the next."""
    run = Run(WHOLE, SLO)
    run.core.add(GenerationRequest("stream", (1, 2), Sampling(400, 0.0, ignore_eos=True)))
    for _ in range(10):
        run.step()
    for number in range(6):
        run.core.add(GenerationRequest(f"l{number}", tuple(range(60)) * 7, Sampling(1, 0.0)))
    run.finish()
    times = run.token_times["stream"]
    gaps = [(later - earlier) * 1000 for earlier, later in itertools.pairwise(times)]
    assert max(gaps) == pytest.approx(110 + 10)
    last = max(index for index, gap in enumerate(gaps) if gap > 100)
    assert sum(gaps[:last]) / last <= 32.0 * 1.05


def test_patience_bounds_how_long_a_prompt_waits_where_the_promise_leaves_nothing() -> None:
    """A promise that decode alone breaks must not keep new prompts out for ever."""
    run = Run(WHOLE, StallPolicy(tpot_slo_ms=5.0, patience_steps=8))
    run.core.add(GenerationRequest("stream", (1, 2), Sampling(400, 0.0, ignore_eos=True)))
    for _ in range(10):
        run.step()
    run.core.add(GenerationRequest("late", tuple(range(60)) * 7, Sampling(1, 0.0)))
    steps = 0
    while "late" not in run.tokens:
        run.step()
        steps += 1
    assert steps <= 8 + 2


def test_a_half_prefilled_slot_survives_the_decode_steps_between_its_chunks() -> None:
    """The emulated model overwrites position 0 of slots that a decode call leaves out, as the library."""
    run = Run(CHUNKED, SLO)
    run.core.add(GenerationRequest("stream", (1, 2), Sampling(60, 0.0, ignore_eos=True)))
    run.step()
    request = GenerationRequest("long", tuple(range(60)) * 7, Sampling(5, 0.0))
    run.core.add(request)
    decodes = run.metrics.counts.decode_steps
    while "long" not in run.tokens:
        run.step()
    assert run.metrics.counts.decode_steps - decodes > 3, "decode steps must really stand between the chunks"
    run.finish()
    assert run.tokens["long"] == alone(run.model, request)


@pytest.mark.parametrize("moment", ["waiting", "between chunks", "running"])
def test_cancelling_frees_the_slot_for_the_next_step(moment: str) -> None:
    geometry = Geometry(1, (256,), (64,), 64, (16,))
    clock = VirtualClock()
    timing = StepCosts({64: 10.0}, {256: 10.0}, {16: 5.0})
    metrics = EngineMetrics()
    core = EngineCore(
        EmulatedModel(geometry, timing, clock),
        LetterTokenizer(),
        timing,
        policy=SLO,
        eos=frozenset(),
        clock=clock,
        metrics=metrics,
    )
    core.add(GenerationRequest("a", tuple(range(60)) * 2, Sampling(50, 0.0)))
    core.add(GenerationRequest("b", (1, 2), Sampling(1, 0.0)))
    for _ in range({"waiting": 0, "between chunks": 2, "running": 8}[moment]):
        core.step()
    assert core.abort("a") is not None
    assert core.abort("a") is None
    outputs = core.step()
    assert [(item.request_id, item.finish) for item in outputs] == [("b", "length")]
    assert core.idle and metrics.counts.running == 0


def test_policy_names_every_wrong_setting() -> None:
    with pytest.raises(ValueError, match=r"tpot_slo_ms -1.*patience_steps 0"):
        StallPolicy(tpot_slo_ms=-1, patience_steps=0)
