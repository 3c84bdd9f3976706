"""The API's load balancers, listeners and target groups, as the real load balancer needs them."""

from __future__ import annotations

import ipaddress
import logging
from typing import Any

from rehearsal.api.world import World
from rehearsal.interfaces import (
    Action,
    FixedResponseAction,
    ForwardAction,
    ListenerSpec,
    LoadBalancerSpec,
    RedirectAction,
    TargetGroupSpec,
    TargetSpec,
)

log = logging.getLogger("rehearsal.balancing")
# elbv2's defaults, where moto keeps none.
_IDLE_TIMEOUT_S = 60
_CLIENT_KEEP_ALIVE_S = 3600


def load_balancer_specs(world: World) -> list[LoadBalancerSpec]:
    """Every load balancer; called under the world's lock."""
    return [_balancer(world, found) for found in world.backend("elbv2").load_balancers.values()]


def _balancer(world: World, balancer: Any) -> LoadBalancerSpec:
    listeners = tuple(
        spec for spec in (_listener(found) for found in balancer.listeners.values()) if spec is not None
    )
    used = [
        arn
        for listener in listeners
        if isinstance(listener.default_action, ForwardAction)
        for arn, _ in listener.default_action.target_groups
    ]
    groups = world.backend("elbv2").target_groups
    return LoadBalancerSpec(
        arn=balancer.arn,
        name=balancer.name,
        dns_name=balancer.dns_name,
        scheme=balancer.scheme,
        idle_timeout_s=int(balancer.attrs.get("idle_timeout.timeout_seconds", _IDLE_TIMEOUT_S)),
        client_keep_alive_s=int(balancer.attrs.get("client_keep_alive.seconds", _CLIENT_KEEP_ALIVE_S)),
        vpc_id=balancer.vpc_id,
        listeners=listeners,
        target_groups=tuple(_group(world, groups[arn]) for arn in dict.fromkeys(used) if arn in groups),
    )


def _listener(listener: Any) -> ListenerSpec | None:
    action = _action([found.data for found in listener.default_actions])
    if action is None:
        log.warning("listener %s: its default action is not emulated", listener.arn)
        return None
    return ListenerSpec(
        arn=listener.arn,
        port=int(listener.port),
        protocol=listener.protocol,
        certificate_arn=listener.certificate,
        default_action=action,
    )


def _action(actions: list[dict[str, Any]]) -> Action | None:
    for action in actions:
        kind = str(action.get("Type", "")).lower()
        if kind == "forward":
            listed = (action.get("ForwardConfig") or {}).get("TargetGroups") or [action]
            return ForwardAction(tuple((g["TargetGroupArn"], int(g.get("Weight", 1))) for g in listed))
        if kind == "redirect":
            config = action["RedirectConfig"]
            return RedirectAction(
                protocol=config.get("Protocol", "#{protocol}"),
                port=str(config.get("Port", "#{port}")),
                host=config.get("Host", "#{host}"),
                path=config.get("Path", "/#{path}"),
                query=config.get("Query", "#{query}"),
                status_code=int(str(config["StatusCode"]).removeprefix("HTTP_")),
            )
        if kind == "fixed-response":
            config = action["FixedResponseConfig"]
            return FixedResponseAction(
                int(config["StatusCode"]),
                config.get("ContentType", "text/plain"),
                config.get("MessageBody", ""),
            )
    return None


def _group(world: World, group: Any) -> TargetGroupSpec:
    leaving = [(i, port) for arn, i, port in world.draining if arn == group.arn]
    found = [
        *((target["Id"], int(target["Port"]), False) for target in group.targets.values()),
        *((instance_id, port, True) for instance_id, port in leaving),
    ]
    check_port = group.health_check_port
    return TargetGroupSpec(
        arn=group.arn,
        name=group.name,
        protocol=group.protocol,
        port=int(group.port),
        health_check_path=group.health_check_path or "/",
        health_check_port=None if check_port in {None, "traffic-port"} else int(check_port),
        health_check_interval_s=int(group.health_check_interval_seconds),
        health_check_timeout_s=int(group.health_check_timeout_seconds),
        healthy_threshold=int(group.healthy_threshold_count),
        unhealthy_threshold=int(group.unhealthy_threshold_count),
        matcher=str((getattr(group, "matcher", None) or {}).get("HttpCode", "200")),
        deregistration_delay_s=int(group.attributes["deregistration_delay.timeout_seconds"]),
        algorithm=group.attributes.get("load_balancing.algorithm.type", "round_robin"),
        targets=tuple(
            TargetSpec(instance_id, ip, port, draining)
            for instance_id, port, draining in found
            if (ip := _address(world, instance_id))
        ),
    )


def _address(world: World, target_id: str) -> str:
    """The private address of a target: an instance's own, or an ``ip`` target itself."""
    if target_id.startswith("i-"):
        instance = world.backend("ec2").get_instance_by_id(target_id)
        return str(instance.private_ip) if instance else ""
    try:
        return str(ipaddress.ip_address(target_id))
    except ValueError:
        return ""
