"""The artifacts on a host's disk: one copy of each blob, linked into every artifact that has it.

``<root>/blobs/<sha256>`` are verified files, ``<root>/<digest>/`` artifacts made of hard links to them,
``<root>/<digest>.verified`` names the boot in which an artifact's bytes were hashed, ``<root>/parts/`` is
what a fetch is at work on. Who uses an artifact holds a shared lock on its folder (:func:`hold`), which the
kernel frees with the process. Only what nobody holds is ever evicted.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from app.compile.manifest import MANIFEST_NAME, ArtifactFile, Manifest
from app.node.blobs import stray_files

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_DIGEST = re.compile(r"[0-9a-f]{64}")

log = logging.getLogger(__name__)


class LocalArtifactError(Exception):
    """An artifact on this host cannot be used; the message says why and what to do."""


@dataclass
class Lease:
    """An artifact that is in use. It lasts until :meth:`release` or the end of the process."""

    folder: Path
    _descriptor: int

    def release(self) -> None:
        """The artifact is no longer in use."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def hold(folder: Path) -> Lease:
    """Keep an artifact from being evicted.

    Raises:
        LocalArtifactError: it is not there (any more).
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), folder.stat()):
                return Lease(folder, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        reason = "another took its place"
    except OSError as error:
        reason = error.strerror or str(error)
    raise LocalArtifactError(
        f"artifact {folder} cannot be used ({reason}): is neuronfleet-fetch done on this host?"
    )


def read_local_manifest(folder: Path) -> Manifest:
    """The manifest of an artifact's folder, which must be the one that the folder's name says.

    Raises:
        LocalArtifactError: there is none, or it is another.
    """
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST_NAME).read_bytes())
    except (OSError, ValidationError) as error:
        raise LocalArtifactError(
            f"{folder} has no usable {MANIFEST_NAME} ({type(error).__name__}): it is no artifact; "
            "`systemctl restart neuronfleet-fetch` fetches it"
        ) from error
    if manifest.digest() != folder.name:
        raise LocalArtifactError(
            f"{folder}: wanted a manifest with digest {folder.name}, found {manifest.digest()}; "
            "`systemctl restart neuronfleet-fetch` fetches it anew"
        )
    return manifest


def folder_problems(folder: Path, manifest: Manifest) -> list[str]:
    """Files that are missing, too many, of another size or no plain files. Their bytes are not read: they
    were hashed before the folder got its name."""
    wanted = {file.path: file.size for file in manifest.files} | {MANIFEST_NAME: -1}
    problems = []
    found = set()
    for base, folders, names in os.walk(folder, followlinks=False):
        for name in (*names, *(item for item in folders if Path(base, item).is_symlink())):
            path = Path(base, name)
            relative = path.relative_to(folder).as_posix()
            found.add(relative)
            status = path.lstat()
            if relative not in wanted:
                problems.append(f"{relative} is not in the manifest")
            elif path.is_symlink() or not path.is_file():
                problems.append(f"{relative} is not a plain file")
            elif wanted[relative] not in (-1, status.st_size):
                problems.append(f"{relative}: wanted {wanted[relative]:,} bytes, found {status.st_size:,}")
    return [*sorted(problems), *(f"{path} is missing" for path in sorted(set(wanted) - found))]


def is_whole(folder: Path, digest: str) -> bool:
    """Whether ``folder`` holds the artifact ``digest``: its manifest, all its files, and no others."""
    try:
        manifest = read_local_manifest(folder)
    except LocalArtifactError:
        return False
    return manifest.digest() == digest and not folder_problems(folder, manifest)


def verified_in_this_boot(root: Path, digest: str) -> bool:
    """Whether the artifact's bytes were hashed since the host started.

    Files are not synced when they are fetched, which would take as long again, so a crash of the host may
    lose bytes of files that were whole before it.
    """
    try:
        return (root / f"{digest}.verified").read_text() == BOOT_ID.read_text()
    except OSError:
        return False


def note_verified(root: Path, digest: str) -> None:
    """The artifact's bytes were hashed just now."""
    (root / f"{digest}.verified").write_text(BOOT_ID.read_text())


def assemble(root: Path, manifest: Manifest) -> Path:
    """Link verified blobs into an artifact's folder and give it its name in one step."""
    digest = manifest.digest()
    target, tree = root / digest, root / "parts" / f"tree-{digest}"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    for file in manifest.files:
        path = tree / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        os.link(root / "blobs" / file.sha256, path)
    (tree / MANIFEST_NAME).write_bytes(manifest.canonical_bytes())
    tree.rename(target)
    note_verified(root, digest)
    return target


def needed_bytes(root: Path, blobs: list[ArtifactFile]) -> int:
    """Bytes of disk that are still to be taken for ``blobs``."""
    needed = 0
    for blob in blobs:
        held = 0
        for path in (root / "blobs" / blob.sha256, root / "parts" / f"{blob.sha256}.part"):
            if path.exists():
                held = max(held, path.stat().st_blocks * 512)
        needed += max(0, blob.size - held)
    return needed


def artifact_folders(root: Path) -> list[Path]:
    """Artifacts of this host, the one that was made first at the front."""
    folders = [path for path in root.iterdir() if _DIGEST.fullmatch(path.name) and path.is_dir()]
    return sorted(folders, key=lambda path: path.stat().st_mtime)


def make_room(root: Path, wanted: Manifest, missing: int) -> Iterator[str]:
    """Remove what nothing uses until ``missing`` bytes more are free; tells what went.

    First all that abandoned fetches left, then artifacts that nobody holds, the oldest first. ``wanted`` and
    its blobs are never touched.
    """
    keep = {file.sha256 for file in wanted.files}
    target = shutil.disk_usage(root).free + missing

    def enough() -> bool:
        return shutil.disk_usage(root).free >= target

    for path in [*stray_files(root / "parts", keep), *_unlinked_blobs(root, keep)]:
        path.unlink(missing_ok=True)
        yield f"{path.name} of an abandoned fetch"
    for folder in artifact_folders(root):
        if enough():
            return
        if folder.name != wanted.digest() and _evict(root, folder):
            for blob in _unlinked_blobs(root, keep):
                blob.unlink(missing_ok=True)
            yield f"artifact {folder.name}"


def _evict(root: Path, folder: Path) -> bool:
    """Remove an artifact's folder unless somebody holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove(root, folder)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def remove(root: Path, folder: Path) -> None:
    """Remove an artifact's folder: under its name it is whole or not there, so it loses the name first."""
    gone = root / "parts" / f"gone-{folder.name}"
    shutil.rmtree(gone, ignore_errors=True)
    (root / f"{folder.name}.verified").unlink(missing_ok=True)
    folder.rename(gone)
    shutil.rmtree(gone)


def _unlinked_blobs(root: Path, keep: set[str]) -> list[Path]:
    """Blobs that no artifact has."""
    return [
        path for path in (root / "blobs").iterdir() if path.stat().st_nlink == 1 and path.name not in keep
    ]
