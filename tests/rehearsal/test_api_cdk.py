"""The project's own ``cdk`` command line against the API: bootstrap, deploy, a failing host, destroy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rehearsal.api_world import Cloud, fleet_template, running_cloud

REPOSITORY = Path(__file__).resolve().parents[2]
CDK = REPOSITORY / "node_modules/.bin/cdk"
ACCOUNT, REGION = "123456789012", "us-east-1"

pytestmark = pytest.mark.skipif(
    not CDK.exists(), reason="node_modules/.bin/cdk is not installed: `make setup`"
)


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    with running_cloud(tmp_path / "home") as made:
        yield made


def assembly(folder: Path, template: dict[str, Any]) -> Path:
    """A cloud assembly of one stack ``fleet``, as ``cdk synth`` writes it."""
    folder.mkdir(exist_ok=True)
    (folder / "fleet.template.json").write_text(json.dumps(template))
    manifest = {
        "version": "36.0.0",
        "artifacts": {
            "fleet": {
                "type": "aws:cloudformation:stack",
                "environment": f"aws://{ACCOUNT}/{REGION}",
                "properties": {"templateFile": "fleet.template.json", "stackName": "fleet"},
                "displayName": "fleet",
            }
        },
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def cdk(cloud: Cloud, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "CDK_"))}
    environment = kept | {
        "PATH": f"{REPOSITORY / '.venv/bin'}:{os.environ['PATH']}",
        "AWS_ENDPOINT_URL": cloud.daemon.server.endpoint,
        "AWS_ACCESS_KEY_ID": "rehearsal",
        "AWS_SECRET_ACCESS_KEY": "rehearsal",
        "AWS_REGION": REGION,
        "HOME": str(folder.parent),
        "CDK_DISABLE_CLI_TELEMETRY": "true",
    }
    return subprocess.run(
        [str(CDK), "--ci", "--no-version-reporting", "--no-notices", *arguments, "--app", str(folder)],
        cwd=folder.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_bootstrap_deploy_fail_redeploy_update_destroy(cloud: Cloud, tmp_path: Path) -> None:
    assert shutil.which("node", path=f"{REPOSITORY / '.venv/bin'}:{os.environ['PATH']}")
    template = fleet_template()
    folder = assembly(tmp_path / "cdk.out", template)
    deploy = ("deploy", "fleet", "--require-approval", "never", "--progress", "events")

    done = cdk(cloud, folder, "bootstrap", f"aws://{ACCOUNT}/{REGION}")
    assert done.returncode == 0, done.stdout + done.stderr

    cloud.signals_on_boot("fleet", "Group", "FAILURE", "neuronfleet-failed: i-0 unit: artifact is not there")
    done = cdk(cloud, folder, *deploy)
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert "artifact is not there" in said
    assert cloud.status("fleet") == "ROLLBACK_COMPLETE"
    assert cloud.machines.states() == {}

    cloud.signals_on_boot("fleet", "Group")
    done = cdk(cloud, folder, *deploy)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert cloud.status("fleet") == "CREATE_COMPLETE"
    assert "fleet.Url = http://" in said

    done = cdk(cloud, folder, *deploy)
    assert done.returncode == 0 and "no changes" in done.stdout + done.stderr

    first = set(cloud.machines.states())
    assembly(folder, fleet_template(user_data="#!/bin/bash\necho other ${AWS::StackName}\n"))
    done = cdk(cloud, folder, *deploy)
    assert done.returncode == 0, done.stdout + done.stderr
    assert cloud.status("fleet") == "UPDATE_COMPLETE"
    assert not first & set(cloud.machines.states()) or len(cloud.machines.started) == 3

    done = cdk(cloud, folder, "destroy", "fleet", "--force")
    assert done.returncode == 0, done.stdout + done.stderr
    assert cloud.machines.states() == {}
