"""A template's values as CloudFormation would resolve them, with stand-ins of full length."""

from __future__ import annotations

from typing import Any

REGION = "ap-southeast-2"  # among the longest names of regions with Inf2
ACCOUNT = "123456789012"

PSEUDO = {
    "AWS::Region": REGION,
    "AWS::AccountId": ACCOUNT,
    "AWS::Partition": "aws",
    "AWS::URLSuffix": "amazonaws.com",
    "AWS::NoValue": "",
}


class Resolver:
    """Resolves intrinsics with stand-ins about as long as the real thing."""

    def __init__(self, stack_name: str, parameters: dict[str, str] | None = None) -> None:
        self._known = {
            **PSEUDO,
            "AWS::StackName": stack_name,
            "AWS::StackId": f"arn:aws:cloudformation:{REGION}:{ACCOUNT}:stack/{stack_name}/{'0' * 36}",
            "ArtifactDigest": "a" * 64,
            **(parameters or {}),
        }

    def text(self, value: Any) -> str:
        if isinstance(value, str):
            return value
        match value:
            case {"Fn::Join": [str() as delimiter, list() as parts]}:
                return delimiter.join(self.text(part) for part in parts)
            case {"Ref": str() as name}:
                return self._reference(name)
            case {"Fn::GetAtt": [str() as name, str() as attribute]}:
                return self._reference(f"{name}.{attribute}")
            case {"Fn::ImportValue": str() as name}:
                return f"{name.lower()}-0123456789ab"[-63:]
            case {"Fn::Sub": str() as text}:
                for name, known in self._known.items():
                    text = text.replace(f"${{{name}}}", known)
                return text
            case {"Fn::Base64": inner}:
                return self.text(inner)
        raise AssertionError(f"unexpected intrinsic {value!r}")

    def _reference(self, name: str) -> str:
        if name in self._known:
            return self._known[name]
        if "TargetGroup" in name or name.startswith("EdgeHosts"):
            return f"arn:aws:elasticloadbalancing:{REGION}:{ACCOUNT}:targetgroup/{'t' * 32}/{'0' * 16}"
        if "RayToken" in name:
            return f"arn:aws:secretsmanager:{REGION}:{ACCOUNT}:secret:{name}-{'0' * 19}"
        return f"{name}-{'0' * 20}"
