"""The compile job's two SSM documents, as plain data: the automation, and the command that it sends."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infra import userdata

COMMAND_TEMPLATE = Path(__file__).resolve().parent / "compile_command.sh"
USERDATA_TEMPLATE = Path(__file__).resolve().parent / "compile_userdata.sh"
JOB_TAG = "neuronfleet:compile-job"
EXECUTION_TAG = "neuronfleet:automation"
_PLACEHOLDER = re.compile(r"@([A-Z][A-Z0-9_]*)@")
_ONLINE_S = 900
_MARGIN_S = 900
"""What is left of the hard limit for boot and report when the command's own time is over."""

# Every value goes into a shell script, so each is held to characters that mean nothing to a shell.
PARAMETERS: dict[str, dict[str, str]] = {
    "ModelDigest": {
        "type": "String",
        "description": "Digest of the model to compile: `neuronfleet artifacts push DIR` prints it",
        "allowedPattern": "^[0-9a-f]{64}$",
    },
    "ModelName": {
        "type": "String",
        "description": "The model's name, as clients will say it",
        "allowedPattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,60}(/[A-Za-z0-9][A-Za-z0-9._-]{0,60})?$",
    },
    "TpDegree": {
        "type": "String",
        "description": "NeuronCores of one replica",
        "allowedPattern": "^[1-9][0-9]?$",
    },
    "BatchSize": {
        "type": "String",
        "description": "Sequences that the graphs hold",
        "allowedPattern": "^[1-9][0-9]{0,3}$",
    },
    "MaxModelLen": {
        "type": "String",
        "description": "Tokens of prompt and answer",
        "allowedPattern": "^[1-9][0-9]{1,6}$",
    },
    "Buckets": {
        "type": "String",
        "default": "",
        "description": "Prompt buckets with commas between, ending with MaxModelLen; empty: powers of two",
        "allowedPattern": "^([1-9][0-9]{0,6}(,[1-9][0-9]{0,6}){0,31})?$",
    },
}


def fill(template: str, values: Mapping[str, str]) -> str:
    """A script with its placeholders filled; values may hold CDK tokens.

    Raises:
        ValueError: placeholders and values do not match one to one.
    """
    wanted = set(_PLACEHOLDER.findall(template))
    if wanted != set(values):
        raise ValueError(f"the script has the placeholders {sorted(wanted)}, given were {sorted(values)}")
    return _PLACEHOLDER.sub(lambda match: values[match.group(1)], template)


def user_data(values: Mapping[str, str]) -> str:
    """The compile host's user data: the way to AWS that every host's has, then its own part."""
    shared, found, _ = userdata.TEMPLATE.read_text().partition("\nreport() {")
    if not found:
        raise ValueError(f"{userdata.TEMPLATE} has no report(): where its first part ends is not known")
    return fill(f"{shared}\n{USERDATA_TEMPLATE.read_text()}", values)


def parameters(degrees: Sequence[int]) -> dict[str, dict[str, Any]]:
    """The documents' parameters; degrees are those that the job's instance has the cores for."""
    degree = {**PARAMETERS["TpDegree"], "allowedValues": [str(value) for value in degrees]}
    return {**PARAMETERS, "TpDegree": degree}


def command_document(
    region: str, bucket: str, profile: str, limit_s: int, degrees: Sequence[int]
) -> dict[str, Any]:
    """The Command document: one script, with its time."""
    script = fill(COMMAND_TEMPLATE.read_text(), {"REGION": region, "BUCKET": bucket, "PROFILE": profile})
    return {
        "schemaVersion": "2.2",
        "description": "Compile a model for Inf2 and publish the artifact (sent by the compile automation)",
        "parameters": parameters(degrees),
        "mainSteps": [
            {
                "action": "aws:runShellScript",
                "name": "compile",
                "inputs": {
                    "runCommand": script.splitlines(),
                    "timeoutSeconds": str(command_seconds(limit_s)),
                },
            }
        ],
    }


def command_seconds(limit_s: int) -> int:
    """Seconds that the command may take: the hard limit less the margin."""
    return limit_s - _MARGIN_S


def automation_document(
    *,
    role_arn: str,
    launch_template_id: str,
    launch_template_version: str,
    command: str,
    log_group: str,
    limit_s: int,
    usd: int,
    environment: str,
    degrees: Sequence[int],
) -> dict[str, Any]:
    """The runbook: launch, wait for the agent, compile, and terminate whatever came before."""
    then_terminate = {"onFailure": "step:terminate", "onCancel": "step:terminate"}
    return {
        "schemaVersion": "0.3",
        "description": (
            f"Compile a model for Inf2 on an instance of its own, publish the artifact, end the instance. "
            f"Hard limit {limit_s // 60} minutes, at most {usd} USD of instance time a run."
        ),
        "assumeRole": role_arn,
        "parameters": parameters(degrees),
        "outputs": ["compile.Output"],
        "mainSteps": [
            {
                "name": "launch",
                "action": "aws:executeAwsApi",
                "onFailure": "Abort",
                "inputs": {
                    "Service": "ec2",
                    "Api": "RunInstances",
                    "MinCount": 1,
                    "MaxCount": 1,
                    # A repeated call gives the same instance, not another.
                    "ClientToken": "{{ automation:EXECUTION_ID }}",
                    "LaunchTemplate": {
                        "LaunchTemplateId": launch_template_id,
                        "Version": launch_template_version,
                    },
                    "TagSpecifications": [
                        {
                            "ResourceType": "instance",
                            # The job's tag here too: what this role may end is told by it.
                            "Tags": [
                                {"Key": EXECUTION_TAG, "Value": "{{ automation:EXECUTION_ID }}"},
                                {"Key": JOB_TAG, "Value": environment},
                            ],
                        }
                    ],
                },
                "outputs": [
                    {"Name": "InstanceId", "Selector": "$.Instances[0].InstanceId", "Type": "String"}
                ],
                "nextStep": "online",
            },
            {
                "name": "online",
                "action": "aws:waitForAwsResourceProperty",
                "timeoutSeconds": _ONLINE_S,
                **then_terminate,
                "inputs": {
                    "Service": "ssm",
                    "Api": "DescribeInstanceInformation",
                    "Filters": [{"Key": "InstanceIds", "Values": ["{{ launch.InstanceId }}"]}],
                    "PropertySelector": "$.InstanceInformationList[0].PingStatus",
                    "DesiredValues": ["Online"],
                },
                "nextStep": "compile",
            },
            {
                "name": "compile",
                "action": "aws:runCommand",
                "timeoutSeconds": limit_s,
                **then_terminate,
                "inputs": {
                    "DocumentName": command,
                    "InstanceIds": ["{{ launch.InstanceId }}"],
                    "Parameters": {name: f"{{{{ {name} }}}}" for name in PARAMETERS},
                    "CloudWatchOutputConfig": {
                        "CloudWatchLogGroupName": log_group,
                        "CloudWatchOutputEnabled": True,
                    },
                },
                "nextStep": "terminate",
            },
            {
                "name": "terminate",
                "action": "aws:changeInstanceState",
                "maxAttempts": 3,
                "timeoutSeconds": 600,
                "inputs": {"InstanceIds": ["{{ launch.InstanceId }}"], "DesiredState": "terminated"},
                "isEnd": True,
            },
        ],
    }
