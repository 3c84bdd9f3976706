"""Artifacts on a host's disk: shared files, leases, eviction, what a damaged disk leads to."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from app.compile.manifest import Manifest
from app.node import local
from app.node.fetch import FetchError, fetch, is_whole
from app.node.local import LocalArtifactError, hold
from app.node.match import HostFacts, MatchError, hold_for_engine, host_facts, mismatches
from app.serve.binding import hold_artifact
from tests.unit.faulty_store import QUICK, FaultyStore, make_artifact
from tests.unit.test_node_boot_steps import config

SHARED = b"s" * 20_000
Usage = namedtuple("Usage", "total used free")


def put(root: Path, name: str) -> tuple[Manifest, FaultyStore]:
    """Fetch an artifact with one file of its own and one that all share."""
    manifest, content = make_artifact({"shared": SHARED, "own": name.encode() * 10_000})
    store = FaultyStore(content)
    fetch(store, manifest.digest(), root, settings=QUICK)
    return manifest, store


def test_two_artifacts_share_files(tmp_path: Path) -> None:
    first, _ = put(tmp_path, "a")
    second, store = put(tmp_path, "b")
    assert sum(count for key, count in store.sent.items() if key.startswith("blobs/")) == 10_000
    paths = [tmp_path / manifest.digest() / "shared" for manifest in (first, second)]
    assert paths[0].samefile(paths[1]) and paths[0].stat().st_nlink == 3


def disk_of(bytes_in_all: int, root: Path) -> Any:
    """A disk of that size on which only ``root``'s files lie."""

    def usage(_: object) -> Usage:
        seen = {path.stat().st_ino: path.stat().st_size for path in root.rglob("*") if path.is_file()}
        used = sum(seen.values())
        return Usage(bytes_in_all, used, max(0, bytes_in_all - used))

    return usage


def test_old_artifacts_are_evicted_only_when_unused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [put(tmp_path, name)[0] for name in "abc"]
    for age, manifest in enumerate(made):
        os.utime(tmp_path / manifest.digest(), (age, age))
    monkeypatch.setattr(shutil, "disk_usage", disk_of(61_000, tmp_path))
    monkeypatch.setattr(local, "needed_bytes", lambda root, blobs: sum(blob.size for blob in blobs))
    lease = hold(tmp_path / made[0].digest())
    newest, _ = put(tmp_path, "d")
    there = {path.name for path in local.artifact_folders(tmp_path)}
    assert there == {made[0].digest(), made[2].digest(), newest.digest()}, "b: the oldest that nobody holds"
    assert is_whole(tmp_path / made[0].digest(), made[0].digest())
    assert len(list((tmp_path / "blobs").iterdir())) == 4, "the shared file stays"
    lease.release()
    put(tmp_path, "e")
    assert made[0].digest() not in {path.name for path in local.artifact_folders(tmp_path)}


def test_no_space_beside_artifacts_in_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = put(tmp_path, "a")
    monkeypatch.setattr(shutil, "disk_usage", disk_of(31_000, tmp_path))
    monkeypatch.setattr(local, "needed_bytes", lambda root, blobs: sum(blob.size for blob in blobs))
    lease = hold(tmp_path / first.digest())
    with pytest.raises(FetchError, match=f"beside artifacts in use \\({first.digest()[:12]}\\)"):
        put(tmp_path, "b")
    assert is_whole(lease.folder, first.digest())


def test_what_abandoned_fetches_left_goes_before_any_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = put(tmp_path, "a")
    (tmp_path / "parts" / ("f" * 64 + ".part")).write_bytes(b"x" * 9_000)
    (tmp_path / "parts" / ("f" * 64 + ".parts")).write_bytes(b"x")
    monkeypatch.setattr(shutil, "disk_usage", disk_of(42_000, tmp_path))
    monkeypatch.setattr(local, "needed_bytes", lambda root, blobs: sum(blob.size for blob in blobs))
    put(tmp_path, "b")
    assert is_whole(tmp_path / first.digest(), first.digest())
    assert list((tmp_path / "parts").iterdir()) == []


