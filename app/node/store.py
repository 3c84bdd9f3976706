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

CHUNK_BYTES = 1 << 20
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

    def stream(self, key: str, start: int) -> Iterator[bytes]:
        """The object's bytes from offset ``start`` to its end, in chunks."""


def s3_client(region: str, connections: int) -> Any:
    """An S3 client with bounded waits; it retries requests, not the reading of answers."""
    config = Config(
        region_name=region,
        max_pool_connections=connections,
        connect_timeout=5,
        read_timeout=30,
        retries={"mode": "standard", "max_attempts": 6},
        # botocore's default in us-east-1 is the global name, which a private subnet may not reach.
        s3={"us_east_1_regional_endpoint": "regional"},
        # Every blob is verified by its sha256; botocore need not hash it a second time.
        response_checksum_validation="when_required",
    )
    return boto3.client("s3", config=config)


class S3Reader:
    """The artifact store's bucket."""

    def __init__(self, client: Any, bucket: str) -> None:
        self._client = client
        self._bucket = bucket

    def read(self, key: str, limit: int) -> bytes:
        """See ``BlobReader``."""
        size = self.size(key)
        if size > limit:
            raise StoreRefusal(f"s3://{self._bucket}/{key} has {size:,} bytes; expected at most {limit:,}")
        return b"".join(self.stream(key, 0))

    def size(self, key: str) -> int:
        """See ``BlobReader``."""
        try:
            return int(self._client.head_object(Bucket=self._bucket, Key=key)["ContentLength"])
        except (ClientError, BotoCoreError) as error:
            raise self._translated(key, error) from error

    def stream(self, key: str, start: int) -> Iterator[bytes]:
        """See ``BlobReader``."""
        arguments = {"Range": f"bytes={start}-"} if start else {}
        try:
            body = self._client.get_object(Bucket=self._bucket, Key=key, **arguments)["Body"]
            try:
                yield from body.iter_chunks(CHUNK_BYTES)
            finally:
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
        return StoreRefusal(
            f"{where} is refused ({code}): the instance's role needs s3:GetObject, and the object must exist"
        )
