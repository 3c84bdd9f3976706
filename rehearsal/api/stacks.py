"""CloudFormation's API: stacks and change sets that run in the background, and SignalResource."""

from __future__ import annotations

from typing import Any

from moto.cloudformation import models, parsing, responses
from moto.cloudformation.exceptions import AlreadyExistsException, ValidationError
from moto.core.responses import EmptyResult

from rehearsal.api import emulated
from rehearsal.api import stack_answers as answers
from rehearsal.api.patches import Patch
from rehearsal.api.resources import StackResources
from rehearsal.api.stack_operation import StackOperation
from rehearsal.api.stack_record import record_of
from rehearsal.api.world import World

_UPDATABLE = (
    "CREATE_COMPLETE",
    "UPDATE_COMPLETE",
    "UPDATE_ROLLBACK_COMPLETE",
)


def patches(world: World) -> list[Patch]:
    """What changes in moto's CloudFormation."""
    backend, stack, response = models.CloudFormationBackend, models.Stack, responses.CloudFormationResponse
    calls = _Calls(world)
    emulated.Emulated.world = world
    waits = "a stack is created in the background and waits for signals"
    return [
        Patch(models, "ResourceMap", StackResources, "looking at a stack must not create its resources"),
        Patch(
            parsing, "resource_class_from_type", emulated.model_of, "unknown types get a name, not nothing"
        ),
        Patch(parsing, "resource_name_property_from_type", emulated.name_property_of, "the same"),
        Patch(stack, "outputs", property(_outputs(stack.outputs)), "no outputs before a stack is complete"),
        Patch(backend, "create_stack", calls.create_stack, waits),
        Patch(backend, "execute_change_set", calls.execute_change_set, waits),
        Patch(backend, "update_stack", calls.update_stack, "updates roll instances, and roll back"),
        Patch(backend, "delete_stack", calls.delete_stack, "deletion waits for instances to be gone"),
        Patch(
            backend,
            "create_change_set",
            answers.create_change_set(backend.create_change_set),
            "one REVIEW stack",
        ),
        Patch(
            response, "describe_change_set", answers.describe_change_set, "names of change sets are per stack"
        ),
        Patch(
            response,
            "delete_change_set",
            answers.delete_change_set,
            "the same, and deleting none is no error",
        ),
        Patch(response, "execute_change_set", answers.execute_change_set, "the same; and DisableRollback"),
        Patch(
            response,
            "create_change_set",
            answers.create_change_set_response,
            "UsePreviousValue of SSM parameters",
        ),
        Patch(
            response,
            "describe_stack_resource",
            answers.describe_stack_resource,
            "each resource has its own status",
        ),
        Patch(response, "describe_stack_resources", answers.describe_stack_resources, "the same"),
        Patch(response, "list_stack_resources", answers.list_stack_resources, "the same"),
        Patch(response, "signal_resource", calls.signal_resource, "moto has no SignalResource", new=True),
    ]


def _outputs(original: Any) -> Any:
    def outputs(stack: Any) -> Any:
        return original.fget(stack) if stack.status in {*_UPDATABLE, "UPDATE_IN_PROGRESS"} else None

    return outputs


