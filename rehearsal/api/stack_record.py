"""The rehearsal's own part of a stack: what became of each resource, and which signals it waits for."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rehearsal.api.signals import SignalBook

if TYPE_CHECKING:
    from rehearsal.api.stack_operation import StackOperation


class ResourceFailed(Exception):
    """A resource could not be brought to where the template wants it."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason


class Cancelled(Exception):
    """Another operation (delete-stack) takes over."""


@dataclass
class ResourceState:
    """What DescribeStackResources says of one resource."""

    kind: str
    physical_id: str
    status: str
    reason: str
    changed: datetime


@dataclass
class StackRecord:
    """The rehearsal's own part of a stack; hangs on moto's as ``rehearsal``."""

    resources: dict[str, ResourceState] = field(default_factory=dict)
    applied: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The resolved definition that each existing resource was last brought to."""
    signals: dict[str, SignalBook] = field(default_factory=dict)
    """Books of the resources that wait for signals at this moment."""
    operation: StackOperation | None = None


def record_of(stack: Any) -> StackRecord:
    """The stack's record, made when there is none."""
    if not hasattr(stack, "rehearsal"):
        stack.rehearsal = StackRecord()
    record: StackRecord = stack.rehearsal
    return record


def physical_id(resource: Any, stack_name: str, name: str) -> str:
    """A resource's physical id; moto's smallest types have none, so they get CloudFormation's usual form."""
    return str(getattr(resource, "physical_resource_id", None) or f"{stack_name}-{name}")


def failed_to(verb: str, failure: Exception) -> str:
    """CloudFormation's sentence about what failed."""
    if isinstance(failure, ResourceFailed):
        return f"The following resource(s) failed to {verb}: [{failure.name}]."
    return str(failure)


def words(error: Exception) -> str:
    """The message of an error, moto's or Python's, for a status reason."""
    message = getattr(error, "message", None) or str(error)
    return str(message) or type(error).__name__
