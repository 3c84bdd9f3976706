"""What running streams see of other people's prompts: the stall policy against first come, first served.

    python -m bench.policy [--trace F] [--json] [--tpot-slo-ms 100 --slots 16 …]

A trace's requests (ContextTokens, GeneratedTokens; by default the start of the Azure conversation trace of
2023, see ``bench/data``) go through the engine's own scheduler in virtual time, with the step
times that the plan predicts for Inf2: no hardware was measured. Arrivals are the trace's own, slowed down or
sped up to a share of what the replica can do; 1.3 keeps it saturated, where throughput can be compared. The
policy has one setting, the time per output token that running streams keep. It is shown on the graphs that
every engine has, and with the chunk graphs that transformers-neuronx can compile beside them.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.plan.catalogue import get_instance
from app.plan.models import load_model
from app.plan.performance import ReplicaModel, shipped_constants
from app.plan.sharding import shard
from app.plan.trace import TraceError, read_trace
from app.serve.engines.emulated_static import planned_costs
from app.serve.engines.transformers_neuronx.contract import Geometry
from app.serve.policy.costs import StepCosts
from app.serve.policy.stall import StallPolicy
from bench.policy_simulation import Request, simulate, summary

SAMPLE = Path(__file__).parent / "data" / "azure_llm_2023_conv_first.csv"
_BASELINE = "first_come_first_served"
_LABELS = {_BASELINE: "FCFS", "policy": "policy", "policy_with_chunks": "+ chunks"}


def read_requests(path: Path, longest_prompt: int, context: int, most: int) -> list[Request]:
    """The trace's first requests that the compiled graphs take.

    Raises:
        TraceError: it has no arrival times or output lengths, or is unreadable.
    """
    trace = read_trace(path)
    if not (len(trace.arrivals_s) == len(trace.input_tokens) == len(trace.output_tokens)):
        raise TraceError(f"{path}: needs a time, an input and an output length for each request")
    rows = zip(trace.arrivals_s, trace.input_tokens, trace.output_tokens, strict=True)
    fitting = [
        Request(at, prompt, max(output, 1))
        for at, prompt, output in rows
        if prompt <= longest_prompt and prompt + output <= context
    ]
    return sorted(fitting, key=lambda item: item.at)[:most]


def at_load(requests: list[Request], load: float, capacity: float) -> list[Request]:
    """The same requests, at ``load`` times ``capacity`` (requests/s) on average."""
    start = requests[0].at
    factor = len(requests) / (requests[-1].at - start) / (load * capacity)
    return [Request((item.at - start) * factor, item.prompt_tokens, item.output_tokens) for item in requests]


def predicted(options: argparse.Namespace) -> tuple[Geometry, StepCosts]:
    """Compiled graphs and what the plan says they take."""
    edges = tuple(sorted(options.buckets))
    contexts = tuple(edge for edge in edges if edge <= options.longest_prompt)
    tokens = edges[
        1:
    ]  # a decode bucket must be longer than a chunk, and answers are longer than the smallest
    geometry = Geometry(options.slots, tokens, contexts, 2, tuple(sorted(options.chunks)))
    replica = ReplicaModel(
        shard(load_model(options.model), options.tp_degree),
        get_instance(options.instance),
        edges[-1],
        shipped_constants(),
        tuple(sorted({*contexts, *options.chunks})),
        tokens,
    )
    return geometry, planned_costs(replica, geometry)


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Every way at each load."""
    chunked, costs = predicted(options)
    geometry = replace(chunked, chunk_sizes=())
    requests = read_requests(
        options.trace, geometry.context_buckets[-1], geometry.context_limit, options.requests
    )
    bounded = StallPolicy(tpot_slo_ms=options.tpot_slo_ms)
    ways = {
        _BASELINE: (geometry, StallPolicy(tpot_slo_ms=None)),
        "policy": (geometry, bounded),
        "policy_with_chunks": (chunked, bounded),
    }
    # All at once: what the replica can do at most.
    _, ended = simulate(
        [Request(0.0, item.prompt_tokens, item.output_tokens) for item in requests],
        geometry,
        costs,
        ways[_BASELINE][1],
    )
    capacity = len(requests) / ended
    loads = []
    for load in options.loads:
        slowed = at_load(requests, load, capacity)
        results: dict[str, Any] = {
            name: summary(*simulate(slowed, graphs, costs, way)) for name, (graphs, way) in ways.items()
        }
        for result in results.values():
            result["ratios"] = _ratios(result, results[_BASELINE])
        loads.append({"load": load, **results})
    return {
        "timing": "predicted by app.plan.performance, not measured",
        "settings": {**vars(options), "trace": str(options.trace.name)},
        "requests": len(requests),
        "capacity_requests_per_second": round(capacity, 3),
        "costs_ms": {
            kind: {str(bucket): round(value, 1) for bucket, value in values.items()}
            for kind, values in costs.as_dict().items()
        },
        "loads": loads,
    }


def _ratios(result: dict[str, Any], baseline: dict[str, Any]) -> dict[str, float]:
    """Against first come, first served, at the same load."""
    gap = result["longest_gap_ms"]["p99"] / baseline["longest_gap_ms"]["p99"]
    rate = result["output_tokens_per_second"] / baseline["output_tokens_per_second"]
    return {"p99_longest_gap": round(gap, 3), "throughput": round(rate, 4)}


def _table(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    settings = report["settings"]
    table = Table(
        title=f"{settings['model']}, TP {settings['tp_degree']}, {settings['slots']} slots, "
        f"{report['requests']} requests; ms, {report['timing']}"
    )
    columns = (
        "load",
        "",
        "gap p99",
        "gap max",
        "TPOT p99",
        "TTFT p50",
        "TTFT p99",
        "tok/s",
        "gap ×",
        "tok/s ×",
    )
    for column in columns:
        table.add_column(column, justify="left" if column in ("load", "") else "right", no_wrap=True)
    for item in report["loads"]:
        for name, label in _LABELS.items():
            result = item[name]
            table.add_row(
                f"{item['load']:g}" if name == _BASELINE else "",
                label,
                f"{result['longest_gap_ms']['p99']:.0f}",
                f"{result['longest_gap_ms']['max']:.0f}",
                f"{result['tpot_ms']['p99']:.1f}",
                f"{result['ttft_ms']['p50']:.0f}",
                f"{result['ttft_ms']['p99']:.0f}",
                f"{result['output_tokens_per_second']:.1f}",
                f"{result['ratios']['p99_longest_gap']:.2f}",
                f"{result['ratios']['throughput']:.3f}",
                end_section=name == "policy_with_chunks",
            )
    Console().print(table)


def main(arguments: list[str] | None = None) -> int:
    """Run and print; ``--json`` gives one document."""
    parser = argparse.ArgumentParser(prog="python -m bench.policy", description=__doc__.split("\n")[0])
    parser.add_argument("--trace", type=Path, default=SAMPLE)
    parser.add_argument("--requests", type=int, default=2000, help="at most so many of the trace's first")
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B")
    parser.add_argument("--instance", default="inf2.48xlarge")
    parser.add_argument("--tp-degree", type=int, default=8)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--buckets", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--longest-prompt", type=int, default=4096)
    parser.add_argument("--chunks", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--tpot-slo-ms", type=float, default=100.0)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.7, 0.9, 1.3])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        report = compare(options)
    except TraceError as error:
        print(f"bench.policy: {error}", file=sys.stderr)
        return 1
    if options.json:
        del report["settings"]["json"]
        json.dump(report, sys.stdout, indent=2)
        print()
    else:
        _table(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
