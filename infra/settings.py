"""An environment's settings: ``infra/environments/<name>.toml`` -> frozen, checked values.

Every mistake of a file and of the command line is reported at once, each with where it was written, its key, its
value and what is allowed. Names of settings are unique across tables, so ``-c instance_type=inf2.48xlarge``
needs no table name. ``-c rehearsal=true`` applies the file's ``[rehearsal]`` table and changes nothing else.
"""

from __future__ import annotations

import difflib
import ipaddress
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from app.plan.profiles import PROFILES

ENVIRONMENTS = Path(__file__).resolve().parent / "environments"
DEFAULT_ENVIRONMENT = "dev"
FOLLOW_PROFILE = "profile"

# Context keys that are not settings: which environment, which variant of it, which bundle.
_SELECTORS = frozenset({"env", "rehearsal", "bundle"})
_REHEARSAL_KEYS = {"profile": "engine", "model": "engine", "image": "fleet"}

Whole = Annotated[int, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]


def _known_profile(value: str) -> str:
    if value not in PROFILES:
        raise ValueError("no such engine profile")
    return value


def _network(value: str) -> str:
    try:
        ipaddress.IPv4Network(value)
    except ValueError as error:
        raise ValueError(str(error)) from None
    return value


Cidr = Annotated[str, AfterValidator(_network)]
InstanceType = Literal["inf2.xlarge", "inf2.8xlarge", "inf2.24xlarge", "inf2.48xlarge"]
# The field's limits as CloudFormation, Auto Scaling and Elastic Load Balancing state them.
_PAUSE_TIME_MAX_S = 3600
_IDLE_TIMEOUT_MAX_S = 4000
_RETENTION_DAYS = (1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731, 1096, 1827, 2192, 2557, 2922,
                   3288, 3653)  # fmt: skip


def _retention(value: int) -> int:
    if value not in _RETENTION_DAYS:
        raise ValueError("not a retention that CloudWatch Logs offers")
    return value


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FleetSettings(_Frozen):
    """The hosts. The description of each field says what is allowed; error messages quote it."""

    topology: Literal["cell", "cluster"] = Field(
        description="cell (every host is a whole Ray cluster) or cluster (a head host and workers)"
    )
    instance_type: InstanceType = Field(description=f"one of {', '.join(get_args(InstanceType))}")
    head_instance_type: str | None = Field(
        default=None,
        pattern=r"^(m[5-8]|c[5-8]|r[5-8]|t3)[a-z]*\.[a-z0-9]+$",
        description="an x86 size of the m, c, r or t3 families with at least 8 GiB of memory, such as m7i.large",
    )
    desired_capacity: Whole = Field(
        ge=1,
        le=100,
        description="1 to 100 hosts: the group's minimum size, and the signals that a deploy awaits",
    )
    max_capacity: Whole = Field(
        ge=1,
        le=200,
        description="1 to 200 hosts, not below desired_capacity; one more than it lets an update keep all in service",
    )
    image: str = Field(
        pattern=r"^(profile|ami-([0-9a-f]{8}|[0-9a-f]{17}))$",
        description="an AMI id (ami-…), or profile: the newest AMI of the engine profile's SSM parameter",
    )
    root_volume_gib: Whole = Field(
        ge=100, le=16384, description="100 to 16384 GiB (the image fills most of 80)"
    )
    numactl_from: Literal["image", "mirror"] = Field(
        description="image (already there) or mirror (the distribution's mirror, which needs egress = nat)"
    )
    boot_timeout_s: Whole = Field(
        ge=300,
        le=_PAUSE_TIME_MAX_S,
        description=f"300 to {_PAUSE_TIME_MAX_S} seconds from launch to the first token, measured load with margin",
    )


class EngineSettings(_Frozen):
    """What is served, and how large. Lengths in tokens, ``batch_size`` in sequences."""

    profile: Annotated[str, AfterValidator(_known_profile)] = Field(
        description=f"one of {', '.join(sorted(PROFILES))}"
    )
    model: str = Field(
        max_length=96,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$",
        description="a model's name as clients say it, such as meta-llama/Meta-Llama-3-8B-Instruct",
    )
    tp_degree: Whole = Field(ge=1, le=24, description="1 to 24 NeuronCores a replica")
    batch_size: Whole = Field(ge=1, le=1024, description="1 to 1024 sequences")
    max_model_len: Whole = Field(ge=16, le=1_048_576, description="16 to 1048576 tokens")
    dtype: Literal["bf16", "int8"] = Field(description="bf16 or int8")


