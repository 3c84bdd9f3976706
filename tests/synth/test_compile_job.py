"""The compile job's stack: only when asked for, clean, least privilege, and an instance that always ends."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import aws_cdk as cdk
import pytest
from cfnlint.api import ManualArgs, lint  # type: ignore[import-untyped]

from infra import compile_document
from infra.app import build
from infra.bundle import ROOT
from infra.compile_limit import limit_minutes
from infra.settings import SettingsError, load_settings
from infra.userdata import MAX_BYTES
from tests.synth.conftest import ENVIRONMENTS, Json, Synth, cdk_flags, tiny_bundle
from tests.synth.resolve import Resolver

SHELLCHECK = ROOT / ".venv/bin/shellcheck"
LIMIT_S = 7200


@pytest.fixture(scope="module", params=ENVIRONMENTS)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, bundle: Path) -> Json:
    """The stack's template; synthesis runs cdk-nag, whose findings fail it."""
    folder = tmp_path_factory.mktemp("compile")
    context = {**cdk_flags(), "env": request.param, "bundle": str(bundle), "compile_job": "true"}
    app = cdk.App(outdir=str(folder), context=context)
    build(app)
    app.synth()
    template: Json = json.loads((folder / f"neuronfleet-{request.param}-compile.template.json").read_text())
    return template


def only(template: Json, kind: str) -> Any:
    (found,) = [item["Properties"] for item in template["Resources"].values() if item["Type"] == kind]
    return found


def document(template: Json, kind: str) -> Any:
    (found,) = [
        item["Properties"]
        for item in template["Resources"].values()
        if item["Type"] == "AWS::SSM::Document" and item["Properties"]["DocumentType"] == kind
    ]
    return found["Content"]


def resolver() -> Resolver:
    return Resolver("neuronfleet-dev-compile")


def test_no_environment_has_it_unless_asked(synth: Synth) -> None:
    assert not list(synth("dev").folder.glob("*compile*"))


def test_cfn_lint_has_nothing_to_say(job: Json) -> None:
    matches = lint(json.dumps(job), config=ManualArgs(regions=["us-east-1", "us-west-2"]))
    assert [str(match) for match in matches if match.rule.id[0] in "EW"] == []


def test_between_jobs_nothing_runs_and_nothing_can_be_reached(job: Json) -> None:
    kinds = {item["Type"] for item in job["Resources"].values()}
    assert not kinds & {
        "AWS::EC2::Instance",
        "AWS::EC2::NatGateway",
        "AWS::EC2::EIP",
        "AWS::Lambda::Function",
    }
    assert "AWS::AutoScaling::AutoScalingGroup" not in kinds
    group = only(job, "AWS::EC2::SecurityGroup")
    assert "SecurityGroupIngress" not in group
    assert {rule["FromPort"] for rule in group["SecurityGroupEgress"]} == {443}
    assert "AWS::EC2::SecurityGroupIngress" not in kinds


