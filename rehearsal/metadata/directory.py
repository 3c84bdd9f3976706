"""Who has which address: instances of the API as the metadata service tells them."""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta
from typing import Any

from rehearsal.api.world import World
from rehearsal.metadata.tree import Credentials, InstanceMetadata

_LIFETIME = timedelta(hours=6)
_RENEW_BEFORE = timedelta(minutes=30)


class InstanceDirectory:
    """Looks an instance up by address; issues its role's credentials through moto's STS."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._credentials: dict[tuple[str, str], Credentials] = {}

    def __call__(self, address: str) -> InstanceMetadata | None:
        """The instance with this private address, None when there is none."""
        with self.world.lock:
            ec2 = self.world.backend("ec2")
            for instance in ec2.all_instances():
                if instance.private_ip == address and instance.state not in {"terminated", "stopped"}:
                    return self._metadata(ec2, instance)
        return None

    def _metadata(self, ec2: Any, instance: Any) -> InstanceMetadata:
        profile = getattr(instance, "rehearsal_profile", None)
        association = ec2.iam_instance_profile_associations.get(instance.id)
        if profile is None and association is not None:
            profile = association.iam_instance_profile
        role = profile.roles[0] if profile is not None and profile.roles else None
        return InstanceMetadata(
            instance_id=instance.id,
            instance_type=instance.instance_type,
            image_id=instance.image_id,
            private_ip=instance.private_ip,
            hostname=instance.private_dns_name,
            mac=instance.nics[0].mac_address,
            availability_zone=instance.placement.zone,
            availability_zone_id=ec2.get_subnet(instance.subnet_id).availability_zone_id,
            region=self.world.region,
            account=self.world.account,
            reservation_id=next(
                (r.id for r in ec2.reservations.values() if instance in r.instances), "r-00000000000000000"
            ),
            launched=instance.launch_time,
            security_groups=tuple(group.name for group in instance.security_groups),
            user_data=base64.b64decode(str(instance.user_data)) if instance.user_data else None,
            hop_limit=instance.metadata_options.http_put_response_hop_limit,
            enabled=instance.metadata_options.http_endpoint == "enabled",
            instance_profile_arn=profile.arn if profile is not None else None,
            instance_profile_id=profile.id if profile is not None else "",
            role=role.name if role is not None else None,
            credentials=(lambda: self._issue(instance.id, role)) if role is not None else None,
            lifecycle_state=_target_state(self.world, instance),
        )

    def _issue(self, instance_id: str, role: Any) -> Credentials:
        with self.world.lock:
            now = datetime.now(UTC)
            known = self._credentials.get((instance_id, role.arn))
            if known and known.expires - now > _RENEW_BEFORE:
                return known
            issued = self.world.backend("sts").assume_role(
                region_name=self.world.region,
                role_session_name=instance_id,
                role_arn=role.arn,
                policy=None,
                duration=int(_LIFETIME.total_seconds()),
                external_id=None,
            )
            made = Credentials(
                issued.access_key_id, issued.secret_access_key, issued.session_token, now, now + _LIFETIME
            )
            self._credentials[(instance_id, role.arn)] = made
            return made


def _target_state(world: World, instance: Any) -> str | None:
    for group in world.backend("autoscaling").autoscaling_groups.values():
        for state in group.instance_states:
            if state.instance is instance:
                return "Terminated" if state.lifecycle_state.startswith("Terminat") else "InService"
    return None
