"""Resource types that moto's CloudFormation lacks: a physical id, attributes for Fn::GetAtt, no behaviour.

Each is told as emulated in the event log when it is made, so that nobody takes it for the real thing. Types
whose behaviour the hosts need (Secrets Manager secrets, bucket policies) do the real call on moto's backend.
"""

from __future__ import annotations

import json
import secrets
import string
from typing import Any

from moto.cloudformation import parsing

from rehearsal.api.world import World


class Emulated:
    """A resource of which only its name exists."""

    world: World

    def __init__(self, kind: str, name: str, properties: dict[str, Any], account: str, region: str) -> None:
        self.kind = kind
        self.name = name
        self.properties = properties
        self.account = account
        self.region = region
        self.cf_resource_type = kind
        self.logical_resource_id = ""
        self.attributes: dict[str, Any] = {}

    @property
    def physical_resource_id(self) -> str:
        return self.name

    def is_created(self) -> bool:
        return True

    @staticmethod
    def cloudformation_name_type() -> str:
        return ""

    @classmethod
    def has_cfn_attr(cls, attribute: str) -> bool:
        return True

    def get_cfn_attribute(self, attribute: str) -> Any:
        """What the template set, or a name that shows where it comes from; ARNs and ports look like such."""
        if attribute in self.attributes:
            return self.attributes[attribute]
        if attribute in self.properties:
            return self.properties[attribute]
        service = self.kind.split("::")[1].lower() if "::" in self.kind else "custom"
        if attribute.endswith("Arn"):
            return f"arn:aws:{service}:{self.region}:{self.account}:{self.name}"
        if attribute.endswith("Port"):
            return "0"
        return f"{self.name}.{attribute}".lower()

    @classmethod
    def create_from_cloudformation_json(
        cls,
        resource_name: str,
        cloudformation_json: dict[str, Any],
        account_id: str,
        region_name: str,
        **kw: Any,
    ) -> Emulated:
        made = cls(
            kw["ResourceType"],
            resource_name,
            cloudformation_json.get("Properties", {}),
            account_id,
            region_name,
        )
        made.make(cls.world)
        return made

    @classmethod
    def update_from_cloudformation_json(
        cls,
        original_resource: Emulated,
        new_resource_name: str,
        cloudformation_json: dict[str, Any],
        account_id: str,
        region_name: str,
    ) -> Emulated:
        original_resource.properties = cloudformation_json.get("Properties", {})
        original_resource.change(cls.world)
        return original_resource

    def delete(self, account_id: str, region_name: str) -> None:
        self.unmake(self.world)

    def make(self, world: World) -> None:
        """Create it; the base says that it is a name only."""
        world.events.add(
            "resource.emulated",
            f"{self.kind} {self.name} is emulated: it has a name and no behaviour",
            type=self.kind,
            name=self.name,
        )

    def change(self, world: World) -> None:
        """Follow changed properties."""

    def unmake(self, world: World) -> None:
        """Delete it."""


class Secret(Emulated):
    """AWS::SecretsManager::Secret, in moto's Secrets Manager, with GenerateSecretString."""

    @staticmethod
    def cloudformation_name_type() -> str:
        return "Name"

    def make(self, world: World) -> None:
        backend = world.backend("secretsmanager")
        created = backend.create_secret(
            name=self.name,
            secret_string=self._value(),
            secret_binary=None,
            description=self.properties.get("Description"),
            tags=self.properties.get("Tags", []),
            kms_key_id=self.properties.get("KmsKeyId"),
            client_request_token=None,
            replica_regions=[],
            force_overwrite=False,
        )
        answer = json.loads(created) if isinstance(created, str) else created
        self.arn: str = answer["ARN"]
        self.attributes = {"Id": self.arn}

    @property
    def physical_resource_id(self) -> str:
        return self.arn

    def unmake(self, world: World) -> None:
        world.backend("secretsmanager").delete_secret(
            secret_id=self.arn, recovery_window_in_days=None, force_delete_without_recovery=True
        )

    def _value(self) -> str:
        if "SecretString" in self.properties:
            return str(self.properties["SecretString"])
        rule = self.properties.get("GenerateSecretString")
        if rule is None:
            return ""
        password = generate_password(rule)
        if "GenerateStringKey" not in rule:
            return password
        return json.dumps(
            {**json.loads(rule.get("SecretStringTemplate", "{}")), rule["GenerateStringKey"]: password}
        )


