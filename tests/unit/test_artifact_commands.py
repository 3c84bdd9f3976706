"""``neuronfleet artifacts``: what people and programs see of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
import typer
from moto import mock_aws
from typer.testing import CliRunner

from app.compile import commands
from app.compile.folder import build_manifest

BUCKET = "artifacts"
OPTIONS = ["--model", "m", "--profile", "cpu", "--max-model-len", "512"]


@pytest.fixture(autouse=True)
def _aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("NEURONFLEET_REHEARSAL_HOME", str(tmp_path / "no-rehearsal"))
    with mock_aws():
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"w" * 1000)
    return folder


def run(*arguments: str | Path) -> tuple[int, str, str]:
    app = typer.Typer()
    commands.register(app)
    app.callback()(lambda: None)
    result = CliRunner().invoke(app, ["artifacts", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


def test_push_list_show(folder: Path) -> None:
    code, out, _ = run("push", folder, "--bucket", BUCKET, *OPTIONS, "--json")
    assert code == 0
    pushed = json.loads(out)
    assert (pushed["files"], pushed["bytes"], pushed["sent_files"]) == (2, 1002, 2)
    code, out, _ = run("list", "--bucket", BUCKET, "--json")
    assert [item["digest"] for item in json.loads(out)["artifacts"]] == [pushed["digest"]]
    code, out, _ = run("show", pushed["digest"][:8], "--bucket", BUCKET, "--json")
    assert [file["path"] for file in json.loads(out)["files"]] == ["config.json", "model.safetensors"]


def test_people_see_the_digest_to_deploy_with(folder: Path) -> None:
    code, out, _ = run("push", folder, "--bucket", BUCKET, *OPTIONS)
    assert code == 0 and "ArtifactDigest: " in out
    digest = out.split("ArtifactDigest: ")[1].split()[0]
    assert len(digest) == 64
    _, out, _ = run("push", folder, "--bucket", BUCKET, *OPTIONS)
    assert "0 files sent (0.0 MB), 2 were there" in " ".join(out.split())
    _, out, _ = run("list", "--bucket", BUCKET)
    assert digest[:12] in out


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "say what it is with --model and --profile"),
        (["--model", "m", "--profile", "nope"], "unknown engine profile 'nope'; expected one of"),
    ],
)
def test_push_refuses_what_it_cannot_name(folder: Path, options: list[str], expected: str) -> None:
    code, _, err = run("push", folder, "--bucket", BUCKET, *options)
    assert code == 1 and expected in err


def test_push_refuses_a_folder_that_is_not_its_manifest(folder: Path) -> None:
    manifest = build_manifest(folder, model="m", profile="cpu", tp_degree=2, batch_size=4, max_model_len=512)
    (folder / "manifest.json").write_bytes(manifest.canonical_bytes())
    assert run("verify", folder)[0] == 0
    code, out, _ = run("push", folder, "--bucket", BUCKET, "--json")
    assert code == 0 and json.loads(out)["digest"] == manifest.digest()
    (folder / "model.safetensors").write_bytes(b"v" * 1000)
    code, _, err = run("push", folder, "--bucket", BUCKET)
    assert code == 1 and "model.safetensors: wanted sha256" in err


def test_verify(folder: Path) -> None:
    code, out, _ = run("verify", folder, "--json")
    assert code == 1 and "has no manifest.json" in json.loads(out)["faults"][0]
    manifest = build_manifest(folder, model="m", profile="cpu", tp_degree=2, batch_size=4, max_model_len=512)
    (folder / "manifest.json").write_bytes(manifest.canonical_bytes())
    code, out, _ = run("verify", folder, "--json")
    assert code == 0
    assert json.loads(out) == {"verified": True, "digest": manifest.digest(), "faults": []}
    (folder / "extra").write_text("x")
    code, _, err = run("verify", folder)
    assert code == 1 and "extra is not in the manifest" in err


def test_an_unknown_bucket_and_digest_are_said(folder: Path) -> None:
    code, _, err = run("list", "--bucket", "missing")
    assert code == 1 and "there is no bucket missing" in err
    code, _, err = run("show", "abc", "--bucket", BUCKET)
    assert code == 1 and "no artifact whose digest begins with 'abc'" in err
