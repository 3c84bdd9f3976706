"""Does an artifact fit this host and this environment? Asked before a byte of it is fetched, and again before
an engine loads it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from app.compile.manifest import Manifest
from app.node.config import NodeConfig
from app.node.local import Lease, LocalArtifactError, folder_problems, hold, read_local_manifest
from app.node.topology.model import TOPOLOGY_PATH, TopologyError, load_plan
from app.plan.profiles import get_profile

_DRIVER = Path("sys/module/neuron/version")
_RUNTIME = "opt/aws/neuron/lib/libnrt.so.*"


class MatchError(Exception):
    """The artifact on this host is not what the engine must load; the message holds every reason."""


@dataclass(frozen=True)
class HostFacts:
    """What a host has; None where nothing says it. ``cores`` is the number of NeuronCores that its plan
    divides, ``driver`` and ``runtime`` are versions."""

    cores: int | None = None
    driver: str | None = None
    runtime: str | None = None


def host_facts(root: Path = Path("/"), topology: Path = TOPOLOGY_PATH) -> HostFacts:
    """Read them from the driver, the runtime library's file name and the topology plan.

    The library is installed as ``libnrt.so.<version>``, which may be shorter than the package's version. Not
    yet run on hardware.
    """
    driver = runtime = cores = None
    with contextlib.suppress(OSError):
        driver = (root / _DRIVER).read_text().strip() or None
    names = [path.name.removeprefix("libnrt.so.") for path in root.glob(_RUNTIME) if not path.is_symlink()]
    if len(names) == 1:
        runtime = names[0]
    with contextlib.suppress(TopologyError):
        plan = load_plan(topology)
        cores = sum(len(block.cores) for block in plan.blocks) + len(plan.idle_cores)
    return HostFacts(cores=cores, driver=driver, runtime=runtime)


def mismatches(
    manifest: Manifest,
    config: NodeConfig,
    instance_type: str | None = None,
    host: HostFacts | None = None,
) -> list[str]:
    """Every way in which ``manifest`` differs from what the host is to serve; empty when it fits.

    Compiled graphs are static, so on Neuron the tensor parallel degree, batch size and length must be the
    very ones of the node config. Engines that compile nothing only need the model and its length.

    Args:
        manifest: the artifact's.
        config: the host's.
        instance_type: ``inf2.8xlarge`` and so on; None leaves the family unchecked.
        host: what the host has; None leaves cores, driver and runtime unchecked.
    """
    engine = config.engine
    profile = get_profile(engine.profile)
    found: list[str] = []

    def differ(field: str, wanted: object, got: object, advice: str) -> None:
        found.append(f"artifact's {field} is {got!r}, this host wants {wanted!r}: {advice}")

    recompile = "compile the model for this environment, or set ArtifactDigest to the artifact that was"
    if manifest.model.rsplit("/", 1)[-1] != engine.model.rsplit("/", 1)[-1]:
        differ("model", engine.model, manifest.model, "set ArtifactDigest to this model's artifact")
    if manifest.profile != engine.profile:
        differ("engine profile", engine.profile, manifest.profile, recompile)
    else:
        found.extend(
            f"artifact's {problem}: {recompile}" for problem in profile.version_problems(manifest.versions)
        )
    if manifest.dtype != engine.dtype:
        differ("weights dtype", engine.dtype, manifest.dtype, recompile)
    if profile.capabilities.neuron:
        for name in ("tp_degree", "batch_size", "max_model_len"):
            wanted, got = getattr(engine, name), getattr(manifest, name)
            if wanted != got:
                differ(name, wanted, got, recompile)
        if manifest.buckets and max(manifest.buckets) < engine.max_model_len:
            differ("longest bucket", engine.max_model_len, max(manifest.buckets), recompile)
        family = instance_type.split(".", 1)[0] if instance_type else manifest.instance_family
        if family != manifest.instance_family:
            differ("instance family", family, manifest.instance_family, recompile)
        found.extend(_host_mismatches(manifest, host or HostFacts()))
    elif manifest.max_model_len < engine.max_model_len:
        differ("max_model_len", engine.max_model_len, manifest.max_model_len, "lower max_model_len")
    return found


def _host_mismatches(manifest: Manifest, host: HostFacts) -> list[str]:
    found = []
    if host.cores is not None and manifest.tp_degree > host.cores:
        found.append(
            f"artifact's tp_degree is {manifest.tp_degree}, this host has {host.cores} NeuronCores: take a "
            "larger instance type, or compile for a smaller tp_degree"
        )
    for component, got in (("driver", host.driver), ("runtime", host.runtime)):
        made_for = manifest.versions.get(component)
        # The host may name fewer places of a version than the profile pins.
        if made_for and got and not f"{made_for}.".startswith(f"{got}.") and not got.startswith(made_for):
            found.append(
                f"artifact's {component} is {made_for!r}, this host has {got!r}: launch the hosts from the "
                f"AMI of profile {manifest.profile}, or compile the model for the one that they have"
            )
    return found


def hold_for_engine(
    folder: Path, config: NodeConfig, instance_type: str | None = None, host: HostFacts | None = None
) -> Lease:
    """What an engine asks before it loads ``folder`` (``<artifacts>/<digest>``): the artifact is there, has
    all its files and no others, and fits. It is not evicted while the lease lasts.

    Raises:
        MatchError: every reason why it must not be loaded.
    """
    try:
        lease = hold(folder)
        try:
            manifest = read_local_manifest(folder)
            problems = folder_problems(folder, manifest) + mismatches(manifest, config, instance_type, host)
            if problems:
                raise MatchError(f"artifact {folder.name} must not be loaded here: " + "; ".join(problems))
        except BaseException:
            lease.release()
            raise
    except LocalArtifactError as error:
        raise MatchError(str(error)) from error
    return lease
