"""One dashboard an environment: what the plan predicts beside what load balancer and group measure."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_cloudwatch as cw
from aws_cdk import aws_elasticloadbalancingv2 as elb
from constructs import Construct

from infra.edge import Edge
from infra.fleet import Fleet


class Dashboard(Construct):
    """The plan's figures as text, then requests, errors, response time and hosts as the ALB sees them."""

    def __init__(
        self, scope: Construct, construct_id: str, *, name: str, plan: str, edge: Edge, fleet: Fleet
    ) -> None:
        """``plan`` is Markdown: predicted TTFT, TPOT, tokens per second with their ranges."""
        super().__init__(scope, construct_id)
        balancer, targets = edge.load_balancer.metrics, edge.target_group.metrics
        minute = cdk.Duration.minutes(1)
        board = cw.Dashboard(self, "Dashboard", dashboard_name=name)
        board.add_widgets(
            cw.TextWidget(markdown=plan, width=8, height=7),
            cw.GraphWidget(
                title="Requests and refusals a minute",
                width=8,
                height=7,
                left=[
                    balancer.request_count(period=minute),
                    balancer.http_code_target(elb.HttpCodeTarget.TARGET_4XX_COUNT, period=minute),
                    balancer.http_code_target(elb.HttpCodeTarget.TARGET_5XX_COUNT, period=minute),
                ],
            ),
            cw.GraphWidget(
                title="Time to the first byte of an answer, seconds",
                width=8,
                height=7,
                left=[
                    targets.target_response_time(period=minute, statistic="p50"),
                    targets.target_response_time(period=minute, statistic="p99"),
                ],
            ),
        )
        board.add_widgets(
            cw.GraphWidget(
                title="Hosts: a token came out lately, or not",
                width=12,
                left=[
                    targets.healthy_host_count(period=minute),
                    targets.unhealthy_host_count(period=minute),
                ],
            ),
            cw.GraphWidget(
                title="Hosts in service",
                width=12,
                left=[
                    cw.Metric(
                        namespace="AWS/AutoScaling",
                        metric_name="GroupInServiceInstances",
                        dimensions_map={"AutoScalingGroupName": fleet.hosts.group.auto_scaling_group_name},
                        statistic="Average",
                        period=minute,
                    )
                ],
            ),
        )
