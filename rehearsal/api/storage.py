"""S3: bucket policies whose conditions moto cannot judge, and ranges of large objects."""

from __future__ import annotations

import json
import threading
from typing import Any

from moto.s3 import models, responses

from rehearsal.api.patches import Patch
from rehearsal.api.world import World


class Window:
    """An object's bytes that are read only where they are asked for."""

    def __init__(self, key: Any) -> None:
        self._key = key

    def __len__(self) -> int:
        return int(self._key.contentsize)

    def __getitem__(self, part: slice) -> bytes:
        start, stop, _ = part.indices(len(self))
        with self._key.lock:
            self._key._value_buffer.seek(start)
            return bytes(self._key._value_buffer.read(max(0, stop - start)))

    def __bytes__(self) -> bytes:
        return self[:]


def patches(world: World) -> list[Patch]:
    """What changes in moto's S3."""
    permission, value = models.FakeBucket.get_permission, models.FakeKey.value
    respond = responses.S3Response.key_response
    asked = threading.local()

    def get_permission(bucket: Any, action: str, resource: str) -> Any:
        policy = bucket.policy
        if policy is None:
            return permission(bucket, action, resource)
        document = json.loads(policy)
        kept = [statement for statement in document["Statement"] if "Condition" not in statement]
        bucket.policy = json.dumps({**document, "Statement": kept}).encode() if kept else None
        try:
            return permission(bucket, action, resource)
        finally:
            bucket.policy = policy

    def read_value(key: Any) -> Any:
        return Window(key) if getattr(asked, "for_range", False) else value.fget(key)

    def key_response(response: Any, request: Any, full_url: str, headers: dict[str, Any]) -> Any:
        asked.for_range = request.method == "GET" and bool(request.headers.get("range"))
        try:
            status, answer_headers, content = respond(response, request, full_url, headers)
        finally:
            asked.for_range = False
        return status, answer_headers, bytes(content) if isinstance(content, Window) else content

    ranges = "moto reads the whole object for each range: a model in 8 MiB parts would be read 30 times"
    return [
        Patch(
            models.FakeBucket,
            "get_permission",
            get_permission,
            "moto takes a Deny for plain HTTP as a Deny of everything, for it ignores conditions",
        ),
        Patch(models.FakeKey, "value", property(read_value, value.fset), ranges),
        Patch(responses.S3Response, "key_response", key_response, ranges),
    ]
