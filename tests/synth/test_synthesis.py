"""Synthesis itself: offline, the same bytes twice, and refused when a check finds something."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import aws_cdk as cdk
import pytest
from aws_cdk import aws_s3 as s3

from infra import app as app_module
from infra.app import build
from infra.bundle import ROOT, BundleMissingError, find_bundle
from infra.settings import environment_names
from infra.userdata import TEMPLATE, render
from tests.synth.conftest import Synth, cdk_flags, synthesize, tiny_bundle


@pytest.mark.parametrize("environment", environment_names())
def test_twice_the_same_bytes(synth: Synth, environment: str, bundle: Path, tmp_path: Path) -> None:
    again = synthesize(tmp_path / "again", environment, bundle).files()
    assert synth(environment).files() == again


def test_nothing_is_looked_up(synth: Synth) -> None:
    for environment in environment_names():
        manifest = json.loads((synth(environment).folder / "manifest.json").read_text())
        assert not manifest.get("missing")
        for artifact in manifest["artifacts"].values():
            if artifact["type"] == "aws:cloudformation:stack":
                assert artifact["environment"] == "aws://unknown-account/unknown-region"


def test_a_changed_bundle_changes_the_launch_template_only(synth: Synth, tmp_path: Path) -> None:
    before = synth("dev").fleet["Resources"]
    changed = tiny_bundle(tmp_path / "bundle", "echo another\n")
    after = synthesize(tmp_path / "out", "dev", changed).fleet["Resources"]
    kinds = {before[name]["Type"] for name in before if before[name] != after[name]}
    assert "AWS::EC2::LaunchTemplate" in kinds
    # The bundle's own object is what role and endpoint allow to read.
    assert kinds <= {"AWS::EC2::LaunchTemplate", "AWS::IAM::Role", "AWS::EC2::VPCEndpoint"}


def test_a_missing_bundle_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(BundleMissingError, match="give an existing file with -c bundle=PATH"):
        find_bundle("cpu", tmp_path / "none.zip")


def test_a_missing_bundle_of_a_profile_names_make_setup(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("infra.bundle.ROOT", tmp_path)
    with pytest.raises(BundleMissingError, match=r"cpu at .*dist/bundle-cpu\.zip: run `make setup`"):
        find_bundle("cpu")


def test_mistakes_reach_the_person_and_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cdk, "App", lambda: _app({"env": "dev", "instance_type": "inf2.metal"}))
    assert app_module.main() == 1
    assert "-c instance_type = 'inf2.metal'" in capsys.readouterr().err


def _app(context: dict[str, str]) -> cdk.App:
    return _REAL_APP(context=context)


_REAL_APP = cdk.App


def test_a_finding_of_cdk_nag_fails_synthesis(bundle: Path, tmp_path: Path) -> None:
    app = cdk.App(outdir=str(tmp_path / "out"), context={**cdk_flags(), "env": "dev", "bundle": str(bundle)})
    build(app)
    s3.CfnBucket(cdk.Stack(app, "extra"), "Open")
    with pytest.raises(RuntimeError, match=r"(?i)validation"):
        app.synth()


def test_the_stock_cli_synthesizes_offline_and_fails_on_a_mistake(bundle: Path, tmp_path: Path) -> None:
    cli = ROOT / "node_modules/.bin/cdk"
    if not cli.exists():
        pytest.skip(f"no CDK command line at {cli}: `make setup` installs it")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")} | {
        "PATH": f"{ROOT / '.venv/bin'}:{os.environ['PATH']}",
        "AWS_EC2_METADATA_DISABLED": "true",
        "CDK_DISABLE_CLI_TELEMETRY": "true",
        # No proxy answers here: whatever wants the network fails.
        "HTTPS_PROXY": "http://127.0.0.1:9",
        "HTTP_PROXY": "http://127.0.0.1:9",
    }

    def run(*context: str, app: str = "") -> subprocess.CompletedProcess[str]:
        options = [part for item in context for part in ("-c", item)] + (["--app", app] if app else [])
        return subprocess.run(
            [str(cli), "synth", "--quiet", "--output", str(tmp_path / "out"), *options],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    good = run("env=dev", f"bundle={bundle}")
    assert good.returncode == 0, good.stderr
    assert (tmp_path / "out/neuronfleet-dev.template.json").exists()
    bad = run("env=dev", f"bundle={bundle}", "desired_capacity=none")
    assert bad.returncode == 1
    assert "-c desired_capacity = 'none'" in bad.stderr

    # The environment's app with one bucket more, about which cdk-nag has something to say.
    script = tmp_path / "with_an_open_bucket.py"
    script.write_text(
        "import infra, aws_cdk as cdk\n"
        "from aws_cdk import aws_s3 as s3\n"
        "from infra.app import build\n"
        "app = cdk.App()\n"
        "build(app)\n"
        "s3.CfnBucket(cdk.Stack(app, 'extra'), 'Open')\n"
        "app.synth()\n"
    )
    environment["PYTHONPATH"] = str(ROOT)
    found = run("env=dev", f"bundle={bundle}", app=f"{ROOT / '.venv/bin/python'} {script}")
    assert found.returncode == 1
    assert "AwsSolutions-S1" in found.stdout + found.stderr


def test_cdk_json_has_the_recommended_flags() -> None:
    path = ROOT / "node_modules/aws-cdk/lib/init-templates/.recommended-feature-flags.json"
    if not path.exists():
        pytest.skip(f"no CDK command line at {path}: `make setup` installs it")
    assert cdk_flags() == json.loads(path.read_text())


def test_placeholders_and_values_of_user_data_must_match() -> None:
    with pytest.raises(ValueError, match="BUNDLE_KEY"):
        render({"REGION": "x"})


def test_user_data_passes_shellcheck() -> None:
    tool = shutil.which("shellcheck") or ROOT / ".venv/bin/shellcheck"
    done = subprocess.run([str(tool), str(TEMPLATE)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
