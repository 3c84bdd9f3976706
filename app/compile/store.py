"""The artifact store: publishing to it and reading what it holds.

A file is stored once, under its sha256; a manifest comes after all its files and is never overwritten. So a
manifest that can be read is whole, an interrupted publish leaves nothing that a host would take, and two
publishers at once do each other no harm: the same key holds the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError
from pydantic import ValidationError

from app.compile.folder import Advance, ArtifactError
from app.compile.manifest import ArtifactFile, Manifest, blob_key, manifest_key

_MANIFESTS = "manifests/"
_BLOBS = blob_key("")
_DELETE_AT_ONCE = 1000


class StoreError(Exception):
    """The store refused or holds something else than expected; the message says what and where."""


@dataclass(frozen=True)
class Published:
    """What a publish did: files and bytes that were sent, and those that the store held already."""

    digest: str
    sent_files: int
    sent_bytes: int
    held_files: int


@dataclass(frozen=True)
class StoredBlob:
    """A file in the store; ``size`` in bytes."""

    sha256: str
    size: int
    written: datetime


@dataclass(frozen=True)
class StoredArtifact:
    """An artifact in the store. ``size`` is of all its files, in bytes."""

    digest: str
    manifest: Manifest
    published: datetime

    @property
    def size(self) -> int:
        return sum(file.size for file in self.manifest.files)


class ArtifactStore:
    """One S3 bucket. Methods raise ``StoreError``; ``client`` is a boto3 S3 client."""

    def __init__(self, client: Any, bucket: str, *, workers: int = 4) -> None:
        self.client = client
        self._bucket = bucket
        self._workers = workers

    def publish(self, folder: Path, manifest: Manifest, advance: Advance | None = None) -> Published:
        """Send what the store lacks of ``folder``, then the manifest.

        Args:
            folder: holds the manifest's files.
            manifest: what they are; made from this folder just now.
            advance: told of bytes sent, or found in the store.

        Raises:
            ArtifactError: a file is not (any more) what the manifest says.
            StoreError: S3 refused.
        """
        unique = {file.sha256: file for file in manifest.files}
        stamps = {sha256: _stamp(folder / file.path) for sha256, file in unique.items()}
        try:
            with ThreadPoolExecutor(self._workers) as pool:
                sent = list(pool.map(lambda file: self._send(folder, file, advance), unique.values()))
            changed = [
                file.path
                for sha256, file in unique.items()
                if _stamp(folder / file.path) != stamps[sha256] or stamps[sha256][0] != file.size
            ]
            if changed:
                raise ArtifactError(
                    f"{', '.join(changed)} changed while being published; nothing points at what was sent: "
                    "publish again when nothing writes to the folder"
                )
            self._put_manifest(manifest)
            # A collection that ran meanwhile may have taken what this publish found to be there.
            held = [file for file, count in zip(unique.values(), sent, strict=True) if count is None]
            with ThreadPoolExecutor(self._workers) as pool:
                list(pool.map(lambda file: self._send(folder, file, None), held))
        except (ClientError, BotoCoreError) as error:
            raise self._refused("publish", error) from error
        return Published(
            digest=manifest.digest(),
            sent_files=sum(1 for count in sent if count is not None),
            sent_bytes=sum(count or 0 for count in sent),
            held_files=sum(1 for count in sent if count is None),
        )

    def read_manifest(self, digest: str) -> Manifest:
        """The manifest of a digest, checked against it."""
        key = manifest_key(digest)
        try:
            content = self.client.get_object(Bucket=self._bucket, Key=key)["Body"].read()
        except self.client.exceptions.NoSuchKey as error:
            raise StoreError(f"bucket {self._bucket} has no artifact {digest}") from error
        except (ClientError, BotoCoreError) as error:
            raise self._refused(f"read {key}", error) from error
        found = hashlib.sha256(content).hexdigest()
        if found != digest:
            raise StoreError(f"{key}: wanted sha256 {digest}, found {found}")
        try:
            return Manifest.model_validate_json(content)
        except ValidationError as error:
            raise StoreError(f"{key} is no manifest that this version reads: {error}") from error

    def artifacts(self) -> list[StoredArtifact]:
        """Every artifact in the store, newest first."""
        entries = list(self._manifest_keys())
        with ThreadPoolExecutor(8) as pool:
            manifests = list(pool.map(lambda entry: self.read_manifest(entry[0]), entries))
        found = [
            StoredArtifact(digest, manifest, published)
            for (digest, published), manifest in zip(entries, manifests, strict=True)
        ]
        return sorted(found, key=lambda item: item.published, reverse=True)

    def resolve(self, prefix: str) -> str:
        """The one digest in the store that begins with ``prefix``."""
        found = [digest for digest, _ in self._manifest_keys() if digest.startswith(prefix)]
        if len(found) == 1:
            return found[0]
        if not found:
            raise StoreError(f"bucket {self._bucket} has no artifact whose digest begins with {prefix!r}")
        raise StoreError(f"{prefix!r} is not unique: {', '.join(sorted(found))}")

    def blobs(self) -> list[StoredBlob]:
        """Every file in the store, whether an artifact has it or not."""
        return [
            StoredBlob(item["Key"].removeprefix(_BLOBS), item["Size"], item["LastModified"])
            for item in self._objects(_BLOBS, "list files")
        ]

    def remove_manifests(self, digests: Sequence[str]) -> None:
        """Remove artifacts; their files stay."""
        self._remove([manifest_key(digest) for digest in digests])

    def remove_blobs(self, sha256s: Sequence[str]) -> None:
        """Remove files. No manifest may name them."""
        self._remove([blob_key(sha256) for sha256 in sha256s])

    def _remove(self, keys: Sequence[str]) -> None:
        try:
            for start in range(0, len(keys), _DELETE_AT_ONCE):
                some = [{"Key": key} for key in keys[start : start + _DELETE_AT_ONCE]]
                answer = self.client.delete_objects(Bucket=self._bucket, Delete={"Objects": some})
                failed = [f"{item['Key']} ({item['Code']})" for item in answer.get("Errors", [])]
                if failed:
                    raise StoreError(f"bucket {self._bucket} refused to remove {', '.join(failed)}")
        except (ClientError, BotoCoreError) as error:
            raise self._refused("remove", error) from error

    def _objects(self, prefix: str, what: str) -> Iterator[dict[str, Any]]:
        try:
            pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix)
            for page in pages:
                yield from page.get("Contents", [])
        except (ClientError, BotoCoreError) as error:
            raise self._refused(what, error) from error

    def _manifest_keys(self) -> Iterator[tuple[str, datetime]]:
        for item in self._objects(_MANIFESTS, "list artifacts"):
            yield item["Key"].removeprefix(_MANIFESTS).removesuffix(".json"), item["LastModified"]

    def _send(self, folder: Path, file: ArtifactFile, advance: Advance | None) -> int | None:
        """Bytes sent, or None when the store holds the blob already."""
        key = blob_key(file.sha256)
        try:
            head = self.client.head_object(Bucket=self._bucket, Key=key)
        except ClientError as error:
            if error.response["Error"]["Code"] not in {"404", "NoSuchKey", "403"}:
                raise
        else:
            if head["ContentLength"] == file.size:
                if advance:
                    advance(file.size)
                return None
        # S3 checks the bytes on arrival against the checksum that is sent along.
        self.client.upload_file(
            str(folder / file.path),
            self._bucket,
            key,
            ExtraArgs={"ChecksumAlgorithm": "SHA256"},
            Callback=advance,
        )
        return file.size

    def _put_manifest(self, manifest: Manifest) -> None:
        """Write the manifest unless it is there: its key is its digest, so what is there is the same."""
        content = manifest.canonical_bytes()
        try:
            self.client.put_object(
                Bucket=self._bucket,
                Key=manifest_key(manifest.digest()),
                Body=content,
                ContentType="application/json",
                IfNoneMatch="*",
            )
        except ClientError as error:
            if error.response["Error"]["Code"] not in {"PreconditionFailed", "412"}:
                raise

    def _refused(self, what: str, error: Exception) -> StoreError:
        code = error.response["Error"]["Code"] if isinstance(error, ClientError) else ""
        if code == "NoSuchBucket":
            return StoreError(
                f"cannot {what}: there is no bucket {self._bucket}; the store's stack has it as its output "
                "ArtifactBucketName"
            )
        return StoreError(f"cannot {what} in bucket {self._bucket}: {error}")


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
