"""The compile step from check to a whole artifact, with the emulated compiler."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import boto3
import pytest
from moto import mock_aws
from typer.testing import CliRunner

import app.compile.compile as compile_step
from app.cli import _register, app
from app.compile.compile import CompileFailed, compile_model
from app.compile.compile_request import check
from app.compile.folder import folder_faults, model_digest, read_manifest
from app.compile.graphs import Graph, GraphStateError, look, read_log
from app.compile.manifest import ArtifactFile
from app.compile.store import ArtifactStore
from tests.unit.compile_model_folder import COMPILER_FOLDER, machine, model_folder, request


@pytest.fixture(autouse=True)
def small_graphs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NEURONX_CC_EMULATED_BYTES", "5000")
    monkeypatch.setenv("NEURONX_CC_EMULATED_CALLS", str(tmp_path / "calls"))


def calls(tmp_path: Path) -> list[str]:
    path = tmp_path / "calls"
    return path.read_text().split() if path.exists() else []


def test_an_artifact_is_whole_named_and_marked_as_emulated(tmp_path: Path) -> None:
    model_folder(tmp_path / "model")
    (tmp_path / "model/compiled").mkdir()
    (tmp_path / "model/compiled/old.neff").write_text("of an earlier compilation")
    told: list[tuple[str, int, int]] = []
    checked = check(request(tmp_path), machine())
    result = compile_model(checked, progress=lambda g, done, all_: told.append((g.status, done, all_)))
    assert [status for status, _, _ in told] == ["compiled"] * 4
    assert told[-1][1:] == (4, 4)
    manifest = read_manifest(tmp_path / "out")
    assert folder_faults(tmp_path / "out", manifest) == []
    assert manifest.digest() == result.manifest.digest()
    assert manifest.versions["neuronx-cc"] == "2.23.6484.0+EMULATED"
    assert (manifest.buckets, manifest.profile, manifest.model) == ((512, 2048), "emulated", "tiny")
    paths = {file.path for file in manifest.files}
    assert "compiled/context_encoding_model/_tp0_bk1.neff" in paths
    assert "compiled/old.neff" not in paths
    assert json.loads((tmp_path / "out/compiled/neuron_config.json").read_text())["emulated"] is True
    assert not (tmp_path / "work").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_files_header_says_that_it_is_emulated(tmp_path: Path) -> None:
    model_folder(tmp_path / "model")
    compile_model(check(request(tmp_path), machine()))
    content = (tmp_path / "out/compiled/token_generation_model/_tp0_bk0.neff").read_bytes()
    _, header, size = struct.unpack_from("<QQQ", content)
    assert header == 1024
    assert len(content) == header + size
    assert content[40:168].rstrip(b"\0") == b"EMULATED"
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(content[header:]))) as archive:
        assert archive.getmember("sg00/emulated.bin").size == 5000


def test_a_failed_graph_is_named_kept_and_tried_again_only_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_folder(tmp_path / "model")
    checked = check(request(tmp_path), machine())
    monkeypatch.setenv("NEURONX_CC_EMULATED_FAIL", "token_generation_model/_tp0_bk1")
    with pytest.raises(CompileFailed) as failed:
        compile_model(checked)
    assert "3 of 4 graphs are compiled" in str(failed.value)
    assert "token_generation_model/_tp0_bk1 (token bucket 2048)" in str(failed.value)
    assert "NCC_IXCG856" in str(failed.value)
    assert not (tmp_path / "out").exists()
    monkeypatch.delenv("NEURONX_CC_EMULATED_FAIL")
    with pytest.raises(CompileFailed, match="--retry-failed"):
        compile_model(checked)
    before = calls(tmp_path)
    compile_model(checked, retry_failed=True)
    assert calls(tmp_path)[len(before) :] == ["token_generation_model/_tp0_bk1"]
    assert folder_faults(tmp_path / "out", read_manifest(tmp_path / "out")) == []


def test_a_run_that_is_killed_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_folder(tmp_path / "model")
    monkeypatch.setenv("NEURONX_CC_EMULATED_SECONDS", "0.7")
    command = [sys.executable, "-m", "app.compile.compile_model", "--model", str(tmp_path / "model")]
    command += ["--profile", "emulated", "--tp-degree", "2", "--batch-size", "4", "--max-model-len", "2048"]
    command += [
        "--buckets",
        "512,1024,2048",
        "--out",
        str(tmp_path / "out"),
        "--work",
        str(tmp_path / "work"),
    ]
    command += ["--name", "tiny"]
    environment = {**os.environ, "PATH": f"{COMPILER_FOLDER}:{os.environ['PATH']}"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    limit = time.monotonic() + 30
    while not list(tmp_path.glob("work/nxd/*/*/graph.neff")) and time.monotonic() < limit:
        time.sleep(0.05)
    process.kill()
    process.wait()
    done = {
        str(path.parent.relative_to(tmp_path / "work/nxd"))
        for path in tmp_path.glob("work/nxd/*/*/graph.neff")
    }
    assert 0 < len(done) < 6
    assert not (tmp_path / "out").exists()
    monkeypatch.setenv("NEURONX_CC_EMULATED_SECONDS", "0")
    checked = check(request(tmp_path, context_buckets=(512, 1024, 2048)), machine())
    before = calls(tmp_path)
    # The killed run's worker ends by the kernel's signal, a moment later.
    while True:
        try:
            compile_model(checked)
            break
        except CompileFailed as error:
            assert "another run is compiling" in str(error)
            assert time.monotonic() < limit
            time.sleep(0.1)
    assert done.isdisjoint(calls(tmp_path)[len(before) :])
    assert folder_faults(tmp_path / "out", read_manifest(tmp_path / "out")) == []


def test_a_work_folder_of_another_compilation_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_folder(tmp_path / "model")
    monkeypatch.setenv("NEURONX_CC_EMULATED_FAIL", ".")
    with pytest.raises(CompileFailed):
        compile_model(check(request(tmp_path), machine()))
    with pytest.raises(GraphStateError, match="another model, compiler or set of options"):
        compile_model(check(request(tmp_path, batch_size=8), machine()))
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "thesis.doc").write_text("mine")
    with pytest.raises(GraphStateError, match=r"thesis\.doc"):
        compile_model(check(request(tmp_path, work=strange), machine()))
    assert (strange / "thesis.doc").exists()


def test_two_runs_in_one_work_folder_are_refused(tmp_path: Path) -> None:
    model_folder(tmp_path / "model")
    (tmp_path / "work").mkdir()
    with compile_step._locked(tmp_path / "work"), pytest.raises(CompileFailed, match="another run"):
        compile_model(check(request(tmp_path), machine()))


def test_libraries_that_fail_without_a_graph_show_their_last_line(tmp_path: Path) -> None:
    model_folder(tmp_path / "model")
    checked = check(request(tmp_path), machine())
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "neuronx-cc").write_text("#!/bin/sh\nexit 3\n")
    (broken / "neuronx-cc").chmod(0o755)
    with pytest.raises(CompileFailed, match="not reached: context_encoding_model") as failed:
        compile_model(replace(checked, compiler=str(broken / "neuronx-cc")))
    assert "EmulatedCompileError" in str(failed.value)
    assert (tmp_path / "work/compile.log").exists()


def test_logs_tell_the_verdict_and_the_error(tmp_path: Path) -> None:
    folder = tmp_path / "nxd/context_encoding_model/_tp0_bk0"
    folder.mkdir(parents=True)
    graph = Graph(name="context_encoding_model/_tp0_bk0", kind="context", bucket=512)
    assert look(tmp_path, graph).status == "pending"
    log = folder / "log-neuron-cc.txt"
    log.write_text("2026 starting\n")
    assert read_log(log) == (None, None)
    assert look(tmp_path, graph).status == "pending"
    log.write_text("ERROR 12: [NCC_IXCG856] no such instruction\nCompiler status ERROR\n")
    assert look(tmp_path, graph).error == "ERROR 12: [NCC_IXCG856] no such instruction"
    (folder / "graph.neff").write_bytes(b"")
    assert look(tmp_path, graph).status == "failed", "an empty result is none"
    (folder / "graph.neff").write_bytes(b"x")
    assert look(tmp_path, graph).status == "compiled"


def test_compiled_files_are_no_part_of_the_models_digest() -> None:
    own = ArtifactFile(path="config.json", size=1, sha256="a" * 64)
    compiled = ArtifactFile(path="compiled/graph.neff", size=1, sha256="b" * 64)
    named_alike = ArtifactFile(path="compiled.json", size=1, sha256="c" * 64)
    assert model_digest([own, compiled]) == model_digest([own])
    assert model_digest([own, named_alike]) != model_digest([own])


def test_the_command_publishes_and_says_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_folder(tmp_path / "model")
    monkeypatch.setenv("PATH", f"{COMPILER_FOLDER}:{os.environ['PATH']}")
    if not app.registered_commands:
        _register()
    arguments = ["compile", "--model", str(tmp_path / "model"), "--profile", "emulated", "--tp-degree", "2"]
    arguments += ["--batch-size", "4", "--max-model-len", "2048", "--buckets", "512,2048", "--json"]
    with mock_aws():
        client = boto3.client("s3", region_name="us-east-1")
        client.create_bucket(Bucket="artifacts")
        monkeypatch.setattr(
            "app.compile.commands.open_store", lambda bucket, aws: ArtifactStore(client, bucket)
        )
        ran = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "out"), "--publish", "artifacts"])
        assert ran.exit_code == 0, ran.output
        document = json.loads(ran.stdout)
        held = ArtifactStore(client, "artifacts").read_manifest(document["digest"])
    assert held == read_manifest(tmp_path / "out")
    assert document["published"] == "artifacts"
    refused = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "out"), "--dtype", "fp4"])
    assert refused.exit_code == 2
    told = json.loads(refused.stdout)["reasons"]
    assert any("fp4" in reason for reason in told)
    assert any("exists" in reason for reason in told)
