"""Auto Scaling groups: size, zones, health, grace, draining, and rolling updates that roll back."""

from __future__ import annotations

import base64
import copy
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from rehearsal.interfaces import TargetHealth, TargetState
from tests.rehearsal.api_world import Cloud, fleet_template, running_cloud, wait_for


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    with running_cloud(tmp_path) as made:
        yield made


def deployed(cloud: Cloud, **options: Any) -> str:
    """A fleet that is up; returns its group's name."""
    cloud.signals_on_boot("fleet", "Group")
    cloud.create("fleet", fleet_template(**options))
    assert cloud.settled("fleet") == "CREATE_COMPLETE"
    cloud.machines.on_boot = None
    group = cloud.resource("fleet", "Group")
    size = options.get("size", 1)
    wait_for(lambda: len(cloud.in_service(group)) == size, 10, "hosts in service")
    return group


def resize(cloud: Cloud, group: str, size: int) -> None:
    cloud.client("autoscaling").set_desired_capacity(AutoScalingGroupName=group, DesiredCapacity=size)


def test_hosts_spread_over_zones_with_addresses_and_a_way_out_of_their_subnets(cloud: Cloud) -> None:
    deployed(cloud, size=3)
    zones = Counter(
        instance["Placement"]["AvailabilityZone"]
        for reservation in cloud.client("ec2").describe_instances()["Reservations"]
        for instance in reservation["Instances"]
    )
    assert sorted(zones.values()) == [1, 2]
    specs = cloud.machines.started
    assert len({spec.private_ip for spec in specs}) == 3
    for spec in specs:
        in_a = spec.private_ip.startswith("10.9.0.")
        assert in_a or spec.private_ip.startswith("10.9.1.")
        assert spec.egress is in_a  # only subnet A's table has a default route
        assert spec.gateway == ("10.9.0.1" if in_a else "10.9.1.1")
        assert spec.image_id == "ami-0e0e0e0e0e0e0e0e0"
        assert spec.cpus == 32


def test_capacity_follows_the_wish(cloud: Cloud) -> None:
    group = deployed(cloud)
    resize(cloud, group, 3)
    wait_for(lambda: len(cloud.in_service(group)) == 3, 10, "three hosts")
    resize(cloud, group, 1)
    wait_for(lambda: len(cloud.members(group)) == 1, 10, "one host")
    assert len(cloud.machines.states()) == 1
    with pytest.raises(ClientError, match="above max value 4"):
        resize(cloud, group, 5)


def test_a_terminated_host_is_replaced(cloud: Cloud) -> None:
    group = deployed(cloud)
    (old,) = cloud.in_service(group)
    cloud.client("ec2").terminate_instances(InstanceIds=[old])
    wait_for(lambda: cloud.in_service(group) not in ([], [old]), 10, "another host")
    wait_for(lambda: old in cloud.machines.stopped, 10, "the old machine to stop")


def test_a_machine_that_dies_is_seen_by_the_api_and_replaced(cloud: Cloud) -> None:
    group = deployed(cloud)
    (old,) = cloud.in_service(group)
    cloud.machines.die(old)
    wait_for(lambda: cloud.in_service(group) not in ([], [old]), 10, "another host")

    def instance() -> dict[str, Any]:
        found = cloud.client("ec2").describe_instances(InstanceIds=[old])
        return dict(found["Reservations"][0]["Instances"][0])

    wait_for(lambda: instance()["State"]["Name"] == "terminated", 10, "its state")
    assert instance()["StateReason"]["Code"] == "Server.InternalError"


def test_unhealthy_is_taken_at_once_only_outside_or_against_the_grace_period(cloud: Cloud) -> None:
    group = deployed(cloud, grace=600)
    (host,) = cloud.in_service(group)
    autoscaling = cloud.client("autoscaling")
    autoscaling.set_instance_health(InstanceId=host, HealthStatus="Unhealthy")
    assert cloud.members(group)[0]["HealthStatus"] == "Healthy"
    autoscaling.set_instance_health(InstanceId=host, HealthStatus="Unhealthy", ShouldRespectGracePeriod=False)
    wait_for(lambda: cloud.in_service(group) not in ([], [host]), 10, "another host")


def test_target_health_is_what_the_load_balancer_sees_and_replaces_after_the_grace(cloud: Cloud) -> None:
    group = deployed(cloud, health="ELB", grace=2)
    (host,) = cloud.in_service(group)
    arn = cloud.resource("fleet", "Targets")
    elb = cloud.client("elbv2")

    def health() -> dict[str, Any]:
        found = elb.describe_target_health(TargetGroupArn=arn)["TargetHealthDescriptions"]
        return next((dict(d["TargetHealth"]) for d in found if d["Target"]["Id"] == host), {})

    wait_for(lambda: health().get("State") == "healthy", 10, "health")
    cloud.balancer.answers = lambda instance_id: (
        TargetHealth(TargetState.UNHEALTHY, "Target.FailedHealthChecks", "Health checks failed")
        if instance_id == host
        else TargetHealth(TargetState.HEALTHY)
    )
    wait_for(lambda: health().get("State") in {"unhealthy", None}, 10, "ill health")
    wait_for(lambda: cloud.in_service(group) not in ([], [host]), 15, "another host")


