"""What a request will cost the replica, before it runs.

Cost is device time: the prefill of the prompt's bucket, which runs alone, and the request's share of the
decode steps that it takes part in. How long the answer will be is learned from the answers before, by API key
and route.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

_WINDOW = 64
_PRIOR_WEIGHT = 4.0
_LAST_KEPT = 0.95
"""Answers longer than this quantile of the window count as that long: one runaway does not move the mean."""


class StepTimes(Protocol):
    """Device times of one replica, in seconds."""

    def prefill_s(self, prompt_tokens: int) -> float:
        """Device time of one prompt's prefill."""
        ...

    def first_token_s(self, prompt_tokens: int) -> float:
        """From a free slot to the first token, with nothing else in the way."""
        ...

    def token_s(self, position: int) -> float:
        """One token's share of a decode step at a full batch, the sequence at ``position`` tokens."""
        ...


@dataclass(frozen=True)
class PlanTimes:
    """Times from the plan's model of the replica (predicted; not yet measured on hardware).

    ``prefill`` gives seconds for a prompt's tokens; ``step`` for a position and the batch.
    """

    prefill: Callable[[int], float]
    step: Callable[[int, int], float]
    batch_size: int

    def prefill_s(self, prompt_tokens: int) -> float:
        """The prompt's bucket."""
        return self.prefill(prompt_tokens)

    def first_token_s(self, prompt_tokens: int) -> float:
        """A prefill runs alone."""
        return self.prefill(prompt_tokens)

    def token_s(self, position: int) -> float:
        """A step's time is shared by all that run."""
        return self.step(position, self.batch_size) / self.batch_size


@dataclass(frozen=True)
class FixedTimes:
    """The same times whatever the prompt: prefills run side by side, and a slot is what is scarce."""

    ttft_s: float
    itl_s: float
    batch_size: int

    def prefill_s(self, prompt_tokens: int) -> float:
        """The slot's share of the replica, for the time to first token."""
        return self.ttft_s / self.batch_size

    def first_token_s(self, prompt_tokens: int) -> float:
        """The set time to first token."""
        return self.ttft_s

    def token_s(self, position: int) -> float:
        """The set inter-token time, shared."""
        return self.itl_s / self.batch_size


class LengthHistory:
    """Answer lengths in tokens, by API key and route; the least recently used are forgotten.

    Args:
        prior_tokens: what an answer is taken to be long before any was seen.
        kept: how many pairs of key and route are remembered.
    """

    def __init__(self, prior_tokens: int = 256, kept: int = 1024) -> None:
        self._prior = prior_tokens
        self._kept = kept
        self._seen: collections.OrderedDict[tuple[str, str], collections.deque[int]] = (
            collections.OrderedDict()
        )

    def add(self, key: str, route: str, tokens: int) -> None:
        """An answer ended after so many tokens. It counts for its key, and for its route as a whole."""
        for name in ((key, route), ("", route)):
            window = self._seen.setdefault(name, collections.deque(maxlen=_WINDOW))
            window.append(max(tokens, 1))
            self._seen.move_to_end(name)
        while len(self._seen) > self._kept:
            self._seen.popitem(last=False)

    def expected(self, key: str, route: str, max_tokens: int) -> float:
        """Tokens that the next answer is expected to have: a winsorised mean of the last ones, each cut at
        ``max_tokens``. A key with few answers leans on its route's, and a route on the prior."""
        value = float(min(self._prior, max_tokens))
        for name in (("", route), (key, route)):
            window = self._seen.get(name)
            if window:
                mean = _mean(window, max_tokens)
                value = (mean * len(window) + value * _PRIOR_WEIGHT) / (len(window) + _PRIOR_WEIGHT)
        return max(value, 1.0)


def _mean(window: collections.deque[int], max_tokens: int) -> float:
    ordered = sorted(window)
    most = min(max_tokens, ordered[int(_LAST_KEPT * (len(ordered) - 1))])
    return sum(min(length, most) for length in ordered) / len(ordered)


@dataclass(frozen=True)
class Cost:
    """A request's predicted cost, in device seconds; ``first_token_s`` is a latency, ``tokens`` the expected
    length of the answer."""

    prefill_s: float
    token_s: float
    tokens: float
    first_token_s: float

    @property
    def work_s(self) -> float:
        """Everything."""
        return self.prefill_s + self.token_s * self.tokens


class Predictor:
    """Costs of requests."""

    def __init__(self, times: StepTimes, history: LengthHistory) -> None:
        self._times = times
        self.history = history

    def cost(self, key: str, route: str, prompt_tokens: int, max_tokens: int, choices: int = 1) -> Cost:
        """What a request will cost; ``choices`` answers are made from one prompt each its own sequence."""
        tokens = self.history.expected(key, route, max_tokens)
        middle = prompt_tokens + int(tokens / 2)
        return Cost(
            prefill_s=choices * self._times.prefill_s(prompt_tokens),
            token_s=self._times.token_s(middle),
            tokens=choices * tokens,
            first_token_s=self._times.first_token_s(prompt_tokens),
        )
