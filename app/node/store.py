"""Reading the artifact store from a host: the seam between the fetch and S3.

A reader gives manifests whole and blobs as byte ranges; retrying a broken read is the fetch's work, since
only it knows how far it had come. Failures that no retry mends are ``StoreRefusal``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

CHUNK_BYTES = 512 << 10
_FINAL_CODES = {
    "NoSuchKey",
    "NoSuchBucket",
    "404",
    "403",
    "AccessDenied",
    "InvalidAccessKeyId",
    "InvalidRange",
}


class StoreRefusal(Exception):
    """The store says no, and would again: the message names the object and what to do."""


class StoreUnavailable(Exception):
    """A read that broke or was not answered; another try may succeed."""


class BlobReader(Protocol):
    """What the fetch needs of a store. Methods raise ``StoreRefusal`` or ``StoreUnavailable``."""

    def read(self, key: str, limit: int) -> bytes:
        """The whole object, which may have at most ``limit`` bytes."""

    def size(self, key: str) -> int:
        """Size of the object in bytes."""

    def stream(self, key: str, start: int, length: int, total: int) -> Iterator[bytes]:
        """``length`` bytes from offset ``start``, in chunks, of an object that must have ``total`` bytes.

        An object of another size is refused before a byte of it is given.
        """


def s3_client(
    region: str, connections: int, *, endpoint_url: str | None = None, read_timeout_s: float = 30
) -> Any:
    """An S3 client with bounded waits; it retries requests, not the reading of answers.

    Args:
        region: the bucket's.
        connections: how many requests run at once.
        endpoint_url: another place than S3's own in the region (tests, benchmarks).
        read_timeout_s: how long an answer may stand still before the read counts as broken.
    """
    addressing: Any = {"addressing_style": "path"} if endpoint_url else {}
    config = Config(
        region_name=region,
        max_pool_connections=connections,
        connect_timeout=5,
        read_timeout=read_timeout_s,
        retries={"mode": "standard", "max_attempts": 6},
        # botocore's default in us-east-1 is the global name, which a private subnet may not reach.
        s3={"us_east_1_regional_endpoint": "regional"} | addressing,
        # Every blob is verified by its sha256; botocore need not hash it a second time.
        response_checksum_validation="when_required",
    )
    return boto3.client("s3", config=config, endpoint_url=endpoint_url)


class S3Reader:
    """The artifact store's bucket."""

    def __init__(self, client: Any, bucket: str) -> None:
        self._client = client
        self._bucket = bucket

    def read(self, key: str, limit: int) -> bytes:
        """See ``BlobReader``."""
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=key)
            size = int(answer["ContentLength"])
            if size > limit:
                answer["Body"].close()
                raise StoreRefusal(
                    f"s3://{self._bucket}/{key} has {size:,} bytes; expected at most {limit:,}"
                )
            return bytes(answer["Body"].read())
        except (ClientError, BotoCoreError, HTTPError, OSError) as error:
            raise self._translated(key, error) from error

    def size(self, key: str) -> int:
        """See ``BlobReader``."""
        try:
            return int(self._client.head_object(Bucket=self._bucket, Key=key)["ContentLength"])
        except (ClientError, BotoCoreError) as error:
            raise self._translated(key, error) from error

    def stream(self, key: str, start: int, length: int, total: int) -> Iterator[bytes]:
        """See ``BlobReader``."""
        try:
            answer = self._client.get_object(
                Bucket=self._bucket, Key=key, Range=f"bytes={start}-{start + length - 1}"
            )
            body = answer["Body"]
            try:
                described = str(answer.get("ContentRange") or answer["ContentLength"])
                found = int(described.rpartition("/")[2])
                if found != total:
                    raise StoreRefusal(f"wanted {total:,} bytes, found {found:,} in the store ({key})")
                yield from body.iter_chunks(CHUNK_BYTES)
            finally:
                # A body that was not read to its end is worth less than a new connection.
                body.close()
        except (ClientError, BotoCoreError, HTTPError, OSError) as error:
            raise self._translated(key, error) from error

    def _translated(self, key: str, error: Exception) -> Exception:
        where = f"s3://{self._bucket}/{key}"
        if not isinstance(error, ClientError):
            return StoreUnavailable(f"{where}: {type(error).__name__}: {error}")
        code = error.response["Error"]["Code"]
        if code not in _FINAL_CODES:
            return StoreUnavailable(f"{where}: {error}")
        if code in {"NoSuchKey", "404"}:
            return StoreRefusal(f"{where} does not exist: was the artifact published whole to this bucket?")
        if code == "NoSuchBucket":
            return StoreRefusal(f"bucket {self._bucket} does not exist: is the store's stack deployed?")
        if code == "InvalidRange":
            return StoreRefusal(f"{where} is shorter than the manifest says: publish the artifact again")
        return StoreRefusal(
            f"{where} is refused ({code}): the instance's role needs s3:GetObject, and the object must exist"
        )
