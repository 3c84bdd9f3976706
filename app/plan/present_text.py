"""Plans, scores and buckets for people: rich tables on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from app.plan.buckets import Buckets, GraphChoice
from app.plan.catalogue import GIB
from app.plan.performance import Estimate
from app.plan.planner import Plan
from app.plan.tutorial import Comparison
from app.plan.validation import QUANTITIES, ScoredRow

_UNITS = {"ttft": "ms", "tpot": "ms", "throughput": "tokens/s"}


def show_plan(console: Console, plan: Plan) -> None:
    """The plan: verdict, memory, performance with ranges, cost, warnings, proposals."""
    request, fitted = plan.request, plan.fit
    verdict = Text("fits", "bold green") if plan.fits else Text("does not fit", "bold red")
    if plan.fits and plan.refusals:
        verdict = Text("fits, but the engine profile refuses it", "bold yellow")
    head = Text.assemble(
        (request.model.name, "bold"),
        f" on {fitted.instance.name}, tensor parallel degree {fitted.shape.tp_degree}, "
        f"batch {fitted.shape.batch_size}, {fitted.shape.max_model_len} tokens, "
        f"{fitted.shape.weights_dtype}, profile {request.profile.name}: ",
        verdict,
    )
    parts: list[RenderableType] = [head]
    parts += [Text(f"✗ {reason}", "red") for reason in plan.reasons]
    parts += [Text(f"{'✗' if item.refuses else '!'} {item.message}", "yellow") for item in plan.findings]
    parts.append(_memory(plan))
    if plan.performance is not None:
        parts.append(_performance(plan))
        parts.append(_cost(plan))
    if plan.proposals:
        parts.append(_proposals(plan))
    console.print(Group(*parts))


def _memory(plan: Plan) -> Table:
    fitted = plan.fit
    table = Table(title="Memory of one core", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    sharding = fitted.sharding
    rows = (
        ("weights", fitted.weights_bytes_per_core, f"{sharding.heads} query heads after padding"),
        ("KV cache", fitted.kv_cache_bytes_per_core, f"{sharding.kv_heads} KV heads after replication"),
        ("activations", fitted.activation_bytes_per_core, "estimate"),
        ("runtime reserve", fitted.reserve_bytes_per_core, "estimate"),
        ("together", fitted.bytes_per_core, f"of {_gib(fitted.instance.hbm_bytes_per_core)}"),
    )
    for name, value, note in rows:
        table.add_row(name, _gib(value), note, style="bold" if name == "together" else None)
    idle = f", {fitted.idle_cores} cores idle" if fitted.idle_cores else ""
    table.add_row("replicas", str(fitted.replicas_per_instance), f"per {fitted.instance.name}{idle}")
    table.add_row("host memory", _gib(fitted.host_bytes), f"of {_gib(fitted.instance.memory_bytes)} to load")
    table.add_row("root volume", _gib(fitted.root_volume_bytes), "image, checkpoint, artifact")
    table.add_row("load", f"{fitted.network_load_s:.0f} s", f"network; {fitted.volume_load_s:.0f} s from gp3")
    return table


def _performance(plan: Plan) -> Table:
    performance = plan.performance
    assert performance is not None
    request = plan.request
    table = Table(
        title=f"Predicted for {request.input_tokens} input and {request.output_tokens} output tokens",
        title_justify="left",
    )
    table.add_column("")
    table.add_column("value", justify="right")
    table.add_column("80 % range", justify="right")
    rows: tuple[tuple[str, Estimate, str], ...] = (
        ("TTFT, one request alone", performance.ttft_alone_ms, "ms"),
        (f"TTFT, {request.batch_size} arriving together", performance.ttft_ms, "ms"),
        ("TPOT, median, full batch", performance.tpot_ms, "ms"),
        ("output, whole instance", performance.output_tokens_per_second, "tokens/s"),
        ("output while decoding only", performance.decode_tokens_per_second, "tokens/s"),
    )
    for name, value, unit in rows:
        table.add_row(
            name, f"{_number(value.value)} {unit}", f"{_number(value.low)} to {_number(value.high)}"
        )
    return table


def _cost(plan: Plan) -> Table:
    request, cost = plan.request, plan.cost
    where = f"{request.purchase.replace('_', ' ')}, {request.region}"
    table = Table(
        title=f"Cost ({where}, {request.utilisation:.0%} busy)", title_justify="left", show_header=False
    )
    table.add_column()
    table.add_column(justify="right")
    rows = (
        ("an hour", cost.usd_per_hour),
        ("a million output tokens", cost.usd_per_million_output_tokens),
        ("… split by time: a million input tokens", cost.split_input),
        ("… split by time: a million output tokens", cost.split_output),
    )
    for name, value in rows:
        table.add_row(name, "no price" if value is None else f"${value:.2f}")
    for way, value in cost.by_purchase.items():
        if way != request.purchase:
            name = f"a million output tokens, {way.replace('_', ' ')}"
            table.add_row(name, "give a price with --prices" if value is None else f"${value:.2f}")
    return table


def _proposals(plan: Plan) -> Table:
    table = Table(title="Nearest plans that fit", title_justify="left")
    for name in ("change", "on", "TPOT ms", "$ / million output tokens"):
        table.add_column(name, justify="left" if name in ("change", "on") else "right")
    for item in plan.proposals:
        usd = item.usd_per_million_output_tokens
        table.add_row(
            "\n".join(item.changes),
            f"{item.instance}, TP {item.shape.tp_degree}, batch {item.shape.batch_size}, "
            f"{item.shape.max_model_len} tokens, {item.shape.weights_dtype}",
            f"{item.tpot_ms:.1f}",
            "no price" if usd is None else f"{usd:.2f}",
        )
    return table


def show_scores(
    console: Console,
    scored: Sequence[ScoredRow],
    errors: Mapping[str, float | None],
    fitted: Mapping[str, Any],
) -> None:
    """Rows with measured, predicted and error; the mean errors; what leaving a model out gave."""
    table = Table(title="Published rows, and the shipped constants' predictions", title_justify="left")
    for name in ("model", "TP", "batch", "in/out", "dtype"):
        table.add_column(name, overflow="fold", min_width=11 if name == "model" else None)
    for name in QUANTITIES:
        table.add_column(f"{name} {_UNITS[name]}", justify="right")
    for item in scored:
        row = item.row
        cells = [
            f"{_number(item.measured[name])} → {_number(item.predicted[name])} ({item.error(name):+.0%})"
            if name in item.measured
            else "-"
            for name in QUANTITIES
        ]
        work = row.work
        table.add_row(
            row.model.name.rsplit("/", 1)[-1],
            str(row.tp_degree),
            str(work.batch_size),
            f"{work.input_tokens}/{work.output_tokens}",
            row.weights_dtype,
            *cells,
        )
    console.print(table)
    means = ", ".join(f"{name} {'-' if value is None else f'{value:.1%}'}" for name, value in errors.items())
    console.print(f"mean absolute percentage error over {len(scored)} rows: [bold]{means}[/bold]")
    left_out = "; ".join(
        f"{model} " + ", ".join(f"{name} {values[name]:.1%}" for name in QUANTITIES)
        for model, values in fitted["leave_one_model_out"].items()
    )
    console.print(f"constants fitted on {fitted['rows']} rows; leaving one model out: {left_out}")


def show_buckets(
    console: Console,
    counts: Mapping[int, int],
    chosen: Buckets,
    baseline: Buckets,
    choices: Sequence[GraphChoice],
    recommended: int,
) -> None:
    """The histogram with the edges in it, the padding of each count of graphs, the baseline's."""
    console.print(Panel(_histogram(counts, chosen), title="prompt lengths and bucket edges", expand=False))
    table = Table(title="Graphs and padding", title_justify="left")
    for name in ("graphs", "edges", "padding", "saved by the last", "repaid after"):
        table.add_column(name, justify="left" if name == "edges" else "right")
    for item in choices:
        payback = "-" if item.payback_h is None else f"{item.payback_h:.1f} h of this traffic"
        table.add_row(
            str(item.count),
            ", ".join(str(edge) for edge in item.buckets.edges),
            f"{item.buckets.padding_fraction:.1%}",
            f"{item.saved_tokens:,} tokens" if item.saved_tokens else "-",
            payback,
            style="bold" if item.buckets.edges == chosen.edges else None,
        )
    edges = ", ".join(str(edge) for edge in baseline.edges)
    table.add_row("default", edges, f"{baseline.padding_fraction:.1%}", "", "", style="dim")
    console.print(table)
    console.print(f"worth compiling by their saving: [bold]{recommended}[/bold] graph(s)")


