"""Run a command on a host without SSH: Systems Manager's Run Command, as the instance role allows."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

_PENDING = {"Pending", "InProgress", "Delayed"}


@dataclass(frozen=True)
class RemoteResult:
    """What a command on a host gave. ``error`` is empty when it exited 0."""

    output: str
    error: str


def run_on_hosts(ssm: Any, commands: dict[str, str], *, timeout_s: float = 20.0) -> dict[str, RemoteResult]:
    """Run one shell command on each instance at the same time and wait for all.

    Args:
        ssm: a boto3 client of ``ssm``.
        commands: instance id -> shell command.
        timeout_s: seconds after which an unanswered host counts as not answering.

    Returns:
        Instance id -> result; a host that cannot be asked is an error with its reason, never an exception.
    """
    results: dict[str, RemoteResult] = {}
    sent: dict[str, str] = {}
    for instance_id, command in commands.items():
        try:
            answer = ssm.send_command(
                InstanceIds=[instance_id],
                DocumentName="AWS-RunShellScript",
                Parameters={"commands": [command]},
                TimeoutSeconds=30,
            )
            sent[instance_id] = answer["Command"]["CommandId"]
        except (ClientError, BotoCoreError) as error:
            results[instance_id] = RemoteResult("", f"cannot be asked: {error}")
    deadline = time.monotonic() + timeout_s
    while sent and time.monotonic() < deadline:
        for instance_id, command_id in list(sent.items()):
            result = _invocation(ssm, instance_id, command_id)
            if result is not None:
                results[instance_id] = result
                del sent[instance_id]
        if sent:
            time.sleep(0.2)
    for instance_id in sent:
        results[instance_id] = RemoteResult("", f"did not answer within {timeout_s:.0f} s")
    return results


def _invocation(ssm: Any, instance_id: str, command_id: str) -> RemoteResult | None:
    try:
        answer = ssm.get_command_invocation(CommandId=command_id, InstanceId=instance_id)
    except ssm.exceptions.InvocationDoesNotExist:
        return None
    except (ClientError, BotoCoreError) as error:
        return RemoteResult("", f"cannot be asked: {error}")
    if answer["Status"] in _PENDING:
        return None
    output = answer.get("StandardOutputContent", "")
    if answer["Status"] == "Success":
        return RemoteResult(output, "")
    detail = (answer.get("StandardErrorContent") or answer.get("StatusDetails") or answer["Status"]).strip()
    return RemoteResult(output, detail.splitlines()[-1] if detail else answer["Status"])
