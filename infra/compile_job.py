"""The compile job: an SSM Automation that launches one instance, compiles on it, and ends it.

Nothing runs and nothing but storage costs between jobs: the network is one public subnet without an ingress
rule and without NAT. The instance ends by any of three ways, and its shutdown is its termination: the
automation's last step (after success, failure and cancellation), the command's own exit, and a timer that is
armed before anything else on the host. Not yet run in an AWS account.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import cast

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from aws_cdk import aws_s3 as s3
from aws_cdk import aws_s3_assets as assets
from aws_cdk import aws_ssm as ssm
from constructs import Construct

from app.plan.catalogue import get_instance
from app.plan.profiles import get_profile
from infra.bundle import Bundle
from infra.compile_document import JOB_TAG, automation_document, command_document, user_data
from infra.compile_limit import job_instance, limit_minutes
from infra.host_group import ROOT_DEVICE
from infra.image import machine_image
from infra.nag import acknowledge, acknowledge_wildcards
from infra.retention import log_group
from infra.settings import Settings

_CIDR = "10.29.0.0/24"  # routed to nothing of ours
_AGENT = (
    "ssm:UpdateInstanceInformation",
    "ssmmessages:CreateControlChannel",
    "ssmmessages:CreateDataChannel",
    "ssmmessages:OpenControlChannel",
    "ssmmessages:OpenDataChannel",
    "logs:DescribeLogGroups",
)
_READS = (
    "ec2:DescribeInstances",
    "ec2:DescribeInstanceStatus",
    "ssm:DescribeInstanceInformation",
    "ssm:ListCommands",
    "ssm:ListCommandInvocations",
)


class CompileJob(Construct):
    """``automation`` is the document that people start."""

    def __init__(
        self, scope: Construct, construct_id: str, settings: Settings, artifacts: s3.IBucket, bundle: Bundle
    ) -> None:
        super().__init__(scope, construct_id)
        self._settings = settings
        limits, engine = settings.compile, settings.engine
        self._instance = job_instance(limits.compile_instance_type, engine.tp_degree)
        limit_s = 60 * limit_minutes(self._instance, limits.compile_minutes, limits.compile_usd)
        cores = get_instance(self._instance).cores
        degrees = [degree for degree in get_profile(engine.profile).tp_degrees if degree <= cores]
        asset = assets.Asset(self, "Bundle", path=str(bundle.path))
        logs = log_group(self, "Logs", settings.operations)
        vpc = self._network()
        host_role = self._host_role(artifacts, asset, logs.log_group_arn)
        group = ec2.SecurityGroup(
            self, "Host", vpc=vpc, description="Compile host: no way in", allow_all_outbound=False
        )
        group.add_egress_rule(ec2.Peer.any_ipv4(), ec2.Port.tcp(443), "AWS APIs and S3 over HTTPS")
        subnet = vpc.public_subnets[0]
        template = self._launch_template(host_role, group, subnet, asset, bundle.sha256, limit_s)
        command = ssm.CfnDocument(
            self,
            "Command",
            document_type="Command",
            document_format="JSON",
            update_method="NewVersion",
            target_type="/AWS::EC2::Instance",
            content=command_document(cdk.Aws.REGION, artifacts.bucket_name, engine.profile, limit_s, degrees),
        )
        role = self._automation_role(template, host_role, group, subnet, command)
        self.automation = ssm.CfnDocument(
            self,
            "Automation",
            document_type="Automation",
            document_format="JSON",
            update_method="NewVersion",
            content=automation_document(
                role_arn=role.role_arn,
                launch_template_id=_text(template.launch_template_id),
                launch_template_version=template.latest_version_number,
                command=command.ref,
                log_group=logs.log_group_name,
                limit_s=limit_s,
                usd=limits.compile_usd,
                environment=settings.environment,
                degrees=degrees,
            ),
        )

    def _network(self) -> ec2.Vpc:
        zones = self._settings.network.zones
        vpc = ec2.Vpc(
            self,
            "Vpc",
            ip_addresses=ec2.IpAddresses.cidr(_CIDR),
            subnet_configuration=[
                ec2.SubnetConfiguration(
                    name="compile",
                    subnet_type=ec2.SubnetType.PUBLIC,
                    cidr_mask=26,
                    map_public_ip_on_launch=False,
                )
            ],
            nat_gateways=0,
            restrict_default_security_group=False,
            **({"availability_zones": [zones[0]]} if zones else {"max_azs": 1}),
        )
        vpc.add_gateway_endpoint("S3", service=ec2.GatewayVpcEndpointAwsService.S3)
        acknowledge(
            vpc,
            "AwsSolutions-VPC7",
            "one instance, for an hour, that nothing can reach; what it did is in the job's log group",
        )
        if zones:
            for child in vpc.node.find_all():
                if isinstance(child, ec2.CfnSubnet):
                    child.add_metadata("cfn-lint", {"config": {"ignore_checks": ["W3010"]}})
        return vpc

    def _host_role(self, artifacts: s3.IBucket, asset: assets.Asset, log_arn: str) -> iam.Role:
        """Reads models, adds artifacts, removes nothing."""
        objects = [f"{artifacts.bucket_arn}/{kind}/*" for kind in ("manifests", "blobs")]
        bundle = asset.bucket.arn_for_objects(asset.s3_object_key)
        role = self._role(
            "HostRole",
            iam.ServicePrincipal("ec2.amazonaws.com"),
            "The compile job's host",
            [
                _allow("Models", ["s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"], objects),
                _allow("List", ["s3:ListBucket"], [artifacts.bucket_arn]),
                _allow("Bundle", ["s3:GetObject"], [bundle]),
                _allow("Agent", [*_AGENT], ["*"]),
                _allow(
                    "Logs",
                    ["logs:CreateLogStream", "logs:PutLogEvents", "logs:DescribeLogStreams"],
                    [log_arn],
                ),
            ],
        )
        acknowledge_wildcards(
            role,
            dict.fromkeys(objects, "objects of one kind in one bucket, named by their digests")
            | {"*": "the agent's channels and DescribeLogGroups have no resource to name"},
        )
        return role

    def _launch_template(
        self,
        role: iam.Role,
        group: ec2.SecurityGroup,
        subnet: ec2.ISubnet,
        asset: assets.Asset,
        sha256: str,
        limit_s: int,
    ) -> ec2.LaunchTemplate:
        settings = self._settings
        script = user_data(
            {
                "REGION": cdk.Aws.REGION,
                "URL_SUFFIX": cdk.Aws.URL_SUFFIX,
                "LIMIT_S": str(limit_s),
                "NODE_CONFIG": json.dumps({"engine": {"profile": settings.engine.profile}}),
                "BUNDLE_BUCKET": asset.s3_bucket_name,
                "BUNDLE_KEY": asset.s3_object_key,
                "BUNDLE_SHA256": sha256,
                "VENV": get_profile(settings.engine.profile).venv,
            }
        )
        template = ec2.LaunchTemplate(
            self,
            "Template",
            instance_type=ec2.InstanceType(self._instance),
            machine_image=machine_image(settings),
            role=role.without_policy_updates(),
            security_group=group,
            associate_public_ip_address=True,
            instance_initiated_shutdown_behavior=ec2.InstanceInitiatedShutdownBehavior.TERMINATE,
            user_data=ec2.UserData.custom(script),
            http_tokens=ec2.LaunchTemplateHttpTokens.REQUIRED,
            http_put_response_hop_limit=1,
            require_imdsv2=True,
            instance_metadata_tags=False,
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
        cdk.Tags.of(template).add("Name", f"neuronfleet-{settings.environment}-compile")
        cdk.Tags.of(template).add(JOB_TAG, settings.environment)
        cast(ec2.CfnLaunchTemplate, template.node.default_child).add_property_override(
            "LaunchTemplateData.NetworkInterfaces.0.SubnetId", subnet.subnet_id
        )
        return template

    def _automation_role(
        self,
        template: ec2.LaunchTemplate,
        host_role: iam.Role,
        group: ec2.SecurityGroup,
        subnet: ec2.ISubnet,
        command: ssm.CfnDocument,
    ) -> iam.Role:
        """Launches from this template alone, and ends and commands only what bears the job's tag."""
        stack, tag = cdk.Stack.of(self), self._settings.environment

        def ec2_arn(kind: str, name: str, account: str | None = None) -> str:
            return stack.format_arn(service="ec2", resource=kind, resource_name=name, account=account)

        launched = [ec2_arn(kind, "*") for kind in ("instance", "volume", "network-interface")]
        instances, image = launched[0], ec2_arn("image", "*", account="")
        used = ec2_arn("launch-template", _text(template.launch_template_id))
        fixed = [
            used,
            ec2_arn("subnet", subnet.subnet_id),
            ec2_arn("security-group", group.security_group_id),
        ]
        from_template = {"ArnEquals": {"ec2:LaunchTemplate": used}}
        role = self._role(
            "AutomationRole",
            iam.ServicePrincipal(
                "ssm.amazonaws.com", conditions={"StringEquals": {"aws:SourceAccount": cdk.Aws.ACCOUNT_ID}}
            ),
            "The compile job's automation",
            [
                _allow("Launch", ["ec2:RunInstances"], [*launched, image, *fixed], from_template),
                _allow(
                    "Tag",
                    ["ec2:CreateTags"],
                    launched,
                    {"StringEquals": {"ec2:CreateAction": "RunInstances"}},
                ),
                _allow(
                    "PassHostRole",
                    ["iam:PassRole"],
                    [host_role.role_arn],
                    {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}},
                ),
                _allow(
                    "End",
                    ["ec2:TerminateInstances"],
                    [instances],
                    {"StringEquals": {f"ec2:ResourceTag/{JOB_TAG}": tag}},
                ),
                _allow(
                    "Command",
                    ["ssm:SendCommand"],
                    [stack.format_arn(service="ssm", resource="document", resource_name=command.ref)],
                ),
                _allow(
                    "CommandHosts",
                    ["ssm:SendCommand"],
                    [instances],
                    {"StringEquals": {f"ssm:resourceTag/{JOB_TAG}": tag}},
                ),
                _allow("Look", [*_READS], ["*"]),
            ],
        )
        reason = "resources that do not exist before the launch; conditions hold them to this template or tag"
        acknowledge_wildcards(
            role,
            {
                **dict.fromkeys(launched, reason),
                image: "public images; the launch template, which the condition names, says which",
                "*": "these reads have no resource to name",
            },
        )
        return role

    def _role(
        self,
        construct_id: str,
        principal: iam.IPrincipal,
        description: str,
        statements: Sequence[iam.PolicyStatement],
    ) -> iam.Role:
        return iam.Role(
            self,
            construct_id,
            assumed_by=principal,
            description=f"{description} ({self._settings.environment})",
            inline_policies={"job": iam.PolicyDocument(statements=[*statements])},
        )


def _allow(
    sid: str, actions: list[str], resources: list[str], conditions: dict[str, dict[str, str]] | None = None
) -> iam.PolicyStatement:
    return iam.PolicyStatement(sid=sid, actions=actions, resources=resources, conditions=conditions)


def _text(value: str | None) -> str:
    assert value is not None
    return value
