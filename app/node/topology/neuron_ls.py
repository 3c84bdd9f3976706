"""Reading ``neuron-ls -j`` in each of its generations.

The output is a JSON array with an object a device. Before SDK 2.25 it has no ``numa_node``, ``cpu_affinity``
and ``neuroncore_ids``; ``numa_node`` is a string, "-1" where the firmware names no node; ``bdf`` comes with
and without the PCI domain; ``connected_to`` is null on one-device hosts; the newest also name
``instance_type``.
Source: the tool's user guide, and public captures of its output.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass, field
from typing import Any

from app.node.topology.idlist import parse_idlist
from app.node.topology.model import Device, DeviceProcess, Problem, ProblemKind

NEURON_LS = "/opt/aws/neuron/bin/neuron-ls"
TIMEOUT_S = 20.0
MAX_DEVICES = 256
MAX_CORES_PER_DEVICE = 128
"""More than any host or device has (inf2.48xlarge: 12, Trainium2: 8): beyond it the output is garbage."""

_BDF = re.compile(r"(?:(?P<domain>[0-9a-f]{4,8}):)?(?P<rest>[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", re.IGNORECASE)


@dataclass
class NeuronLsReading:
    """Devices in the order of their cores, and what was wrong or odd with the output."""

    devices: list[Device] = field(default_factory=list)
    instance_type: str | None = None
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def problem(self, kind: ProblemKind, message: str) -> None:
        self.problems.append(Problem(kind=kind, message=message))


def run_neuron_ls(path: str = NEURON_LS) -> NeuronLsReading:
    """Run the tool and read what it prints; a tool that fails is a problem in the reading, not an
    exception."""
    reading = NeuronLsReading()
    try:
        done = subprocess.run([path, "-j"], capture_output=True, timeout=TIMEOUT_S, check=False)
    except FileNotFoundError:
        reading.problem(
            "neuron-ls-failed",
            f"{path} is not there: the image has no Neuron tools. "
            "Choose an image of the engine profile (package aws-neuronx-tools).",
        )
        return reading
    except (OSError, subprocess.TimeoutExpired) as error:
        reading.problem("neuron-ls-failed", f"{path} -j could not be run: {error}")
        return reading
    if done.returncode != 0:
        last = _last_line(done.stderr) or _last_line(done.stdout) or "no output"
        reading.problem(
            "neuron-ls-failed",
            f"{path} -j ended with exit code {done.returncode}: {last}. The Neuron driver may not be loaded "
            "(lsmod | grep neuron; dmesg), or the instance type has no Neuron device.",
        )
        return reading
    return parse_neuron_ls(done.stdout.decode(errors="replace"))


def parse_neuron_ls(text: str) -> NeuronLsReading:
    """Read the tool's JSON; every fault of it ends in ``problems``, with the device it is about."""
    reading = NeuronLsReading()
    if not text.strip():
        reading.problem("neuron-ls-output", "neuron-ls -j printed nothing, where a JSON array was expected")
        return reading
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError) as error:
        reading.problem(
            "neuron-ls-output", f"neuron-ls -j printed no JSON ({error}); it begins {text.strip()[:60]!r}"
        )
        return reading
    if not isinstance(listed, list):
        reading.problem(
            "neuron-ls-output",
            f"neuron-ls -j printed a JSON {type(listed).__name__}, where an array of devices was expected",
        )
        return reading
    next_core = 0
    for position, entry in enumerate(listed):
        device = _device(entry, position, next_core, reading)
        if device is not None:
            reading.devices.append(device)
            next_core = device.cores[-1] + 1
    _check_unique(reading)
    reading.devices.sort(key=lambda device: device.cores)
    return reading


