"""The fetch through its real client, against a store over HTTP that fails: retried or refused."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from app.compile.manifest import Manifest, blob_key, manifest_key
from app.node.fetch import FetchError, FetchSettings, fetch, is_whole
from app.node.match import mismatches
from app.node.store import S3Reader, s3_client
from tests.unit.faulty_http_store import FaultyServer, serve
from tests.unit.faulty_store import make_artifact
from tests.unit.test_node_boot_steps import config

FILES = {"config.json": b"{}", "model-1.safetensors": b"a" * 300_000, "model-2.safetensors": b"b" * 50_000}
SETTINGS = FetchSettings(
    workers=4, part_bytes=100_000, attempts=3, first_pause_s=0.01, reserve_bytes=0, report_every_s=60
)


@pytest.fixture
def artifact() -> tuple[Manifest, dict[str, bytes]]:
    return make_artifact(FILES)


@pytest.fixture
def server(
    artifact: tuple[Manifest, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[FaultyServer]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    # botocore's own retries wait for seconds.
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.01)
    with serve(artifact[1]) as server:
        yield server


def key_of(name: str) -> str:
    return blob_key(hashlib.sha256(FILES[name]).hexdigest())


def run(server: FaultyServer, digest: str, root: Path, settings: FetchSettings = SETTINGS) -> Path:
    client = s3_client("us-east-1", settings.workers, endpoint_url=server.url, read_timeout_s=0.5)
    return fetch(S3Reader(client, "artifacts"), digest, root, settings=settings)


def assert_whole(folder: Path, manifest: Manifest) -> None:
    assert is_whole(folder, manifest.digest())
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES


@pytest.mark.parametrize(
    "faults",
    [
        ["503", "503", "503"],
        ["500", "reset", "503", "reset"],
        ["reset", "reset", "reset"],
        ["stall", "reset"],
        ["flip"],
    ],
    ids=lambda faults: "+".join(faults),
)
def test_what_passes_is_tried_again(
    artifact: tuple[Manifest, dict[str, bytes]], server: FaultyServer, tmp_path: Path, faults: list[str]
) -> None:
    key = key_of("model-1.safetensors")
    server.faults[key] = list(faults)
    folder = run(server, artifact[0].digest(), tmp_path)
    assert_whole(folder, artifact[0])
    assert server.faults[key] == [], "every fault was met"
    breaks = sum(fault in ("reset", "stall") for fault in faults)
    again = 300_000 if "flip" in faults else 50_000 * breaks
    assert server.sent[key] == 300_000 + again, "what broke off is sent again, what does not verify too"


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("503", r"model-1\.safetensors: no answer in 3 tries: .*SlowDown"),
        ("reset", r"model-1\.safetensors: no answer in 3 tries: .*Connection"),
        ("403", r"is refused \(AccessDenied\): the instance's role needs s3:GetObject"),
        ("flip", r"model-1\.safetensors: wanted 300,000 bytes with sha256 \w+, found 300,000 bytes with sha"),
    ],
)
def test_what_does_not_pass_is_refused_with_its_reason(
    artifact: tuple[Manifest, dict[str, bytes]],
    server: FaultyServer,
    tmp_path: Path,
    fault: str,
    expected: str,
) -> None:
    server.always[key_of("model-1.safetensors")] = fault
    with pytest.raises(FetchError, match=expected):
        run(server, artifact[0].digest(), tmp_path)
    assert not (tmp_path / artifact[0].digest()).exists()


def test_a_store_that_denies_the_manifest(
    artifact: tuple[Manifest, dict[str, bytes]], server: FaultyServer, tmp_path: Path
) -> None:
    server.always[manifest_key(artifact[0].digest())] = "403"
    with pytest.raises(FetchError, match=r"is refused \(AccessDenied\)"):
        run(server, artifact[0].digest(), tmp_path)
    assert set(server.requests) == {manifest_key(artifact[0].digest())}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda data: data[:-1], "wanted 300,000 bytes, found 299,999 in the store"),
        (lambda data: data[:1000], "found 1,000 in the store|is shorter than the manifest says"),
        (lambda data: data + b"x", "wanted 300,000 bytes, found 300,001 in the store"),
        (None, "does not exist: was the artifact published whole to this bucket?"),
    ],
    ids=["truncated by one", "truncated to less than a part", "too long", "missing shard"],
)
def test_every_blob_that_is_not_the_published_one_is_named_at_once(
    artifact: tuple[Manifest, dict[str, bytes]],
    server: FaultyServer,
    tmp_path: Path,
    change: object,
    expected: str,
) -> None:
    key, other = key_of("model-1.safetensors"), key_of("model-2.safetensors")
    if callable(change):
        server.content[key] = change(server.content[key])
    else:
        del server.content[key]
    del server.content[other]
    with pytest.raises(FetchError, match=expected) as caught:
        run(server, artifact[0].digest(), tmp_path)
    assert "model-1.safetensors: " in str(caught.value) and "model-2.safetensors: " in str(caught.value)
    assert not (tmp_path / artifact[0].digest()).exists()


def test_a_refused_fetch_goes_on_when_the_store_is_mended(
    artifact: tuple[Manifest, dict[str, bytes]], server: FaultyServer, tmp_path: Path
) -> None:
    key = key_of("model-2.safetensors")
    server.always[key] = "403"
    with pytest.raises(FetchError):
        run(server, artifact[0].digest(), tmp_path, replace(SETTINGS, workers=1))
    server.always.clear()
    assert_whole(run(server, artifact[0].digest(), tmp_path), artifact[0])
    assert server.sent[key_of("model-1.safetensors")] == 300_000


def test_the_manifest_of_another_profile_is_refused_before_a_blob_is_asked_for(
    artifact: tuple[Manifest, dict[str, bytes]], server: FaultyServer, tmp_path: Path
) -> None:
    other = artifact[0].model_copy(update={"profile": "vllm-neuron-2.28"})
    server.content[manifest_key(other.digest())] = other.canonical_bytes()
    client = s3_client("us-east-1", 2, endpoint_url=server.url)
    with pytest.raises(FetchError, match=r"engine profile is 'vllm-neuron-2\.28', this host wants 'cpu'"):
        fetch(
            S3Reader(client, "artifacts"),
            other.digest(),
            tmp_path,
            check=lambda manifest: mismatches(manifest, config()),
            settings=SETTINGS,
        )
    assert set(server.requests) == {manifest_key(other.digest())}


def test_two_fetches_at_once_read_everything_once(
    artifact: tuple[Manifest, dict[str, bytes]], server: FaultyServer, tmp_path: Path
) -> None:
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda: folders.append(run(server, artifact[0].digest(), tmp_path)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [tmp_path / artifact[0].digest()] * 3
    blobs = sum(count for key, count in server.sent.items() if key.startswith("blobs/"))
    assert blobs == sum(len(data) for data in FILES.values())
