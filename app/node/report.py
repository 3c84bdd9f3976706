"""Telling the outside how the boot ended: CloudFormation's signal, instance health, the console.

CloudFormation's SignalResource carries no reason, only which instance it is and whether it succeeded; the
reason goes to the console (EC2's GetConsoleOutput shows it) and to the journal, in one line that begins with
``neuronfleet-failed:``.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
from pathlib import Path
from typing import Any, Literal

from botocore.exceptions import BotoCoreError, ClientError

from app.node.config import NodeConfig

REASON_LIMIT = 1000
CONSOLE = Path("/dev/console")

log = logging.getLogger(__name__)


def signal_stack(
    client: Any, config: NodeConfig, instance_id: str, status: Literal["SUCCESS", "FAILURE"]
) -> bool:
    """Send the stack this host's one signal.

    A stack that waits for nothing (a reboot, a host that joined long after the deployment) refuses the signal
    with a ValidationError: that is no fault, and logged only.

    Returns:
        Whether the stack took it.

    Raises:
        ClientError, BotoCoreError: the signal could not be delivered.
    """
    try:
        client.signal_resource(
            StackName=config.signal.stack,
            LogicalResourceId=config.signal.logical_id,
            UniqueId=instance_id,
            Status=status,
        )
    except ClientError as error:
        if error.response["Error"]["Code"] != "ValidationError":
            raise
        log.info("the stack waits for no signal", extra={"status": status, "answer": str(error)})
        return False
    log.info("signalled the stack", extra={"status": status, "stack": config.signal.stack})
    return True


def last_message(unit: str) -> str:
    """The last thing that a unit's processes said, as the journal has it: a log line's message, or a line."""
    command = ["journalctl", "--no-pager", "--output=json", "--lines=60", f"--unit={unit}"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
    entries = [json.loads(line) for line in shown.splitlines() if line.startswith("{")]
    own = [entry for entry in entries if entry.get("SYSLOG_IDENTIFIER") != "systemd"]
    for entry in reversed(own or entries):
        text = entry.get("MESSAGE")
        if isinstance(text, list):  # bytes that are no UTF-8
            text = bytes(text).decode(errors="replace")
        if text and text.strip():
            return _readable(text.strip())[:REASON_LIMIT]
    return "it said nothing"


def _readable(text: str) -> str:
    try:
        line = json.loads(text)
        return f"{line['message']}: {line['error']}" if line.get("error") else str(line["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return text


def not_to_report(unit: str) -> str | None:
    """Why the handler of ``unit`` has nothing to report; None: the unit failed.

    systemd also starts the handler of a unit whose requirement failed (that one's own handler reports), and
    of a step that was stopped while it waited (somebody, or a shutdown, wanted that).
    """
    names = ("ActiveState", "Result", "ExecMainStatus")
    command = ["systemctl", "show", f"--property={','.join(names)}", unit]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
    state = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    if state.get("ActiveState") != "failed":
        return "it did not fail itself: what it needs did, and reports that"
    if state.get("Result") == "signal" and state.get("ExecMainStatus") == str(int(signal.SIGTERM)):
        return "it was stopped"
    return None


def write_console(line: str, console: Path = CONSOLE) -> None:
    """Write one line where EC2's console output shows it; a host without a console is no fault."""
    try:
        with console.open("w") as stream:
            stream.write(f"\r\n{line}\r\n")
    except OSError as error:
        log.info("the console cannot be written to", extra={"reason": str(error)})


def report_failure(
    config: NodeConfig, instance_id: str, unit: str, reason: str, *, cloudformation: Any, autoscaling: Any
) -> list[str]:
    """Say on every channel that ``unit`` failed and why; one channel's trouble does not keep the others
    silent.

    Returns:
        What could not be delivered.
    """
    text = " ".join(reason.split())
    write_console(f"neuronfleet-failed: {instance_id} {unit}: {text}")
    undelivered = []
    try:
        signal_stack(cloudformation, config, instance_id, "FAILURE")
    except (ClientError, BotoCoreError) as error:
        undelivered.append(f"the FAILURE signal: {error}")
    try:
        autoscaling.set_instance_health(
            InstanceId=instance_id, HealthStatus="Unhealthy", ShouldRespectGracePeriod=False
        )
    except (ClientError, BotoCoreError) as error:
        undelivered.append(f"the Unhealthy mark: {error}")
    return undelivered
