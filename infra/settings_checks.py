"""Settings that are each allowed and contradict each other."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from app.plan.profiles import PROFILES
from infra.compile_limit import job_instance, limit_minutes
from infra.settings_model import FOLLOW_PROFILE, CompileSettings


def contradictions(values: Mapping[str, Any]) -> Iterator[str]:
    """Each contradiction among ``values`` (setting -> value, as written). What is missing or of a wrong
    type was
    reported already: a check that needs it is left out."""
    for check in _CHECKS:
        try:
            message = check(values)
        except (KeyError, TypeError, ValueError):
            continue
        if message:
            yield message


def _check_capacity(s: Mapping[str, Any]) -> str | None:
    least, most = s["desired_capacity"], s["max_capacity"]
    if most < least:
        return (
            f"fleet.max_capacity = {most} is below fleet.desired_capacity = {least}; allowed: {least} or more"
        )
    return None


def _check_head(s: Mapping[str, Any]) -> str | None:
    head = s.get("head_instance_type")
    if s["topology"] == "cluster" and head is None:
        return "fleet.head_instance_type is missing: topology cluster has a head; allowed: such as m7i.large"
    if s["topology"] == "cell" and head is not None:
        return f"fleet.head_instance_type = {head!r}: topology cell has no head; allowed: to leave it out"
    return None


def _check_keep_alive(s: Mapping[str, Any]) -> str | None:
    keep_alive, idle = s["keep_alive_s"], s["idle_timeout_s"]
    if keep_alive <= idle:
        return (
            f"edge.keep_alive_s = {keep_alive} is not above edge.idle_timeout_s = {idle}: a host that closes "
            f"first makes the load balancer answer 502; allowed: {idle + 1} or more"
        )
    return None


def _check_mirror(s: Mapping[str, Any]) -> str | None:
    if s["numactl_from"] == "mirror" and s["egress"] == "none":
        return (
            "fleet.numactl_from = 'mirror' needs a way out, and network.egress = 'none' has none; allowed: "
            "numactl_from = 'image' with an image that holds numactl, or egress = 'nat'"
        )
    return None


def _check_pin(s: Mapping[str, Any]) -> str | None:
    if s["retain"] and s["image"] == FOLLOW_PROFILE:
        return (
            "fleet.image = 'profile' moves when a new AMI is published, and operations.retain = true asks "
            "for a pin; allowed: an AMI id"
        )
    return None


def _check_profile_image(s: Mapping[str, Any]) -> str | None:
    profile = s["profile"]
    if s["image"] == FOLLOW_PROFILE and PROFILES[profile].ami_ssm_parameter is None:
        return f"fleet.image = 'profile': profile {profile} has no public image; allowed: an AMI id"
    return None


def _check_zones(s: Mapping[str, Any]) -> str | None:
    zones = s.get("zones", ())
    if len(zones) == 1 or len(set(zones)) != len(zones):
        return (
            f"network.zones = {list(zones)!r}: a load balancer needs two; allowed: none, or two that differ"
        )
    return None


def _check_vpc(s: Mapping[str, Any]) -> str | None:
    if not 16 <= ipaddress.IPv4Network(s["vpc_cidr"]).prefixlen <= 22:
        return f"network.vpc_cidr = {s['vpc_cidr']!r} is too large or too small; allowed: /16 to /22"
    return None


def _check_certificate(s: Mapping[str, Any]) -> str | None:
    if s.get("certificate_arn") is not None and not s["https"]:
        return "edge.certificate_arn is set, edge.https = false; allowed: https = true, or none"
    return None


def _check_open_http(s: Mapping[str, Any]) -> str | None:
    if s["scheme"] == "internet-facing" and not s["https"] and "0.0.0.0/0" in s["ingress_cidrs"]:
        return (
            "edge.ingress_cidrs holds 0.0.0.0/0 on an internet-facing load balancer without HTTPS; allowed: "
            "your own networks, or https = true"
        )
    return None


def _check_compile_job(s: Mapping[str, Any]) -> str | None:
    wanted = CompileSettings(**{key: s[key] for key in CompileSettings.model_fields if key in s})
    if not wanted.compile_job:
        return None
    profile = PROFILES[s["profile"]]
    if not profile.capabilities.neuron:
        return (
            f"compile.compile_job = true: engine profile {profile.name} compiles nothing; allowed: "
            "false, or a Neuron profile"
        )
    try:
        instance = job_instance(wanted.compile_instance_type, int(s["tp_degree"]))
    except ValueError as error:
        return f"compile.compile_instance_type: {error}; allowed: auto, or a larger size"
    try:
        limit_minutes(instance, wanted.compile_minutes, wanted.compile_usd)
    except ValueError as error:
        return f"compile.compile_usd = {wanted.compile_usd}: {error}; allowed: more"
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
    _check_compile_job,
)
