"""The reconciler: machines, network and load balancers follow the API, and the API follows them back.

One thread, one pass about twice a second. What the API wants is read under the world's lock into plain specs;
the platform is then called without it, so that a slow machine never holds up an API call.
"""

from __future__ import annotations

import ipaddress
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rehearsal.api import autoscaling, groups, instances, targets
from rehearsal.api.world import World
from rehearsal.balancing import load_balancer_specs
from rehearsal.interfaces import (
    LoadBalancerSpec,
    MachineSpec,
    MachineState,
    Platform,
    RehearsalError,
    SubnetSpec,
    TargetHealth,
    TargetKey,
    VpcSpec,
)

log = logging.getLogger("rehearsal.reconcile")
PERIOD_S = 0.5


@dataclass
class Wanted:
    """What the API wants at one moment."""

    vpcs: list[VpcSpec]
    machines: dict[str, MachineSpec]
    leaving: set[str]
    balancers: list[LoadBalancerSpec]


@dataclass
class Reconciler:
    """Makes the platform follow the API.

    Attributes:
        on_network: called each time that the network was set up, before machines start (the metadata service
            binds its address then).
    """

    world: World
    platform: Platform
    on_network: Callable[[], None] = lambda: None
    machine_states: dict[str, MachineState] = field(default_factory=dict)
    _vpcs: list[VpcSpec] | None = None
    _balancers: list[LoadBalancerSpec] | None = None
    _started: set[str] = field(default_factory=set)
    _faults: dict[str, str] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Follow in a thread until ``stop``."""
        self._thread = threading.Thread(target=self._run, name="reconciler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what runs stays as it is."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.step()
            except Exception as error:
                log.exception("a pass of the reconciler broke")
                self._fault("reconciler", f"{type(error).__name__}: {error}")
            self._stop.wait(PERIOD_S)

    def step(self) -> None:
        """One pass."""
        with self.world.lock:
            groups.tick(self.world)
            targets.end_draining(self.world)
            autoscaling.forget_deleted(self.world)
            wanted = self._read()
        self._follow_network(wanted.vpcs)
        self._follow_machines(wanted)
        self._follow_balancers(wanted.balancers)

    # -- reading the API

    def _read(self) -> Wanted:
        ec2 = self.world.backend("ec2")
        machines, leaving = {}, set()
        for instance in ec2.all_instances():
            if instance.state in {"pending", "running"}:
                try:
                    machines[instance.id] = machine_spec(ec2, instance)
                except RehearsalError as error:
                    self._died(instance.id, str(error))
            elif instance.state in {"shutting-down", "stopping"}:
                leaving.add(instance.id)
        balancers = load_balancer_specs(self.world)
        used = {ec2.get_instance(i).vpc_id for i in [*machines, *leaving]} | {b.vpc_id for b in balancers}
        return Wanted([vpc_spec(ec2, vpc_id) for vpc_id in sorted(used)], machines, leaving, balancers)

    # -- following

    def _follow_network(self, vpcs: list[VpcSpec]) -> None:
        if vpcs == self._vpcs or (not vpcs and self._vpcs is None):
            return
        try:
            self.platform.network.ensure(vpcs)
            if vpcs:
                self.on_network()
        except RehearsalError as error:
            self._fault("network", str(error))
            return
        self._clear("network")
        self._vpcs = vpcs

    def _follow_machines(self, wanted: Wanted) -> None:
        machines = self.platform.machines
        states = machines.states()
        if self._vpcs is not None:
            for instance_id, spec in wanted.machines.items():
                if instance_id not in states and instance_id not in self._started:
                    self._start(spec)
        for instance_id in self._started & set(wanted.machines):
            vanished = instance_id not in states and instance_id in self.machine_states
            if vanished or states.get(instance_id) is MachineState.DEAD:
                self._died(instance_id)
        gone = {i for i, state in states.items() if state is not MachineState.STOPPING} - set(wanted.machines)
        for instance_id in gone:
            machines.stop(instance_id)
        states = machines.states()
        with self.world.lock:
            self._report_states(wanted, states)
        self.machine_states = states

    def _start(self, spec: MachineSpec) -> None:
        self._started.add(spec.instance_id)
        try:
            self.platform.machines.start(spec)
        except RehearsalError as error:
            log.error("machine %s did not start: %s", spec.instance_id, error)
            self._died(spec.instance_id, str(error))

    def _died(self, instance_id: str, reason: str = "the machine is gone: see its console") -> None:
        with self.world.lock:
            instance = self.world.backend("ec2").get_instance(instance_id)
            if instance.state not in {"pending", "running"}:
                return
            if instance.state == "pending":
                for group in self.world.backend("autoscaling").autoscaling_groups.values():
                    if any(state.instance is instance for state in group.instance_states):
                        groups.launch_failed(group)
            instance.terminate()
            instances.set_state(
                instance, "shutting-down", f"Server.InternalError: {reason}", "Server.InternalError"
            )
        self.world.events.add(
            "instance.died", f"{instance_id} died: {reason}", instance=instance_id, reason=reason
        )

    def _report_states(self, wanted: Wanted, states: dict[str, MachineState]) -> None:
        ec2 = self.world.backend("ec2")
        for instance in ec2.all_instances():
            state = states.get(instance.id)
            if instance.state == "pending" and state is MachineState.RUNNING:
                instances.set_state(instance, "running")
                self.world.events.add(
                    "instance.running",
                    f"{instance.id} is running",
                    instance=instance.id,
                    private_ip=instance.private_ip,
                )
            elif instance.state == "shutting-down" and state is None:
                instances.set_state(instance, "terminated")
                self._started.discard(instance.id)
                self.world.events.add(
                    "instance.terminated", f"{instance.id} is terminated", instance=instance.id
                )
            elif instance.state == "stopping" and state is None:
                instances.set_state(instance, "stopped")
                self._started.discard(instance.id)

    def _follow_balancers(self, balancers: list[LoadBalancerSpec]) -> None:
        if balancers != (self._balancers or []):
            try:
                self.platform.load_balancer.apply(balancers)
            except RehearsalError as error:
                self._fault("load balancer", str(error))
                return
            self._clear("load balancer")
            self._balancers = balancers
        if not balancers:
            self.world.target_health.clear()
            return
        seen = self.platform.load_balancer.health()
        with self.world.lock:
            before = dict(self.world.target_health)
            self.world.target_health.clear()
            self.world.target_health.update(seen)
        for key, health in seen.items():
            if before.get(key) != health:
                self._tell_health(key, health)

    def _tell_health(self, key: TargetKey, health: TargetHealth) -> None:
        arn, instance_id, port = key
        why = f": {health.description or health.reason}" if health.reason else ""
        self.world.events.add(
            "target.health",
            f"{instance_id}:{port} is {health.state.value}{why}",
            instance=instance_id,
            port=port,
            target_group=arn,
            state=health.state.value,
            reason=health.reason,
        )

    def _fault(self, what: str, reason: str) -> None:
        if self._faults.get(what) != reason:
            self._faults[what] = reason
            log.error("%s: %s", what, reason)
            self.world.events.add("fault", f"{what}: {reason}", what=what, reason=reason)

    def _clear(self, what: str) -> None:
        self._faults.pop(what, None)


def vpc_spec(ec2: Any, vpc_id: str) -> VpcSpec:
    """A VPC as the network builder needs it."""
    vpc = ec2.get_vpc(vpc_id)
    subnets = sorted(
        (subnet for zone in ec2.subnets.values() for subnet in zone.values() if subnet.vpc_id == vpc_id),
        key=lambda subnet: ipaddress.ip_network(subnet.cidr_block),
    )
    return VpcSpec(
        vpc_id,
        vpc.cidr_block,
        tuple(SubnetSpec(s.id, s.cidr_block, s.availability_zone, has_egress(ec2, s)) for s in subnets),
    )


def has_egress(ec2: Any, subnet: Any) -> bool:
    """Whether the subnet's route table (or the VPC's main one) has a default route to a way out."""
    tables = [t for t in ec2.route_tables.values() if t.vpc_id == subnet.vpc_id]
    own = [t for t in tables if subnet.id in t._associations.values()]
    main = [t for t in tables if t.main_association_id]
    for table in own or main:
        for route in table.routes:
            if route.destination_cidr_block == "0.0.0.0/0" and (route.nat_gateway or route.gateway):
                return True
    return False


def machine_spec(ec2: Any, instance: Any) -> MachineSpec:
    """An instance as the machine builder needs it."""
    subnet = ec2.get_subnet(instance.subnet_id)
    vpc = ec2.get_vpc(subnet.vpc_id)
    return MachineSpec(
        instance_id=instance.id,
        private_ip=instance.private_ip,
        prefix_len=ipaddress.ip_network(vpc.cidr_block).prefixlen,
        gateway=str(next(ipaddress.ip_network(subnet.cidr_block).hosts())),
        hostname=instance.private_dns_name,
        instance_type=instance.instance_type,
        image_id=instance.image_id,
        egress=has_egress(ec2, subnet),
        mac=instance.nics[0].mac_address,
        cpus=cpus_of(instance.instance_type),
    )


def cpus_of(instance_type: str) -> int:
    """vCPUs that AWS gives an instance type (moto's copy of DescribeInstanceTypes)."""
    from moto.ec2.models.instance_types import INSTANCE_TYPES

    try:
        return int(INSTANCE_TYPES[instance_type]["VCpuInfo"]["DefaultVCpus"])
    except KeyError:
        raise RehearsalError(f"no such EC2 instance type: {instance_type}") from None
