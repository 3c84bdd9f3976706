"""One step at a time: do the scheduled work, draw tokens, make text, end what is over.

Synchronous and of one thread; the clock is given, so that tests run it in virtual time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from app.serve.engines.transformers_neuronx.metrics import EngineMetrics
from app.serve.engines.transformers_neuronx.request import (
    EngineDeadError,
    FinishReason,
    GenerationRequest,
    Output,
    RequestError,
    TokenLogprob,
)
from app.serve.engines.transformers_neuronx.runner import Rows, StepRunner
from app.serve.engines.transformers_neuronx.sampling import Row, generator_for, sample, token_logprob
from app.serve.engines.transformers_neuronx.scheduler import DecodeWork, PrefillWork, Scheduler
from app.serve.engines.transformers_neuronx.scheduler import Sequence as Slotted
from app.serve.engines.transformers_neuronx.text import IncrementalDetokenizer, StopStrings, Tokenizer
from app.serve.policy.costs import StepCosts
from app.serve.policy.stall import StallPolicy

_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class _Live:
    """A request in the engine."""

    request: GenerationRequest
    sequence: Slotted
    generator: np.random.Generator
    detokenizer: IncrementalDetokenizer
    stops: StopStrings
    max_tokens: int
    arrived: float
    last_token: float | None = None


class EngineCore:
    """Requests in, outputs out, one device step a call.

    Args:
        eos: token ids that end an answer.
        clock: monotonic seconds.
        queue_limit: requests that may wait for a slot.
    """

    def __init__(
        self,
        runner: StepRunner,
        tokenizer: Tokenizer,
        costs: StepCosts,
        *,
        policy: StallPolicy,
        eos: frozenset[int],
        clock: Callable[[], float],
        metrics: EngineMetrics,
        queue_limit: int = 1024,
    ) -> None:
        self.geometry = runner.geometry
        self.metrics = metrics
        self._runner = runner
        self._tokenizer = tokenizer
        self._costs = costs
        self._eos = eos
        self._clock = clock
        self._queue_limit = queue_limit
        self._scheduler = Scheduler(runner.geometry, costs, policy)
        self._live: dict[str, _Live] = {}
        self._by_sequence: dict[Slotted, _Live] = {}
        self._stall = 0.0
        self._dead: str | None = None

    @property
    def idle(self) -> bool:
        """Nothing to do until a request comes."""
        return self._scheduler.idle

    @property
    def dead_reason(self) -> str | None:
        """Why no step can be done any more."""
        return self._dead

    def check(self, request: GenerationRequest) -> None:
        """Refuse what can never be served.

        Raises:
            RequestError: every problem of the request.
        """
        problems = request.sampling.problems()
        longest = self.geometry.longest_prompt
        if not 1 <= len(request.prompt) <= longest:
            problems.append(
                f"the prompt has {len(request.prompt)} tokens; expected 1 to {longest} (compiled for "
                f"{self.geometry.context_limit} tokens, prompt and answer together)"
            )
        if bad := [token for token in request.prompt if not 0 <= token < self.geometry.vocabulary]:
            problems.append(
                f"prompt tokens {bad[:5]} are not in the vocabulary of {self.geometry.vocabulary}"
            )
        if problems:
            raise RequestError("; ".join(problems))

    def add(self, request: GenerationRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never be served, or too many wait already.
            EngineDeadError: the engine has failed.
        """
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        self.check(request)
        if request.request_id in self._live:
            raise RequestError(f"request id {request.request_id!r} is in use")
        if self._scheduler.waiting >= self._queue_limit:
            raise RequestError(f"{self._queue_limit} requests wait already; retry later")
        live = _Live(
            request=request,
            sequence=Slotted(request.request_id, request.prompt),
            generator=generator_for(request),
            detokenizer=IncrementalDetokenizer(self._tokenizer, request.prompt),
            stops=StopStrings(request.sampling.stop),
            max_tokens=min(request.sampling.max_tokens, self.geometry.context_limit - len(request.prompt)),
            arrived=self._clock(),
        )
        self._live[request.request_id] = live
        self._by_sequence[live.sequence] = live
        self._scheduler.add(live.sequence)
        self._count()

    def abort(self, request_id: str) -> Output | None:
        """Take a request out; its slot is free for the next step. None: it is not here (any more)."""
        live = self._live.get(request_id)
        return None if live is None else self._end(live, "abort")

    def abort_all(self, reason: str) -> list[Output]:
        """End everything: the engine stops or has failed."""
        return [self._end(live, "error", error=reason) for live in list(self._live.values())]

    def step(self) -> list[Output]:
        """Do the next piece of work; empty when there is none.

        An error that the contract raises before it touches the device fails the request that the call was
        for. Any other leaves the cache in doubt: the engine is dead, and all requests with it.
        """
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        work = self._scheduler.next_work()
        if work is None:
            return []
        started = self._clock()
        try:
            rows = self._run(work)
        except Exception as error:
            _LOG.exception("a step failed")
            if isinstance(work, PrefillWork) and isinstance(error, (ValueError, AssertionError)):
                live = self._by_sequence[work.sequence]
                return [self._end(live, "error", error=f"the prompt could not be prefilled: {error}")]
            self._dead = f"a {type(work).__name__} step failed: {error!r}"
            return self.abort_all(self._dead)
        now = self._clock()
        self._account(work, (now - started) * 1000)
        self._scheduler.done(work)
        if isinstance(work, DecodeWork):
            outputs = [
                self._take(self._by_sequence[item], row, now)
                for item, row in zip(work.sequences, rows, strict=False)
            ]
        elif work.last:
            outputs = [self._take(self._by_sequence[work.sequence], rows[0], now)]
        else:
            outputs = []
        self._count()
        return outputs

    def _run(self, work: DecodeWork | PrefillWork) -> Rows:
        if isinstance(work, DecodeWork):
            return self._runner.decode([*work.entries, *work.held])
        slot = work.sequence.slot
        if slot is None:
            raise RuntimeError(f"{work.sequence.request_id} was scheduled without a slot")
        tokens = work.sequence.prompt[work.start : work.start + work.count]
        if work.graph == "context":
            return self._runner.context(slot, tokens)
        return self._runner.chunk(slot, tokens, work.start)

    def _account(self, work: DecodeWork | PrefillWork, milliseconds: float) -> None:
        graph = "decode" if isinstance(work, DecodeWork) else work.graph
        self._costs.observe(graph, work.bucket, milliseconds)
        self.metrics.step(graph, milliseconds)
        if isinstance(work, DecodeWork):
            if self._stall:
                self.metrics.stall(self._stall)
            self._stall = 0.0
        else:
            self._stall = self._stall + milliseconds if self._scheduler.streams else 0.0
        if isinstance(work, PrefillWork) and work.last:
            self.metrics.prompt(len(work.sequence.prompt))

    def _take(self, live: _Live, row: Row, now: float) -> Output:
        """One token for one request, from its row of logits; what goes wrong here concerns it alone."""
        sampling = live.request.sampling
        try:
            token = sample(row, sampling, live.generator)
            logprobs: tuple[TokenLogprob, ...] = ()
            if sampling.logprobs is not None:
                logprobs = (token_logprob(row, token, sampling.logprobs),)
            ends = (token in self._eos and not sampling.ignore_eos) or token in sampling.stop_token_ids
            passed = live.stops.add("" if ends else live.detokenizer.add(token))
        except Exception as error:
            _LOG.exception("request %s failed", live.request.request_id)
            return self._end(live, "error", error=f"no token could be drawn: {error}")
        live.sequence.generated.append(token)
        self.metrics.token(
            now - (live.arrived if live.last_token is None else live.last_token), live.last_token is None
        )
        live.last_token = now
        if passed.stop is not None:
            return self._end(live, "stop", (token,), passed.text, logprobs, passed.stop)
        if ends:
            reason = None if token in self._eos else token
            return self._end(live, "stop", (token,), passed.text, logprobs, reason)
        if len(live.sequence.generated) >= live.max_tokens:
            return self._end(live, "length", (token,), passed.text, logprobs)
        return Output(live.request.request_id, (token,), passed.text, logprobs)

    def _end(
        self,
        live: _Live,
        finish: FinishReason,
        tokens: Sequence[int] = (),
        text: str = "",
        logprobs: tuple[TokenLogprob, ...] = (),
        stop_reason: str | int | None = None,
        error: str | None = None,
    ) -> Output:
        self._scheduler.remove(live.sequence)
        del self._live[live.request.request_id]
        del self._by_sequence[live.sequence]
        if finish in ("length", "stop") and not isinstance(stop_reason, str):
            text += live.stops.flush()
        self.metrics.finished(finish)
        self._count()
        return Output(
            live.request.request_id,
            tuple(tokens),
            text,
            logprobs,
            finish,
            stop_reason=stop_reason,
            error=error,
        )

    def _count(self) -> None:
        self.metrics.queue(self._scheduler.waiting, self._scheduler.running)
