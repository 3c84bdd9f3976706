"""Auto Scaling's API on top of ``groups``: sizes are wishes, members follow."""

from __future__ import annotations

from typing import Any

from moto.autoscaling import models, responses
from moto.autoscaling.exceptions import ValidationError
from moto.core.responses import ActionResult, EmptyResult

from rehearsal.api import groups
from rehearsal.api.patches import Patch
from rehearsal.api.world import World


def patches(world: World) -> list[Patch]:
    """What changes in moto's Auto Scaling."""
    group, backend, state = models.FakeAutoScalingGroup, models.AutoScalingBackend, models.InstanceState
    create = backend.create_auto_scaling_group

    def create_group(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = create(self, *args, **kwargs)
        groups.converge(world, made)
        return made

    def set_desired_capacity(self: Any, new_capacity: int | None) -> None:
        wanted = int(self.min_size or 0) if new_capacity is None else int(new_capacity)
        _check_size(self, wanted)
        self.desired_capacity = wanted
        if self.name in self.autoscaling_backend.autoscaling_groups:
            groups.converge(world, self)

    def update_from_cloudformation_json(
        cls: Any, /, original_resource: Any, new_resource_name: str, cloudformation_json: Any, **_: Any
    ) -> Any:
        groups.reconfigure(world, original_resource, cloudformation_json["Properties"], rolling=False)
        return original_resource

    def notify_terminate_instances(self: Any, instance_ids: list[str]) -> None:
        """The group's tick sees the state of its members."""

    def update_attached_target_groups(self: Any, group_name: str) -> None:
        found = self.autoscaling_groups[group_name]
        for member in found.instance_states:
            if member.lifecycle_state == "InService":
                groups._register(world, found, member)

    def delete_group(self: Any, group_name: str, force: bool = True) -> None:
        found = self.autoscaling_groups.get(group_name)
        if found is None:
            raise ValidationError(
                f"AutoScalingGroup name not found - AutoScalingGroup '{group_name}' not found"
            )
        groups.empty(world, found)
        if not found.instance_states:
            self.autoscaling_groups.pop(group_name)
        else:
            found.rehearsal_deleting = True

    def terminate_instance(self: Any, instance_id: str, should_decrement: bool) -> Any:
        for found in self.autoscaling_groups.values():
            for member in found.instance_states:
                if member.instance.id == instance_id:
                    before = found.desired_capacity
                    if should_decrement:
                        _check_size(found, before - 1)
                        found.desired_capacity = before - 1
                    groups.retire(world, found, member, "TerminateInstanceInAutoScalingGroup")
                    return models.TerminateInstanceActivity(member.instance, before)
        raise ValidationError(
            f"Instance Id not found - No managed instance found for instance ID: {instance_id}"
        )

    def set_instance_health(response: Any) -> Any:
        status = response._get_param("HealthStatus")
        if status not in {"Healthy", "Unhealthy"}:
            raise ValidationError(f"HealthStatus {status!r} is not one of: Healthy, Unhealthy")
        groups.set_health(
            world,
            response._get_param("InstanceId"),
            status,
            respect_grace=response._get_bool_param("ShouldRespectGracePeriod", True),
        )
        return EmptyResult()

    def terminate_in_group(response: Any) -> Any:
        activity = response.autoscaling_backend.terminate_instance(
            response._get_param("InstanceId"),
            response._get_bool_param("ShouldDecrementDesiredCapacity", False),
        )
        return ActionResult({"Activity": activity})

    def member_template(self: Any) -> Any:
        found = self.auto_scaling_group
        if found is None or found.ec2_launch_template is None:
            return None
        return {
            "LaunchTemplateId": found.ec2_launch_template.id,
            "LaunchTemplateName": found.ec2_launch_template.name,
            "Version": str(groups.member_of(self).version),
        }

    follows = "members are launched across zones, come into service, and are retired in order"
    return [
        Patch(backend, "create_auto_scaling_group", create_group, follows),
        Patch(group, "set_desired_capacity", set_desired_capacity, follows),
        Patch(
            group,
            "update_from_cloudformation_json",
            classmethod(update_from_cloudformation_json),
            "moto deletes the group and makes another",
        ),
        Patch(backend, "notify_terminate_instances", notify_terminate_instances, follows),
        Patch(backend, "update_attached_target_groups", update_attached_target_groups, follows),
        Patch(
            backend, "delete_auto_scaling_group", delete_group, "instances terminate before their group goes"
        ),
        Patch(backend, "terminate_instance", terminate_instance, follows),
        Patch(responses.AutoScalingResponse, "set_instance_health", set_instance_health, "grace period"),
        Patch(
            responses.AutoScalingResponse,
            "terminate_instance_in_auto_scaling_group",
            terminate_in_group,
            follows,
        ),
        Patch(state, "launch_template", property(member_template), "each member knows its own version"),
    ]


def _check_size(group: Any, wanted: int) -> None:
    if group.max_size is not None and wanted > int(group.max_size):
        raise ValidationError(
            f"New SetDesiredCapacity value {wanted} is above max value {group.max_size} "
            "for the AutoScalingGroup."
        )
    if group.min_size is not None and wanted < int(group.min_size):
        raise ValidationError(
            f"New SetDesiredCapacity value {wanted} is below min value {group.min_size} "
            "for the AutoScalingGroup."
        )


def forget_deleted(world: World) -> None:
    """Drop groups whose deletion waited for their last instance; called under the lock."""
    found = world.backend("autoscaling").autoscaling_groups
    for name in [
        n for n, g in found.items() if getattr(g, "rehearsal_deleting", False) and not g.instance_states
    ]:
        found.pop(name)
