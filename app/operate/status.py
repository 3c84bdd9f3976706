"""What an environment is doing: stacks, hosts, raylets with their binding, replicas, target health."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from botocore.exceptions import ClientError

from app.operate.remote import run_on_hosts
from app.operate.target import OperateError, Target, ask_rehearsal

_ROLES = {"HeadGroup": "head", "FleetGroup": "fleet"}
"""Fixed logical ids of the Auto Scaling groups."""

HOST_STATUS_COMMAND = "/opt/neuronfleet/venv/bin/neuronfleet-node status"


@dataclass(frozen=True)
class Host:
    """One instance. ``target_health`` is elbv2's state, or ``none`` for a host that takes no requests;
    ``launched`` is an ISO 8601 time."""

    instance_id: str
    private_ip: str
    instance_type: str
    role: str
    state: str
    target_health: str
    launched: str = ""
    target_reason: str = ""
    raylets: list[dict[str, Any]] = field(default_factory=list)
    replicas: list[dict[str, Any]] = field(default_factory=list)
    units: list[dict[str, Any]] = field(default_factory=list)
    artifact: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    error: str = ""


@dataclass(frozen=True)
class Status:
    """An environment as ``neuronfleet status --json`` prints it."""

    environment: str
    url: str
    rehearsal: bool
    stacks: list[dict[str, Any]]
    hosts: list[Host]
    scaling_failures: list[str]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def environments(target: Target) -> list[str]:
    """Names of the environments that are deployed there, from their stacks' names."""
    names = set()
    for page in target.client("cloudformation").get_paginator("describe_stacks").paginate():
        for stack in page["Stacks"]:
            name = stack["StackName"]
            if name.startswith("neuronfleet-"):
                names.add(name.removeprefix("neuronfleet-").removesuffix("-store"))
    return sorted(names)


def choose_environment(target: Target, wanted: str | None) -> str:
    """``wanted`` if it is deployed, or the only one there is.

    Raises:
        OperateError: none is deployed, ``wanted`` is not, or there are several and none was named.
    """
    there = environments(target)
    if not there:
        where = "in the rehearsal" if target.is_rehearsal else f"in this account in {target.region}"
        raise OperateError(f"no environment is deployed {where}: deploy one with `make up` or `cdk deploy`")
    if wanted is None:
        if len(there) > 1:
            raise OperateError(
                f"several environments are deployed: {', '.join(there)}. Name one: --env {there[0]}"
            )
        return there[0]
    if wanted not in there:
        raise OperateError(f"environment {wanted!r} is not deployed; these are: {', '.join(there)}")
    return wanted


def read_status(target: Target, environment: str, *, ask_hosts: bool = True) -> Status:
    """Ask the API, and each host by Run Command, what the environment is doing."""
    stacks, outputs = _stacks(target, environment)
    groups, target_group_arn = _resources(target, environment)
    hosts, failures = _hosts(target, groups, target_group_arn)
    if ask_hosts:
        hosts = _with_own_words(target, hosts)
    return Status(
        environment=environment,
        url=_client_url(target, outputs.get("Url", "")),
        rehearsal=target.is_rehearsal,
        stacks=stacks,
        hosts=hosts,
        scaling_failures=failures,
    )


def _stacks(target: Target, environment: str) -> tuple[list[dict[str, Any]], dict[str, str]]:
    cloudformation = target.client("cloudformation")
    stacks: list[dict[str, Any]] = []
    outputs: dict[str, str] = {}
    for name in (f"neuronfleet-{environment}-store", f"neuronfleet-{environment}"):
        try:
            stack = cloudformation.describe_stacks(StackName=name)["Stacks"][0]
        except ClientError:
            continue
        stacks.append(
            {"name": name, "status": stack["StackStatus"], "reason": stack.get("StackStatusReason", "")}
        )
        outputs |= {item["OutputKey"]: item["OutputValue"] for item in stack.get("Outputs", [])}
    return stacks, outputs


