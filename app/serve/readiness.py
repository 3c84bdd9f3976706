"""Is this replica able to give tokens? Answered by tokens, not by the process being there.

A replica is ready while a real token came out lately. When none did (no traffic, or a stuck engine), one
token is generated now, with a deadline. So load never makes a replica unready, and a frozen engine always
does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

Clock = Callable[[], float]


class TokenWatch:
    """When the engine last gave a token, in seconds of ``clock``."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._last: float | None = None

    def note(self, tokens: int) -> None:
        """Tokens came out now."""
        if tokens > 0:
            self._last = self._clock()

    def age_s(self) -> float | None:
        """Seconds since the last token; None if there was none yet."""
        return None if self._last is None else self._clock() - self._last


@dataclass(frozen=True)
class Verdict:
    """Whether the replica is ready, why not, and how it is known (``token``, ``canary`` or ``engine``)."""

    ready: bool
    by: str
    reason: str | None = None
    token_age_s: float | None = None


class Readiness:
    """Decides readiness; probes that come together share one canary.

    ``canary`` generates one token and returns; ``dead_reason`` says why no more can be served.
    """

    def __init__(
        self,
        watch: TokenWatch,
        canary: Callable[[], Awaitable[None]],
        dead_reason: Callable[[], str | None],
        fresh_s: float,
        deadline_s: float,
    ) -> None:
        self._watch = watch
        self._canary = canary
        self._dead_reason = dead_reason
        self._fresh_s = fresh_s
        self._deadline_s = deadline_s
        self._running: asyncio.Task[Verdict] | None = None

    async def check(self) -> Verdict:
        """The verdict now; takes at most the canary's deadline."""
        dead = self._dead_reason()
        if dead is not None:
            return Verdict(False, "engine", dead, self._watch.age_s())
        age = self._watch.age_s()
        if age is not None and age <= self._fresh_s:
            return Verdict(True, "token", None, age)
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run_canary())
        # Shielded: a probe that gives up must not end the canary that other probes wait for.
        return await asyncio.shield(self._running)

    async def _run_canary(self) -> Verdict:
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._canary()
        except TimeoutError:
            age = self._watch.age_s()
            since = "since the engine started" if age is None else f"for {age:.1f} s"
            return Verdict(
                False,
                "canary",
                f"no token came out {since}, and one asked for now did not come within "
                f"{self._deadline_s:g} s: the engine is stuck or overloaded",
                age,
            )
        except Exception as error:
            reason = self._dead_reason() or f"one token asked for now failed: {type(error).__name__}: {error}"
            return Verdict(False, "canary", reason, self._watch.age_s())
        return Verdict(True, "canary", None, self._watch.age_s())
