"""What a host says of itself when ``neuronfleet status`` asks: units with their times, raylets, replicas."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from app.node.config import NODE_CONFIG_PATH, load_node_config
from app.node.progress import read_progress
from app.node.topology.live import live_binding, replica_bindings
from app.node.topology.model import TOPOLOGY_PATH, TopologyPlan

_PROPERTIES = (
    "Id",
    "ActiveState",
    "Result",
    "MainPID",
    "InactiveExitTimestamp",
    "ActiveEnterTimestamp",
    "ExecMainStartTimestamp",
    "ExecMainExitTimestamp",
)


def unit_states() -> list[dict[str, Any]]:
    """The state of every NeuronFleet unit, times in seconds since the epoch (None: never)."""
    shown = subprocess.run(
        [
            "systemctl",
            "show",
            "--all",
            "--timestamp=unix",
            f"--property={','.join(_PROPERTIES)}",
            "neuronfleet-*",
        ],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    ).stdout
    units = []
    for paragraph in shown.strip().split("\n\n"):
        values = dict(line.split("=", 1) for line in paragraph.splitlines() if "=" in line)
        name = values.get("Id", "")
        if not name.endswith((".service", ".target")) or name.startswith("neuronfleet-failed@"):
            continue
        unit: dict[str, Any] = {
            "name": name.removesuffix(".service"),
            "state": values["ActiveState"],
            "pid": int(values.get("MainPID") or 0),
            "started": _seconds(values.get("InactiveExitTimestamp")),
            "active": _seconds(values.get("ActiveEnterTimestamp")),
            "ended": _seconds(values.get("ExecMainExitTimestamp")),
        }
        if unit["state"] == "failed":
            unit["last_line"] = last_line(name)
        units.append(unit)
    return sorted(units, key=lambda unit: (unit["started"] or float("inf"), unit["name"]))


def last_line(unit: str) -> str:
    """The last line that a unit wrote to the journal."""
    shown = subprocess.run(
        ["journalctl", "--no-pager", "-o", "cat", "-n", "1", "-u", unit],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    return shown.stdout.strip()


def host_status(config_path: Path = NODE_CONFIG_PATH, topology_path: Path = TOPOLOGY_PATH) -> dict[str, Any]:
    """The host's report: role, artifact, units, raylets and replicas with planned and live binding.

    Raises:
        FileNotFoundError: the host has no node config (user data has not run yet).
    """
    config = load_node_config(config_path)
    units = unit_states()
    report: dict[str, Any] = {
        "role": config.role,
        "environment": config.environment,
        "model": config.engine.model,
        "profile": config.engine.profile,
        "artifact": {"digest": config.artifact.digest} | read_progress(config.artifact.digest),
        "units": units,
        "raylets": [],
        "replicas": [],
        "warnings": [],
    }
    if not topology_path.exists():
        return report
    plan = TopologyPlan.model_validate(json.loads(topology_path.read_text()))
    report["warnings"] = list(plan.warnings)
    pids = {unit["name"]: unit["pid"] for unit in units}
    for raylet in plan.raylets:
        is_head = raylet.index == 0 and config.role in ("cell", "head")
        name = "neuronfleet-ray-head" if is_head else f"neuronfleet-ray-worker@{raylet.index}"
        report["raylets"].append(
            {
                "name": name.removeprefix("neuronfleet-"),
                "numa_nodes": list(raylet.numa_nodes),
                "cores": list(raylet.cores),
                "cpus": raylet.cpus,
                "live": live_binding(pids.get(name, 0), raylet.numa_nodes),
            }
        )
    report["replicas"] = replica_bindings(plan)
    return report


def _seconds(timestamp: str | None) -> float | None:
    """systemd's ``@1733052800`` (``--timestamp=unix``) as seconds."""
    if not timestamp or not timestamp.startswith("@"):
        return None
    return float(timestamp[1:])
