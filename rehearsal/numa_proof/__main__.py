"""``python -m rehearsal.numa_proof``: boot the machine, check it against the plan, show the evidence."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rehearsal.numa_proof.machine import MachineRun, ProofError, run_machine
from rehearsal.numa_proof.verdict import Check, as_json, bad_plan_check, checks_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rehearsal.numa_proof", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--output", type=Path, help="also write the JSON document to this file")
    options = parser.parse_args()
    console = Console(stderr=options.json)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="neuronfleet-numa-proof-") as folder,
            console.status(
                "An emulated machine with four NUMA nodes boots and runs the plan (QEMU, about a minute)"
            ),
        ):
            run = run_machine(Path(folder))
    except ProofError as error:
        print(f"numa-proof: {error}", file=sys.stderr)
        return 1
    result = result_of(run)
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        show(console, json.loads(run.result), result)
    return 0 if result["ok"] else 1


def result_of(run: MachineRun) -> dict[str, Any]:
    return as_json(json.loads(run.result), run.seconds)


def show(console: Console, report: dict[str, Any], result: dict[str, Any]) -> None:
    table = Table(
        title="Where threads and pages sat, against the nodes of their devices (emulated inf2.48xlarge)"
    )
    for heading in (
        "TP",
        "raylet",
        "cores",
        "devices' nodes",
        "threads ran on nodes",
        "pages by node",
        "distance",
        "as planned",
    ):
        table.add_column(heading)
    for check in checks_of(report):
        table.add_row(*_row(check), "[green]yes[/]" if check.ok else "[red]no[/]")
    table.add_section()
    bad = bad_plan_check(report)
    table.add_row(*_row(bad), "[red]no: the bad plan, node 0[/]")
    console.print(table)
    console.print(
        f"Kernel {result['kernel']}, {len(result['nodes'])} nodes, {result['seconds']} s. "
        "Distance: from the farthest page to the nearest device of its block (10 is local)."
    )
    for fault in result["faults"]:
        console.print(f"[red]{fault}[/]")
    console.print("[green]The plan holds.[/]" if result["ok"] else "[red]The plan does not hold.[/]")


def _row(check: Check) -> tuple[str, ...]:
    return (
        str(check.tp_degree),
        str(check.raylet),
        check.cores,
        ",".join(map(str, check.device_nodes)),
        ",".join(map(str, check.thread_nodes)),
        " ".join(f"{node}:{pages}" for node, pages in check.pages_by_node.items()),
        str(check.worst_distance),
    )


if __name__ == "__main__":
    sys.exit(main())
