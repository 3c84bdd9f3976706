"""S3: bucket policies whose conditions moto cannot judge."""

from __future__ import annotations

import json
from typing import Any

from moto.s3 import models

from rehearsal.api.patches import Patch
from rehearsal.api.world import World


def patches(world: World) -> list[Patch]:
    """What changes in moto's S3."""
    permission = models.FakeBucket.get_permission

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

    return [
        Patch(
            models.FakeBucket,
            "get_permission",
            get_permission,
            "moto takes a Deny for plain HTTP as a Deny of everything, for it ignores conditions",
        )
    ]