def test_the_host_is_locked_down_and_its_shutdown_is_its_termination(job: Json) -> None:
    data = only(job, "AWS::EC2::LaunchTemplate")["LaunchTemplateData"]
    assert data["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert data["MetadataOptions"]["HttpTokens"] == "required"
    assert "KeyName" not in data
    (interface,) = data["NetworkInterfaces"]
    assert interface["SubnetId"] and interface["Groups"] and interface["AssociatePublicIpAddress"] is True
    assert "SecurityGroupIds" not in data, "EC2 refuses groups beside interfaces"
    (device,) = data["BlockDeviceMappings"]
    assert device["Ebs"]["Encrypted"] is True and device["Ebs"]["DeleteOnTermination"] is True
    script = resolver().text(data["UserData"])
    assert len(script.encode()) < MAX_BYTES
    assert not re.search(r"@[A-Z_]+@", script)
    # The smallest size with the cores of a replica (2 in dev, 8 in the others), and what 10 USD buy of it.
    size = data["InstanceType"]
    assert size in ("inf2.8xlarge", "inf2.24xlarge")
    assert f"--on-active={60 * limit_minutes(size, 120, 10)}s" in script


def test_the_automation_ends_the_instance_however_a_step_ends(job: Json) -> None:
    content = document(job, "Automation")
    steps = {step["name"]: step for step in content["mainSteps"]}
    assert list(steps) == ["launch", "online", "compile", "terminate"]
    for name in ("online", "compile"):
        assert steps[name]["onFailure"] == steps[name]["onCancel"] == "step:terminate"
    assert [steps[name]["nextStep"] for name in ("launch", "online", "compile")] == [
        "online",
        "compile",
        "terminate",
    ]
    last = steps["terminate"]
    assert last["isEnd"] is True and last["inputs"]["DesiredState"] == "terminated"
    assert "isCritical" not in steps["compile"], "a failed compilation must show as a failed job"
    assert steps["launch"]["inputs"]["ClientToken"] == "{{ automation:EXECUTION_ID }}"
    sent = document(job, "Command")["mainSteps"][0]["inputs"]["timeoutSeconds"]
    assert 900 < int(sent) < steps["compile"]["timeoutSeconds"] <= LIMIT_S
    assert set(steps["compile"]["inputs"]["Parameters"]) == set(document(job, "Command")["parameters"])


def test_every_parameter_means_nothing_to_a_shell(job: Json) -> None:
    for content in (document(job, "Automation"), document(job, "Command")):
        for name, parameter in content["parameters"].items():
            pattern = re.compile(parameter["allowedPattern"])
            for trick in ("'; reboot '", "$(id)", "a b", "`id`", "../x", "a\nb", "-x", "a'b", "{{x}}"):
                assert not pattern.fullmatch(trick), (name, trick)
            assert pattern.pattern.startswith("^") and pattern.pattern.endswith("$")
    degrees = document(job, "Automation")["parameters"]["TpDegree"]["allowedValues"]
    assert degrees in (["1", "2"], ["1", "2", "4", "8"]), "no more cores than the instance has"
    good = {"ModelDigest": "a" * 64, "ModelName": "meta-llama/Meta-Llama-3-8B-Instruct", "TpDegree": "8",
            "BatchSize": "16", "MaxModelLen": "8192", "Buckets": "512,2048,8192"}  # fmt: skip
    for name, value in good.items():
        assert re.fullmatch(compile_document.PARAMETERS[name]["allowedPattern"], value)
    assert re.fullmatch(compile_document.PARAMETERS["Buckets"]["allowedPattern"], "")


def test_roles_are_held_to_the_job(job: Json) -> None:
    roles = {
        name: role["Properties"]
        for name, role in job["Resources"].items()
        if role["Type"] == "AWS::IAM::Role"
    }
    assert len(roles) == 2
    statements = {
        (re.sub(r".*(Host|Automation)Role.*", r"\1", name), item["Sid"]): item
        for name, role in roles.items()
        for item in role["Policies"][0]["PolicyDocument"]["Statement"]
    }
    for (_, sid), item in statements.items():
        actions = [item["Action"]] if isinstance(item["Action"], str) else item["Action"]
        assert not [action for action in actions if "*" in action], sid
        assert not [a for a in actions if a.startswith(("s3:Delete", "iam:Create", "ec2:Stop"))], sid
        if item["Resource"] == "*":
            assert sid in ("Agent", "Look")
    assert "ec2:LaunchTemplate" in statements["Automation", "Launch"]["Condition"]["ArnEquals"]
    tag = f"ec2:ResourceTag/{compile_document.JOB_TAG}"
    assert tag in statements["Automation", "End"]["Condition"]["StringEquals"]
    assert statements["Automation", "PassHostRole"]["Condition"]["StringEquals"] == {
        "iam:PassedToService": "ec2.amazonaws.com"
    }
    assert all("ManagedPolicyArns" not in role for role in roles.values())
    tagged = only(job, "AWS::EC2::LaunchTemplate")["LaunchTemplateData"]["TagSpecifications"]
    instance = next(item for item in tagged if item["ResourceType"] == "instance")
    assert compile_document.JOB_TAG in {item["Key"] for item in instance["Tags"]}
    (asked,) = document(job, "Automation")["mainSteps"][0]["inputs"]["TagSpecifications"]
    assert compile_document.JOB_TAG in {item["Key"] for item in asked["Tags"]}


def test_limits_hold_and_are_refused_where_they_buy_too_little() -> None:
    assert limit_minutes("inf2.8xlarge", 120, 10) == 120
    bought = limit_minutes("inf2.48xlarge", 480, 20)
    assert 30 <= bought < 120
    with pytest.raises(SettingsError, match="a job needs 30"):
        load_settings(
            "dev", {"compile_job": "true", "compile_usd": "1", "compile_instance_type": "inf2.48xlarge"}
        )
    with pytest.raises(SettingsError, match=r"inf2\.8xlarge has 2 NeuronCores, and engine\.tp_degree is 8"):
        load_settings("prod", {"compile_job": "true", "compile_instance_type": "inf2.8xlarge"})
    with pytest.raises(SettingsError, match="compiles nothing"):
        load_settings("dev", {"compile_job": "true", "rehearsal": "true"})


def stand_in(folder: Path, name: str, body: str = "") -> None:
    path = folder / name
    path.write_text(f'#!/bin/bash\necho "{name} $*" >>"$CALLS"\n{body}\n')
    path.chmod(0o755)


def run_command(tmp_path: Path, fails: str = "") -> tuple[int, list[str]]:
    """The Command document's script with its parameters in, as the agent runs it."""
    work, venv, tools = tmp_path / "work", tmp_path / "venv/bin", tmp_path / "tools"
    for folder in (venv, tools):
        folder.mkdir(parents=True)
    content = compile_document.command_document("us-west-2", "artifacts", "vllm-neuron-2.28", LIMIT_S, (2, 8))
    text = "\n".join(content["mainSteps"][0]["inputs"]["runCommand"])
    values = {"ModelDigest": "a" * 64, "ModelName": "m/n", "TpDegree": "8", "BatchSize": "4",
              "MaxModelLen": "2048", "Buckets": ""}  # fmt: skip
    for name, value in values.items():
        text = text.replace(f"{{{{ {name} }}}}", value)
    assert "{{" not in text
    text = text.replace("/var/lib/neuronfleet/compile", str(work)).replace(
        "/opt/neuronfleet/venv/bin", str(venv)
    )
    script = tmp_path / "script.sh"
    script.write_text(text)
    stand_in(tools, "shutdown")
    stand_in(tools, "cloud-init")
    stand_in(venv, "neuronfleet", f'if [ "$1" = "{fails}" ]; then exit 7; fi')
    calls = tmp_path / "calls"
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "CALLS": str(calls)}
    done = subprocess.run(["/bin/bash", str(script)], env=environment, timeout=30, check=False)
    return done.returncode, calls.read_text().splitlines()


