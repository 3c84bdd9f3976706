"""What moto's CloudFormation leaves out for resource types that it has.

Attributes of load balancers and target groups are dropped, many types cannot be updated or are not deleted
with their stack (a VPC then cannot be either). Each function does the same call that a user would make.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rehearsal.api.world import World


def _attributes(properties: dict[str, Any], name: str) -> dict[str, str]:
    return {item["Key"]: str(item["Value"]) for item in properties.get(name, [])}


def _load_balancer_attributes(world: World, resource: Any, properties: dict[str, Any]) -> None:
    resource.attrs.update(_attributes(properties, "LoadBalancerAttributes"))
    resource.activate()


def _target_group_attributes(world: World, resource: Any, properties: dict[str, Any]) -> None:
    resource.attributes.update(_attributes(properties, "TargetGroupAttributes"))


def _subnet(world: World, resource: Any, properties: dict[str, Any]) -> None:
    resource.map_public_ip_on_launch = str(properties.get("MapPublicIpOnLaunch", False)).lower() == "true"


def _associate_subnet(world: World, resource: Any, properties: dict[str, Any]) -> None:
    # moto's CloudFormation keeps this to itself; DescribeRouteTables should show it.
    world.backend("ec2").associate_route_table(resource.route_table_id, subnet_id=resource.subnet_id)


_AFTER_CREATE: dict[str, Callable[[World, Any, dict[str, Any]], None]] = {
    "AWS::ElasticLoadBalancingV2::LoadBalancer": _load_balancer_attributes,
    "AWS::ElasticLoadBalancingV2::TargetGroup": _target_group_attributes,
    "AWS::EC2::Subnet": _subnet,
    "AWS::EC2::SubnetRouteTableAssociation": _associate_subnet,
}


def after_create(world: World, kind: str, resource: Any, properties: dict[str, Any]) -> None:
    """Add what moto's creation dropped."""
    if kind in _AFTER_CREATE:
        _AFTER_CREATE[kind](world, resource, properties)


def _update_target_group(world: World, resource: Any, properties: dict[str, Any]) -> None:
    world.backend("elbv2").modify_target_group(
        arn=resource.arn,
        health_check_proto=properties.get("HealthCheckProtocol"),
        health_check_port=properties.get("HealthCheckPort"),
        health_check_path=properties.get("HealthCheckPath"),
        health_check_interval=properties.get("HealthCheckIntervalSeconds"),
        health_check_timeout=properties.get("HealthCheckTimeoutSeconds"),
        healthy_threshold_count=properties.get("HealthyThresholdCount"),
        unhealthy_threshold_count=properties.get("UnhealthyThresholdCount"),
        http_codes=(properties.get("Matcher") or {}).get("HttpCode"),
        health_check_enabled=properties.get("HealthCheckEnabled"),
    )
    _target_group_attributes(world, resource, properties)


def _update_load_balancer(world: World, resource: Any, properties: dict[str, Any]) -> None:
    _load_balancer_attributes(world, resource, properties)
    if groups := properties.get("SecurityGroups"):
        resource.security_groups = groups


def _update_endpoint(world: World, resource: Any, properties: dict[str, Any]) -> None:
    resource.policy_document = properties.get("PolicyDocument")


_UPDATE: dict[str, Callable[[World, Any, dict[str, Any]], None]] = {
    "AWS::ElasticLoadBalancingV2::LoadBalancer": _update_load_balancer,
    "AWS::ElasticLoadBalancingV2::TargetGroup": _update_target_group,
    "AWS::EC2::Subnet": _subnet,
    "AWS::EC2::VPCEndpoint": _update_endpoint,
}


def update(world: World, kind: str, resource: Any, properties: dict[str, Any]) -> bool:
    """Update in place; False when this type is moto's own affair."""
    if kind not in _UPDATE:
        return False
    _UPDATE[kind](world, resource, properties)
    return True


def _detach_gateway(ec2: Any, resource: Any) -> None:
    gateways = [g for g in ec2.internet_gateways.values() if g.vpc and g.vpc.id == resource.vpc_id]
    for gateway in gateways:
        ec2.detach_internet_gateway(gateway.id, resource.vpc_id)


def _disassociate(ec2: Any, resource: Any) -> None:
    for table in ec2.route_tables.values():
        for association in [a for a, subnet in table._associations.items() if subnet == resource.subnet_id]:
            ec2.disassociate_route_table(association)


_DELETE_EC2: dict[str, Callable[[Any, Any], Any]] = {
    "AWS::EC2::EIP": lambda ec2, r: ec2.release_address(allocation_id=r.allocation_id),
    "AWS::EC2::FlowLog": lambda ec2, r: ec2.delete_flow_logs([r.id]),
    "AWS::EC2::InternetGateway": lambda ec2, r: ec2.delete_internet_gateway(r.id),
    "AWS::EC2::NatGateway": lambda ec2, r: ec2.delete_nat_gateway(r.id),
    "AWS::EC2::Route": lambda ec2, r: None,  # goes with its table
    "AWS::EC2::RouteTable": lambda ec2, r: ec2.delete_route_table(r.id),
    "AWS::EC2::SecurityGroupIngress": lambda ec2, r: None,  # goes with its group
    "AWS::EC2::SubnetRouteTableAssociation": lambda ec2, r: _disassociate(ec2, r),
    "AWS::EC2::VPCEndpoint": lambda ec2, r: ec2.delete_vpc_endpoints([r.id]),
    "AWS::EC2::VPCGatewayAttachment": _detach_gateway,
}
_DELETE_OTHER: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "AWS::ElasticLoadBalancingV2::Listener": ("elbv2", lambda elb, r: elb.delete_listener(r.arn)),
    "AWS::ElasticLoadBalancingV2::TargetGroup": ("elbv2", lambda elb, r: elb.delete_target_group(r.arn)),
    "AWS::IAM::ManagedPolicy": ("iam", lambda iam, r: iam.delete_policy(r.arn)),
}


def delete(world: World, kind: str, resource: Any) -> bool:
    """Delete what moto would leave; False when this type is moto's own affair."""
    if kind in _DELETE_EC2:
        _DELETE_EC2[kind](world.backend("ec2"), resource)
        return True
    if kind in _DELETE_OTHER:
        service, call = _DELETE_OTHER[kind]
        call(world.backend(service), resource)
        return True
    return False
