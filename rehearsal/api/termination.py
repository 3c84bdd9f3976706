"""CloudFormation's termination protection: moto has no UpdateTerminationProtection and deletes any stack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rehearsal.api.patches import Patch

_FLAG = "enable_termination_protection"


def update_termination_protection(self: Any) -> Any:
    """UpdateTerminationProtection: remember the flag on the stack."""
    from moto.core.responses import ActionResult

    stack = self.cloudformation_backend.get_stack(self._get_param("StackName"))
    setattr(stack, _FLAG, bool(self._get_bool_param("EnableTerminationProtection")))
    return ActionResult({"StackId": stack.stack_id})


def delete_stack(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """DeleteStack: refused, as CloudFormation refuses it, while the stack is protected."""

    def delete(self: Any) -> Any:
        from moto.cloudformation.exceptions import ValidationError

        name = self._get_param("StackName")
        for stack in self.cloudformation_backend.stacks.values():
            if name in (stack.name, stack.stack_id) and getattr(stack, _FLAG, False):
                raise ValidationError(
                    f"Stack [{stack.name}] cannot be deleted while TerminationProtection is enabled"
                )
        return original(self)

    return delete


def patches() -> list[Patch]:
    """Both calls."""
    from moto.cloudformation.responses import CloudFormationResponse as response

    return [
        Patch(
            response,
            "update_termination_protection",
            update_termination_protection,
            "moto has no UpdateTerminationProtection",
            new=True,
        ),
        Patch(response, "delete_stack", delete_stack(response.delete_stack), "a protected stack stays"),
    ]
