"""The emulated machine: its kernel, its layout, and one run of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rehearsal.numa_proof.initramfs import python_files, with_libraries, write_initramfs

REPOSITORY = Path(__file__).resolve().parents[2]
CACHE = REPOSITORY / ".cache" / "numa-proof"
KERNEL_PACKAGES = ("linux-image-cloud-amd64", "linux-image-amd64", "linux-image-virtual")
PROGRAMS = {"qemu-system-x86_64": "qemu-system-x86", "numactl": "numactl", "busybox": "busybox-static"}
BOOT_TIMEOUT_S = 300.0

NODES = 4
CPUS_PER_NODE = 2  # one core with two threads, where inf2.48xlarge has 24 with two
MEMORY_PER_NODE_MIB = 256
DISTANCES = {(0, 1): 12, (2, 3): 12, (0, 2): 32, (0, 3): 32, (1, 2): 32, (1, 3): 32}
"""Nodes 0 and 1 are one socket, 2 and 3 the other, as the CPU numbers of inf2.48xlarge say."""

_GUEST_MODULES = ("rehearsal.numa_proof.guest", "argparse", "encodings.ascii")  # the others: of neuron-ls

# The file system in memory holds the checkout at its own path, so nothing is mounted over what may hold one.
_INIT = """#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sysfs /sys
/bin/busybox mount -t devtmpfs devtmpfs /dev
/bin/busybox mount -t tmpfs tmpfs /run
/bin/busybox mkdir -p /dev/shm
/bin/busybox mount -t tmpfs tmpfs /dev/shm
/bin/busybox echo 0 > /proc/sys/kernel/numa_balancing
export PATH=/usr/bin:/bin PYTHONPATH={path} NEURON_EMULATED_INSTANCE_TYPE=inf2.48xlarge
export PYTHONDONTWRITEBYTECODE=1
{python} -S {guest} > /tmp/result.json 2> /tmp/errors.txt
/bin/busybox cat /tmp/errors.txt
/bin/busybox cat /tmp/result.json > /dev/ttyS1
/bin/busybox poweroff -f
"""


class ProofError(RuntimeError):
    """The machine could not be made, did not boot, or gave no result; the message says which and why."""


@dataclass(frozen=True)
class MachineRun:
    """What one run left: the guest's JSON text, its console, and the seconds from start to power-off."""

    result: str
    console: str
    seconds: float


def missing_programs() -> list[str]:
    """Debian packages of the programs that this machine lacks."""
    return sorted({package for program, package in PROGRAMS.items() if shutil.which(program) is None})


def install_programs() -> None:
    packages = missing_programs()
    if not packages:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise ProofError(
            f"numa-proof needs the Debian packages {' '.join(packages)}; install them, or run as root"
        )
    _update_package_lists()
    done = subprocess.run(
        ["apt-get", "install", "-y", "--no-install-recommends", *packages], capture_output=True, text=True
    )
    if done.returncode != 0:
        raise ProofError(f"apt-get install {' '.join(packages)} failed: {done.stderr.strip()[-400:]}")


def _update_package_lists() -> None:
    """A new machine has none; where they cannot be had, the step that needs them says what it lacks."""
    subprocess.run(["apt-get", "update", "-qq"], capture_output=True, check=False)


def kernel() -> Path:
    """A distribution kernel, downloaded once; it is unpacked, not installed."""
    found = sorted(CACHE.glob("kernel/boot/vmlinuz-*"))
    if found:
        return found[-1]
    _update_package_lists()
    reasons = []
    for package in KERNEL_PACKAGES:
        listed = subprocess.run(["apt-cache", "depends", package], capture_output=True, text=True).stdout
        match = re.search(r"Depends: (linux-image-\S+)", listed)
        if match is None:
            reasons.append(f"{package} is unknown to apt")
            continue
        folder = CACHE / "download"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        done = subprocess.run(
            ["apt-get", "-o", "APT::Sandbox::User=root", "download", match[1]],
            cwd=folder,
            capture_output=True,
            text=True,
        )
        archives = list(folder.glob("*.deb"))
        if not archives:
            reasons.append(f"{match[1]} could not be downloaded: {done.stderr.strip()[-200:]}")
            continue
        unpacked = CACHE / "kernel.part"
        shutil.rmtree(unpacked, ignore_errors=True)
        subprocess.run(["dpkg-deb", "-x", str(archives[0]), str(unpacked)], check=True)
        for unused in ("lib", "usr"):  # modules and documents: the guest needs none
            shutil.rmtree(unpacked / unused, ignore_errors=True)
        shutil.rmtree(CACHE / "kernel", ignore_errors=True)
        unpacked.rename(CACHE / "kernel")
        shutil.rmtree(folder)
        return sorted(CACHE.glob("kernel/boot/vmlinuz-*"))[-1]
    raise ProofError(f"no kernel for the machine: {'; '.join(reasons)}. Try apt-get update.")


