"""The fleet: cells, or a cluster's workers and the head host that they follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aws_cdk import aws_s3 as s3
from aws_cdk import aws_s3_assets as assets
from constructs import Construct

from infra.bundle import Bundle
from infra.edge import Edge
from infra.head import HeadRendezvous
from infra.host_group import HostGroup, HostGroupProps
from infra.host_role import HostAccess, host_role
from infra.image import machine_image
from infra.network import Network
from infra.retention import log_group
from infra.security import HostSecurity
from infra.settings import Settings

FLEET_LOGICAL_ID = "FleetGroup"
HEAD_LOGICAL_ID = "HeadGroup"


@dataclass(frozen=True)
class FleetParts:
    """What the fleet stands in and is connected to; ``artifact_digest`` is a CloudFormation parameter."""

    network: Network
    security: HostSecurity
    edge: Edge
    artifacts: s3.IBucket
    artifact_digest: str
    bundle: Bundle


class Fleet(Construct):
    """``hosts`` runs engine replicas; ``head`` is the cluster topology's only, and ``hosts`` waits for it."""

    def __init__(self, scope: Construct, construct_id: str, settings: Settings, parts: FleetParts) -> None:
        super().__init__(scope, construct_id)
        self._settings, self._parts = settings, parts
        self._asset = assets.Asset(self, "Bundle", path=str(parts.bundle.path))
        self._bundle_arn = f"{self._asset.bucket.bucket_arn}/{self._asset.s3_object_key}"
        self._logs = log_group(self, "HostLogs", settings.operations)
        self._image = machine_image(settings)
        parts.network.allow_s3_reads(
            parts.artifacts.arn_for_objects("manifests/*"),
            parts.artifacts.arn_for_objects("blobs/*"),
            self._bundle_arn,
        )
        parts.network.allow_s3_listing(parts.artifacts.bucket_arn)

        rendezvous = None
        self.head: HostGroup | None = None
        if settings.fleet.topology == "cluster":
            rendezvous = HeadRendezvous(self, "Rendezvous", settings)
            self.head = self._head(rendezvous)
        self.hosts = self._hosts(rendezvous)

    def _hosts(self, rendezvous: HeadRendezvous | None) -> HostGroup:
        parts, fleet = self._parts, self._settings.fleet
        node = self._node("cell" if rendezvous is None else "worker", rendezvous)
        # Without a listener a target group checks nobody, and a host would wait for its health in vain.
        after = [parts.edge.listener, *([self.head.group] if self.head else [])]
        hosts = HostGroup(
            self,
            "Hosts",
            parts.network.vpc,
            self._settings,
            HostGroupProps(
                logical_id=FLEET_LOGICAL_ID,
                instance_type=fleet.instance_type,
                minimum=fleet.desired_capacity,
                maximum=fleet.max_capacity,
                role=host_role(self, "HostRole", self._access(FLEET_LOGICAL_ID, rendezvous)),
                security_group=parts.security.hosts,
                subnets=parts.network.host_subnets,
                image=self._image,
                bundle=self._asset,
                bundle_sha256=parts.bundle.sha256,
                node={**node, "target_group_arn": parts.edge.target_group.target_group_arn},
                checks_target=True,
                after=[*parts.network.ready, parts.security, *after],
            ),
        )
        hosts.group.attach_to_application_target_group(parts.edge.target_group)
        return hosts

    def _head(self, rendezvous: HeadRendezvous) -> HostGroup:
        parts, fleet = self._parts, self._settings.fleet
        if parts.security.head is None or fleet.head_instance_type is None:
            raise ValueError("a cluster needs a head's security group and instance type")
        return HostGroup(
            self,
            "Head",
            parts.network.vpc,
            self._settings,
            HostGroupProps(
                logical_id=HEAD_LOGICAL_ID,
                instance_type=fleet.head_instance_type,
                minimum=1,
                maximum=1,
                role=host_role(self, "HeadRole", self._access(HEAD_LOGICAL_ID, rendezvous)),
                security_group=parts.security.head,
                subnets=parts.network.host_subnets,
                image=self._image,
                bundle=self._asset,
                bundle_sha256=parts.bundle.sha256,
                node=self._node("head", rendezvous),
                after=[*parts.network.ready, parts.security],
            ),
        )

    def _node(self, role: str, rendezvous: HeadRendezvous | None) -> dict[str, Any]:
        node: dict[str, Any] = {
            "role": role,
            "artifact": {
                "bucket": self._parts.artifacts.bucket_name,
                "digest": self._parts.artifact_digest,
            },
            "log_group": self._logs.log_group_name,
        }
        return node if rendezvous is None else {**node, "cluster": rendezvous.node_config()}

    def _access(self, logical_id: str, rendezvous: HeadRendezvous | None) -> HostAccess:
        head = logical_id == HEAD_LOGICAL_ID
        return HostAccess(
            group_logical_id=logical_id,
            artifact_bucket_arn=self._parts.artifacts.bucket_arn,
            bundle_arn=self._bundle_arn,
            log_group_arn=self._logs.log_group_arn,
            reads_blobs=not head,
            head_parameter_arn=rendezvous.parameter.parameter_arn if rendezvous else None,
            writes_head_parameter=head,
            token_secret_arn=rendezvous.token.secret_arn if rendezvous else None,
        )
