"""Status as a person reads it."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from app.operate.status import Host, Status

_GOOD = {"healthy", "active", "running", "CREATE_COMPLETE", "UPDATE_COMPLETE"}
_BUSY = {"initial", "activating", "pending", "draining", "deactivating", "unused", "inactive"}


def _colored(word: str) -> Text:
    if word in _GOOD:
        return Text(word, style="green")
    if word in _BUSY or word.endswith("_IN_PROGRESS"):
        return Text(word, style="yellow")
    return Text(word, style="red" if word not in ("none", "") else "dim")


def ranges(numbers: list[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2,5``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def _placed(name: str, item: dict[str, Any]) -> Text:
    """One line: name, cores, NUMA nodes, and whether it really sits there."""
    nodes, live = item.get("numa_nodes"), item.get("live", {})
    text = Text(f"{name} cores {ranges(item['cores']) or '-'} ")
    text.append(f"nodes {ranges(nodes)} " if nodes else "unbound ", style="dim")
    if live.get("ok") is False:
        text.append(live.get("reason") or "not where the plan says", style="bold red")
    elif live.get("ok"):
        text.append("✓", style="green")
    return text


def _fetch_line(artifact: dict[str, Any]) -> str:
    """How far the host has come with its artifact; empty when it is whole or nothing is known."""
    state, total = artifact.get("state"), artifact.get("total_bytes", 0)
    if state == "failed":
        return "\nartifact not fetched"
    if state != "fetching" or not total:
        return ""
    done, rate = artifact["bytes"], artifact["rate_bytes_per_s"]
    return f"\nartifact {done / total:.0%} of {total / 1e9:,.1f} GB\n{rate / 1e6:,.0f} MB/s"


def _host_rows(table: Table, host: Host) -> None:
    health = _colored(host.target_health)
    if host.target_reason:
        health.append(f"\n{host.target_reason}", style="dim")
    name = Text.assemble(host.instance_id, (f"\n{host.private_ip}", "dim"))
    name.append(f"\n{host.role}, {host.instance_type}", style="dim")
    raylets = Text("\n").join(_placed(item["name"], item) for item in host.raylets)
    replicas = Text("\n").join(_placed(f"block {item['block']}", item) for item in host.replicas)
    if host.error:
        raylets = Text(host.error, style="yellow")
    state = _colored(host.state)
    state.append(_fetch_line(host.artifact), style="dim")
    table.add_row(name, state, raylets, replicas, health)


def render(status: Status) -> Group:
    """The status as tables: stacks in the caption, a row a host, then what is wrong."""
    where = "rehearsal on this machine" if status.rehearsal else "AWS"
    head = Text.assemble(
        (f"{status.environment}", "bold"), f"  {where}  ", (status.url or "no URL yet", "cyan")
    )
    stacks = Text("  ").join(
        Text(f"{item['name']} ").append_text(_colored(item["status"])) for item in status.stacks
    )
    table = Table(expand=False, show_lines=True)
    table.add_column("host", no_wrap=True)
    for column in ("state", "raylets", "replicas", "target"):
        table.add_column(column)
    for host in status.hosts:
        _host_rows(table, host)
    troubles: list[Text] = []
    for item in status.stacks:
        if item["reason"] and item["status"] not in _GOOD:
            troubles.append(Text(f"{item['name']}: {item['reason']}", style="red"))
    for host in status.hosts:
        for unit in host.units:
            if unit.get("state") == "failed":
                line = f"{host.instance_id} {unit['name']} failed: {unit.get('last_line', '')}"
                troubles.append(Text(line, style="red"))
        troubles += [Text(f"{host.instance_id}: {warning}", style="yellow") for warning in host.warnings]
    troubles += [Text(f"launch failed: {line}", style="red") for line in status.scaling_failures]
    return Group(head, stacks, table, *troubles)


def print_status(console: Console, status: Status) -> None:
    """Print :func:`render` of ``status``."""
    console.print(render(status))
