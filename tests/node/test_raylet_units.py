"""Raylet units: golden files for each Inf2 size and degree, and what systemd says of them.

After a change that is meant, write the golden files anew (``NEURONFLEET_UPDATE_GOLDEN=1``, this file only),
then read their diff.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from app.node import raylet as raylets
from app.node.raylet import Role, raylet_command, render_raylet_units
from app.node.topology import TopologyPlan, plan_head, plan_topology, read_host
from tests.unit.topology_trees import GIB, INF2_48XLARGE_NODES, emulated_output, host_tree, tool

GOLDEN = Path(__file__).parent / "golden/raylets"
NODE_IP = "10.0.1.5"

HOSTS: dict[str, tuple[dict[int, str], int]] = {  # NUMA nodes with their CPUs, GiB of each
    "inf2.xlarge": ({0: "0-3"}, 16),
    "inf2.8xlarge": ({0: "0-31"}, 128),
    "inf2.24xlarge": ({0: "0-23,48-71", 1: "24-47,72-95"}, 192),
    "inf2.48xlarge": (INF2_48XLARGE_NODES, 192),
}
DEGREES = {
    "inf2.xlarge": (1, 2),
    "inf2.8xlarge": (1, 2),
    "inf2.24xlarge": (1, 2, 4, 8, 12),
    "inf2.48xlarge": (1, 2, 4, 8, 12, 24),
}
CASES = [
    (size, degree, role)
    for size, degrees in DEGREES.items()
    for degree in degrees
    for role in ("cell", "worker")
]


def plan_of(tmp_path: Path, size: str, degree: int, role: Role = "cell") -> TopologyPlan:
    nodes, gib = HOSTS[size]
    root = host_tree(tmp_path / "root", nodes, node_gib=gib, sockets={node: node // 2 for node in nodes})
    host = read_host(root, tool(tmp_path, emulated_output(tmp_path, size)))
    host = host.model_copy(update={"shm_bytes": len(nodes) * gib * GIB // 2})
    return plan_head(host, degree) if role == "head" else plan_topology(host, degree)


def units_text(units: dict[str, str]) -> str:
    return "\n".join(f"### {name}\n{text}" for name, text in units.items())


def check_golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("NEURONFLEET_UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.exists(), f"{path} is missing: NEURONFLEET_UPDATE_GOLDEN=1 writes it"
    assert text == path.read_text()


@pytest.mark.parametrize(("size", "degree", "role"), CASES)
def test_units_are_as_in_the_golden_file(tmp_path: Path, size: str, degree: int, role: Role) -> None:
    units = render_raylet_units(plan_of(tmp_path, size, degree), role, NODE_IP)
    check_golden(f"{size}-tp{degree}-{role}.units", units_text(units))


def test_the_units_of_a_head_host_are_as_in_the_golden_file(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "inf2.xlarge", 2, "head")
    units = render_raylet_units(
        plan, "head", NODE_IP, extra_environment={"RAY_REDIS_ADDRESS": "redis.internal:6379"}
    )
    assert list(units) == ["neuronfleet-ray-head.service"]
    check_golden("head.units", units_text(units))


def test_no_golden_file_is_left_over() -> None:
    expected = {f"{size}-tp{degree}-{role}.units" for size, degree, role in CASES} | {"head.units"}
    assert {path.name for path in GOLDEN.iterdir()} == expected


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not on this machine")
@pytest.mark.parametrize("role", ["cell", "worker", "head"])
def test_systemd_finds_no_fault(tmp_path: Path, role: Role) -> None:
    units = render_raylet_units(plan_of(tmp_path, "inf2.48xlarge", 8, role), role, NODE_IP)
    folder = tmp_path / "units"
    folder.mkdir()
    for name, text in units.items():
        text = text.replace(raylets.RAY, "/bin/true").replace(raylets.NUMACTL, "/bin/true")
        (folder / name).write_text(text)
    (folder / "neuronfleet-failed@.service").write_text("[Service]\nType=oneshot\nExecStart=/bin/true\n")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *(str(path) for path in folder.iterdir())],
        capture_output=True,
        text=True,
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{folder}:"},
        check=False,
    )
    mine = [line for line in done.stderr.splitlines() if "neuronfleet" in line and "not found" not in line]
    assert mine == []


@pytest.mark.parametrize("role", ["cell", "worker"])
def test_arguments_survive_systemds_quoting(tmp_path: Path, role: Role) -> None:
    """What systemd would exec, by its own rules of quotes and %, is the command."""
    plan = plan_of(tmp_path, "inf2.48xlarge", 8)
    for raylet, text in zip(plan.raylets, render_raylet_units(plan, role, NODE_IP).values(), strict=True):
        line = next(line for line in text.splitlines() if line.startswith("ExecStart="))
        words = re.findall(r"'((?:\\.|[^'])*)'|(\S+)", line.removeprefix("ExecStart="))
        seen = [(quoted or plain).replace("%%", "%") for quoted, plain in words]
        assert seen == raylet_command(raylet, role, NODE_IP)


def test_a_cell_restarts_as_a_whole_with_its_head_and_workers_alone(tmp_path: Path) -> None:
    head, *workers = render_raylet_units(plan_of(tmp_path, "inf2.48xlarge", 2), "cell", NODE_IP).items()
    assert head[0] == "neuronfleet-ray-head.service" and len(workers) == 3
    for name, text in workers:
        assert name in head[1].split("Wants=")[2].splitlines()[0]
        assert "BindsTo=neuronfleet-ray-head.service\nAfter=neuronfleet-ray-head.service\n" in text
        assert "Requires=" not in text and "BindsTo=neuronfleet-ray-worker" not in text
    assert "BindsTo" not in head[1]


def test_workers_of_a_cluster_depend_on_no_local_head(tmp_path: Path) -> None:
    units = render_raylet_units(plan_of(tmp_path, "inf2.48xlarge", 2), "worker", NODE_IP)
    assert list(units) == [f"neuronfleet-ray-worker@{index}.service" for index in range(4)]
    assert all("ray-head" not in text and "--head" not in text for text in units.values())


@pytest.mark.parametrize("role", ["cell", "worker", "head"])
def test_every_raylet_says_what_ray_would_guess(tmp_path: Path, role: Role) -> None:
    plan = plan_of(tmp_path, "inf2.48xlarge", 8, role)
    seen: set[str] = set()
    for raylet, text in zip(plan.raylets, render_raylet_units(plan, role, NODE_IP).values(), strict=True):
        for flag in (
            "--num-cpus",
            "--memory",
            "--object-store-memory",
            "--resources",
            "--labels",
            "--temp-dir",
        ):
            assert f"{flag}=" in text
        assert 'Environment="RAY_AUTH_MODE=token"' in text
        assert 'Environment="RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES=1"' in text
        assert 'Environment="RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=1"' in text
        assert "KillMode=mixed" in text and "ray stop" not in text
        assert ("numactl" in text) == bool(raylet.numa_nodes)
        own = {word for word in text.split() if re.match(r"--(temp-dir|.*port)=", word)}
        assert not seen & own - {"--port=6379"}
        seen |= own


def test_a_percent_or_quote_in_a_variable_is_kept(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "inf2.8xlarge", 2)
    (text,) = render_raylet_units(plan, "cell", NODE_IP, extra_environment={"X": 'a"b%c\\d'}).values()
    assert 'Environment="X=a\\"b%%c\\\\d"' in text
