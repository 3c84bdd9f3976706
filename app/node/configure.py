"""Configure: plan the host, write what the units read, render the units. Runs as root at each boot."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable
from pathlib import Path

from app.node import units
from app.node.config import NodeConfig
from app.node.host import (
    HEAD_ENV_PATH,
    HOST_ENV_PATH,
    Identity,
    head_environment,
    host_environment,
    write_atomically,
)
from app.node.raylet import render_raylet_units
from app.node.topology import TOPOLOGY_PATH, HostTopology, TopologyPlan, plan_head, plan_topology, write_plan
from app.plan.profiles import get_profile

RUNTIME_UNITS = Path("/run/systemd/system")
INSTALLED_UNITS = Path("/etc/systemd/system")
# Beside the raylets' own text: what this host's boot adds to it.
DROP_IN = "10-boot.conf"

log = logging.getLogger(__name__)


def plan_host(config: NodeConfig, host: HostTopology) -> TopologyPlan:
    """The plan for the host's role.

    Raises:
        TopologyError: every reason why the host cannot be planned.
    """
    if config.role == "head":
        return plan_head(host, config.engine.tp_degree)
    degrees = get_profile(config.engine.profile).tp_degrees
    return plan_topology(host, config.engine.tp_degree, supported_degrees=degrees)


def render(config: NodeConfig, plan: TopologyPlan, private_ip: str) -> dict[str, str]:
    """Every unit and drop-in of this host: path under the runtime unit folder -> text."""
    raylets = render_raylet_units(plan, config.role, private_ip, serve_port=config.serve.http_port)
    files = {**units.rendered_units(config.role, list(raylets)), **raylets}
    for name in raylets:
        files[f"{name}.d/{DROP_IN}"] = units.raylet_drop_in(config.role)
    return files


def write_units(files: dict[str, str], folder: Path) -> None:
    """Write units; those of an earlier plan in the same boot go away first."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("neuronfleet*"):
        if old.is_dir():
            for drop_in in old.iterdir():
                drop_in.unlink()
            old.rmdir()
        elif old.name not in files:
            old.unlink()
    for name, text in files.items():
        write_atomically(folder / name, text)


def systemctl(*arguments: str) -> None:
    """Run systemctl; its failure is ours."""
    subprocess.run(["systemctl", *arguments], check=True, timeout=120)


def configure(
    config: NodeConfig,
    identity: Identity,
    host: HostTopology,
    *,
    root: Path = Path("/"),
    run: Callable[..., None] = systemctl,
) -> TopologyPlan:
    """Plan this host, write topology, environment files and units, and start the target.

    Args:
        config: the node config.
        identity: what the metadata service says of the instance.
        host: what the host is.
        root: folder in place of ``/`` for everything that is written.
        run: runs systemctl with the given arguments.

    Raises:
        TopologyError: the host cannot be planned; nothing is written then.
    """
    plan = plan_host(config, host)
    for warning in plan.warnings:
        log.warning("%s", warning)
    write_plan(plan, _under(root, TOPOLOGY_PATH))
    write_atomically(_under(root, HOST_ENV_PATH), host_environment(config, identity))
    head_env = _under(root, HEAD_ENV_PATH)
    if config.role == "worker":
        head_env.unlink(missing_ok=True)  # written when the head answers
    else:
        write_atomically(head_env, head_environment(identity.private_ip))
    files = render(config, plan, identity.private_ip)
    write_units(files, _under(root, RUNTIME_UNITS))
    log.info(
        "the host is planned",
        extra={
            "role": config.role,
            "blocks": len(plan.blocks),
            "raylets": len(plan.raylets),
            "units": len(files),
        },
    )
    run("daemon-reload")
    run("start", "--no-block", units.TARGET)
    return plan


def install_units(root: Path = Path("/")) -> list[Path]:
    """Write the two units that outlast a boot; returns their paths."""
    paths = []
    for name, text in units.installed_units().items():
        path = _under(root, INSTALLED_UNITS) / name
        write_atomically(path, text)
        paths.append(path)
    return paths


def _under(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")
