"""The systemd units of a host, by role: golden files, systemd's own check, and what must hold of all of them.

UPDATE_GOLDEN=1 writes the golden files anew; read the difference before committing it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from app.node import units
from app.node.config import NodeConfig
from app.node.configure import configure, install_units, render
from app.node.host import Identity
from app.node.topology import Device, HostTopology, NumaNode
from app.node.units import Role

GOLDEN = Path(__file__).parent / "golden" / "boot"
ROLES: tuple[Role, ...] = ("cell", "head", "worker")
IP = "10.0.0.12"


def config_of(role: Role) -> NodeConfig:
    values = {
        "version": 1,
        "environment": "dev",
        "region": "us-east-1",
        "role": role,
        "signal": {"stack": "neuronfleet-dev", "logical_id": "Fleet"},
        "artifact": {"bucket": "artifacts", "digest": "0" * 64},
        "engine": {"profile": "cpu", "model": "m", "tp_degree": 2, "batch_size": 4, "max_model_len": 512},
        "serve": {"keep_alive_s": 400},
        "numactl_from": "image",
    }
    if role != "cell":
        values["cluster"] = {"head_address_parameter": "/nf/head", "auth_token_secret_arn": "arn:token"}
    return NodeConfig.model_validate(values)


def two_node_host() -> HostTopology:
    return HostTopology(
        devices=(Device(index=0, cores=(0, 1), numa_node=0), Device(index=1, cores=(2, 3), numa_node=1)),
        nodes=(
            NumaNode(index=0, cpus=(0, 1), memory_bytes=16 << 30),
            NumaNode(index=1, cpus=(2, 3), memory_bytes=16 << 30),
        ),
        cpus=(0, 1, 2, 3),
        memory_bytes=32 << 30,
        shm_bytes=16 << 30,
    )


def configured(role: Role, root: Path) -> dict[str, str]:
    """All units of a host of ``role``, rendered into ``root``: path below the unit folders -> text."""
    identity = Identity(instance_id="i-0123456789abcdef0", private_ip=IP, instance_type="inf2.8xlarge")
    calls: list[tuple[str, ...]] = []
    configure(config_of(role), identity, two_node_host(), root=root, run=lambda *a: calls.append(a))
    assert calls == [("daemon-reload",), ("start", "--no-block", "neuronfleet.target")]
    install_units(root)
    found = {}
    for folder in (root / "run/systemd/system", root / "etc/systemd/system"):
        found |= {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}
    return found


@pytest.mark.parametrize("role", ROLES)
def test_golden(role: Role, tmp_path: Path) -> None:
    raylet = re.compile(r"neuronfleet-ray-(head|worker@\d+)\.service")  # app.node.raylet has its own
    made = {name: text for name, text in configured(role, tmp_path).items() if not raylet.fullmatch(name)}
    folder = GOLDEN / role
    if os.environ.get("UPDATE_GOLDEN"):
        shutil.rmtree(folder, ignore_errors=True)
        for name, text in made.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    expected = {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}
    assert made == expected


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
@pytest.mark.parametrize("role", ROLES)
def test_systemd_takes_the_units(role: Role, tmp_path: Path) -> None:
    found = configured(role, tmp_path)
    names = [name for name in found if "/" not in name and "@." not in name]
    names.append("neuronfleet-failed@neuronfleet-ray-worker@1.service.service")
    path = f"{tmp_path}/run/systemd/system:{tmp_path}/etc/systemd/system:"
    run = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *names],
        capture_output=True,
        text=True,
        env={**os.environ, "SYSTEMD_UNIT_PATH": path},
    )
    # This machine has none of the host's programs; everything else that systemd says is a fault.
    faults = [line for line in run.stderr.splitlines() if "is not executable" not in line]
    assert faults == []


@pytest.mark.parametrize("role", ROLES)
def test_every_unit_reports_its_failure(role: Role, tmp_path: Path) -> None:
    for name, text in configured(role, tmp_path).items():
        if name.endswith(".service") and not name.startswith("neuronfleet-failed@"):
            assert "OnFailure=neuronfleet-failed@%n.service" in text, name


@pytest.mark.parametrize("role", ROLES)
def test_no_unit_needs_one_that_the_host_does_not_have(role: Role, tmp_path: Path) -> None:
    found = configured(role, tmp_path)
    for name, text in found.items():
        for line in re.findall(r"^(?:Requires|Wants|BindsTo|After)=(.*)$", text, re.MULTILINE):
            for needed in line.split():
                assert needed in found or not needed.startswith("neuronfleet"), f"{name} needs {needed}"


@pytest.mark.parametrize("role", ROLES)
def test_stopping_the_target_stops_all_in_reverse_order(role: Role, tmp_path: Path) -> None:
    found = configured(role, tmp_path)
    wanted = re.findall(r"^Wants=(.*)$", found[units.TARGET], re.MULTILINE)[0].split()
    assert set(wanted) == {
        name for name in found if name.startswith("neuronfleet-") and name.endswith(".service")
    } - {units.CONFIGURE, units.FAILED}
    for name in wanted:
        assert f"PartOf={units.TARGET}" in found[name], name


@pytest.mark.parametrize(
    ("role", "first", "then"),
    [
        ("cell", units.FETCH, units.SERVE),
        ("cell", units.RAY_HEAD, units.SERVE),
        ("cell", units.RAY_TOKEN, "neuronfleet-ray-worker@1.service.d/10-boot.conf"),
        ("head", units.RAY_HEAD, units.HEAD_ADDRESS),
        ("worker", units.FETCH, "neuronfleet-ray-worker@0.service.d/10-boot.conf"),
        ("worker", units.HEAD_ADDRESS, "neuronfleet-ray-worker@0.service.d/10-boot.conf"),
    ],
)
def test_order(role: Role, first: str, then: str, tmp_path: Path) -> None:
    text = configured(role, tmp_path)[then]
    for keyword in ("Requires", "After"):
        line = re.findall(rf"^{keyword}=(.*)$", text, re.MULTILINE)[0]
        assert first in line.split()


def test_a_later_plan_leaves_no_unit_of_the_earlier(tmp_path: Path) -> None:
    configured("cell", tmp_path)
    found = configured("worker", tmp_path)
    assert units.SERVE not in found and units.RAY_HEAD not in found
    assert not any(name.startswith(f"{units.RAY_HEAD}.d") for name in found)
    assert not (tmp_path / "run/neuronfleet/head.env").exists(), "a worker learns it from its head"


def test_files_that_units_read(tmp_path: Path) -> None:
    configured("cell", tmp_path)
    run = tmp_path / "run/neuronfleet"
    assert (run / "head.env").read_text() == f"HEAD_ADDRESS={IP}:6379\n"
    assert "NEURONFLEET_INSTANCE_ID=i-0123456789abcdef0\n" in (run / "host.env").read_text()
    assert (run / "topology.json").stat().st_mode & 0o777 == 0o644


def test_no_secret_in_the_units() -> None:
    from app.node.topology import plan_topology

    plan = plan_topology(two_node_host(), 2)
    for name, text in render(config_of("worker"), plan, IP).items():
        assert "SecretString" not in text and "RAY_AUTH_TOKEN=" not in text, name
