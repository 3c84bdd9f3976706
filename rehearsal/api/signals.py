"""Signals that stacks wait for: who sent one, and what a failing host said on its console."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

# What a host writes to its console when a boot step fails (app/node/report.py), or when user data does.
_REASON = re.compile(r"(?:neuronfleet-failed:|neuronfleet: FAILURE) *(?:i-[0-9a-f]+:? *)?(?P<reason>.+)")


@dataclass
class SignalBook:
    """The signals that one resource has received while it waits; a unique id counts once."""

    successes: set[str] = field(default_factory=set)
    failures: set[str] = field(default_factory=set)

    def record(self, unique_id: str, status: str) -> bool:
        """Count a signal; False when this id has signalled before (CloudFormation ignores it)."""
        if unique_id in self.successes or unique_id in self.failures:
            return False
        (self.successes if status == "SUCCESS" else self.failures).add(unique_id)
        return True


def reason_on_console(console: str) -> str:
    """The last failure that a host told its console, empty when it told none."""
    reason = ""
    for line in console.splitlines():
        if match := _REASON.search(line):
            reason = match["reason"].strip()
    return reason[:400]
