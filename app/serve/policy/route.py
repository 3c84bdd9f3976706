"""Which replica the next request goes to: the one that will be done with its work first, of those well.

A pure object: whoever routes (a Serve request router, a door of our own) tells it what replicas report and
where it sent requests. Reports age: a replica that was not heard of lately is left alone until it is.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Report:
    """What a replica says of itself: predicted device seconds outstanding, the rate at which it works them
    off, seconds since it last gave a token while it had work, and whether it drains."""

    outstanding_s: float
    drain_rate: float = 1.0
    silent_s: float = 0.0
    draining: bool = False


@dataclass
class _Known:
    report: Report
    at: float
    sent: list[tuple[float, float]] = field(default_factory=list)


class LeastWork:
    """Replicas by name; times are monotonic seconds.

    Args:
        stale_s: a report older than this, or a replica silent for longer while it has work, is out of the
            choice until it is heard of again.
        near_margin_s: a replica on another NUMA node is taken only if the near ones take so much longer.
    """

    def __init__(self, stale_s: float = 0.8, near_margin_s: float = 0.05) -> None:
        self._stale_s = stale_s
        self._near_margin_s = near_margin_s
        self._known: dict[str, _Known] = {}

    def report(self, name: str, report: Report, now: float) -> None:
        """A replica said how it is. Work sent before the report was made is in it."""
        known = self._known.get(name)
        sent = [] if known is None else [item for item in known.sent if item[0] > now]
        self._known[name] = _Known(report, now, sent)

    def sent(self, name: str, work_s: float, now: float) -> None:
        """A request went to it, which its next report will count."""
        if name in self._known:
            self._known[name].sent.append((now, work_s))

    def gone(self, name: str) -> None:
        """It is no more."""
        self._known.pop(name, None)

    def expected_s(self, name: str, now: float) -> float:
        """Seconds until it would be done with what it has; infinite if it is not to be chosen."""
        known = self._known.get(name)
        if known is None or known.report.draining:
            return float("inf")
        age = now - known.at
        silent = known.report.outstanding_s > 0 and known.report.silent_s + age > self._stale_s
        if age > self._stale_s or silent:
            return float("inf")
        work = known.report.outstanding_s + sum(item for _, item in known.sent)
        # What it did since the report is not known: taking it as nothing makes old reports look worse.
        return work / max(known.report.drain_rate, 1e-6)

    def choose(self, now: float, near: Collection[str] = (), without: Collection[str] = ()) -> str | None:
        """The replica for the next request; None when there is none to choose.

        ``near`` are on the caller's NUMA nodes; ``without`` were tried already.
        """
        times = {name: self.expected_s(name, now) for name in self._known if name not in without}
        well = {name: seconds for name, seconds in times.items() if seconds < float("inf")}
        if not well:
            return None
        return min(well, key=lambda name: well[name] + (0.0 if name in near else self._near_margin_s))
