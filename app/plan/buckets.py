"""Bucket edges, chosen exactly: the least padding that a number of compiled graphs allows.

A prompt is padded to the smallest edge that holds it. Optimal edges lie on occupied cells (multiples of
``multiple`` with a length just below), so edges e1 < … < ek = max_len minimise the sum of edge x requests by

    best(k, j) = min over i < j of best(k - 1, i) + edge(j) x (requests up to j - requests up to i)

For fixed j this is the lower envelope of lines in edge(j), whose slopes fall with i: each layer is one pass
over a monotone hull, in whole numbers, so the optimum is exact and a million requests cost as much as their
distinct lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

DEFAULT_EDGES = (128, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class Buckets:
    """Edges and what they cost. ``real_tokens`` and ``padded_tokens`` are over the requests that fit."""

    edges: tuple[int, ...]
    real_tokens: int
    padded_tokens: int

    @property
    def padding_fraction(self) -> float:
        """The share of padded tokens that hold nothing (0 where there are none)."""
        return 1 - self.real_tokens / self.padded_tokens if self.padded_tokens else 0.0


@dataclass(frozen=True)
class GraphChoice:
    """What one more graph brings: padding with ``count`` graphs, padded tokens that the last of them saves,
    and the hours of this traffic until that saving repays its compilation (None: it saves nothing, or the
    trace has no times)."""

    count: int
    buckets: Buckets
    saved_tokens: int
    payback_h: float | None


def default_edges(max_len: int) -> tuple[int, ...]:
    """The default edges up to ``max_len``, which is always the last."""
    return (*(edge for edge in DEFAULT_EDGES if edge < max_len), max_len)


def padding(counts: Mapping[int, int], edges: Sequence[int]) -> Buckets:
    """The cost of given ascending edges; lengths over the last one do not count."""
    real = padded = 0
    at = 0
    for length in sorted(counts):
        while at < len(edges) and edges[at] < length:
            at += 1
        if at == len(edges):
            break
        real += length * counts[length]
        padded += edges[at] * counts[length]
    return Buckets(tuple(edges), real, padded)


def optimal_buckets(
    counts: Mapping[int, int], count: int, max_len: int, multiple: int = 64
) -> tuple[Buckets, ...]:
    """The optima for 1, 2, … graphs up to ``count`` (fewer where more cannot help).

    ``counts`` maps length (tokens) to requests. Every edge but the last is a multiple of ``multiple``; the
    last is ``max_len``.

    Raises:
        ValueError: ``count``, ``max_len`` or ``multiple`` below 1.
    """
    for name, value in (("count", count), ("max_len", max_len), ("multiple", multiple)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    cells: dict[int, int] = {max_len: 0}
    for length, requests in counts.items():
        if length <= max_len:
            edge = min(-(-length // multiple) * multiple, max_len)
            cells[edge] = cells.get(edge, 0) + requests
    edges = sorted(cells)
    choices = partition(edges, [cells[edge] for edge in edges], count)
    return tuple(padding(counts, [edges[at] for at in chosen]) for chosen in choices)


def partition(values: Sequence[int], weights: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Divide ascending ``values`` into runs, each paying its last value for every weight in it, at least
    cost.

    Returns, for each number of runs from 1 to ``count`` that lowers the cost, the last indices of its runs.
    """
    size = len(values)
    up_to = [0]
    for weight in weights:
        up_to.append(up_to[-1] + weight)
    best: list[int] = [value * up_to[at + 1] for at, value in enumerate(values)]
    parents: list[list[int]] = []
    found: list[tuple[int, ...]] = [(size - 1,)]
    for _ in range(1, min(count, size)):
        better, parent = _layer(values, up_to, best)
        if better[-1] >= best[-1]:
            break
        parents.append(parent)
        best = better
        chosen = [size - 1]
        for layer in reversed(parents):
            chosen.append(layer[chosen[-1]])
        # Every prefix on the way has its full number of runs: with fewer, this layer could not be cheaper.
        found.append(tuple(reversed(chosen)))
    return found


