"""Log groups, and what outlives the stack: both as the environment's operations settings say."""

from __future__ import annotations

from typing import cast

import aws_cdk as cdk
from aws_cdk import aws_logs as logs
from constructs import Construct

from infra.settings import OperationsSettings


def removal_policy(operations: OperationsSettings) -> cdk.RemovalPolicy:
    """Whether a resource that holds data outlives its stack."""
    return cdk.RemovalPolicy.RETAIN if operations.retain else cdk.RemovalPolicy.DESTROY


def log_group(scope: Construct, construct_id: str, operations: OperationsSettings) -> logs.LogGroup:
    """A log group with the environment's retention; its name is CloudFormation's, so that a kept one is no
    obstacle to the next deploy."""
    group = logs.LogGroup(
        scope, construct_id, retention=logs.RetentionDays.INFINITE, removal_policy=removal_policy(operations)
    )
    cast(logs.CfnLogGroup, group.node.default_child).retention_in_days = operations.log_retention_days
    return group
