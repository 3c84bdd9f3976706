"""How much prefill may stand between two decode steps.

A prefill runs alone on the device, so every running stream waits for it. The policy gives each gap between
decode steps a budget, from the time per output token that is promised: what the promise leaves beside the
decode step itself. Two rules keep it:

- in a gap, prefill work beyond the budget is only ever one single unit (when the compiled graphs have none
  smaller): the longest stall is ``max(budget, smallest unit)``;
- prefill is paid from a credit that each decode step adds the budget to, so that over time the streams keep
  the promise even where units are larger than it; a floor on what is added bounds how long a prompt can wait.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StallPolicy:
    """Settings of the schedule; times in milliseconds.

    Args:
        tpot_slo_ms: time per output token that running streams shall keep. None: first come, first served,
            a prompt is prefilled as soon as a slot is free (the baseline).
        max_stall_ms: the budget of a gap itself, in place of what the promise leaves.
        max_overtakes: how often others may go before the first waiting prompt because their prefill fits
            the gap, or because they keep decode in its smaller bucket.
        lookahead: how far down the queue such others are looked for.
        patience_steps: after at most this many decode steps the first waiting prompt's next unit is paid
            for, whatever the promise says.
    """

    tpot_slo_ms: float | None = 100.0
    max_stall_ms: float | None = None
    max_overtakes: int = 4
    lookahead: int = 16
    patience_steps: int = 32

    def __post_init__(self) -> None:
        problems = [
            f"{name} {value} must be {least} or more"
            for name, value, least in (
                ("tpot_slo_ms", self.tpot_slo_ms, 0),
                ("max_stall_ms", self.max_stall_ms, 0),
                ("max_overtakes", self.max_overtakes, 0),
                ("lookahead", self.lookahead, 0),
                ("patience_steps", self.patience_steps, 1),
            )
            if value is not None and value < least
        ]
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def bounded(self) -> bool:
        """Whether stalls are bounded at all."""
        return self.tpot_slo_ms is not None or self.max_stall_ms is not None

    def budget_ms(self, decode_ms: float) -> float:
        """Prefill that a gap may hold, where a decode step takes ``decode_ms``."""
        if self.max_stall_ms is not None:
            return self.max_stall_ms
        if self.tpot_slo_ms is None:
            return float("inf")
        return max(0.0, self.tpot_slo_ms - decode_ms)


class Gap:
    """The account of one engine: prefill in the present gap, and the credit for more."""

    def __init__(self, policy: StallPolicy) -> None:
        self._policy = policy
        self._spent = 0.0
        self._credit = float("inf")

    def idle(self) -> None:
        """No stream runs: nothing can stall, and the next gap starts afresh."""
        self._spent = 0.0
        self._credit = float("inf")

    def allows(self, cost_ms: float, budget_ms: float) -> bool:
        """Whether a prefill unit may run now, before the next decode step."""
        if self._credit == float("inf"):
            self._credit = budget_ms  # the first gap of a running stream
        if not self._policy.bounded:
            return True
        return cost_ms <= self._credit and (self._spent == 0 or self._spent + cost_ms <= budget_ms)

    def prefilled(self, cost_ms: float) -> None:
        """A unit ran while streams were running."""
        self._spent += cost_ms
        self._credit -= cost_ms

    def decoded(self, budget_ms: float, wanted_ms: float) -> None:
        """A decode step ran. ``wanted_ms`` is the unit that waits (0: none)."""
        if not self._policy.bounded:
            return
        self._spent = 0.0
        full = max(budget_ms, wanted_ms)
        earned = max(budget_ms, full / self._policy.patience_steps)
        self._credit = full if self._credit == float("inf") else min(full, self._credit + earned)
