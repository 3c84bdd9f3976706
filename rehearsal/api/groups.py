"""Auto Scaling groups as AWS runs them: a member is launched, comes into service, and is retired in order.

moto launches and terminates at once, in one subnet, and knows no health check, draining or grace. Here the
group has a wanted size and members with a lifecycle; ``tick`` (the reconciler calls it) moves them on.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from rehearsal.api import targets
from rehearsal.api.world import World

log = logging.getLogger("rehearsal.api.groups")
GROUP_TAG = "aws:autoscaling:groupName"
_FIRST_RETRY_S = 5.0
_LONGEST_RETRY_S = 60.0


@dataclass
class Member:
    """The rehearsal's part of a member; hangs on moto's InstanceState as ``rehearsal``. Monotonic times."""

    version: int
    launched: float
    in_service: float | None = None


def member_of(state: Any) -> Member:
    """The record of a member (also of one that was attached by hand)."""
    if not hasattr(state, "rehearsal"):
        state.rehearsal = Member(version=0, launched=time.monotonic())
    member: Member = state.rehearsal
    return member


def staying(group: Any) -> list[Any]:
    """Members that are not on their way out."""
    return [state for state in group.instance_states if not state.lifecycle_state.startswith("Terminat")]


def version_of(group: Any) -> Any:
    """The launch template version that the group launches now."""
    return group.ec2_launch_template.get_version(group.launch_template_version)


def outdated(group: Any) -> list[Any]:
    """Members of another launch template version, or in a subnet that the group has left; oldest first."""
    subnets = set((group.vpc_zone_identifier or "").split(","))
    now = version_of(group).number
    old = [s for s in staying(group) if member_of(s).version != now or s.instance.subnet_id not in subnets]
    return sorted(old, key=lambda state: member_of(state).launched)


def suspended(group: Any, process: str) -> bool:
    """Whether a scaling process is suspended."""
    return any(item["ProcessName"] == process for item in group.suspended_processes)


def launch(world: World, group: Any, count: int) -> list[str]:
    """Launch members, each in the Availability Zone that has the fewest; returns their instance ids."""
    ec2 = world.backend("ec2")
    version = version_of(group)
    data = version.data
    subnets = [ec2.get_subnet(subnet) for subnet in (group.vpc_zone_identifier or "").split(",")]
    made = []
    for _ in range(count):
        used = Counter(state.instance.placement.zone for state in staying(group))
        subnet = min(subnets, key=lambda s: used[s.availability_zone])
        interfaces = data.get("NetworkInterfaces") or []
        security_groups = data.get("SecurityGroupIds") or [g for i in interfaces for g in i.get("Groups", [])]
        reservation = ec2.run_instances(
            image_of(world, version.image_id),
            1,
            version.user_data,
            [],
            security_group_ids=list(security_groups),
            instance_type=version.instance_type,
            tags={
                "instance": {**group.get_propagated_tags(), **version.instance_tags, GROUP_TAG: group.name}
            },
            launch_template={
                "LaunchTemplateId": group.ec2_launch_template.id,
                "Version": str(version.number),
            },
            is_instance_type_default=False,
            associate_public_ip=False,
            subnet_id=subnet.id,
            metadata_options=data.get("MetadataOptions") or {},
        )
        instance = reservation.instances[0]
        _give_profile(ec2, instance, data.get("IamInstanceProfile") or {})
        instance.autoscaling_group = group
        state = _member_state(group, instance)
        state.rehearsal = Member(version=version.number, launched=time.monotonic())
        group.instance_states.append(state)
        made.append(instance.id)
        world.events.add(
            "instance.launched",
            f"{group.name} launched {instance.id} ({version.instance_type}, {instance.private_ip})",
            instance=instance.id,
            group=group.name,
            private_ip=instance.private_ip,
            instance_type=version.instance_type,
        )
    return made


def _member_state(group: Any, instance: Any) -> Any:
    from moto.autoscaling.models import InstanceState

    return InstanceState(
        instance,
        lifecycle_state="Pending",
        protected_from_scale_in=group.new_instances_protected_from_scale_in,
        autoscaling_group=group,
    )


def _give_profile(ec2: Any, instance: Any, profile: dict[str, str]) -> None:
    name = profile.get("Name")
    arn = profile.get("Arn")
    if name or arn:
        association = ec2.associate_iam_instance_profile(
            instance.id, iam_instance_profile_name=name, iam_instance_profile_arn=arn
        )
        # moto drops the association at termination; a host that shuts down still needs its role.
        instance.rehearsal_profile = association.iam_instance_profile


def image_of(world: World, image_id: str) -> str:
    """An AMI id; ``resolve:ssm:NAME`` is looked up as EC2 does at launch."""
    if not image_id.startswith("resolve:ssm:"):
        return image_id
    name = image_id.removeprefix("resolve:ssm:")
    parameter = world.backend("ssm").get_parameter(name)
    if parameter is None:
        raise ValueError(f"launch template names the SSM parameter {name}, which does not exist")
    return str(parameter.value)


def retire(world: World, group: Any, state: Any, why: str) -> None:
    """Take a member out: out of its target groups first; it is terminated once it has drained."""
    if state.lifecycle_state.startswith("Terminat"):
        return
    state.lifecycle_state = "Terminating"
    for arn in group.target_group_arns:
        targets.deregister(world, arn, state.instance.id)
    world.events.add(
        "instance.retiring",
        f"{group.name} takes {state.instance.id} out of service: {why}",
        instance=state.instance.id,
        group=group.name,
        reason=why,
    )


def converge(world: World, group: Any) -> None:
    """Launch what is missing, retire what is too many."""
    if getattr(group, "rehearsal_rolling", False):
        return
    members = staying(group)
    wanted = int(group.desired_capacity or 0)
    if len(members) < wanted and not suspended(group, "Launch"):
        if time.monotonic() >= getattr(group, "rehearsal_retry_at", 0.0):
            launch(world, group, wanted - len(members))
    elif len(members) > wanted and not suspended(group, "Terminate"):
        for state in scale_in_choice(group, len(members) - wanted):
            retire(world, group, state, f"{wanted} instances wanted")


def scale_in_choice(group: Any, count: int) -> list[Any]:
    """Whom a scale-in takes: of the fullest zone, of an old version before the newest, oldest first."""
    now = version_of(group).number
    left = [state for state in staying(group) if not state.protected_from_scale_in]
    chosen: list[Any] = []
    while left and len(chosen) < count:
        zones = Counter(state.instance.placement.zone for state in left)
        best = min(
            left,
            key=lambda s: (
                -zones[s.instance.placement.zone],
                member_of(s).version == now,
                member_of(s).launched,
            ),
        )
        left.remove(best)
        chosen.append(best)
    return chosen


def empty(world: World, group: Any) -> None:
    """Retire every member, for the group is about to be deleted."""
    group.min_size = group.desired_capacity = 0
    group.rehearsal_rolling = False
    for state in staying(group):
        retire(world, group, state, "the group is being deleted")


def reconfigure(world: World, group: Any, properties: dict[str, Any], *, rolling: bool) -> None:
    """Bring a group to changed CloudFormation properties, in place; members are another matter (rolling)."""
    group.rehearsal_rolling = rolling
    group.update(
        availability_zones=properties.get("AvailabilityZones", []),
        desired_capacity=_int(properties.get("DesiredCapacity")),
        max_size=_int(properties.get("MaxSize")),
        min_size=_int(properties.get("MinSize")),
        launch_config_name="",
        launch_template=properties.get("LaunchTemplate", {}),
        vpc_zone_identifier=",".join(properties.get("VPCZoneIdentifier", [])),
        health_check_period=_int(properties.get("HealthCheckGracePeriod")) or 0,
        health_check_type=properties.get("HealthCheckType") or "EC2",
        mixed_instances_policy=properties.get("MixedInstancesPolicy"),
    )
    wanted = list(properties.get("TargetGroupARNs", []))
    for arn in [arn for arn in group.target_group_arns if arn not in wanted]:
        for state in staying(group):
            targets.deregister(world, arn, state.instance.id)
    group.target_group_arns = wanted
    for state in staying(group):
        if state.lifecycle_state == "InService":
            _register(world, group, state)
    if "Tags" in properties:
        group.tags = properties["Tags"]


def _int(value: Any) -> int | None:
    return None if value is None else int(value)


def _register(world: World, group: Any, state: Any) -> None:
    for arn in group.target_group_arns:
        targets.register(world, arn, state.instance.id)


def launch_failed(group: Any) -> None:
    """Note a failed launch: the group waits longer before each next one, as EC2 Auto Scaling does."""
    failures = group.rehearsal_failures = getattr(group, "rehearsal_failures", 0) + 1
    wait = min(_LONGEST_RETRY_S, _FIRST_RETRY_S * 2 ** (failures - 1))
    group.rehearsal_retry_at = time.monotonic() + wait


def tick(world: World) -> None:
    """Move every group's members on; called under the lock, about twice a second."""
    for group in list(world.backend("autoscaling").autoscaling_groups.values()):
        for state in list(group.instance_states):
            _tick_member(world, group, state)
        converge(world, group)