def test_the_command_pulls_compiles_publishes_and_shuts_down(tmp_path: Path) -> None:
    code, calls = run_command(tmp_path)
    assert code == 0
    assert [call.split()[0] for call in calls] == ["cloud-init", "neuronfleet", "neuronfleet", "shutdown"]
    assert calls[2].startswith("neuronfleet compile --model")
    assert "--profile vllm-neuron-2.28 --tp-degree 8 --batch-size 4 --max-model-len 2048 --out" in calls[2]
    assert "--publish artifacts --aws" in calls[2]


@pytest.mark.parametrize("fails", ["artifacts", "compile"])
def test_a_failed_command_shuts_down_too_and_says_so(tmp_path: Path, fails: str) -> None:
    code, calls = run_command(tmp_path, fails)
    assert code == 7
    assert calls[-1] == "shutdown -P +2"


def run_user_data(tmp_path: Path, *, broken: str = "") -> tuple[int, list[str], str]:
    """The compile host's user data: paths under ``tmp_path``, AWS and systemd by stand-ins."""
    tools, venv = tmp_path / "tools", tmp_path / "venv/bin"
    for folder in (tools, venv):
        folder.mkdir(parents=True)
    bundle = tiny_bundle(tmp_path / "b", 'echo "install $NEURONFLEET_INSTALL" >>"$CALLS"\n')
    digest = subprocess.run(["sha256sum", bundle], capture_output=True, text=True, check=True).stdout.split()[
        0
    ]
    text = compile_document.user_data(
        {
            "REGION": "us-west-2",
            "URL_SUFFIX": "amazonaws.com",
            "LIMIT_S": str(LIMIT_S),
            "NODE_CONFIG": '{"engine": {"profile": "vllm-neuron-2.28"}}',
            "BUNDLE_BUCKET": "bundles",
            "BUNDLE_KEY": "bundle.zip",
            "BUNDLE_SHA256": "0" * 64 if broken == "sha256" else digest,
            "VENV": str(tmp_path / "venv"),
        }
    )
    for path in ("/etc/neuronfleet", "/opt/neuronfleet", "/run/neuronfleet-install.err", "/dev/console"):
        text = text.replace(path, f"{tmp_path}{path}")
    for folder in ("dev", "run", "etc", "opt"):
        (tmp_path / folder).mkdir()
    script = tmp_path / "user-data.sh"
    script.write_text(text)
    for name in ("systemctl", "systemd-run"):
        stand_in(tools, name, "exit 1" if name == broken else "")
    stand_in(
        tools, "curl", f'while [ $# -gt 0 ]; do if [ "$1" = -o ]; then cp {bundle} "$2"; fi; shift; done'
    )
    (venv / "python").symlink_to(os.path.realpath(ROOT / ".venv/bin/python"))
    calls = tmp_path / "calls"
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "CALLS": str(calls)}
    done = subprocess.run(
        ["/bin/bash", str(script)], env=environment, timeout=60, check=False, capture_output=True, text=True
    )
    return done.returncode, calls.read_text().splitlines(), done.stdout + done.stderr


