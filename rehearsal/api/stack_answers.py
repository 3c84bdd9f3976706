"""CloudFormation's answers about change sets and resources: per stack, each resource with its status."""

from __future__ import annotations

from typing import Any

from moto.cloudformation.exceptions import ValidationError
from moto.core.responses import ActionResult, EmptyResult

from rehearsal.api.stack_record import record_of


def typed_parameters(stack: Any, given: list[dict[str, Any]]) -> dict[str, Any]:
    """Parameter values as they were typed: an SSM parameter's name, not the value that it had."""
    values = {}
    for item in given:
        key = item["ParameterKey"]
        if str(item.get("UsePreviousValue", False)).lower() == "true":
            if key in stack.parameters:
                values[key] = stack.parameters[key]
        else:
            values[key] = item["ParameterValue"]
    return values


def find_change_set(backend: Any, name: str, stack_name: str | None) -> Any:
    for change_set in reversed(backend.change_sets.values()):
        if change_set.change_set_id == name:
            return change_set
        if change_set.change_set_name == name and stack_name in {
            None,
            change_set.stack_name,
            change_set.stack_id,
        }:
            return change_set
    raise change_set_missing(name)


def change_set_missing(name: str) -> Exception:
    error: Exception = ValidationError(message=f"ChangeSet [{name}] does not exist")
    error.code = "ChangeSetNotFound"  # type: ignore[attr-defined]
    return error


def create_change_set(original: Any) -> Any:
    def create_change_set(backend: Any, stack_name: str, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("change_set_type") == "CREATE":
            for stack in list(backend.stacks.values()):
                if stack.name == stack_name and stack.status == "REVIEW_IN_PROGRESS":
                    backend.stacks.pop(stack.stack_id)  # an earlier change set that was never executed
                elif stack.name == stack_name:
                    raise ValidationError(
                        message=f"Stack [{stack_name}] already exists and cannot be created again with the "
                        f"changeSet [{kwargs.get('change_set_name')}]."
                    )
        return original(backend, *args, stack_name=stack_name, **kwargs)

    return create_change_set


def create_change_set_response(response: Any) -> Any:
    kind = response._get_param("ChangeSetType", "UPDATE")
    backend = response.cloudformation_backend
    stack_name = response._get_param("StackName")
    template = response._get_param("TemplateBody")
    given = response._get_param("Parameters", [])
    if url := response._get_param("TemplateURL"):
        template = response._get_stack_from_s3_url(url)
    if kind == "UPDATE":
        stack = backend.get_stack(stack_name)
        if response._get_bool_param("UsePreviousTemplate", False):
            template = stack.template
        parameters = typed_parameters(stack, given)
    else:
        parameters = {item["ParameterKey"]: item["ParameterValue"] for item in given}
    change_set_id, stack_id = backend.create_change_set(
        stack_name=stack_name,
        change_set_name=response._get_param("ChangeSetName"),
        template=template,
        parameters=parameters,
        description=response._get_param("Description"),
        notification_arns=response._get_param("NotificationARNs", []),
        tags={item["Key"]: item["Value"] for item in response._get_param("Tags", [])},
        role_arn=response._get_param("RoleARN"),
        change_set_type=kind,
    )
    return ActionResult({"Id": change_set_id, "StackId": stack_id})


def describe_change_set(response: Any) -> Any:
    return ActionResult(
        find_change_set(
            response.cloudformation_backend,
            response._get_param("ChangeSetName"),
            response._get_param("StackName"),
        )
    )


def delete_change_set(response: Any) -> Any:
    backend = response.cloudformation_backend
    name, stack_name = response._get_param("ChangeSetName"), response._get_param("StackName")
    for change_set in list(backend.change_sets.values()):
        if name == change_set.change_set_id or (
            name == change_set.change_set_name
            and stack_name in {None, change_set.stack_name, change_set.stack_id}
        ):
            del backend.change_sets[change_set.change_set_id]
    return EmptyResult()


def execute_change_set(response: Any) -> Any:
    response.cloudformation_backend.execute_change_set(
        change_set_name=response._get_param("ChangeSetName"),
        stack_name=response._get_param("StackName"),
        disable_rollback=response._get_bool_param("DisableRollback", False),
    )
    return EmptyResult()


def resource_details(stack: Any, names: list[str] | None = None) -> list[dict[str, Any]]:
    return [
        {
            "StackId": stack.stack_id,
            "StackName": stack.name,
            "LogicalResourceId": name,
            "PhysicalResourceId": state.physical_id,
            "ResourceType": state.kind,
            "ResourceStatus": state.status,
            "ResourceStatusReason": state.reason or None,
            "Timestamp": state.changed,
            "LastUpdatedTimestamp": state.changed,
        }
        for name, state in record_of(stack).resources.items()
        if names is None or name in names
    ]


def describe_stack_resource(response: Any) -> Any:
    stack_name, name = response._get_param("StackName"), response._get_param("LogicalResourceId")
    found = resource_details(response.cloudformation_backend.get_stack(stack_name), [name])
    if not found:
        raise ValidationError(message=f"Resource {name} does not exist for stack {stack_name}")
    return ActionResult({"StackResourceDetail": found[0]})


def describe_stack_resources(response: Any) -> Any:
    stack_name, name = response._get_param("StackName"), response._get_param("LogicalResourceId")
    stack = response.cloudformation_backend.get_stack(stack_name)
    return ActionResult({"StackResources": resource_details(stack, [name] if name else None)})


def list_stack_resources(response: Any) -> Any:
    stack = response.cloudformation_backend.get_stack(response._get_param("StackName"))
    return ActionResult({"StackResourceSummaries": resource_details(stack)})
