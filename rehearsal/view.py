"""What the daemon tells over its control socket: plain JSON pictures of the API and the platform."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rehearsal.api import targets
from rehearsal.api.stack_record import record_of
from rehearsal.api.world import World
from rehearsal.interfaces import Platform
from rehearsal.reconcile import Reconciler

_SETTLED = ("_COMPLETE", "_FAILED")


class View:
    """The operations of the control socket."""

    def __init__(self, world: World, platform: Platform, reconciler: Reconciler) -> None:
        self.world = world
        self.platform = platform
        self.reconciler = reconciler

    def operations(self) -> dict[str, Callable[..., Any]]:
        """Name -> function; arguments are the function's."""
        return {
            "events": self.events,
            "hosts": self.hosts,
            "load_balancers": self.load_balancers,
            "stacks": self.stacks,
            "wait": self.wait,
        }

    def events(self, since: int = 0, wait_s: float = 0.0) -> list[dict[str, Any]]:
        """Events after number ``since``; waits up to ``wait_s`` seconds for one."""
        return [event.document() for event in self.world.events.since(since, wait_s)]

    def hosts(self) -> list[dict[str, Any]]:
        """Every instance that is not terminated, with its machine, its group and its target health."""
        with self.world.lock:
            members = {
                state.instance.id: (group, state)
                for group in self.world.backend("autoscaling").autoscaling_groups.values()
                for state in group.instance_states
            }
            return [
                self._host(instance, *members.get(instance.id, (None, None)))
                for instance in self.world.backend("ec2").all_instances()
                if instance.state != "terminated"
            ]

    def _host(self, instance: Any, group: Any, state: Any) -> dict[str, Any]:
        machine = self.reconciler.machine_states.get(instance.id)
        return {
            "instance_id": instance.id,
            "instance_type": instance.instance_type,
            "private_ip": instance.private_ip,
            "availability_zone": instance.placement.zone,
            "state": instance.state,
            "machine": machine.value if machine else None,
            "group": group.name if group else None,
            "lifecycle_state": state.lifecycle_state if state else None,
            "health_status": state.health_status if state else None,
            "launched": instance.launch_time,
            "console": str(self.platform.machines.console(instance.id)),
            "target_health": self._health(instance.id),
        }

    def _health(self, instance_id: str) -> list[dict[str, Any]]:
        found = []
        for arn, group in self.world.backend("elbv2").target_groups.items():
            ports = [int(t["Port"]) for t in group.targets.values() if t["Id"] == instance_id]
            ports += [port for a, i, port in self.world.draining if (a, i) == (arn, instance_id)]
            for port in ports:
                health = targets.health(self.world, arn, instance_id, port)
                found.append(
                    {
                        "target_group": arn,
                        "port": port,
                        "state": health.state.value,
                        "reason": health.reason,
                        "description": health.description,
                    }
                )
        return found

    def load_balancers(self) -> list[dict[str, Any]]:
        """Load balancers, and where a client of this machine reaches each."""
        with self.world.lock:
            found = list(self.world.backend("elbv2").load_balancers.values())
        return [
            {
                "arn": b.arn,
                "name": b.name,
                "dns_name": b.dns_name,
                "url": self.platform.load_balancer.url(b.arn),
            }
            for b in found
        ]

    def stacks(self) -> list[dict[str, Any]]:
        """Stacks with their status, outputs, and resources that are under way or failed."""
        with self.world.lock:
            return [
                {
                    "name": stack.name,
                    "status": stack.status,
                    "reason": getattr(stack, "stack_status_reason", None),
                    "outputs": {o["OutputKey"]: o["OutputValue"] for o in stack.outputs or []},
                    "unfinished": {
                        name: {"status": state.status, "reason": state.reason}
                        for name, state in record_of(stack).resources.items()
                        if not state.status.endswith("_COMPLETE")
                    },
                }
                for stack in self.world.backend("cloudformation").stacks.values()
            ]

    def wait(self, condition: str, wait_s: float = 60.0, **arguments: Any) -> dict[str, Any]:
        """Wait until a condition holds: ``{"met": bool, "waited_s": float}``.

        Conditions: ``stack_settled`` (``stack``: name; no longer in progress, or gone), ``hosts_gone`` (no
        instance and no machine is left), ``targets_healthy`` (``count``; optional ``target_group`` ARN).
        """
        conditions: dict[str, Callable[..., bool]] = {
            "stack_settled": self._stack_settled,
            "hosts_gone": self._hosts_gone,
            "targets_healthy": self._targets_healthy,
        }
        if condition not in conditions:
            raise ValueError(f"condition must be one of: {', '.join(conditions)}")
        holds = conditions[condition]
        started = time.monotonic()
        met = self.world.events.wait_until(lambda: holds(**arguments), wait_s)
        return {"met": met, "waited_s": round(time.monotonic() - started, 3)}

    def _stack_settled(self, stack: str) -> bool:
        return all(s["status"].endswith(_SETTLED) for s in self.stacks() if s["name"] == stack)

    def _hosts_gone(self) -> bool:
        return not self.hosts() and not self.platform.machines.states()

    def _targets_healthy(self, count: int, target_group: str | None = None) -> bool:
        healthy = [
            health
            for host in self.hosts()
            for health in host["target_health"]
            if health["state"] == "healthy" and target_group in {None, health["target_group"]}
        ]
        return len(healthy) >= count