def _resources(target: Target, environment: str) -> tuple[dict[str, str], str | None]:
    """Role -> Auto Scaling group, and the target group: from the stack's resources, which are there while it
    is still being made and has no outputs yet."""
    groups: dict[str, str] = {}
    target_group_arn = None
    pages = target.client("cloudformation").get_paginator("list_stack_resources")
    try:
        found = [
            item
            for page in pages.paginate(StackName=f"neuronfleet-{environment}")
            for item in page["StackResourceSummaries"]
            if item.get("PhysicalResourceId")
        ]
    except ClientError:
        return {}, None
    for item in found:
        if item["LogicalResourceId"] in _ROLES:
            groups[_ROLES[item["LogicalResourceId"]]] = item["PhysicalResourceId"]
        elif item["ResourceType"] == "AWS::ElasticLoadBalancingV2::TargetGroup":
            target_group_arn = item["PhysicalResourceId"]
    return groups, target_group_arn


def _hosts(
    target: Target, groups: dict[str, str], target_group_arn: str | None
) -> tuple[list[Host], list[str]]:
    autoscaling = target.client("autoscaling")
    roles: dict[str, str] = {}
    failures = []
    for role, group in groups.items():
        described = autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=[group])
        for item in described["AutoScalingGroups"]:
            roles |= {instance["InstanceId"]: role for instance in item["Instances"]}
        try:
            activities = autoscaling.describe_scaling_activities(AutoScalingGroupName=group, MaxRecords=5)
        except (ClientError, NotImplementedError):
            continue
        failures += [
            f"{group}: {activity.get('StatusMessage') or activity.get('Cause', '')}"
            for activity in activities.get("Activities", [])
            if activity.get("StatusCode") in ("Failed", "Cancelled")
        ]
    if not roles:
        return [], failures
    health: dict[str, dict[str, str]] = {}
    if target_group_arn:
        answer = target.client("elbv2").describe_target_health(TargetGroupArn=target_group_arn)
        health = {item["Target"]["Id"]: item["TargetHealth"] for item in answer["TargetHealthDescriptions"]}
    hosts = []
    reservations = target.client("ec2").describe_instances(InstanceIds=sorted(roles))["Reservations"]
    for instance in (instance for item in reservations for instance in item["Instances"]):
        instance_id = instance["InstanceId"]
        hosts.append(
            Host(
                instance_id=instance_id,
                private_ip=instance.get("PrivateIpAddress", ""),
                instance_type=instance["InstanceType"],
                role=roles[instance_id],
                state=instance["State"]["Name"],
                target_health=health.get(instance_id, {}).get("State", "none"),
                launched=instance["LaunchTime"].isoformat() if instance.get("LaunchTime") else "",
                target_reason=health.get(instance_id, {}).get("Description", ""),
            )
        )
    return sorted(hosts, key=lambda host: (host.role != "head", host.private_ip)), failures


def _with_own_words(target: Target, hosts: list[Host]) -> list[Host]:
    running = {host.instance_id: HOST_STATUS_COMMAND for host in hosts if host.state == "running"}
    answers = run_on_hosts(target.client("ssm"), running) if running else {}
    told = []
    for host in hosts:
        answer = answers.get(host.instance_id)
        if answer is None:
            told.append(host)
            continue
        if answer.error:
            told.append(_replace(host, error=f"host did not report: {answer.error}"))
            continue
        try:
            own = json.loads(answer.output)
        except json.JSONDecodeError:
            told.append(_replace(host, error="host's report is not JSON"))
            continue
        told.append(
            _replace(
                host,
                role=own.get("role", host.role),
                **{key: own.get(key, []) for key in ("raylets", "replicas", "units", "warnings")},
                artifact=own.get("artifact", {}),
            )
        )
    return told


def _replace(host: Host, **changes: Any) -> Host:
    return Host(**(asdict(host) | changes))


def _client_url(target: Target, url: str) -> str:
    """The URL as a client on this machine reaches it: the rehearsal's load balancer is on loopback."""
    if not target.is_rehearsal or not url:
        return url
    for balancer in ask_rehearsal("load_balancers"):
        if balancer["dns_name"] in url and balancer["url"]:
            return str(balancer["url"])
    return url
