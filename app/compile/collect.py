"""What of the artifact store may be removed: artifacts that no environment points at, and files of none.

An environment points at an artifact by its stack's parameter ``ArtifactDigest``. While a stack changes, the
artifact that it would roll back to is not told by the API, so nothing is collected then. The store's bucket
keeps versions: what is removed by mistake can be had back for as long as its lifecycle rule says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from app.compile.store import ArtifactStore, StoredArtifact, StoredBlob, StoreError

DIGEST_PARAMETER = "ArtifactDigest"


@dataclass(frozen=True)
class Collection:
    """What a collection would do. ``kept`` maps a digest to why it stays."""

    artifacts: tuple[StoredArtifact, ...]
    blobs: tuple[StoredBlob, ...]
    kept: Mapping[str, str]

    @property
    def size(self) -> int:
        """Bytes of files that go."""
        return sum(blob.size for blob in self.blobs)


def in_use(cloudformation: Any) -> dict[str, str]:
    """Digests that deployed stacks point at, each with the stacks' names.

    Raises:
        StoreError: the stacks cannot be read, or one is changing: then it is not known what is in use.
    """
    found: dict[str, list[str]] = {}
    changing = []
    try:
        for page in cloudformation.get_paginator("describe_stacks").paginate():
            for stack in page["Stacks"]:
                parameters = {
                    item["ParameterKey"]: item.get("ParameterValue", "")
                    for item in stack.get("Parameters", [])
                }
                if DIGEST_PARAMETER not in parameters or stack["StackStatus"] == "DELETE_COMPLETE":
                    continue
                found.setdefault(parameters[DIGEST_PARAMETER], []).append(stack["StackName"])
                if stack["StackStatus"].endswith(("_IN_PROGRESS", "ROLLBACK_FAILED")):
                    changing.append(f"{stack['StackName']} is {stack['StackStatus']}")
    except (ClientError, BotoCoreError) as error:
        raise StoreError(
            f"nothing is removed: which artifacts are in use cannot be read ({error}); "
            "cloudformation:DescribeStacks is needed"
        ) from error
    if changing:
        raise StoreError(
            f"nothing is removed: {', '.join(changing)}, and the artifact that it may go back to is not "
            "known; try again when it has ended"
        )
    return {digest: "stack " + ", ".join(sorted(names)) for digest, names in found.items()}


def plan_collection(
    store: ArtifactStore, used: Mapping[str, str], keep: Iterable[str], min_age: timedelta, now: datetime
) -> Collection:
    """Divide what the store holds into what stays and what may go.

    Args:
        store: the store.
        used: digests that must stay, with the reason.
        keep: more of them, or the beginnings of them.
        min_age: what was published less than this ago stays: somebody may be about to use it, and files may
            belong to a publish that has not ended.
        now: the time to reckon from.

    Raises:
        StoreError: a manifest cannot be read, or ``keep`` names something that is not there.
    """
    # Blobs are listed first: a publish that ends meanwhile shows its manifest then.
    blobs = store.blobs()
    artifacts = store.artifacts()
    kept = dict(used)
    for prefix in keep:
        kept.setdefault(store.resolve(prefix), "told to keep")
    for item in artifacts:
        if now - item.published < min_age:
            kept.setdefault(item.digest, "published lately")
    needed = {file.sha256 for item in artifacts if item.digest in kept for file in item.manifest.files}
    return Collection(
        artifacts=tuple(item for item in artifacts if item.digest not in kept),
        blobs=tuple(blob for blob in blobs if blob.sha256 not in needed and now - blob.written >= min_age),
        kept={item.digest: kept[item.digest] for item in artifacts if item.digest in kept},
    )


def collect(store: ArtifactStore, plan: Collection) -> int:
    """Remove what ``plan`` says: manifests first, so that no manifest ever lacks a file.

    Returns the bytes of the files that went. Artifacts that were published since the plan was made keep
    their files.
    """
    known = {item.digest for item in plan.artifacts} | set(plan.kept)
    store.remove_manifests([item.digest for item in plan.artifacts])
    needed = {
        file.sha256 for item in store.artifacts() if item.digest not in known for file in item.manifest.files
    }
    blobs = [blob for blob in plan.blobs if blob.sha256 not in needed]
    store.remove_blobs([blob.sha256 for blob in blobs])
    return sum(blob.size for blob in blobs)
