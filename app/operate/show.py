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


def _binding(item: dict[str, Any]) -> Text:
    planned, live = item.get("numa_nodes"), item.get("live", {})
    text = Text(f"nodes {ranges(planned)}" if planned else "unbound")
    if live.get("ok") is False:
        text.append(f"  {live.get('reason', 'not where the plan says')}", style="bold red")
    elif live.get("ok"):
        text.append("  as planned", style="green")
    return text


def _host_rows(table: Table, host: Host) -> None:
    health = _colored(host.target_health)
    if host.target_reason:
        health.append(f"\n{host.target_reason}", style="dim")
    name = Text(host.instance_id)
    name.append(f"\n{host.private_ip}", style="dim")
    raylets = Text("\n").join(
        Text(f"{item['name']} cores {ranges(item['cores']) or '-'} ").append_text(_binding(item))
        for item in host.raylets
    )
    replicas = Text("\n").join(
        Text(f"block {item['block']} cores {ranges(item['cores'])} ").append_text(_binding(item))
        for item in host.replicas
    )
    if host.error:
        raylets = Text(host.error, style="yellow")
    table.add_row(name, f"{host.role}\n{host.instance_type}", _colored(host.state), raylets, replicas, health)


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
    for column in ("host", "role", "state", "raylets", "replicas", "target"):
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
