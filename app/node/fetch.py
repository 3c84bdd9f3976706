"""Fetch a model artifact by its digest: verified, resumable, whole or not there at all.

The manifest comes first and must hash to the digest. Then blobs come in parallel, each hashed as it streams
into ``<root>/.fetch-<digest>/<sha256>.part``; a run that is killed goes on from what the parts hold. When
every blob is verified, the tree is linked together, synced, and renamed to ``<root>/<digest>``: that name
always means whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from app.compile.manifest import MANIFEST_NAME, ArtifactFile, Manifest, blob_key, manifest_key
from app.node.store import CHUNK_BYTES, BlobReader, StoreRefusal, StoreUnavailable

MANIFEST_LIMIT_BYTES = 64 << 20
# Left free on the disk beside the artifact: logs, compile caches and Ray's session need room too.
RESERVE_BYTES = 1 << 30

log = logging.getLogger(__name__)

MatchCheck = Callable[[Manifest], list[str]]


class FetchError(Exception):
    """The artifact cannot be had; the message names each file, what was wanted and what was found."""


@dataclass
class Progress:
    """How far a fetch has come, in bytes; read by the thread that reports it."""

    total: int
    done: int = 0
    started: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, count: int) -> None:
        """``count`` more bytes are on the disk (fewer, when negative: a part was thrown away)."""
        with self._lock:
            self.done += count

    def as_fields(self) -> dict[str, object]:
        """For a log line: MB done and in all, mean MB/s since the start."""
        seconds = max(time.monotonic() - self.started, 1e-6)
        rate = self.done / 1e6 / seconds
        return {
            "done_mb": round(self.done / 1e6),
            "total_mb": round(self.total / 1e6),
            "mb_per_s": round(rate),
        }


@dataclass(frozen=True)
class FetchSettings:
    """How hard to try. ``attempts`` counts tries of a blob in a row without a byte gained."""

    workers: int = 16
    attempts: int = 8
    first_pause_s: float = 0.5
    report_every_s: float = 5.0
    reserve_bytes: int = RESERVE_BYTES


def read_manifest(reader: BlobReader, digest: str, settings: FetchSettings | None = None) -> Manifest:
    """The manifest that ``digest`` names.

    Raises:
        FetchError: it is not in the store, its bytes have another sha256, or they are no manifest.
    """
    settings = settings or FetchSettings()
    key = manifest_key(digest)
    content = b""
    for attempt in range(1, settings.attempts + 1):
        try:
            content = reader.read(key, MANIFEST_LIMIT_BYTES)
            break
        except StoreRefusal as error:
            raise FetchError(f"artifact {digest}: {error}") from error
        except StoreUnavailable as error:
            if attempt == settings.attempts:
                raise FetchError(f"artifact {digest}: no answer in {attempt} tries: {error}") from error
            _pause(settings, attempt)
    found = hashlib.sha256(content).hexdigest()
    if found != digest:
        raise FetchError(
            f"{key}: wanted sha256 {digest}, found {found}: the store's manifest is not the published "
            "one; publish the artifact again"
        )
    try:
        manifest = Manifest.model_validate_json(content)
    except ValidationError as error:
        raise FetchError(f"{key} is no manifest that this version reads: {error}") from error
    if manifest.digest() != digest:
        raise FetchError(
            f"{key} is not in canonical form: publish the artifact with `neuronfleet artifacts push`"
        )
    return manifest


def is_whole(folder: Path, digest: str) -> bool:
    """Whether ``folder`` holds the whole artifact: its manifest has the digest, its files their sizes.

    Their bytes were verified before the folder got its name and are not hashed again.
    """
    try:
        content = (folder / MANIFEST_NAME).read_bytes()
        if hashlib.sha256(content).hexdigest() != digest:
            return False
        manifest = Manifest.model_validate_json(content)
        return all((folder / file.path).stat().st_size == file.size for file in manifest.files)
    except OSError:
        return False


def fetch(
    reader: BlobReader,
    digest: str,
    root: Path,
    *,
    check: MatchCheck | None = None,
    settings: FetchSettings | None = None,
) -> Path:
    """Bring the artifact ``digest`` to ``root / digest`` and return that path.

    Args:
        reader: the store.
        digest: sha256 of the manifest, 64 hex digits.
        root: the artifacts' folder; parts live there too, so that the last step is a rename.
        check: tells, from the manifest, why the artifact must not be used here (nothing: it may).
        settings: how hard to try.

    Raises:
        FetchError: what is wrong and with which files, all at once; nothing is at ``root / digest`` then.
    """
    settings = settings or FetchSettings()
    target = root / digest
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root / f".fetch-{digest}.lock"):
        if is_whole(target, digest):
            manifest = Manifest.model_validate_json((target / MANIFEST_NAME).read_bytes())
            _refuse_mismatch(manifest, digest, check)
            log.info("artifact is there already", extra={"digest": digest})
            return target
        manifest = read_manifest(reader, digest, settings)
        _refuse_mismatch(manifest, digest, check)
        scratch = root / f".fetch-{digest}"
        scratch.mkdir(exist_ok=True)
        blobs = {file.sha256: file for file in manifest.files}
        _refuse_full_disk(root, scratch, list(blobs.values()), settings.reserve_bytes)
        _fetch_blobs(reader, list(blobs.values()), scratch, settings)
        _assemble(manifest, scratch, target)
        log.info("artifact is whole", extra={"digest": digest, "files": len(manifest.files)})
    return target


def _refuse_mismatch(manifest: Manifest, digest: str, check: MatchCheck | None) -> None:
    problems = check(manifest) if check else []
    if problems:
        raise FetchError(f"artifact {digest} is not for this host: " + "; ".join(problems))


def _refuse_full_disk(root: Path, scratch: Path, blobs: list[ArtifactFile], reserve: int) -> None:
    """Raise when what is still to come does not fit; names of parts of other manifests never match."""
    needed = sum(blob.size for blob in blobs) - sum(_held(scratch, blob) for blob in blobs)
    free = shutil.disk_usage(root).free
    if needed + reserve > free:
        raise FetchError(
            f"no space for the artifact: {needed:,} bytes are still to come and {reserve:,} must stay free, "
            f"{root} has {free:,} free; give the hosts a larger root volume"
        )


def _held(scratch: Path, blob: ArtifactFile) -> int:
    for name in (blob.sha256, f"{blob.sha256}.part"):
        with contextlib.suppress(FileNotFoundError):
            return min((scratch / name).stat().st_size, blob.size)
    return 0


def _fetch_blobs(
    reader: BlobReader, blobs: list[ArtifactFile], scratch: Path, settings: FetchSettings
) -> None:
    progress = Progress(total=sum(blob.size for blob in blobs))
    stop = threading.Event()
    problems: list[str] = []
    with ThreadPoolExecutor(settings.workers, thread_name_prefix="fetch") as pool:
        reporter = threading.Thread(
            target=_report, args=(progress, stop, settings.report_every_s), daemon=True
        )
        reporter.start()
        try:
            # The largest first: the last to end is then not the one that takes longest.
            ordered = sorted(blobs, key=lambda blob: -blob.size)
            waiting = [
                pool.submit(_fetch_blob, reader, blob, scratch, settings, progress, stop) for blob in ordered
            ]
            for done in as_completed(waiting):
                try:
                    done.result()
                except FetchError as error:
                    problems.append(str(error))
        finally:
            stop.set()
            reporter.join()
    if problems:
        raise FetchError("; ".join(sorted(problems)))
    log.info("all files are verified", extra=progress.as_fields())


def _report(progress: Progress, stop: threading.Event, every_s: float) -> None:
    while not stop.wait(every_s):
        log.info("fetching", extra=progress.as_fields())


def _fetch_blob(
    reader: BlobReader,
    blob: ArtifactFile,
    scratch: Path,
    settings: FetchSettings,
    progress: Progress,
    stop: threading.Event,
) -> None:
    """Bring one blob to ``scratch / sha256``, from where an earlier run left it."""
    whole, part = scratch / blob.sha256, scratch / f"{blob.sha256}.part"
    if whole.exists() and whole.stat().st_size == blob.size:
        progress.add(blob.size)
        return
    key = blob_key(blob.sha256)
    resumed = part.exists()
    misses = 0
    while True:
        hasher, held = _hash_of(part, blob.size)
        progress.add(held)
        try:
            if held == 0:
                _refuse_wrong_size(reader, key, blob)
            held = _stream_into(reader, key, part, hasher, held, blob.size, progress, stop)
            found = hasher.hexdigest()
            if held == blob.size and found == blob.sha256:
                _sync(part)
                part.rename(whole)
                return
            part.unlink()
            progress.add(-held)
            if not resumed:
                raise FetchError(
                    f"{blob.path}: wanted {blob.size:,} bytes with sha256 {blob.sha256}, "
                    f"found {held:,} bytes with sha256 {found}"
                )
            # What an earlier run left may have been damaged on the disk: once more from the start.
            log.warning("a resumed file did not verify; starting it again", extra={"path": blob.path})
            resumed = False
        except StoreRefusal as error:
            raise FetchError(f"{blob.path}: {error}") from error
        except StoreUnavailable as error:
            gained = part.exists() and part.stat().st_size > held
            misses = 0 if gained else misses + 1
            progress.add(-_size(part))
            if misses >= settings.attempts:
                raise FetchError(f"{blob.path}: no answer in {misses} tries: {error}") from error
            log.warning("a read broke off; going on", extra={"path": blob.path, "reason": str(error)})
            _pause(settings, max(misses, 1))


def _refuse_wrong_size(reader: BlobReader, key: str, blob: ArtifactFile) -> None:
    size = reader.size(key)
    if size != blob.size:
        raise FetchError(f"{blob.path}: wanted {blob.size:,} bytes, found {size:,} in the store ({key})")


def _stream_into(
    reader: BlobReader,
    key: str,
    part: Path,
    hasher: hashlib._Hash,
    held: int,
    size: int,
    progress: Progress,
    stop: threading.Event,
) -> int:
    """Append the rest of the object to ``part``; returns how many bytes it then holds (at most ``size`` + 1
    chunk: an object that is too long is not read to its end)."""
    if held == size and held > 0:
        return held
    with part.open("ab") as stream:
        for chunk in reader.stream(key, held) if size else iter(()):
            if stop.is_set():
                raise FetchError(f"{key}: stopped")
            stream.write(chunk)
            hasher.update(chunk)
            held += len(chunk)
            progress.add(len(chunk))
            if held > size:
                break
    if held < size:
        raise StoreUnavailable(f"{key} ended after {held:,} of {size:,} bytes")
    return held


def _hash_of(part: Path, size: int) -> tuple[hashlib._Hash, int]:
    """sha256 and length of what a part holds; one that is too long is thrown away."""
    hasher = hashlib.sha256()
    if _size(part) > size:
        part.unlink()
    held = 0
    with contextlib.suppress(FileNotFoundError), part.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            hasher.update(chunk)
            held += len(chunk)
    return hasher, held


def _assemble(manifest: Manifest, scratch: Path, target: Path) -> None:
    """Link the verified blobs into a tree and give it its name in one step."""
    tree = scratch / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    folders = {tree, scratch.parent}
    tree.mkdir()
    for file in manifest.files:
        path = tree / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        folders.update(parent for parent in path.parents if parent.is_relative_to(tree))
        (scratch / file.sha256).chmod(0o644)
        os.link(scratch / file.sha256, path)
    (tree / MANIFEST_NAME).write_bytes(manifest.canonical_bytes())
    _sync(tree / MANIFEST_NAME)
    for folder in folders:
        _sync(folder)
    if target.exists():  # an earlier folder that is not whole
        shutil.rmtree(target)
    tree.rename(target)
    _sync(target.parent)
    shutil.rmtree(scratch)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _pause(settings: FetchSettings, attempt: int) -> None:
    time.sleep(min(settings.first_pause_s * 2 ** (attempt - 1), 15.0))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold ``path`` locked; a second fetch of the same artifact waits for the first."""
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
