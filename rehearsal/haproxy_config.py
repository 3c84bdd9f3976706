"""An application load balancer as HAProxy's configuration: a pure function of what the API says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rehearsal.interfaces import (
    Action,
    FixedResponseAction,
    ForwardAction,
    ListenerSpec,
    LoadBalancerSpec,
    RedirectAction,
    TargetGroupSpec,
    TargetSpec,
)

Ports = Mapping[tuple[str, int], int]
"""(load balancer ARN, listener port) -> port on loopback."""

_ALGORITHMS = {"round_robin": "roundrobin", "least_outstanding_requests": "leastconn"}
_CONNECT_TIMEOUT_S = 10
"""What an Application Load Balancer waits for a target's handshake (ELB guide, HTTP 504)."""


def backend_name(group: TargetGroupSpec) -> str:
    """HAProxy's name of a target group (its ARN's last part tells groups of the same name apart)."""
    return f"tg_{group.name}_{group.arn.rsplit('/', 1)[-1][:16]}"


def server_name(target: TargetSpec) -> str:
    """HAProxy's name of a target."""
    return f"{target.instance_id}:{target.port}"


def server_arguments(group: TargetGroupSpec, target: TargetSpec) -> str:
    """A target as a ``server`` line says it, name left out; the same words serve ``add server``."""
    words = [f"{target.ip}:{target.port}", "check"]
    words += [f"inter {group.health_check_interval_s}s", f"rise {group.healthy_threshold}"]
    words += [f"fall {group.unhealthy_threshold}"]
    if group.health_check_port is not None:
        words.append(f"port {group.health_check_port}")
    if group.protocol == "HTTPS":
        # As the load balancer does: a target's certificate is not verified.
        words.append("ssl verify none")
    return " ".join(words)


def render(
    specs: list[LoadBalancerSpec],
    ports: Ports,
    certificate: Path,
    stats_socket: Path,
    healthy: frozenset[tuple[str, str]] = frozenset(),
) -> str:
    """The whole configuration.

    Args:
        specs: the load balancers.
        ports: where each listener listens on loopback.
        certificate: certificate and key of HTTPS listeners.
        stats_socket: where health is asked and targets are added and removed.
        healthy: (backend, server) that are known to be healthy now. HAProxy takes a server of its
            configuration for healthy at once, as no new target is: the others are added while it runs.
    """
    parts = [
        f"""\
global
  maxconn 4000
  stats socket {stats_socket} mode 600 level admin expose-fd listeners
  ssl-default-bind-options ssl-min-ver TLSv1.2
defaults
  mode http
  log stderr format raw local0 notice
  timeout connect {_CONNECT_TIMEOUT_S}s
  timeout http-request 60s
  timeout queue 10s
  timeout check 10s
  # A request is sent once, to one target, and small pieces of a stream are passed on at once.
  retries 0
  option http-no-delay
  option forwardfor
"""
    ]
    for spec in sorted(specs, key=lambda s: s.arn):
        groups = {group.arn: group for group in spec.target_groups}
        for listener in sorted(spec.listeners, key=lambda item: item.port):
            parts.append(_frontend(spec, listener, ports, certificate, groups))
        for group in sorted(spec.target_groups, key=lambda g: g.arn):
            parts.append(_backend(spec, group, healthy))
    return "\n".join(parts)


def _frontend(
    spec: LoadBalancerSpec,
    listener: ListenerSpec,
    ports: Ports,
    certificate: Path,
    groups: Mapping[str, TargetGroupSpec],
) -> str:
    secure = listener.protocol == "HTTPS"
    bind = f"bind 127.0.0.1:{ports[spec.arn, listener.port]}"
    lines = [
        f"frontend lb_{spec.name}_{listener.port}",
        f"  {bind} ssl crt {certificate} alpn h2,http/1.1" if secure else f"  {bind}",
        f"  timeout client {spec.idle_timeout_s}s",
        f"  timeout http-keep-alive {min(spec.idle_timeout_s, spec.client_keep_alive_s)}s",
        f"  http-request set-header X-Forwarded-Proto {'https' if secure else 'http'}",
        f"  http-request set-header X-Forwarded-Port {listener.port}",
        "  http-request set-header X-Amzn-Trace-Id "
        "Root=1-%[uuid,bytes(0,8)]-%[uuid,regsub(-,,g),bytes(0,24)] "
        "unless { req.hdr(X-Amzn-Trace-Id) -m found }",
        *_action(spec, listener.default_action, ports, groups),
    ]
    return "\n".join(lines) + "\n"


