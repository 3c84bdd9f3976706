"""An emulated engine core under vLLM's own front: real tokens, text and metrics, no model.

One step gives one token to every running request, as continuous batching does, at a pace that is set: time to
first token after a request gets a slot, then one step each inter-token time. What it writes is a fixed
passage, ended by the end-of-sequence token after ``emulated_output_tokens``. For tests that need speed,
scale or a fault; not included is the hop to a core in another process.

The timing is an object of its own, so that a model of an accelerator's steps can take its place.
"""

from __future__ import annotations

import asyncio
import collections
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from app.serve.settings import ReplicaSettings

PASSAGE = (
    " Inferentia2 serves large language models by streaming weights from its memory once for every step, so "
    "a batch of requests shares each pass, and every running request gains one token at a time. "
)
_FROZEN_POLL_S = 0.02


class StepTiming(Protocol):
    """How long the emulated engine's work takes, in seconds."""

    def first_token_s(self, prompt_tokens: int) -> float:
        """From a free slot to the first token."""
        ...

    def step_s(self, running: int) -> float:
        """One decode step over ``running`` requests."""
        ...


@dataclass(frozen=True)
class FixedTiming:
    """The same times whatever the prompt and the batch."""

    ttft_s: float
    itl_s: float

    def first_token_s(self, prompt_tokens: int) -> float:
        """The set time to first token."""
        return self.ttft_s

    def step_s(self, running: int) -> float:
        """The set inter-token time."""
        return self.itl_s


@dataclass
class EmulatedRequest:
    """One request in the emulated engine; ``first_at`` is when its prefill ends (None while it waits)."""

    request_id: str
    prompt_tokens: int
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: frozenset[int]
    first_at: float | None = None
    given: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class StepToken:
    """A step's token. ``finish``: ``stop`` or ``length`` at its request's end; ``first``: after prefill."""

    request: EmulatedRequest
    token: int
    first: bool
    finish: str | None
    stop_token: int | None = None


class Scheduler:
    """First come, first served over ``slots``; a request holds its slot until it ends or is aborted."""

    def __init__(
        self, slots: int, timing: StepTiming, passage: list[int], eos: int | None, output_tokens: int
    ) -> None:
        self._slots = slots
        self._timing = timing
        self._passage = passage
        self._eos = eos
        self._output_tokens = output_tokens
        self.waiting: collections.deque[EmulatedRequest] = collections.deque()
        self.running: dict[str, EmulatedRequest] = {}

    @property
    def idle(self) -> bool:
        """No request waits or runs."""
        return not self.waiting and not self.running

    def add(self, request: EmulatedRequest) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def abort(self, request_ids: list[str]) -> None:
        """Drop requests wherever they are; their slots are free at once."""
        gone = set(request_ids)
        for request_id in gone:
            self.running.pop(request_id, None)
        self.waiting = collections.deque(item for item in self.waiting if item.request_id not in gone)

    def step_s(self) -> float:
        """How long the next step takes."""
        return self._timing.step_s(len(self.running))

    def step(self, now: float) -> list[StepToken]:
        """Fill free slots, then give a token to each request whose prefill is over."""
        while self.waiting and len(self.running) < self._slots:
            request = self.waiting.popleft()
            request.first_at = now + self._timing.first_token_s(request.prompt_tokens)
            self.running[request.request_id] = request
        tokens = [
            self._next(request)
            for request in self.running.values()
            if request.first_at is not None and request.first_at <= now
        ]
        for item in tokens:
            if item.finish is not None:
                del self.running[item.request.request_id]
        return tokens

    def _next(self, request: EmulatedRequest) -> StepToken:
        position = len(request.given)
        ends_itself = (
            position >= max(self._output_tokens, request.min_tokens)
            and not request.ignore_eos
            and self._eos is not None
        )
        token = (
            self._eos
            if ends_itself and self._eos is not None
            else self._passage[position % len(self._passage)]
        )
        request.given.append(token)
        finish, stop_token = None, None
        if ends_itself:
            finish = "stop"
        elif token in request.stop_token_ids and len(request.given) > request.min_tokens:
            finish, stop_token = "stop", token
        elif len(request.given) >= request.max_tokens:
            finish = "length"
        return StepToken(request, token, position == 0, finish, stop_token)


