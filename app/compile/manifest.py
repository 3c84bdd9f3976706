"""The artifact manifest: what an artifact is made of and what it may run on.

In the store (one S3 bucket) a file lives at ``blobs/sha256/<hex>`` and a manifest at
``manifests/<digest>.json``, where the digest is the sha256 of the manifest's canonical JSON bytes. The digest
therefore names every byte of the artifact.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

MANIFEST_VERSION = 1
MANIFEST_NAME = "manifest.json"

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def blob_key(sha256: str) -> str:
    """Store key of a file's bytes."""
    return f"blobs/sha256/{sha256}"


def manifest_key(digest: str) -> str:
    """Store key of a manifest."""
    return f"manifests/{digest}.json"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ArtifactFile(_Frozen):
    """One file: POSIX path relative to the artifact's folder, size in bytes, sha256 in hex."""

    path: str
    size: int = Field(ge=0)
    sha256: Sha256

    @field_validator("path")
    @classmethod
    def _inside_the_folder(cls, value: str) -> str:
        path = PurePosixPath(value)
        if not value or path.is_absolute() or ".." in path.parts or str(path) != value or "\\" in value:
            raise ValueError(f"path {value!r} must be relative, normalized and inside the artifact's folder")
        if value == MANIFEST_NAME:
            raise ValueError(f"path {value!r} is the manifest's own name")
        return value


class Manifest(_Frozen):
    """An artifact: the model, what it was compiled with and for, and its files.

    ``versions`` maps component (``sdk``, ``neuronx-cc``, ``vllm``, ``plugin``, ``python`` …) to the version
    it was made with; lengths are in tokens, ``batch_size`` in sequences.
    """

    version: Literal[1] = 1
    model: str
    model_digest: Sha256 = Field(description="sha256 over the model's own files, before compilation")
    profile: str
    versions: dict[str, str]
    instance_family: str = "inf2"
    tp_degree: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    max_model_len: int = Field(ge=1)
    buckets: tuple[int, ...] = ()
    dtype: str = "bf16"
    files: tuple[ArtifactFile, ...]

    @field_validator("files")
    @classmethod
    def _sorted_and_unique(cls, value: tuple[ArtifactFile, ...]) -> tuple[ArtifactFile, ...]:
        paths = [file.path for file in value]
        if len(set(paths)) != len(paths):
            raise ValueError("two files have the same path")
        return tuple(sorted(value, key=lambda file: file.path))

    def canonical_bytes(self) -> bytes:
        """The manifest as the bytes that are stored and hashed: sorted keys, no spaces, UTF-8."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()

    def digest(self) -> str:
        """sha256 of :meth:`canonical_bytes`: the artifact's name."""
        return hashlib.sha256(self.canonical_bytes()).hexdigest()
