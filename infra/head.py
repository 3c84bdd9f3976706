"""The head of a cluster: where workers find it, what proves that they belong to it, and its host."""

from __future__ import annotations

from typing import Any

import aws_cdk as cdk
from aws_cdk import aws_secretsmanager as secretsmanager
from aws_cdk import aws_ssm as ssm
from constructs import Construct

from infra.nag import acknowledge
from infra.settings import Settings
from infra.tags import ENVIRONMENT_TAG

ADDRESS_PENDING = "pending"
"""The address parameter's value until a head has written its own."""


class HeadRendezvous(Construct):
    """The SSM parameter that the head writes its address to, and Ray's authentication token."""

    def __init__(self, scope: Construct, construct_id: str, settings: Settings) -> None:
        super().__init__(scope, construct_id)
        self.parameter = ssm.StringParameter(
            self,
            "Address",
            parameter_name=f"/neuronfleet/{settings.environment}/head-address",
            string_value=ADDRESS_PENDING,
            description="Address of the Ray head host, written by that host",
        )
        # AWS::SSM::Parameter takes tags as a map where everything else takes a list, and not every tool
        # that reads templates knows: its name says the environment.
        cdk.Tags.of(self.parameter).remove(ENVIRONMENT_TAG, priority=300)
        self.token = secretsmanager.Secret(
            self,
            "RayToken",
            description="Ray's authentication token, shared by the hosts of this cluster",
            generate_secret_string=secretsmanager.SecretStringGenerator(
                exclude_punctuation=True, include_space=False, password_length=64
            ),
            # A token is worth nothing without its cluster.
            removal_policy=cdk.RemovalPolicy.DESTROY,
        )
        acknowledge(
            self.token,
            "AwsSolutions-SMG4",
            "Ray reads its token once, when a process starts: rotating it under a running cluster would "
            "part its hosts. A new token comes with a new cluster.",
        )

    def node_config(self) -> dict[str, Any]:
        """The node config's table ``cluster``."""
        return {
            "head_address_parameter": self.parameter.parameter_name,
            "auth_token_secret_arn": self.token.secret_arn,
        }
