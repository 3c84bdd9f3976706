"""Reading what the host is: Neuron devices, NUMA nodes, the CPUs and memory that this process may use.

Every path lies under a root folder, so that each kind of host can be a tree of files in a test. Devices come
from ``neuron-ls -j``; where it names no NUMA node, the PCI address is looked up under /sys, then the device's
CPU list is compared with the nodes', then a host with a single node settles it. Where neuron-ls fails, the
driver's sysfs folder still says how many devices and cores there are.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from app.node.topology.idlist import format_idlist, parse_idlist
from app.node.topology.model import Device, HostTopology, NumaNode
from app.node.topology.neuron_ls import (
    MAX_DEVICES,
    NEURON_LS,
    NeuronLsReading,
    parse_neuron_ls,
    run_neuron_ls,
)

INF2_DEVICES = {"inf2.xlarge": 1, "inf2.8xlarge": 1, "inf2.24xlarge": 6, "inf2.48xlarge": 12}
"""Devices of each size. Source: Neuron documentation, Inf2 architecture."""

Source = Literal["neuron-ls", "sysfs", "none"]

_PCI_VENDOR = "0x1d0f"
_PCI_INFERENTIA2 = "0x7264"
_CORES_PER_INFERENTIA2 = 2


def read_host(
    root: Path = Path("/"), neuron_ls: str | Path = NEURON_LS, instance_type: str | None = None
) -> HostTopology:
    """Read the host. What is wrong with it is in ``problems`` and ``warnings``; nothing is raised.

    Args:
        root: folder in place of ``/`` for /sys, /proc and /dev.
        neuron_ls: the executable that is run (it is not looked up under ``root``).
        instance_type: what the instance metadata says, to know how many devices there should be; None: what
            neuron-ls or DMI says.
    """
    allowed = _allowed_cpus(root)
    nodes, full_cpus = _numa_nodes(root, allowed)
    reading = run_neuron_ls(str(neuron_ls))
    pci = _pci_devices(root)
    source: Source = "neuron-ls"
    if not reading.devices:
        reading.devices = _sysfs_devices(root) or _devices_by_pci(pci)
        source = "sysfs" if reading.devices else "none"
    instance_type = instance_type or reading.instance_type or _dmi_instance_type(root)
    devices = [_with_node(root, device, nodes, full_cpus) for device in reading.devices]
    _check_count(reading, devices, len(pci), instance_type)
    _check_nodes(reading, devices, nodes, full_cpus)
    _check_processes(reading, devices)
    return HostTopology(
        devices=tuple(devices),
        nodes=tuple(nodes),
        cpus=allowed,
        memory_bytes=_memory_limit(root),
        shm_bytes=_shm_bytes(root),
        instance_type=instance_type,
        source=source,
        problems=tuple(reading.problems),
        warnings=tuple(reading.warnings),
    )


def read_neuron_ls_file(path: Path) -> HostTopology:
    """The host that a saved ``neuron-ls -j`` describes, reading nothing of this one.

    Raises:
        OSError: the file cannot be read.
    """
    return host_of_output(path.read_text(errors="replace"))


def host_of_output(text: str) -> HostTopology:
    """The host that the output of ``neuron-ls -j`` describes.

    NUMA nodes and their CPUs are those that the devices name; memory and /dev/shm stay unknown.
    """
    reading = parse_neuron_ls(text)
    cpus: dict[int, set[int]] = {}
    for device in reading.devices:
        if device.numa_node is not None:
            cpus.setdefault(device.numa_node, set()).update(device.cpus)
    nodes = [
        NumaNode(index=node, cpus=tuple(sorted(node_cpus)), memory_bytes=0)
        for node, node_cpus in sorted(cpus.items())
    ]
    _check_count(reading, reading.devices, 0, reading.instance_type)
    _check_processes(reading, reading.devices)
    every_cpu = sorted({cpu for device in reading.devices for cpu in device.cpus})
    if reading.devices and not every_cpu:
        reading.warnings.append(
            "this neuron-ls output names no CPUs (cpu_affinity): CPU counts are unknown (0)"
        )
    return HostTopology(
        devices=tuple(reading.devices),
        nodes=tuple(nodes),
        cpus=tuple(every_cpu),
        instance_type=reading.instance_type,
        source="neuron-ls" if reading.devices else "none",
        problems=tuple(reading.problems),
        warnings=tuple(reading.warnings),
    )


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def _read_int(path: Path) -> int | None:
    text = _read(path)
    try:
        return int(text, 0) if text else None
    except ValueError:
        return None


def _allowed_cpus(root: Path) -> tuple[int, ...]:
    """CPUs of this process: affinity and cgroup cpuset together, as the kernel computed them."""
    for line in (_read(root / "proc/self/status") or "").splitlines():
        if line.startswith("Cpus_allowed_list:"):
            return parse_idlist(line.partition(":")[2])
    online = _read(root / "sys/devices/system/cpu/online")
    return parse_idlist(online) if online else ()


def _numa_nodes(root: Path, allowed: tuple[int, ...]) -> tuple[list[NumaNode], dict[int, frozenset[int]]]:
    """The nodes that have CPUs, and each one's CPUs whether allowed or not (to know a device's node by)."""
    nodes: list[NumaNode] = []
    full: dict[int, frozenset[int]] = {}
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        index = int(folder.name.removeprefix("node"))
        cpus = parse_idlist(_read(folder / "cpulist") or "")
        if not cpus:  # a node of memory only: nothing can run there
            continue
        full[index] = frozenset(cpus)
        socket = _read_int(root / f"sys/devices/system/cpu/cpu{cpus[0]}/topology/physical_package_id")
        nodes.append(
            NumaNode(
                index=index,
                cpus=tuple(cpu for cpu in cpus if cpu in set(allowed)) if allowed else cpus,
                memory_bytes=_node_memory(folder / "meminfo"),
                socket=socket if socket is not None and socket >= 0 else None,
            )
        )
    return sorted(nodes, key=lambda node: node.index), full


def _node_memory(path: Path) -> int:
    for line in (_read(path) or "").splitlines():
        words = line.split()
        if len(words) >= 4 and words[2] == "MemTotal:":
            return int(words[3]) * 1024
    return 0


def _memory_limit(root: Path) -> int:
    """Bytes of memory: the host's, or less where a cgroup of this process has a limit (v2 and v1)."""
    total = 0
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        if line.startswith("MemTotal:"):
            total = int(line.split()[1]) * 1024
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        folder = Path(path.lstrip("/"))
        for ancestor in (folder, *folder.parents):
            limit = _read_int(base / ancestor / name)
            if limit is not None and limit > 0:
                total = min(total, limit) if total else limit
    return total


