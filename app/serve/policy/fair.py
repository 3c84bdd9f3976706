"""The queue before the engine: classes of priority, and deficit round robin between API keys in each.

Work is predicted device seconds, so a key that sends few long requests and one that sends many short ones
get the same share of the device. (M. Shreedhar, G. Varghese: Efficient fair queueing using deficit round
robin, SIGCOMM 1995.)
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

PRIORITIES = {"high": 0, "normal": 1, "low": 2}


class Queued(Protocol):
    """What the queue must know of an item: whose it is, its class (0 first), its work and when it came."""

    @property
    def key(self) -> str:
        """Whose share it counts for."""
        ...

    @property
    def priority(self) -> int:
        """Its class; 0 goes first."""
        ...

    @property
    def work_s(self) -> float:
        """Predicted device seconds."""
        ...

    @property
    def queued_at(self) -> float:
        """Monotonic seconds."""
        ...


Item = TypeVar("Item", bound=Queued)


class _Class(Generic[Item]):
    """Deficit round robin over keys."""

    def __init__(self) -> None:
        self.flows: collections.OrderedDict[str, collections.deque[Item]] = collections.OrderedDict()
        self.deficit: dict[str, float] = {}
        self.work: dict[str, float] = {}

    def push(self, item: Item) -> None:
        self.flows.setdefault(item.key, collections.deque()).append(item)
        self.work[item.key] = self.work.get(item.key, 0.0) + item.work_s
        self.deficit.setdefault(item.key, 0.0)

    def pop(self) -> Item:
        """The next in turn. All deficits rise together by what the cheapest next one lacks, which is what
        rounds of a small quantum would come to, without the rounds."""
        lacking = min(flow[0].work_s - self.deficit[key] for key, flow in self.flows.items())
        if lacking > 0:
            for key in self.flows:
                self.deficit[key] += lacking
        key = next(k for k, flow in self.flows.items() if flow[0].work_s <= self.deficit[k] + 1e-9)
        self.flows.move_to_end(key)
        item = self.flows[key][0]
        self.deficit[key] -= item.work_s
        self.remove(item)
        return item

    def remove(self, item: Item) -> None:
        flow = self.flows[item.key]
        flow.remove(item)
        self.work[item.key] -= item.work_s
        if not flow:  # an idle key saves nothing up
            del self.flows[item.key], self.work[item.key], self.deficit[item.key]

    def oldest(self) -> Item:
        return min((flow[0] for flow in self.flows.values()), key=lambda item: item.queued_at)


class FairQueue(Generic[Item]):
    """Items by class, then by key's share; one that waited ``aging_s`` goes before higher classes, so that
    none starves."""

    def __init__(self, aging_s: float = 30.0) -> None:
        self._aging_s = aging_s
        self._classes: dict[int, _Class[Item]] = {rank: _Class() for rank in sorted(PRIORITIES.values())}
        self.count = 0

    def __iter__(self) -> Iterator[Item]:
        for level in self._classes.values():
            for flow in level.flows.values():
                yield from flow

    @property
    def work_s(self) -> float:
        """Predicted device seconds that wait."""
        return sum(sum(level.work.values()) for level in self._classes.values())

    def push(self, item: Item) -> None:
        """Queue an item."""
        self._classes[item.priority].push(item)
        self.count += 1

    def remove(self, item: Item) -> None:
        """Take an item out, wherever it stands."""
        self._classes[item.priority].remove(item)
        self.count -= 1

    def pop(self, now: float) -> Item:
        """The next item. Raises IndexError when there is none."""
        filled = [level for level in self._classes.values() if level.flows]
        if not filled:
            raise IndexError("the queue is empty")
        self.count -= 1
        for level in filled[1:]:
            oldest = level.oldest()
            if now - oldest.queued_at >= self._aging_s:
                level.remove(oldest)
                return oldest
        return filled[0].pop()

    def ahead_s(self, key: str, priority: int, work_s: float) -> float:
        """Work that would go before a new item: all of higher classes, its key's own, and of every other key
        no more than what this key will have had by then."""
        total = sum(sum(level.work.values()) for rank, level in self._classes.items() if rank < priority)
        level = self._classes[priority]
        own = level.work.get(key, 0.0)
        turn = own + work_s
        return total + own + sum(min(work, turn) for other, work in level.work.items() if other != key)

    def share(self, key: str) -> tuple[int, int]:
        """How many items a key has here, and how many a fair share of the present queue would be."""
        counts: collections.Counter[str] = collections.Counter(item.key for item in self)
        keys = len(counts.keys() | {key})
        return counts[key], -(-self.count // keys)

    def largest(self, priority: int) -> Item | None:
        """The newest item of the key with most work, of class ``priority`` or lower: what gives way when the
        queue is full and a key without its share comes."""
        for rank in sorted(self._classes, reverse=True):
            level = self._classes[rank]
            if rank >= priority and level.flows:
                key = max(level.work, key=lambda name: level.work[name])
                return level.flows[key][-1]
        return None
