"""Application load balancers of the API as one HAProxy on loopback.

Listeners and target groups are its configuration, reloaded without dropping a stream. Targets are added,
drained and removed in the running process, so a host that comes or goes is no reload at all.

One known difference: with every target unhealthy, an Application Load Balancer sends requests to all of them;
this one answers 503.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rehearsal.haproxy import HaProxy
from rehearsal.haproxy_config import backend_name, render, server_arguments, server_name
from rehearsal.interfaces import (
    LoadBalancerSpec,
    RehearsalError,
    TargetGroupSpec,
    TargetHealth,
    TargetKey,
    TargetSpec,
    TargetState,
)

DEFAULT_PORTS = {80: 8080, 443: 8443}
"""Listener port -> first port that is tried on loopback; any other listener port has 10000 added."""
PORT_VARIABLES = {80: "NEURONFLEET_HTTP_PORT", 443: "NEURONFLEET_HTTPS_PORT"}
_SHOW_SERVERS = "show stat -1 4 -1"


@dataclass(frozen=True)
class _Server:
    """A server of the running HAProxy, with the result of its last health check."""

    status: str
    sessions: int
    check: str
    code: str


class HaProxyLoadBalancer:
    """Implements :class:`rehearsal.interfaces.LoadBalancer`.

    Args:
        home: the rehearsal's home.
        certificate: gives the file with certificate and key of HTTPS listeners.
        ports: listener port -> loopback port, in place of the environment's and the default ones.
    """

    def __init__(
        self, home: Path, certificate: Callable[[], Path], ports: Mapping[int, int] | None = None
    ) -> None:
        self._haproxy = HaProxy(home, "loadbalancer")
        self._certificate = certificate
        self._first_ports = dict(ports) if ports is not None else _ports_of_environment()
        self._ports_file = home / "run/loadbalancer.ports"
        self._specs: list[LoadBalancerSpec] = []
        self._since: dict[tuple[str, str], float] = {}

    def apply(self, specs: list[LoadBalancerSpec]) -> None:
        """See the interface.

        Raises:
            RehearsalError: a port is taken (names it and the variable that moves it), or HAProxy refuses.
        """
        self._specs = list(specs)
        if not any(spec.listeners for spec in specs):
            self._haproxy.stop()
            self._ports_file.unlink(missing_ok=True)
            self._since.clear()
            return
        ports = self._assign(specs)
        # The configuration is compared without its targets: only another listener or group is a reload.
        config = self._render(specs, ports, frozenset())
        if not (self._haproxy.running and self._shape() == config):
            healthy = frozenset(key for key, found in self._servers().items() if found.status == "UP")
            self._haproxy.ensure(self._render(specs, ports, healthy))
            self._shape_file.write_text(config)
        self._converge()

    def health(self) -> dict[TargetKey, TargetHealth]:
        """See the interface."""
        found: dict[TargetKey, TargetHealth] = {}
        if not self._specs:
            return found
        servers = self._servers()
        if self._leftovers(servers):
            # What was refused is tried again at the next look, half a second later.
            with contextlib.suppress(RehearsalError):
                self._converge()
        old = self._old_sessions()
        for group, target in _targets(self._specs):
            key = (backend_name(group), server_name(target))
            server = servers.get(key)
            if target.draining:
                health = _draining(old[key] + (server.sessions if server else 0))
            else:
                health = _health(group, server, self._since.get(key))
            found[group.arn, target.instance_id, target.port] = health
        return found

    def url(self, load_balancer_arn: str) -> str | None:
        """See the interface; the HTTPS listener's when there is one."""
        if not self._haproxy.running:
            return None
        listeners = [
            (listener.protocol == "HTTPS", port)
            for spec in self._specs
            if spec.arn == load_balancer_arn
            for listener in spec.listeners
            if (port := self._ports().get((spec.arn, listener.port)))
        ]
        if not listeners:
            return None
        secure, port = max(listeners)
        return f"{'https' if secure else 'http'}://127.0.0.1:{port}"

    def remove_all(self) -> None:
        """See the interface."""
        self._haproxy.stop()
        self._ports_file.unlink(missing_ok=True)
        self._shape_file.unlink(missing_ok=True)
        self._specs = []
        self._since.clear()

    @property
    def _shape_file(self) -> Path:
        return self._ports_file.with_name("loadbalancer.shape")

    def _shape(self) -> str | None:
        return self._shape_file.read_text() if self._shape_file.exists() else None

    def _render(
        self,
        specs: list[LoadBalancerSpec],
        ports: dict[tuple[str, int], int],
        healthy: frozenset[tuple[str, str]],
    ) -> str:
        return render(specs, ports, self._certificate(), self._haproxy.stats_socket, healthy)

    # Ports

    def _ports(self) -> dict[tuple[str, int], int]:
        try:
            rows = json.loads(self._ports_file.read_text())
        except FileNotFoundError:
            return {}
        return {(arn, listener): port for arn, listener, port in rows}

    def _assign(self, specs: list[LoadBalancerSpec]) -> dict[tuple[str, int], int]:
        """A loopback port for each listener: kept while the listener stays, else the first one free."""
        known = self._ports() if self._haproxy.running else {}
        wanted = [(spec.arn, listener.port) for spec in specs for listener in spec.listeners]
        ports = {key: known[key] for key in wanted if key in known}
        for key in sorted(set(wanted) - set(ports)):
            first = self._first_ports.get(key[1], key[1] + 10000)
            # A second load balancer's listener of the same port takes the next one.
            port = first
            while port in ports.values():
                port += 1
            _require_free(port, key[1])
            ports[key] = port
        self._ports_file.parent.mkdir(parents=True, exist_ok=True)
        self._ports_file.write_text(json.dumps([[*key, port] for key, port in sorted(ports.items())]))
        return ports

    # Targets

    def _servers(self) -> dict[tuple[str, str], _Server]:
        """(backend, server) -> what the current worker says."""
        return {
            (row["pxname"], row["svname"]): _Server(
                row["status"],
                int(row["scur"] or 0),
                row["check_status"].removeprefix("* "),
                row["check_code"],
            )
            for row in _rows(self._haproxy.command(_SHOW_SERVERS))
        }

    def _old_sessions(self) -> Counter[tuple[str, str]]:
        """(backend, server) -> open sessions in workers that a reload left."""
        sessions: Counter[tuple[str, str]] = Counter()
        for worker in self._haproxy.old_workers():
            for row in _rows(self._haproxy.command(_SHOW_SERVERS, worker=worker)):
                sessions[row["pxname"], row["svname"]] += int(row["scur"] or 0)
        return sessions

    def _leftovers(self, servers: Mapping[tuple[str, str], _Server]) -> bool:
        """Whether servers are there that no target asks for, or the other way round."""
        return set(servers) != {(backend_name(g), server_name(t)) for g, t in _targets(self._specs)}

    def _converge(self) -> None:
        """Make the running process's servers the targets of the specs."""
        servers = self._servers()
        wanted = {(backend_name(g), server_name(t)): (g, t) for g, t in _targets(self._specs)}
        for key in set(servers) - set(wanted):
            self._drop(*key)
        for (backend, server), (group, target) in wanted.items():
            name = f"{backend}/{server}"
            if (backend, server) not in servers:
                if target.draining:
                    continue
                self._add(name, group, target)
                self._since[backend, server] = time.monotonic()
            else:
                self._since.setdefault((backend, server), time.monotonic())
                draining = servers[backend, server].status == "DRAIN"
                if target.draining != draining:
                    self._must(f"set server {name} state {'drain' if target.draining else 'ready'}")

    def _add(self, name: str, group: TargetGroupSpec, target: TargetSpec) -> None:
        self._must(f"add server {name} {server_arguments(group, target)}", said="New server registered.")
        # A new server is in maintenance; out of it, it counts as healthy until told otherwise. One line: no
        # request gets in between.
        self._must(f"set server {name} state ready; set server {name} health down; enable health {name}")

    def _drop(self, backend: str, server: str) -> None:
        """End a server and its open connections; one that still holds some goes at the next call."""
        name = f"{backend}/{server}"
        self._haproxy.command(f"set server {name} state maint")
        for worker in [None, *self._haproxy.old_workers()]:
            self._haproxy.command(f"shutdown sessions server {name}", worker=worker)
        self._haproxy.command(f"del server {name}")
        self._since.pop((backend, server), None)

    def _must(self, command: str, said: str = "") -> None:
        answer = self._haproxy.command(command).strip()
        if answer != said:
            raise RehearsalError(f"the load balancer refused {command!r}: {answer or 'no answer'}")


