"""Build the bundle that a host's user data fetches: ``dist/bundle-<profile>.zip``.

    python scripts/build_bundle.py --profile cpu --out dist

The bundle holds ``install.sh``, ``bundle.env`` (what install.sh must know of the profile),
``requirements.lock`` and ``wheels/``: the wheels that the profile's lock names, for its Python on manylinux
x86_64, and this project's own. It is byte-for-byte the same for the same inputs, and an unchanged input
returns at once, from the record ``dist/bundle-<profile>.json`` (digest of the inputs; the bundle's sha256 and
size in bytes).

Exit code 1 with one reason on standard error: a wheel is missing, the index is out of reach, no such profile.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from app.plan.catalogue import UnknownNameError  # noqa: E402
from app.plan.profiles import EngineProfile, get_profile  # noqa: E402

# Which lock a profile's hosts are installed from. The emulated engine stands on the CPU profile's packages.
LOCKS = {
    "cpu": ROOT / "requirements/bundle-cpu.lock",
    "emulated": ROOT / "requirements/bundle-cpu.lock",
    "vllm-neuron-2.28": ROOT / "requirements/bundle-vllm-neuron-2.28.lock",
}
# Every entry of the zip, and the wheel's, bears this time (1980-01-01 is the first that a zip can hold).
ZIP_TIME = (1980, 1, 1, 0, 0, 0)
SOURCE_DATE_EPOCH = "315532800"
# glibc of the oldest image that is served (Ubuntu 22.04 has 2.35, Debian 12 2.36) and all older tags.
GLIBC_TAGS = ("2_35", "2_34", "2_31", "2_28", "2_27", "2_24", "2_17", "2_12", "2_5")
PLATFORMS = (*(f"manylinux_{tag}" for tag in GLIBC_TAGS), "manylinux2014", "manylinux2010", "manylinux1")


class BundleError(Exception):
    """The bundle cannot be built; the message says why and what to do."""


@dataclass(frozen=True)
class Bundle:
    """A built bundle: where it is, its sha256 and size in bytes, and whether it had been there already."""

    path: Path
    sha256: str
    size: int
    cached: bool


def project_files() -> list[Path]:
    """The files that this project's wheel is made from, sorted."""
    files = [path for path in (ROOT / "app").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    files += [path for path in (ROOT / "pyproject.toml", ROOT / ".gitignore") if path.exists()]
    return sorted(files)


def bundle_env(profile: EngineProfile) -> str:
    """What install.sh must know before any Python of ours is installed, as shell assignments."""
    return f"PROFILE='{profile.name}'\nENGINE_VENV='{profile.venv}'\nPYTHON_VERSION='{profile.python}'\n"


def inputs_digest(profile: EngineProfile, lock: Path) -> str:
    """sha256 over everything that decides the bundle's bytes."""
    digest = hashlib.sha256(bundle_env(profile).encode())
    for path in [Path(__file__).resolve(), lock, *project_files()]:
        digest.update(f"{path.relative_to(ROOT)}\0{path.stat().st_mode & 0o111}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def pip_command() -> list[str]:
    """A pip: this interpreter's own, or one that uv brings."""
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode == 0:
        return [sys.executable, "-m", "pip"]
    uv = Path(sys.executable).with_name("uv")
    if uv.exists():
        return [str(uv), "tool", "run", "pip"]
    raise BundleError(f"{sys.executable} has neither pip nor uv beside it: run 'make setup'")


def locked_names(lock: Path) -> list[str]:
    """``name==version`` of each package in the lock."""
    lines = lock.read_text().splitlines()
    return [line.split(" ")[0] for line in lines if line and line[0].isalnum() and "==" in line]


def wheelhouse(profile: EngineProfile, lock: Path) -> Path:
    """The folder with exactly the lock's wheels, downloaded if it is not there yet."""
    key = hashlib.sha256(lock.read_bytes() + profile.python.encode()).hexdigest()[:16]
    folder = ROOT / ".cache/wheels" / key
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=folder.parent))
    command = [*pip_command(), "download", "--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    command += ["--python-version", profile.python, "--implementation", "cp"]
    command += [argument for tag in PLATFORMS for argument in ("--platform", f"{tag}_x86_64")]
    command += ["--requirement", str(lock), "--dest", str(partial)]
    try:
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode != 0:
            errors = [line for line in run.stderr.splitlines() if line.startswith("ERROR")] or [
                run.stderr.strip()
            ]
            raise BundleError(
                f"profile {profile.name}: not every wheel of {lock.relative_to(ROOT)} can be had for Python "
                f"{profile.python} on manylinux x86_64:\n  " + "\n  ".join(errors) + "\n"
                "Is the package index reachable? If it is, the lock names a version without a wheel: "
                "pin another in requirements/bundle.in and run scripts/lock.sh."
            )
        found, wanted = len(list(partial.glob("*.whl"))), len(locked_names(lock))
        if found != wanted:
            raise BundleError(f"{lock.relative_to(ROOT)} names {wanted} packages but {found} wheels came")
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # another build, run at the same time, was first
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def build_wheel(into: Path) -> Path:
    """This project's wheel, built offline with the build backend that is installed, reproducibly."""
    source = into / "source"
    for path in project_files():
        target = source / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
        target.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
    # The wheel's metadata quotes the README; hosts must not be replaced because a sentence of it changed.
    (source / "README.md").write_text("NeuronFleet, as installed on a host.\n")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(into), str(source)]
    run = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "SOURCE_DATE_EPOCH": SOURCE_DATE_EPOCH}
    )
    wheels = list(into.glob("*.whl"))
    if run.returncode != 0 or len(wheels) != 1:
        raise BundleError(f"the project's wheel did not build:\n{run.stdout}{run.stderr}")
    return wheels[0]


