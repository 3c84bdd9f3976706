"""A replica with static graphs in virtual time: the engine's own scheduler, the plan's step times."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence as Series
from dataclasses import dataclass

import numpy as np

from app.serve.engines.transformers_neuronx.contract import Geometry
from app.serve.engines.transformers_neuronx.scheduler import DecodeWork, Scheduler, Sequence
from app.serve.policy.costs import StepCosts
from app.serve.policy.stall import StallPolicy


@dataclass(frozen=True)
class Request:
    """One request of a trace: when it comes (s), and its lengths in tokens."""

    at: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Story:
    """When a request came, and when each of its tokens did, in seconds."""

    came: float
    tokens: list[float]

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.tokens[0] - self.came

    @property
    def tpot(self) -> float:
        """Mean time between two tokens; of two or more."""
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1)

    @property
    def longest_gap(self) -> float:
        """The longest wait between two tokens, which is what a reader sees as a stall; of two or more."""
        return max(later - earlier for earlier, later in itertools.pairwise(self.tokens))


def simulate(
    requests: Series[Request], geometry: Geometry, costs: StepCosts, policy: StallPolicy
) -> tuple[list[Story], float]:
    """Every request's story, and when the last one ended (s). ``requests`` in order of time."""
    scheduler = Scheduler(geometry, costs, policy)
    coming = collections.deque(enumerate(requests))
    stories = [Story(request.at, []) for request in requests]
    now = 0.0
    while coming or not scheduler.idle:
        while coming and coming[0][1].at <= now:
            number, request = coming.popleft()
            scheduler.add(Sequence(str(number), (0,) * request.prompt_tokens))
        work = scheduler.next_work()
        if work is None:
            now = coming[0][1].at
            continue
        graph = "decode" if isinstance(work, DecodeWork) else work.graph
        now += costs.ms(graph, work.bucket) / 1000
        scheduler.done(work)
        given = work.sequences if isinstance(work, DecodeWork) else (work.sequence,) * work.last
        for sequence in given:
            number = int(sequence.request_id)
            sequence.generated.append(0)
            stories[number].tokens.append(now)
            if len(sequence.generated) >= requests[number].output_tokens:
                scheduler.remove(sequence)
    return stories, now


def summary(stories: Series[Story], ended: float) -> dict[str, object]:
    """Tails in milliseconds, throughput in tokens a second over the whole run."""
    streams = [story for story in stories if len(story.tokens) > 1]
    return {
        "longest_gap_ms": spread([story.longest_gap for story in streams]),
        "ttft_ms": spread([story.ttft for story in stories]),
        "tpot_ms": spread([story.tpot for story in streams]),
        "output_tokens_per_second": round(sum(len(story.tokens) for story in stories) / ended, 2),
    }


def spread(seconds: Series[float]) -> dict[str, float]:
    """Percentiles, in milliseconds."""
    p50, p90, p99 = (float(value) * 1000 for value in np.percentile(list(seconds), [50, 90, 99]))
    return {
        "p50": round(p50, 1),
        "p90": round(p90, 1),
        "p99": round(p99, 1),
        "max": round(max(seconds) * 1000, 1),
    }
