"""What an environment's settings are: tables of frozen fields, each with what it may be.

A field's description is quoted by error messages after the word "allowed".
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from app.plan.profiles import PROFILES

FOLLOW_PROFILE = "profile"
"""The value of ``image`` that means: the newest AMI of the engine profile's SSM parameter."""

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
_RETENTION_DAYS = (1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731, 1096, 1827, 2192, 2557,
2922, 3288, 3653)  # fmt: skip


def _retention(value: int) -> int:
    if value not in _RETENTION_DAYS:
        raise ValueError("not a retention that CloudWatch Logs offers")
    return value


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FleetSettings(Frozen):
    """The hosts. The description of each field says what is allowed; error messages quote it."""

    topology: Literal["cell", "cluster"] = Field(
        description="cell (every host is a whole Ray cluster) or cluster (a head host and workers)"
    )
    instance_type: InstanceType = Field(description=f"one of {', '.join(get_args(InstanceType))}")
    head_instance_type: str | None = Field(
        default=None,
        pattern=r"^(m[5-8]|c[5-8]|r[5-8]|t3)[a-z]*\.[a-z0-9]+$",
        description=(
            "an x86 size of the m, c, r or t3 families with at least 8 GiB of memory, such as m7i.large"
        ),
    )
    desired_capacity: Whole = Field(
        ge=1,
        le=100,
        description="1 to 100 hosts: the group's minimum size, and the signals that a deploy awaits",
    )
    max_capacity: Whole = Field(
        ge=1,
        le=200,
        description=(
            "1 to 200 hosts, not below desired_capacity; one more than it lets an update keep all in service"
        ),
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
        description=(
            f"300 to {_PAUSE_TIME_MAX_S} seconds from launch to the first token, measured load with margin"
        ),
    )


class EngineSettings(Frozen):
    """What is served, and how large. Lengths in tokens, ``batch_size`` in sequences."""

    profile: Annotated[str, AfterValidator(_known_profile)] = Field(
        description=f"one of {', '.join(sorted(PROFILES))}"
    )
    model: str = Field(
        max_length=96,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$",
        description="a model's name as clients say it, such as meta-llama/Meta-Llama-3-8B-Instruct",
    )
    tp_degree: Whole = Field(ge=1, le=24, description="1 to 24 NeuronCores a replica, or auto")
    batch_size: Whole = Field(ge=1, le=1024, description="1 to 1024 sequences")
    max_model_len: Whole = Field(ge=16, le=1_048_576, description="16 to 1048576 tokens")
    dtype: Literal["bf16", "int8"] = Field(description="bf16 or int8")


class PlanSettings(Frozen):
    """What the plan predicts for, and what it must meet. Left out: typical lengths, no objectives."""

    input_tokens: Whole = Field(default=0, ge=0, description="0 (typical) or the prompts' length in tokens")
    output_tokens: Whole = Field(default=0, ge=0, description="0 (typical) or the answers' length in tokens")
    slo_ttft_ms: Whole = Field(default=0, ge=0, description="0 (none) or the time to first token to keep, ms")
    slo_tpot_ms: Whole = Field(default=0, ge=0, description="0 (none) or the time per token to keep, ms")


class CompileSettings(Frozen):
    """The compile job: a stack of its own, added when asked for."""

    compile_job: Flag = Field(
        default=False, description="true (a third stack, neuronfleet-<env>-compile) or false"
    )
    compile_instance_type: Literal["auto"] | InstanceType = Field(
        default="auto",
        description=f"auto (the smallest with the cores of a replica) or one of "
        f"{', '.join(get_args(InstanceType))}",
    )
    compile_minutes: Whole = Field(
        default=120, ge=30, le=480, description="30 to 480 minutes from boot, after which the instance ends"
    )
    compile_usd: Whole = Field(
        default=10, ge=1, le=200, description="1 to 200 USD of instance time that one job may cost"
    )


class NetworkSettings(Frozen):
    """The VPC, and how hosts reach AWS."""

    vpc_cidr: Cidr = Field(description="an IPv4 network of /16 to /22, such as 10.20.0.0/16")
    zones: Annotated[tuple[str, ...], Field(max_length=2)] = Field(
        default=(),
        description=(
            "none (the region's first two) or two Availability Zone names that offer the instance type"
        ),
    )
    host_zones: Whole = Field(ge=1, le=2, description="1 or 2 zones that hosts are spread over")
    egress: Literal["nat", "none"] = Field(
        description="nat (a NAT gateway) or none (interface endpoints for the APIs that boot calls)"
    )
    flow_logs: Flag = Field(description="true or false: VPC flow logs to CloudWatch Logs")


class EdgeSettings(Frozen):
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


class OperationsSettings(Frozen):
    """What outlives the stack, and for how long logs are kept."""

    retain: Flag = Field(
        description="true (data survives the stack, deletion is guarded, the image must be an AMI id) "
        "or false"
    )
    log_retention_days: Annotated[Whole, AfterValidator(_retention)] = Field(
        description=f"one of {', '.join(map(str, _RETENTION_DAYS))}"
    )


class Settings(Frozen):
    """One environment, whole."""

    version: Literal[1] = Field(description="1")
    environment: str
    fleet: FleetSettings
    engine: EngineSettings
    plan: PlanSettings = Field(default=PlanSettings(), description="a table")
    compile: CompileSettings = Field(default=CompileSettings(), description="a table")
    network: NetworkSettings
    edge: EdgeSettings
    operations: OperationsSettings


TABLES: Mapping[str, type[Frozen]] = {
    name: field.annotation
    for name, field in Settings.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Frozen)
}
TABLE_OF: Mapping[str, str] = {key: table for table, model in TABLES.items() for key in model.model_fields}
"""Each setting's table: names are unique across tables, so that the command line needs none."""
