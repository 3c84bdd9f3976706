"""One raylet's command line, environment and systemd unit.

numactl execs Ray, so CPU affinity and memory policy are in place before the raylet allocates a page, and
every worker inherits them. Everything that Ray would guess is said: CPUs, memory and object store (it would
advertise the whole host on each raylet), cores, ports, temp folder. A raylet is stopped by SIGTERM to itself,
on which Ray drains it; ``ray stop`` would end every raylet of the host and is never used.

Restarts: a worker raylet restarts alone. A head cannot start while another raylet of its old cluster lives on
the host (Ray refuses), so in a cell the workers are bound to the head: it takes them down, waits for them by
unit order, and pulls them up again, neuronfleet-serve with them. In a cluster the head's host has no other
raylet.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Literal

from app.node import ports
from app.node.topology.idlist import format_idlist
from app.node.topology.model import Raylet, TopologyPlan

Role = Literal["cell", "head", "worker"]

RAY = "/opt/neuronfleet/venv/bin/ray"
NUMACTL = "/usr/bin/numactl"
USER = "neuronfleet"
AUTH_TOKEN_PATH = "/etc/neuronfleet/ray-token"
HEAD_ENV_PATH = "/run/neuronfleet/head.env"
HEAD_ADDRESS = "${HEAD_ADDRESS}"
"""What systemd fills in from ``HEAD_ENV_PATH``: the address and port of the head's GCS."""

STATE_DIRECTORY = "neuronfleet/ray"
HEAD_UNIT = "neuronfleet-ray-head.service"
RAYLET_VARIABLE = "NEURONFLEET_RAYLET"
"""Environment variable of a raylet and all its workers: the raylet's index in the plan."""

DRAIN_S = 30
"""Seconds that a worker raylet gives its replicas on SIGTERM before it ends them."""


def is_head(raylet: Raylet, role: Role) -> bool:
    """Raylet 0 of a cell and of a cluster's head host also runs the cluster's head processes."""
    return role != "worker" and raylet.index == 0


def unit_name(raylet: Raylet, role: Role) -> str:
    return HEAD_UNIT if is_head(raylet, role) else f"neuronfleet-ray-worker@{raylet.index}.service"


def numa_label(raylet: Raylet) -> str:
    """The raylet's nodes as a Ray label may hold them: ``2_3``; ``none`` for an unbound raylet."""
    return "_".join(str(node) for node in raylet.numa_nodes) or "none"


def numactl_prefix(raylet: Raylet, numactl: str = NUMACTL) -> list[str]:
    """The binding of a raylet, empty for one that is bound to no node."""
    if not raylet.numa_nodes:
        return []
    nodes = format_idlist(raylet.numa_nodes)
    return [numactl, f"--cpunodebind={nodes}", f"--membind={nodes}"]


def raylet_command(
    raylet: Raylet,
    role: Role,
    node_ip: str,
    *,
    head_address: str = HEAD_ADDRESS,
    serve_port: int = ports.SERVE_PORT,
    ray: str = RAY,
    numactl: str = NUMACTL,
    temp_dir: str | None = None,
) -> list[str]:
    """The arguments that start one raylet and stay in the foreground.

    Args:
        raylet: a raylet of the host's plan.
        role: what the host is.
        node_ip: the host's own address; Ray listens there.
        head_address: ``address:port`` of the GCS, for a raylet that is no head.
        serve_port: the port of raylet 0's Serve proxy.
        ray: the ray executable.
        numactl: the numactl executable.
        temp_dir: Ray's temp folder; None: the raylet's own state directory.
    """
    own = ports.raylet_ports(raylet.index, serve_port)
    command = [*numactl_prefix(raylet, numactl), ray, "start", "--block"]
    if is_head(raylet, role):
        command += [
            "--head",
            f"--port={ports.GCS_PORT}",
            "--include-dashboard=true",
            "--dashboard-host=127.0.0.1",
            f"--dashboard-port={ports.DASHBOARD_PORT}",
            f"--ray-client-server-port={ports.RAY_CLIENT_PORT}",
        ]
    else:
        command += [f"--address={head_address}"]
    return [
        *command,
        f"--node-ip-address={node_ip}",
        f"--temp-dir={temp_dir or temp_dir_of(raylet)}",
        f"--node-manager-port={own.node_manager}",
        f"--object-manager-port={own.object_manager}",
        f"--runtime-env-agent-port={own.runtime_env_agent}",
        f"--dashboard-agent-grpc-port={own.agent_grpc}",
        f"--dashboard-agent-listen-port={own.agent_http}",
        f"--metrics-export-port={own.metrics_export}",
        f"--min-worker-port={own.min_worker}",
        f"--max-worker-port={own.max_worker}",
        f"--num-cpus={raylet.cpus}",
        f"--memory={raylet.memory_bytes}",
        f"--object-store-memory={raylet.object_store_bytes}",
        f"--resources={json.dumps({'neuron_cores': len(raylet.cores)})}",
        f"--labels=numa={numa_label(raylet)},raylet={raylet.index}",
        "--disable-usage-stats",
    ]


