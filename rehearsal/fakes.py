"""A platform in memory, for tests of the API and the daemon: no root, no machine, no socket.

Tests decide what a host does: ``FakeMachines.on_boot`` runs in a thread when a machine starts (it may signal,
fail, or do nothing), ``FakeLoadBalancer.answers`` says what each target answers.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rehearsal.interfaces import (
    LoadBalancerSpec,
    MachineSpec,
    MachineState,
    Platform,
    TargetHealth,
    TargetKey,
    TargetState,
    VpcSpec,
)


@dataclass
class FakeMachines:
    """Machines that run as soon as they are started and are gone as soon as they are stopped."""

    consoles: Path
    on_boot: Callable[[MachineSpec], None] | None = None
    specs: dict[str, MachineSpec] = field(default_factory=dict)
    started: list[MachineSpec] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    removed_all: int = 0
    _states: dict[str, MachineState] = field(default_factory=dict)

    def start(self, spec: MachineSpec) -> None:
        if spec.instance_id in self._states:
            return
        self.specs[spec.instance_id] = spec
        self.started.append(spec)
        self._states[spec.instance_id] = MachineState.RUNNING
        if self.on_boot:
            threading.Thread(target=self.on_boot, args=(spec,), daemon=True).start()

    def stop(self, instance_id: str) -> None:
        if self._states.pop(instance_id, None):
            self.stopped.append(instance_id)

    def states(self) -> dict[str, MachineState]:
        return dict(self._states)

    def run(
        self, instance_id: str, argv: Sequence[str], *, timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run the command on this machine: a fake host is this one."""
        return subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)

    def console(self, instance_id: str) -> Path:
        return self.consoles / f"{instance_id}.log"

    def say(self, instance_id: str, line: str) -> None:
        """Write a line to a machine's console."""
        with self.console(instance_id).open("a") as file:
            file.write(line + "\n")

    def die(self, instance_id: str) -> None:
        """The machine dies on its own."""
        self._states[instance_id] = MachineState.DEAD

    def remove_all(self) -> None:
        self.removed_all += 1
        self._states.clear()


@dataclass
class FakeLoadBalancer:
    """Finds a target as healthy as ``answers`` says; drained targets hold no request."""

    answers: Callable[[str], TargetHealth] = lambda instance_id: TargetHealth(TargetState.HEALTHY)
    specs: list[LoadBalancerSpec] = field(default_factory=list)
    holding: set[str] = field(default_factory=set)
    """Instances that still have an open request."""

    def apply(self, specs: list[LoadBalancerSpec]) -> None:
        self.specs = specs

    def health(self) -> dict[TargetKey, TargetHealth]:
        found = {}
        for balancer in self.specs:
            for group in balancer.target_groups:
                for target in group.targets:
                    key = (group.arn, target.instance_id, target.port)
                    if not target.draining:
                        found[key] = self.answers(target.instance_id)
                    elif target.instance_id in self.holding:
                        found[key] = TargetHealth(TargetState.DRAINING)
                    else:
                        found[key] = TargetHealth(TargetState.UNUSED)
        return found

    def url(self, load_balancer_arn: str) -> str | None:
        return next((f"http://{s.dns_name}" for s in self.specs if s.arn == load_balancer_arn), None)

    def remove_all(self) -> None:
        self.specs = []


@dataclass
class FakeNetwork:
    """Remembers what it was told."""

    vpcs: list[VpcSpec] = field(default_factory=list)

    def ensure(self, vpcs: list[VpcSpec]) -> None:
        self.vpcs = vpcs

    def remove_all(self) -> None:
        self.vpcs = []


def fake_platform(home: Path) -> Platform:
    """A platform of fakes; the metadata service listens on free ports of loopback."""
    return Platform(
        FakeMachines(home),
        FakeLoadBalancer(),
        FakeNetwork(),
        metadata_address="127.0.0.1",
        metadata_port=0,
        metadata_v1_port=0,
    )
