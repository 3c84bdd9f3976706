"""What the API's parts share: one lock, the event log, and what the load balancers and machines say."""

from __future__ import annotations

import logging
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rehearsal.events import EventLog
from rehearsal.interfaces import RehearsalError, TargetHealth, TargetKey

ACCOUNT_ID = "123456789012"
"""moto's default account: what it takes for credentials that it does not know."""

log = logging.getLogger("rehearsal.api")


class RunInMachine(Protocol):
    """Runs a command in an instance's machine as root; raises RehearsalError when none runs."""

    def __call__(
        self, instance_id: str, argv: Sequence[str], *, timeout_s: float
    ) -> subprocess.CompletedProcess[str]: ...


def _no_machine(
    instance_id: str, argv: Sequence[str], *, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    raise RehearsalError(f"{instance_id} is no machine that commands can run in")


@dataclass
class World:
    """The state beside moto's own.

    Attributes:
        region: the one region that is followed.
        lock: held for each API request (S3's excepted, which is a world of its own) and for each step of a
            stack operation and of the reconciler: moto's backends are plain dictionaries without locks.
        target_health: what the load balancers said last.
        console: reads an instance's console (text), empty when there is none.
        run_in_machine: how Run Command reaches an instance.
        draining: deregistered targets and the monotonic time at which their delay ends.
        speed: seconds that a CloudFormation "minute" and the like are divided by; tests only.
    """

    events: EventLog
    region: str = "us-east-1"
    account: str = ACCOUNT_ID
    lock: threading.RLock = field(default_factory=threading.RLock)
    target_health: dict[TargetKey, TargetHealth] = field(default_factory=dict)
    draining: dict[TargetKey, float] = field(default_factory=dict)
    console: Callable[[str], str] = lambda instance_id: ""
    run_in_machine: RunInMachine = _no_machine

    def backend(self, service: str) -> Any:
        """moto's backend of ``service`` for this account and region."""
        from moto.backends import get_backend

        backends = get_backend(service)[self.account]
        return backends["aws"] if service in {"iam", "s3", "sts"} else backends[self.region]
