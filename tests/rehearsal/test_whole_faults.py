"""What goes wrong reaches the person who ran `make up`: one reason, exit code 1; `make down` cleans up."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from app.compile.manifest import blob_key
from infra.settings import load_settings
from rehearsal.artifact import prepare_artifact, publish_artifact
from rehearsal.deploy import Cdk
from rehearsal.home import REPOSITORY, Home, default_home, start_daemon
from rehearsal.image import ensure_image
from rehearsal.interfaces import RehearsalError
from tests.rehearsal.whole import (
    PYTHON,
    assert_nothing_left,
    consoles,
    needs_root,
    refuse_to_disturb,
    run_down,
    run_up,
)

pytestmark = [pytest.mark.rehearsal, needs_root, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    refuse_to_disturb()
    yield
    run_down()
    assert_nothing_left()


def _quiet(_: str) -> None:
    return None


def test_an_artifact_with_other_bytes_is_refused_and_the_reason_arrives() -> None:
    home = Home(default_home())
    settings = load_settings("dev", {"rehearsal": "true"})
    state = start_daemon(home, progress=_quiet)
    ensure_image(home.path, _quiet)
    artifact = prepare_artifact(settings, _quiet)
    cdk = Cdk(home, state, "dev")
    cdk.synth(_quiet, {})
    cdk.bootstrap(_quiet)
    cdk.deploy("neuronfleet-dev-store", _quiet)
    publish_artifact(artifact, "dev", state, _quiet)

    from app.operate.target import Target

    target = Target(region=state["region"], endpoint_url=state["api_endpoint"])
    stack = target.client("cloudformation").describe_stacks(StackName="neuronfleet-dev-store")["Stacks"][0]
    bucket = next(o["OutputValue"] for o in stack["Outputs"] if o["OutputKey"] == "ArtifactBucketName")
    victim = next(file for file in artifact.manifest.files if file.path == "config.json")
    s3 = target.client("s3")
    good = s3.get_object(Bucket=bucket, Key=blob_key(victim.sha256))["Body"].read()
    s3.put_object(Bucket=bucket, Key=blob_key(victim.sha256), Body=bytes([good[0] ^ 1]) + good[1:])

    with pytest.raises(RehearsalError) as failure:
        cdk.deploy("neuronfleet-dev", _quiet, {"ArtifactDigest": artifact.digest})
    message = str(failure.value)
    assert "config.json" in message, message + consoles()
    assert "sha256" in message and "neuronfleet-fetch" in message
    hosts = target.client("ec2").describe_instances()["Reservations"]
    states = {i["State"]["Name"] for reservation in hosts for i in reservation["Instances"]}
    assert states <= {"terminated", "shutting-down"}


def test_unknown_environment_and_wrong_settings_fail_before_anything_is_made() -> None:
    code, output, _ = run_up("nowhere", timeout_s=60)
    assert code == 1
    assert "blueprint, dev, prod" in output
    code, output, _ = run_up("dev", "-c", "instance_type=inf2.2xlarge", "-c", "batch_size=0", timeout_s=60)
    assert code == 1
    assert "inf2.2xlarge" in output and "batch_size" in output
    assert Home(default_home()).state() is None


@pytest.mark.parametrize("after_s", [1.5, 8.0, 30.0])
def test_interrupted_anywhere_make_down_leaves_nothing(after_s: float) -> None:
    process = subprocess.Popen(
        [PYTHON, "-m", "rehearsal.up", "--env", "dev"],
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    time.sleep(after_s)
    # What Ctrl-C does: the signal reaches every process of the terminal's group.
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) != 0
