"""elbv2's API: target health is what the real load balancer sees, and deregistered targets drain."""

from __future__ import annotations

from typing import Any

from moto.elbv2 import models

from rehearsal.api import targets
from rehearsal.api.patches import Patch
from rehearsal.api.world import World


def patches(world: World) -> list[Patch]:
    """What changes in moto's elbv2."""
    group, balancer, backend = models.FakeTargetGroup, models.FakeLoadBalancer, models.ELBv2Backend
    attribute = balancer.get_cfn_attribute

    def describe_target_health(self: Any, target_group_arn: str, wanted: list[dict[str, Any]]) -> list[Any]:
        found = self.target_groups.get(target_group_arn)
        if found is None:
            raise models.TargetGroupNotFoundError()
        if not wanted:
            wanted = [
                *found.targets.values(),
                *(
                    {"Id": instance_id, "Port": port}
                    for arn, instance_id, port in world.draining
                    if arn == target_group_arn
                ),
            ]
        answer = []
        for target in wanted:
            port = int(target.get("Port") or found.port)
            health = targets.health(world, target_group_arn, target["Id"], port)
            answer.append(
                models.FakeHealthStatus(
                    target["Id"],
                    str(port),
                    str(port) if found.health_check_port == "traffic-port" else found.health_check_port,
                    health.state.value,
                    health.reason or None,
                    health.description or None,
                )
            )
        return answer

    def deregister(self: Any, given: list[dict[str, Any]]) -> None:
        for target in given:
            targets.deregister(world, self.arn, target["Id"])

    def deregister_terminated(self: Any, instance_ids: list[str]) -> None:
        for instance_id in instance_ids:
            targets.deregister(world, self.arn, instance_id)

    def balancer_attribute(self: Any, name: str) -> Any:
        more = {
            "LoadBalancerArn": self.arn,
            "LoadBalancerFullName": self.arn.split(":loadbalancer/")[-1],
            "CanonicalHostedZoneID": self.canonical_hosted_zone_id,
            "SecurityGroups": self.security_groups,
        }
        return more[name] if name in more else attribute(self, name)

    def group_attribute(self: Any, name: str) -> Any:
        return {
            "TargetGroupArn": self.arn,
            "TargetGroupName": self.name,
            "TargetGroupFullName": self.arn.split(":")[-1],
            "LoadBalancerArns": [
                arn
                for arn, found in world.backend("elbv2").load_balancers.items()
                if any(self.arn in str(vars(a)) for x in found.listeners.values() for a in x.default_actions)
            ],
        }[name]

    real = "health is the load balancer's"
    return [
        Patch(backend, "describe_target_health", describe_target_health, real),
        Patch(group, "deregister", deregister, "deregistered targets drain"),
        Patch(group, "deregister_terminated_instances", deregister_terminated, "the same"),
        Patch(balancer, "get_cfn_attribute", balancer_attribute, "attributes that moto leaves out"),
        Patch(balancer, "has_cfn_attr", classmethod(lambda cls, name: True), "the same"),
        Patch(group, "get_cfn_attribute", group_attribute, "moto's target groups have none", new=True),
    ]
