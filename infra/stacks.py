"""Composition only: which constructs an environment's stacks hold, and what they hand to each other."""

from __future__ import annotations

import aws_cdk as cdk
from constructs import Construct

from infra.artifacts import ArtifactStore
from infra.bundle import Bundle
from infra.compile_job import CompileJob
from infra.dashboard import Dashboard
from infra.edge import Edge
from infra.fleet import Fleet, FleetParts
from infra.network import Network
from infra.plan_check import plan_markdown, record_plan, settings_plan
from infra.security import HostSecurity
from infra.settings import Settings
from infra.tags import ENVIRONMENT_TAG


class StoreStack(cdk.Stack):
    """What outlives a fleet: the artifact store."""

    def __init__(self, scope: Construct, construct_id: str, settings: Settings) -> None:
        super().__init__(
            scope,
            construct_id,
            description=f"NeuronFleet {settings.environment}: artifact store",
            termination_protection=settings.operations.retain,
        )
        self.store = ArtifactStore(self, "Artifacts", settings)


class FleetStack(cdk.Stack):
    """Network, hosts and load balancer."""

    def __init__(
        self, scope: Construct, construct_id: str, settings: Settings, store: ArtifactStore, bundle: Bundle
    ) -> None:
        super().__init__(
            scope,
            construct_id,
            description=f"NeuronFleet {settings.environment}: network, hosts, load balancer",
            termination_protection=settings.operations.retain,
        )
        digest = cdk.CfnParameter(
            self,
            "ArtifactDigest",
            type="String",
            description="Manifest digest of the model artifact to serve: 64 hex digits",
            allowed_pattern="[0-9a-f]{64}",
        )
        network = Network(self, "Network", settings)
        security = HostSecurity(self, "Security", network.vpc, settings)
        network.connect_hosts(security.groups)
        edge = Edge(self, "Edge", network, settings, store.import_logs(self))
        fleet = Fleet(
            self,
            "Fleet",
            settings,
            FleetParts(
                network=network,
                security=security,
                edge=edge,
                artifacts=store.import_artifacts(self),
                artifact_digest=digest.value_as_string,
                bundle=bundle,
            ),
        )
        plan = settings_plan(settings)
        Dashboard(
            self,
            "Dashboard",
            name=f"neuronfleet-{settings.environment}",
            plan=plan_markdown(plan),
            edge=edge,
            fleet=fleet,
        )
        record_plan(self, plan)
        _output(self, "Url", edge.url, "Where clients connect")
        _output(
            self, "FleetGroupName", fleet.hosts.group.auto_scaling_group_name, "Auto Scaling group of hosts"
        )
        _output(self, "TargetGroupArn", edge.target_group.target_group_arn, "Target group of hosts")
        if fleet.head is not None:
            _output(self, "HeadGroupName", fleet.head.group.auto_scaling_group_name, "Group of the head host")


class CompileStack(cdk.Stack):
    """The compile job, for environments that ask for it."""

    def __init__(
        self, scope: Construct, construct_id: str, settings: Settings, store: ArtifactStore, bundle: Bundle
    ) -> None:
        super().__init__(scope, construct_id, description=f"NeuronFleet {settings.environment}: compile job")
        job = CompileJob(self, "Job", settings, store.import_artifacts(self), bundle)
        _output(
            self, "CompileDocumentName", job.automation.ref, "SSM Automation document to start a job with"
        )


def add_stacks(app: cdk.App, settings: Settings, bundle: Bundle) -> tuple[StoreStack, FleetStack]:
    """Add an environment's stacks. Account and region stay open: where they go is decided at deploy."""
    name = f"neuronfleet-{settings.environment}"
    store = StoreStack(app, f"{name}-store", settings)
    fleet = FleetStack(app, name, settings, store.store, bundle)
    if settings.compile.compile_job:
        CompileStack(app, f"{name}-compile", settings, store.store, bundle)
    cdk.Tags.of(app).add(ENVIRONMENT_TAG, settings.environment)
    return store, fleet


def _output(stack: cdk.Stack, name: str, value: str, description: str) -> None:
    cdk.CfnOutput(stack, name, value=value, description=description)