def test_the_hosts_timer_is_armed_before_anything_else(tmp_path: Path) -> None:
    code, calls, output = run_user_data(tmp_path)
    assert code == 0, output
    assert calls[0].startswith(f"systemd-run --unit=neuronfleet-time-limit --on-active={LIMIT_S}s")
    assert calls[0].endswith("systemctl poweroff --force")
    assert "install venv" in calls
    assert not [call for call in calls if call.startswith("systemctl poweroff")]
    assert json.loads((tmp_path / "etc/neuronfleet/node.json").read_text())["engine"]["profile"]


@pytest.mark.parametrize("broken", ["sha256", "systemd-run"])
def test_a_host_that_cannot_be_set_up_ends_itself(tmp_path: Path, broken: str) -> None:
    code, calls, output = run_user_data(tmp_path, broken=broken)
    assert code != 0
    assert calls[-1] == "systemctl poweroff --no-block"
    assert "neuronfleet-failed: compile host" in (tmp_path / "dev/console").read_text()
    assert "install venv" not in calls, output


def test_scripts_pass_shellcheck(tmp_path: Path) -> None:
    values = dict.fromkeys(
        [
            "REGION",
            "URL_SUFFIX",
            "LIMIT_S",
            "NODE_CONFIG",
            "BUNDLE_BUCKET",
            "BUNDLE_KEY",
            "BUNDLE_SHA256",
            "VENV",
        ],
        "x",
    )
    (tmp_path / "user-data.sh").write_text(compile_document.user_data(values))
    (tmp_path / "command.sh").write_text(compile_document.COMMAND_TEMPLATE.read_text())
    for name in ("user-data.sh", "command.sh"):
        done = subprocess.run(
            [str(SHELLCHECK), str(tmp_path / name)], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout
