"""Fetching an artifact: verified, resumed, whole or not there, whatever the store does."""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto import mock_aws

from app.compile.manifest import Manifest, blob_key, manifest_key
from app.node.fetch import FetchError, FetchSettings, fetch, is_whole
from app.node.progress import read_progress
from app.node.store import S3Reader, StoreRefusal, StoreUnavailable, s3_client
from tests.unit.faulty_store import QUICK, FaultyStore, make_artifact

FILES = {"config.json": b"{}", "sub/a.bin": b"a" * 10_000, "sub/b.bin": b"b" * 7_777, "empty": b""}


@pytest.fixture
def artifact() -> tuple[Manifest, FaultyStore]:
    manifest, content = make_artifact(FILES)
    return manifest, FaultyStore(content)


def key_of(name: str) -> str:
    return blob_key(hashlib.sha256(FILES[name]).hexdigest())


def test_whole_artifact(artifact: tuple[Manifest, FaultyStore], tmp_path: Path) -> None:
    manifest, store = artifact
    folder = fetch(store, manifest.digest(), tmp_path, settings=QUICK)
    assert folder == tmp_path / manifest.digest()
    assert {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()} == FILES | {
        "manifest.json": manifest.canonical_bytes()
    }
    assert is_whole(folder, manifest.digest())
    assert list((tmp_path / "parts").iterdir()) == [], "parts and journals are gone"
    for file in manifest.files:
        status = (folder / file.path).stat()
        assert status.st_ino == (tmp_path / "blobs" / file.sha256).stat().st_ino, "linked, not copied"
        assert status.st_mode & 0o777 == 0o444


def test_a_second_fetch_reads_nothing(artifact: tuple[Manifest, FaultyStore], tmp_path: Path) -> None:
    manifest, store = artifact
    fetch(store, manifest.digest(), tmp_path, settings=QUICK)
    before = store.streams.total()
    fetch(store, manifest.digest(), tmp_path, settings=QUICK)
    assert store.streams.total() == before


def test_two_files_with_the_same_bytes_are_read_once(tmp_path: Path) -> None:
    manifest, content = make_artifact({"a": b"same" * 100, "b/c": b"same" * 100})
    store = FaultyStore(content)
    folder = fetch(store, manifest.digest(), tmp_path, settings=QUICK)
    assert (folder / "a").read_bytes() == (folder / "b/c").read_bytes() == b"same" * 100
    assert store.streams[blob_key(manifest.files[0].sha256)] == 1


@pytest.mark.parametrize(("fault", "streams"), [("reset", 5), ("short", 5), ("late reset", 3)])
def test_a_broken_read_goes_on_where_it_stopped(
    artifact: tuple[Manifest, FaultyStore], tmp_path: Path, fault: str, streams: int
) -> None:
    manifest, store = artifact
    key = key_of("sub/a.bin")
    store.faults[key] = [fault, fault]
    fetch(store, manifest.digest(), tmp_path, settings=QUICK)
    assert store.streams[key] == streams
    assert store.sent[key] == 10_000, "no byte was read twice"


def test_a_store_that_never_answers_is_given_up(
    artifact: tuple[Manifest, FaultyStore], tmp_path: Path
) -> None:
    manifest, store = artifact
    key = key_of("sub/a.bin")
    store.stream = lambda *_: (_ for _ in ()).throw(StoreUnavailable("reset"))  # type: ignore[method-assign]
    store.read = lambda key, limit: store.content[key]  # type: ignore[method-assign]
    with pytest.raises(FetchError, match=r"sub/a\.bin: no answer in 3 tries: reset"):
        fetch(store, manifest.digest(), tmp_path, settings=QUICK)
    assert key in store.content
    assert not (tmp_path / manifest.digest()).exists()


def flipped(data: bytes) -> bytes:
    return data[:5000] + bytes([data[5000] ^ 1]) + data[5001:]


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (
            flipped,
            r"sub/a\.bin: wanted 10,000 bytes with sha256 27dd1f61b867\w+, found 10,000 bytes with sha256",
        ),
        (lambda data: data[:-1], r"sub/a\.bin: wanted 10,000 bytes, found 9,999 in the store"),
        (lambda data: data + b"x", r"sub/a\.bin: wanted 10,000 bytes, found 10,001 in the store"),
        (None, r"sub/a\.bin: blobs/sha256/\w+ does not exist"),
    ],
    ids=["flipped bit", "truncated", "too long", "missing"],
)
def test_wrong_bytes_are_refused_by_name(
    artifact: tuple[Manifest, FaultyStore], tmp_path: Path, damage: Any, expected: str
) -> None:
    manifest, store = artifact
    key = key_of("sub/a.bin")
    if damage is None:
        del store.content[key]
    else:
        store.content[key] = damage(store.content[key])
    with pytest.raises(FetchError, match=expected):
        fetch(store, manifest.digest(), tmp_path, settings=QUICK)
    assert not (tmp_path / manifest.digest()).exists()


