"""Boot steps one by one: identity, log lines, Ray's token and head, readiness, reports."""

from __future__ import annotations

import json
import logging
import socket
import stat
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from botocore.exceptions import ClientError

from app.node import ray_setup, ready, report
from app.node.config import NodeConfig
from app.node.host import MetadataError, interface_of, read_identity, write_atomically
from app.node.log import JsonFormatter

INSTANCE = "i-0123456789abcdef0"


def config(role: str = "cell", **changes: Any) -> NodeConfig:
    values = {
        "version": 1,
        "environment": "dev",
        "region": "us-east-1",
        "role": role,
        "signal": {"stack": "neuronfleet-dev", "logical_id": "Fleet"},
        "artifact": {"bucket": "artifacts", "digest": "0" * 64},
        "engine": {"profile": "cpu", "model": "m", "tp_degree": 2, "batch_size": 4, "max_model_len": 512},
        "serve": {"keep_alive_s": 400},
        "numactl_from": "image",
    }
    if role != "cell":
        values["cluster"] = {"head_address_parameter": "/nf/head", "auth_token_secret_arn": "arn:token"}
    return NodeConfig.model_validate(values | changes)


def client_error(code: str) -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": code}}, "Operation")


class FakeAws:
    """A boto3 client of any service: answers (or raises) what it was given, in order, and keeps the calls."""

    def __init__(self, **answers: list[Any]) -> None:
        self.answers = answers
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(**arguments: Any) -> Any:
            self.calls.append((name, arguments))
            queue = self.answers[name]
            answer = queue.pop(0) if len(queue) > 1 else queue[0]
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, list[tuple[int, str]]], list[tuple[str, str, str]]]]:
    """An HTTP server on loopback: (URL, answers by path, what was asked: method, path, token header)."""
    answers: dict[str, list[tuple[int, str]]] = {}
    asked: list[tuple[str, str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            token = self.headers.get("X-aws-ec2-metadata-token", "")
            asked.append((self.command, self.path, token))
            queue = answers.get(self.path, [(404, "")])
            status, text = queue.pop(0) if len(queue) > 1 else queue[0]
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_PUT = _answer

        def log_message(self, *_: Any) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}", answers, asked
    httpd.shutdown()
    httpd.server_close()


METADATA = {
    "/latest/api/token": [(200, "secret")],
    "/latest/meta-data/instance-id": [(200, INSTANCE)],
    "/latest/meta-data/local-ipv4": [(200, "10.0.0.12")],
    "/latest/meta-data/instance-type": [(200, "inf2.8xlarge")],
}


def test_identity_by_imdsv2(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    url, answers, asked = server
    answers.update(METADATA)
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", url + "/")
    identity = read_identity()
    assert (identity.instance_id, identity.private_ip) == (INSTANCE, "10.0.0.12")
    assert asked[0][:2] == ("PUT", "/latest/api/token")
    assert {token for _, _, token in asked[1:]} == {"secret"}


def test_identity_from_a_service_that_is_late(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    url, answers, _ = server
    answers.update(METADATA | {"/latest/api/token": [(503, ""), (200, "secret")]})
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", url)
    assert read_identity(deadline_s=10).instance_type == "inf2.8xlarge"


def test_no_metadata_service_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", url)
        with pytest.raises(MetadataError, match=f"metadata service at {url} gave no identity within 0 s"):
            read_identity(deadline_s=0.1)


def test_atomic_write_sets_the_mode_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "folder/token"
    write_atomically(path, "one", mode=0o600)
    write_atomically(path, "two", mode=0o600)
    assert path.read_text() == "two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_log_lines_are_json_with_the_host_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURONFLEET_INSTANCE_ID", INSTANCE)
    monkeypatch.setenv("NEURONFLEET_UNIT", "neuronfleet-fetch.service")
    record = logging.makeLogRecord({"msg": "got %s", "args": ("it",), "levelname": "INFO", "done_mb": 7})
    line = json.loads(JsonFormatter().format(record))
    assert line["message"] == "got it" and line["done_mb"] == 7 and line["level"] == "info"
    assert (line["instance_id"], line["unit"]) == (INSTANCE, "neuronfleet-fetch.service")


# --- Ray's token and head


def unreachable() -> Any:
    raise AssertionError("a cell asks no AWS service for its token")


@pytest.fixture(autouse=True)
def _no_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service user does not exist on the machine that tests run on."""
    monkeypatch.setattr(ray_setup.os, "geteuid", lambda: 1000)


def test_a_cell_makes_its_token_once(tmp_path: Path) -> None:
    path = tmp_path / "ray-token"
    ray_setup.write_token(config(), unreachable, path)
    token = path.read_text()
    assert len(token) == 64 and stat.S_IMODE(path.stat().st_mode) == 0o600
    ray_setup.write_token(config(), unreachable, path)
    assert path.read_text() == token


def test_a_cluster_takes_its_token_from_the_secret(tmp_path: Path) -> None:
    path = tmp_path / "ray-token"
    path.write_text("an old one")
    aws = FakeAws(get_secret_value=[{"SecretString": "t" * 32 + "\n"}])
    ray_setup.write_token(config("worker"), lambda: aws, path)
    assert path.read_text() == "t" * 32
    assert aws.calls == [("get_secret_value", {"SecretId": "arn:token"})]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (client_error("AccessDeniedException"), "needs secretsmanager:GetSecretValue"),
        ({"SecretString": "short"}, "holds 5 characters"),
        ({}, "must be a string"),
    ],
)
def test_a_bad_secret_is_named_and_not_shown(answer: Any, expected: str, tmp_path: Path) -> None:
    with pytest.raises(ray_setup.RaySetupError, match=expected) as caught:
        ray_setup.write_token(
            config("worker"), lambda: FakeAws(get_secret_value=[answer]), tmp_path / "ray-token"
        )
    assert "arn:token" in str(caught.value)
    assert not (tmp_path / "ray-token").exists()


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Something that listens where the head's GCS would."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        monkeypatch.setattr(ray_setup, "GCS_PORT", port)
        monkeypatch.setattr(ray_setup, "_POLL_S", 0.01)
        yield port


def test_head_publishes_once_its_gcs_listens(gcs: int) -> None:
    ssm = FakeAws(put_parameter=[{}])
    ray_setup.publish_head(config("head"), "127.0.0.1", ssm)
    [(name, arguments)] = ssm.calls
    assert name == "put_parameter"
    assert (arguments["Name"], arguments["Value"], arguments["Overwrite"]) == ("/nf/head", "127.0.0.1", True)


def test_head_without_gcs_publishes_nothing(gcs: int) -> None:
    ssm = FakeAws(put_parameter=[{}])
    with pytest.raises(ray_setup.RaySetupError, match="GCS does not listen"):
        ray_setup.publish_head(config("head"), "127.0.0.9", ssm, deadline_s=0.05)
    assert ssm.calls == []


def test_worker_waits_for_the_parameter_and_for_a_head_that_answers(gcs: int, tmp_path: Path) -> None:
    found = {"Parameter": {"Value": "127.0.0.1"}}
    answers = [
        client_error("ParameterNotFound"),
        {"Parameter": {"Value": "not-yet"}},
        {"Parameter": {"Value": "127.0.0.9"}},
        found,
    ]
    ssm = FakeAws(get_parameter=answers)
    path = tmp_path / "head.env"
    assert ray_setup.await_head(config("worker"), ssm, path, deadline_s=20) == "127.0.0.1"
    assert path.read_text() == "HEAD_ADDRESS=127.0.0.1:6379\n"
    assert len(ssm.calls) == 4


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (client_error("ParameterNotFound"), "no head after 0 s: parameter /nf/head"),
        (client_error("AccessDeniedException"), "/nf/head is refused to this host's role"),
        ({"Parameter": {"Value": "127.0.0.9"}}, "127.0.0.9:\\d+ does not answer: does the security group"),
    ],
)
def test_worker_without_head_says_how_far_it_came(
    answer: Any, expected: str, gcs: int, tmp_path: Path
) -> None:
    with pytest.raises(ray_setup.RaySetupError, match=expected):
        ray_setup.await_head(
            config("worker"), FakeAws(get_parameter=[answer]), tmp_path / "head.env", deadline_s=0.05
        )
    assert not (tmp_path / "head.env").exists()


# --- readiness


def test_ready_waits_for_a_token_and_then_for_the_load_balancer(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, answers, asked = server
    answers["/readyz"] = [(503, "loading"), (200, "")]
    port = int(url.rsplit(":", 1)[1])
    states = [
        {"TargetHealthDescriptions": []},
        {
            "TargetHealthDescriptions": [
                {"Target": {"Id": "i-other"}, "TargetHealth": {"State": "healthy"}},
                {"Target": {"Id": INSTANCE}, "TargetHealth": {"State": "initial", "Reason": "Elb.Initial"}},
            ]
        },
        {"TargetHealthDescriptions": [{"Target": {"Id": INSTANCE}, "TargetHealth": {"State": "healthy"}}]},
    ]
    elbv2 = FakeAws(describe_target_health=states)
    monkeypatch.setattr(ready.time, "sleep", lambda _: None)
    node = config(serve={"keep_alive_s": 400, "http_port": port}, target_group_arn="arn:tg")
    ready.wait_until_ready(node, INSTANCE, elbv2)
    assert [path for _, path, _ in asked] == ["/readyz", "/readyz"]
    assert len(elbv2.calls) == 3


def test_not_ready_says_what_was_seen_last(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    url, answers, _ = server
    answers["/readyz"] = [(503, "engine is loading")]
    node = config(serve={"keep_alive_s": 400, "http_port": int(url.rsplit(":", 1)[1])})
    monkeypatch.setattr(ready.time, "sleep", lambda _: None)
    with pytest.raises(ready.NotReadyError, match=r"no a? ?token .*: .*/readyz: 503 engine is loading"):
        ready.wait_until_ready(node, INSTANCE, FakeAws(), deadline_s=0.05)


def test_head_is_ready_when_serve_has_a_controller(
    server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url, answers, _ = server
    answers["/api/serve/applications/"] = [
        (503, ""),
        (200, '{"controller_info": {"actor_id": null}}'),
        (200, '{"controller_info": {"actor_id": "abc"}}'),
    ]
    monkeypatch.setattr(ready, "DASHBOARD_PORT", int(url.rsplit(":", 1)[1]))
    token = tmp_path / "token"
    token.write_text("t")
    with httpx.Client() as client:
        probe = ready.controller_probe(client, token)
        first, second, third = probe(), probe(), probe()
    assert first is not None and "503" in first
    assert second == "Ray runs, Serve's controller does not yet"
    assert third is None


# --- reports


def test_signal_goes_to_the_group_of_the_stack() -> None:
    aws = FakeAws(signal_resource=[{}])
    assert report.signal_stack(aws, config(), INSTANCE, "SUCCESS")
    assert aws.calls == [
        (
            "signal_resource",
            {
                "StackName": "neuronfleet-dev",
                "LogicalResourceId": "Fleet",
                "UniqueId": INSTANCE,
                "Status": "SUCCESS",
            },
        )
    ]


def test_a_stack_that_waits_for_nothing_is_no_fault() -> None:
    aws = FakeAws(signal_resource=[client_error("ValidationError")])
    assert not report.signal_stack(aws, config(), INSTANCE, "SUCCESS")


def test_a_refused_signal_is_a_fault() -> None:
    with pytest.raises(ClientError):
        report.signal_stack(
            FakeAws(signal_resource=[client_error("AccessDenied")]), config(), INSTANCE, "SUCCESS"
        )


def test_failure_goes_out_on_every_channel_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = tmp_path / "console"
    monkeypatch.setattr(report, "CONSOLE", console)
    monkeypatch.setattr(report, "write_console", lambda line: console.write_text(line))
    cloudformation = FakeAws(signal_resource=[client_error("Throttling")])
    autoscaling = FakeAws(set_instance_health=[{}])
    undelivered = report.report_failure(
        config(),
        INSTANCE,
        "neuronfleet-fetch.service",
        "wanted\n  sha256 a, found b",
        cloudformation=cloudformation,
        autoscaling=autoscaling,
    )
    assert len(undelivered) == 1 and "FAILURE signal" in undelivered[0]
    assert autoscaling.calls[0][1]["HealthStatus"] == "Unhealthy"
    expected = f"neuronfleet-failed: {INSTANCE} neuronfleet-fetch.service: wanted sha256 a, found b"
    assert console.read_text() == expected


def journal(monkeypatch: pytest.MonkeyPatch, entries: list[dict[str, Any]]) -> None:
    text = "\n".join(json.dumps(entry) for entry in entries)
    monkeypatch.setattr(
        report.subprocess, "run", lambda *_, **__: type("Done", (), {"stdout": text, "returncode": 0})
    )


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (
            [{"SYSLOG_IDENTIFIER": "neuronfleet-node", "MESSAGE": '{"message": "fetch failed: x"}'}],
            "fetch failed: x",
        ),
        (
            [{"SYSLOG_IDENTIFIER": "n", "MESSAGE": '{"message": "boom", "error": "ValueError: y"}'}],
            "boom: ValueError: y",
        ),
        (
            [
                {"SYSLOG_IDENTIFIER": "numactl", "MESSAGE": "libnuma: no such node"},
                {"SYSLOG_IDENTIFIER": "systemd", "MESSAGE": "Main process exited"},
            ],
            "libnuma: no such node",
        ),
        ([{"SYSLOG_IDENTIFIER": "systemd", "MESSAGE": "Start request repeated"}], "Start request repeated"),
        ([{"SYSLOG_IDENTIFIER": "x", "MESSAGE": [104, 105, 255]}], "hi\ufffd"),
        ([], "it said nothing"),
    ],
)
def test_the_last_thing_that_a_unit_said(
    entries: list[dict[str, Any]], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal(monkeypatch, entries)
    assert report.last_message("x.service") == expected


@pytest.mark.parametrize(
    ("shown", "reported"),
    [
        ("ActiveState=failed\nResult=exit-code\nExecMainStatus=1\n", True),
        ("ActiveState=failed\nResult=signal\nExecMainStatus=9\n", True),
        ("ActiveState=failed\nResult=timeout\nExecMainStatus=15\n", True),
        ("ActiveState=failed\nResult=signal\nExecMainStatus=15\n", False),
        ("ActiveState=inactive\nResult=success\nExecMainStatus=0\n", False),
    ],
)
def test_what_a_failure_handler_reports(shown: str, reported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report.subprocess, "run", lambda *_, **__: type("Done", (), {"stdout": shown}))
    assert (report.not_to_report("x.service") is None) == reported


def test_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None
