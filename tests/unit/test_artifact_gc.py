"""``artifacts gc``, ``diff`` and ``pull`` against moto's S3 and CloudFormation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import pytest
import typer
from moto import mock_aws
from typer.testing import CliRunner

from app.compile import commands
from app.compile.collect import collect, in_use, plan_collection
from app.compile.folder import build_manifest
from app.compile.manifest import Manifest, blob_key, manifest_key
from app.compile.store import ArtifactStore, StoreError
from app.node.local import is_whole

BUCKET = "artifacts"
LATER = datetime.now(UTC) + timedelta(days=8)
WEEK = timedelta(days=7)
TEMPLATE = {
    "Parameters": {"ArtifactDigest": {"Type": "String"}},
    "Resources": {"Topic": {"Type": "AWS::SNS::Topic"}},
}


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("NEURONFLEET_REHEARSAL_HOME", str(tmp_path / "no-rehearsal"))
    with mock_aws():
        client = boto3.client("s3")
        client.create_bucket(Bucket=BUCKET)
        yield client


def publish(s3: Any, root: Path, name: str, **changes: Any) -> Manifest:
    """An artifact with one file of its own and one that all share."""
    folder = root / f"model-{name}"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / f"{name}.safetensors").write_bytes(name.encode() * 1000)
    options: dict[str, Any] = {
        "model": "m",
        "profile": "cpu",
        "tp_degree": 2,
        "batch_size": 4,
        "max_model_len": 512,
    }
    manifest = build_manifest(folder, **(options | changes))
    ArtifactStore(s3, BUCKET).publish(folder, manifest)
    (folder / "manifest.json").write_bytes(manifest.canonical_bytes())
    return manifest


def deploy(digest: str, name: str = "neuronfleet-dev") -> None:
    boto3.client("cloudformation").create_stack(
        StackName=name,
        TemplateBody=json.dumps(TEMPLATE),
        Parameters=[{"ParameterKey": "ArtifactDigest", "ParameterValue": digest}],
    )


def keys(s3: Any) -> set[str]:
    return {item["Key"] for item in s3.list_objects_v2(Bucket=BUCKET).get("Contents", [])}


def keys_of(*manifests: Manifest) -> set[str]:
    return {manifest_key(item.digest()) for item in manifests} | {
        blob_key(file.sha256) for item in manifests for file in item.files
    }


def test_what_an_environment_points_at_is_never_removed(s3: Any, tmp_path: Path) -> None:
    used, told, gone = (publish(s3, tmp_path, name) for name in "abc")
    deploy(used.digest())
    store = ArtifactStore(s3, BUCKET)
    plan = plan_collection(store, in_use(boto3.client("cloudformation")), [told.digest()[:10]], WEEK, LATER)
    assert plan.kept == {used.digest(): "stack neuronfleet-dev", told.digest(): "told to keep"}
    assert [item.digest for item in plan.artifacts] == [gone.digest()]
    assert [blob.size for blob in plan.blobs] == [1000], "not the file that all share"
    assert keys(s3) == keys_of(used, told, gone), "a plan removes nothing"
    assert collect(store, plan) == 1000
    assert keys(s3) == keys_of(used, told)


def test_files_of_no_artifact_go_when_they_are_old(s3: Any, tmp_path: Path) -> None:
    s3.put_object(Bucket=BUCKET, Key=blob_key("f" * 64), Body=b"of a publish that broke off")
    store = ArtifactStore(s3, BUCKET)
    assert plan_collection(store, {}, [], WEEK, datetime.now(UTC)).blobs == ()
    assert [blob.sha256 for blob in plan_collection(store, {}, [], WEEK, LATER).blobs] == ["f" * 64]


def test_an_artifact_published_after_the_plan_keeps_its_files(s3: Any, tmp_path: Path) -> None:
    first = publish(s3, tmp_path, "a")
    store = ArtifactStore(s3, BUCKET)
    plan = plan_collection(store, {}, [], WEEK, LATER)
    assert [item.digest for item in plan.artifacts] == [first.digest()]
    second = publish(s3, tmp_path, "b")
    collect(store, plan)
    assert keys(s3) == keys_of(second)


def test_a_publish_sends_again_what_a_collection_took_meanwhile(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(s3, tmp_path, "a")
    put = ArtifactStore._put_manifest

    def taken(store: ArtifactStore, manifest: Manifest) -> None:
        s3.delete_object(Bucket=BUCKET, Key=blob_key(manifest.files[1].sha256))
        put(store, manifest)

    monkeypatch.setattr(ArtifactStore, "_put_manifest", taken)
    second = publish(s3, tmp_path, "b")
    assert second.files[1].path == "config.json", "which the first artifact had"
    assert keys_of(second) <= keys(s3)


@pytest.mark.parametrize("status", ["UPDATE_IN_PROGRESS", "UPDATE_ROLLBACK_FAILED"])
def test_while_a_stack_changes_nothing_is_removed(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    class Changing:
        def get_paginator(self, name: str) -> Changing:
            return self

        def paginate(self) -> list[dict[str, Any]]:
            parameters = [{"ParameterKey": "ArtifactDigest", "ParameterValue": "a" * 64}]
            return [{"Stacks": [{"StackName": "s", "StackStatus": status, "Parameters": parameters}]}]

    with pytest.raises(StoreError, match=f"nothing is removed: s is {status}"):
        in_use(Changing())


def test_what_cannot_be_kept_stops_the_collection(s3: Any, tmp_path: Path) -> None:
    publish(s3, tmp_path, "a")
    with pytest.raises(StoreError, match="no artifact whose digest begins with 'beef'"):
        plan_collection(ArtifactStore(s3, BUCKET), {}, ["beef"], WEEK, LATER)


def run(*arguments: str | Path) -> tuple[int, str, str]:
    app = typer.Typer()
    commands.register(app)
    app.callback()(lambda: None)
    result = CliRunner().invoke(app, ["artifacts", *map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


def test_gc_shows_and_only_with_delete_removes(s3: Any, tmp_path: Path) -> None:
    used, gone = publish(s3, tmp_path, "a"), publish(s3, tmp_path, "b")
    deploy(used.digest())
    code, out, _ = run("gc", "--bucket", BUCKET, "--older-than-days", "0")
    assert code == 0 and gone.digest()[:12] in out and "kept: stack neuronfleet-dev" in out
    assert "--delete does it" in out and keys(s3) == keys_of(used, gone)
    (tmp_path / "keep").write_text(f"{gone.digest()}  # rolled back to on Fridays\n\n")
    code, out, _ = run(
        *("gc", "--bucket", BUCKET, "--older-than-days", "0"),
        *("--keep-file", tmp_path / "keep", "--delete", "--json"),
    )
    assert json.loads(out)["artifacts"] == [] and keys(s3) == keys_of(used, gone)
    code, out, _ = run("gc", "--bucket", BUCKET, "--delete", "--json")
    assert json.loads(out)["kept"][gone.digest()] == "published lately"
    code, out, _ = run("gc", "--bucket", BUCKET, "--older-than-days", "0", "--delete", "--json")
    assert (json.loads(out)["artifacts"], json.loads(out)["bytes"]) == ([gone.digest()], 1000)
    assert keys(s3) == keys_of(used)


def test_gc_with_a_keep_file_that_is_not_there_removes_nothing(s3: Any, tmp_path: Path) -> None:
    made = publish(s3, tmp_path, "a")
    arguments = ("gc", "--bucket", BUCKET, "--older-than-days", "0", "--delete")
    code, _, err = run(*arguments, "--keep-file", tmp_path / "none")
    assert code == 1 and "nothing is removed" in err and keys(s3) == keys_of(made)


def test_diff_of_two_artifacts(s3: Any, tmp_path: Path) -> None:
    first = publish(s3, tmp_path, "a")
    second = publish(s3, tmp_path, "b", batch_size=8, versions={"vllm": "0.31.0"})
    code, out, _ = run("diff", first.digest()[:8], second.digest()[:8], "--bucket", BUCKET, "--json")
    assert code == 0
    assert json.loads(out) == {
        "fields": {
            "batch_size": [4, 8],
            "model_digest": [first.model_digest, second.model_digest],
            "versions.torch": ["2.13.0+cpu", None],
            "versions.vllm": ["0.32.0", "0.31.0"],
        },
        "added": ["b.safetensors"],
        "removed": ["a.safetensors"],
        "changed": [],
        "shared_bytes": 2,
        "new_bytes": 1000,
    }
    code, out, _ = run("diff", tmp_path / "model-a", tmp_path / "model-b")
    assert code == 0 and "b.safetensors added" in out and "versions.vllm" in out
    code, _, err = run("diff", tmp_path / "model-a", "abc")
    assert code == 1 and "give its --bucket" in err


def test_pull(s3: Any, tmp_path: Path) -> None:
    made = publish(s3, tmp_path, "a")
    code, out, _ = run("pull", made.digest()[:9], "--bucket", BUCKET, "--into", tmp_path / "here", "--json")
    assert code == 0
    folder = Path(json.loads(out)["folder"])
    assert folder == tmp_path / "here" / made.digest() and is_whole(folder, made.digest())
    s3.delete_object(Bucket=BUCKET, Key=blob_key(made.files[0].sha256))
    code, _, err = run("pull", made.digest(), "--bucket", BUCKET, "--into", tmp_path / "there")
    assert code == 1 and "a.safetensors: s3://artifacts/blobs/sha256/" in err
