"""How fast the replica works its queue off: device seconds predicted, over seconds passed.

1.0 where the prediction is right. Measured only while every slot is taken: a replica that waits for requests
says nothing about how fast it can be.
"""

from __future__ import annotations

import math

_LEAST = 1e-4


class DrainRate:
    """An exponentially forgetting ratio, which starts at the prediction.

    Args:
        memory_s: seconds at full slots after which a measurement counts a third.
    """

    def __init__(self, memory_s: float = 15.0) -> None:
        self._memory = memory_s
        self._work = self._time = memory_s / 3
        self._since: float | None = None

    def full(self, now: float, is_full: bool) -> None:
        """Whether every slot is taken, from ``now`` (monotonic seconds) on."""
        if self._since is not None:
            self._pass(now - self._since)
        self._since = now if is_full else None

    def did(self, work_s: float) -> None:
        """Predicted work was done."""
        if self._since is not None:
            self._work += work_s

    def rate(self, now: float) -> float:
        """Predicted seconds of work done in a second."""
        if self._since is not None:
            self._pass(now - self._since)
            self._since = now
        return max(self._work / self._time, _LEAST)

    def _pass(self, seconds: float) -> None:
        kept = math.exp(-max(seconds, 0.0) / self._memory)
        self._work *= kept
        self._time = self._time * kept + max(seconds, 0.0)