def _tick_member(world: World, group: Any, state: Any) -> None:
    instance, member = state.instance, member_of(state)
    if instance.state == "terminated":
        if not state.lifecycle_state.startswith("Terminat"):
            retire(world, group, state, "it is terminated")
        group.instance_states.remove(state)
        return
    if instance.state in {"shutting-down", "stopping", "stopped"}:
        retire(world, group, state, f"it is {instance.state}")
    if state.lifecycle_state == "Pending" and instance.state == "running":
        _enter_service(world, group, state, member)
    elif state.lifecycle_state == "InService":
        _check_health(world, group, state, member)
    elif (
        state.lifecycle_state == "Terminating"
        and instance.state in {"running", "pending", "stopped"}
        and not targets.draining(world, instance.id)
    ):
        world.backend("ec2").terminate_instances([instance.id])


def _enter_service(world: World, group: Any, state: Any, member: Member) -> None:
    state.lifecycle_state = "InService"
    member.in_service = time.monotonic()
    group.rehearsal_failures = 0
    if not suspended(group, "AddToLoadBalancer"):
        _register(world, group, state)
    world.events.add(
        "instance.in_service",
        f"{state.instance.id} is in service in {group.name}",
        instance=state.instance.id,
        group=group.name,
    )


def in_grace(group: Any, state: Any) -> bool:
    """Whether the member came into service less than the health check grace period ago."""
    since = member_of(state).in_service
    return since is None or time.monotonic() - since < float(group.health_check_grace_period or 0)