def test_every_wrong_file_is_named(artifact: tuple[Manifest, FaultyStore], tmp_path: Path) -> None:
    manifest, store = artifact
    del store.content[key_of("sub/a.bin")], store.content[key_of("sub/b.bin")]
    with pytest.raises(FetchError) as caught:
        fetch(store, manifest.digest(), tmp_path, settings=QUICK)
    assert "sub/a.bin" in str(caught.value) and "sub/b.bin" in str(caught.value)


def test_a_damaged_part_of_an_earlier_run_is_fetched_anew(
    artifact: tuple[Manifest, FaultyStore], tmp_path: Path
) -> None:
    manifest, store = artifact
    leave_parts(tmp_path, "sub/a.bin", b"z" * 4_000)
    folder = fetch(store, manifest.digest(), tmp_path, settings=QUICK)
    assert (folder / "sub/a.bin").read_bytes() == FILES["sub/a.bin"]


def test_whole_parts_of_an_earlier_run_are_not_read_again(
    artifact: tuple[Manifest, FaultyStore], tmp_path: Path
) -> None:
    manifest, store = artifact
    leave_parts(tmp_path, "sub/a.bin", b"a" * 9_000)
    fetch(store, manifest.digest(), tmp_path, settings=QUICK)
    assert store.sent[key_of("sub/a.bin")] == 2_000, "its last part only"


def test_parts_of_another_part_size_are_thrown_away(
    artifact: tuple[Manifest, FaultyStore], tmp_path: Path
) -> None:
    manifest, store = artifact
    leave_parts(tmp_path, "sub/a.bin", b"a" * 10_000)
    folder = fetch(store, manifest.digest(), tmp_path, settings=replace(QUICK, part_bytes=3000))
    assert (folder / "sub/a.bin").read_bytes() == FILES["sub/a.bin"]
    assert store.sent[key_of("sub/a.bin")] == 10_000


