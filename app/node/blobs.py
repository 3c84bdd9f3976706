"""One blob on its way from the store to the disk: written in parts at their offsets, hashed in order.

``<sha256>.part`` holds the bytes, ``<sha256>.parts`` the journal: eight bytes with the part size, then one
byte a part, 1 when the part is whole. A journal byte is written after its part, so a process that is killed
loses the parts that were in flight and no others. What a crash of the whole machine does to them is found by
the sha256, which covers every byte in the run that gives the blob its name.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from app.compile.manifest import ArtifactFile

READ_BYTES = 1 << 20
_HEADER_BYTES = 8


def hash_range(descriptor: int, hasher: hashlib._Hash, start: int, length: int) -> None:
    """Feed ``length`` bytes of a file from offset ``start`` to ``hasher``; fewer if the file ends."""
    end = start + length
    while start < end:
        chunk = os.pread(descriptor, min(READ_BYTES, end - start), start)
        if not chunk:
            return
        hasher.update(chunk)
        start += len(chunk)


def file_is(path: Path, size: int, sha256: str) -> bool:
    """Whether ``path`` is a file with these bytes; reads it whole when its size is right."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if os.fstat(descriptor).st_size != size:
            return False
        hasher = hashlib.sha256()
        hash_range(descriptor, hasher, 0, size)
        return hasher.hexdigest() == sha256
    finally:
        os.close(descriptor)


class BlobDownload:
    """A blob's parts. Parts may be written by several threads at once, each part by one of them.

    The hash follows the parts in order: the thread that brings the first part not yet hashed hashes it as it
    streams; parts that came before their turn are read back from the page cache when it is theirs.
    """

    def __init__(self, blob: ArtifactFile, folder: Path, part_bytes: int) -> None:
        self.blob = blob
        self.broken = False
        self._part_bytes = part_bytes
        self._path = folder / f"{blob.sha256}.part"
        self._journal_path = folder / f"{blob.sha256}.parts"
        self._count = max(1, -(-blob.size // part_bytes))
        self._lock = threading.Lock()
        self._data = self._journal = -1
        self._done = bytearray(self._count)
        self._hasher = hashlib.sha256()
        self._hashed = 0
        self._hashing = self._ended = False
        self._read_journal()

    @property
    def held_bytes(self) -> int:
        """Bytes of parts that are whole."""
        return sum(self.extent(part)[1] for part in range(self._count) if self._done[part])

    def missing(self) -> list[int]:
        """Parts that are still to come, in order."""
        return [part for part in range(self._count) if not self._done[part]]

    def extent(self, part: int) -> tuple[int, int]:
        """Offset and length of a part, in bytes."""
        start = part * self._part_bytes
        return start, min(self._part_bytes, self.blob.size - start)

    def write_part(self, part: int) -> PartWriter:
        """A writer for one part; give its ``finish`` a whole part only."""
        with self._lock:
            self._open()
            ordered = part == self._hashed and not self._hashing
            self._hashing = self._hashing or ordered
        return PartWriter(self, part, ordered)

    def _finish(self, part: int, ordered: bool) -> bool:
        os.pwrite(self._journal, b"\x01", _HEADER_BYTES + part)
        with self._lock:
            self._done[part] = 1
            if ordered:
                self._hashed += 1
                self._hashing = False
        return self.catch_up()

    def _give_up(self, ordered: bool) -> None:
        """A part cannot be had: what its thread hashed of it makes the whole hash worthless."""
        with self._lock:
            self.broken = self.broken or ordered

    def catch_up(self) -> bool:
        """Hash the whole parts whose turn it is; True for the one caller that has hashed the last."""
        while True:
            with self._lock:
                if self._hashed == self._count:
                    first, self._ended = not self._ended, True
                    return first
                if self.broken or self._hashing or not self._done[self._hashed]:
                    return False
                self._hashing, part = True, self._hashed
                self._open()
            hash_range(self._data, self._hasher, *self.extent(part))
            with self._lock:
                self._hashed += 1
                self._hashing = False

    def found_sha256(self) -> str:
        """What the bytes hash to, once ``catch_up`` said True."""
        return self._hasher.hexdigest()

    def move_to(self, path: Path) -> None:
        """Give the whole blob its name, readable by all and writable by none."""
        os.fchmod(self._data, 0o444)
        self.close()
        self._path.rename(path)
        self._journal_path.unlink()

    def throw_away(self) -> None:
        """Forget every part."""
        self.close()
        for path in (self._journal_path, self._path):
            path.unlink(missing_ok=True)
        self._start_over()

    def close(self) -> None:
        """Close the files; another part opens them again."""
        with self._lock:
            for descriptor in (self._data, self._journal):
                if descriptor >= 0:
                    os.close(descriptor)
            self._data = self._journal = -1

    def _start_over(self) -> None:
        self._done = bytearray(self._count)
        self._hasher = hashlib.sha256()
        self._hashed = 0
        self._hashing = self._ended = self.broken = False

    def _header(self) -> bytes:
        return self._part_bytes.to_bytes(_HEADER_BYTES, "little")

    def _read_journal(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            journal = self._journal_path.read_bytes()
            size = self._path.stat().st_size
            if journal[:_HEADER_BYTES] != self._header() or size > self.blob.size:
                self.throw_away()
                return
            for part, mark in enumerate(journal[_HEADER_BYTES : _HEADER_BYTES + self._count]):
                start, length = self.extent(part)
                self._done[part] = mark == 1 and start + length <= size

    def _open(self) -> None:
        if self._data < 0:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            self._data = os.open(self._path, flags, 0o600)
            self._journal = os.open(self._journal_path, flags, 0o600)
            os.pwrite(self._journal, self._header(), 0)


class PartWriter:
    """Writes one part from its beginning to its end; ``written`` is how many bytes it has."""

    def __init__(self, download: BlobDownload, part: int, ordered: bool) -> None:
        self.written = 0
        self.start, self.length = download.extent(part)
        self._download, self._part, self._ordered = download, part, ordered
        self._data, self._hasher = download._data, download._hasher

    def write(self, chunk: bytes) -> None:
        """Append a chunk to the part."""
        offset, view = self.start + self.written, memoryview(chunk)
        while view:
            count = os.pwrite(self._data, view, offset)
            offset, view = offset + count, view[count:]
        if self._ordered:
            self._hasher.update(chunk)
        self.written += len(chunk)

    def finish(self) -> bool:
        """The part is whole; True when with it the blob is whole and hashed."""
        return self._download._finish(self._part, self._ordered)

    def give_up(self) -> None:
        """The part will not be finished."""
        self._download._give_up(self._ordered)


def stray_files(parts: Path, wanted: set[str]) -> Iterator[Path]:
    """Parts and journals of blobs that are not ``wanted``: what abandoned fetches left."""
    for path in parts.glob("*.part*"):
        if path.name.split(".")[0] not in wanted:
            yield path
