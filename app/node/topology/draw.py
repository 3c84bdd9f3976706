"""The machine as a picture for a terminal: nodes with their devices and cores, the blocks, what crosses."""

from __future__ import annotations

from collections.abc import Iterator

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from app.node.ports import raylet_ports
from app.node.topology.idlist import format_idlist
from app.node.topology.model import Block, Device, HostTopology, TopologyPlan

_STYLES = ("cyan", "magenta", "green", "yellow", "blue", "bright_red", "bright_cyan", "bright_magenta")


def draw(console: Console, host: HostTopology | None, plan: TopologyPlan) -> None:
    """Print the plan; with ``host`` also its devices, node by node.

    Args:
        console: where to print.
        host: what the plan was made from; None where only the plan is known.
        plan: what is drawn.
    """
    cores = sum(len(block.cores) for block in plan.blocks) + len(plan.idle_cores)
    name = f"{escape(host.instance_type)}: " if host and host.instance_type else ""
    console.print(
        f"[bold]{name}{cores} NeuronCores, tensor-parallel degree {plan.tp_degree}: "
        f"{_count(len(plan.blocks), 'block')}, {_count(len(plan.raylets), 'raylet')}[/]"
    )
    if host:
        console.print(Columns(list(_node_panels(host, plan)), expand=False))
        console.print(_chain(host, plan))
    console.print(_blocks_table(host, plan))
    console.print(_raylets_table(plan))
    if plan.idle_cores:
        console.print(f"Idle: cores {format_idlist(plan.idle_cores)} belong to no block.")
    for warning in plan.warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}")


def _node_panels(host: HostTopology, plan: TopologyPlan) -> Iterator[RenderableType]:
    """A panel for each NUMA node, and one for devices whose node nobody knows."""
    places: list[tuple[int | None, str, str]] = []
    for node in host.nodes:
        memory = f", {node.memory_bytes / 2**30:.0f} GiB" if node.memory_bytes else ""
        cpus = f"CPUs {format_idlist(node.cpus)}" if node.cpus else "CPUs unknown"
        title = f"NUMA node {node.index}" + (f" (socket {node.socket})" if node.socket is not None else "")
        places.append((node.index, title, cpus + memory))
    if any(device.numa_node is None for device in host.devices):
        places.append((None, "NUMA node unknown", "bound to no node"))
    for index, title, subtitle in places:
        lines = [_device_line(d, plan) for d in host.devices if d.numa_node == index]
        if lines or index is not None:
            body = Group(*lines) if lines else Text("no device", style="dim")
            yield Panel(body, title=title, subtitle=subtitle, width=max(38, len(subtitle) + 6))


def _device_line(device: Device, plan: TopologyPlan) -> Text:
    line = Text(f"device {device.index:>2}  ")
    for core in device.cores:
        block = _block_of(core, plan)
        line.append(f"[{core:>2}]", style=_style(block))
    blocks = sorted({b.index for core in device.cores if (b := _block_of(core, plan)) is not None})
    line.append(f"  block {format_idlist(blocks)}" if blocks else "  idle", style="" if blocks else "dim")
    if device.processes:
        line.append(f"  held by {device.processes[0].pid}", style="red")
    return line


def _chain(host: HostTopology, plan: TopologyPlan) -> RenderableType:
    """Devices in the order of their cores: the node under each, the block it is in, the links between."""
    table = Table(show_header=False, box=None, padding=(0, 0))
    devices, nodes, blocks = [Text("device ")], [Text("node   ")], [Text("block  ")]
    for position, device in enumerate(host.devices):
        owner = _block_of(device.cores[0], plan)
        before = host.devices[position - 1] if position else None
        linked = before is not None and before.index in device.connected_to
        devices.append(Text(("--" if linked else "  ") + f"{device.index:>2}"))
        nodes.append(Text("  " + (f"{device.numa_node:>2}" if device.numa_node is not None else " ?")))
        blocks.append(Text("  " + (f"{owner.index:>2}" if owner else " ."), style=_style(owner)))
    for row in (devices, nodes, blocks):
        table.add_row(*row)
    return Panel(table, title="NeuronLink order ( -- : linked)", expand=False)


def _blocks_table(host: HostTopology | None, plan: TopologyPlan) -> Table:
    sockets = {node.index: node.socket for node in host.nodes} if host else {}
    table = Table(title="Blocks: one a replica")
    for heading in ("block", "cores", "devices", "NUMA nodes", "crosses"):
        table.add_column(heading)
    for block in plan.blocks:
        count = len(block.numa_nodes)
        crosses = "unknown" if not count else "no" if count == 1 else f"yes, {count} nodes"
        on_sockets = {socket for node in block.numa_nodes if (socket := sockets.get(node)) is not None}
        if len(on_sockets) > 1:
            crosses += f", {len(on_sockets)} sockets"
        table.add_row(
            Text(str(block.index), style=_style(block)),
            format_idlist(block.cores),
            format_idlist(block.devices),
            format_idlist(block.numa_nodes) or "?",
            Text(crosses, style="green" if count == 1 else "yellow"),
        )
    return table


def _raylets_table(plan: TopologyPlan) -> Table:
    table = Table(title="Raylets: one for each set of NUMA nodes that blocks span")
    memory_known = any(raylet.memory_bytes for raylet in plan.raylets)
    for heading in ("raylet", "bound to nodes", "blocks", "cores", "CPUs", "Serve port"):
        table.add_column(heading, overflow="fold")
    if memory_known:
        table.add_column("memory")
        table.add_column("object store")
    for raylet in plan.raylets:
        cells = [
            str(raylet.index),
            format_idlist(raylet.numa_nodes) or "not bound",
            format_idlist(raylet.blocks) or "none",
            format_idlist(raylet.cores) or "none",
            str(raylet.cpus),
            str(raylet_ports(raylet.index).serve_http),
        ]
        if memory_known:
            cells += [_gib(raylet.memory_bytes), _gib(raylet.object_store_bytes)]
        table.add_row(*cells)
    return table


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _style(block: Block | None) -> str:
    return "dim" if block is None else _STYLES[block.index % len(_STYLES)]


def _block_of(core: int, plan: TopologyPlan) -> Block | None:
    return next((block for block in plan.blocks if core in block.cores), None)
