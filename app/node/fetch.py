"""Fetch a model artifact by its digest: verified, resumable, whole or not there at all.

The manifest comes first and must hash to the digest. Then parts of blobs come in parallel, each blob hashed
in order while it streams (``app.node.blobs``); a run that is killed loses the parts in flight. When every
blob is verified they are linked together under ``<root>/<digest>``: that name always means whole
(``app.node.local``). Every byte of an artifact is hashed in the run that gives it its name, and again by the
first fetch after the host has started anew.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from app.compile.manifest import ArtifactFile, Manifest, blob_key, manifest_key
from app.node import local
from app.node.blobs import BlobDownload, PartWriter, file_is
from app.node.local import is_whole
from app.node.progress import Progress, Tell
from app.node.store import BlobReader, StoreRefusal, StoreUnavailable

__all__ = ["FetchError", "FetchSettings", "fetch", "is_whole", "read_manifest"]

MANIFEST_LIMIT_BYTES = 64 << 20
# Left free on the disk beside the artifact: logs, compile caches and Ray's session need room too.
RESERVE_BYTES = 1 << 30
# A message is one console line: this many files are named, the others counted.
_NAMED_PROBLEMS = 12

log = logging.getLogger(__name__)

MatchCheck = Callable[[Manifest], list[str]]


class FetchError(Exception):
    """The artifact cannot be had; the message names each file, what was wanted and what was found."""


class _Stopped(Exception):
    """Another part failed for good, so this one was not tried any more."""


@dataclass(frozen=True)
class FetchSettings:
    """How hard to try. ``attempts`` counts tries of a part in a row without a byte gained."""

    workers: int = 16
    part_bytes: int = 16 << 20
    attempts: int = 8
    first_pause_s: float = 0.5
    report_every_s: float = 5.0
    reserve_bytes: int = RESERVE_BYTES
    progress_path: Path | None = None


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
            threading.Event().wait(_pause_s(settings, attempt))
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


def fetch(
    reader: BlobReader,
    digest: str,
    root: Path,
    *,
    check: MatchCheck | None = None,
    settings: FetchSettings | None = None,
    tell: Tell | None = None,
) -> Path:
    """Bring the artifact ``digest`` to ``root / digest`` and return that path.

    Args:
        reader: the store.
        digest: sha256 of the manifest, 64 hex digits.
        root: the artifacts' folder; everything lives there, so that files are linked and renamed into place.
        check: tells, from the manifest, why the artifact must not be used here (nothing: it may).
        settings: how hard to try.
        tell: told of progress.

    Raises:
        FetchError: what is wrong and with which files, all at once; nothing is at ``root / digest`` then.
    """
    settings = settings or FetchSettings()
    for folder in (root, root / "blobs", root / "parts"):
        folder.mkdir(parents=True, exist_ok=True)
    with (
        _locked(root / ".lock"),
        Progress(digest, settings.progress_path, settings.report_every_s, tell) as progress,
    ):
        target = root / digest
        there = is_whole(target, digest)
        manifest = local.read_local_manifest(target) if there else read_manifest(reader, digest, settings)
        problems = check(manifest) if check else []
        if problems:
            raise FetchError(f"artifact {digest} is not for this host: " + "; ".join(problems))
        if target.exists() and not there:
            local.remove(root, target)
        blobs = list({file.sha256: file for file in manifest.files}.values())
        progress.total = sum(blob.size for blob in blobs)
        if there and local.verified_in_this_boot(root, digest):
            progress.held(progress.total)
            log.info("artifact is there already", extra={"digest": digest})
            return target
        missing = _without_local(root, blobs, progress)
        if there and missing:
            # Damaged since it was made; whoever has files of it open keeps them.
            local.remove(root, target)
        if not there or missing:
            _ensure_room(root, manifest, missing, settings.reserve_bytes)
            _Transfer(reader, root, settings, progress).run(missing)
            try:
                return local.assemble(root, manifest)
            except OSError as error:
                raise FetchError(f"artifact {digest} cannot be put together in {root}: {error}") from error
        local.note_verified(root, digest)
    return target


def _without_local(root: Path, blobs: list[ArtifactFile], progress: Progress) -> list[ArtifactFile]:
    """The blobs that this host does not hold; those that it holds are hashed, and damaged ones removed."""

    def held(blob: ArtifactFile) -> bool:
        path = root / "blobs" / blob.sha256
        if not path.exists():
            return False
        if file_is(path, blob.size, blob.sha256):
            progress.held(blob.size)
            return True
        log.warning("a file on this host's disk is damaged; fetching it anew", extra={"path": blob.path})
        path.unlink()
        return False

    with ThreadPoolExecutor(4, thread_name_prefix="verify") as pool:
        return [blob for blob, has in zip(blobs, pool.map(held, blobs), strict=True) if not has]


def _ensure_room(root: Path, manifest: Manifest, missing: list[ArtifactFile], reserve: int) -> None:
    """Raise when what is still to come does not fit, even without what nothing uses."""
    needed = local.needed_bytes(root, missing)
    short = needed + reserve - shutil.disk_usage(root).free
    if short > 0:
        for gone in local.make_room(root, manifest, short):
            log.info("made room: removed %s", gone)
    free = shutil.disk_usage(root).free
    if needed + reserve > free:
        kept = [path.name[:12] for path in local.artifact_folders(root) if path.name != manifest.digest()]
        raise FetchError(
            f"no space for the artifact: {needed:,} bytes are still to come and {reserve:,} must stay free, "
            f"{root} has {free:,} free"
            + (f" beside artifacts in use ({', '.join(kept)})" if kept else "")
            + "; give the hosts a larger root volume"
        )


class _Transfer:
    """Brings blobs to ``<root>/blobs``, or says of each why not."""

    def __init__(self, reader: BlobReader, root: Path, settings: FetchSettings, progress: Progress) -> None:
        self._reader, self._root, self._settings, self._progress = reader, root, settings, progress
        self._stop = threading.Event()
        self._problems: dict[str, str] = {}
        self._damaged: list[tuple[BlobDownload, str]] = []

    def run(self, blobs: list[ArtifactFile]) -> None:
        """Bring them all; bytes that do not verify are fetched once more, from the start.

        Raises:
            FetchError: the blobs that cannot be had.
        """
        # The largest first: the last to end is then not the one that takes longest.
        ordered = sorted(blobs, key=lambda blob: (-blob.size, blob.path))
        downloads = [BlobDownload(blob, self._root / "parts", self._settings.part_bytes) for blob in ordered]
        for download in downloads:
            self._progress.held(download.held_bytes)
        self._round(downloads)
        damaged, self._damaged = self._damaged, []
        if damaged and not self._problems:
            for download, _ in damaged:
                log.warning("bytes do not verify; fetching anew", extra={"path": download.blob.path})
            self._round([download for download, _ in damaged])
        for download, found in self._damaged or (damaged if self._problems else []):
            self._problems[download.blob.path] = (
                f"wanted {download.blob.size:,} bytes with sha256 {download.blob.sha256}, "
                f"found {download.blob.size:,} bytes with sha256 {found}"
            )
        if self._stop.is_set():
            self._survey(ordered)
        if self._problems:
            named = [f"{path}: {problem}" for path, problem in sorted(self._problems.items())]
            more = len(named) - _NAMED_PROBLEMS
            raise FetchError(
                "; ".join(named[:_NAMED_PROBLEMS]) + (f"; and {more} more files" if more > 0 else "")
            )

    def _round(self, downloads: list[BlobDownload]) -> None:
        tasks = [(download, part) for download in downloads for part in download.missing()]
        whole = [download for download in downloads if not download.missing()]
        try:
            with ThreadPoolExecutor(self._settings.workers, thread_name_prefix="fetch") as pool:
                # Nothing is to come of these but their hash.
                list(pool.map(self._hash_whole, whole))
                list(pool.map(lambda task: self._bring(*task), tasks))
        finally:
            for download in downloads:
                download.close()

    def _hash_whole(self, download: BlobDownload) -> None:
        if download.catch_up():
            self._end(download)

    def _bring(self, download: BlobDownload, part: int) -> None:
        """One part, tried until it is whole; failures are kept by the blob's path."""
        if self._stop.is_set() or download.blob.path in self._problems:
            return
        path, writer = download.blob.path, None
        try:
            writer = download.write_part(part)
            self._read(writer, download.blob)
            if writer.finish():
                self._end(download)
            return
        except _Stopped:
            pass
        except (StoreRefusal, StoreUnavailable) as error:
            self._problems[path] = str(error)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            advice = "; give the hosts a larger root volume" if full else ""
            self._problems[path] = f"cannot be written to {self._root}: {error}{advice}"
        except BaseException:
            self._stop.set()
            raise
        self._stop.set()
        if writer is not None:
            writer.give_up()

    def _read(self, writer: PartWriter, blob: ArtifactFile) -> None:
        misses = 0
        while writer.written < writer.length:
            before = writer.written
            try:
                rest = writer.length - before
                stream = self._reader.stream(blob_key(blob.sha256), writer.start + before, rest, blob.size)
                with contextlib.closing(stream):  # type: ignore[type-var]
                    for chunk in stream:
                        if self._stop.is_set():
                            raise _Stopped
                        if writer.written + len(chunk) > writer.length:
                            raise StoreUnavailable("the store sent more than was asked for")
                        writer.write(chunk)
                        self._progress.received(len(chunk))
                if writer.written < writer.length:
                    raise StoreUnavailable(f"ended after {writer.written:,} of {writer.length:,} bytes")
            except StoreUnavailable as error:
                misses = 1 if writer.written > before else misses + 1
                if misses >= self._settings.attempts:
                    raise StoreUnavailable(f"no answer in {misses} tries: {error}") from error
                log.warning("a read broke off; going on", extra={"path": blob.path, "reason": str(error)})
                if self._stop.wait(_pause_s(self._settings, misses)):
                    raise _Stopped from error

    def _end(self, download: BlobDownload) -> None:
        """All bytes of a blob are there and hashed."""
        found = download.found_sha256()
        if found == download.blob.sha256:
            download.move_to(self._root / "blobs" / found)
        else:
            download.throw_away()
            self._progress.held(-download.blob.size)
            self._damaged.append((download, found))

    def _survey(self, blobs: list[ArtifactFile]) -> None:
        """A fetch that fails says of every blob at once what the store lacks of it."""

        def look(blob: ArtifactFile) -> tuple[str, str] | None:
            key = blob_key(blob.sha256)
            try:
                size = self._reader.size(key)
            except (StoreRefusal, StoreUnavailable) as error:
                return blob.path, str(error)
            if size == blob.size:
                return None
            return blob.path, f"wanted {blob.size:,} bytes, found {size:,} in the store ({key})"

        waiting = [blob for blob in blobs if blob.path not in self._problems and not self._has(blob)]
        with ThreadPoolExecutor(self._settings.workers) as pool:
            self._problems.update(item for item in pool.map(look, waiting) if item)

    def _has(self, blob: ArtifactFile) -> bool:
        return (self._root / "blobs" / blob.sha256).exists()


def _pause_s(settings: FetchSettings, attempt: int) -> float:
    return float(min(settings.first_pause_s * 2 ** (attempt - 1), 15.0))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold ``path`` locked; a second fetch on this host waits for the first."""
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
