"""A replica in virtual time behind real admission: slots that give a token each step."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

from app.serve.admission_queue import Admission, Overloaded, Ticket
from app.serve.admission_request import Ask
from app.serve.admission_settings import AdmissionSettings
from app.serve.policy.predict import FixedTimes, LengthHistory, Predictor

TTFT_S, ITL_S = 0.05, 0.01


class Clock:
    """Seconds that pass only when they are made to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def admission(clock: Clock, batch: int = 8, prior: int = 100, **settings: object) -> Admission:
    """Admission over fixed step times."""
    predictor = Predictor(FixedTimes(TTFT_S, ITL_S, batch), LengthHistory(prior))
    return Admission(batch, AdmissionSettings.model_validate(settings), predictor, clock=clock)


def ask(key: str = "k", max_tokens: int = 100, priority: int = 1, timeout_s: float | None = None) -> Ask:
    """A short prompt."""
    return Ask("/v1/completions", 10, max_tokens, key=key, priority=priority, timeout_s=timeout_s)


async def turns() -> None:
    """Let every task that can go on go on."""
    for _ in range(4):
        await asyncio.sleep(0)


@dataclass(eq=False)
class Outcome:
    """One request's story, in virtual seconds; ``status`` None while it runs."""

    key: str
    tokens: int
    came: float
    status: int | None = None
    first: float | None = None
    ended: float | None = None
    retry_after_s: int = 0
    reason: str = ""


@dataclass
class Replica:
    """Slots in virtual time; ``speed`` 0.5 is an engine half as fast as predicted."""

    clock: Clock
    queue: Admission
    batch: int
    speed: float = 1.0
    outcomes: list[Outcome] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _inside: dict[Outcome, tuple[Ticket, asyncio.Event]] = field(default_factory=dict)

    def send(self, asked: Ask, tokens: int) -> Outcome:
        """A request comes; its answer has ``tokens`` tokens."""
        outcome = Outcome(asked.key, tokens, self.clock.now)
        self.outcomes.append(outcome)
        self._tasks.append(asyncio.ensure_future(self._serve(asked, outcome)))
        return outcome

    async def _serve(self, asked: Ask, outcome: Outcome) -> None:
        try:
            ticket = self.queue.ticket(asked)
            async with ticket:
                over = asyncio.Event()
                self._inside[outcome] = (ticket, over)
                await over.wait()
            outcome.status = 200
        except Overloaded as error:
            outcome.status, outcome.reason = error.status, error.reason
            outcome.retry_after_s = error.retry_after_s
        outcome.ended = self.clock.now

    async def run(self, seconds: float, rate: float = 0.0, seed: int = 1, **asked: object) -> None:
        """Let time pass; with ``rate``, requests come at random, each of 50 to 150 tokens."""
        rng = random.Random(seed)
        until = self.clock.now + seconds
        coming = self.clock.now + rng.expovariate(rate) if rate else until
        prefill: dict[int, float] = {}
        while self.clock.now < until:
            while coming <= self.clock.now:
                self.send(ask(max_tokens=200, **asked), rng.randint(50, 150))  # type: ignore[arg-type]
                coming += rng.expovariate(rate)
            await turns()
            for outcome, (ticket, over) in list(self._inside.items())[: self.batch]:
                if outcome.first is None:
                    ready = prefill.setdefault(id(outcome), self.clock.now + TTFT_S / self.speed)
                    if self.clock.now < ready:
                        continue
                    outcome.first = self.clock.now
                ticket.note(b"data: {}\n\n")
                if ticket.tokens >= outcome.tokens:
                    del self._inside[outcome]
                    over.set()
            await turns()
            self.clock.now += ITL_S / self.speed

    async def close(self) -> None:
        """End what runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
