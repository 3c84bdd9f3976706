"""A file system in memory for the guest: the files that a few programs really use, packed as cpio.

No distribution image is needed: Python, the modules that the guest's program imports, and the shared
libraries of all of them are taken from this machine, at the paths that they have here.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import stat
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

_LIBRARY = re.compile(r"(?:=> )?(/[^ ]+) \(0x")


def python_files(python: Path, modules: Iterable[str], search_path: Iterable[Path]) -> set[Path]:
    """The interpreter and every file behind the given modules and what they import."""
    script = (
        "import importlib, json, sys\n"
        f"for name in {list(modules)!r}: importlib.import_module(name)\n"
        "files = [sys.executable, sys._base_executable]\n"
        "for module in list(sys.modules.values()):\n"
        "    for name in (getattr(module, '__file__', None), getattr(module, '__cached__', None)):\n"
        "        if name: files.append(name)\n"
        "import encodings, os; files.append(os.__file__)\n"
        "print(json.dumps(files))\n"
    )
    environment = {**os.environ, "PYTHONPATH": ":".join(str(path) for path in search_path)}
    done = subprocess.run(
        [str(python), "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    return {Path(name) for name in json.loads(done.stdout) if Path(name).is_file()}


def with_libraries(files: Iterable[Path]) -> set[Path]:
    """The files, and the shared libraries that the dynamic loader would give to the programs among them."""
    everything = set(files)
    for path in list(everything):
        with path.open("rb") as file:
            if file.read(4) != b"\x7fELF":
                continue
        done = subprocess.run(["ldd", str(path)], capture_output=True, text=True, check=False)
        everything |= {Path(name) for name in _LIBRARY.findall(done.stdout)}
    return everything


def write_initramfs(
    target: Path, files: Iterable[Path], extra: Mapping[str, bytes], links: Mapping[str, str]
) -> None:
    """Write a gzipped cpio archive.

    Args:
        target: the archive.
        files: files of this machine; symbolic links are followed and also kept as links.
        extra: path in the guest to the content of a file that is executable there.
        links: path in the guest to what a symbolic link there points at.
    """
    archive = _Archive()
    for path in sorted(set(files)):
        while path.is_symlink():
            archive.link(str(path.absolute()), str(path.readlink()))
            path = Path(os.path.normpath(path.parent / path.readlink()))
        archive.file(str(path.resolve()), path.read_bytes(), path.stat().st_mode, int(path.stat().st_mtime))
        if path.absolute() != path.resolve():  # a folder on the way is a link (/lib64)
            archive.file(str(path.absolute()), path.read_bytes(), path.stat().st_mode, 0)
    for name, content in extra.items():
        archive.file(name, content, stat.S_IFREG | 0o755, 0)
    for name, points_at in links.items():
        archive.link(name, points_at)
    for folder in ("/proc", "/sys", "/dev", "/run", "/tmp", "/etc"):
        archive.folder(folder)
    with gzip.GzipFile(target, "wb", compresslevel=1, mtime=0) as file:
        file.write(archive.finish())


class _Archive:
    """The "new ASCII" cpio format, which the kernel unpacks."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._names: set[str] = set()

    def folder(self, name: str) -> None:
        if name in ("", "/") or name in self._names:
            return
        self.folder(os.path.dirname(name))  # noqa: PTH120 - a path of the guest
        self._entry(name, stat.S_IFDIR | 0o755, b"", 0)

    def file(self, name: str, content: bytes, mode: int, mtime: int) -> None:
        if name not in self._names:
            self.folder(os.path.dirname(name))  # noqa: PTH120
            self._entry(name, mode, content, mtime)

    def link(self, name: str, points_at: str) -> None:
        if name not in self._names:
            self.folder(os.path.dirname(name))  # noqa: PTH120
            self._entry(name, stat.S_IFLNK | 0o777, points_at.encode(), 0)

    def finish(self) -> bytes:
        self._entry("TRAILER!!!", 0, b"", 0)
        return b"".join(self._parts)

    def _entry(self, name: str, mode: int, content: bytes, mtime: int) -> None:
        self._names.add(name)
        encoded = name.lstrip("/").encode() + b"\0"
        fields = [len(self._names), mode, 0, 0, 1, mtime, len(content), 0, 0, 0, 0, len(encoded), 0]
        header = b"070701" + b"".join(b"%08X" % field for field in fields)
        self._parts.append(_padded(header + encoded) + _padded(content))


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)
