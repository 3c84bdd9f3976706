"""What a replica takes on. What it cannot serve in time is answered at once, with when to come again.

Requests wait here, not in the engine: in order of priority and of each API key's share of predicted device
time. The engine is given its batch and a few more, so that a slot that is freed is taken at once. Bounds are
the replica's own, whoever calls: Serve's limit counts per caller and says no when to come again.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from app.serve.admission_metrics import AdmissionMetrics
from app.serve.admission_request import Ask, Headers, Reader
from app.serve.admission_settings import AdmissionSettings
from app.serve.policy.drain import DrainRate
from app.serve.policy.fair import PRIORITIES, FairQueue
from app.serve.policy.predict import Cost, Predictor

_LONGEST_RETRY_S = 120
_PRIORITY_NAMES = {rank: name for name, rank in PRIORITIES.items()}
_USAGE = re.compile(rb'"(?:completion|output)_tokens":\s*(\d+)')


class Overloaded(Exception):
    """The request is not taken on.

    ``status`` is 429 where the client's own share is used up, 503 where the replica's capacity is;
    ``retry_after_s`` a whole number of seconds; ``reason`` one of
    :data:`app.serve.admission_metrics.REASONS`.
    """

    def __init__(self, message: str, retry_after_s: int, status: int = 503, reason: str = "") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.status = status
        self.reason = reason


class Ticket:
    """One request on its way. Used as ``async with``: entering waits for the engine's turn."""

    def __init__(self, admission: Admission, ask: Ask, cost: Cost, now: float) -> None:
        self._admission = admission
        self.ask = ask
        self.cost = cost
        self.queued_at = now
        self.deadline = math.inf
        self.granted: asyncio.Future[None] | None = None
        self.queued = self.running = False
        self.tokens = 0
        self.done_s = 0.0

    @property
    def key(self) -> str:
        """Whose share it counts for."""
        return self.ask.key

    @property
    def priority(self) -> int:
        """Its class, 0 first."""
        return self.ask.priority

    @property
    def work_s(self) -> float:
        """Predicted device seconds, all of it."""
        return self.cost.work_s

    @property
    def left_s(self) -> float:
        """Predicted device seconds that are not done yet."""
        return max(self.cost.work_s - self.done_s, self.cost.token_s)

    def note(self, body: bytes) -> None:
        """A piece of the answer went out: how many tokens were in it, near enough for an account of work."""
        tokens = body.count(b"data: ")
        if not tokens:
            usage = _USAGE.search(body, max(0, len(body) - 4096))
            tokens = int(usage.group(1)) if usage else 1
        work = tokens * self.cost.token_s + (0.0 if self.tokens else self.cost.prefill_s)
        self.tokens += tokens
        self.done_s += work
        self._admission.did(work)

    async def __aenter__(self) -> Ticket:
        await self._admission.enter(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._admission.leave(self, whole=error is None)


class Admission:
    """The replica's queue.

    Args:
        batch_size: sequences that the engine runs together.
        reader: reads requests, for :meth:`request`.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        batch_size: int,
        settings: AdmissionSettings,
        predictor: Predictor,
        *,
        reader: Reader | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.metrics = AdmissionMetrics()
        self._batch = batch_size
        ahead = settings.engine_ahead
        self._places = batch_size + (-(-batch_size // 4) if ahead is None else ahead)
        self._settings = settings
        self._predictor = predictor
        self._reader = reader or Reader(1 << 30, 1 << 30)
        self._clock = clock
        self._running: set[Ticket] = set()
        self._queue: FairQueue[Ticket] = FairQueue(settings.priority_aging_s)
        self._drain = DrainRate()

    @property
    def active(self) -> int:
        """Requests taken on and not ended."""
        return len(self._running) + self._queue.count

    @property
    def outstanding_s(self) -> float:
        """Seconds to work off all that was taken on, at the measured rate: what routing compares."""
        work = sum(ticket.left_s for ticket in self._running) + self._queue.work_s
        return work / self._drain.rate(self._clock())

    async def request(self, path: str, document: Mapping[str, Any], headers: Headers) -> Ticket:
        """A request's ticket, from its path, JSON body and headers.

        Raises:
            app.serve.admission_request.NeverFits: it can never be served.
        """
        return self.ticket(await self._reader.read(path, document, headers))

    def ticket(self, ask: Ask) -> Ticket:
        """What to enter with ``async with`` around the request's work."""
        cost = self._predictor.cost(ask.key, ask.route, ask.prompt_tokens, ask.max_tokens, ask.choices)
        return Ticket(self, ask, cost, self._clock())

    async def enter(self, ticket: Ticket) -> None:
        """Wait for the engine's turn.

        Raises:
            Overloaded: it is not taken on; at once, unless its deadline passes or it is pushed out meanwhile.
        """
        now = self._clock()
        self._set_deadline(ticket)
        try:
            self._check(ticket, now)
        except Overloaded as refusal:
            self.metrics.refused.labels(refusal.reason).inc()
            raise
        if len(self._running) < self._places and not self._queue.count:
            self._run(ticket, now)
            return
        ticket.granted = asyncio.get_running_loop().create_future()
        self._queue.push(ticket)
        ticket.queued = True
        self._gauges()
        try:
            await ticket.granted
        except asyncio.CancelledError:
            if ticket.running:
                self.leave(ticket, whole=False)
            elif ticket.queued:
                self._take_out(ticket)
                self._gauges()
            raise

    def did(self, work_s: float) -> None:
        """Predicted work was done."""
        self._drain.did(work_s)

    def leave(self, ticket: Ticket, whole: bool) -> None:
        """A request ended; ``whole``: its length is one to learn from."""
        if not ticket.running:
            return
        ticket.running = False
        self._running.discard(ticket)
        if whole and ticket.tokens:
            ask = ticket.ask
            self._predictor.history.add(ask.key, ask.route, max(1, ticket.tokens // ask.choices))
        self._fill(self._clock())

    def _set_deadline(self, ticket: Ticket) -> None:
        # A client's own patience is for the whole answer, the promise for the first token.
        ticket.deadline = ticket.queued_at + self._settings.ttft_slo_ms / 1000
        if ticket.ask.timeout_s is not None:
            answer = ticket.cost.tokens / ticket.ask.choices * ticket.cost.token_s * self._batch
            ticket.deadline = min(ticket.deadline, ticket.queued_at + ticket.ask.timeout_s - answer)

    def _check(self, ticket: Ticket, now: float) -> None:
        """Refuse what cannot be served in time, or does not fit the queue."""
        rate = self._drain.rate(now)
        ahead = self._queue.ahead_s(ticket.key, ticket.priority, ticket.work_s)
        first = self._wait_s(ahead, rate) + ticket.cost.first_token_s / min(rate, 1.0)
        patience = max(ticket.deadline - ticket.queued_at, 0.0)
        room = patience * self._settings.admission_margin
        own, share = self._queue.share(ticket.key)
        if first > room:
            status = 429 if own > share else 503
            raise Overloaded(
                f"the first token would come in about {first:.1f} s, and it must in {room:.1f} s "
                f"({self._settings.admission_margin:g} of the {patience:.1f} s allowed); "
                f"{self._queue.count} requests wait, {own} of this client; try again later",
                _retry(first - room),
                status,
                "share" if status == 429 else "deadline",
            )
        limits = self._settings
        work = self._queue.work_s / rate
        over_count = self._queue.count + len(self._running) >= self._batch + limits.queue_limit
        if not over_count and work + ticket.work_s / rate <= limits.queue_work_s:
            return
        reason = "queue_full" if over_count else "queue_work"
        if own < share and self._push_out(ticket, rate):
            return
        status = 429 if own > share else 503
        raise Overloaded(
            f"this replica has {self.active} requests, {work:.1f} s of work waiting; the most it takes is "
            f"batch {self._batch}, queue {limits.queue_limit}, {limits.queue_work_s:g} s of work; {own} of "
            f"those waiting are this client's; try again later",
            _retry(work / 4),
            status,
            "share" if status == 429 else reason,
        )

    def _push_out(self, ticket: Ticket, rate: float) -> bool:
        """Make room for a client that has not its share, at the cost of the one that has most."""
        victim = self._queue.largest(ticket.priority)
        if victim is None or victim.key == ticket.key or victim.granted is None:
            return False
        wait = _retry(self._queue.work_s / rate / 4)
        message = "the queue is full and other clients have not had their share of it; try again later"
        self._drop(victim, Overloaded(message, wait, 429, "pushed_out"))
        return True

    def _drop(self, ticket: Ticket, refusal: Overloaded) -> None:
        self._take_out(ticket)
        self.metrics.refused.labels(refusal.reason).inc()
        if ticket.granted is not None and not ticket.granted.done():
            ticket.granted.set_exception(refusal)

    def _take_out(self, ticket: Ticket) -> None:
        ticket.queued = False
        self._queue.remove(ticket)

    def _wait_s(self, ahead_s: float, rate: float) -> float:
        """Until the engine is at what has so much work before it. With a slot free: the prefills that run or
        wait. Else that work, what the engine holds beyond its batch, and the rest of the running request that
        ends first, which shares the device with all others."""
        if len(self._running) < self._batch:
            prefills = sum(ticket.cost.prefill_s for ticket in self._running if not ticket.tokens)
            return (ahead_s + prefills) / rate
        left = sorted(ticket.left_s for ticket in self._running)
        over = sum(left[self._batch :])
        return (ahead_s + left[0] * self._batch + over) / rate

    def _fill(self, now: float) -> None:
        """Give the engine the next ones in turn; what comes too late is told so."""
        while self._queue.count and len(self._running) < self._places:
            ticket = self._queue.pop(now)
            ticket.queued = False
            if ticket.granted is None or ticket.granted.done():
                continue
            rate = self._drain.rate(now)
            first = self._wait_s(0.0, rate) + ticket.cost.first_token_s / min(rate, 1.0)
            if now + first > ticket.deadline:
                self.metrics.refused.labels("deadline_passed").inc()
                ticket.granted.set_exception(
                    Overloaded(
                        f"the request waited {now - ticket.queued_at:.1f} s and its first token cannot come "
                        "in time any more; try again later",
                        _retry(self._queue.work_s / rate),
                        503,
                        "deadline_passed",
                    )
                )
                continue
            self._run(ticket, now)
        self._gauges()

    def _run(self, ticket: Ticket, now: float) -> None:
        ticket.running = True
        self._running.add(ticket)
        self.metrics.admitted.labels(_PRIORITY_NAMES[ticket.priority]).inc()
        self.metrics.waited.observe(now - ticket.queued_at)
        if ticket.granted is not None:
            ticket.granted.set_result(None)
        self._gauges()

    def _gauges(self) -> None:
        now = self._clock()
        self._drain.full(now, len(self._running) >= self._batch)
        self.metrics.queued.set(self._queue.count)
        self.metrics.queued_work.set(self._queue.work_s)
        self.metrics.running.set(len(self._running))
        self.metrics.drain_rate.set(self._drain.rate(now))
        self.metrics.outstanding.set(sum(item.left_s for item in self._running) + self._queue.work_s)


def _retry(seconds: float) -> int:
    return max(1, min(_LONGEST_RETRY_S, math.ceil(seconds)))
