"""The load balancer, its target group and listeners; readiness decides which hosts get traffic."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_certificatemanager as acm
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_elasticloadbalancingv2 as elb
from aws_cdk import aws_s3 as s3
from constructs import Construct

from app.node.ports import SERVE_PORT
from infra.artifacts import ALB_LOG_PREFIX
from infra.nag import acknowledge
from infra.network import Network
from infra.settings import Settings

READY_PATH = "/readyz"


class Edge(Construct):
    """``target_group`` has the hosts; ``listener`` is what gives it traffic; ``url`` is where clients go."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        network: Network,
        settings: Settings,
        logs: s3.IBucket | None,
    ) -> None:
        super().__init__(scope, construct_id)
        edge = settings.edge
        group = ec2.SecurityGroup(
            self,
            "LoadBalancerGroup",
            vpc=network.vpc,
            description="The load balancer: clients in, hosts out",
            allow_all_outbound=False,
        )
        for cidr in edge.ingress_cidrs:
            for port in (443, 80) if edge.https else (80,):
                group.add_ingress_rule(ec2.Peer.ipv4(cidr), ec2.Port.tcp(port), f"Clients to port {port}")
        if "0.0.0.0/0" in edge.ingress_cidrs:
            acknowledge(
                group,
                "AwsSolutions-EC23",
                "the environment's settings open it to every client, which they may only with HTTPS or "
                "privately",
            )
        self.load_balancer = elb.ApplicationLoadBalancer(
            self,
            "LoadBalancer",
            vpc=network.vpc,
            vpc_subnets=ec2.SubnetSelection(subnets=list(network.edge_subnets)),
            internet_facing=edge.scheme == "internet-facing",
            security_group=group,
            idle_timeout=cdk.Duration.seconds(edge.idle_timeout_s),
            drop_invalid_header_fields=True,
        )
        self._access_logs(logs)
        self.target_group = elb.ApplicationTargetGroup(
            self,
            "Hosts",
            vpc=network.vpc,
            target_type=elb.TargetType.INSTANCE,
            protocol=elb.ApplicationProtocol.HTTP,
            port=SERVE_PORT,
            deregistration_delay=cdk.Duration.seconds(edge.deregistration_delay_s),
            # Requests differ in length by orders of magnitude: counting them says less than what is open.
            load_balancing_algorithm_type=elb.TargetGroupLoadBalancingAlgorithmType.LEAST_OUTSTANDING_REQUESTS,
            health_check=elb.HealthCheck(
                path=READY_PATH,
                protocol=elb.Protocol.HTTP,
                healthy_http_codes="200",
                interval=cdk.Duration.seconds(10),
                timeout=cdk.Duration.seconds(5),
                healthy_threshold_count=2,
                unhealthy_threshold_count=3,
            ),
        )
        self.listener = self._listener(settings)
        host = edge.domain_name or self.load_balancer.load_balancer_dns_name
        self.url = f"{'https' if edge.https else 'http'}://{host}"

    def _listener(self, settings: Settings) -> elb.ApplicationListener:
        if not settings.edge.https:
            return self.load_balancer.add_listener(
                "Http",
                port=80,
                protocol=elb.ApplicationProtocol.HTTP,
                open=False,
                default_target_groups=[self.target_group],
            )
        self.load_balancer.add_listener(
            "Redirect",
            port=80,
            protocol=elb.ApplicationProtocol.HTTP,
            open=False,
            default_action=elb.ListenerAction.redirect(protocol="HTTPS", port="443", permanent=True),
        )
        return self.load_balancer.add_listener(
            "Https",
            port=443,
            protocol=elb.ApplicationProtocol.HTTPS,
            open=False,
            certificates=[self._certificate(settings)],
            ssl_policy=elb.SslPolicy.RECOMMENDED_TLS,
            default_target_groups=[self.target_group],
        )

    def _certificate(self, settings: Settings) -> acm.ICertificate:
        arn = settings.edge.certificate_arn
        if arn is None:
            parameter = cdk.CfnParameter(
                self,
                "CertificateArn",
                type="String",
                description="ARN of the load balancer's ACM certificate, in this stack's region",
                allowed_pattern="arn:[a-z-]+:acm:[a-z0-9-]+:[0-9]{12}:certificate/[A-Za-z0-9-]+",
            )
            parameter.override_logical_id("CertificateArn")
            arn = parameter.value_as_string
        return acm.Certificate.from_certificate_arn(self, "Certificate", arn)

    def _access_logs(self, logs: s3.IBucket | None) -> None:
        if logs is None:
            acknowledge(
                self.load_balancer,
                "AwsSolutions-ELB2",
                "access logs are a setting (edge.access_logs); this environment leaves them out to keep "
                "its bill small",
            )
            return
        # By attribute: log_access_logs() wants to know the region at synth, for the account that wrote such
        # logs before the log delivery service did.
        self.load_balancer.set_attribute("access_logs.s3.enabled", "true")
        self.load_balancer.set_attribute("access_logs.s3.bucket", logs.bucket_name)
        self.load_balancer.set_attribute("access_logs.s3.prefix", ALB_LOG_PREFIX)
