"""The machines' image: a Debian root on which the component documents of ``ami/`` were run.

An image is named by the digest of all that decides its contents (documents, engine lock, emulated tools), so
it is built once and a change of any of them builds another. It is built under a temporary name and moved into
place when whole; a build that was interrupted leaves only what the next one removes first.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

from rehearsal import mirror
from rehearsal.component import Component, fill, load_component
from rehearsal.interfaces import RehearsalError

REPOSITORY = Path(__file__).resolve().parent.parent
SUITE = "bookworm"
_FORMAT = "1"
"""Raised when this file builds an image otherwise from the same inputs."""
_SOURCE = "/run/neuronfleet-source"
# What any parent image of Image Builder holds before components run: systemd, apt, certificates.
_PARENT_PACKAGES = "systemd,systemd-sysv,dbus,ca-certificates,apt"

# A step runs in PID and mount namespaces of its own: it ends whole, with all that it mounted in the root,
# also when the process that builds is killed. Else removing an unfinished root could meet a mounted /dev.
_CONTAINED = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--propagation", "private"]
_CONTAINED += ["--pid", "--fork", "--kill-child=KILL", "--mount-proc", "--"]

Variant = Literal["stock", "baked"]
_DOCUMENTS: dict[str, tuple[str, ...]] = {
    "stock": ("stock-dlami-emulated.yml",),
    "baked": ("stock-dlami-emulated.yml", "neuronfleet-host.yml"),
}
Progress = Callable[[str], None]


@dataclass(frozen=True)
class RootImage:
    """A built image: ``root/`` (never written to again), ``mirror/`` (packages), ``image.json``."""

    folder: Path

    @property
    def root(self) -> Path:
        """The root file system that machines' overlays lie on."""
        return self.folder / "root"

    @property
    def mirror(self) -> Path:
        """The packages' mirror that goes with it, see :mod:`rehearsal.mirror`."""
        return self.folder / "mirror"

    @property
    def ca_store(self) -> bytes:
        """The image's own CA store, PEM."""
        return (self.root / "etc/ssl/certs/ca-certificates.crt").read_bytes()

    @property
    def mirror_uri(self) -> str:
        """Where its apt looks for packages; machines find the rehearsal's mirror under this name."""
        return str(json.loads((self.folder / "image.json").read_text())["mirror_uri"])

    @property
    def trusted_apt_source(self) -> str:
        """The machine's one apt source: the mirror is made here, so it carries no signature."""
        return f"deb [trusted=yes] {self.mirror_uri} {SUITE} main"


