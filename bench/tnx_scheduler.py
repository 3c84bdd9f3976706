"""First come, first served against the stall policy, on the plan's timing of a real model, in virtual time.

    python -m bench.tnx_scheduler [--json] [--model meta-llama/Llama-3.1-8B --tp-degree 8 --rate 2.0 …]

The same requests go through the engine three times: prefill as soon as a slot is free (what
transformers-neuronx under vLLM's old scheduler did), the stall policy over whole prompts, and the policy with
chunk graphs compiled (``enable_speculative_decoder``). Everything is the engine's own code but the model,
whose steps take the time that ``app.plan.performance`` predicts for Inf2: no hardware was measured. The time
of a chunk is taken as a prefill of its length and a decode step of one sequence together, which is on the
high side.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from typing import Any

import numpy as np

from app.plan.catalogue import get_instance
from app.plan.engine_arguments import default_buckets
from app.plan.models import load_model
from app.plan.performance import ReplicaModel, shipped_constants
from app.plan.sharding import shard
from app.serve.engines.transformers_neuronx.contract import Geometry
from app.serve.engines.transformers_neuronx.core import EngineCore
from app.serve.engines.transformers_neuronx.metrics import EngineMetrics
from app.serve.engines.transformers_neuronx.request import GenerationRequest, Sampling
from app.serve.policy.costs import StepCosts
from app.serve.policy.stall import StallPolicy
from bench.tnx_emulation import EmulatedModel, LetterTokenizer, VirtualClock

_VOCABULARY = 64
_LABELS = {"first_come_first_served": "FCFS", "policy": "policy", "policy_with_chunks": "+ chunks"}
Arrivals = list[tuple[float, GenerationRequest]]


def predicted_costs(options: argparse.Namespace, geometry: Geometry) -> StepCosts:
    """What the plan predicts for each graph, in milliseconds."""
    replica = ReplicaModel(
        sharding=shard(load_model(options.model), options.tp_degree),
        instance=get_instance(options.instance),
        max_model_len=options.max_model_len,
        constants=shipped_constants(),
        context_buckets=tuple(sorted({*geometry.context_buckets, *geometry.chunk_sizes})),
        token_buckets=geometry.token_buckets,
    )
    one = replica.decode_step_s(geometry.context_limit, 1)
    return StepCosts(
        context={bucket: replica.prefill_s(bucket) * 1000 for bucket in geometry.context_buckets},
        decode={
            bucket: replica.decode_step_s(bucket, geometry.slots) * 1000 for bucket in geometry.token_buckets
        },
        chunk={size: (replica.prefill_s(size) + one) * 1000 for size in geometry.chunk_sizes},
    )


def requests(options: argparse.Namespace, longest: int) -> Arrivals:
    """Chats and now and then a document; arrivals at random at the given rate."""
    rng = random.Random(options.seed)
    at = 0.0
    made = []
    for number in range(options.requests):
        at += rng.expovariate(options.rate)
        document = rng.random() < options.long_share
        length = min(rng.randint(longest // 2, longest) if document else rng.randint(30, 400), longest)
        prompt = tuple(rng.randrange(_VOCABULARY) for _ in range(length))
        sampling = Sampling(rng.randint(40, 240), temperature=0.0, ignore_eos=True)
        made.append((at, GenerationRequest(str(number), prompt, sampling)))
    return made


def run(geometry: Geometry, costs: StepCosts, policy: StallPolicy, arrivals: Arrivals) -> dict[str, Any]:
    """One way of scheduling: what streams and newcomers see, in milliseconds."""
    clock = VirtualClock()
    metrics = EngineMetrics()
    core = EngineCore(
        EmulatedModel(geometry, costs, clock),
        LetterTokenizer(),
        costs,
        policy=policy,
        eos=frozenset(),
        clock=clock,
        metrics=metrics,
        queue_limit=len(arrivals),
    )
    times: dict[str, list[float]] = {request.request_id: [] for _, request in arrivals}
    arrived = {request.request_id: at for at, request in arrivals}
    coming = list(reversed(arrivals))
    while coming or not core.idle:
        while coming and coming[-1][0] <= clock.now:
            core.add(coming.pop()[1])
        if core.idle:
            clock.now = coming[-1][0]
            continue
        for output in core.step():
            times[output.request_id] += [clock.now] * len(output.tokens)
    gaps = [(b - a) * 1000 for series in times.values() for a, b in itertools.pairwise(series)]
    tpot = [(series[-1] - series[0]) / (len(series) - 1) * 1000 for series in times.values()]
    first = [(series[0] - arrived[name]) * 1000 for name, series in times.items()]
    counts = metrics.counts
    return {
        "max_stall_ms": round(counts.stall_ms_max, 1),
        "stalls": counts.stalls,
        "inter_token_ms": _spread(gaps),
        "tpot_ms": _spread(tpot),
        "ttft_ms": _spread(first),
        "output_tokens_per_second": round(counts.generated_tokens / clock.now, 1),
        "prefill_steps": counts.prefill_steps,
        "decode_steps": counts.decode_steps,
    }


def _spread(values: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(values, [50, 99])
    return {"p50": round(float(p50), 1), "p99": round(float(p99), 1), "max": round(max(values), 1)}


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """All ways over the same requests."""
    buckets = [size for size in default_buckets(options.max_model_len) if size >= options.smallest_bucket]
    contexts = tuple(size for size in buckets if size <= options.longest_prompt)
    tokens = tuple(size for size in buckets if size > options.smallest_bucket)
    plain = Geometry(options.slots, tokens, contexts, _VOCABULARY)
    chunked = Geometry(options.slots, tokens, contexts, _VOCABULARY, tuple(sorted(options.chunks)))
    arrivals = requests(options, contexts[-1])
    policy = StallPolicy(tpot_slo_ms=options.tpot_slo_ms)
    ways = {
        "first_come_first_served": (plain, StallPolicy(tpot_slo_ms=None)),
        "policy": (plain, policy),
        "policy_with_chunks": (chunked, policy),
    }
    results = {
        name: run(geometry, predicted_costs(options, geometry), way, arrivals)
        for name, (geometry, way) in ways.items()
    }
    costs = predicted_costs(options, chunked).as_dict()
    return {
        "timing": "predicted by app.plan.performance, not measured",
        "settings": {name: value for name, value in vars(options).items() if name != "json"},
        "costs_ms": {
            kind: {str(k): round(v, 1) for k, v in values.items()} for kind, values in costs.items()
        },
        "results": results,
    }


def main(arguments: list[str] | None = None) -> int:
    """Run and print; ``--json`` gives one document."""
    parser = argparse.ArgumentParser(prog="python -m bench.tnx_scheduler", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B")
    parser.add_argument("--instance", default="inf2.48xlarge")
    parser.add_argument("--tp-degree", type=int, default=8)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--longest-prompt", type=int, default=4096)
    parser.add_argument("--smallest-bucket", type=int, default=256)
    parser.add_argument("--chunks", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=1.5, help="requests a second")
    parser.add_argument("--long-share", type=float, default=0.15)
    parser.add_argument("--tpot-slo-ms", type=float, default=100.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    report = compare(options)
    if options.json:
        json.dump(report, sys.stdout, indent=2)
        print()
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{options.model}, TP {options.tp_degree}, {options.slots} slots; ms, {report['timing']}"
    )
    for column in ("", "stall max", "gap p99", "TPOT p99", "TTFT p50", "TTFT p99", "tokens/s"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, result in report["results"].items():
        table.add_row(
            _LABELS[name],
            f"{result['max_stall_ms']}",
            f"{result['inter_token_ms']['p99']}",
            f"{result['tpot_ms']['p99']}",
            f"{result['ttft_ms']['p50']}",
            f"{result['ttft_ms']['p99']}",
            str(result["output_tokens_per_second"]),
        )
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
