"""The queue before the engine: shares of device time, classes, aging."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.serve.policy.fair import FairQueue


@dataclass(eq=False)
class Item:
    key: str
    work_s: float
    priority: int = 1
    queued_at: float = 0.0


def test_a_key_that_floods_gets_no_more_than_its_share() -> None:
    queue: FairQueue[Item] = FairQueue()
    for _ in range(500):
        queue.push(Item("greedy", 1.0))
    for _ in range(5):
        queue.push(Item("modest", 1.0))
    first = [queue.pop(0.0).key for _ in range(10)]
    assert first.count("modest") == 5


def test_shares_are_of_work_not_of_requests() -> None:
    queue: FairQueue[Item] = FairQueue()
    for _ in range(400):
        queue.push(Item("short", 0.1))
        queue.push(Item("long", 2.0))
    done = {"short": 0.0, "long": 0.0}
    while min(done.values()) < 20:
        item = queue.pop(0.0)
        done[item.key] += item.work_s
    assert done["short"] == pytest.approx(done["long"], abs=2.0)


def test_higher_classes_go_first_but_none_starves() -> None:
    queue: FairQueue[Item] = FairQueue(aging_s=10.0)
    low = Item("a", 1.0, priority=2, queued_at=0.0)
    queue.push(low)
    for second in range(20):
        queue.push(Item("b", 1.0, priority=0, queued_at=float(second)))
    served = [queue.pop(float(second)) for second in range(12)]
    assert served.index(low) == 10, "served when it has waited ten seconds, not before and not after"


def test_the_work_ahead_of_a_newcomer_is_what_it_will_wait_for() -> None:
    queue: FairQueue[Item] = FairQueue()
    for _ in range(100):
        queue.push(Item("greedy", 1.0))
    assert queue.ahead_s("greedy", 1, 1.0) == pytest.approx(100.0)
    assert queue.ahead_s("modest", 1, 1.0) == pytest.approx(1.0)
    assert queue.ahead_s("modest", 0, 1.0) == 0.0
    assert queue.ahead_s("modest", 2, 1.0) == pytest.approx(100.0)
    item = Item("modest", 1.0)
    queue.push(item)
    turn = next(number for number in range(101) if queue.pop(0.0) is item)
    assert turn <= 2


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.01, 5), st.integers(0, 2)), max_size=60))
def test_everything_comes_out_once_in_its_keys_order(asked: list[tuple[str, float, int]]) -> None:
    queue: FairQueue[Item] = FairQueue()
    items = [Item(key, work, rank) for key, work, rank in asked]
    for item in items:
        queue.push(item)
    dropped = random.Random(len(items)).sample(items, len(items) // 4)
    for item in dropped:
        queue.remove(item)
    out = [queue.pop(0.0) for _ in range(len(items) - len(dropped))]
    assert queue.count == 0
    assert queue.work_s == pytest.approx(0.0)
    assert {id(item) for item in out} == {id(item) for item in items} - {id(item) for item in dropped}
    for key in "abc":
        for rank in range(3):
            mine = [item for item in out if (item.key, item.priority) == (key, rank)]
            assert mine == sorted(mine, key=items.index)
    with pytest.raises(IndexError):
        queue.pop(0.0)


def test_who_gives_way_is_the_newest_of_the_one_with_most() -> None:
    queue: FairQueue[Item] = FairQueue()
    greedy = [Item("greedy", 1.0) for _ in range(5)]
    for item in greedy:
        queue.push(item)
    queue.push(Item("modest", 1.0))
    assert queue.share("modest") == (1, 3)
    assert queue.share("new") == (0, 2)
    assert queue.largest(1) is greedy[-1]
    assert queue.largest(2) is None, "a higher class never gives way"