def _check_health(world: World, group: Any, state: Any, member: Member) -> None:
    if (
        "ELB" in (group.health_check_type or "")
        and not suspended(group, "HealthCheck")
        and not in_grace(group, state)
        and state.health_status == "Healthy"
    ):
        bad = [arn for arn in group.target_group_arns if targets.unhealthy(world, arn, state.instance.id)]
        if bad:
            state.health_status = "Unhealthy"
            world.events.add(
                "instance.unhealthy",
                f"{state.instance.id} fails its target group's health check",
                instance=state.instance.id,
                group=group.name,
            )
    if (
        state.health_status == "Unhealthy"
        and not suspended(group, "ReplaceUnhealthy")
        and not suspended(group, "Terminate")
    ):
        retire(world, group, state, "it is unhealthy")


def set_health(world: World, instance_id: str, status: str, *, respect_grace: bool) -> None:
    """SetInstanceHealth: with ``respect_grace``, Unhealthy is not taken during the grace period."""
    from moto.autoscaling.exceptions import ValidationError

    for group in world.backend("autoscaling").autoscaling_groups.values():
        for state in group.instance_states:
            if state.instance.id != instance_id:
                continue
            ignored = status == "Unhealthy" and respect_grace and in_grace(group, state)
            if not ignored:
                state.health_status = status
            world.events.add(
                "instance.health",
                f"{instance_id} was called {status}" + (", ignored in its grace period" if ignored else ""),
                instance=instance_id,
                group=group.name,
                status=status,
                ignored=ignored,
            )
            return
    raise ValidationError(f"Instance Id not found - No managed instance found for instance ID {instance_id}")
