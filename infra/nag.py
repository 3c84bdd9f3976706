"""Acknowledged findings of cdk-nag: each with its reason, called beside the construct that it is about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aws_cdk as cdk
from constructs import IConstruct


def acknowledge(scope: IConstruct, rule: str, reason: str) -> None:
    """Accept a finding of ``rule`` here: ``AwsSolutions-…``, with ``[finding]`` where it has several."""
    cdk.Validations.of(scope).acknowledge(cdk.Acknowledgment(id=rule, reason=reason))


def acknowledge_wildcards(scope: IConstruct, reasons: Mapping[str, str]) -> None:
    """Accept resources with a wildcard in this role's policies: ARN (may hold tokens) -> reason.

    Every other wildcard, a new one too, remains a finding.
    """
    stack = cdk.Stack.of(scope)
    for arn, reason in reasons.items():
        acknowledge(scope, f"AwsSolutions-IAM5[Resource::{_flat(stack.resolve(arn))}]", reason)


def _flat(value: Any) -> str:
    """An ARN as cdk-nag spells it in a finding: references in angle brackets, joins joined."""
    if isinstance(value, str):
        return value.replace("${", "<").replace("}", ">")
    match value:
        case {"Fn::Join": [str() as delimiter, list() as parts]}:
            return delimiter.join(_flat(part) for part in parts)
        case {"Fn::Sub": str() as text} | {"Fn::ImportValue": str() as text}:
            return _flat(text)
        case {"Ref": str() as name}:
            return f"<{name}>"
        case {"Fn::GetAtt": [str() as name, str() as attribute]}:
            return f"<{name}.{attribute}>"
    raise ValueError(f"cannot tell how cdk-nag spells {value!r}")
