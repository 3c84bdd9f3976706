"""Every change to moto, in one list; each subject's module says what and why."""

from __future__ import annotations

from rehearsal.api import autoscaling, instances, loadbalancing, run_command, stacks, storage, termination
from rehearsal.api.patches import Patch, Patches
from rehearsal.api.world import World


def every_patch(world: World) -> list[Patch]:
    """All of them; print ``[(p.target, p.why) for p in ...]`` to see what differs from plain moto."""
    return [
        *stacks.patches(world),
        *instances.patches(world),
        *autoscaling.patches(world),
        *loadbalancing.patches(world),
        *run_command.patches(world),
        *storage.patches(world),
        *termination.patches(),
    ]


def extend(world: World) -> Patches:
    """Install all; ``remove()`` of what is returned takes them back.

    Raises:
        rehearsal.interfaces.RehearsalError: this moto is not the one that the patches are for.
    """
    patches = Patches(every_patch(world))
    patches.install()
    return patches