def temp_dir_of(raylet: Raylet) -> str:
    return str(PurePosixPath("/var/lib") / STATE_DIRECTORY / str(raylet.index))


def raylet_environment(
    raylet: Raylet, role: Role, *, serve_port: int = ports.SERVE_PORT, drain_s: int = DRAIN_S
) -> dict[str, str]:
    """The environment of a raylet, which its workers inherit."""
    own = ports.raylet_ports(raylet.index, serve_port)
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": AUTH_TOKEN_PATH,
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray hands out core ids unordered and, after churn, scattered; a replica claims a block instead.
        "RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
        RAYLET_VARIABLE: str(raylet.index),
    }
    if raylet.cores:  # a comma list: Ray counts 0-7 as one core
        environment["NEURON_RT_VISIBLE_CORES"] = ",".join(str(core) for core in raylet.cores)
    if is_head(raylet, role):
        environment["DASHBOARD_METRIC_PORT"] = str(ports.DASHBOARD_METRICS_PORT)
        environment["AUTOSCALER_METRIC_PORT"] = str(ports.AUTOSCALER_METRICS_PORT)
        # Nobody is left to take over from a head that stops: what drains it is the host's own drain step.
        environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"
    else:
        environment["RAY_SERVE_WORKER_PROXY_HTTP_PORT"] = str(own.serve_http)
        environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = str(drain_s)
    return environment


