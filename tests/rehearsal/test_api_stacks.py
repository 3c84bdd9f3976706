"""Stacks that wait: creation by signals, rollback with the host's reason, order, deletion."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.rehearsal.api_world import Cloud, fleet_template, running_cloud, user_data_of, wait_for


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    with running_cloud(tmp_path) as made:
        yield made


def test_stack_waits_for_each_hosts_signal_once(cloud: Cloud) -> None:
    cloud.create("fleet", fleet_template(size=2))
    wait_for(lambda: len(cloud.machines.started) == 2, 20, "two machines")
    first, second = (spec.instance_id for spec in cloud.machines.started)
    cloud.signal("fleet", "Group", first)
    cloud.signal("fleet", "Group", first)
    wait_for(lambda: len(cloud.in_service(cloud.resource("fleet", "Group"))) == 2, 10, "both in service")
    assert cloud.status("fleet") == "CREATE_IN_PROGRESS"
    stack = cloud.client("cloudformation").describe_stacks(StackName="fleet")["Stacks"][0]
    assert not stack.get("Outputs")
    cloud.signal("fleet", "Group", second)
    assert cloud.settled("fleet") == "CREATE_COMPLETE"
    stack = cloud.client("cloudformation").describe_stacks(StackName="fleet")["Stacks"][0]
    assert {o["OutputKey"] for o in stack["Outputs"]} == {"Url", "TargetGroupArn"}


def test_what_depends_on_a_signalled_group_comes_after_it_and_the_rest_does_not_wait(cloud: Cloud) -> None:
    template = fleet_template()
    template["Resources"]["After"] = {
        "Type": "AWS::SSM::Parameter",
        "DependsOn": "Group",
        "Properties": {"Type": "String", "Value": "x", "Name": "/after"},
    }
    cloud.create("fleet", template)
    wait_for(lambda: len(cloud.machines.started) == 1, 20, "a machine")
    # The listener does not depend on the group: it must be there for a host to become healthy at all.
    wait_for(lambda: bool(cloud.balancer.specs) and bool(cloud.balancer.specs[0].listeners), 10, "a listener")
    with pytest.raises(ClientError, match="ParameterNotFound"):
        cloud.client("ssm").get_parameter(Name="/after")
    cloud.signal("fleet", "Group", cloud.machines.started[0].instance_id)
    assert cloud.settled("fleet") == "CREATE_COMPLETE"
    assert cloud.client("ssm").get_parameter(Name="/after")["Parameter"]["Value"] == "x"


def test_failure_signal_rolls_back_with_the_hosts_reason_and_hosts_go_away(cloud: Cloud) -> None:
    cloud.signals_on_boot(
        "fleet",
        "Group",
        "FAILURE",
        console="neuronfleet-failed: i-0abc neuronfleet-fetch.service: model.bin: sha256 does not match",
    )
    cloud.create("fleet", fleet_template())
    assert cloud.settled("fleet") == "ROLLBACK_COMPLETE"
    reason = cloud.failures("fleet")["Group"]
    host = cloud.machines.started[0].instance_id
    assert f"Received FAILURE signal with UniqueId {host}" in reason
    assert "model.bin: sha256 does not match" in reason
    assert cloud.machines.states() == {}
    assert not cloud.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
    assert not [v for v in cloud.client("ec2").describe_vpcs()["Vpcs"] if v["CidrBlock"] == "10.9.0.0/16"]


def test_no_signal_in_time_rolls_back(cloud: Cloud) -> None:
    cloud.create("fleet", fleet_template(timeout="PT1S"))
    assert cloud.settled("fleet") == "ROLLBACK_COMPLETE"
    assert (
        "Failed to receive 1 resource signal(s) within the specified duration"
        in cloud.failures("fleet")["Group"]
    )


def test_events_tell_every_resource_and_end_with_the_stack(cloud: Cloud) -> None:
    cloud.signals_on_boot("fleet", "Group")
    template = fleet_template()
    cloud.create("fleet", template)
    cloud.settled("fleet")
    events = cloud.client("cloudformation").describe_stack_events(StackName="fleet")["StackEvents"]
    assert (events[0]["LogicalResourceId"], events[0]["ResourceStatus"]) == ("fleet", "CREATE_COMPLETE")
    complete = {e["LogicalResourceId"] for e in events if e["ResourceStatus"] == "CREATE_COMPLETE"}
    assert complete == {"fleet", *template["Resources"]}
    resources = cloud.client("cloudformation").describe_stack_resources(StackName="fleet")["StackResources"]
    assert {r["ResourceStatus"] for r in resources} == {"CREATE_COMPLETE"}
    assert all(r["PhysicalResourceId"] for r in resources)


def test_user_data_reaches_the_instance_resolved(cloud: Cloud) -> None:
    cloud.signals_on_boot("fleet", "Group")
    cloud.create("fleet", fleet_template())
    cloud.settled("fleet")
    attribute = cloud.client("ec2").describe_instance_attribute(
        InstanceId=cloud.machines.started[0].instance_id, Attribute="userData"
    )
    assert user_data_of(attribute) == "#!/bin/bash\necho fleet us-east-1\n"


def test_delete_during_creation_cancels_it_and_removes_hosts(cloud: Cloud) -> None:
    cloud.create("fleet", fleet_template())
    wait_for(lambda: len(cloud.machines.started) == 1, 20, "a machine")
    cloud.client("cloudformation").delete_stack(StackName="fleet")
    wait_for(lambda: not cloud.client("cloudformation").describe_stacks()["Stacks"], 20, "the stack to go")
    assert cloud.machines.stopped == [cloud.machines.started[0].instance_id]
    with pytest.raises(ClientError, match="does not exist"):
        cloud.status("fleet")


def test_signals_that_nothing_waits_for_are_refused(cloud: Cloud) -> None:
    cloud.signals_on_boot("fleet", "Group")
    cloud.create("fleet", fleet_template())
    cloud.settled("fleet")
    with pytest.raises(ClientError, match="is in CREATE_COMPLETE state and can not be signaled"):
        cloud.signal("fleet", "Group", "i-late")
    with pytest.raises(ClientError, match="Resource Nothing does not exist"):
        cloud.signal("fleet", "Nothing", "i-late")
    with pytest.raises(ClientError, match="does not exist"):
        cloud.signal("nowhere", "Group", "i-late")


def test_change_sets_of_two_stacks_share_a_name(cloud: Cloud) -> None:
    cloudformation = cloud.client("cloudformation")

    def parameter(value: str) -> str:
        properties = {"Type": "String", "Value": value, "Name": f"/{value}"}
        return json.dumps({"Resources": {"P": {"Type": "AWS::SSM::Parameter", "Properties": properties}}})

    for name in ("one", "two"):
        cloudformation.create_change_set(
            StackName=name, ChangeSetName="deploy", ChangeSetType="CREATE", TemplateBody=parameter(name)
        )
    shown = cloudformation.describe_change_set(StackName="one", ChangeSetName="deploy")
    assert shown["StackName"] == "one"
    cloudformation.execute_change_set(StackName="one", ChangeSetName="deploy")
    assert cloud.settled("one") == "CREATE_COMPLETE"
    assert cloud.status("two") == "REVIEW_IN_PROGRESS"
    with pytest.raises(ClientError, match=r"ChangeSetNotFound.*does not exist"):
        cloudformation.describe_change_set(StackName="three", ChangeSetName="deploy")


def test_a_retained_resource_outlives_its_stack(cloud: Cloud) -> None:
    template: dict[str, Any] = {
        "Resources": {
            "Kept": {
                "Type": "AWS::S3::Bucket",
                "DeletionPolicy": "Retain",
                "Properties": {"BucketName": "kept"},
            },
            "Gone": {"Type": "AWS::S3::Bucket", "Properties": {"BucketName": "gone"}},
        }
    }
    cloud.create("store", template)
    cloud.settled("store")
    cloud.client("cloudformation").delete_stack(StackName="store")
    wait_for(lambda: not cloud.client("cloudformation").describe_stacks()["Stacks"], 20, "the stack to go")
    assert [b["Name"] for b in cloud.client("s3").list_buckets()["Buckets"]] == ["kept"]


def test_a_secret_is_generated_and_readable_and_appears_in_no_event(cloud: Cloud, tmp_path: Path) -> None:
    template = {
        "Resources": {
            "Token": {
                "Type": "AWS::SecretsManager::Secret",
                "Properties": {"GenerateSecretString": {"PasswordLength": 64, "ExcludePunctuation": True}},
            }
        },
        "Outputs": {"Arn": {"Value": {"Ref": "Token"}}},
    }
    cloud.create("secret", template)
    assert cloud.settled("secret") == "CREATE_COMPLETE"
    arn = cloud.resource("secret", "Token")
    value = cloud.client("secretsmanager").get_secret_value(SecretId=arn)["SecretString"]
    assert len(value) == 64
    assert value.isalnum()
    assert value not in (tmp_path / "events.jsonl").read_text()


def test_unknown_resource_types_are_named_as_emulated(cloud: Cloud) -> None:
    template = {
        "Resources": {
            "Cache": {"Type": "AWS::ElastiCache::ServerlessCache", "Properties": {"Engine": "valkey"}}
        },
        "Outputs": {"Where": {"Value": {"Fn::GetAtt": ["Cache", "Endpoint.Address"]}}},
    }
    cloud.create("cache", template)
    assert cloud.settled("cache") == "CREATE_COMPLETE"
    told = [e for e in cloud.daemon.world.events.since(0) if e.kind == "resource.emulated"]
    assert [e.fields["type"] for e in told] == ["AWS::ElastiCache::ServerlessCache"]