def _device(entry: Any, position: int, next_core: int, reading: NeuronLsReading) -> Device | None:
    where = f"neuron-ls -j, entry {position}"
    if not isinstance(entry, dict):
        reading.problem("neuron-ls-output", f"{where}: {str(entry)[:40]!r} where a device was expected")
        return None
    index = _integer(entry.get("neuron_device"))
    if index is None or not 0 <= index < MAX_DEVICES:
        reading.problem(
            "neuron-ls-output",
            f"{where}: neuron_device is {entry.get('neuron_device')!r}, not a device index",
        )
        return None
    where = f"neuron-ls -j, device {index}"
    cores = _cores(entry, index, next_core, where, reading)
    if cores is None:
        return None
    if isinstance(entry.get("instance_type"), str):
        reading.instance_type = entry["instance_type"]
    try:
        cpus = parse_idlist(str(entry.get("cpu_affinity") or ""))
    except ValueError as error:
        reading.warnings.append(f"{where}: cpu_affinity is not a CPU list ({error}); it is left out")
        cpus = ()
    numa_node = _integer(entry.get("numa_node"))
    if numa_node is None and entry.get("numa_node") not in (None, ""):
        reading.warnings.append(f"{where}: numa_node is {entry['numa_node']!r}, not a number; it is left out")
    links = entry.get("connected_to")
    return Device(
        index=index,
        cores=cores,
        numa_node=numa_node if numa_node is not None and numa_node >= 0 else None,
        bdf=normal_bdf(entry.get("bdf")),
        cpus=cpus,
        connected_to=tuple(n for n in map(_integer, links) if n is not None)
        if isinstance(links, list)
        else (),
        memory_bytes=_integer(entry.get("memory_size")),
        processes=_processes(entry.get("neuron_processes")),
    )


def _cores(
    entry: dict[str, Any], index: int, next_core: int, where: str, reading: NeuronLsReading
) -> tuple[int, ...] | None:
    """The device's core ids; older tools give only a count, and number cores device after device."""
    ids = entry.get("neuroncore_ids")
    count = _integer(entry.get("nc_count"))
    if isinstance(ids, list) and ids:
        cores = [core for core in map(_integer, ids) if core is not None and core >= 0]
        if len(cores) != len(ids):
            reading.problem("neuron-ls-output", f"{where}: neuroncore_ids is {ids!r}, not a list of core ids")
            return None
        if len(set(cores)) != len(cores):
            reading.problem("duplicate-core", f"{where}: neuroncore_ids names a core twice: {ids!r}")
            return None
        return tuple(sorted(cores))
    if count is None or not 1 <= count <= MAX_CORES_PER_DEVICE:
        reading.problem(
            "neuron-ls-output",
            f"{where}: neither neuroncore_ids nor an nc_count of 1 to {MAX_CORES_PER_DEVICE} "
            f"(it is {str(entry.get('nc_count'))[:20]!r})",
        )
        return None
    first = max(next_core, index * count)
    return tuple(range(first, first + count))


def _check_unique(reading: NeuronLsReading) -> None:
    owner: dict[int, int] = {}
    seen: set[int] = set()
    for device in reading.devices:
        if device.index in seen:
            reading.problem("neuron-ls-output", f"neuron-ls -j lists device {device.index} twice")
        seen.add(device.index)
        shared = [core for core in device.cores if core in owner]
        for core in shared:
            reading.problem(
                "duplicate-core",
                f"neuron-ls -j gives core {core} to device {owner[core]} and to device {device.index}: "
                "cores must have one device. Restart the instance; if it stays, replace it.",
            )
        owner.update({core: device.index for core in device.cores if core not in owner})


def _processes(listed: Any) -> tuple[DeviceProcess, ...]:
    if not isinstance(listed, list):
        return ()
    found = []
    for entry in listed:
        pid = _integer(entry.get("pid")) if isinstance(entry, dict) else None
        if pid is not None and pid > 0:
            found.append(DeviceProcess(pid=pid, command=str(entry.get("command") or "")))
    return tuple(found)


def normal_bdf(value: Any) -> str | None:
    """A PCI address with its domain, ``0000:80:1e.0``, or None for what is no address."""
    match = _BDF.fullmatch(value.strip()) if isinstance(value, str) else None
    return f"{match['domain'] or '0000'}:{match['rest']}".lower() if match else None


def _integer(value: Any) -> int | None:
    """An integer written as a number or a string; None for anything else (also for true and 1.5)."""
    if isinstance(value, bool) or not isinstance(value, int | str) or len(str(value)) > 20:
        return None
    try:
        return int(value)
    except ValueError:
        return None


def _last_line(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1].strip()[:300] if lines else ""