def generate_password(rule: dict[str, Any]) -> str:
    """A random string by GenerateSecretString's rules (length 32 unless it says otherwise)."""

    def excluded(name: str) -> bool:
        return str(rule.get(name, False)).lower() == "true"

    alphabets = [
        alphabet
        for name, alphabet in (
            ("ExcludeLowercase", string.ascii_lowercase),
            ("ExcludeUppercase", string.ascii_uppercase),
            ("ExcludeNumbers", string.digits),
            ("ExcludePunctuation", string.punctuation),
        )
        if not excluded(name)
    ]
    unwanted = set(rule.get("ExcludeCharacters", ""))
    alphabets = [kept for a in alphabets if (kept := "".join(c for c in a if c not in unwanted))]
    if not alphabets:
        raise ValueError("GenerateSecretString excludes every character")
    length = int(rule.get("PasswordLength", 32))
    each = str(rule.get("RequireEachIncludedType", True)).lower() == "true"
    chosen = [secrets.choice(alphabet) for alphabet in alphabets] if each else []
    everything = "".join(alphabets)
    chosen += [secrets.choice(everything) for _ in range(length - len(chosen))]
    secrets.SystemRandom().shuffle(chosen)
    return "".join(chosen[:length])


class BucketPolicy(Emulated):
    """AWS::S3::BucketPolicy, kept on moto's bucket (moto does not enforce it)."""

    def make(self, world: World) -> None:
        self.change(world)

    def change(self, world: World) -> None:
        policy = json.dumps(self.properties["PolicyDocument"]).encode()
        world.backend("s3").put_bucket_policy(self.properties["Bucket"], policy)

    def unmake(self, world: World) -> None:
        backend = world.backend("s3")
        if self.properties["Bucket"] in backend.buckets:
            backend.delete_bucket_policy(self.properties["Bucket"])


class SecurityGroupEgress(Emulated):
    """AWS::EC2::SecurityGroupEgress, as a rule of moto's security group."""

    def make(self, world: World) -> None:
        self._call(world.backend("ec2").authorize_security_group_egress)

    def unmake(self, world: World) -> None:
        self._call(world.backend("ec2").revoke_security_group_egress)

    def _call(self, call: Any) -> None:
        wanted = self.properties
        peer = wanted.get("DestinationSecurityGroupId")
        call(
            wanted["GroupId"],
            str(wanted["IpProtocol"]),
            str(wanted.get("FromPort", -1)),
            str(wanted.get("ToPort", -1)),
            [{"CidrIp": wanted["CidrIp"]}] if "CidrIp" in wanted else [],
            source_groups=[{"GroupId": peer}] if peer else [],
        )


WITH_BEHAVIOUR: dict[str, type[Emulated]] = {
    "AWS::SecretsManager::Secret": Secret,
    "AWS::S3::BucketPolicy": BucketPolicy,
    "AWS::EC2::SecurityGroupEgress": SecurityGroupEgress,
}


def model_of(kind: str) -> Any:
    """The model of a resource type: ours with behaviour, moto's, or a name only."""
    if kind in WITH_BEHAVIOUR:
        return WITH_BEHAVIOUR[kind]
    return parsing.get_model_map().get(kind, Emulated)


def name_property_of(kind: str) -> str:
    """The property that names a resource of this type, empty when none does."""
    return str(model_of(kind).cloudformation_name_type() or "")
