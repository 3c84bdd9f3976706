"""The distribution's mirror as machines with a way out see it: a few packages, served on the bridge.

The packages are the image's own distribution's, fetched when the image is built; a machine finds them under
the name that its apt sources have, because the resolver says that this name is the bridge.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from rehearsal.interfaces import RehearsalError
from rehearsal.processes import run

PACKAGES = ("numactl", "libnuma1")
"""What hosts install at boot (``numactl_from: mirror``)."""


def host_sources(suite: str) -> list[str]:
    """This machine's own apt sources of ``suite``, as one-line sources; none when it runs another release."""
    fields_wanted = "$(REPO_URI) $(CODENAME) $(SUITE) $(RELEASE) $(COMPONENT)"
    asked = ["apt-get", "indextargets", "--format", fields_wanted, "Identifier: Packages"]
    try:
        shown = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return []
    sources = []
    for line in shown.stdout.splitlines():
        fields = line.split()
        if len(fields) < 4:
            continue
        uri, release, component = fields[0], fields[-2], fields[-1]
        if component == "main" and release in (suite, f"{suite}-updates", f"{suite}-security"):
            sources.append(f"deb {uri} {release} main")
    sources = list(dict.fromkeys(sources))
    # Without the release itself they are another distribution's; mmdebstrap then uses its own default.
    return sources if any(line.split()[2] == suite for line in sources) else []


def download_script() -> str:
    """Shell, run in the image's root: fetch :data:`PACKAGES` into ``/var/tmp/neuronfleet-mirror``."""
    return (
        "set -eu; mkdir -p /var/tmp/neuronfleet-mirror; cd /var/tmp/neuronfleet-mirror; apt-get update; "
        f"apt-get -o APT::Sandbox::User=root download {' '.join(PACKAGES)}; rm -rf /var/lib/apt/lists/*"
    )


def make(debs: Path, folder: Path, root: Path, suite: str) -> str:
    """Make an apt repository of ``debs`` in ``folder``, laid out as the mirror that the image's apt asks.

    Returns:
        The URI (http) that machines name in their source.

    Raises:
        RehearsalError: the image names no mirror, or the index cannot be made.
    """
    uri = _mirror_uri(root, suite)
    base = folder / urlsplit(uri).path.strip("/")
    pool = base / "pool/main"
    pool.mkdir(parents=True)
    for deb in sorted(debs.glob("*.deb")):
        shutil.copy(deb, pool / deb.name.replace("%3a", "_"))
    architecture = run(["dpkg", "--print-architecture"], "name the architecture").strip()
    index = run(
        ["sh", "-c", 'cd "$1" && dpkg-scanpackages --multiversion pool 2>/dev/null', "sh", str(base)],
        "index the packages' mirror",
    )
    if index.count("Package: ") < len(PACKAGES):
        raise RehearsalError(
            f"the packages' mirror misses some of {', '.join(PACKAGES)}; it has: {index[:200]}"
        )
    content = index.encode()
    place = f"main/binary-{architecture}/Packages"
    packages = base / "dists" / suite / place
    packages.parent.mkdir(parents=True)
    packages.write_bytes(content)
    (base / "dists" / suite / "Release").write_text(
        f"Origin: NeuronFleet rehearsal\nSuite: {suite}\nCodename: {suite}\nArchitectures: {architecture}\n"
        f"Components: main\nDate: Mon, 01 Jan 2024 00:00:00 UTC\nSHA256:\n"
        f" {hashlib.sha256(content).hexdigest()} {len(content)} {place}\n"
    )
    return uri


def _mirror_uri(root: Path, suite: str) -> str:
    for line in (root / "etc/apt/sources.list").read_text().splitlines():
        fields = [field for field in line.split() if not field.startswith("[")]
        if len(fields) >= 3 and fields[0] == "deb" and fields[2] == suite:
            split = urlsplit(fields[1])
            return f"http://{split.netloc}{split.path.rstrip('/')}"
    raise RehearsalError(f"{root}/etc/apt/sources.list names no mirror of {suite}")


class _Quiet(SimpleHTTPRequestHandler):
    server_version = "neuronfleet-mirror"

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: apt's requests are no news."""


class MirrorServer:
    """Serves ``folder`` at ``address``:80 from a thread. Who may reach it is nftables' work."""

    def __init__(self, folder: Path, address: str, port: int = 80) -> None:
        try:
            self._server = ThreadingHTTPServer((address, port), partial(_Quiet, directory=str(folder)))
        except OSError as error:
            raise RehearsalError(f"cannot serve the packages' mirror on {address}:{port}: {error}") from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="mirror", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
