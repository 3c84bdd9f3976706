"""EC2 instances whose state is that of a machine: pending until it runs, terminated when it is gone."""

from __future__ import annotations

from typing import Any

from moto.core.responses import ActionResult
from moto.core.types import Base64EncodedString
from moto.core.utils import utcnow
from moto.ec2.models import instances
from moto.ec2.responses.general import General

from rehearsal.api.patches import Patch
from rehearsal.api.world import World

_CODES = {"pending": 0, "running": 16, "shutting-down": 32, "terminated": 48, "stopping": 64, "stopped": 80}
_CONSOLE_BYTES = 64 * 1024


def set_state(instance: Any, name: str, reason: str = "", code: str = "") -> None:
    """Set an instance's state, with its StateReason when there is one."""
    instance._state.name = name
    instance._state.code = _CODES[name]
    if reason:
        instance._reason = reason
        instance.state_reason = instances.StateReason(reason, code)


def patches(world: World) -> list[Patch]:
    """What changes in moto's EC2."""
    run, terminate = instances.InstanceBackend.run_instances, instances.Instance.terminate

    def run_instances(backend: Any, *args: Any, **kwargs: Any) -> Any:
        reservation = run(backend, *args, **kwargs)
        for instance in reservation.instances:
            set_state(instance, "pending")
        return reservation

    def terminate_instance(instance: Any) -> Any:
        before = instance.state
        if before in {"terminated", "shutting-down"}:
            return instances.InstanceState(before, _CODES[before])
        previous = terminate(instance)
        set_state(instance, "shutting-down")
        world.events.add("instance.terminating", f"{instance.id} is shutting down", instance=instance.id)
        return previous

    def get_console_output(response: Any) -> Any:
        instance = response.ec2_backend.get_instance(response._get_param("InstanceId"))
        text = world.console(instance.id).encode()[-_CONSOLE_BYTES:].decode(errors="replace")
        return ActionResult(
            {
                "InstanceId": instance.id,
                "Timestamp": utcnow(),
                "Output": Base64EncodedString.from_raw_string(text),
            }
        )

    follows = "an instance's state is its machine's"
    return [
        Patch(instances.InstanceBackend, "run_instances", run_instances, follows),
        Patch(instances.Instance, "terminate", terminate_instance, follows),
        Patch(General, "get_console_output", get_console_output, "the machine's console, not a sample"),
    ]
