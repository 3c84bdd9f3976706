"""A store in memory that fails as told, for tests of the fetch; few imports, so that a process of its
own starts quickly."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

from app.compile.manifest import ArtifactFile, Manifest, blob_key, manifest_key
from app.node.fetch import FetchSettings
from app.node.store import StoreRefusal, StoreUnavailable

QUICK = FetchSettings(workers=4, attempts=3, first_pause_s=0.001, reserve_bytes=0, part_bytes=4000)


def make_artifact(files: dict[str, bytes], **changes: Any) -> tuple[Manifest, dict[str, bytes]]:
    """A manifest and the store's content by key."""
    values: dict[str, Any] = {
        "model": "m",
        "model_digest": "0" * 64,
        "profile": "cpu",
        "versions": {},
        "tp_degree": 1,
        "batch_size": 1,
        "max_model_len": 1,
        "files": tuple(
            ArtifactFile(path=path, size=len(data), sha256=hashlib.sha256(data).hexdigest())
            for path, data in files.items()
        ),
    }
    manifest = Manifest(**(values | changes))
    content = {blob_key(hashlib.sha256(data).hexdigest()): data for data in files.values()}
    return manifest, content | {manifest_key(manifest.digest()): manifest.canonical_bytes()}


class FaultyStore:
    """A store in memory. ``faults`` maps a key to the faults of its next streams, one each."""

    def __init__(self, content: dict[str, bytes], chunk: int = 1000) -> None:
        self.content = content
        self.faults: dict[str, list[str]] = {}
        self.streams: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.chunk = chunk

    def read(self, key: str, limit: int) -> bytes:
        return b"".join(self.stream(key, 0, self.size(key), self.size(key)))

    def size(self, key: str) -> int:
        if key not in self.content:
            raise StoreRefusal(f"{key} does not exist")
        return len(self.content[key])

    def stream(self, key: str, start: int, length: int, total: int) -> Iterator[bytes]:
        if self.size(key) != total:
            raise StoreRefusal(f"wanted {total:,} bytes, found {self.size(key):,} in the store ({key})")
        self.streams[key] += 1
        fault = self.faults[key].pop(0) if self.faults.get(key) else ""
        data = self.content[key]
        end = start + (length if fault not in ("reset", "short") else length // 2)
        for position in range(start, end, self.chunk):
            chunk = data[position : min(position + self.chunk, end)]
            self.sent[key] += len(chunk)
            yield chunk
        if fault == "reset":
            raise StoreUnavailable("connection reset")
        if fault == "late reset":
            raise StoreUnavailable("connection reset")


def make_big() -> tuple[Manifest, dict[str, bytes]]:
    generator = random.Random(7)
    return make_artifact({f"f{n}": generator.randbytes(120_000) for n in range(6)})
