"""The artifact store: model artifacts by digest, and the bucket that access logs go to."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from aws_cdk import aws_s3 as s3
from constructs import Construct

from infra.nag import acknowledge
from infra.retention import removal_policy
from infra.settings import Settings

ALB_LOG_PREFIX = "load-balancer"


class ArtifactStore(Construct):
    """A bucket: encrypted, TLS only, versioned, private. ``logs`` is None where access logs are off.

    A fleet that runs on this bucket's artifacts must not lose it, so another stack imports it by export,
    which CloudFormation refuses to remove while it is in use.
    """

    def __init__(self, scope: Construct, construct_id: str, settings: Settings) -> None:
        super().__init__(scope, construct_id)
        operations = settings.operations
        self.logs = self._log_bucket(settings) if settings.edge.access_logs else None
        self.bucket = s3.Bucket(
            self,
            "Bucket",
            encryption=s3.BucketEncryption.S3_MANAGED,
            block_public_access=s3.BlockPublicAccess.BLOCK_ALL,
            object_ownership=s3.ObjectOwnership.BUCKET_OWNER_ENFORCED,
            enforce_ssl=True,
            minimum_tls_version=1.2,
            versioned=True,
            removal_policy=removal_policy(operations),
            server_access_logs_bucket=self.logs,
            server_access_logs_prefix="artifacts/" if self.logs else None,
            lifecycle_rules=[
                s3.LifecycleRule(
                    id="parts-and-old-versions",
                    abort_incomplete_multipart_upload_after=cdk.Duration.days(2),
                    noncurrent_version_expiration=cdk.Duration.days(90),
                )
            ],
        )
        self._export("ArtifactBucketName", self.bucket, "Where artifacts are published to")
        if self.logs is None:
            acknowledge(
                self.bucket,
                "AwsSolutions-S1",
                "access logs are a setting (edge.access_logs); this environment leaves them out to keep "
                "its bill small",
            )

    def _log_bucket(self, settings: Settings) -> s3.Bucket:
        bucket = s3.Bucket(
            self,
            "Logs",
            encryption=s3.BucketEncryption.S3_MANAGED,
            block_public_access=s3.BlockPublicAccess.BLOCK_ALL,
            object_ownership=s3.ObjectOwnership.BUCKET_OWNER_ENFORCED,
            enforce_ssl=True,
            minimum_tls_version=1.2,
            removal_policy=removal_policy(settings.operations),
            lifecycle_rules=[
                s3.LifecycleRule(
                    id="retention",
                    expiration=cdk.Duration.days(settings.operations.log_retention_days),
                    abort_incomplete_multipart_upload_after=cdk.Duration.days(2),
                )
            ],
        )
        bucket.add_to_resource_policy(
            iam.PolicyStatement(
                sid="LoadBalancerLogs",
                principals=[iam.ServicePrincipal("logdelivery.elasticloadbalancing.amazonaws.com")],
                actions=["s3:PutObject"],
                resources=[bucket.arn_for_objects(f"{ALB_LOG_PREFIX}/AWSLogs/{cdk.Aws.ACCOUNT_ID}/*")],
            )
        )
        self._export("LogBucketName", bucket, "Where access logs go")
        acknowledge(bucket, "AwsSolutions-S1", "this is the bucket that access logs go to")
        return bucket

    def _export(self, output: str, bucket: s3.Bucket, description: str) -> None:
        stack = cdk.Stack.of(self)
        cdk.CfnOutput(
            stack,
            output,
            value=bucket.bucket_name,
            description=description,
            export_name=f"{stack.stack_name}-{output}",
        )

    def import_artifacts(self, scope: Construct) -> s3.IBucket:
        """The artifact bucket, as another stack sees it."""
        return self._import(scope, "ArtifactBucketName")

    def import_logs(self, scope: Construct) -> s3.IBucket | None:
        """The bucket of access logs as another stack sees it, or None."""
        return None if self.logs is None else self._import(scope, "LogBucketName")

    def _import(self, scope: Construct, output: str) -> s3.IBucket:
        name = cdk.Fn.import_value(f"{cdk.Stack.of(self).stack_name}-{output}")
        cdk.Stack.of(scope).add_stack_dependency(cdk.Stack.of(self))
        return s3.Bucket.from_bucket_name(scope, f"{output}Import", name)
