"""Synthesized environments, shared by the session: one synth takes a second or two."""

from __future__ import annotations

import functools
import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aws_cdk as cdk
import pytest

from infra.app import build
from infra.bundle import ROOT

Json = dict[str, Any]

ENVIRONMENTS = ("dev", "blueprint", "prod")

# Environment and overrides: sizes, topologies, ways out, edges, zones. Every one must pass every check.
MATRIX: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("dev", ()),
    ("blueprint", ()),
    ("prod", ()),
    ("dev", (("rehearsal", "true"),)),
    ("blueprint", (("rehearsal", "true"),)),
    ("prod", (("rehearsal", "true"),)),
    ("dev", (("instance_type", "inf2.xlarge"), ("max_capacity", "3"))),
    ("dev", (("instance_type", "inf2.48xlarge"), ("tp_degree", "8"), ("host_zones", "2"))),
    (
        "dev",
        (
            ("scheme", "internet-facing"),
            ("ingress_cidrs", "203.0.113.7/32"),
            ("zones", "us-west-2b,us-west-2d"),
        ),
    ),
    ("dev", (("egress", "none"), ("numactl_from", "image"), ("scheme", "internet-facing"))),
    ("blueprint", (("egress", "none"), ("numactl_from", "image"), ("desired_capacity", "3"))),
    (
        "prod",
        (
            ("topology", "cluster"),
            ("head_instance_type", "m7i.xlarge"),
            ("scheme", "internet-facing"),
            ("ingress_cidrs", "0.0.0.0/0"),
            ("domain_name", "llm.example.com"),
            ("certificate_arn", "arn:aws:acm:us-west-2:111122223333:certificate/0a1b2c3d"),
        ),
    ),
)


def case_name(case: tuple[str, tuple[tuple[str, str], ...]]) -> str:
    environment, overrides = case
    return "-".join([environment, *(f"{key}={value}" for key, value in overrides)])


@dataclass(frozen=True)
class Synthesized:
    """What one synth wrote. ``store`` and ``fleet`` are templates; ``folder`` is the cloud assembly."""

    environment: str
    folder: Path
    store: Json
    fleet: Json

    @property
    def templates(self) -> tuple[Json, Json]:
        return self.store, self.fleet

    def of_type(self, kind: str) -> dict[str, Json]:
        """The fleet template's resources of one type, by logical id."""
        return {name: item for name, item in self.fleet["Resources"].items() if item["Type"] == kind}

    def files(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.folder)): path.read_bytes()
            for path in self.folder.rglob("*")
            if path.is_file()
        }


Synth = Callable[..., Synthesized]


def tiny_bundle(folder: Path, content: str = "echo installed\n") -> Path:
    """A bundle with an install.sh and nothing else; the same bytes for the same content."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "bundle.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo("install.sh"), content)
    return path


def cdk_flags() -> Json:
    flags: Json = json.loads((ROOT / "cdk.json").read_text())["context"]
    return flags


def synthesize(folder: Path, environment: str, bundle: Path, **overrides: str) -> Synthesized:
    app = cdk.App(
        outdir=str(folder),
        context={**cdk_flags(), "env": environment, "bundle": str(bundle), **overrides},
    )
    build(app)
    app.synth()

    def template(name: str) -> Json:
        read: Json = json.loads((folder / f"{name}.template.json").read_text())
        return read

    name = f"neuronfleet-{environment}"
    return Synthesized(environment, folder, template(f"{name}-store"), template(name))


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bundle(tmp_path_factory.mktemp("bundle"))


@pytest.fixture(scope="session")
def synth(tmp_path_factory: pytest.TempPathFactory, bundle: Path) -> Synth:
    """``synth("dev", instance_type="inf2.xlarge")``, once for each set of arguments."""

    @functools.cache
    def cached(environment: str, overrides: tuple[tuple[str, str], ...]) -> Synthesized:
        return synthesize(tmp_path_factory.mktemp("cdk.out"), environment, bundle, **dict(overrides))

    def call(environment: str, **overrides: str) -> Synthesized:
        return cached(environment, tuple(sorted(overrides.items())))

    return call


@pytest.fixture(scope="session", params=MATRIX, ids=case_name)
def every(request: pytest.FixtureRequest, synth: Synth) -> Synthesized:
    """Each case of the matrix in turn."""
    environment, overrides = request.param
    return synth(environment, **dict(overrides))


@pytest.fixture(scope="session", params=ENVIRONMENTS)
def shipped(request: pytest.FixtureRequest, synth: Synth) -> Synthesized:
    """Each environment as its file has it."""
    return synth(request.param)