def _draining(sessions: int) -> TargetHealth:
    if sessions == 0:
        return TargetHealth(TargetState.UNUSED, "Target.NotRegistered", "No open connection is left")
    return TargetHealth(
        TargetState.DRAINING, "Target.DeregistrationInProgress", "Target deregistration is in progress"
    )


def _health(group: TargetGroupSpec, server: _Server | None, since: float | None) -> TargetHealth:
    """Health in elbv2's words (its API reference, TargetHealth)."""
    if server is None or since is None:
        return TargetHealth(
            TargetState.INITIAL, "Elb.RegistrationInProgress", "Target registration is in progress"
        )
    # "UP 1/2" is up with failed checks, "DOWN 1/2" down with passed ones.
    if server.status.startswith("UP"):
        return TargetHealth(TargetState.HEALTHY)
    if time.monotonic() - since < group.health_check_interval_s * (group.unhealthy_threshold + 1):
        return TargetHealth(
            TargetState.INITIAL, "Elb.InitialHealthChecking", "Initial health checks in progress"
        )
    if server.check == "L7STS":
        reason, words = (
            "Target.ResponseCodeMismatch",
            f"Health checks failed with these codes: [{server.code}]",
        )
    elif server.check.endswith("TOUT"):
        reason, words = "Target.Timeout", "Request timed out"
    else:
        reason, words = "Target.FailedHealthChecks", "Health checks failed"
    return TargetHealth(TargetState.UNHEALTHY, reason, words)


def _targets(specs: list[LoadBalancerSpec]) -> list[tuple[TargetGroupSpec, TargetSpec]]:
    return [(group, target) for spec in specs for group in spec.target_groups for target in group.targets]


def _rows(table: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(table.strip().removeprefix("# "))))


def _ports_of_environment() -> dict[int, int]:
    ports = dict(DEFAULT_PORTS)
    for listener, variable in PORT_VARIABLES.items():
        value = os.environ.get(variable)
        if value:
            if not value.isdigit() or not 1 <= int(value) <= 65535:
                raise RehearsalError(f"{variable} is {value!r}: expected a port from 1 to 65535")
            ports[listener] = int(value)
    return ports


def _require_free(port: int, listener: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            move = PORT_VARIABLES.get(listener)
            raise RehearsalError(
                f"port {port} of this machine, where the load balancer's listener {listener} is to be, is in "
                "use: end what listens there"
                + (f", or set {move} to a free port and run `make down` and `make up`" if move else "")
            ) from error