class NetworkSettings(_Frozen):
    """The VPC, and how hosts reach AWS."""

    vpc_cidr: Cidr = Field(description="an IPv4 network of /16 to /22, such as 10.20.0.0/16")
    zones: Annotated[tuple[str, ...], Field(max_length=2)] = Field(
        default=(),
        description="none (the region's first two) or two Availability Zone names that offer the instance type",
    )
    host_zones: Whole = Field(ge=1, le=2, description="1 or 2 zones that hosts are spread over")
    egress: Literal["nat", "none"] = Field(
        description="nat (a NAT gateway) or none (interface endpoints for the APIs that boot calls)"
    )
    flow_logs: Flag = Field(description="true or false: VPC flow logs to CloudWatch Logs")


class EdgeSettings(_Frozen):
    """The load balancer, and times that must agree across it. All in seconds."""

    scheme: Literal["internal", "internet-facing"] = Field(description="internal or internet-facing")
    ingress_cidrs: Annotated[tuple[Cidr, ...], Field(min_length=1, max_length=50)] = Field(
        description="1 to 50 IPv4 networks that may reach the load balancer"
    )
    https: Flag = Field(description="true or false: HTTPS, with HTTP redirected to it")
    certificate_arn: str | None = Field(
        default=None,
        pattern=r"^arn:[a-z-]+:acm:[a-z0-9-]+:[0-9]{12}:certificate/[A-Za-z0-9-]+$",
        description="an ACM certificate's ARN; left out, the stack has a parameter CertificateArn",
    )
    domain_name: str | None = Field(
        default=None,
        pattern=r"^([a-z0-9]([a-z0-9-]*[a-z0-9])?\.)+[a-z]{2,}$",
        description="the name that the certificate is for, shown in the output Url",
    )
    idle_timeout_s: Whole = Field(
        ge=1, le=_IDLE_TIMEOUT_MAX_S, description=f"1 to {_IDLE_TIMEOUT_MAX_S} seconds, below keep_alive_s"
    )
    keep_alive_s: Whole = Field(ge=2, le=86400, description="2 to 86400 seconds, above idle_timeout_s")
    request_timeout_s: Whole = Field(ge=1, le=86400, description="1 to 86400 seconds")
    deregistration_delay_s: Whole = Field(ge=0, le=3600, description="0 to 3600 seconds")
    access_logs: Flag = Field(description="true or false: access logs of load balancer and store to S3")


class OperationsSettings(_Frozen):
    """What outlives the stack, and for how long logs are kept."""

    retain: Flag = Field(
        description="true (data survives the stack, deletion is guarded, the image must be an AMI id) or false"
    )
    log_retention_days: Annotated[Whole, AfterValidator(_retention)] = Field(
        description=f"one of {', '.join(map(str, _RETENTION_DAYS))}"
    )


class Settings(_Frozen):
    """One environment, whole."""

    version: Literal[1] = Field(description="1")
    environment: str
    fleet: FleetSettings
    engine: EngineSettings
    network: NetworkSettings
    edge: EdgeSettings
    operations: OperationsSettings


_TABLES: Mapping[str, type[_Frozen]] = {
    name: field.annotation
    for name, field in Settings.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, _Frozen)
}
_TABLE_OF: Mapping[str, str] = {key: table for table, model in _TABLES.items() for key in model.model_fields}


