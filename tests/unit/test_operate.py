"""An operator's view: which AWS is asked, what is said when nothing is there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from moto import mock_aws
from rich.console import Console

from app.operate.remote import run_on_hosts
from app.operate.show import ranges, render
from app.operate.status import Host, Status, choose_environment, read_status
from app.operate.target import OperateError, Target, find_target, rehearsal_state
from rehearsal.timeline import phases

REGION = "us-east-1"
TEMPLATE = json.dumps(
    {
        "Resources": {"Topic": {"Type": "AWS::SNS::Topic"}},
        "Outputs": {"Url": {"Value": "http://lb.example"}},
    }
)


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Any:
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(key, "testing")
    with mock_aws():
        yield Target(region=REGION, endpoint_url=None)


def _deploy(target: Target, *names: str) -> None:
    for name in names:
        target.client("cloudformation").create_stack(StackName=name, TemplateBody=TEMPLATE)


def test_ranges() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert ranges([]) == ""


def test_nothing_deployed_says_how_to_deploy(aws: Target) -> None:
    with pytest.raises(OperateError, match="make up"):
        choose_environment(aws, None)


def test_environment_is_chosen_or_those_that_exist_are_named(aws: Target) -> None:
    _deploy(aws, "neuronfleet-dev-store", "neuronfleet-dev", "other")
    assert choose_environment(aws, None) == "dev"
    with pytest.raises(OperateError, match="'prod' is not deployed; these are: dev"):
        choose_environment(aws, "prod")
    _deploy(aws, "neuronfleet-blueprint")
    with pytest.raises(OperateError, match="blueprint, dev"):
        choose_environment(aws, None)


def test_status_of_a_stack_without_hosts(aws: Target) -> None:
    _deploy(aws, "neuronfleet-dev")
    status = read_status(aws, "dev")
    assert status.url == "http://lb.example"
    assert [stack["status"] for stack in status.stacks] == ["CREATE_COMPLETE"]
    assert status.hosts == []
    assert set(status.as_json()) >= {"url", "environment", "stacks", "hosts"}


class _Agent:
    """An SSM client whose agent answers after some polls and refuses unknown instances as AWS does."""

    class exceptions:
        class InvocationDoesNotExist(Exception):
            pass

    def __init__(self, answers: dict[str, dict[str, str]], polls: int = 2) -> None:
        self.answers, self.polls, self.asked = answers, polls, 0

    def send_command(self, *, InstanceIds: list[str], **_: Any) -> dict[str, Any]:
        from botocore.exceptions import ClientError

        if InstanceIds[0] not in self.answers:
            raise ClientError({"Error": {"Code": "InvalidInstanceId", "Message": "not there"}}, "SendCommand")
        return {"Command": {"CommandId": InstanceIds[0]}}

    def get_command_invocation(self, *, CommandId: str, InstanceId: str) -> dict[str, str]:
        self.asked += 1
        if self.asked == 1:
            raise self.exceptions.InvocationDoesNotExist
        return self.answers[InstanceId] if self.asked > self.polls else {"Status": "InProgress"}


def test_a_host_that_cannot_be_asked_is_an_error_of_that_host_alone() -> None:
    agent = _Agent(
        {
            "i-1": {"Status": "Success", "StandardOutputContent": "fine"},
            "i-2": {"Status": "Failed", "StandardErrorContent": "first\nno such file\n"},
            "i-3": {"Status": "InProgress"},
        }
    )
    results = run_on_hosts(agent, dict.fromkeys(("i-1", "i-2", "i-3", "i-4"), "true"), timeout_s=1.5)
    assert (results["i-1"].output, results["i-1"].error) == ("fine", "")
    assert results["i-2"].error == "no such file"
    assert "did not answer within" in results["i-3"].error
    assert "InvalidInstanceId" in results["i-4"].error


def test_rehearsal_is_found_only_while_its_daemon_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURONFLEET_REHEARSAL_HOME", str(tmp_path))
    for key in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(key, raising=False)
    state = {"pid": os.getpid(), "api_endpoint": "http://localhost:1", "region": "us-east-1"}
    (tmp_path / "state.json").write_text(json.dumps(state))
    assert find_target().endpoint_url == "http://localhost:1"
    # Process ids end at 2**22 on Linux: this one never lives.
    (tmp_path / "state.json").write_text(json.dumps(state | {"pid": 2**22 + 1}))
    assert rehearsal_state() is None
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(OperateError, match="make up"):
        find_target()


def _host(**changes: Any) -> Host:
    values: dict[str, Any] = {
        "instance_id": "i-1",
        "private_ip": "10.0.0.4",
        "instance_type": "inf2.8xlarge",
        "role": "cell",
        "state": "running",
        "target_health": "healthy",
    }
    return Host(**(values | changes))


def test_status_shows_binding_and_what_is_wrong() -> None:
    raylet = {"name": "ray-head", "numa_nodes": [0], "cores": [0, 1], "cpus": 2}
    host = _host(
        raylets=[raylet | {"live": {"ok": False, "reason": "bound to node 1"}}],
        replicas=[{"block": 0, "numa_nodes": [0], "cores": [0, 1], "live": {"ok": True}}],
        units=[{"name": "neuronfleet-fetch", "state": "failed", "last_line": "sha256 differs"}],
    )
    status = Status(
        "dev", "http://x", True, [{"name": "s", "status": "CREATE_COMPLETE", "reason": ""}], [host], []
    )
    console = Console(record=True, width=160)
    console.print(render(status))
    text = console.export_text()
    for words in (
        "ray-head cores 0-1 nodes 0",
        "bound to node 1",
        "block 0 cores 0-1 nodes 0 ✓",
        "sha256 differs",
    ):
        assert words in text


def test_phases_come_from_unit_times() -> None:
    def unit(name: str, started: float, active: float, ended: float | None = None) -> dict[str, Any]:
        return {"name": f"neuronfleet-{name}", "started": started, "active": active, "ended": ended}

    host = _host(
        launched="2026-12-01T12:00:00+00:00",
        replicas=[{"block": 0}],
        units=[
            unit("configure", 1796126410, 1796126411, 1796126411),
            unit("fetch", 1796126411, 1796126414, 1796126413),
            unit("ray-head", 1796126412, 1796126420),
            unit("serve", 1796126421, 1796126421),
            unit("ready", 1796126421, 1796126461, 1796126461),
        ],
    )
    assert phases(host) == {"boot": 10.0, "cluster": 8.0, "artifact": 2.0, "model load": 41.0}
