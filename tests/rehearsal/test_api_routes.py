"""Requests as hosts make them: by the services' own names, signed by role credentials, through a TLS door."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from tests.rehearsal.api_world import Cloud, fleet_template, running_cloud, wait_for


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    with running_cloud(tmp_path) as made:
        yield made


def call(cloud: Cloud, host: str, path: str, service: str, *more: str) -> str:
    """curl with ``--aws-sigv4`` and another Host, as HAProxy passes a host's request on."""
    server = cloud.daemon.server
    command = [
        "curl",
        "-sS",
        "--fail-with-body",
        "--aws-sigv4",
        f"aws:amz:us-east-1:{service}",
        "--user",
        "ASIAX:y",
    ]
    command += ["--connect-to", f"{host}:80:127.0.0.1:{server.port}", *more, f"http://{host}{path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_s3_by_virtual_host_and_by_path(cloud: Cloud) -> None:
    body = b"artifact" * 1000
    s3 = cloud.client("s3")
    s3.create_bucket(Bucket="bundle-bucket")
    s3.put_object(Bucket="bundle-bucket", Key="a/bundle.zip", Body=body)
    empty = "x-amz-content-sha256: " + hashlib.sha256(b"").hexdigest()
    by_host = call(cloud, "bundle-bucket.s3.us-east-1.amazonaws.com", "/a/bundle.zip", "s3", "-H", empty)
    by_path = call(cloud, "s3.us-east-1.amazonaws.com", "/bundle-bucket/a/bundle.zip", "s3", "-H", empty)
    assert by_host.encode() == by_path.encode() == body


def test_an_s3_range(cloud: Cloud) -> None:
    s3 = cloud.client("s3")
    s3.create_bucket(Bucket="ranges")
    s3.put_object(Bucket="ranges", Key="k", Body=b"0123456789")
    answer = s3.get_object(Bucket="ranges", Key="k", Range="bytes=3-5")
    assert (answer["Body"].read(), answer["ContentRange"]) == (b"345", "bytes 3-5/10")
    assert s3.get_object(Bucket="ranges", Key="k", Range="bytes=-4")["Body"].read() == b"6789"
    assert s3.get_object(Bucket="ranges", Key="k", Range="bytes=8-99")["Body"].read() == b"89"
    assert s3.get_object(Bucket="ranges", Key="k", Range="bytes=0-1,4-5")["Body"].read() == b"0123456789"
    with pytest.raises(ClientError, match="InvalidRange"):
        s3.get_object(Bucket="ranges", Key="k", Range="bytes=10-12")


def test_a_policy_that_wants_tls_does_not_deny_everything(cloud: Cloud) -> None:
    template = {
        "Resources": {
            "Store": {"Type": "AWS::S3::Bucket", "Properties": {"BucketName": "tls-only"}},
            "Policy": {
                "Type": "AWS::S3::BucketPolicy",
                "Properties": {
                    "Bucket": {"Ref": "Store"},
                    "PolicyDocument": {
                        "Version": "2012-10-17",
                        "Statement": [
                            {
                                "Effect": "Deny",
                                "Principal": "*",
                                "Action": "s3:*",
                                "Resource": "arn:aws:s3:::tls-only/*",
                                "Condition": {"Bool": {"aws:SecureTransport": "false"}},
                            }
                        ],
                    },
                },
            },
        }
    }
    cloud.create("store", template)
    assert cloud.settled("store") == "CREATE_COMPLETE"
    s3 = cloud.client("s3")
    s3.put_object(Bucket="tls-only", Key="k", Body=b"x")
    assert "aws:SecureTransport" in s3.get_bucket_policy(Bucket="tls-only")["Policy"]


def test_the_error_traps_own_call_signals_a_failure(cloud: Cloud) -> None:
    cloud.create("fleet", fleet_template())
    wait_for(lambda: len(cloud.machines.started) == 1, 20, "a machine")
    host = cloud.machines.started[0].instance_id
    form = ["Action=SignalResource", "Version=2010-05-15", "Status=FAILURE", "LogicalResourceId=Group"]
    form += [f"UniqueId={host}", "StackName=fleet"]
    call(
        cloud,
        "cloudformation.us-east-1.amazonaws.com",
        "/",
        "cloudformation",
        *(word for field in form for word in ("-d", field)),
    )
    assert cloud.settled("fleet") == "ROLLBACK_COMPLETE"


def test_instance_health_by_its_services_name(cloud: Cloud) -> None:
    cloud.signals_on_boot("fleet", "Group")
    cloud.create("fleet", fleet_template(grace=600))
    cloud.settled("fleet")
    group = cloud.resource("fleet", "Group")
    wait_for(lambda: len(cloud.in_service(group)) == 1, 10, "a host in service")
    (host,) = cloud.in_service(group)
    form = ["Action=SetInstanceHealth", "Version=2011-01-01", "HealthStatus=Unhealthy"]
    form += ["ShouldRespectGracePeriod=false", f"InstanceId={host}"]
    call(
        cloud,
        "autoscaling.us-east-1.amazonaws.com",
        "/",
        "autoscaling",
        *(word for field in form for word in ("-d", field)),
    )
    wait_for(lambda: cloud.in_service(group) not in ([], [host]), 10, "another host")


def test_role_credentials_are_accepted_and_name_their_role(cloud: Cloud) -> None:
    cloud.signals_on_boot("fleet", "Group")
    cloud.create("fleet", fleet_template())
    cloud.settled("fleet")
    spec = cloud.machines.started[0]
    found = cloud.daemon.directory(spec.private_ip)
    assert found is not None and found.credentials is not None
    keys = found.credentials()
    answer = call(
        cloud,
        "sts.us-east-1.amazonaws.com",
        "/",
        "sts",
        *("-d", "Action=GetCallerIdentity", "-d", "Version=2011-06-15"),
        *("--user", f"{keys.access_key_id}:{keys.secret_access_key}"),
        *("-H", f"x-amz-security-token: {keys.token}"),
    )
    assert re.search(rf"assumed-role/{re.escape(str(found.role))}/{spec.instance_id}</Arn>", answer)


def test_every_dlami_parameter_names_an_image_that_exists(cloud: Cloud) -> None:
    found = cloud.client("ssm").get_parameters_by_path(Path="/aws/service/neuron/dlami", Recursive=True)
    values = {p["Value"] for p in found["Parameters"]}
    assert len(values) == 1
    assert cloud.client("ec2").describe_images(ImageIds=sorted(values))["Images"][0]["State"] == "available"
