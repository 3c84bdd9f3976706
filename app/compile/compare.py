"""How two artifacts differ: in what they say of themselves, and in their files."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from app.compile.manifest import Manifest


@dataclass(frozen=True)
class Difference:
    """From one artifact to another. ``shared_bytes`` lie in files that both have, whatever their paths;
    ``new_bytes`` are what a host that holds the first fetches for the second."""

    fields: dict[str, tuple[Any, Any]]
    added: list[str]
    removed: list[str]
    changed: list[str]
    shared_bytes: int
    new_bytes: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def compare(first: Manifest, second: Manifest) -> Difference:
    """What changes from ``first`` to ``second``; versions are compared one by one."""
    fields = {}
    one, two = (_flat(manifest) for manifest in (first, second))
    for name in sorted({*one, *two}):
        if one.get(name) != two.get(name):
            fields[name] = (one.get(name), two.get(name))
    before = {file.path: file for file in first.files}
    after = {file.path: file for file in second.files}
    held = {file.sha256 for file in first.files}
    blobs = {file.sha256: file.size for file in second.files}
    return Difference(
        fields=fields,
        added=sorted(set(after) - set(before)),
        removed=sorted(set(before) - set(after)),
        changed=sorted(
            path for path in set(before) & set(after) if before[path].sha256 != after[path].sha256
        ),
        shared_bytes=sum(size for sha256, size in blobs.items() if sha256 in held),
        new_bytes=sum(size for sha256, size in blobs.items() if sha256 not in held),
    )


def _flat(manifest: Manifest) -> dict[str, Any]:
    values = manifest.model_dump(mode="json", exclude={"files", "versions"})
    return values | {f"versions.{name}": version for name, version in manifest.versions.items()}