def _shm_bytes(root: Path) -> int | None:
    try:
        stat = os.statvfs(root / "dev/shm")
    except OSError:
        return None
    return stat.f_bsize * stat.f_bavail


def _dmi_instance_type(root: Path) -> str | None:
    """EC2's Nitro hosts carry the instance type as the DMI product name."""
    name = _read(root / "sys/devices/virtual/dmi/id/product_name")
    return name if name in INF2_DEVICES else None


def _pci_devices(root: Path) -> dict[str, int | None]:
    """PCI address of each Inferentia2, and its NUMA node if the firmware names one."""
    found: dict[str, int | None] = {}
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        if _read(folder / "vendor") == _PCI_VENDOR and _read(folder / "device") == _PCI_INFERENTIA2:
            node = _read_int(folder / "numa_node")
            found[folder.name.lower()] = node if node is not None and node >= 0 else None
    return found


def _sysfs_devices(root: Path) -> list[Device]:
    """Devices as the driver's own folder lists them; it says nothing of PCI or NUMA."""
    devices: list[Device] = []
    folders: dict[int, Path] = {}
    for base in ("sys/class/neuron_device", "sys/devices/virtual/neuron_device"):
        for folder in (root / base).glob("neuron[0-9]*"):
            if folder.name.removeprefix("neuron").isdigit():
                folders.setdefault(int(folder.name.removeprefix("neuron")), folder)
    for index, folder in sorted(folders.items()):
        cores = _read_int(folder / "core_count") or _CORES_PER_INFERENTIA2
        links = (_read(folder / "connected_devices") or "").replace(",", " ").split()
        devices.append(
            Device(
                index=index,
                cores=tuple(range(index * cores, (index + 1) * cores)),
                connected_to=tuple(int(link) for link in links if link.isdigit()),
            )
        )
    return devices


