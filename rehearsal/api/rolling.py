"""AutoScalingRollingUpdate: replace a group's members batch by batch, each batch by its signals."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from rehearsal.api import groups
from rehearsal.api.signals import SignalBook
from rehearsal.api.template import RollingUpdatePolicy
from rehearsal.api.world import World


class RollingUpdateFailed(Exception):
    """A batch did not come up; the message is CloudFormation's, with the hosts' reasons."""


class RollingUpdate:
    """One rolling update of one group; ``run`` yields while it waits (a remark, or an empty string)."""

    def __init__(
        self,
        world: World,
        group: Any,
        policy: RollingUpdatePolicy,
        book: SignalBook,
        failures: Callable[[], str],
    ) -> None:
        self.world = world
        self.group = group
        self.policy = policy
        self.book = book
        self.failures = failures

    def run(self) -> Iterator[str]:
        """Replace every outdated member.

        Raises:
            RollingUpdateFailed: a batch failed, or the policy cannot be followed.
        """
        group, policy = self.group, self.policy
        old = groups.outdated(group)
        # Stays set when the update fails: the rollback that follows rolls again, and ends it.
        group.rehearsal_rolling = True
        if old and policy.min_instances_in_service >= int(group.max_size):
            raise RollingUpdateFailed(
                f"MinInstancesInService ({policy.min_instances_in_service}) must be less than the "
                f"autoscaling group's MaxSize ({group.max_size})"
            )
        before = list(group._suspended_processes)
        group._suspended_processes = sorted({*before, *policy.suspend_processes})
        try:
            if old:
                yield (
                    f"Rolling update initiated. Terminating {len(old)} obsolete instance(s) in batches of "
                    f"{policy.max_batch_size}, while keeping at least {policy.min_instances_in_service} "
                    "instance(s) in service."
                )
            while old := groups.outdated(group):
                yield from self._batch(old)
        finally:
            group._suspended_processes = before
        group.rehearsal_rolling = False

    def _batch(self, old: list[Any]) -> Iterator[str]:
        group, policy = self.group, self.policy
        wanted, largest = int(group.desired_capacity or 0), int(group.max_size)
        size = min(policy.max_batch_size, len(old))
        missing = wanted - (len(groups.staying(group)) - len(old))
        serving = [state for state in groups.staying(group) if state.lifecycle_state == "InService"]
        # One that does not serve costs nothing to take out, so those go first.
        old.sort(key=lambda state: state in serving)
        free = sum(state not in serving for state in old)
        out = old[: min(size, free + max(0, len(serving) - policy.min_instances_in_service))]
        for state in out:
            groups.retire(self.world, group, state, "rolling update")
        while any(state in group.instance_states for state in out):
            yield ""
        count = min(size, missing, largest - len(groups.staying(group)))
        if count > 0:
            self.book.successes.clear()
            self.book.failures.clear()
            launched = groups.launch(self.world, group, count)
            yield f"New instance(s) added to autoscaling group: {', '.join(launched)}"
            yield from self._await(launched)
        for state in groups.outdated(group)[: max(0, len(groups.staying(group)) - wanted)]:
            groups.retire(self.world, group, state, "rolling update")
        yield ""

    def _await(self, launched: list[str]) -> Iterator[str]:
        policy = self.policy
        started = time.monotonic()
        if not policy.wait_on_signals:
            while time.monotonic() < started + policy.pause_s or not self._serving(launched):
                yield ""
            return
        needed = math.ceil(len(launched) * policy.min_successful_percent / 100)
        while len(self.book.successes) < needed:
            if len(launched) - len(self.book.failures) < needed:
                raise RollingUpdateFailed(
                    f"{self.failures()}. Unable to satisfy {policy.min_successful_percent}% "
                    "MinSuccessfulInstancesPercent requirement"
                )
            if time.monotonic() > started + policy.pause_s:
                raise RollingUpdateFailed(
                    f"Failed to receive {needed - len(self.book.successes)} resource signal(s) for the "
                    "current batch. Each resource signal timeout is counted as a FAILURE."
                )
            yield ""

    def _serving(self, launched: list[str]) -> bool:
        return all(
            state.lifecycle_state == "InService"
            for state in self.group.instance_states
            if state.instance.id in launched
        )