class SettingsError(Exception):
    """One or more mistakes; ``mistakes`` holds a line for each."""

    def __init__(self, mistakes: list[str]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__("\n".join(mistakes))


def environment_names(folder: Path = ENVIRONMENTS) -> list[str]:
    """The environments that exist, sorted."""
    return sorted(path.stem for path in folder.glob("*.toml"))


def load_settings(
    environment: str = DEFAULT_ENVIRONMENT,
    context: Mapping[str, Any] | None = None,
    folder: Path = ENVIRONMENTS,
) -> Settings:
    """Read an environment's file, apply the rehearsal table if asked, then the overrides, and check it all.

    Args:
        environment: the file's name without ``.toml``.
        context: the CDK app's context. Keys that hold ``@``, ``:``, ``-`` or ``/`` belong to the CDK.
        folder: where the files are.

    Raises:
        SettingsError: every mistake at once, or an environment that does not exist.
    """
    path = folder / f"{environment}.toml"
    if environment not in environment_names(folder):
        raise SettingsError(
            [
                f"unknown environment {environment!r}: there are {', '.join(environment_names(folder)) or 'none'} "
                f"(a file each in {_shown(folder)})"
            ]  # fmt: skip
        )
    try:
        raw = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise SettingsError([f"{_shown(path)}: not TOML: {error}"]) from None
    return _Reader(_shown(path), environment, raw, context or {}).read()


def _shown(path: Path) -> str:
    root = ENVIRONMENTS.parent.parent
    return str(path.relative_to(root) if path.is_relative_to(root) else path)


class _Reader:
    """Applies the layers in order and remembers where each value was written."""

    def __init__(self, file: str, environment: str, raw: dict[str, Any], context: Mapping[str, Any]) -> None:
        self.file = file
        self.environment = environment
        self.raw = raw
        self.context = context
        self.mistakes: list[str] = []
        self.overridden: set[str] = set()

    def read(self) -> Settings:
        rehearsal = self.raw.pop("rehearsal", None)
        self._check_rehearsal(rehearsal)
        if self._flag("rehearsal"):
            if rehearsal is None:
                self.mistakes.append(f"{self.file}: -c rehearsal=true needs a table [rehearsal] in this file")
            for key, table in _REHEARSAL_KEYS.items():
                if isinstance(rehearsal, dict) and key in rehearsal:
                    self._table(table)[key] = rehearsal[key]
        self._override()
        settings = self._validate({**self.raw, "environment": self.environment})
        self.mistakes.extend(self._conflicts())
        if self.mistakes or settings is None:
            raise SettingsError(self.mistakes)
        return settings

    def _table(self, name: str) -> dict[str, Any]:
        table = self.raw.setdefault(name, {})
        return table if isinstance(table, dict) else {}

    def _flag(self, key: str) -> bool:
        value = self.context.get(key, False)
        text = str(value).lower()
        if text not in ("true", "false"):
            self.mistakes.append(f"-c {key} = {value!r}: allowed are true and false")
        return text == "true"

    def _check_rehearsal(self, table: Any) -> None:
        """The table is checked on every synth, so that a mistake in it shows before a rehearsal needs it."""
        if table is None:
            return
        if not isinstance(table, dict) or set(table) != set(_REHEARSAL_KEYS):
            self.mistakes.append(
                f"{self.file}: [rehearsal] = {table!r}: allowed are exactly the keys {', '.join(_REHEARSAL_KEYS)}"
            )
            return
        for key, group in _REHEARSAL_KEYS.items():
            self._one_field(f"rehearsal.{key}", _TABLES[group], key, table[key])

    def _one_field(self, shown: str, model: type[_Frozen], key: str, value: Any) -> None:
        try:
            # Validates this field alone: what the others hold is irrelevant to it.
            model.__pydantic_validator__.validate_assignment(model.model_construct(), key, value)
        except ValidationError as error:
            for problem in error.errors():
                if problem["loc"][:1] == (key,):
                    self._mistake(shown, value, problem["msg"], model.model_fields[key].description)

    def _override(self) -> None:
        for key, value in sorted(self.context.items()):
            if key in _SELECTORS or any(mark in key for mark in "@:-/"):
                continue
            table, _, name = key.rpartition(".")
            if _TABLE_OF.get(name) is None or (table and table != _TABLE_OF[name]):
                near = difflib.get_close_matches(name, _TABLE_OF, n=3)
                self.mistakes.append(
                    f"-c {key} = {value!r}: no such setting; "
                    + (f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(_TABLE_OF)}")
                )
                continue
            table = _TABLE_OF[name]
            annotation = _TABLES[table].model_fields[name].annotation
            self._table(table)[name] = _from_text(annotation, value)
            self.overridden.add(f"{table}.{name}")

    def _validate(self, raw: dict[str, Any]) -> Settings | None:
        try:
            return Settings.model_validate(raw)
        except ValidationError as error:
            for problem in error.errors():
                loc = [str(part) for part in problem["loc"]]
                # An element of a list is reported as its list.
                dotted = ".".join(loc[:2])
                if problem["type"] == "missing":
                    self.mistakes.append(f"{self.file}: {dotted} is missing: {_allowed(loc)}")
                elif problem["type"] == "extra_forbidden":
                    near = difflib.get_close_matches(loc[-1], [*_TABLE_OF, *_TABLES], n=2)
                    hint = f"; did you mean {' or '.join(near)}?" if near else ""
                    self.mistakes.append(
                        f"{self.file}: {dotted} = {problem['input']!r}: no such setting{hint}"
                    )
                else:
                    value = _lookup(raw, loc[:2])
                    self._mistake(dotted, value, problem["msg"], _allowed(loc, bare=True))
        return None

    def _mistake(self, dotted: str, value: Any, message: str, allowed: str | None) -> None:
        where = f"-c {dotted.split('.')[-1]}" if dotted in self.overridden else f"{self.file}: {dotted}"
        line = f"{where} = {value!r}: {message.removeprefix('Value error, ')}; allowed: {allowed}"
        if line not in self.mistakes:
            self.mistakes.append(line)

    def _conflicts(self) -> Iterator[str]:
        """Settings that are each allowed and disagree. A check whose settings are not usable is left out."""
        values = {
            key: self._table(table)[key] for key, table in _TABLE_OF.items() if key in self._table(table)
        }
        for check in _CHECKS:
            try:
                message = check(values)
            except (KeyError, TypeError, ValueError):
                continue
            if message:
                yield f"{self.file}: {message}"


def _lookup(raw: Any, loc: list[str]) -> Any:
    for part in loc:
        if not isinstance(raw, Mapping) or part not in raw:
            return raw
        raw = raw[part]
    return raw


def _allowed(loc: list[str], bare: bool = False) -> str:
    if len(loc) == 1:
        text = "a table" if loc[0] in _TABLES else str(Settings.model_fields[loc[0]].description)
    else:
        text = str(_TABLES[loc[0]].model_fields[loc[1]].description)
    return text if bare else f"allowed: {text}"


def _from_text(annotation: Any, value: Any) -> Any:
    """A context value as its setting's type. Text that does not fit stays as it is, for validation to name."""
    if not isinstance(value, str):
        return value
    if annotation is int and value.strip().lstrip("-").isdecimal():
        return int(value)
    if annotation is bool and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if get_origin(annotation) is tuple:
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def _check_capacity(s: Mapping[str, Any]) -> str | None:
    if s["max_capacity"] < s["desired_capacity"]:
        return (
            f"fleet.max_capacity = {s['max_capacity']} is below fleet.desired_capacity = "
            f"{s['desired_capacity']}; allowed: at least {s['desired_capacity']}"
        )
    return None


def _check_head(s: Mapping[str, Any]) -> str | None:
    head = s.get("head_instance_type")
    if s["topology"] == "cluster" and head is None:
        return "fleet.head_instance_type is missing: topology cluster has a head host; for example m7i.large"
    if s["topology"] == "cell" and head is not None:
        return f"fleet.head_instance_type = {head!r}: topology cell has no head host; leave it out"
    return None


def _check_keep_alive(s: Mapping[str, Any]) -> str | None:
    if s["keep_alive_s"] <= s["idle_timeout_s"]:
        return (
            f"edge.keep_alive_s = {s['keep_alive_s']} must be above edge.idle_timeout_s = {s['idle_timeout_s']}: "
            f"a host that closes first makes the load balancer answer 502; allowed: {s['idle_timeout_s'] + 1} or more"
        )
    return None


def _check_mirror(s: Mapping[str, Any]) -> str | None:
    if s["numactl_from"] == "mirror" and s["egress"] == "none":
        return (
            "fleet.numactl_from = 'mirror' needs a way out, and network.egress = 'none' has none; "
            "allowed: numactl_from = 'image' with an image that holds numactl, or egress = 'nat'"
        )
    return None


def _check_pin(s: Mapping[str, Any]) -> str | None:
    if s["retain"] and s["image"] == FOLLOW_PROFILE:
        return (
            "fleet.image = 'profile' moves when a new AMI is published, and operations.retain = true asks for a "
            "pin; allowed: an AMI id"
        )
    return None


def _check_profile_image(s: Mapping[str, Any]) -> str | None:
    if s["image"] == FOLLOW_PROFILE and PROFILES[s["profile"]].ami_ssm_parameter is None:
        return (
            f"fleet.image = 'profile': engine profile {s['profile']} has no public image; allowed: an AMI id"
        )
    return None


def _check_zones(s: Mapping[str, Any]) -> str | None:
    zones = s.get("zones", ())
    if len(zones) == 1 or len(set(zones)) != len(zones):
        return f"network.zones = {list(zones)!r}: a load balancer needs two; allowed: none or two different zones"
    return None


def _check_vpc(s: Mapping[str, Any]) -> str | None:
    if not 16 <= ipaddress.IPv4Network(s["vpc_cidr"]).prefixlen <= 22:
        return f"network.vpc_cidr = {s['vpc_cidr']!r}: too large or too small; allowed: /16 to /22"
    return None


def _check_certificate(s: Mapping[str, Any]) -> str | None:
    if s.get("certificate_arn") is not None and not s["https"]:
        return (
            "edge.certificate_arn is set and edge.https = false; allowed: https = true, or no certificate_arn"
        )
    return None


def _check_open_http(s: Mapping[str, Any]) -> str | None:
    if s["scheme"] == "internet-facing" and not s["https"] and "0.0.0.0/0" in s["ingress_cidrs"]:
        return (
            "edge.ingress_cidrs holds 0.0.0.0/0 on an internet-facing load balancer without HTTPS; allowed: your "
            "own networks, or https = true"
        )
    return None


_CHECKS: tuple[Callable[[Mapping[str, Any]], str | None], ...] = (
    _check_capacity,
    _check_head,
    _check_keep_alive,
    _check_mirror,
    _check_pin,
    _check_profile_image,
    _check_zones,
    _check_vpc,
    _check_certificate,
    _check_open_http,
)
