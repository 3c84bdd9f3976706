"""Reading CloudFormation templates: who depends on whom, and the policies that make a stack wait.

Pure functions over the template as parsed JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

_DURATION = re.compile(r"^P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+)S)?)?$")
_SUB_NAME = re.compile(r"\$\{([^!}][^}]*)\}")


def duration_s(text: str) -> float:
    """Seconds of an ISO 8601 duration as CloudFormation takes it (``PT15M``, ``PT1H30M``).

    Raises:
        ValueError: not such a duration.
    """
    match = _DURATION.match(text)
    if not match or text in {"P", "PT"}:
        raise ValueError(f"{text!r} is not an ISO 8601 duration such as PT15M")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def mentioned(node: Any) -> Iterator[str]:
    """Every logical name that ``node`` refers to by Ref, Fn::GetAtt or Fn::Sub."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            if key == "Ref" and isinstance(value, str):
                yield value
            elif key == "Fn::GetAtt":
                name = value.split(".")[0] if isinstance(value, str) else value[0]
                if isinstance(name, str):
                    yield name
            elif key == "Fn::Sub":
                text, bound = (value, {}) if isinstance(value, str) else (value[0], value[1])
                yield from (
                    name.strip().split(".")[0]
                    for name in _SUB_NAME.findall(text)
                    if name.strip() not in bound
                )
                yield from mentioned(bound)
            else:
                yield from mentioned(value)
    elif isinstance(node, list):
        for item in node:
            yield from mentioned(item)


def dependencies(resources: Mapping[str, Any]) -> dict[str, set[str]]:
    """For each resource, those of ``resources`` that must be there first."""
    found: dict[str, set[str]] = {}
    for name, resource in resources.items():
        explicit = resource.get("DependsOn", [])
        explicit = [explicit] if isinstance(explicit, str) else explicit
        wanted = set(explicit) | set(mentioned(resource.get("Properties", {})))
        found[name] = {other for other in wanted if other in resources and other != name}
    return found


def sorter(resources: Mapping[str, Any]) -> TopologicalSorter[str]:
    """A prepared sorter that hands out resources whose dependencies are done.

    Raises:
        ValueError: circular dependency, naming its resources as CloudFormation does.
    """
    result = TopologicalSorter(dependencies(resources))
    try:
        result.prepare()
    except CycleError as error:
        raise ValueError(f"Circular dependency between resources: {sorted(set(error.args[1]))}") from error
    return result


def creation_order(resources: Mapping[str, Any]) -> list[str]:
    """All resources, dependencies first."""
    return list(TopologicalSorter(dependencies(resources)).static_order())


@dataclass(frozen=True)
class SignalPolicy:
    """A CreationPolicy's ResourceSignal: so many SUCCESS signals in so many seconds."""

    count: int
    timeout_s: float

    @staticmethod
    def of(resource: Mapping[str, Any]) -> SignalPolicy | None:
        """The policy of a resource whose references are resolved, None when it waits for no signal."""
        signal = (resource.get("CreationPolicy") or {}).get("ResourceSignal")
        if signal is None:
            return None
        count = int(signal.get("Count", 1))
        return SignalPolicy(count, duration_s(str(signal.get("Timeout", "PT5M")))) if count else None


@dataclass(frozen=True)
class RollingUpdatePolicy:
    """An UpdatePolicy's AutoScalingRollingUpdate; ``pause_s`` is also the time that signals have."""

    max_batch_size: int
    min_instances_in_service: int
    min_successful_percent: int
    pause_s: float
    wait_on_signals: bool
    suspend_processes: tuple[str, ...]

    @staticmethod
    def of(resource: Mapping[str, Any]) -> RollingUpdatePolicy | None:
        """The policy of a resource whose references are resolved, None when there is none."""
        policy = (resource.get("UpdatePolicy") or {}).get("AutoScalingRollingUpdate")
        if policy is None:
            return None
        wait = _true(policy.get("WaitOnResourceSignals", False))
        return RollingUpdatePolicy(
            max_batch_size=int(policy.get("MaxBatchSize", 1)),
            min_instances_in_service=int(policy.get("MinInstancesInService", 0)),
            min_successful_percent=int(policy.get("MinSuccessfulInstancesPercent", 100)),
            pause_s=duration_s(str(policy.get("PauseTime", "PT5M" if wait else "PT0S"))),
            wait_on_signals=wait,
            suspend_processes=tuple(policy.get("SuspendProcesses", ())),
        )


def _true(value: Any) -> bool:
    return value is True or str(value).lower() == "true"


def kept_on_delete(resource: Mapping[str, Any], *, rollback_of_create: bool) -> bool:
    """Whether the DeletionPolicy keeps the resource when its stack goes (or its creation is rolled back)."""
    policy = resource.get("DeletionPolicy", "Delete")
    return policy == "Retain" or (policy == "RetainExceptOnCreate" and not rollback_of_create)
