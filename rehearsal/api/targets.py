"""Targets of target groups: registered, draining, and how healthy the real load balancer finds them."""

from __future__ import annotations

import time
from typing import Any

from rehearsal.api.world import World
from rehearsal.interfaces import TargetHealth, TargetKey, TargetState

_INITIAL = TargetHealth(
    TargetState.INITIAL, "Elb.RegistrationInProgress", "Target registration is in progress"
)
_UNUSED = TargetHealth(
    TargetState.UNUSED,
    "Target.NotInUse",
    "Target group is not configured to receive traffic from the load balancer",
)
_NOT_REGISTERED = TargetHealth(
    TargetState.UNUSED, "Target.NotRegistered", "Target is not registered to the target group"
)
_DRAINING = TargetHealth(
    TargetState.DRAINING, "Target.DeregistrationInProgress", "Target deregistration is in progress"
)


def group_of(world: World, arn: str) -> Any | None:
    """moto's target group, None when it was deleted."""
    return world.backend("elbv2").target_groups.get(arn)


def in_use(world: World, arn: str) -> bool:
    """Whether a listener sends to the target group."""
    return bool(world.backend("elbv2")._any_listener_using(arn))


def register(world: World, arn: str, instance_id: str) -> None:
    """Register an instance once, on the target group's own port."""
    group = group_of(world, arn)
    if group is None or instance_id in group.targets:
        return
    group.register([{"Id": instance_id, "Port": int(group.port)}])
    world.draining.pop((arn, instance_id, int(group.port)), None)


def deregister(world: World, arn: str, instance_id: str) -> None:
    """Take an instance out; it drains for at most the group's deregistration delay."""
    group = group_of(world, arn)
    if group is None or instance_id not in group.targets:
        return
    port = int(group.targets[instance_id]["Port"])
    group.targets.pop(instance_id)
    if in_use(world, arn):
        delay = float(group.attributes["deregistration_delay.timeout_seconds"])
        world.draining[(arn, instance_id, port)] = time.monotonic() + delay


def draining(world: World, instance_id: str) -> bool:
    """Whether the instance still drains in some target group."""
    return any(key[1] == instance_id for key in world.draining)


def end_draining(world: World) -> None:
    """Forget targets whose delay is over, that hold no request any more, or whose group is gone."""
    now = time.monotonic()
    for key, deadline in list(world.draining.items()):
        seen = world.target_health.get(key)
        if now >= deadline or group_of(world, key[0]) is None or (seen and seen.state is TargetState.UNUSED):
            del world.draining[key]


def health(world: World, arn: str, instance_id: str, port: int) -> TargetHealth:
    """What DescribeTargetHealth says of one target."""
    key: TargetKey = (arn, instance_id, port)
    group = group_of(world, arn)
    if group is None or instance_id not in group.targets:
        return _DRAINING if key in world.draining else _NOT_REGISTERED
    if not in_use(world, arn):
        return _UNUSED
    return world.target_health.get(key, _INITIAL)


def unhealthy(world: World, arn: str, instance_id: str) -> bool:
    """Whether the load balancer has found the instance's target unhealthy."""
    group = group_of(world, arn)
    if group is None or instance_id not in group.targets:
        return False
    port = int(group.targets[instance_id]["Port"])
    return health(world, arn, instance_id, port).state is TargetState.UNHEALTHY
