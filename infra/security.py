"""Security groups of the hosts: the ports of ``app.node.ports``, between the hosts that use them."""

from __future__ import annotations

from aws_cdk import aws_ec2 as ec2
from constructs import Construct

from app.node.ports import PortRange, cluster_ingress
from infra.settings import Settings


class HostSecurity(Construct):
    """``hosts`` is the group of cells or workers; ``head`` exists in the cluster topology only.

    Nothing is open between cells: each is a Ray cluster of its own. Nothing is open from outside either; the
    load balancer's construct opens the HTTP port from its own group.
    """

    def __init__(self, scope: Construct, construct_id: str, vpc: ec2.IVpc, settings: Settings) -> None:
        super().__init__(scope, construct_id)
        self.hosts = ec2.SecurityGroup(
            self, "Hosts", vpc=vpc, description="Hosts that run engine replicas", allow_all_outbound=False
        )
        self.head: ec2.SecurityGroup | None = None
        if settings.fleet.topology == "cluster":
            self.head = ec2.SecurityGroup(
                self,
                "Head",
                vpc=vpc,
                description="The head host of the Ray cluster",
                allow_all_outbound=False,
            )
            for ports in cluster_ingress():
                self._open(self.head, ports)

    @property
    def groups(self) -> list[ec2.SecurityGroup]:
        return [self.hosts] if self.head is None else [self.hosts, self.head]

    def _open(self, head: ec2.SecurityGroup, ports: PortRange) -> None:
        port = ec2.Port.tcp_range(ports.first, ports.last)
        head.connections.allow_from(self.hosts, port, f"{ports.purpose}: from workers")
        if ports.listener == "any":
            self.hosts.connections.allow_from(head, port, f"{ports.purpose}: from the head")
            self.hosts.connections.allow_internally(port, f"{ports.purpose}: between workers")