def render_raylet_unit(
    plan: TopologyPlan,
    raylet: Raylet,
    role: Role,
    node_ip: str,
    *,
    serve_port: int = ports.SERVE_PORT,
    drain_s: int = DRAIN_S,
    extra_environment: Mapping[str, str] | None = None,
) -> str:
    """The text of one raylet's unit file (name: ``unit_name``).

    Args:
        plan: the host's plan; in a cell the head's unit names its siblings.
        raylet: the raylet of the unit.
        role: what the host is.
        node_ip: the host's own address.
        serve_port: the port of raylet 0's Serve proxy.
        drain_s: seconds that a worker raylet has on SIGTERM.
        extra_environment: more variables, such as those of GCS fault tolerance; they win.
    """
    head = is_head(raylet, role)
    environment = raylet_environment(raylet, role, serve_port=serve_port, drain_s=drain_s)
    environment.update(extra_environment or {})
    siblings = [unit_name(r, role) for r in plan.raylets if r.index != raylet.index] if head else []
    where = f"NUMA nodes {format_idlist(raylet.numa_nodes)}" if raylet.numa_nodes else "not bound"
    cores = f"cores {format_idlist(raylet.cores)}" if raylet.cores else "no cores"
    command = raylet_command(raylet, role, node_ip, serve_port=serve_port)
    unit = [
        f"Description=NeuronFleet: Ray {'head' if head else 'worker'}, "
        f"raylet {raylet.index} ({where}; {cores})",
        "PartOf=neuronfleet.target",
        "OnFailure=neuronfleet-failed@%n.service",
        "Wants=network-online.target",
        "After=network-online.target neuronfleet-configure.service neuronfleet-preflight.service",
        "StartLimitIntervalSec=300",
        "StartLimitBurst=4",
    ]
    if head:  # what goes down with the head comes up with it
        unit.append(f"Wants={' '.join([*siblings, 'neuronfleet-serve.service'])}")
    if not head and role == "cell":
        unit += [f"BindsTo={HEAD_UNIT}", f"After={HEAD_UNIT}"]
    wait = _wait_for_gcs(f"{node_ip}:{ports.GCS_PORT}" if head else HEAD_ADDRESS)
    service = [
        "Type=exec",
        f"User={USER}",
        f"StateDirectory={STATE_DIRECTORY}/{raylet.index}",
        "StateDirectoryMode=0700",
        *(_environment_line(name, value) for name, value in environment.items()),
        *([] if head else [f"EnvironmentFile={HEAD_ENV_PATH}", f"ExecStartPre={wait}"]),
        f"ExecStart={' '.join(_quote(argument) for argument in command)}",
        *([f"ExecStartPost={wait}"] if head else []),
        "TimeoutStartSec=180",
        "KillSignal=SIGTERM",
        # SIGTERM to Ray only, which ends its children in order; then what is left of the cgroup is killed,
        # an engine that outlived its replica with it.
        "KillMode=mixed",
        f"TimeoutStopSec={(0 if head else drain_s) + 30}",
        # Ray ends with 1 on SIGTERM, and with 1 when a part of it died; both are restarts, never a clean end.
        "SuccessExitStatus=1",
        "Restart=always",
        "RestartSec=3",
        # One replica out of memory must not take the raylet's other replicas with it.
        "OOMPolicy=continue",
        "LimitNOFILE=65536",
        "LimitMEMLOCK=infinity",
        "TasksMax=infinity",
        "NoNewPrivileges=yes",
        "ProtectSystem=full",
    ]
    lines = ["[Unit]", *unit, "", "[Service]", *service, "", "[Install]", "WantedBy=neuronfleet.target"]
    return "\n".join(lines) + "\n"


def render_raylet_units(
    plan: TopologyPlan,
    role: Role,
    node_ip: str,
    *,
    serve_port: int = ports.SERVE_PORT,
    drain_s: int = DRAIN_S,
    extra_environment: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Unit name to unit text for each raylet of the plan, in the plan's order."""
    return {
        unit_name(raylet, role): render_raylet_unit(
            plan,
            raylet,
            role,
            node_ip,
            serve_port=serve_port,
            drain_s=drain_s,
            extra_environment=extra_environment,
        )
        for raylet in plan.raylets
    }


def shown_command(arguments: Sequence[str]) -> str:
    """A command as the unit file holds it, one argument a line, for people and golden files."""
    return " \\\n  ".join(_quote(argument) for argument in arguments)


def _wait_for_gcs(address: str) -> str:
    """Until the GCS accepts connections: a worker that comes earlier would end, a head is not up before.

    A head that ends while it is waited for must not be waited for longer (systemd would), nor be called a
    failed start, which would fail the units after it at its first try: it is started again, as often as its
    limit says.
    """
    if address == HEAD_ADDRESS:  # for bash to take apart: $$ and %% are systemd's way to write $ and %
        target, still_wanted = "$${HEAD_ADDRESS%%:*}/$${HEAD_ADDRESS##*:}", "true"
    else:
        target, still_wanted = address.replace(":", "/"), "kill -0 $$MAINPID"
    script = f"until (exec 3<>/dev/tcp/{target}); do {still_wanted} || exit 0; sleep 0.2; done"
    return f"/usr/bin/timeout 150 /bin/bash -c 'exec 2>/dev/null; {script}'"


def _environment_line(name: str, value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'Environment="{name}={escaped}"'


def _quote(argument: str) -> str:
    """An argument as systemd reads it; ``${HEAD_ADDRESS}`` stays for systemd to fill in."""
    argument = argument.replace("%", "%%")
    if argument and not any(character in argument for character in " \t\"'\\;"):
        return argument
    return "'" + argument.replace("\\", "\\\\").replace("'", "\\'") + "'"
