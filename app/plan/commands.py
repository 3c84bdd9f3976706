"""``neuronfleet plan``, ``plan-validate``, ``plan-compare`` and ``buckets``."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from app.plan.planner import Plan, PlanRequest
    from app.plan.trace import Trace

_JSON = typer.Option("--json", help="print one JSON document")
_MODEL = typer.Option(help="Hugging Face id that the plan knows, or a folder, or a config.json")
_PRICES = typer.Option("--prices", help="price file laid over the shipped one (app/plan/data/prices.json)")


def register(app: typer.Typer) -> None:
    """Add this module's commands to ``app``."""
    app.command("plan")(plan)
    app.command("plan-validate")(plan_validate)
    app.command("plan-compare")(plan_compare)
    app.command("buckets")(buckets)


def plan(
    model: Annotated[str, _MODEL],
    instance: Annotated[str, typer.Option(help="Inf2 size, or auto")] = "auto",
    profile: Annotated[str, typer.Option(help="engine profile")] = "vllm-neuron-2.28",
    tp_degree: Annotated[str, typer.Option(help="tensor parallel degree, or auto")] = "auto",
    batch_size: Annotated[int, typer.Option(min=1, help="sequences decoded together")] = 8,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="longest sequence, tokens")] = None,
    input_tokens: Annotated[int, typer.Option(min=1, help="prompt length, tokens")] = 1024,
    output_tokens: Annotated[int, typer.Option(min=1, help="answer length, tokens")] = 256,
    weights_dtype: Annotated[str, typer.Option(help="bf16 or int8")] = "bf16",
    prefix_caching: Annotated[
        bool, typer.Option("--prefix-caching", help="plan with prefix caching")
    ] = False,
    context_buckets: Annotated[str, typer.Option(help="prefill buckets, comma list")] = "",
    region: Annotated[str, typer.Option(help="region whose prices count")] = "us-east-1",
    purchase: Annotated[str, typer.Option(help="on_demand, reserved_1y or spot")] = "on_demand",
    utilisation: Annotated[float, typer.Option(help="share of the hour that is busy, over 0 to 1")] = 1.0,
    slo_ttft_ms: Annotated[float | None, typer.Option(help="objective: time to first token")] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(help="objective: time per output token")] = None,
    prices: Annotated[Path | None, _PRICES] = None,
    html: Annotated[Path | None, typer.Option(help="write a page with the latency-cost frontier")] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Does a model fit, how fast will it be, what will it cost. Exit 0: it fits; 1: it does not; 2: bad
    input."""
    from app.plan.catalogue import get_instance
    from app.plan.models import load_model
    from app.plan.planner import Planner, PlanRequest
    from app.plan.prices import load_prices
    from app.plan.profiles import get_profile

    def build() -> tuple[Planner, PlanRequest, Plan]:
        book = load_prices(prices)
        if region not in book.regions:
            raise ValueError(f"no prices for region {region!r}; known: {', '.join(sorted(book.regions))}")
        if not 0 < utilisation <= 1:
            raise ValueError(f"--utilisation {utilisation} must be over 0 and at most 1")
        request = PlanRequest(
            model=load_model(model),
            profile=get_profile(profile),
            instance=None if instance == "auto" else get_instance(instance),
            tp_degree=_degree(tp_degree),
            batch_size=batch_size,
            max_model_len=max_model_len,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            weights_dtype=_one_of("--weights-dtype", weights_dtype, ("bf16", "int8")),
            prefix_caching=prefix_caching,
            context_buckets=_edges(context_buckets),
            region=region,
            purchase=_one_of("--purchase", purchase, ("on_demand", "reserved_1y", "spot")),
            utilisation=utilisation,
            slo_ttft_ms=_positive("--slo-ttft-ms", slo_ttft_ms),
            slo_tpot_ms=_positive("--slo-tpot-ms", slo_tpot_ms),
        )
        planner = Planner(book)
        return planner, request, planner.plan(request)

    planner, request, answer = _or_exit(build)
    if html is not None:
        from app.plan.frontier import sweep
        from app.plan.present_html import plan_page

        page = plan_page(answer, sweep(planner, request), planner.prices)
        _or_exit(lambda: html.write_text(page))
    if as_json:
        from app.plan.present_json import plan_document

        _print_json(plan_document(answer))
    else:
        from rich.console import Console

        from app.plan.present_text import show_plan

        show_plan(Console(), answer)
        if html is not None:
            typer.echo(f"wrote {html}")
    raise typer.Exit(0 if answer.fits else 1)


def plan_validate(
    csv: Annotated[Path, typer.Option(help="measured rows (columns: docs/guides/plan.md)")],
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Score the shipped constants on measured rows; nothing is fitted."""
    from importlib import resources

    from app.plan.performance import shipped_constants
    from app.plan.validation import QUANTITIES, mape, read_rows, score

    scored = _or_exit(lambda: score(read_rows(csv), shipped_constants()))
    errors = {name: mape(scored, name) for name in QUANTITIES}
    fitted = json.loads(resources.files("app.plan").joinpath("data/performance_constants.json").read_text())
    if as_json:
        _print_json(
            {
                "rows": len(scored),
                "mape": errors,
                "leave_one_model_out": fitted["leave_one_model_out"],
                "details": [
                    {
                        "line": item.row.line,
                        "model": item.row.model.name,
                        "measured": item.measured,
                        "predicted": {name: item.predicted[name] for name in item.measured},
                    }
                    for item in scored
                ],
            }
        )
        return
    from rich.console import Console

    from app.plan.present_text import show_scores

    show_scores(Console(), scored, errors, fitted)


