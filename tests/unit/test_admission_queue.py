"""Admission in virtual time: bounds, deadlines, shares, priorities, and what a client is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from app.serve.admission_queue import Overloaded
from tests.unit.admission_load import TTFT_S, Clock, Replica, admission, ask, turns

CAPACITY = 8 / (TTFT_S + 100 * 0.01)
"""Requests a second that eight slots can do."""


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario(), 60)

    asyncio.run(bounded())


def test_a_place_is_freed_however_the_request_ends() -> None:
    async def scenario() -> None:
        queue = admission(Clock(), batch=1, queue_limit=0)
        with pytest.raises(RuntimeError, match="engine"):
            async with queue.ticket(ask()):
                raise RuntimeError("engine")
        async with queue.ticket(ask()):
            assert queue.active == 1
            with pytest.raises(Overloaded) as refusal:
                async with queue.ticket(ask()):
                    pytest.fail("admitted beyond the bound")
            assert refusal.value.status == 503
            assert "batch 1, queue 0" in str(refusal.value)
        assert queue.active == 0

    run(scenario)


def test_leaving_the_queue_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        queue = admission(Clock(), batch=1, engine_ahead=0)

        async def one() -> None:
            async with queue.ticket(ask()):
                await asyncio.Event().wait()

        tasks = [asyncio.ensure_future(one()) for _ in range(3)]
        await turns()
        assert queue.active == 3
        tasks[1].cancel()
        await turns()
        assert queue.active == 2
        tasks[0].cancel()  # the third is granted and cancelled in the same turn
        tasks[2].cancel()
        await turns()
        assert queue.active == 0
        async with queue.ticket(ask()):
            assert queue.active == 1

    run(scenario)


def test_what_cannot_meet_its_deadline_is_told_when_to_come_again() -> None:
    async def scenario() -> None:
        clock = Clock()
        replica = Replica(clock, admission(clock, ttft_slo_ms=2000), 8)
        for _ in range(40):
            replica.send(ask(), 100)
        await turns()
        refused = [item for item in replica.outcomes if item.status is not None]
        assert {item.status for item in refused} == {503}
        assert {item.reason for item in refused} == {"deadline"}
        assert 0 < len(refused) < 32
        wait = refused[0].retry_after_s
        await replica.run(float(wait))
        again = replica.send(ask(), 100)
        await turns()
        assert again.status is None, "who comes when told is taken"
        impatient = replica.send(ask(timeout_s=0.5), 100)
        await turns()
        assert impatient.status == 503, "the client's own timeout counts, for the whole answer"
        await replica.run(10.0)
        taken = [item for item in replica.outcomes if item.status == 200]
        assert len(taken) == len(replica.outcomes) - len(refused) - 1
        assert max((item.first or 99.0) - item.came for item in taken) <= 2.0

    run(scenario)


@pytest.mark.parametrize("speed", [1.0, 0.5])
def test_overload_keeps_goodput_and_the_promise(speed: float) -> None:
    """At three times its capacity, whatever was predicted, the replica does what it does at its best, what it
    takes on comes in time, and who is refused is so at once."""
    slo = 2.0 / speed

    async def goodput(load: float) -> tuple[float, list[float], list[float]]:
        clock = Clock()
        replica = Replica(clock, admission(clock, ttft_slo_ms=slo * 1000), 8, speed)
        await replica.run(20.0, rate=load * CAPACITY * speed)
        start = clock.now
        await replica.run(60.0, rate=load * CAPACITY * speed, seed=2)
        done = [o for o in replica.outcomes if o.status == 200 and (o.ended or 0) > start]
        first = [(o.first or 0.0) - o.came for o in done]
        refusals = [(o.ended or 0) - o.came for o in replica.outcomes if o.status in (429, 503)]
        good = sum(o.tokens for o, value in zip(done, first, strict=True) if value <= slo)
        await replica.close()
        return good / (clock.now - start), first, refusals

    async def scenario() -> None:
        peak = max([(await goodput(load))[0] for load in (0.8, 1.0, 1.2)])
        good, first, refusals = await goodput(3.0)
        assert good >= 0.9 * peak
        assert np.percentile(first, 99) <= slo
        assert len(refusals) > len(first)
        assert np.percentile(refusals, 99) == 0.0, "in virtual time: at once"

    run(scenario)


def test_a_greedy_client_does_not_starve_others() -> None:
    async def scenario() -> None:
        clock = Clock()
        replica = Replica(clock, admission(clock, ttft_slo_ms=3000), 8)
        await replica.run(20.0, rate=0)
        for second in range(60):
            for _ in range(20):
                replica.send(ask(key="greedy"), 100)
            if second % 2 == 0:
                replica.send(ask(key="modest"), 100)
            await replica.run(1.0)
        await replica.run(5.0)
        modest = [item for item in replica.outcomes if item.key == "modest"]
        greedy = [item for item in replica.outcomes if item.key == "greedy"]
        assert {item.status for item in modest} == {200}
        assert max((item.first or 99) - item.came for item in modest) < 1.5
        counts = [sum(item.status == status for item in greedy) for status in (200, 429, 503)]
        assert counts[0] > 300, "and the rest of the replica is not left idle"
        assert counts[1] + counts[2] > 500
        await replica.close()

    run(scenario)


def test_a_full_queue_makes_room_for_a_client_without_its_share() -> None:
    async def scenario() -> None:
        clock = Clock()
        replica = Replica(clock, admission(clock, batch=2, queue_limit=6, engine_ahead=0), 2)
        first = [replica.send(ask(key="greedy"), 100) for _ in range(9)]
        await turns()
        assert [item.status for item in first] == [None] * 8 + [503], "alone, it may fill the queue"
        modest = replica.send(ask(key="modest"), 100)
        await turns()
        assert modest.status is None
        assert (first[7].status, first[7].reason) == (429, "pushed_out")
        again = replica.send(ask(key="greedy"), 100)
        await turns()
        assert (again.status, again.reason) == (429, "share")
        await replica.run(3.0)
        assert modest.status == 200
        assert modest.ended is not None and modest.ended < max(item.ended or 99 for item in first[:7])
        await replica.close()

    run(scenario)


def test_high_priority_goes_first() -> None:
    async def scenario() -> None:
        clock = Clock()
        replica = Replica(clock, admission(clock, batch=1, engine_ahead=0), 1)
        normal = [replica.send(ask(), 10) for _ in range(5)]
        await turns()
        high = replica.send(ask(key="other", priority=0), 10)
        await replica.run(3.0)
        assert normal[0].first is not None and high.first is not None
        assert all((item.first or 0) > high.first for item in normal[1:])

    run(scenario)


def test_counts_and_reasons_are_metrics() -> None:
    async def scenario() -> None:
        clock = Clock()
        queue = admission(clock, batch=1, queue_limit=1, engine_ahead=0)
        replica = Replica(clock, queue, 1)
        for _ in range(3):
            replica.send(ask(), 100)
        await turns()

        def value(name: str, **labels: str) -> float | None:
            return queue.metrics.registry.get_sample_value(f"neuronfleet_admission_{name}", labels)

        assert value("queue_length") == 1
        assert value("queue_work_seconds") == pytest.approx(TTFT_S + 1.0)
        assert value("running") == 1
        assert value("admitted_total", priority="normal") == 1
        assert value("refused_total", reason="queue_full") == 1
        assert queue.outstanding_s == pytest.approx(2 * (TTFT_S + 1.0))
        await replica.run(3.0)
        assert value("admitted_total", priority="normal") == 2
        assert value("running") == 0

    run(scenario)