class _Calls:
    """Replacements that need the world; as attributes of a class they get moto's own ``self`` first."""

    def __init__(self, world: World) -> None:
        def create_stack(
            backend: Any, name: str, template: str, parameters: dict[str, Any], **more: Any
        ) -> Any:
            if any(stack.name == name for stack in backend.stacks.values()):
                raise AlreadyExistsException(f"Stack [{name}] already exists")
            stack = models.Stack(
                stack_id=models.generate_stack_id(name, backend.region_name, backend.account_id),
                name=name,
                template=template,
                parameters=parameters,
                account_id=backend.account_id,
                region_name=backend.region_name,
                cross_stack_resources=backend.exports,
                **{key: value for key, value in more.items() if value is not None},
            )
            backend.stacks[stack.stack_id] = stack
            self.create(backend, stack, disable_rollback=False)
            return stack

        def execute_change_set(
            backend: Any, change_set_name: str, stack_name: str | None = None, disable_rollback: bool = False
        ) -> None:
            change_set = answers.find_change_set(backend, change_set_name, stack_name)
            if change_set.execution_status != "AVAILABLE":
                raise ValidationError(
                    message=f"ChangeSet [{change_set.change_set_id}] cannot be executed in its current "
                    f"status of [{change_set.status}]"
                )
            change_set.execution_status = "EXECUTE_COMPLETE"
            stack = backend.stacks[change_set.stack_id]
            if change_set.tags is not None:
                stack.tags = change_set.tags
                stack.resource_map.tags = dict(change_set.tags)
            if change_set.change_set_type == "CREATE":
                stack.template = change_set.template
                stack._parse_template()
                stack.parameters = change_set.parameters
                stack.resource_map = stack._create_resource_map()
                stack.output_map = stack._create_output_map()
                stack.description = stack.template_dict.get("Description")
                self.create(backend, stack, disable_rollback)
            else:
                self.update(backend, stack, change_set.template, change_set.parameters)

        def update_stack(
            backend: Any,
            name: str,
            template: str,
            role_arn: str | None,
            parameters: list[dict[str, Any]],
            tags: dict[str, str] | None,
        ) -> Any:
            stack = backend.get_stack(name)
            if tags is not None:
                stack.tags = tags
            self.update(backend, stack, template, answers.typed_parameters(stack, parameters))
            return stack

        def delete_stack(backend: Any, name_or_stack_id: str) -> None:
            for stack in list(backend.stacks.values()):
                if name_or_stack_id in {stack.name, stack.stack_id}:
                    self.delete(backend, stack)

        def signal_resource(response: Any) -> Any:
            self.signal(
                response.cloudformation_backend,
                response._get_param("StackName"),
                response._get_param("LogicalResourceId"),
                response._get_param("UniqueId"),
                response._get_param("Status"),
            )
            return EmptyResult()

        self.world = world
        self.create_stack = create_stack
        self.execute_change_set = execute_change_set
        self.update_stack = update_stack
        self.delete_stack = delete_stack
        self.signal_resource = signal_resource

    def create(self, backend: Any, stack: Any, disable_rollback: bool) -> None:
        """Begin to create the stack's resources."""
        stack.cross_stack_resources = stack.resource_map.cross_stack_resources = backend.exports
        stack.status = "CREATE_IN_PROGRESS"
        operation = StackOperation(self.world, stack)

        def work() -> None:
            operation.create(disable_rollback)
            with self.world.lock:
                if stack.status == "CREATE_COMPLETE":
                    _export(backend, stack)

        operation.start(work)

    def update(self, backend: Any, stack: Any, template: str, parameters: dict[str, Any]) -> None:
        """Begin to bring the stack to another template."""
        if stack.status not in _UPDATABLE:
            raise ValidationError(
                message=f"Stack:{stack.stack_id} is in {stack.status} state and can not be updated."
            )
        stack.status = "UPDATE_IN_PROGRESS"
        stack.cross_stack_resources = stack.resource_map.cross_stack_resources = backend.exports
        parsed = stack.parse_template(template)
        operation = StackOperation(self.world, stack)

        def finish() -> None:
            stack.template = template
            stack._parse_template()
            stack.parameters = parameters
            stack.description = stack.template_dict.get("Description")
            stack.output_map = stack._create_output_map()
            _export(backend, stack)

        operation.start(lambda: operation.update(parsed, parameters, finish))

    def delete(self, backend: Any, stack: Any) -> None:
        """Begin to delete the stack; what it was doing is cancelled."""
        users = [
            other.name
            for other in backend.stacks.values()
            if other is not stack
            and set(_imports(other))
            & {e.name for e in backend.exports.values() if e.exporting_stack_id == stack.stack_id}
        ]
        if users:
            raise ValidationError(
                message=f"Cannot delete {stack.name}: its exports are in use by {', '.join(sorted(users))}"
            )
        if stack.status == "DELETE_IN_PROGRESS":
            return
        stack.status = "DELETE_IN_PROGRESS"
        operation = StackOperation(self.world, stack)

        def finish() -> None:
            backend.stacks.pop(stack.stack_id, None)
            backend.deleted_stacks[stack.stack_id] = stack
            for name in [n for n, e in backend.exports.items() if e.exporting_stack_id == stack.stack_id]:
                backend.exports.pop(name)

        operation.start(lambda: operation.delete(finish))

    def signal(self, backend: Any, stack_name: str, logical_id: str, unique_id: str, status: str) -> None:
        """SignalResource: count it where the resource waits, refuse it elsewhere as AWS does."""
        stack = backend.get_stack(stack_name)
        record = record_of(stack)
        if status not in {"SUCCESS", "FAILURE"}:
            raise ValidationError(
                message=f"1 validation error detected: Value '{status}' at 'status' failed to satisfy "
                "constraint: Member must satisfy enum value set: [SUCCESS, FAILURE]"
            )
        book = record.signals.get(logical_id)
        if book is None:
            if logical_id not in stack.template_dict.get("Resources", {}):
                raise ValidationError(message=f"Resource {logical_id} does not exist for stack {stack.name}")
            self.world.events.add(
                "signal.refused",
                f"{unique_id} signalled {status} to {stack.name} {logical_id}, which waits for none",
                stack=stack.name,
                resource=logical_id,
                unique_id=unique_id,
                status=status,
            )
            raise ValidationError(
                message=f"Stack {stack.stack_id} is in {stack.status} state and can not be signaled"
            )
        counted = book.record(unique_id, status)
        self.world.events.add(
            "signal.received",
            f"{unique_id} signalled {status} to {stack.name} {logical_id}" + ("" if counted else " (again)"),
            stack=stack.name,
            resource=logical_id,
            unique_id=unique_id,
            status=status,
            counted=counted,
        )


def _export(backend: Any, stack: Any) -> None:
    for export in stack.exports:
        backend.exports[export.name] = export


def _imports(stack: Any) -> list[str]:
    found: list[str] = []

    def visit(node: Any) -> None:
        if isinstance(node, dict):
            if isinstance(node.get("Fn::ImportValue"), str):
                found.append(node["Fn::ImportValue"])
            for value in node.values():
                visit(value)
        elif isinstance(node, list):
            for value in node:
                visit(value)

    visit(stack.template_dict)
    return found