def _action(
    spec: LoadBalancerSpec, action: Action, ports: Ports, groups: Mapping[str, TargetGroupSpec]
) -> list[str]:
    if isinstance(action, FixedResponseAction):
        content = f" content-type {action.content_type} string {_quoted(action.body)}" if action.body else ""
        return [f"  http-request return status {action.status_code}{content}"]
    if isinstance(action, RedirectAction):
        return _redirect(spec, action, ports)
    return _forward(action, groups)


def _forward(action: ForwardAction, groups: Mapping[str, TargetGroupSpec]) -> list[str]:
    weighted = [(arn, weight) for arn, weight in action.target_groups if weight > 0 and arn in groups]
    if not weighted:
        # No target group to send to: the load balancer's own answer.
        return ["  http-request return status 503"]
    if len(weighted) == 1:
        return [f"  default_backend {backend_name(groups[weighted[0][0]])}"]
    lines, total, so_far = [], sum(weight for _, weight in weighted), 0
    lines.append(f"  http-request set-var(txn.share) rand({total})")
    for arn, weight in weighted[:-1]:
        so_far += weight
        lines.append(f"  use_backend {backend_name(groups[arn])} if {{ var(txn.share) -m int lt {so_far} }}")
    return [*lines, f"  default_backend {backend_name(groups[weighted[-1][0]])}"]


def _redirect(spec: LoadBalancerSpec, action: RedirectAction, ports: Ports) -> list[str]:
    """``#{...}`` placeholders as HAProxy's; a port that is a listener's becomes its loopback port."""
    port = action.port
    if port.isdigit():
        port = str(ports.get((spec.arn, int(port)), int(port)))
    url = f"{action.protocol.lower()}://{action.host}:{port}{action.path}"
    for placeholder, sample in (
        ("#{protocol}", "%[req.hdr(X-Forwarded-Proto)]"),
        ("#{host}", "%[req.hdr(host),field(1,:)]"),
        ("#{port}", "%[dst_port]"),
        ("#{path}", "%[path,regsub(^/,)]"),
    ):
        url = url.replace(placeholder, sample)
    code = f"code {action.status_code}"
    if not action.query:
        return [f"  http-request redirect location {url} {code}"]
    with_query = f"{url}?{action.query.replace('#{query}', '%[query]')}"
    if action.query != "#{query}":
        return [f"  http-request redirect location {with_query} {code}"]
    return [
        f"  http-request redirect location {with_query} {code} if {{ query -m found }}",
        f"  http-request redirect location {url} {code}",
    ]


def _backend(spec: LoadBalancerSpec, group: TargetGroupSpec, healthy: frozenset[tuple[str, str]]) -> str:
    name = backend_name(group)
    lines = [
        f"backend {name}",
        f"  balance {_ALGORITHMS.get(group.algorithm, 'roundrobin')}",
        f"  timeout server {spec.idle_timeout_s}s",
        f"  timeout check {group.health_check_timeout_s}s",
        "  option httpchk",
        f"  http-check send meth GET uri {group.health_check_path} ver HTTP/1.1 hdr Host {spec.dns_name} "
        "hdr User-Agent ELB-HealthChecker/2.0",
        f"  http-check expect status {group.matcher}",
    ]
    for target in sorted(group.targets, key=server_name):
        if not target.draining and (name, server_name(target)) in healthy:
            lines.append(f"  server {server_name(target)} {server_arguments(group, target)}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """``text`` as one double-quoted word of a configuration line."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
    return '"' + escaped.replace("\r", "\\r").replace("\n", "\\n") + '"'
