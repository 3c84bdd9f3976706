"""The artifact store: what a folder's manifest is, and that a publish is whole or not there."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto import mock_aws
from moto.core.botocore_stubber import BotocoreStubber

from app.compile.folder import ArtifactError, build_manifest, folder_faults, model_digest
from app.compile.manifest import Manifest, blob_key, manifest_key
from app.compile.store import ArtifactStore, StoreError

BUCKET = "artifacts"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with mock_aws():
        client = boto3.client("s3", region_name="us-east-1")
        client.create_bucket(Bucket=BUCKET)
        yield client


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"w" * 70_000)
    (folder / "sub/copy.bin").write_bytes(b"w" * 70_000)
    (folder / "empty.txt").write_bytes(b"")
    (folder / ".hidden").write_text("no")
    return folder


def make(folder: Path, **changes: Any) -> Manifest:
    options: dict[str, Any] = {
        "model": "m",
        "profile": "cpu",
        "tp_degree": 2,
        "batch_size": 4,
        "max_model_len": 512,
    }
    return build_manifest(folder, **(options | changes))


def keys(s3: Any) -> set[str]:
    return {item["Key"] for item in s3.list_objects_v2(Bucket=BUCKET).get("Contents", [])}


def test_manifest_names_every_file_but_hidden_ones(folder: Path) -> None:
    manifest = make(folder)
    assert [file.path for file in manifest.files] == [
        "config.json",
        "empty.txt",
        "model.safetensors",
        "sub/copy.bin",
    ]
    assert manifest.versions["vllm"] == "0.32.0"
    assert make(folder).digest() == manifest.digest()


def test_compiled_files_change_the_artifact_but_not_the_model(folder: Path) -> None:
    before = make(folder)
    compiled = folder / "neuron-compiled-artifacts"
    compiled.mkdir()
    (compiled / "model.neff").write_bytes(b"neff")
    after = make(folder)
    assert after.digest() != before.digest()
    assert after.model_digest == before.model_digest == model_digest(list(before.files))


def test_a_model_that_is_not_whole_is_refused_with_every_fault(folder: Path) -> None:
    (folder / "config.json").unlink()
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ArtifactError) as caught:
        make(folder)
    assert "no config.json" in str(caught.value)
    assert "names model-1.safetensors, model-2.safetensors, which" in str(caught.value)


def test_a_link_that_leads_nowhere_is_named(folder: Path) -> None:
    (folder / "shard.safetensors").symlink_to("../blobs/gone")
    with pytest.raises(ArtifactError, match=r"shard\.safetensors lead nowhere"):
        make(folder)


def test_publish_then_read_back(s3: Any, folder: Path) -> None:
    manifest = make(folder)
    advanced: list[int] = []
    done = ArtifactStore(s3, BUCKET).publish(folder, manifest, advanced.append)
    assert (done.digest, done.sent_files, done.held_files) == (manifest.digest(), 3, 0)
    assert sum(advanced) == done.sent_bytes == 70_002
    assert keys(s3) == {blob_key(file.sha256) for file in manifest.files} | {manifest_key(done.digest)}
    store = ArtifactStore(s3, BUCKET)
    assert store.read_manifest(done.digest) == manifest
    assert [item.digest for item in store.artifacts()] == [done.digest]
    assert store.resolve(done.digest[:6]) == done.digest


def test_publish_again_sends_nothing_and_overwrites_nothing(s3: Any, folder: Path) -> None:
    store, manifest = ArtifactStore(s3, BUCKET), make(folder)
    store.publish(folder, manifest)
    before = {key: s3.head_object(Bucket=BUCKET, Key=key)["LastModified"] for key in keys(s3)}
    again = store.publish(folder, manifest)
    assert (again.sent_files, again.sent_bytes, again.held_files) == (0, 0, 3)
    assert before == {key: s3.head_object(Bucket=BUCKET, Key=key)["LastModified"] for key in keys(s3)}


def test_a_blob_cut_short_by_an_earlier_publisher_is_sent_again(s3: Any, folder: Path) -> None:
    manifest = make(folder)
    weights = next(file for file in manifest.files if file.path == "model.safetensors")
    s3.put_object(Bucket=BUCKET, Key=blob_key(weights.sha256), Body=b"w" * 10)
    ArtifactStore(s3, BUCKET).publish(folder, manifest)
    assert s3.head_object(Bucket=BUCKET, Key=blob_key(weights.sha256))["ContentLength"] == 70_000


def test_the_manifest_comes_last(s3: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise s3.exceptions.ClientError({"Error": {"Code": "SlowDown", "Message": "slow"}}, "PutObject")

    monkeypatch.setattr(s3, "upload_file", broken)
    with pytest.raises(StoreError, match="SlowDown"):
        ArtifactStore(s3, BUCKET).publish(folder, make(folder))
    assert not any(key.startswith("manifests/") for key in keys(s3))


def test_a_file_that_changes_while_it_is_published_is_refused(
    s3: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = s3.upload_file

    def meddling(path: str, *arguments: Any, **options: Any) -> None:
        upload(path, *arguments, **options)
        if path.endswith("config.json"):
            Path(path).write_text("{ }")

    monkeypatch.setattr(s3, "upload_file", meddling)
    with pytest.raises(ArtifactError, match=r"config\.json changed"):
        ArtifactStore(s3, BUCKET).publish(folder, make(folder))
    assert not any(key.startswith("manifests/") for key in keys(s3))


def test_two_publishers_at_once(s3: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their requests interleave; each is answered by itself, since moto closes an object's file when another
    request overwrites it, where S3 does not."""
    one_at_a_time, answer = threading.Lock(), BotocoreStubber.__call__

    def locked(stubber: BotocoreStubber, *arguments: Any, **named: Any) -> Any:
        with one_at_a_time:
            return answer(stubber, *arguments, **named)

    monkeypatch.setattr(BotocoreStubber, "__call__", locked)
    manifest = make(folder)
    digests: list[str] = []

    def publish() -> None:
        digests.append(ArtifactStore(s3, BUCKET).publish(folder, manifest).digest)

    threads = [threading.Thread(target=publish) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert digests == [manifest.digest()] * 2
    assert ArtifactStore(s3, BUCKET).read_manifest(manifest.digest()) == manifest


def test_no_bucket_says_where_its_name_is(s3: Any, folder: Path) -> None:
    with pytest.raises(StoreError, match="ArtifactBucketName"):
        ArtifactStore(s3, "missing").publish(folder, make(folder))


def test_a_damaged_manifest_is_refused(s3: Any, folder: Path) -> None:
    store, manifest = ArtifactStore(s3, BUCKET), make(folder)
    digest = store.publish(folder, manifest).digest
    s3.put_object(Bucket=BUCKET, Key=manifest_key(digest), Body=manifest.canonical_bytes() + b" ")
    with pytest.raises(StoreError, match=f"wanted sha256 {digest}, found"):
        store.read_manifest(digest)


def test_verifying_a_folder_names_every_fault(folder: Path) -> None:
    manifest = make(folder)
    assert folder_faults(folder, manifest) == []
    (folder / "empty.txt").unlink()
    (folder / "config.json").write_text("[]")
    (folder / "model.safetensors").write_bytes(b"w" * 69_999)
    (folder / "extra.bin").write_bytes(b"x")
    faults = folder_faults(folder, manifest)
    assert len(faults) == 4
    assert faults[0].startswith("config.json: wanted sha256")
    assert faults[1:] == [
        "empty.txt is missing",
        "model.safetensors: wanted 70,000 bytes, found 69,999",
        "extra.bin is not in the manifest",
    ]