def test_a_lease_ends_with_its_process(tmp_path: Path) -> None:
    manifest, _ = put(tmp_path, "a")
    folder = tmp_path / manifest.digest()
    code = (
        "import sys; from app.node.local import hold; from pathlib import Path; "
        "lease = hold(Path(sys.argv[1])); print(1, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "1\n"
        assert not local._evict(tmp_path, folder)
        process.kill()
        process.wait()
        assert local._evict(tmp_path, folder)
    with pytest.raises(LocalArtifactError, match="is neuronfleet-fetch done on this host"):
        hold(folder)


def test_after_the_host_has_started_anew_every_byte_is_hashed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, store = put(tmp_path, "a")
    boot = tmp_path / "boot_id"
    boot.write_text("another boot")
    monkeypatch.setattr(local, "BOOT_ID", boot)
    own = tmp_path / manifest.digest() / "own"
    own.chmod(0o600)
    with own.open("r+b") as stream:
        stream.write(b"z")
    store.sent.clear()
    folder = fetch(store, manifest.digest(), tmp_path, settings=QUICK)
    assert (folder / "own").read_bytes() == b"a" * 10_000
    assert {key: count for key, count in store.sent.items() if key.startswith("blobs/")} == {
        f"blobs/sha256/{next(file.sha256 for file in manifest.files if file.path == 'own')}": 10_000
    }
    assert local.verified_in_this_boot(tmp_path, manifest.digest())


def test_a_damaged_artifact_that_cannot_be_mended_loses_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, store = put(tmp_path, "a")
    (tmp_path / f"{manifest.digest()}.verified").unlink()
    own = tmp_path / manifest.digest() / "own"
    own.chmod(0o600)
    own.write_bytes(b"z" * 10_000)
    store.content.clear()
    with pytest.raises(FetchError, match="own: blobs/sha256/"):
        fetch(store, manifest.digest(), tmp_path, settings=QUICK)
    assert not (tmp_path / manifest.digest()).exists()


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda folder: (folder / "own").unlink(), "own is missing"),
        (lambda folder: (folder / "sub.py").write_text("x"), "sub.py is not in the manifest"),
        (lambda folder: (folder / ".hidden").write_text("x"), ".hidden is not in the manifest"),
        (lambda folder: (folder / "deep").symlink_to("/etc"), "deep is not in the manifest"),
        (lambda folder: swap(folder / "own", b"a" * 9_999), "own: wanted 10,000 bytes, found 9,999"),
        (lambda folder: link(folder / "own"), "own is not a plain file"),
        (lambda folder: (folder / "manifest.json").write_text("{}"), "has no usable manifest.json"),
    ],
    ids=["missing", "extra", "hidden", "link to a folder", "truncated", "link", "manifest"],
)
def test_what_is_not_the_artifact_is_refused_before_the_engine_loads(
    tmp_path: Path, damage: Any, expected: str
) -> None:
    manifest, content = make_artifact({"own": b"a" * 10_000}, model="m", max_model_len=512)
    store = FaultyStore(content)
    folder = fetch(store, manifest.digest(), tmp_path, settings=QUICK)
    hold_for_engine(folder, config()).release()
    damage(folder)
    with pytest.raises(MatchError) as caught:
        hold_for_engine(folder, config())
    assert expected in str(caught.value)
    fetch(store, manifest.digest(), tmp_path, settings=QUICK)
    hold_for_engine(folder, config()).release()


def swap(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/hostname")


def test_a_replica_holds_its_hosts_artifact_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, content = make_artifact({"own": b"a"}, model="m", max_model_len=512)
    folder = fetch(FaultyStore(content), manifest.digest(), tmp_path, settings=QUICK)
    node = config(artifact={"bucket": "b", "digest": manifest.digest()})
    monkeypatch.setenv("NEURONFLEET_NODE_CONFIG", str(tmp_path / "node.json"))
    assert hold_artifact(folder, tmp_path) is None, "no host of a fleet"
    (tmp_path / "node.json").write_text(node.model_dump_json())
    assert hold_artifact(tmp_path / "elsewhere", tmp_path) is None
    lease = hold_artifact(folder, tmp_path)
    assert not local._evict(tmp_path, folder)
    lease.release()
    wrong = node.model_copy(update={"engine": node.engine.model_copy(update={"model": "other"})})
    (tmp_path / "node.json").write_text(wrong.model_dump_json())
    with pytest.raises(MatchError, match="model is 'm', this host wants 'other'"):
        hold_artifact(folder, tmp_path)
    assert local._evict(tmp_path, folder), "a refused artifact is not held"


NEURON = {
    "profile": "vllm-neuron-2.28",
    "model": "m",
    "tp_degree": 8,
    "batch_size": 4,
    "max_model_len": 512,
}


def test_what_the_host_has_must_be_what_the_graphs_were_made_for() -> None:
    manifest, _ = make_artifact(
        {},
        **NEURON,
        versions={"driver": "2.26.10.0", "runtime": "2.30.51.0"},
        buckets=(128, 256),
    )
    node = config(engine=NEURON)
    found = mismatches(manifest, node, "inf2.8xlarge", HostFacts(cores=2, driver="2.23.9.0", runtime="2.27"))
    assert [fault.split(":")[0] for fault in found] == [
        "artifact's longest bucket is 256, this host wants 512",
        "artifact's tp_degree is 8, this host has 2 NeuronCores",
        "artifact's driver is '2.26.10.0', this host has '2.23.9.0'",
        "artifact's runtime is '2.30.51.0', this host has '2.27'",
    ]
    assert all(": " in fault for fault in found), "each says what to do"
    fits = HostFacts(cores=8, driver="2.26.10.0", runtime="2.30")
    assert mismatches(manifest.model_copy(update={"buckets": (512,)}), node, "inf2.48xlarge", fits) == []
    assert mismatches(manifest.model_copy(update={"buckets": ()}), node) == [], "unknown facts refuse nothing"


def test_host_facts_are_read_where_they_are(tmp_path: Path) -> None:
    nowhere = tmp_path / "no-topology.json"
    assert host_facts(tmp_path, nowhere) == HostFacts()
    module, library = tmp_path / "sys/module/neuron", tmp_path / "opt/aws/neuron/lib"
    module.mkdir(parents=True)
    library.mkdir(parents=True)
    (module / "version").write_text("2.26.10.0\n")
    (library / "libnrt.so.2.30.51.0").write_text("")
    (library / "libnrt.so.1").symlink_to("libnrt.so.2.30.51.0")
    assert host_facts(tmp_path, nowhere) == HostFacts(driver="2.26.10.0", runtime="2.30.51.0")
