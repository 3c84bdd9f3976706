"""Routing by predicted work: who is slow, frozen, stale or draining is left alone within a second."""

from __future__ import annotations

import pytest

from app.serve.policy.route import LeastWork, Report


def router(**outstanding: float) -> LeastWork:
    made = LeastWork()
    for name, work in outstanding.items():
        made.report(name, Report(work), 0.0)
    return made


def test_the_least_work_wins_not_the_fewest_requests() -> None:
    route = router(a=0.0, b=0.0)
    route.sent("a", 10.0, 0.0)  # one long prompt
    for _ in range(5):
        assert route.choose(0.1) == "b"
        route.sent("b", 1.0, 0.1)
    assert route.choose(0.1) == "b"


def test_a_slow_replica_counts_by_its_rate() -> None:
    route = router(a=1.0, b=1.5)
    assert route.choose(0.0) == "a"
    route.report("a", Report(1.0, drain_rate=0.2), 0.1)
    assert route.choose(0.1) == "b"


@pytest.mark.parametrize("fault", ["frozen", "silent", "draining", "gone"])
def test_a_faulty_replica_loses_traffic_within_a_second(fault: str) -> None:
    route = LeastWork()
    lost_at = None
    for tick in range(40):
        now = tick * 0.1
        broken = now >= 1.0
        route.report("good", Report(5.0), now)
        if not broken:
            route.report("bad", Report(0.5), now)
        elif fault == "silent":
            route.report("bad", Report(0.5, silent_s=now - 1.0), now)
        elif fault == "draining":
            route.report("bad", Report(0.5, draining=True), now)
        elif fault == "gone":
            route.gone("bad")
        if route.choose(now) == "good" and lost_at is None:
            lost_at = now
    assert lost_at is not None
    assert 1.0 <= lost_at <= 2.0
    route.report("bad", Report(0.0), 4.0)
    assert route.choose(4.0) == "bad", "and comes back when it is well"


def test_an_idle_replica_is_not_taken_for_a_silent_one() -> None:
    route = LeastWork()
    route.report("idle", Report(0.0, silent_s=3600.0), 0.0)
    assert route.choose(0.1) == "idle"


def test_near_replicas_are_kept_to_until_it_matters() -> None:
    route = router(near=0.03, far=0.0)
    assert route.choose(0.0, near=["near"]) == "near"
    route.sent("near", 1.0, 0.0)
    assert route.choose(0.0, near=["near"]) == "far"


def test_reports_take_over_what_was_sent_before_them() -> None:
    route = router(a=0.0, b=1.0)
    route.sent("a", 2.0, 0.1)
    assert route.choose(0.1) == "b"
    route.report("a", Report(0.5), 0.2)
    route.report("b", Report(1.0), 0.2)
    assert route.choose(0.2) == "a"
    assert route.choose(0.2, without=["a"]) == "b"
    assert route.choose(0.2, without=["a", "b"]) is None
    assert route.choose(5.0) is None, "nobody was heard of lately"
