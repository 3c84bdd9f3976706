"""One resource of a stack: created, updated and deleted through moto's CloudFormation models.

moto creates resources lazily, whenever something looks at them; a stack that waits for signals must not. Here
nothing is created but by the engine, in order.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

from moto.cloudformation import parsing
from moto.ec2.models.core import TaggedEC2Resource

from rehearsal.api import completions
from rehearsal.api.world import World


class StackResources(parsing.ResourceMap):  # type: ignore[misc]
    """moto's map of a stack's resources, without creation on sight: what is not there yet is None."""

    def __getitem__(self, key: str) -> Any:
        if key in self._parsed_resources:
            return self._parsed_resources[key]
        if key in self._resource_json_map:
            return None
        raise KeyError(key)

    def values(self) -> Any:
        """The resources that exist."""
        return [self._parsed_resources[key] for key in self.names() if key in self._parsed_resources]

    def names(self) -> list[str]:
        """Logical names of the template, and of resources that an update is about to remove."""
        extra = [
            key
            for key, value in self._parsed_resources.items()
            if hasattr(value, "logical_resource_id") and key not in self._resource_json_map
        ]
        return [*self._resource_json_map, *extra]

    def resource(self, name: str) -> Any:
        """The resource, None when it does not exist."""
        value = self._parsed_resources.get(name)
        return value if hasattr(value, "logical_resource_id") else None

    def holds(self, name: str) -> bool:
        """Whether the template's condition, if any, lets the resource exist."""
        condition = self._resource_json_map[name].get("Condition")
        return not condition or bool(self.lazy_condition_map[condition])

    def resolved(self, name: str) -> dict[str, Any]:
        """The resource's definition with every reference resolved, as a copy."""
        definition = copy.deepcopy(self._resource_json_map[name])
        definition.setdefault("Properties", {})
        result: dict[str, Any] = parsing.clean_json(definition, self)
        return result

    def retarget(self, template: dict[str, Any], parameters: dict[str, Any]) -> None:
        """Take another template and parameters; existing resources stay as they are."""
        self._template = template
        self._resource_json_map = template["Resources"]
        self.input_parameters = parameters
        self.resolved_parameters: dict[str, Any] = {}
        self.load()

    def create_one(self, world: World, name: str, stack_name: str) -> Any:
        """Create the resource and return it."""
        definition = self.resolved(name)
        kind = definition["Type"]
        model, physical_name = self._model_and_name(name, definition, stack_name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            resource = model.create_from_cloudformation_json(
                physical_name,
                copy.deepcopy(definition),
                self._account_id,
                self._region_name,
                LogicalId=name,
                StackId=self.stack_id,
                ResourceType=kind,
            )
        if resource is None:
            raise RuntimeError(f"moto made nothing of {name} ({kind})")
        resource.cf_resource_type = kind
        resource.logical_resource_id = name
        if isinstance(resource, TaggedEC2Resource):
            tags = {
                **self.tags,
                "aws:cloudformation:stack-name": stack_name,
                "aws:cloudformation:stack-id": self.stack_id,
                "aws:cloudformation:logical-id": name,
            }
            world.backend("ec2").create_tags([resource.physical_resource_id], tags)
        self._parsed_resources[name] = resource
        completions.after_create(world, kind, resource, definition["Properties"])
        return resource

    def update_one(self, world: World, name: str, stack_name: str) -> str:
        """Bring an existing resource to its new definition; returns a note when that was not possible."""
        definition = self.resolved(name)
        kind = definition["Type"]
        old = self.resource(name)
        if completions.update(world, kind, old, definition["Properties"]):
            return ""
        model, physical_name = self._model_and_name(name, definition, stack_name)
        if hasattr(model.update_from_cloudformation_json, "__isabstractmethod__"):
            return f"an update of {kind} is not emulated: {name} stays as it was"
        resource = model.update_from_cloudformation_json(
            original_resource=old,
            new_resource_name=physical_name,
            cloudformation_json=copy.deepcopy(definition),
            account_id=self._account_id,
            region_name=self._region_name,
        )
        resource.cf_resource_type = kind
        resource.logical_resource_id = name
        self._parsed_resources[name] = resource
        return ""

    def delete_one(self, world: World, name: str, definition: dict[str, Any]) -> None:
        """Delete the resource; its definition is of the template that made it."""
        resource = self.resource(name)
        if resource is None:
            return
        if not completions.delete(world, definition["Type"], resource):
            self._delete_resource(resource, definition)
        self._parsed_resources.pop(name, None)

    def _model_and_name(self, name: str, definition: dict[str, Any], stack_name: str) -> tuple[Any, str]:
        kind = definition["Type"]
        model = parsing.resource_class_from_type(kind)
        property_name = parsing.resource_name_property_from_type(kind)
        given = definition["Properties"].get(property_name) if property_name else None
        return model, given or parsing.generate_resource_name(kind, stack_name, name)