def build_initramfs(target: Path) -> None:
    """The guest's system: Python, the planner, numactl, the emulated neuron-ls."""
    python = Path(sys.executable)
    site = next(Path(path) for path in sys.path if path.endswith("site-packages"))
    search_path = [REPOSITORY, site]
    guest = REPOSITORY / "rehearsal/numa_proof/guest.py"
    files = python_files(python, _GUEST_MODULES, search_path)
    numactl = Path(shutil.which("numactl") or "/usr/bin/numactl").resolve()
    real_python = python.resolve()
    files = with_libraries({*files, numactl, real_python})
    run_python = f"#!{real_python} -S\n"
    neuron_ls = (REPOSITORY / "rehearsal/neuron/neuron-ls").read_text().split("\n", 1)[1]
    busybox = Path(shutil.which("busybox") or "/bin/busybox")
    extra = {
        "/init": _INIT.format(
            path=":".join(str(path) for path in search_path), python=real_python, guest=guest
        ).encode(),
        "/bin/busybox": busybox.read_bytes(),
        "/proof/ray": (run_python + guest.read_text()).encode(),
        "/opt/aws/neuron/bin/neuron-ls": (run_python + neuron_ls).encode(),
        "/usr/bin/numactl": numactl.read_bytes(),
    }
    write_initramfs(target, files - {Path("/usr/bin/numactl")}, extra, {"/bin/sh": "busybox"})


def qemu_command(kernel_path: Path, initramfs: Path, result: Path) -> list[str]:
    command = [
        "qemu-system-x86_64",
        "-accel",
        "tcg,thread=multi",
        "-cpu",
        "max,vendor=GenuineIntel",
        "-nographic",
        "-no-reboot",
    ]
    command += ["-nodefaults", "-serial", "stdio", "-serial", f"file:{result}"]
    command += ["-m", f"{NODES * MEMORY_PER_NODE_MIB}M"]
    command += ["-smp", f"{NODES * CPUS_PER_NODE},sockets=2,cores={NODES // 2},threads={CPUS_PER_NODE}"]
    for node in range(NODES):
        first = node * CPUS_PER_NODE
        command += ["-object", f"memory-backend-ram,id=m{node},size={MEMORY_PER_NODE_MIB}M"]
        command += ["-numa", f"node,nodeid={node},memdev=m{node},cpus={first}-{first + CPUS_PER_NODE - 1}"]
    for (one, other), distance in DISTANCES.items():
        command += ["-numa", f"dist,src={one},dst={other},val={distance}"]
    command += ["-kernel", str(kernel_path), "-initrd", str(initramfs)]
    return [*command, "-append", "console=ttyS0 quiet panic=-1 mitigations=off nokaslr tsc=unstable"]


def run_machine(folder: Path) -> MachineRun:
    """Build, boot, wait for the guest to power off.

    Raises:
        ProofError: no kernel, no boot within the time, or a guest that wrote no result.
    """
    install_programs()
    kernel_path = kernel()
    initramfs = folder / "initramfs.gz"
    build_initramfs(initramfs)
    result = folder / "result.json"
    started = time.monotonic()
    try:
        done = subprocess.run(
            qemu_command(kernel_path, initramfs, result),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=BOOT_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        tail = (error.stdout or b"").decode(errors="replace")[-1500:]
        raise ProofError(
            f"the machine was not done after {BOOT_TIMEOUT_S:g} s; its console ends:\n{tail}"
        ) from error
    seconds = time.monotonic() - started
    console = done.stdout.decode(errors="replace") + done.stderr.decode(errors="replace")
    text = result.read_text() if result.exists() else ""
    if not text.strip():
        raise ProofError(f"the machine gave no result; its console ends:\n{console[-1500:]}")
    return MachineRun(result=text, console=console, seconds=seconds)
