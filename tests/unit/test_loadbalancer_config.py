"""The API's load balancer as HAProxy's configuration."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from rehearsal.haproxy_config import backend_name, render, server_arguments, server_name
from rehearsal.interfaces import (
    FixedResponseAction,
    ForwardAction,
    ListenerSpec,
    LoadBalancerSpec,
    RedirectAction,
    TargetGroupSpec,
    TargetSpec,
)

GROUP = TargetGroupSpec(
    arn="arn:aws:elasticloadbalancing:us-east-1:123456789012:targetgroup/hosts/0123456789abcdef",
    name="hosts",
    protocol="HTTP",
    port=8000,
    health_check_path="/readyz",
    health_check_port=None,
    health_check_interval_s=10,
    health_check_timeout_s=5,
    healthy_threshold=2,
    unhealthy_threshold=3,
    matcher="200,204-206",
    deregistration_delay_s=60,
    algorithm="least_outstanding_requests",
    targets=(TargetSpec("i-a", "10.20.0.5", 8000), TargetSpec("i-b", "10.20.0.6", 8000)),
)
BALANCER = LoadBalancerSpec(
    arn="arn:lb",
    name="dev",
    dns_name="dev.elb.amazonaws.com",
    scheme="internal",
    idle_timeout_s=300,
    client_keep_alive_s=3600,
    vpc_id="vpc-1",
    listeners=(ListenerSpec("arn:l", 80, "HTTP", None, ForwardAction(((GROUP.arn, 1),))),),
    target_groups=(GROUP,),
)
PORTS = {("arn:lb", 80): 8080, ("arn:lb", 443): 8443}

GOLDEN = """\
frontend lb_dev_80
  bind 127.0.0.1:8080
  timeout client 300s
  timeout http-keep-alive 300s
  http-request set-header X-Forwarded-Proto http
  http-request set-header X-Forwarded-Port 80
  http-request set-header X-Amzn-Trace-Id Root=1-%[uuid,bytes(0,8)]-%[uuid,regsub(-,,g),bytes(0,24)] \
unless { req.hdr(X-Amzn-Trace-Id) -m found }
  default_backend tg_hosts_0123456789abcdef

backend tg_hosts_0123456789abcdef
  balance leastconn
  timeout server 300s
  timeout check 5s
  option httpchk
  http-check send meth GET uri /readyz ver HTTP/1.1 hdr Host dev.elb.amazonaws.com \
hdr User-Agent ELB-HealthChecker/2.0
  http-check expect status 200,204-206
  server i-a:8000 10.20.0.5:8000 check inter 10s rise 2 fall 3
"""


def rendered(spec: LoadBalancerSpec, healthy: frozenset[tuple[str, str]] = frozenset()) -> str:
    return render([spec], PORTS, Path("/h/server.pem"), Path("/h/stats"), healthy)


def with_action(action: object, *, port: int = 80, certificate: str | None = None) -> LoadBalancerSpec:
    protocol = "HTTPS" if certificate else "HTTP"
    listener = ListenerSpec("arn:l", port, protocol, certificate, action)  # type: ignore[arg-type]
    return dataclasses.replace(BALANCER, listeners=(listener,))


def test_golden_configuration() -> None:
    healthy = frozenset({("tg_hosts_0123456789abcdef", "i-a:8000")})
    text = rendered(BALANCER, healthy)
    assert text[text.index("frontend") :] == GOLDEN
    head = text[: text.index("frontend")]
    assert "retries 0" in head and "option http-no-delay" in head and "option forwardfor" in head
    assert "stats socket /h/stats mode 600" in head


def test_targets_not_known_healthy_are_left_to_the_running_process() -> None:
    assert "server i-" not in rendered(BALANCER)
    draining = dataclasses.replace(GROUP, targets=(TargetSpec("i-a", "10.20.0.5", 8000, draining=True),))
    healthy = frozenset({(backend_name(GROUP), "i-a:8000")})
    assert "server i-" not in rendered(dataclasses.replace(BALANCER, target_groups=(draining,)), healthy)


def test_https_listener_ends_tls_with_the_rehearsals_certificate() -> None:
    text = rendered(with_action(ForwardAction(((GROUP.arn, 1),)), port=443, certificate="arn:cert"))
    assert "bind 127.0.0.1:8443 ssl crt /h/server.pem alpn h2,http/1.1" in text
    assert "X-Forwarded-Proto https" in text and "X-Forwarded-Port 443" in text


def test_redirect_leads_to_the_loopback_port_of_the_listener_it_names() -> None:
    action = RedirectAction("HTTPS", "443", "#{host}", "/#{path}", "#{query}", 301)
    text = rendered(with_action(action))
    target = "https://%[req.hdr(host),field(1,:)]:8443/%[path,regsub(^/,)]"
    assert f"redirect location {target}?%[query] code 301 if {{ query -m found }}" in text
    assert f"redirect location {target} code 301 if" not in text
    assert "default_backend" not in text


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ("plain", '"plain"'),
        ('say "no" for $5\n', '"say \\"no\\" for \\$5\\n"'),
        ("back\\slash", '"back\\\\slash"'),
    ],
)
def test_fixed_response_is_one_word_whatever_it_says(body: str, word: str) -> None:
    text = rendered(with_action(FixedResponseAction(404, "text/plain", body)))
    assert f"http-request return status 404 content-type text/plain string {word}\n" in text


def test_weights_share_the_requests() -> None:
    other = dataclasses.replace(GROUP, arn="arn:tg/blue/ffff", name="blue", algorithm="round_robin")
    spec = with_action(ForwardAction(((GROUP.arn, 3), (other.arn, 1), ("arn:gone", 5))))
    text = rendered(dataclasses.replace(spec, target_groups=(GROUP, other)))
    assert "set-var(txn.share) rand(4)" in text
    assert f"use_backend {backend_name(GROUP)} if {{ var(txn.share) -m int lt 3 }}" in text
    assert f"default_backend {backend_name(other)}" in text
    assert "balance roundrobin" in text


def test_a_listener_without_target_group_answers_503() -> None:
    assert "http-request return status 503" in rendered(with_action(ForwardAction(())))


def test_health_check_on_a_port_of_its_own_and_tls_targets() -> None:
    group = dataclasses.replace(GROUP, health_check_port=9000, protocol="HTTPS")
    arguments = server_arguments(group, group.targets[0])
    assert arguments == "10.20.0.5:8000 check inter 10s rise 2 fall 3 port 9000 ssl verify none"
    assert server_name(group.targets[0]) == "i-a:8000"


def test_same_picture_in_another_order_is_the_same_text() -> None:
    shuffled = dataclasses.replace(GROUP, targets=tuple(reversed(GROUP.targets)))
    healthy = frozenset((backend_name(GROUP), server_name(t)) for t in GROUP.targets)
    assert rendered(BALANCER, healthy) == rendered(
        dataclasses.replace(BALANCER, target_groups=(shuffled,)), healthy
    )