def _layer(values: Sequence[int], up_to: Sequence[int], best: Sequence[int]) -> tuple[list[int], list[int]]:
    """One more run: for each last index j, the least cost and the last index of the run before (-1: none).

    Line i is ``best[i] - value x up_to[i + 1]``; slopes fall as i grows and queries rise, so the envelope
    is a queue whose front only moves on.
    """
    hull: list[int] = [-1]  # the empty prefix: cost 0, slope 0
    front = 0
    better, parent = [], []

    def at(i: int, x: int) -> int:
        return (best[i] if i >= 0 else 0) - x * up_to[i + 1]

    def useless(a: int, b: int, c: int) -> bool:
        """Whether line b is never below both a and c (slopes fall from a to c)."""
        height_a, height_b, height_c = (best[i] if i >= 0 else 0 for i in (a, b, c))
        return (height_c - height_a) * (up_to[b + 1] - up_to[a + 1]) <= (height_b - height_a) * (
            up_to[c + 1] - up_to[a + 1]
        )

    for j, value in enumerate(values):
        while front + 1 < len(hull) and at(hull[front + 1], value) <= at(hull[front], value):
            front += 1
        better.append(at(hull[front], value) + value * up_to[j + 1])
        parent.append(hull[front])
        while len(hull) - front >= 2 and useless(hull[-2], hull[-1], j):
            hull.pop()
        hull.append(j)
    return better, parent


def graph_choices(
    buckets: Sequence[Buckets],
    *,
    duration_h: float | None,
    prefill_ms_per_1k_tokens: float,
    compile_minutes: float,
) -> tuple[GraphChoice, ...]:
    """What each further graph saves, and how soon it has repaid ``compile_minutes`` of compilation."""
    found = []
    before: Buckets | None = None
    for number, item in enumerate(buckets, start=1):
        saved = 0 if before is None else before.padded_tokens - item.padded_tokens
        payback = None
        if saved and duration_h:
            hours_a_hour = saved * prefill_ms_per_1k_tokens / 1e6 / 3600 / duration_h
            payback = compile_minutes / 60 / hours_a_hour
        found.append(GraphChoice(number, item, saved, payback))
        before = item
    return tuple(found)


def recommended_count(
    choices: Sequence[GraphChoice], *, payback_h: float = 24.0, least_saving: float = 0.01
) -> int:
    """The largest count whose every graph repays itself within ``payback_h`` hours of this traffic; without
    times, whose every graph takes at least ``least_saving`` of the padded tokens away."""
    chosen = choices[0].count
    for before, choice in pairwise(choices):
        if choice.payback_h is not None:
            worth = choice.payback_h <= payback_h
        else:
            worth = choice.saved_tokens >= least_saving * before.buckets.padded_tokens > 0
        if not worth:
            break
        chosen = choice.count
    return chosen


def concurrency(starts_s: Sequence[float], durations_s: Sequence[float], replicas: int = 1) -> dict[int, int]:
    """How long each number of requests is under way on one of ``replicas``, in ms: a histogram for batch
    buckets.

    Requests are taken to spread evenly over the replicas, and none to wait.
    """
    events = sorted(
        [(start, 1) for start in starts_s]
        + [(start + length, -1) for start, length in zip(starts_s, durations_s, strict=True)]
    )
    running, since = 0, 0.0
    spent: dict[int, float] = {}
    for time, change in events:
        if running:
            share = -(-running // replicas)
            spent[share] = spent.get(share, 0.0) + time - since
        running += change
        since = time
    return {number: round(1e3 * seconds) for number, seconds in sorted(spent.items()) if seconds >= 5e-4}


def batch_buckets(spent_ms: Mapping[int, int], count: int, max_batch: int) -> Buckets:
    """Decode batch sizes to compile: the least slot-time left empty, with ``max_batch`` always the last.

    More concurrent requests than ``max_batch`` decode in batches of ``max_batch``.
    """
    capped: dict[int, int] = {}
    for number, spent in spent_ms.items():
        capped[min(number, max_batch)] = capped.get(min(number, max_batch), 0) + spent
    return optimal_buckets(capped, count, max_batch, multiple=1)[-1]