def write_zip(target: Path, entries: dict[str, tuple[bytes, int]]) -> None:
    """Write ``entries`` (name -> bytes, mode) by name, with one fixed time, through a temporary name."""
    partial = target.with_suffix(".zip.part")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(entries):
            content, mode = entries[name]
            info = zipfile.ZipInfo(name, ZIP_TIME)
            info.create_system = 3  # Unix, whatever builds it
            info.external_attr = (0o100000 | mode) << 16
            archive.writestr(info, content)
    partial.replace(target)


def build(profile_name: str, out: Path) -> Bundle:
    """Build (or find unchanged) the bundle of a profile in ``out``.

    Raises:
        BundleError: no lock for the profile, a wheel is missing, the build failed.
        UnknownNameError: no such profile.
    """
    profile = get_profile(profile_name)
    if profile_name not in LOCKS:
        raise BundleError(
            f"profile {profile_name} has no bundle: no lock of Ray for its Python {profile.python}; "
            f"profiles with one: {', '.join(LOCKS)}"
        )
    lock = LOCKS[profile_name]
    target, record = out / f"bundle-{profile_name}.zip", out / f"bundle-{profile_name}.json"
    wanted = inputs_digest(profile, lock)
    if target.exists() and record.exists():
        known = json.loads(record.read_text())
        if known["inputs"] == wanted and known["size"] == target.stat().st_size:
            return Bundle(target, known["sha256"], known["size"], cached=True)
    out.mkdir(parents=True, exist_ok=True)
    wheels = wheelhouse(profile, lock)
    with tempfile.TemporaryDirectory() as scratch:
        own = build_wheel(Path(scratch))
        own_bytes = own.read_bytes()
        own_line = (
            f"neuronfleet=={own.name.split('-')[1]} --hash=sha256:{hashlib.sha256(own_bytes).hexdigest()}\n"
        )
        entries = {
            "install.sh": ((ROOT / "app/node/install.sh").read_bytes(), 0o755),
            "bundle.env": (bundle_env(profile).encode(), 0o644),
            "requirements.lock": (lock.read_bytes() + own_line.encode(), 0o644),
            f"wheels/{own.name}": (own_bytes, 0o644),
        }
        entries |= {f"wheels/{path.name}": (path.read_bytes(), 0o644) for path in wheels.glob("*.whl")}
    write_zip(target, entries)
    with target.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    size = target.stat().st_size
    record.write_text(json.dumps({"inputs": wanted, "sha256": sha256, "size": size}, indent=1) + "\n")
    return Bundle(target, sha256, size, cached=False)


def main() -> int:
    """Command line; see the module's description."""
    parser = argparse.ArgumentParser(description="Build the bundle that hosts of an engine profile fetch.")
    parser.add_argument("--profile", required=True, help=f"one of {', '.join(LOCKS)}")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder to write to")
    arguments = parser.parse_args()
    try:
        bundle = build(arguments.profile, arguments.out)
    except (BundleError, UnknownNameError) as error:
        print(f"build_bundle: {error}", file=sys.stderr)
        return 1
    state = "unchanged" if bundle.cached else "built"
    print(f"{bundle.path}: {state}, {bundle.size / 1e6:.0f} MB, sha256 {bundle.sha256}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