def test_a_retired_host_drains_before_it_is_terminated(cloud: Cloud) -> None:
    group = deployed(cloud, size=1, delay=60)
    resize(cloud, group, 2)
    wait_for(lambda: len(cloud.in_service(group)) == 2, 10, "two hosts")
    cloud.balancer.holding = set(cloud.in_service(group))
    resize(cloud, group, 1)
    elb, arn = cloud.client("elbv2"), cloud.resource("fleet", "Targets")

    def states() -> list[str]:
        found = elb.describe_target_health(TargetGroupArn=arn)["TargetHealthDescriptions"]
        return sorted(d["TargetHealth"]["State"] for d in found)

    wait_for(lambda: states() == ["draining", "healthy"], 10, "a draining target")
    assert len(cloud.machines.states()) == 2
    cloud.balancer.holding = set()
    wait_for(lambda: len(cloud.machines.states()) == 1, 10, "the drained host to end")
    assert states() == ["healthy"]


def test_an_instance_type_that_does_not_exist_ends_its_instances_and_no_other(cloud: Cloud) -> None:
    group = deployed(cloud)
    ec2 = cloud.client("ec2")
    subnet = cloud.resource("fleet", "SubnetA")
    made = ec2.run_instances(
        ImageId="ami-0e0e0e0e0e0e0e0e0", InstanceType="inf9.huge", MinCount=1, MaxCount=1, SubnetId=subnet
    )["Instances"][0]["InstanceId"]

    def state() -> dict[str, Any]:
        return dict(ec2.describe_instances(InstanceIds=[made])["Reservations"][0]["Instances"][0])

    wait_for(lambda: state()["State"]["Name"] == "terminated", 10, "its end")
    assert "no such EC2 instance type: inf9.huge" in state()["StateReason"]["Message"]
    assert len(cloud.in_service(group)) == 1


def test_console_output_is_the_machines(cloud: Cloud) -> None:
    group = deployed(cloud)
    (host,) = cloud.in_service(group)
    cloud.machines.say(host, "neuronfleet: installing")
    answer = cloud.client("ec2").get_console_output(InstanceId=host)
    assert answer["Output"] == "neuronfleet: installing\n"


def changed(template: dict[str, Any]) -> dict[str, Any]:
    """The same fleet with other user data."""
    other = copy.deepcopy(template)
    data = other["Resources"]["Template"]["Properties"]["LaunchTemplateData"]
    data["UserData"] = {"Fn::Base64": {"Fn::Sub": "#!/bin/bash\necho second\n"}}
    return other


def test_an_update_replaces_hosts_one_by_one_each_by_its_signal(cloud: Cloud) -> None:
    group = deployed(cloud, size=2, maximum=3)
    old = set(cloud.in_service(group))
    serving: list[int] = []
    cloud.machines.on_boot = lambda spec: (
        serving.append(len(cloud.in_service(group))),
        cloud.signal("fleet", "Group", spec.instance_id),
    )[-1]
    cloud.update("fleet", changed(fleet_template(size=2, maximum=3)))
    assert cloud.settled("fleet") == "UPDATE_COMPLETE"
    wait_for(lambda: len(cloud.members(group)) == 2, 10, "old hosts to leave")
    now = {member["InstanceId"] for member in cloud.members(group)}
    assert not now & old
    assert {m["LaunchTemplate"]["Version"] for m in cloud.members(group)} == {"2"}
    assert min(serving) >= 2  # MinInstancesInService held while each new host booted
    assert len(cloud.machines.started) == 4


def test_a_failing_update_rolls_back_and_ends_with_the_old_version(cloud: Cloud) -> None:
    group = deployed(cloud, size=1, maximum=2)
    template = fleet_template(size=1, maximum=2)

    def boot(spec: Any) -> None:
        attribute = cloud.client("ec2").describe_instance_attribute(
            InstanceId=spec.instance_id, Attribute="userData"
        )
        second = b"second" in base64.b64decode(attribute["UserData"]["Value"])
        if second:
            cloud.machines.say(spec.instance_id, "neuronfleet: FAILURE i-0: user data, exit 1: no artifact")
        cloud.signal("fleet", "Group", spec.instance_id, "FAILURE" if second else "SUCCESS")

    cloud.machines.on_boot = boot
    cloud.update("fleet", changed(template))
    assert cloud.settled("fleet") == "UPDATE_ROLLBACK_COMPLETE"
    reason = cloud.failures("fleet")["Group"]
    assert "Received FAILURE signal" in reason
    assert "no artifact" in reason
    wait_for(lambda: len(cloud.in_service(group)) == 1 == len(cloud.members(group)), 10, "one host")
    attribute = cloud.client("ec2").describe_instance_attribute(
        InstanceId=cloud.in_service(group)[0], Attribute="userData"
    )
    assert b"echo fleet" in base64.b64decode(attribute["UserData"]["Value"])


def test_an_update_that_only_resizes_replaces_nobody(cloud: Cloud) -> None:
    group = deployed(cloud, size=1)
    before = cloud.in_service(group)
    template = fleet_template(size=1)
    template["Resources"]["Group"]["Properties"]["MaxSize"] = "6"
    cloud.update("fleet", template)
    assert cloud.settled("fleet") == "UPDATE_COMPLETE"
    assert cloud.in_service(group) == before