def leave_parts(root: Path, name: str, content: bytes) -> None:
    """As a run leaves them that was killed after it had written ``content``; the last part is not whole."""
    parts = root / "parts"
    parts.mkdir(parents=True)
    sha256 = hashlib.sha256(FILES[name]).hexdigest()
    (parts / f"{sha256}.part").write_bytes(content)
    marks = b"\x01" * (len(content) // QUICK.part_bytes)
    (parts / f"{sha256}.parts").write_bytes(QUICK.part_bytes.to_bytes(8, "little") + marks)


def test_an_incomplete_folder_under_the_final_name_is_replaced(
    artifact: tuple[Manifest, FaultyStore], tmp_path: Path
) -> None:
    manifest, store = artifact
    folder = tmp_path / manifest.digest()
    folder.mkdir()
    (folder / "manifest.json").write_bytes(manifest.canonical_bytes())
    (folder / "stray").write_text("x")
    fetch(store, manifest.digest(), tmp_path, settings=QUICK)
    assert is_whole(folder, manifest.digest()) and not (folder / "stray").exists()


def test_manifest_of_another_digest_is_refused(
    artifact: tuple[Manifest, FaultyStore], tmp_path: Path
) -> None:
    manifest, store = artifact
    key = manifest_key(manifest.digest())
    store.content[key] = store.content[key].replace(b'"m"', b'"n"')
    with pytest.raises(FetchError, match=f"wanted sha256 {manifest.digest()}, found"):
        fetch(store, manifest.digest(), tmp_path, settings=QUICK)
    assert store.streams.total() == 1, "no blob was asked for"


def test_what_does_not_match_the_host_is_refused_before_a_blob_is_read(
    artifact: tuple[Manifest, FaultyStore], tmp_path: Path
) -> None:
    manifest, store = artifact
    with pytest.raises(FetchError, match="is not for this host: wrong SDK; wrong family"):
        fetch(
            store,
            manifest.digest(),
            tmp_path,
            check=lambda m: ["wrong SDK", "wrong family"],
            settings=QUICK,
        )
    assert store.streams.total() == 1


def test_no_space_is_found_before_a_blob_is_read(
    artifact: tuple[Manifest, FaultyStore], tmp_path: Path
) -> None:
    manifest, store = artifact
    settings = FetchSettings(reserve_bytes=1 << 60)
    with pytest.raises(FetchError, match="no space for the artifact: 17,779 bytes are still to come"):
        fetch(store, manifest.digest(), tmp_path, settings=settings)
    assert store.streams.total() == 1


def test_killed_at_fifty_random_moments_it_ends_whole_and_reads_little_twice(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.killed_fetches", str(tmp_path), "50"],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["kills"] == 50 and found["whole"], found
    assert 0 < found["most_read_again"] <= found["in_flight"], "no more than the parts that were in flight"


def test_progress_is_told(
    artifact: tuple[Manifest, FaultyStore],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifest, store = artifact
    stream = store.stream
    path, told = tmp_path / "fetch.json", list[dict[str, Any]]()

    def slow(key: str, start: int, length: int, total: int) -> Iterator[bytes]:
        for chunk in stream(key, start, length, total):
            time.sleep(0.02)
            told.append(read_progress(manifest.digest(), path))
            yield chunk

    monkeypatch.setattr(store, "stream", slow)
    settings = replace(QUICK, report_every_s=0.05, progress_path=path)
    with caplog.at_level(logging.INFO, logger="app.node.progress"):
        fetch(store, manifest.digest(), tmp_path, settings=settings)
    lines = [record for record in caplog.records if record.message == "fetching"]
    assert lines and all(hasattr(record, "mb_per_s") for record in lines)
    during = [item for item in told if item["state"] == "fetching" and item["rate_bytes_per_s"] > 0]
    assert during and all(0 < item["bytes"] <= item["total_bytes"] == 17_779 for item in during)
    at_end = read_progress(manifest.digest(), path)
    assert (at_end["state"], at_end["bytes"]) == ("whole", 17_779)
    assert read_progress("0" * 64, path) == {}, "of another artifact nothing is said"


def test_progress_that_cannot_be_written_stops_no_fetch(
    artifact: tuple[Manifest, FaultyStore], tmp_path: Path
) -> None:
    manifest, store = artifact
    settings = replace(QUICK, progress_path=tmp_path / "no-folder/fetch.json")
    assert is_whole(fetch(store, manifest.digest(), tmp_path, settings=settings), manifest.digest())


def test_a_fetch_that_fails_says_so_in_its_progress(
    artifact: tuple[Manifest, FaultyStore], tmp_path: Path
) -> None:
    manifest, store = artifact
    del store.content[key_of("sub/a.bin")]
    with pytest.raises(FetchError):
        fetch(
            store,
            manifest.digest(),
            tmp_path / "root",
            settings=replace(QUICK, progress_path=tmp_path / "p.json"),
        )
    assert read_progress(manifest.digest(), tmp_path / "p.json")["state"] == "failed"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with mock_aws():
        client = boto3.client("s3", region_name="us-east-1")
        client.create_bucket(Bucket="artifacts")
        yield client


def test_s3_reader_on_the_real_client(s3: Any, tmp_path: Path) -> None:
    manifest, content = make_artifact(FILES)
    for key, data in content.items():
        s3.put_object(Bucket="artifacts", Key=key, Body=data)
    reader = S3Reader(s3_client("us-east-1", 4), "artifacts")
    assert b"".join(reader.stream(key_of("sub/b.bin"), 7_770, 7, 7_777)) == b"b" * 7
    leave_parts(tmp_path, "sub/a.bin", b"a" * 4_000)
    folder = fetch(reader, manifest.digest(), tmp_path, settings=QUICK)
    assert (folder / "sub/a.bin").read_bytes() == FILES["sub/a.bin"]


def test_s3_is_asked_at_its_name_in_the_region() -> None:
    assert s3_client("us-east-1", 4).meta.endpoint_url == "https://s3.us-east-1.amazonaws.com"


def test_s3_reader_says_what_is_missing(s3: Any) -> None:
    reader = S3Reader(s3_client("us-east-1", 4), "artifacts")
    with pytest.raises(StoreRefusal, match="does not exist: was the artifact published whole"):
        reader.size("blobs/sha256/none")
    with pytest.raises(StoreRefusal, match="does not exist"):
        list(reader.stream("blobs/sha256/none", 0, 1, 1))
    with pytest.raises(StoreRefusal, match="is the store's stack deployed"):
        list(S3Reader(s3_client("us-east-1", 4), "missing").stream("k", 0, 1, 1))
