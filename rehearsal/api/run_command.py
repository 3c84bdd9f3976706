"""Systems Manager's Run Command: moto answers that every command succeeded, with no output, at once.

Here a command of ``AWS-RunShellScript`` runs in the machine of each instance, as the agent on a host would
run it: as root, through ``sh``, output cut at the agent's limit.
"""

from __future__ import annotations

import subprocess
import threading
from typing import Any

from rehearsal.api.patches import Patch
from rehearsal.api.world import RunInMachine, World
from rehearsal.interfaces import RehearsalError

OUTPUT_LIMIT = 24_000
"""Characters of output that GetCommandInvocation returns (Systems Manager API reference)."""
DEFAULT_TIMEOUT_S = 60.0


def patches(world: World) -> list[Patch]:
    """The patch of SendCommand; commands reach a machine through ``world.run_in_machine``."""
    from moto.ssm.exceptions import ValidationException
    from moto.ssm.models import SimpleSystemManagerBackend

    original = SimpleSystemManagerBackend.send_command

    def send_command(self: Any, **arguments: Any) -> Any:
        instances = {item.id for item in world.backend("ec2").all_instances() if item.state == "running"}
        unknown = [name for name in arguments.get("instance_ids") or [] if name not in instances]
        if unknown:
            raise ValidationException(
                f"Instances {unknown} not in a valid state for account {self.account_id}"
            )
        command = original(self, **arguments)
        script = "\n".join((arguments.get("parameters") or {}).get("commands", []))
        for invocation in command.invocations:
            invocation.update(Status="InProgress", StatusDetails="InProgress", ResponseCode=-1)
            threading.Thread(
                target=_run, args=(world.run_in_machine, invocation, script), name="run-command", daemon=True
            ).start()
        return command

    return [
        Patch(
            SimpleSystemManagerBackend,
            "send_command",
            send_command,
            "moto runs nothing: the command runs in the instance's machine",
        )
    ]


def _run(run: RunInMachine, invocation: dict[str, Any], script: str) -> None:
    try:
        done = run(invocation["InstanceId"], ["sh", "-c", script], timeout_s=DEFAULT_TIMEOUT_S)
        output, errors, code = done.stdout, done.stderr, done.returncode
    except (RehearsalError, subprocess.TimeoutExpired, OSError) as error:
        output, errors, code = "", str(error), 1
    # Status comes last: whoever polls it then finds the rest in place.
    invocation.update(
        StandardOutputContent=output[:OUTPUT_LIMIT],
        StandardErrorContent=errors[:OUTPUT_LIMIT],
        ResponseCode=code,
        StatusDetails="Success" if code == 0 else "Failed",
    )
    invocation["Status"] = invocation["StatusDetails"]
