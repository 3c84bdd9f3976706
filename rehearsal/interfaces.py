"""The seams inside the rehearsal: what the reconciler asks of machines, load balancer and network.

The reconciler reads the API and calls these; the implementations know nothing of moto. Every call may be
made again with the same argument: it must then change nothing. Calls come from one thread (the
reconciler's), except ``Machines.console`` and ``LoadBalancer.url``, which any thread may call. A call that
cannot do its work raises ``RehearsalError`` with a reason that a person can act on.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol, runtime_checkable


class RehearsalError(Exception):
    """Something of this machine did not work; the message says what, and what to do next."""


class MachineState(StrEnum):
    """Where a machine is in its life, as its implementation sees it."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    DEAD = "dead"
    """It was started and is gone, or its boot failed: the API then says that the instance is terminated."""


@dataclass(frozen=True)
class MachineSpec:
    """One EC2 instance to boot.

    Attributes:
        instance_id: ``i-...``.
        private_ip: its address on the bridge.
        prefix_len: prefix length of the VPC (the bridge holds the whole VPC).
        gateway: the first address of its subnet: the host's default route and its resolver.
        hostname: ``ip-10-0-0-12.ec2.internal`` form, fully qualified.
        instance_type: ``inf2.8xlarge`` and so on; decides the emulated Neuron devices.
        image_id: AMI id.
        egress: the subnet's route table leads out (NAT or internet gateway).
        mac: the address that the metadata service tells.
        cpus: what the instance type has (not what this machine has).
    """

    instance_id: str
    private_ip: str
    prefix_len: int
    gateway: str
    hostname: str
    instance_type: str
    image_id: str
    egress: bool
    mac: str
    cpus: int


@runtime_checkable
class Machines(Protocol):
    """Boots and stops the machines that stand for EC2 instances."""

    def start(self, spec: MachineSpec) -> None:
        """Begin to boot; returns before the boot has ended."""

    def stop(self, instance_id: str) -> None:
        """Begin a graceful shutdown, then remove everything of the machine; returns at once.

        ``states`` says STOPPING until it is gone, then no longer lists it. Unknown ids are no error.
        """

    def states(self) -> dict[str, MachineState]:
        """Every machine that this object knows, by instance id; cheap (asked twice a second)."""

    def console(self, instance_id: str) -> Path:
        """The file that holds the machine's console; it may not exist yet, and outlives the machine."""

    def run(
        self, instance_id: str, argv: Sequence[str], *, timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a machine as root (any thread); raises RehearsalError when it does not run."""

    def remove_all(self) -> None:
        """Stop and remove every machine of this home, also those of a daemon that died; waits for the end."""


@dataclass(frozen=True)
class TargetSpec:
    """A registered target. ``draining``: deregistered, keeps its open requests, gets no new ones."""

    instance_id: str
    ip: str
    port: int
    draining: bool = False


@dataclass(frozen=True)
class TargetGroupSpec:
    """A target group with its health check; times in seconds."""

    arn: str
    name: str
    protocol: str
    port: int
    health_check_path: str
    health_check_port: int | None
    """None: the target's own port."""
    health_check_interval_s: int
    health_check_timeout_s: int
    healthy_threshold: int
    unhealthy_threshold: int
    matcher: str
    """HTTP codes, as the API says them: ``200``, ``200,204`` or ``200-299``."""
    deregistration_delay_s: int
    algorithm: str
    """``round_robin`` or ``least_outstanding_requests``."""
    targets: tuple[TargetSpec, ...]


@dataclass(frozen=True)
class ForwardAction:
    """Send to target groups, by weight."""

    target_groups: tuple[tuple[str, int], ...]
    """(target group ARN, weight)"""


@dataclass(frozen=True)
class RedirectAction:
    """Answer with a redirect; ``#{...}`` placeholders are the API's own."""

    protocol: str
    port: str
    host: str
    path: str
    query: str
    status_code: int


@dataclass(frozen=True)
class FixedResponseAction:
    """Answer from the load balancer itself."""

    status_code: int
    content_type: str
    body: str


Action = ForwardAction | RedirectAction | FixedResponseAction


@dataclass(frozen=True)
class ListenerSpec:
    """A listener: ``certificate_arn`` is set for HTTPS only; of its rules only the default one."""

    arn: str
    port: int
    protocol: str
    certificate_arn: str | None
    default_action: Action


@dataclass(frozen=True)
class LoadBalancerSpec:
    """An application load balancer: one whole picture, targets included."""

    arn: str
    name: str
    dns_name: str
    scheme: str
    idle_timeout_s: int
    client_keep_alive_s: int
    vpc_id: str
    listeners: tuple[ListenerSpec, ...]
    target_groups: tuple[TargetGroupSpec, ...] = field(default=())


class TargetState(StrEnum):
    """Target health as elbv2 names it."""

    INITIAL = "initial"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    DRAINING = "draining"
    UNUSED = "unused"


@dataclass(frozen=True)
class TargetHealth:
    """State with elbv2's reason code (``Target.FailedHealthChecks`` ...) and words; empty when healthy."""

    state: TargetState
    reason: str = ""
    description: str = ""


TargetKey = tuple[str, str, int]
"""(target group ARN, instance id, port)"""


@runtime_checkable
class LoadBalancer(Protocol):
    """Makes real load balancers of what the API says, and tells the health that they see."""

    def apply(self, specs: list[LoadBalancerSpec]) -> None:
        """Follow ``specs``, all of them; what is no longer listed goes away. Called when they changed."""

    def health(self) -> dict[TargetKey, TargetHealth]:
        """What the health checks say now; a target not yet checked is ``initial``."""

    def url(self, load_balancer_arn: str) -> str | None:
        """Where a client on this machine reaches it (``http://127.0.0.1:18080``), None before it listens."""

    def remove_all(self) -> None:
        """Stop every load balancer of this home, also those of a daemon that died."""


@dataclass(frozen=True)
class SubnetSpec:
    """A subnet; ``egress``: its route table has a default route to a NAT or internet gateway."""

    subnet_id: str
    cidr: str
    availability_zone: str
    egress: bool


@dataclass(frozen=True)
class VpcSpec:
    """A VPC in which instances may run."""

    vpc_id: str
    cidr: str
    subnets: tuple[SubnetSpec, ...]


@runtime_checkable
class Network(Protocol):
    """The bridge, its addresses, the resolver and the way out."""

    def ensure(self, vpcs: list[VpcSpec]) -> None:
        """Follow ``vpcs``: bridge with each subnet's gateway address, 169.254.169.254, the resolver."""

    def remove_all(self) -> None:
        """Remove bridges, addresses, rules and processes of this home, also of a daemon that died."""


@dataclass(frozen=True)
class Platform:
    """What the daemon drives: the real one from ``rehearsal.platform.build``, or the fakes of the tests."""

    machines: Machines
    load_balancer: LoadBalancer
    network: Network
    metadata_address: str
    """Where the metadata service binds after ``Network.ensure``: 169.254.169.254, loopback in tests."""
    metadata_port: int = 80
    metadata_v1_port: int = 8775
    """The door for cloud-init 22.4 (see ``rehearsal.metadata``)."""