def _histogram(counts: Mapping[int, int], chosen: Buckets, rows: int = 24, width: int = 48) -> Text:
    last = chosen.edges[-1]
    step = max(-(-last // rows), 1)
    bins: dict[int, int] = {}
    for length, requests in counts.items():
        if length <= last:
            bins[(length - 1) // step] = bins.get((length - 1) // step, 0) + requests
    most = max(bins.values(), default=1)
    text = Text()
    previous = 0
    for index in range(-(-last // step)):
        high = min((index + 1) * step, last)
        bar = "█" * round(width * bins.get(index, 0) / most)
        text.append(f"{index * step + 1:>7}–{high:<7}")
        text.append(f"{bar:<{width}} {bins.get(index, 0):>9,}\n", "cyan")
        for edge in chosen.edges:
            if previous < edge <= high:
                text.append(f"{'':>7} {'─' * (width + 8)} {edge}\n", "bold magenta")
        previous = high
    text.rstrip()
    return text


def show_comparison(console: Console, comparison: Comparison) -> None:
    """The tutorial's table recomputed, the plan's predictions for its Inf2 column, and what does not hold."""
    table = Table(title="The tutorial's table, recomputed", title_justify="left")
    for name in ("instance", "tokens/s (claimed)", "$ / h claimed", "now", "$ / million claimed", "now"):
        table.add_column(name, justify="left" if name == "instance" else "right")
    for row in comparison.rows:
        claim = row.claim
        table.add_row(
            claim.instance,
            f"{claim.tokens_per_s:g}",
            f"{claim.usd_per_hour:.2f}",
            f"{row.usd_per_hour:.2f}",
            f"{claim.usd_per_million:.2f}",
            f"{row.usd_per_million_now:.2f}",
        )
    console.print(table)
    table = Table(title="The plan for its workload on inf2.48xlarge", title_justify="left")
    for name in ("TP", "batch", "TTFT ms", "TPOT ms", "tokens/s", "$ / million"):
        table.add_column(name, justify="right")
    for item in comparison.predictions:
        table.add_row(
            str(item.tp_degree),
            str(item.batch_size),
            f"{item.ttft_ms:.0f}",
            f"{item.tpot_ms:.1f}",
            f"{item.tokens_per_s:.0f}",
            f"{item.usd_per_million:.2f}",
        )
    console.print(table)
    for finding in comparison.findings:
        console.print(Text(f"• {finding}"))


def _gib(value: int) -> str:
    return f"{value / GIB:.2f} GiB"


def _number(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"
