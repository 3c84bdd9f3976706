"""A daemon with fakes in this process, boto3 clients for it, and templates of a small fleet."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from rehearsal.daemon import Daemon
from rehearsal.fakes import FakeLoadBalancer, FakeMachines, fake_platform
from rehearsal.interfaces import MachineSpec

REGION = "us-east-1"
USER_DATA = "#!/bin/bash\necho ${AWS::StackName} ${AWS::Region}\n"


@dataclass
class Cloud:
    """The daemon, its fakes, and a client for each service."""

    daemon: Daemon
    machines: FakeMachines
    balancer: FakeLoadBalancer

    def client(self, service: str) -> Any:
        return boto3.client(
            service,
            endpoint_url=self.daemon.server.endpoint,
            region_name=REGION,
            aws_access_key_id="rehearsal",
            aws_secret_access_key="rehearsal",
            config=Config(retries={"max_attempts": 1}),
        )

    def signal(self, stack: str, resource: str, host: str, status: str = "SUCCESS") -> None:
        self.client("cloudformation").signal_resource(
            StackName=stack, LogicalResourceId=resource, UniqueId=host, Status=status
        )

    def signals_on_boot(self, stack: str, resource: str, status: str = "SUCCESS", console: str = "") -> None:
        """Let each machine signal as soon as it runs; one that comes later than the deploy is refused."""

        def boot(spec: MachineSpec) -> None:
            if console:
                self.machines.say(spec.instance_id, console)
            with suppress(ClientError):
                self.signal(stack, resource, spec.instance_id, status)

        self.machines.on_boot = boot

    def create(self, name: str, template: dict[str, Any], **parameters: str) -> None:
        self.client("cloudformation").create_stack(
            StackName=name,
            TemplateBody=json.dumps(template),
            Capabilities=["CAPABILITY_IAM"],
            Parameters=[{"ParameterKey": k, "ParameterValue": v} for k, v in parameters.items()],
        )

    def update(self, name: str, template: dict[str, Any]) -> None:
        self.client("cloudformation").update_stack(StackName=name, TemplateBody=json.dumps(template))

    def status(self, name: str) -> str:
        return str(self.client("cloudformation").describe_stacks(StackName=name)["Stacks"][0]["StackStatus"])

    def settled(self, name: str, timeout_s: float = 30.0) -> str:
        """The stack's status once nothing is in progress."""
        wait_for(lambda: not self.status(name).endswith("IN_PROGRESS"), timeout_s, f"stack {name} to settle")
        return self.status(name)

    def failures(self, name: str) -> dict[str, str]:
        """Resource -> reason of each failure in the stack's events."""
        events = self.client("cloudformation").describe_stack_events(StackName=name)["StackEvents"]
        return {
            e["LogicalResourceId"]: e["ResourceStatusReason"]
            for e in events
            if e["ResourceStatus"].endswith("FAILED")
        }

    def resource(self, stack: str, name: str) -> str:
        """The physical id of a stack's resource."""
        detail = self.client("cloudformation").describe_stack_resource(
            StackName=stack, LogicalResourceId=name
        )
        return str(detail["StackResourceDetail"]["PhysicalResourceId"])

    def members(self, group: str) -> list[dict[str, Any]]:
        found = self.client("autoscaling").describe_auto_scaling_groups(AutoScalingGroupNames=[group])
        return list(found["AutoScalingGroups"][0]["Instances"])

    def in_service(self, group: str) -> list[str]:
        return [m["InstanceId"] for m in self.members(group) if m["LifecycleState"] == "InService"]


@contextmanager
def running_cloud(home: Path) -> Iterator[Cloud]:
    """A started daemon over fakes; stopped, and moto as it was, at the end."""
    platform = fake_platform(home)
    daemon = Daemon(home, lambda port: platform)
    daemon.start()
    try:
        assert isinstance(platform.machines, FakeMachines)
        assert isinstance(platform.load_balancer, FakeLoadBalancer)
        yield Cloud(daemon, platform.machines, platform.load_balancer)
    finally:
        daemon.stop()


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll until the condition holds; AssertionError names what did not come."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.05)