def core_factory(settings: ReplicaSettings) -> Callable[..., Any]:
    """What makes the emulated core in place of vLLM's: takes what vLLM's factory takes."""
    from app.serve.engines.emulated_core import EmulatedCore

    timing = FixedTiming(settings.emulated_ttft_ms / 1000, settings.emulated_itl_ms / 1000)

    def make(
        vllm_config: Any,
        executor_class: Any,
        log_stats: bool,
        *args: Any,
        renderer: Any = None,
        **kwargs: Any,
    ) -> Any:
        tokenizer = renderer.get_tokenizer()
        passage = tokenizer.encode(PASSAGE, add_special_tokens=False)
        eos, length = tokenizer.eos_token_id, settings.emulated_output_tokens
        if settings.emulated_plan_model is not None:
            scheduler = planned_scheduler(settings, settings.emulated_plan_model, passage, eos, length)
        else:
            scheduler = Scheduler(settings.batch_size, timing, passage, eos, length)
        return EmulatedCore(vllm_config, scheduler, settings.emulated_freeze_file)

    return make


def planned_scheduler(
    settings: ReplicaSettings, model: str, passage: list[int], eos: int | None, output_tokens: int
) -> Scheduler:
    """Static graphs at the plan's pace, under the stall policy."""
    from app.serve.admission_factory import replica_model
    from app.serve.engines.emulated_static import StaticScheduler, planned_costs, planned_geometry
    from app.serve.policy.stall import StallPolicy

    geometry = planned_geometry(settings.batch_size, settings.max_model_len, settings.buckets)
    costs = planned_costs(replica_model(settings, model, settings.emulated_plan_instance), geometry)
    policy = StallPolicy(tpot_slo_ms=settings.tpot_slo_ms)
    return StaticScheduler(geometry, costs, policy, passage, eos, output_tokens)


class StepLoop:
    """Runs a scheduler in real time: steps keep their pace even when one is late.

    ``next_step`` waits for the next step that gives tokens or changes the counts, and returns its tokens.
    """

    def __init__(self, scheduler: Scheduler, freeze_file: Path | None) -> None:
        self._scheduler = scheduler
        self._freeze_file = freeze_file
        self._changed = asyncio.Event()
        self._next_at = 0.0

    def wake(self) -> None:
        """Requests came or went."""
        self._changed.set()

    async def next_step(self) -> list[StepToken]:
        """The next step's tokens; empty once after requests went away, so that counts are told."""
        while True:
            if self._scheduler.idle:
                # Set already if the last requests were aborted after their last step.
                await self._changed.wait()
                self._next_at = time.monotonic()
            if self._changed.is_set():
                self._changed.clear()
                if self._scheduler.idle:
                    return []
            await self._pace()
            if self._freeze_file is not None and self._freeze_file.exists():
                await asyncio.sleep(_FROZEN_POLL_S)
                self._next_at = time.monotonic()
                continue
            if tokens := self._scheduler.step(time.monotonic()):
                return tokens

    async def _pace(self) -> None:
        self._next_at += self._scheduler.step_s()
        delay = self._next_at - time.monotonic()
        if delay < -1.0:
            self._next_at = time.monotonic()  # far behind: do not race to catch up
        # A pause of 0 still lets the server write between steps; while all wait in prefill, it must not spin.
        prefilling = all(item.given == [] for item in self._scheduler.running.values())
        await asyncio.sleep(max(delay, 0.001 if prefilling else 0.0))


def alive_resources() -> types.SimpleNamespace:
    """What AsyncLLM looks at to know whether its core died."""
    return types.SimpleNamespace(engine_dead=False)
