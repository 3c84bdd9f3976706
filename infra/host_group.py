"""A group of like hosts: launch template, Auto Scaling group, and the signals that a deploy waits for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import aws_cdk as cdk
from aws_cdk import aws_autoscaling as autoscaling
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from aws_cdk import aws_s3_assets as assets
from constructs import Construct, IDependable

from app.node.config import NodeConfig
from app.plan.profiles import get_profile
from infra.nag import acknowledge
from infra.settings import Settings
from infra.userdata import render

ROOT_DEVICE = "/dev/sda1"  # of Ubuntu's images, and so of the Neuron DLAMI's
# What Auto Scaling must not do while an update replaces hosts one by one.
_SUSPENDED = [
    autoscaling.ScalingProcess.AZ_REBALANCE,
    autoscaling.ScalingProcess.ALARM_NOTIFICATION,
    autoscaling.ScalingProcess.SCHEDULED_ACTIONS,
    autoscaling.ScalingProcess.HEALTH_CHECK,
    autoscaling.ScalingProcess.REPLACE_UNHEALTHY,
    autoscaling.ScalingProcess.INSTANCE_REFRESH,
]


@dataclass(frozen=True)
class HostGroupProps:
    """What tells one group from another. ``logical_id`` is fixed, since hosts signal to it by name.

    ``node`` holds the group's part of the node config: role, cluster, target group. Without
    ``checks_target`` the group judges a host by EC2's own checks.
    """

    logical_id: str
    instance_type: str
    minimum: int
    maximum: int
    role: iam.Role
    security_group: ec2.SecurityGroup
    subnets: Sequence[ec2.ISubnet]
    image: ec2.IMachineImage
    bundle: assets.Asset
    bundle_sha256: str
    node: dict[str, Any]
    checks_target: bool = False
    after: Sequence[IDependable] = field(default_factory=tuple)


class HostGroup(Construct):
    """``group`` is the Auto Scaling group. A template never sets its desired capacity: an update would undo
    what people or policies set."""

    def __init__(
        self, scope: Construct, construct_id: str, vpc: ec2.IVpc, settings: Settings, props: HostGroupProps
    ) -> None:
        super().__init__(scope, construct_id)
        boot = cdk.Duration.seconds(settings.fleet.boot_timeout_s)
        template = self._launch_template(settings, props)
        self.group = autoscaling.AutoScalingGroup(
            self,
            "Group",
            vpc=vpc,
            vpc_subnets=ec2.SubnetSelection(subnets=list(props.subnets)),
            launch_template=template,
            min_capacity=props.minimum,
            max_capacity=props.maximum,
            # A host counts as failed only after the time that a whole boot may take.
            health_checks=autoscaling.HealthChecks.with_additional_checks(
                grace_period=boot, additional_types=[autoscaling.AdditionalHealthCheckType.ELB]
            )
            if props.checks_target
            else autoscaling.HealthChecks.ec2(grace_period=boot),
            signals=autoscaling.Signals.wait_for_count(props.minimum, timeout=boot),
            update_policy=autoscaling.UpdatePolicy.rolling_update(
                max_batch_size=1,
                min_instances_in_service=min(props.minimum, props.maximum - 1),
                pause_time=boot,
                suspend_processes=_SUSPENDED,
                wait_on_resource_signals=True,
            ),
            az_capacity_distribution_strategy=autoscaling.CapacityDistributionStrategy.BALANCED_BEST_EFFORT,
            group_metrics=[autoscaling.GroupMetrics.all()],
        )
        cdk.Tags.of(self).add("Name", f"neuronfleet-{settings.environment}-{props.node['role']}")
        resource = cast(autoscaling.CfnAutoScalingGroup, self.group.node.default_child)
        resource.override_logical_id(props.logical_id)
        self.group.node.add_dependency(props.role, *props.after)
        acknowledge(
            self.group,
            "AwsSolutions-AS3",
            "whom to tell is the account's business; scaling events are in the group's activity "
            "history, and in EventBridge without any setting",
        )

    def _launch_template(self, settings: Settings, props: HostGroupProps) -> ec2.LaunchTemplate:
        return ec2.LaunchTemplate(
            self,
            "Template",
            instance_type=ec2.InstanceType(props.instance_type),
            machine_image=props.image,
            # The role is whole as it is: nothing may add a policy that comes into force after the first boot.
            role=props.role.without_policy_updates(),
            security_group=props.security_group,
            user_data=ec2.UserData.custom(self._user_data(settings, props)),
            http_tokens=ec2.LaunchTemplateHttpTokens.REQUIRED,
            http_put_response_hop_limit=1,
            require_imdsv2=True,
            instance_metadata_tags=False,
            detailed_monitoring=True,
            ebs_optimized=True,
            block_devices=[
                ec2.BlockDevice(
                    device_name=ROOT_DEVICE,
                    volume=ec2.BlockDeviceVolume.ebs(
                        settings.fleet.root_volume_gib,
                        volume_type=ec2.EbsDeviceVolumeType.GP3,
                        encrypted=True,
                        delete_on_termination=True,
                    ),
                )
            ],
        )

    def _user_data(self, settings: Settings, props: HostGroupProps) -> str:
        node = {
            "version": 1,
            "environment": settings.environment,
            "region": cdk.Aws.REGION,
            "signal": {"stack": cdk.Aws.STACK_NAME, "logical_id": props.logical_id},
            "engine": settings.engine.model_dump(),
            "serve": {
                "keep_alive_s": settings.edge.keep_alive_s,
                "request_timeout_s": settings.edge.request_timeout_s,
            },
            "numactl_from": settings.fleet.numactl_from,
            **props.node,
        }
        # Tokens are plain strings here, so what a host will refuse is refused at synth, except a token's
        # value.
        NodeConfig.model_validate({**node, "artifact": {**node["artifact"], "digest": "0" * 64}})
        return render(
            {
                "REGION": cdk.Aws.REGION,
                "URL_SUFFIX": cdk.Aws.URL_SUFFIX,
                "STACK_NAME": cdk.Aws.STACK_NAME,
                "LOGICAL_ID": props.logical_id,
                "NODE_CONFIG": json.dumps(node, sort_keys=True),
                "BUNDLE_BUCKET": props.bundle.s3_bucket_name,
                "BUNDLE_KEY": props.bundle.s3_object_key,
                "BUNDLE_SHA256": props.bundle_sha256,
                "VENV": get_profile(settings.engine.profile).venv,
            }
        )
