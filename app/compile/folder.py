"""A model's folder as an artifact: what belongs to it, its manifest, and whether it is still that."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from pydantic import ValidationError

from app.compile.manifest import MANIFEST_NAME, ArtifactFile, Manifest
from app.plan.profiles import get_profile

CHUNK_BYTES = 1 << 20
COMPILED_FOLDERS = ("compiled", "neuron-compiled-artifacts")
"""What a compilation adds to a model's own files, and so no part of the model's digest."""

Advance = Callable[[int], None]
"""Told how many more bytes were read."""


class ArtifactError(Exception):
    """A folder is not an artifact, or not the one that it says it is; the message holds every fault."""


def artifact_paths(folder: Path) -> list[PurePosixPath]:
    """The files that make up an artifact, relative and sorted; hidden ones and the manifest are left out.

    Links to files count as the files (a hub's snapshot is made of them).

    Raises:
        ArtifactError: ``folder`` is no folder, or a link in it leads nowhere.
    """
    if not folder.is_dir():
        raise ArtifactError(f"{folder} is not a folder; give the folder that holds the model's files")
    found, dangling = [], []
    for base, folders, names in os.walk(folder, followlinks=False):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(base, name)
            relative = PurePosixPath(path.relative_to(folder).as_posix())
            if name.startswith(".") or str(relative) == MANIFEST_NAME:
                continue
            if path.is_file():
                found.append(relative)
            else:
                dangling.append(str(relative))
    if dangling:
        raise ArtifactError(
            f"{folder}: {', '.join(sorted(dangling))} lead nowhere or are no files; copy the model whole"
        )
    return sorted(found)


def model_faults(folder: Path) -> list[str]:
    """What a model's folder lacks: its config.json, or shards that its safetensors index names."""
    faults = []
    try:
        json.loads((folder / "config.json").read_text())
    except OSError:
        faults.append(f"{folder} has no config.json: is it a model in Hugging Face's format?")
    except ValueError as error:
        faults.append(f"{folder}/config.json is not JSON: {error}")
    for index in sorted(folder.glob("*.safetensors.index.json")):
        try:
            named = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            faults.append(f"{index.name} is no safetensors index: {type(error).__name__} {error}")
            continue
        absent = sorted(str(name) for name in named if not (folder / str(name)).is_file())
        if absent:
            faults.append(f"{index.name} names {', '.join(absent)}, which {folder} does not hold")
    return faults


def hash_file(path: Path, advance: Advance | None = None) -> str:
    """sha256 of a file, in hex."""
    hasher = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            hasher.update(chunk)
            if advance:
                advance(len(chunk))
    return hasher.hexdigest()


def hash_files(
    folder: Path, paths: list[PurePosixPath], advance: Advance | None = None
) -> list[ArtifactFile]:
    """Size and sha256 of each file, several at a time (hashlib lets other threads run)."""

    def one(path: PurePosixPath) -> ArtifactFile:
        full = folder / path
        return ArtifactFile(path=str(path), size=full.stat().st_size, sha256=hash_file(full, advance))

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(one, paths))


def model_digest(files: list[ArtifactFile]) -> str:
    """One sha256 over the model's own files: their paths, sizes and digests, compiled files left out."""
    own = [
        file for file in files if file.path.split("/", 1)[0] not in COMPILED_FOLDERS or "/" not in file.path
    ]
    lines = "".join(f"{file.sha256} {file.size} {file.path}\n" for file in sorted(own, key=lambda f: f.path))
    return hashlib.sha256(lines.encode()).hexdigest()


def build_manifest(
    folder: Path,
    *,
    model: str,
    profile: str,
    tp_degree: int,
    batch_size: int,
    max_model_len: int,
    dtype: str = "bf16",
    buckets: tuple[int, ...] = (),
    versions: Mapping[str, str] | None = None,
    instance_family: str = "inf2",
    advance: Advance | None = None,
) -> Manifest:
    """Hash a model's folder and say what it is.

    Args:
        folder: model in Hugging Face's format, compiled files beneath it.
        model: the model's name, as clients will say it.
        profile: engine profile that it was made with.
        tp_degree: cores of one replica.
        batch_size: sequences that the graphs hold.
        max_model_len: tokens of prompt and answer.
        dtype: weights as ``bf16`` or ``int8``.
        buckets: compiled lengths in tokens.
        versions: what it was made with; None: the profile's own.
        instance_family: hardware that it is for.
        advance: told of bytes hashed.

    Raises:
        ArtifactError: the folder is not a whole model; every fault is named.
        UnknownNameError: no such profile.
    """
    known = get_profile(profile)
    paths = artifact_paths(folder)
    faults = model_faults(folder)
    if not paths:
        faults.append(f"{folder} holds no file")
    if faults:
        raise ArtifactError("; ".join(faults))
    files = hash_files(folder, paths, advance)
    return Manifest(
        model=model,
        model_digest=model_digest(files),
        profile=profile,
        versions=dict(known.versions if versions is None else versions),
        instance_family=instance_family,
        tp_degree=tp_degree,
        batch_size=batch_size,
        max_model_len=max_model_len,
        buckets=buckets,
        dtype=dtype,
        files=tuple(files),
    )


def read_manifest(folder: Path) -> Manifest:
    """The manifest beside an artifact's files.

    Raises:
        ArtifactError: there is none, or it is none that this version reads.
    """
    path = folder / MANIFEST_NAME
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ArtifactError(
            f"{folder} has no {MANIFEST_NAME} ({error.strerror}): it is no artifact"
        ) from error
    except ValidationError as error:
        reasons = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise ArtifactError(f"{path} is no manifest that this version reads: {reasons}") from error


def folder_faults(folder: Path, manifest: Manifest, advance: Advance | None = None) -> list[str]:
    """Every file that is missing, too many, or not what the manifest says; empty: the folder is whole."""
    present = {str(path) for path in artifact_paths(folder)}
    return [*_wrong_files(folder, manifest, present, advance), *_extra_files(manifest, present)]


def _wrong_files(
    folder: Path, manifest: Manifest, present: set[str], advance: Advance | None
) -> Iterator[str]:
    for file in manifest.files:
        if file.path not in present:
            yield f"{file.path} is missing"
            continue
        size = (folder / file.path).stat().st_size
        if size != file.size:
            yield f"{file.path}: wanted {file.size:,} bytes, found {size:,}"
            continue
        found = hash_file(folder / file.path, advance)
        if found != file.sha256:
            yield f"{file.path}: wanted sha256 {file.sha256}, found {found}"


def _extra_files(manifest: Manifest, present: set[str]) -> list[str]:
    extra = sorted(present - {file.path for file in manifest.files})
    return [f"{path} is not in the manifest" for path in extra]
