"""Fetches in processes that are killed at random moments; prints what came of them as one JSON document.

    python -m tests.unit.killed_fetches FOLDER KILLS

Each fetch runs in a process of its own (forked, so that fifty cost little) and is killed with SIGKILL. The
store counts what it sent in memory that outlives the process.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import random
import signal
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from app.compile.manifest import Manifest, blob_key
from app.node.blobs import BlobDownload
from app.node.fetch import fetch
from tests.unit.faulty_store import QUICK, FaultyStore, make_big


class CountingStore(FaultyStore):
    """Slow, and counts each chunk before it is given."""

    def __init__(self, content: dict[str, bytes], counter: mmap.mmap) -> None:
        super().__init__(content)
        self._counter = counter

    def stream(self, key: str, start: int, length: int, total: int) -> Iterator[bytes]:
        for chunk in super().stream(key, start, length, total):
            time.sleep(0.003)
            if key.startswith(blob_key("")):
                self._counter[:8] = struct.pack("q", sent(self._counter) + len(chunk))
            yield chunk


def sent(counter: mmap.mmap) -> int:
    """Bytes of blobs that the store gave, over all processes."""
    return int(struct.unpack("q", counter[:8])[0])


def held(root: Path, manifest: Manifest) -> int:
    """Bytes that a next run does not fetch again."""
    total = 0
    for file in manifest.files:
        if (root / "blobs" / file.sha256).exists():
            total += file.size
        elif (root / "parts").exists():
            total += BlobDownload(file, root / "parts", QUICK.part_bytes).held_bytes
    return total


def main(folder: Path, kills: int) -> dict[str, object]:
    manifest, content = make_big()
    digest, generator, counter = manifest.digest(), random.Random(11), mmap.mmap(-1, 8)
    done = rounds = 0
    read_again: list[int] = []
    whole = True
    while done < kills:
        root = folder / str(rounds)
        rounds += 1
        while True:
            before, counted = held(root, manifest), sent(counter)
            child = os.fork()
            if child == 0:
                fetch(CountingStore(content, counter), digest, root, settings=QUICK)
                os._exit(0)
            if done < kills:
                # From the first byte on: a moment before it would kill nothing that matters.
                until = time.monotonic() + 5
                while sent(counter) == counted and time.monotonic() < until:
                    time.sleep(0.001)
                time.sleep(generator.uniform(0, 0.04))
                os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            killed = os.WIFSIGNALED(status)
            done += killed
            if not killed:
                whole = whole and os.waitstatus_to_exitcode(status) == 0
                break
            read_again.append(sent(counter) - counted - (held(root, manifest) - before))
        for file in manifest.files:
            found = hashlib.sha256((root / digest / file.path).read_bytes()).hexdigest()
            whole = whole and found == file.sha256
    size = sum(file.size for file in manifest.files)
    return {
        "kills": done,
        "artifacts": rounds,
        "whole": whole,
        "most_read_again": max(read_again),
        "sent": sent(counter),
        "size": size,
        "in_flight": QUICK.workers * QUICK.part_bytes,
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