def _devices_by_pci(pci: dict[str, int | None]) -> list[Device]:
    """Devices by count only: the driver's numbering is not PCI order, so a node is known if all share it."""
    nodes = set(pci.values())
    node = next(iter(nodes)) if len(nodes) == 1 else None
    return [
        Device(
            index=index,
            cores=tuple(range(index * _CORES_PER_INFERENTIA2, (index + 1) * _CORES_PER_INFERENTIA2)),
            numa_node=node,
        )
        for index in range(len(pci))
    ]


def _with_node(
    root: Path, device: Device, nodes: list[NumaNode], full_cpus: dict[int, frozenset[int]]
) -> Device:
    if device.numa_node is not None:
        return device
    node: int | None = None
    cpus = device.cpus
    if device.bdf is not None:
        folder = root / "sys/bus/pci/devices" / device.bdf
        node = _read_int(folder / "numa_node")
        if not cpus:
            cpus = parse_idlist(_read(folder / "local_cpulist") or "")
    if node is None or node < 0:
        near = [index for index, node_cpus in full_cpus.items() if cpus and set(cpus) <= node_cpus]
        only = nodes[0].index if len(nodes) == 1 else None
        node = near[0] if len(near) == 1 else only
    return device.model_copy(update={"numa_node": node, "cpus": cpus})


def _check_count(
    reading: NeuronLsReading, devices: list[Device], pci_count: int, instance_type: str | None
) -> None:
    indices = {device.index for device in devices}
    if not devices:
        if not reading.problems:
            reading.problem(
                "no-device",
                "this host has no Neuron device: neuron-ls, the driver's sysfs folder and PCI list none. "
                "Is the instance type an inf2 one, and is the driver loaded?",
            )
        return
    linked: set[int] = set()
    if instance_type not in INF2_DEVICES:  # nothing else says that the last devices are missing
        linked = {link for device in devices for link in device.connected_to if 0 <= link < MAX_DEVICES}
    expected = max(INF2_DEVICES.get(instance_type or "", 0), pci_count, max(indices | linked) + 1)
    missing = sorted(set(range(expected)) - indices)
    if missing:
        because = (
            f"{instance_type} has {INF2_DEVICES[instance_type]}"
            if instance_type in INF2_DEVICES and len(devices) < INF2_DEVICES[instance_type]
            else f"PCI lists {pci_count}"
            if pci_count > len(devices)
            else f"NeuronLink joins device {format_idlist(linked & set(missing))} to others"
            if linked & set(missing)
            else f"the numbering has {'a gap' if len(missing) == 1 else 'gaps'}"
        )
        reading.problem(
            "device-missing",
            f"{len(devices)} Neuron devices where {expected} were expected ({because}): "
            f"device {format_idlist(missing)} is missing or dead. Look at dmesg, then replace the instance.",
        )


def _check_nodes(
    reading: NeuronLsReading,
    devices: list[Device],
    nodes: list[NumaNode],
    full_cpus: dict[int, frozenset[int]],
) -> None:
    usable = {node.index for node in nodes if node.cpus}
    for node in sorted({d.numa_node for d in devices if d.numa_node is not None} - usable):
        on_it = format_idlist(device.index for device in devices if device.numa_node == node)
        have = format_idlist(usable) or "none"
        why = (
            f"this process may use none of its CPUs ({format_idlist(full_cpus[node])})"
            if node in full_cpus
            else f"the kernel has no such node with CPUs (it has: {have})"
        )
        reading.problem(
            "node-missing",
            f"device {on_it} hangs on NUMA node {node}, but {why}: numactl would refuse to bind to it.",
        )


def _check_processes(reading: NeuronLsReading, devices: list[Device]) -> None:
    for device in devices:
        for process in device.processes:
            reading.problem(
                "stale-process",
                f"cores {format_idlist(device.cores)} of device {device.index} are held by process "
                f"{process.pid} ({process.command[:80] or 'no command line'}): end it (kill {process.pid}) "
                "or restart the host.",
            )
