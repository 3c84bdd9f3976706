"""The metadata tree of one instance, as paths and values."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

Value = str | Callable[[], str]


@dataclass(frozen=True)
class Credentials:
    """Temporary credentials of the instance's role."""

    access_key_id: str
    secret_access_key: str
    token: str
    issued: datetime
    expires: datetime

    def document(self) -> str:
        """The JSON that ``iam/security-credentials/ROLE`` answers."""
        return json.dumps(
            {
                "Code": "Success",
                "LastUpdated": _time(self.issued),
                "Type": "AWS-HMAC",
                "AccessKeyId": self.access_key_id,
                "SecretAccessKey": self.secret_access_key,
                "Token": self.token,
                "Expiration": _time(self.expires),
            },
            indent=2,
        )


@dataclass(frozen=True)
class InstanceMetadata:
    """What the service knows of an instance. ``credentials`` issues or renews; None: no instance profile."""

    instance_id: str
    instance_type: str
    image_id: str
    private_ip: str
    hostname: str
    mac: str
    availability_zone: str
    availability_zone_id: str
    region: str
    account: str
    reservation_id: str
    launched: datetime
    security_groups: tuple[str, ...]
    user_data: bytes | None
    hop_limit: int
    enabled: bool
    instance_profile_arn: str | None = None
    instance_profile_id: str = ""
    role: str | None = None
    credentials: Callable[[], Credentials] | None = None
    lifecycle_state: str | None = None
    """``autoscaling/target-lifecycle-state``: InService, Terminated; None outside a group."""


def tree(instance: InstanceMetadata) -> dict[str, Value]:
    """Every leaf below the version, as ``meta-data/instance-id`` -> value (callables are asked each time)."""
    data: dict[str, Value] = {
        "meta-data/ami-id": instance.image_id,
        "meta-data/ami-launch-index": "0",
        "meta-data/ami-manifest-path": "(unknown)",
        "meta-data/hostname": instance.hostname,
        "meta-data/instance-action": "none",
        "meta-data/instance-id": instance.instance_id,
        "meta-data/instance-life-cycle": "on-demand",
        "meta-data/instance-type": instance.instance_type,
        "meta-data/local-hostname": instance.hostname,
        "meta-data/local-ipv4": instance.private_ip,
        "meta-data/mac": instance.mac,
        "meta-data/placement/availability-zone": instance.availability_zone,
        "meta-data/placement/availability-zone-id": instance.availability_zone_id,
        "meta-data/placement/region": instance.region,
        "meta-data/profile": "default-hvm",
        "meta-data/reservation-id": instance.reservation_id,
        "meta-data/security-groups": "\n".join(instance.security_groups),
        "meta-data/services/domain": "amazonaws.com",
        "meta-data/services/partition": "aws",
        "dynamic/instance-identity/document": identity_document(instance),
    }
    if instance.role and instance.credentials:
        credentials = instance.credentials
        data["meta-data/iam/info"] = json.dumps(
            {
                "Code": "Success",
                "LastUpdated": _time(instance.launched),
                "InstanceProfileArn": instance.instance_profile_arn,
                "InstanceProfileId": instance.instance_profile_id,
            },
            indent=2,
        )
        data[f"meta-data/iam/security-credentials/{instance.role}"] = lambda: credentials().document()
    if instance.lifecycle_state:
        data["meta-data/autoscaling/target-lifecycle-state"] = instance.lifecycle_state
    return data


def identity_document(instance: InstanceMetadata) -> str:
    """The instance identity document (unsigned: the rehearsal has no key of AWS's)."""
    return json.dumps(
        {
            "accountId": instance.account,
            "architecture": "x86_64",
            "availabilityZone": instance.availability_zone,
            "billingProducts": None,
            "devpayProductCodes": None,
            "marketplaceProductCodes": None,
            "imageId": instance.image_id,
            "instanceId": instance.instance_id,
            "instanceType": instance.instance_type,
            "kernelId": None,
            "pendingTime": _time(instance.launched),
            "privateIp": instance.private_ip,
            "ramdiskId": None,
            "region": instance.region,
            "version": "2017-09-30",
        },
        indent=2,
    )


def listing(leaves: dict[str, Value], path: str) -> str | None:
    """The names below ``path``, one a line, folders with a slash; None when nothing is there."""
    prefix = f"{path}/" if path else ""
    names = set()
    for leaf in leaves:
        if leaf.startswith(prefix):
            head, slash, _ = leaf[len(prefix) :].partition("/")
            names.add(head + slash)
    return "\n".join(sorted(names)) if names else None


def _time(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
