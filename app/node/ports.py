"""Every port that a host's Ray and Serve use: fixed, disjoint for any number of raylets, known at synth.

Ray's own defaults are random or clash when two raylets share a host, and a security group cannot name a
random port. So each component has a range of its own, indexed by the raylet's place in the topology plan; the
numbers never depend on how many raylets there are. All lie below 32768, where Linux starts to take the local
ports of outgoing connections, and outside 23000-23999, from which Ray's client server takes ports.

One listener has no fixed port: each Serve replica has the kernel choose one for gRPC calls between
deployments (no setting names it, ray 2.60.0). Nothing of ours uses it while RAY_SERVE_USE_GRPC_BY_DEFAULT is
off, and no security group opens it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MAX_RAYLETS = 24
"""No host has more raylets: one holds at least one block, a block at least one core, and Inf2 has 24."""

GCS_PORT = 6379
DASHBOARD_PORT = 8265
DASHBOARD_METRICS_PORT = 8266
AUTOSCALER_METRICS_PORT = 8267
RAY_CLIENT_PORT = 10001
SERVE_PORT = 8000

WORKER_PORTS_PER_RAYLET = 500
"""Each worker process listens on one port: up to one a CPU (192), and the actors that ask for no CPU."""

_NODE_MANAGER = 6800
_OBJECT_MANAGER = 6830
_AGENT_GRPC = 6860
_AGENT_HTTP = 6890
_RUNTIME_ENV_AGENT = 6920
_METRICS_EXPORT = 6950
_WORKERS = 10500


@dataclass(frozen=True)
class PortRange:
    """TCP ports ``first`` to ``last``, both included, and what listens there."""

    first: int
    last: int
    purpose: str
    listener: Literal["head", "any"] = "any"
    """Which hosts of a cluster listen: its head host only, or every host."""

    def __contains__(self, port: int) -> bool:
        return self.first <= port <= self.last

    @property
    def ports(self) -> range:
        return range(self.first, self.last + 1)


@dataclass(frozen=True)
class RayletPorts:
    """The TCP ports of one raylet. ``serve_http`` is its Serve proxy's."""

    node_manager: int
    object_manager: int
    agent_grpc: int
    agent_http: int
    runtime_env_agent: int
    metrics_export: int
    min_worker: int
    max_worker: int
    serve_http: int

    def all_ports(self) -> set[int]:
        single = {
            self.node_manager,
            self.object_manager,
            self.agent_grpc,
            self.agent_http,
            self.runtime_env_agent,
            self.metrics_export,
            self.serve_http,
        }
        return single | set(range(self.min_worker, self.max_worker + 1))


HEAD_PORTS = frozenset(
    {GCS_PORT, DASHBOARD_PORT, DASHBOARD_METRICS_PORT, AUTOSCALER_METRICS_PORT, RAY_CLIENT_PORT}
)
"""Ports of a head's own processes, beside those of its raylet."""


def raylet_ports(index: int, serve_port: int = SERVE_PORT) -> RayletPorts:
    """The ports of the raylet with ``index`` in the host's plan.

    Args:
        index: place of the raylet in the topology plan, from 0.
        serve_port: the port of raylet 0's Serve proxy; raylet N has ``serve_port + N``.

    Raises:
        ValueError: ``index`` is outside 0 to 23, or ``serve_port`` puts a proxy on a port that is taken.
    """
    if not 0 <= index < MAX_RAYLETS:
        raise ValueError(
            f"raylet index {index} has no ports: the plan reaches from 0 to {MAX_RAYLETS - 1}. "
            "More raylets than cores on the largest Inf2 means that the topology plan is wrong."
        )
    first_worker = _WORKERS + index * WORKER_PORTS_PER_RAYLET
    ports = RayletPorts(
        node_manager=_NODE_MANAGER + index,
        object_manager=_OBJECT_MANAGER + index,
        agent_grpc=_AGENT_GRPC + index,
        agent_http=_AGENT_HTTP + index,
        runtime_env_agent=_RUNTIME_ENV_AGENT + index,
        metrics_export=_METRICS_EXPORT + index,
        min_worker=first_worker,
        max_worker=first_worker + WORKER_PORTS_PER_RAYLET - 1,
        serve_http=serve_port + index,
    )
    if serve_port != SERVE_PORT:
        _check_serve_port(serve_port)
    return ports


def _check_serve_port(serve_port: int) -> None:
    wanted = set(range(serve_port, serve_port + MAX_RAYLETS))
    taken = set(HEAD_PORTS)
    for port_range in (*cluster_ingress(), *local_only()):
        taken |= set(port_range.ports)
    clash = sorted(wanted & taken)
    if clash or serve_port < 1024 or serve_port + MAX_RAYLETS > 32768:
        raise ValueError(
            f"serve port {serve_port} cannot be used: the proxies of up to {MAX_RAYLETS} raylets take "
            f"{serve_port}-{serve_port + MAX_RAYLETS - 1}, which must lie in 1024-32767 and not meet Ray's "
            f"ports{f' (it meets {clash[0]})' if clash else ''}. {SERVE_PORT} is free."
        )


def cluster_ingress(max_raylets: int = MAX_RAYLETS) -> list[PortRange]:
    """What hosts of one Ray cluster must accept from each other, and nothing else.

    A security group of the ``cluster`` topology opens these from the cluster's own hosts; a ``cell`` host
    opens none of them. The load balancer's port is not among them: it comes from the load balancer's group
    only.

    Args:
        max_raylets: raylets that a host may have; the default fits every Inf2 size.
    """
    last = max_raylets - 1
    return [
        PortRange(GCS_PORT, GCS_PORT, "Ray GCS", listener="head"),
        PortRange(_NODE_MANAGER, _NODE_MANAGER + last, "raylets: node managers"),
        PortRange(_OBJECT_MANAGER, _OBJECT_MANAGER + last, "raylets: object managers"),
        PortRange(_AGENT_GRPC, _AGENT_GRPC + last, "dashboard agents, gRPC"),
        PortRange(_AGENT_HTTP, _AGENT_HTTP + last, "dashboard agents, HTTP"),
        PortRange(_WORKERS, _WORKERS + max_raylets * WORKER_PORTS_PER_RAYLET - 1, "Ray workers and drivers"),
    ]


def local_only(max_raylets: int = MAX_RAYLETS) -> list[PortRange]:
    """What no other host needs: on loopback, or on the host's address and kept shut by the security group."""
    last = max_raylets - 1
    return [
        PortRange(DASHBOARD_PORT, DASHBOARD_PORT, "Ray dashboard (loopback)", listener="head"),
        PortRange(DASHBOARD_METRICS_PORT, DASHBOARD_METRICS_PORT, "dashboard metrics", listener="head"),
        PortRange(AUTOSCALER_METRICS_PORT, AUTOSCALER_METRICS_PORT, "autoscaler metrics", listener="head"),
        PortRange(RAY_CLIENT_PORT, RAY_CLIENT_PORT, "Ray client server", listener="head"),
        PortRange(_RUNTIME_ENV_AGENT, _RUNTIME_ENV_AGENT + last, "runtime env agents"),
        PortRange(_METRICS_EXPORT, _METRICS_EXPORT + last, "raylet metrics (Prometheus)"),
    ]
