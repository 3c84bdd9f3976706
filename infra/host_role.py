"""What a host may do in AWS: by resource, and all inline, so that the role is whole before a host boots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from constructs import Construct

from infra.nag import acknowledge_wildcards


@dataclass(frozen=True)
class HostAccess:
    """The resources of a host's role. ARNs may be tokens.

    ``reads_blobs`` is false for the head host, which serves no model. ``head_parameter_arn`` and
    ``token_secret_arn`` exist in the cluster topology only.
    """

    group_logical_id: str
    artifact_bucket_arn: str
    bundle_arn: str
    log_group_arn: str
    reads_blobs: bool
    head_parameter_arn: str | None = None
    writes_head_parameter: bool = False
    token_secret_arn: str | None = None


def host_role(scope: Construct, construct_id: str, access: HostAccess) -> iam.Role:
    """The instance role of a host."""
    statements = [
        *_store(access),
        _allow("Signal", ["cloudformation:SignalResource"], [cdk.Aws.STACK_ID]),
        _allow("MarkUnhealthy", ["autoscaling:SetInstanceHealth"], [_group_arn(access.group_logical_id)]),
        _allow("ReadTargetHealth", ["elasticloadbalancing:DescribeTargetHealth"], ["*"]),
        _allow(
            "Sessions",
            [
                "ssm:UpdateInstanceInformation",
                "ssmmessages:CreateControlChannel",
                "ssmmessages:CreateDataChannel",
                "ssmmessages:OpenControlChannel",
                "ssmmessages:OpenDataChannel",
            ],
            ["*"],
        ),
        _allow("WriteLogs", ["logs:CreateLogStream", "logs:PutLogEvents"], [access.log_group_arn]),
        *_cluster(access),
    ]
    role = iam.Role(
        scope,
        construct_id,
        assumed_by=iam.ServicePrincipal("ec2.amazonaws.com"),
        description="Instance role of NeuronFleet hosts",
        inline_policies={"host": iam.PolicyDocument(statements=statements)},
    )
    objects = "objects of one kind in one bucket; which of them a host reads, the artifact's digest decides"
    acknowledge_wildcards(
        role,
        dict.fromkeys(_object_arns(access), objects)
        | {
            _group_arn(
                access.group_logical_id
            ): "this stack's group: CloudFormation chooses the end of its name after this role exists",
            "*": "DescribeTargetHealth, UpdateInstanceInformation and Session Manager's channels have "
            "no resource to name",
        },
    )
    return role


def _object_arns(access: HostAccess) -> list[str]:
    bucket = access.artifact_bucket_arn
    return [f"{bucket}/manifests/*", *([f"{bucket}/blobs/*"] if access.reads_blobs else [])]


def _store(access: HostAccess) -> Sequence[iam.PolicyStatement]:
    return (
        _allow("ReadArtifacts", ["s3:GetObject"], _object_arns(access)),
        # Without it S3 answers 403 for an object that does not exist, and a wrong digest looks like a wrong
        # role.
        _allow("TellMissingFromForbidden", ["s3:ListBucket"], [access.artifact_bucket_arn]),
        _allow("ReadBundle", ["s3:GetObject"], [access.bundle_arn]),
    )


def _cluster(access: HostAccess) -> Sequence[iam.PolicyStatement]:
    statements = []
    if access.head_parameter_arn is not None:
        actions = ["ssm:GetParameter", *(["ssm:PutParameter"] if access.writes_head_parameter else [])]
        statements.append(_allow("HeadAddress", actions, [access.head_parameter_arn]))
    if access.token_secret_arn is not None:
        statements.append(_allow("RayToken", ["secretsmanager:GetSecretValue"], [access.token_secret_arn]))
    return statements


def _allow(sid: str, actions: list[str], resources: list[str]) -> iam.PolicyStatement:
    return iam.PolicyStatement(sid=sid, actions=actions, resources=resources)


def _group_arn(logical_id: str) -> str:
    """The Auto Scaling group by the name that CloudFormation will give it: <stack>-<logical id>-<suffix>."""
    return cdk.Fn.sub(
        "arn:${AWS::Partition}:autoscaling:${AWS::Region}:${AWS::AccountId}:autoScalingGroup:*:"
        f"autoScalingGroupName/${{AWS::StackName}}-{logical_id}-*"
    )
