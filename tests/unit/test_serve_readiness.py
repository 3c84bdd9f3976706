"""Readiness is decided by tokens: a recent one, or one asked for now."""

from __future__ import annotations

import asyncio

from app.serve.readiness import Readiness, TokenWatch


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """A canary that gives its token, hangs, or fails; counts its runs."""

    def __init__(self, watch: TokenWatch) -> None:
        self.watch = watch
        self.runs = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.dead: str | None = None

    async def canary(self) -> None:
        self.runs += 1
        await self.gate.wait()
        if self.error:
            raise self.error
        self.watch.note(1)

    def readiness(self, deadline_s: float = 0.05) -> Readiness:
        return Readiness(self.watch, self.canary, lambda: self.dead, fresh_s=10, deadline_s=deadline_s)


def make() -> tuple[Clock, Engine]:
    clock = Clock()
    return clock, Engine(TokenWatch(clock))


async def test_a_recent_token_needs_no_canary() -> None:
    clock, engine = make()
    engine.watch.note(3)
    clock.now += 9.9
    verdict = await engine.readiness().check()
    assert (verdict.ready, verdict.by, engine.runs) == (True, "token", 0)


async def test_no_token_lately_asks_for_one() -> None:
    clock, engine = make()
    engine.watch.note(1)
    clock.now += 10.1
    verdict = await engine.readiness().check()
    assert (verdict.ready, verdict.by, engine.runs) == (True, "canary", 1)


async def test_a_step_without_tokens_proves_nothing() -> None:
    _, engine = make()
    engine.watch.note(0)
    assert engine.watch.age_s() is None


async def test_a_hanging_canary_is_unready_with_the_numbers() -> None:
    clock, engine = make()
    engine.watch.note(1)
    clock.now += 25
    engine.gate.clear()
    verdict = await engine.readiness().check()
    assert not verdict.ready
    assert verdict.reason is not None
    assert "25.0 s" in verdict.reason
    assert "0.05 s" in verdict.reason


async def test_probes_that_come_together_share_a_canary() -> None:
    _, engine = make()
    engine.gate.clear()
    readiness = engine.readiness(deadline_s=5)
    probes = [asyncio.create_task(readiness.check()) for _ in range(5)]
    await asyncio.sleep(0)
    probes[0].cancel()
    await asyncio.sleep(0)
    engine.gate.set()
    verdicts = await asyncio.gather(*probes[1:])
    assert [verdict.ready for verdict in verdicts] == [True] * 4
    assert engine.runs == 1


async def test_a_dead_engine_is_told_at_once() -> None:
    _, engine = make()
    engine.watch.note(1)
    engine.dead = "its process ended"
    verdict = await engine.readiness().check()
    assert (verdict.ready, verdict.reason, engine.runs) == (False, "its process ended", 0)


async def test_a_failing_canary_gives_its_error() -> None:
    _, engine = make()
    engine.error = ValueError("no such bucket")
    verdict = await engine.readiness().check()
    assert not verdict.ready
    assert "no such bucket" in (verdict.reason or "")
    engine.error = None
    assert (await engine.readiness().check()).ready
