"""The VPC: subnets for hosts and load balancer, and how hosts reach AWS.

Two zones always, since a load balancer needs two; hosts use the first ``host_zones`` of them. With
``egress = "nat"`` hosts leave through one NAT gateway. With ``"none"`` there is no route out at all: S3 has a
gateway endpoint and every other API that boot calls has an interface endpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from constructs import Construct, IDependable

from infra.nag import acknowledge
from infra.retention import log_group
from infra.settings import Settings

HOST_SUBNETS = "host"
EDGE_SUBNETS = "public"

_AwsService = ec2.InterfaceVpcEndpointAwsService

# What a host calls from user data on, and why: each has an interface endpoint where there is no other way
# out. EC2's own API is not among them (a host learns about itself from its metadata service), nor STS
# (credentials come from there too), nor ec2messages (the SSM agent has used ssmmessages alone since
# 3.3.40).
BOOT_SERVICES: dict[str, ec2.InterfaceVpcEndpointAwsService] = {
    "cloudformation": _AwsService.CLOUDFORMATION,  # SignalResource
    "autoscaling": _AwsService.AUTOSCALING,  # SetInstanceHealth
    "elasticloadbalancing": _AwsService.ELASTIC_LOAD_BALANCING,  # DescribeTargetHealth
    "ssm": _AwsService.SSM,  # the agent; the head's address
    "ssmmessages": _AwsService.SSM_MESSAGES,  # sessions: the way in, there is no SSH
    "logs": _AwsService.CLOUDWATCH_LOGS,  # the hosts' log group
}
CLUSTER_SERVICES: dict[str, ec2.InterfaceVpcEndpointAwsService] = {
    "secretsmanager": _AwsService.SECRETS_MANAGER,  # Ray's token
}


class Network(Construct):
    """VPC, subnets, endpoints, flow logs.

    ``host_subnets`` are where hosts run, ``edge_subnets`` where the load balancer is. ``ready`` is what must
    exist before a host boots: a host that starts before its way to the APIs cannot even report that it
    failed.
    """

    def __init__(self, scope: Construct, construct_id: str, settings: Settings) -> None:
        super().__init__(scope, construct_id)
        self._settings = settings
        network, facing_out = settings.network, settings.edge.scheme == "internet-facing"
        nat = network.egress == "nat"

        subnets = [
            ec2.SubnetConfiguration(
                name=HOST_SUBNETS,
                subnet_type=ec2.SubnetType.PRIVATE_WITH_EGRESS if nat else ec2.SubnetType.PRIVATE_ISOLATED,
                cidr_mask=24,
            )
        ]
        if nat or facing_out:
            subnets.append(
                ec2.SubnetConfiguration(
                    name=EDGE_SUBNETS,
                    subnet_type=ec2.SubnetType.PUBLIC,
                    cidr_mask=26,
                    map_public_ip_on_launch=False,
                )
            )
        self.vpc = ec2.Vpc(
            self,
            "Vpc",
            ip_addresses=ec2.IpAddresses.cidr(network.vpc_cidr),
            subnet_configuration=subnets,
            nat_gateways=1 if nat else 0,
            # Emptying the default security group takes a Lambda with EC2 permissions in the account.
            # Nothing is ever put into that group, so the function would be the larger risk of the two.
            restrict_default_security_group=False,
            **({"availability_zones": list(network.zones)} if network.zones else {"max_azs": 2}),
        )
        if network.zones:
            self._name_zones_on_purpose()
        hosts = self.vpc.select_subnets(subnet_group_name=HOST_SUBNETS)
        self.host_subnets: Sequence[ec2.ISubnet] = hosts.subnets[: network.host_zones]
        self.edge_subnets: Sequence[ec2.ISubnet] = (
            self.vpc.select_subnets(subnet_group_name=EDGE_SUBNETS).subnets if facing_out else hosts.subnets
        )
        self.ready: list[IDependable] = [subnet.internet_connectivity_established for subnet in hosts.subnets]

        self.s3 = self.vpc.add_gateway_endpoint("S3", service=ec2.GatewayVpcEndpointAwsService.S3)
        self.ready.append(self.s3)

        if network.flow_logs:
            self._add_flow_logs()
        else:
            acknowledge(
                self.vpc,
                "AwsSolutions-VPC7",
                "flow logs are a setting (network.flow_logs); this environment leaves them out to keep "
                "its bill small",
            )

    def allow_s3_reads(self, *resources: str) -> None:
        """Let hosts read these object ARNs through the S3 endpoint; what is not listed is refused."""
        self.s3.add_to_policy(
            iam.PolicyStatement(
                principals=[iam.AnyPrincipal()], actions=["s3:GetObject"], resources=[*resources]
            )
        )

    def allow_s3_listing(self, bucket_arn: str) -> None:
        """Let hosts tell a missing object from a forbidden one in this bucket."""
        self.s3.add_to_policy(
            iam.PolicyStatement(
                principals=[iam.AnyPrincipal()], actions=["s3:ListBucket"], resources=[bucket_arn]
            )
        )

    def connect_hosts(self, groups: Sequence[ec2.SecurityGroup]) -> None:
        """Open HTTPS from these hosts' groups to AWS, and make the endpoints where there is no NAT."""
        for group in groups:
            # By address, not by endpoint: the S3 gateway endpoint is reached at S3's public addresses, whose
            # prefix list would take a lookup. Without NAT nothing but the endpoints is routed.
            group.add_egress_rule(ec2.Peer.any_ipv4(), ec2.Port.tcp(443), "AWS APIs and S3 over HTTPS")
            if self._settings.fleet.numactl_from == "mirror":
                group.add_egress_rule(ec2.Peer.any_ipv4(), ec2.Port.tcp(80), "The distribution mirror")
        if self._settings.network.egress == "none":
            self._add_interface_endpoints(groups)

    def _name_zones_on_purpose(self) -> None:
        """Tell cfn-lint that these subnets' zones are written down because not every zone has Inf2."""
        for child in self.vpc.node.find_all():
            if isinstance(child, ec2.CfnSubnet):
                child.add_metadata("cfn-lint", {"config": {"ignore_checks": ["W3010"]}})

    def _add_interface_endpoints(self, groups: Sequence[ec2.SecurityGroup]) -> None:
        group = ec2.SecurityGroup(
            self,
            "EndpointGroup",
            vpc=self.vpc,
            description="Interface endpoints: HTTPS from hosts",
            allow_all_outbound=False,
        )
        for host_group in groups:
            group.add_ingress_rule(host_group, ec2.Port.tcp(443), "HTTPS from hosts")
        self.ready.append(group)
        services = dict(BOOT_SERVICES)
        if self._settings.fleet.topology == "cluster":
            services |= CLUSTER_SERVICES
        for name, service in services.items():
            endpoint = ec2.InterfaceVpcEndpoint(
                self,
                f"Endpoint-{name}",
                vpc=self.vpc,
                service=service,
                subnets=ec2.SubnetSelection(subnets=list(self.host_subnets)),
                security_groups=[group],
                private_dns_enabled=True,
                open=False,
            )
            self.ready.append(endpoint)

    def _add_flow_logs(self) -> None:
        group = log_group(self, "FlowLogGroup", self._settings.operations)
        self.vpc.add_flow_log(
            "FlowLog",
            destination=ec2.FlowLogDestination.to_cloud_watch_logs(group),
            traffic_type=ec2.FlowLogTrafficType.ALL,
        )
