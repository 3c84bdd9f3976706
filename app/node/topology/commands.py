"""``neuronfleet topology``: the machine and its plan, from a saved ``neuron-ls -j`` or from this host."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from app.node.topology.draw import draw
from app.node.topology.host import host_of_output, read_host, read_neuron_ls_file
from app.node.topology.live import replica_bindings
from app.node.topology.model import (
    TOPOLOGY_PATH,
    HostTopology,
    Problem,
    TopologyError,
    TopologyPlan,
    load_plan,
)
from app.node.topology.neuron_ls import NEURON_LS
from app.node.topology.plan import plan_topology


def register(app: typer.Typer) -> None:
    """Add ``topology`` to the command line."""
    app.command("topology")(topology)


def topology(
    neuron_ls: Annotated[
        Path | None,
        typer.Option(
            "--neuron-ls",
            metavar="FILE",
            help="What `neuron-ls -j` printed (`-`: standard input); nothing of this host is read.",
        ),
    ] = None,
    tp_degree: Annotated[
        int | None,
        typer.Option("--tp-degree", help="Cores of one replica; without it, the plan of this host's boot."),
    ] = None,
    degraded: Annotated[
        bool, typer.Option("--degraded", help="Plan with what is left where a strict plan fails, and say so.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show how a host is divided: NUMA nodes, devices, core blocks, raylets, and what crosses nodes."""
    try:
        host, plan = _host_and_plan(neuron_ls, tp_degree, degraded)
    except TopologyError as error:
        _fail(error.problems, as_json)
    if as_json:
        print(json.dumps(plan_json(plan), indent=2))
        return
    console = Console()
    draw(console, host, plan)
    if neuron_ls is None and tp_degree is None:
        _show_live(console, plan)


def plan_json(plan: TopologyPlan) -> dict[str, Any]:
    """The plan as the command's JSON document; ``raylets[].blocks`` are indices into ``blocks``."""
    return {
        "tp_degree": plan.tp_degree,
        "blocks": [
            {
                "index": block.index,
                "cores": list(block.cores),
                "devices": list(block.devices),
                "numa_nodes": list(block.numa_nodes),
            }
            for block in plan.blocks
        ],
        "raylets": [
            {
                "index": raylet.index,
                "numa_nodes": list(raylet.numa_nodes),
                "cores": list(raylet.cores),
                "cpus": raylet.cpus,
                "memory_bytes": raylet.memory_bytes,
                "object_store_bytes": raylet.object_store_bytes,
                "blocks": list(raylet.blocks),
            }
            for raylet in plan.raylets
        ],
        "idle_cores": list(plan.idle_cores),
        "warnings": list(plan.warnings),
    }


def _host_and_plan(
    file: Path | None, tp_degree: int | None, degraded: bool
) -> tuple[HostTopology | None, TopologyPlan]:
    if file is not None:
        if tp_degree is None:
            raise TopologyError(
                [Problem(kind="degree", message="--neuron-ls needs --tp-degree: the cores of one replica")]
            )
        try:
            host = host_of_output(sys.stdin.read()) if str(file) == "-" else read_neuron_ls_file(file)
        except OSError as error:
            reason = error.strerror or str(error)
            raise TopologyError(
                [Problem(kind="neuron-ls-output", message=f"{file} cannot be read: {reason}")]
            ) from error
        return host, plan_topology(host, tp_degree, allow_degraded=degraded)
    if tp_degree is None:
        try:
            plan = load_plan(TOPOLOGY_PATH)
        except TopologyError as error:
            hint = "Elsewhere than on a host of a fleet: --neuron-ls FILE --tp-degree N."
            raise TopologyError(
                [p.model_copy(update={"message": f"{p.message} {hint}"}) for p in error.problems]
            ) from error
        return (read_host() if Path(NEURON_LS).exists() else None), plan
    host = read_host()
    return host, plan_topology(host, tp_degree, allow_degraded=degraded, ignore_processes=True)


def _show_live(console: Console, plan: TopologyPlan) -> None:
    bindings = replica_bindings(plan)
    for replica in bindings:
        live = replica["live"]
        where = f"block {replica['block']} (raylet {replica['raylet']}): process {replica['pid']}"
        if live["ok"]:
            console.print(f"[green]live[/] {where} on CPUs {live['cpus']}, memory {live['memory_policy']}")
        else:
            console.print(f"[red]live[/] {where}: {escape(live['reason'])}")
    if not bindings:
        console.print("No block is claimed now.")


def _fail(problems: tuple[Problem, ...], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"problems": [problem.model_dump() for problem in problems]}, indent=2))
    for problem in problems:
        print(f"topology: {problem.message}", file=sys.stderr)
    raise typer.Exit(1)