def fleet_template(
    *,
    size: int = 1,
    maximum: int = 4,
    count: int | None = None,
    timeout: str = "PT30S",
    user_data: str = USER_DATA,
    pause: str = "PT30S",
    grace: int = 0,
    health: str = "EC2",
    delay: int = 0,
    way_out: bool = True,
) -> dict[str, Any]:
    """A VPC of two zones, a load balancer, and a group ``Group`` that waits for its hosts' signals."""
    resources: dict[str, Any] = {
        "Vpc": {"Type": "AWS::EC2::VPC", "Properties": {"CidrBlock": "10.9.0.0/16"}},
        "Role": {
            "Type": "AWS::IAM::Role",
            "Properties": {"AssumeRolePolicyDocument": {"Version": "2012-10-17", "Statement": []}},
        },
        "Profile": {"Type": "AWS::IAM::InstanceProfile", "Properties": {"Roles": [{"Ref": "Role"}]}},
        "HostGroup": {
            "Type": "AWS::EC2::SecurityGroup",
            "Properties": {"GroupDescription": "hosts", "VpcId": {"Ref": "Vpc"}},
        },
        "Template": {
            "Type": "AWS::EC2::LaunchTemplate",
            "Properties": {
                "LaunchTemplateData": {
                    "ImageId": "resolve:ssm:/aws/service/neuron/dlami/base/ubuntu-24.04/latest/image_id",
                    "InstanceType": "inf2.8xlarge",
                    "IamInstanceProfile": {"Arn": {"Fn::GetAtt": ["Profile", "Arn"]}},
                    "SecurityGroupIds": [{"Fn::GetAtt": ["HostGroup", "GroupId"]}],
                    "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1},
                    "UserData": {"Fn::Base64": {"Fn::Sub": user_data}},
                }
            },
        },
        "Balancer": {
            "Type": "AWS::ElasticLoadBalancingV2::LoadBalancer",
            "Properties": {
                "Subnets": [{"Ref": "SubnetA"}, {"Ref": "SubnetB"}],
                "Scheme": "internal",
                "LoadBalancerAttributes": [{"Key": "idle_timeout.timeout_seconds", "Value": "300"}],
            },
        },
        "Targets": {
            "Type": "AWS::ElasticLoadBalancingV2::TargetGroup",
            "Properties": {
                "VpcId": {"Ref": "Vpc"},
                "Port": 8000,
                "Protocol": "HTTP",
                "TargetType": "instance",
                "HealthCheckPath": "/readyz",
                "HealthCheckIntervalSeconds": 10,
                "TargetGroupAttributes": [
                    {"Key": "deregistration_delay.timeout_seconds", "Value": str(delay)}
                ],
            },
        },
        "Listener": {
            "Type": "AWS::ElasticLoadBalancingV2::Listener",
            "Properties": {
                "LoadBalancerArn": {"Ref": "Balancer"},
                "Port": 80,
                "Protocol": "HTTP",
                "DefaultActions": [{"Type": "forward", "TargetGroupArn": {"Ref": "Targets"}}],
            },
        },
        "Group": {
            "Type": "AWS::AutoScaling::AutoScalingGroup",
            "Properties": {
                "MinSize": str(size),
                "MaxSize": str(maximum),
                "LaunchTemplate": {
                    "LaunchTemplateId": {"Ref": "Template"},
                    "Version": {"Fn::GetAtt": ["Template", "LatestVersionNumber"]},
                },
                "VPCZoneIdentifier": [{"Ref": "SubnetA"}, {"Ref": "SubnetB"}],
                "TargetGroupARNs": [{"Ref": "Targets"}],
                "HealthCheckType": health,
                "HealthCheckGracePeriod": grace,
            },
            "CreationPolicy": {
                "ResourceSignal": {"Count": size if count is None else count, "Timeout": timeout}
            },
            "UpdatePolicy": {
                "AutoScalingRollingUpdate": {
                    "MaxBatchSize": 1,
                    "MinInstancesInService": size,
                    "PauseTime": pause,
                    "WaitOnResourceSignals": True,
                    "SuspendProcesses": ["ReplaceUnhealthy"],
                }
            },
        },
    }
    for index, zone in enumerate("ab"):
        resources[f"Subnet{zone.upper()}"] = {
            "Type": "AWS::EC2::Subnet",
            "Properties": {
                "VpcId": {"Ref": "Vpc"},
                "CidrBlock": f"10.9.{index}.0/24",
                "AvailabilityZone": f"{REGION}{zone}",
            },
        }
    if way_out:
        resources |= _way_out()
    return {
        "Resources": resources,
        "Outputs": {
            "Url": {"Value": {"Fn::Sub": "http://${Balancer.DNSName}"}},
            "TargetGroupArn": {"Value": {"Ref": "Targets"}},
        },
    }


def _way_out() -> dict[str, Any]:
    return {
        "Gateway": {"Type": "AWS::EC2::InternetGateway"},
        "Attachment": {
            "Type": "AWS::EC2::VPCGatewayAttachment",
            "Properties": {"VpcId": {"Ref": "Vpc"}, "InternetGatewayId": {"Ref": "Gateway"}},
        },
        "Table": {"Type": "AWS::EC2::RouteTable", "Properties": {"VpcId": {"Ref": "Vpc"}}},
        "Route": {
            "Type": "AWS::EC2::Route",
            "DependsOn": "Attachment",
            "Properties": {
                "RouteTableId": {"Ref": "Table"},
                "DestinationCidrBlock": "0.0.0.0/0",
                "GatewayId": {"Ref": "Gateway"},
            },
        },
        "TableA": {
            "Type": "AWS::EC2::SubnetRouteTableAssociation",
            "Properties": {"RouteTableId": {"Ref": "Table"}, "SubnetId": {"Ref": "SubnetA"}},
        },
    }


def user_data_of(instance_attribute: dict[str, Any]) -> str:
    """The decoded user data of a DescribeInstanceAttribute answer."""
    return base64.b64decode(instance_attribute["UserData"]["Value"]).decode()