def plan_compare(
    prices: Annotated[Path | None, _PRICES] = None, as_json: Annotated[bool, _JSON] = False
) -> None:
    """The tutorial's comparison table at today's prices, and what of it does not hold."""
    from dataclasses import asdict

    from app.plan.planner import Planner
    from app.plan.prices import load_prices
    from app.plan.tutorial import compare

    comparison = _or_exit(lambda: compare(Planner(load_prices(prices))))
    if as_json:
        _print_json(asdict(comparison))
        return
    from rich.console import Console

    from app.plan.present_text import show_comparison

    show_comparison(Console(), comparison)


def buckets(
    trace: Annotated[Path, typer.Option(help="CSV of requests, or a histogram (length, count)")],
    max_len: Annotated[int, typer.Option(min=1, help="longest prompt, tokens: always the last bucket")],
    count: Annotated[int | None, typer.Option(min=1, help="graphs; left out: by their saving")] = None,
    multiple: Annotated[int, typer.Option(min=1, help="edges are multiples of this")] = 64,
    column: Annotated[str | None, typer.Option(help="length column, if it has an unusual name")] = None,
    edges: Annotated[str, typer.Option(help="also the padding of these edges, comma list")] = "",
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="leave faulty rows out, and say so")] = False,
    max_batch: Annotated[int | None, typer.Option(min=1, help="also decode batch sizes up to this")] = None,
    batch_count: Annotated[int, typer.Option(min=1, help="decode batch sizes to compile")] = 4,
    replicas: Annotated[int, typer.Option(min=1, help="replicas that share the trace")] = 1,
    tpot_ms: Annotated[float, typer.Option(help="ms per output token, for decode batches")] = 15.0,
    compile_minutes: Annotated[float, typer.Option(help="minutes to compile one graph")] = 5.0,
    prefill_ms: Annotated[float, typer.Option(help="ms of prefill for 1,000 tokens")] = 50.0,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Bucket edges with the least padding for a trace, exactly; how many graphs are worth their
    compilation."""
    from app.plan.buckets import default_edges, graph_choices, optimal_buckets, padding, recommended_count
    from app.plan.trace import read_trace

    for option, value in (
        ("--tpot-ms", tpot_ms),
        ("--compile-minutes", compile_minutes),
        ("--prefill-ms", prefill_ms),
    ):
        _or_exit(partial(_positive, option, value))
    read = _or_exit(lambda: read_trace(trace, column=column, skip_bad=skip_bad))
    over, first_over = read.over(max_len)
    if read.faults.count:
        typer.echo(f"left out: {read.faults.describe()}", err=True)
    if over:
        typer.echo(
            f"{over} request(s) longer than {max_len} tokens do not count (first: row {first_over})", err=True
        )
    if over == read.requests:
        _fail(f"no request is at most {max_len} tokens long")
    found = optimal_buckets(read.counts, max(count or 0, 12), max_len, multiple)
    choices = graph_choices(
        found,
        duration_h=read.duration_h,
        prefill_ms_per_1k_tokens=prefill_ms,
        compile_minutes=compile_minutes,
    )
    recommended = recommended_count(choices)
    chosen = found[min(count or recommended, len(found)) - 1]
    baseline = padding(read.counts, default_edges(max_len))
    own = _or_exit(lambda: padding(read.counts, _edges(edges))) if edges else None
    batches = None
    if max_batch is not None:
        batches = _or_exit(lambda: _batches(read, max_batch, batch_count, replicas, tpot_ms))
    if as_json:
        document: dict[str, Any] = {
            "buckets": list(chosen.edges),
            "padding_fraction": chosen.padding_fraction,
            "baseline_padding_fraction": baseline.padding_fraction,
            "baseline_buckets": list(baseline.edges),
            "requests": read.requests - over,
            "over_max": over,
            "left_out": read.faults.count,
            "recommended_count": recommended,
            "choices": [
                {
                    "count": item.count,
                    "buckets": list(item.buckets.edges),
                    "padding_fraction": item.buckets.padding_fraction,
                    "saved_tokens": item.saved_tokens,
                    "payback_h": item.payback_h,
                }
                for item in choices
            ],
        }
        if own is not None:
            document["given"] = {
                "buckets": list(own.edges),
                "padding_fraction": own.padding_fraction,
                "over": read.over(own.edges[-1])[0],
            }
        if batches is not None:
            document["batch_buckets"] = list(batches.edges)
            document["batch_padding_fraction"] = batches.padding_fraction
        _print_json(document)
        return
    from rich.console import Console

    from app.plan.present_text import show_buckets

    show_buckets(Console(), read.counts, chosen, baseline, choices, recommended)
    if own is not None:
        longer, _ = read.over(own.edges[-1])
        typer.echo(
            f"given edges {', '.join(map(str, own.edges))}: padding {own.padding_fraction:.1%}"
            + (f", {longer} request(s) longer than the last" if longer else "")
        )
    if batches is not None:
        sizes = ", ".join(map(str, batches.edges))
        typer.echo(f"decode batch sizes: {sizes} (empty slots {batches.padding_fraction:.1%} of the time)")


def _batches(read: Trace, max_batch: int, count: int, replicas: int, tpot_ms: float) -> Any:
    from app.plan.buckets import batch_buckets, concurrency

    if not read.arrivals_s or not read.output_tokens:
        raise ValueError("--max-batch needs a trace with arrival times and output lengths")
    durations = [tokens * tpot_ms / 1e3 for tokens in read.output_tokens]
    return batch_buckets(concurrency(read.arrivals_s, durations, replicas), count, max_batch)


def _degree(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ValueError(f"--tp-degree {text!r} must be a whole number, at least 1, or auto")
    return value


def _edges(text: str) -> tuple[int, ...]:
    if not text:
        return ()
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        values = (0,)
    if values[0] < 1 or list(values) != sorted(set(values)):
        raise ValueError(f"edges {text!r} must be whole numbers, ascending, with commas between")
    return values


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> Any:
    if value not in allowed:
        raise ValueError(f"{option} {value!r} must be one of {', '.join(allowed)}")
    return value


def _positive(option: str, value: float | None) -> float | None:
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{option} {value:g} must be more than 0, and finite")
    return value


def _or_exit(make: Any) -> Any:
    """The result of ``make``; a fault that it names is printed and ends the command with 2."""
    try:
        return make()
    except (ValueError, OSError) as error:
        _fail(str(error))


def _fail(message: str) -> None:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)


def _print_json(document: Any) -> None:
    typer.echo(json.dumps(document, indent=1, allow_nan=False))
