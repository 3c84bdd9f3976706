"""Does an artifact fit this host and this environment? Asked before a byte of it is fetched."""

from __future__ import annotations

from app.compile.manifest import Manifest
from app.node.config import NodeConfig
from app.plan.profiles import get_profile


def mismatches(manifest: Manifest, config: NodeConfig, instance_type: str | None = None) -> list[str]:
    """Every way in which ``manifest`` differs from what the host is to serve; empty when it fits.

    Compiled graphs are static, so on Neuron the tensor parallel degree, batch size and length must be the
    very ones of the node config. Engines that compile nothing only need the model and its length.

    Args:
        manifest: the artifact's.
        config: the host's.
        instance_type: ``inf2.8xlarge`` and so on; None leaves the family unchecked.
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
        family = instance_type.split(".", 1)[0] if instance_type else manifest.instance_family
        if family != manifest.instance_family:
            differ("instance family", family, manifest.instance_family, recompile)
    elif manifest.max_model_len < engine.max_model_len:
        differ("max_model_len", engine.max_model_len, manifest.max_model_len, "lower max_model_len")
    return found