def image_key(variant: Variant, repository: Path = REPOSITORY) -> str:
    """Digest (64 hex digits) of everything that decides an image's contents."""
    digest = hashlib.sha256(f"{_FORMAT} {variant} {SUITE} {_PARENT_PACKAGES}".encode())
    for path in _inputs(variant, repository):
        digest.update(f"\0{path.relative_to(repository)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _inputs(variant: Variant, repository: Path) -> list[Path]:
    tools = sorted(p for p in (repository / "rehearsal/neuron").iterdir() if p.name.startswith("neuron-"))
    documents = [repository / "ami" / name for name in _DOCUMENTS[variant]]
    return [*documents, repository / "requirements/engine-cpu.lock", *tools]


def find_image(home: Path, variant: Variant = "stock") -> RootImage | None:
    """The image of ``variant`` when it is built already."""
    image = RootImage(home / "image" / f"{variant}-{image_key(variant)[:16]}")
    return image if (image.folder / "image.json").exists() else None


def ensure_image(home: Path, progress: Progress = lambda _: None, variant: Variant = "stock") -> RootImage:
    """The image of ``variant``, built unless it is there; two callers build it once.

    Args:
        home: the rehearsal's home; images live in ``home/image``.
        progress: told what is being done, a line at a time.
        variant: ``stock`` holds what the DLAMI holds, ``baked`` what NeuronFleet's own image holds.

    Raises:
        RehearsalError: a step failed; names it, its last line and the log.
    """
    if found := find_image(home, variant):
        return found
    key = image_key(variant)
    images = home / "image"
    image = RootImage(images / f"{variant}-{key[:16]}")
    images.mkdir(parents=True, exist_ok=True)
    with _locked(images / ".lock", progress):
        if (image.folder / "image.json").exists():
            return image
        for left in images.glob(".building-*"):
            shutil.rmtree(left)
        building = images / f".building-{key[:16]}"
        (building / "root").mkdir(parents=True)
        log_path = images / f"build-{variant}.log"
        started = time.monotonic()
        try:
            with log_path.open("w") as log:
                _build(building, variant, _Steps(log, log_path, progress))
            building.rename(image.folder)
            _remove_older(home, image)
        except BaseException:
            progress("removing the unfinished image")
            shutil.rmtree(building, ignore_errors=True)
            raise
        finally:
            # nspawn leaves its mark when it is killed.
            with contextlib.suppress(OSError):
                (Path("/run/systemd/nspawn/propagate") / _machine()).rmdir()
        progress(f"image {image.folder.name} built in {time.monotonic() - started:.0f} s")
    return image


def _remove_older(home: Path, image: RootImage) -> None:
    """Remove images of the same variant that this one replaces, unless a machine still lies on one."""
    used = {path.read_text().strip() for path in (home / "machines").glob("*/image")}
    for folder in image.folder.parent.glob(image.folder.name.partition("-")[0] + "-*"):
        if folder != image.folder and folder.name not in used:
            # Without image.json it is no image any more, wherever the removal is interrupted.
            (folder / "image.json").unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for the image that another process builds")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@dataclass
class _Steps:
    """Runs the build's commands, output to the log."""

    log: TextIO
    log_path: Path
    progress: Progress

    def run(self, name: str, argv: list[str], *, timeout_s: float, attempts: int = 1) -> None:
        """Run ``argv``; tries again up to ``attempts`` times.

        Raises:
            RehearsalError: it failed or took longer than ``timeout_s``.
        """
        self.progress(name)
        if shutil.which(argv[0]) is None:
            raise RehearsalError(f"{argv[0]} is not installed: run scripts/debian_packages.sh")
        argv = [*_CONTAINED, *argv]
        for attempt in range(1, attempts + 1):
            self.log.write(f"\n=== {name} (attempt {attempt} of {attempts})\n")
            self.log.flush()
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = child.wait(timeout_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if child.poll() is None:
                    # Interrupted or too slow. Its PID and mount namespaces end with it.
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
            if code == 0:
                return
        how = f"took longer than {timeout_s:.0f} s" if code is None else f"ended with exit code {code}"
        raise RehearsalError(
            f"building the machines' image: step {name!r} {how}: {_reason(self.log_path)}. "
            f"Its log: {self.log_path}"
        )


def _reason(log: Path) -> str:
    """The last line of the log that says something: nspawn adds one of its own where /run is no tmpfs."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith(("Attempted to remove disk file system", "==="))]
    return said[-1] if said else "no output"


def _build(building: Path, variant: Variant, steps: _Steps) -> None:
    root = building / "root"
    sources = mirror.host_sources(SUITE)
    components = [load_component(REPOSITORY / "ami" / name) for name in _DOCUMENTS[variant]]
    bootstrap = ["mmdebstrap", "--mode=root", "--variant=minbase", f"--include={_PARENT_PACKAGES}"]
    bootstrap += ["--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-exclude=/usr/share/man/*"]
    bootstrap += ["--dpkgopt=path-exclude=/usr/share/locale/*", "--dpkgopt=force-unsafe-io"]
    steps.run("the parent image (Debian)", [*bootstrap, SUITE, str(root), *sources], timeout_s=900)
    wheels = _wheels()
    # Each document makes an image of the one before it, as NeuronFleet's recipe does of the finished DLAMI.
    for component in components:
        for phase in ("build", "validate"):
            _run_phase(component, phase, root, wheels, steps)
    download = ["sh", "-c", mirror.download_script()]
    steps.run("the packages' mirror", [*_nspawn(root, wheels), *download], timeout_s=300, attempts=2)
    uri = mirror.make(root / "var/tmp/neuronfleet-mirror", building / "mirror", root, SUITE)
    shutil.rmtree(root / "var/tmp/neuronfleet-mirror")
    (building / "image.json").write_text(json.dumps({"variant": variant, "mirror_uri": uri}) + "\n")


def _run_phase(component: Component, phase: str, root: Path, wheels: Path | None, steps: _Steps) -> None:
    values = component.defaults() | ({"Source": _SOURCE} if component.name.startswith("stock") else {})
    for step in component.phase(phase):
        for command in step.inputs.commands:
            argv = [*_nspawn(root, wheels), "bash", "-c", fill(command, values)]
            name = f"{component.name}: {phase}: {step.name}"
            try:
                steps.run(name, argv, timeout_s=step.timeoutSeconds, attempts=step.maxAttempts)
            except RehearsalError:
                if step.onFailure == "Abort":
                    raise


def _nspawn(root: Path, wheels: Path | None) -> list[str]:
    """The command that runs another inside the root, on this machine's network, as Image Builder would."""
    argv = ["systemd-nspawn", "--quiet", "--settings=no", "--register=no", "--keep-unit", "--pipe"]
    argv += [f"--machine={_machine()}", f"--directory={root}", "--as-pid2", "--resolv-conf=copy-host"]
    argv += ["--timezone=off", "--link-journal=no", "--setenv=HOME=/root", "--setenv=LANG=C.UTF-8"]
    source = {"requirements": REPOSITORY / "requirements", "neuron": REPOSITORY / "rehearsal/neuron"}
    source["uv"] = _uv()
    if wheels is not None:
        source["wheels"] = wheels
    argv += [f"--bind-ro={path}:{_SOURCE}/{name}" for name, path in source.items()]
    if wheels is None:
        argv.append(f"--tmpfs={_SOURCE}/wheels")
    cache = _uv_cache()
    cache.mkdir(parents=True, exist_ok=True)
    argv += [f"--bind={cache}:/run/neuronfleet-uv-cache", "--setenv=UV_CACHE_DIR=/run/neuronfleet-uv-cache"]
    store = Path(os.environ.get("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt"))
    if store.exists():
        # A network that ends TLS itself has its authority in this machine's store.
        argv += [
            f"--bind-ro={store}:/run/neuronfleet-ca.pem",
            "--setenv=SSL_CERT_FILE=/run/neuronfleet-ca.pem",
        ]
    for name, value in os.environ.items():
        if name.lower() in ("http_proxy", "https_proxy", "no_proxy") or (
            name.startswith("UV_") and name != "UV_CACHE_DIR"
        ):
            argv.append(f"--setenv={name}={value}")
    return argv


def _machine() -> str:
    """nspawn's name for the build; two homes may build at once."""
    return f"neuronfleet-image-{os.getpid()}"


def _uv() -> Path:
    path = REPOSITORY / ".venv/bin/uv"
    if not path.exists():
        raise RehearsalError(f"no {path}: run `make setup`, which installs it")
    return path.resolve()


def _uv_cache() -> Path:
    asked = os.environ.get("UV_CACHE_DIR")
    return Path(asked) if asked else Path.home() / ".cache/uv"


def _wheels() -> Path | None:
    """The folder of wheels that pip was told of on this machine (torch's CPU build), if any."""
    for place in os.environ.get("PIP_FIND_LINKS", "").split():
        if Path(place).is_dir():
            return Path(place).resolve()
    return None
