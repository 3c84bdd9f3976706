"""A plan as one self-contained page: the verdict, the figures, and the latency-cost frontier drawn as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from app.plan.catalogue import GIB, INF2, SOURCES
from app.plan.catalogue_gpu import GPU
from app.plan.frontier import Point
from app.plan.performance import Estimate
from app.plan.planner import Plan
from app.plan.prices import DEFAULT_REGION, PriceBook

# Colours that stay apart for readers who cannot tell red from green; shapes repeat the tensor parallel
# degree.
_COLOURS = {
    "inf2.xlarge": "#d55e00",
    "inf2.8xlarge": "#e69f00",
    "inf2.24xlarge": "#009e73",
    "inf2.48xlarge": "#0072b2",
}
_WIDTH, _HEIGHT = 880, 500
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 20, 56
_LABEL_GAP = 46

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5b6470; --line: #d8dde3; --page: #ffffff;
  --panel: #f6f8fa; --bad: #b42318; --warn: #8a5a00; --good: #18794e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #9aa4b0; --line: #343b44;
  --page: #14171b; --panel: #1d2127; --bad: #ff8f85; --warn: #e8b04b; --good: #5dd39e; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 920px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
p.lead { color: var(--soft); margin-top: 0; }
.good { color: var(--good); } .bad { color: var(--bad); } .warn { color: var(--warn); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line); text-align: right; }
td:first-child, th:first-child { text-align: left; } th { color: var(--soft); font-weight: 600; }
ul { padding-left: 1.2rem; } svg { width: 100%; height: auto; background: var(--panel); border-radius: 8px; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; paint-order: stroke;
  stroke: var(--panel); stroke-width: 4px; } svg .soft { fill: var(--soft); }
svg .grid { stroke: var(--line); } svg .frontier { stroke: var(--soft); fill: none; stroke-dasharray: 5 4; }
svg .ring { fill: none; stroke: var(--ink); stroke-width: 2; }
footer { color: var(--soft); margin-top: 2rem; }
"""


def plan_page(plan: Plan, points: Sequence[Point], prices: PriceBook) -> str:
    """The page, as HTML that needs nothing else."""
    request, fitted = plan.request, plan.fit
    verdict = '<span class="good">fits</span>' if plan.fits else '<span class="bad">does not fit</span>'
    if plan.fits and plan.refusals:
        verdict = '<span class="warn">fits, but the engine profile refuses it</span>'
    shape = (
        f"{fitted.instance.name}, tensor parallel degree {fitted.shape.tp_degree}, batch "
        f"{fitted.shape.batch_size}, {fitted.shape.max_model_len} tokens, {fitted.shape.weights_dtype}, "
        f"profile {request.profile.name}"
    )
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Plan: {escape(request.model.name)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(request.model.name)}: {verdict}</h1>",
        f'<p class="lead">{escape(shape)}</p>',
        _list("bad", plan.reasons),
        _list("warn", plan.warnings),
        *_figures(plan),
        "<h2>Latency against cost</h2>",
        f"<p>Each mark is a size, degree and batch that fits, for {request.input_tokens} input and "
        f"{request.output_tokens} output tokens ({escape(request.weights_dtype)}, {escape(request.region)}, "
        f"{request.purchase.replace('_', ' ')}). The dashed line joins those that none beats on both.</p>",
        frontier_svg(points, plan),
        *_frontier_table(points),
        *_price_table(prices),
        f"<footer>Prices: {escape(prices.source)} ({escape(prices.dated)}). Hardware: "
        f"{escape(SOURCES['inf2-arch'].title)} ({SOURCES['inf2-arch'].dated}). Predictions: fitted on "
        f"published rows of TP 24 on inf2.48xlarge; everything else is extrapolated.</footer>",
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def frontier_svg(points: Sequence[Point], plan: Plan | None = None) -> str:
    """The sweep drawn: TPOT across, USD for a million output tokens up, both logarithmic."""
    if not points:
        return "<p>No plan of the sweep fits and has a price.</p>"
    across = _Axis([point.tpot_ms for point in points], _LEFT, _WIDTH - _RIGHT)
    up = _Axis([point.usd_per_million for point in points], _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="Time per output token against dollars for a million output tokens">'
    ]
    for tick in across.ticks():
        x = across.at(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_HEIGHT - _BOTTOM}"/>')
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{tick:g}</text>')
    for tick in up.ticks():
        y = up.at(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">${tick:g}</text>')
    parts.append(
        f'<text class="soft" x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 14}" text-anchor="middle">'
        f"time per output token, ms (median, full batch)</text>"
    )
    parts.append(
        f'<text class="soft" transform="translate(16 {(_TOP + _HEIGHT - _BOTTOM) / 2}) rotate(-90)" '
        f'text-anchor="middle">$ per million output tokens</text>'
    )
    best = sorted((point for point in points if point.on_frontier), key=lambda point: point.tpot_ms)
    line = " ".join(f"{across.at(point.tpot_ms):.1f},{up.at(point.usd_per_million):.1f}" for point in best)
    parts.append(f'<polyline class="frontier" points="{line}"/>')
    for point in points:
        parts.append(_mark(point, across.at(point.tpot_ms), up.at(point.usd_per_million)))
    parts += _labels(best, across, up)
    if plan is not None and plan.performance is not None:
        usd = plan.cost.usd_per_million_output_tokens
        tpot = plan.performance.tpot_ms.value
        if usd is not None and across.holds(tpot) and up.holds(usd):
            x, y = across.at(tpot), up.at(usd)
            parts.append(
                f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="11"><title>this plan</title></circle>'
            )
            parts.append(
                f'<text x="{x - 13:.1f}" y="{y + 5:.1f}" text-anchor="end" font-weight="700">this plan</text>'
            )
    parts += _legend(points)
    parts.append("</svg>")
    return "\n".join(parts)


class _Axis:
    """A logarithmic scale from values to pixels, with room at both ends."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        self.low, self.high = min(values) / 1.15, max(values) * 1.15
        self._start, self._end = start, end

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    def at(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> list[float]:
        """Round values along the axis, closer where it spans little."""
        coarse = self._steps(1, 2, 5)
        return coarse if len(coarse) >= 3 else self._steps(1, 1.5, 2, 3, 4, 5, 6, 8)

    def _steps(self, *steps: float) -> list[float]:
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        values = [step * 10.0**power for power in powers for step in steps]
        return [value for value in values if self.holds(value)]


def _mark(point: Point, x: float, y: float) -> str:
    colour = _COLOURS[point.instance]
    title = (
        f"{point.instance}, TP {point.tp_degree}, batch {point.batch_size}: {point.tpot_ms:.1f} ms, "
        f"${point.usd_per_million:.2f}, {point.tokens_per_s:.0f} tokens/s, TTFT {point.ttft_ms:.0f} ms"
    )
    opacity = 1 if point.on_frontier else 0.45
    return (
        f'<g transform="translate({x:.1f} {y:.1f})" fill="{colour}" fill-opacity="{opacity}">'
        f"{_shape(point.tp_degree)}<title>{escape(title)}</title></g>"
    )


def _shape(tp_degree: int) -> str:
    """A circle, square, triangle, diamond or cross for the degrees 1, 2, 4, 8 and 24."""
    shapes = {
        1: '<circle r="5"/>',
        2: '<rect x="-4.5" y="-4.5" width="9" height="9"/>',
        4: '<path d="M0-6L5.5 4H-5.5Z"/>',
        8: '<path d="M0-6.5L6.5 0L0 6.5L-6.5 0Z"/>',
        24: '<path d="M-2-6H2V-2H6V2H2V6H-2V2H-6V-2H-2Z"/>',
    }
    return shapes[tp_degree]


def _labels(best: Sequence[Point], across: _Axis, up: _Axis) -> list[str]:
    """Names along the frontier, left out where they would run into the one before."""
    parts: list[str] = []
    last: tuple[float, float] | None = None
    for point in best:
        x, y = across.at(point.tpot_ms), up.at(point.usd_per_million)
        if last is not None and math.hypot(x - last[0], y - last[1]) < _LABEL_GAP:
            continue
        end = x > _WIDTH - _RIGHT - 110
        parts.append(
            f'<text class="soft" x="{x - 10 if end else x - 4:.1f}" y="{y + 20:.1f}" '
            f'text-anchor="{"end" if end else "middle"}">TP {point.tp_degree} · {point.batch_size}</text>'
        )
        last = (x, y)
    return parts


def _legend(points: Sequence[Point]) -> list[str]:
    parts = []
    names = [name for name in _COLOURS if any(point.instance == name for point in points)]
    tps = sorted({point.tp_degree for point in points})
    x, y = _WIDTH - _RIGHT - 220, _TOP + 18
    for row, name in enumerate(names):
        parts.append(f'<circle cx="{x}" cy="{y + 20 * row - 4}" r="5" fill="{_COLOURS[name]}"/>')
        parts.append(f'<text x="{x + 12}" y="{y + 20 * row}">{name}</text>')
    for row, degree in enumerate(tps):
        parts.append(
            f'<g class="shape" transform="translate({x + 135} {y + 20 * row - 4})" fill="var(--soft)">'
            f"{_shape(degree)}</g>"
        )
        parts.append(f'<text x="{x + 148}" y="{y + 20 * row}">TP {degree}</text>')
    return parts


def _figures(plan: Plan) -> Iterator[str]:
    fitted, performance, cost = plan.fit, plan.performance, plan.cost
    if performance is not None:
        yield "<h2>Predicted, with 80 % ranges</h2>"
        rows: tuple[tuple[str, Estimate, str], ...] = (
            ("TTFT, one request alone", performance.ttft_alone_ms, "ms"),
            (f"TTFT, {fitted.shape.batch_size} arriving together", performance.ttft_ms, "ms"),
            ("TPOT, median, full batch", performance.tpot_ms, "ms"),
            ("output tokens a second, instance", performance.output_tokens_per_second, ""),
        )
        yield _table(
            ("", "value", "low", "high"),
            [
                (name, f"{_number(item.value)} {unit}", _number(item.low), _number(item.high))
                for name, item, unit in rows
            ],
        )
    if cost.usd_per_million_output_tokens is not None and cost.usd_per_hour is not None:
        yield (
            f"<p><strong>${cost.usd_per_million_output_tokens:.2f}</strong> for a million output tokens at "
            f"${cost.usd_per_hour:.2f} an hour, {plan.request.utilisation:.0%} busy.</p>"
        )
    yield "<h2>Memory of one core</h2>"
    yield _table(
        ("", "GiB"),
        [
            ("weights", f"{fitted.weights_bytes_per_core / GIB:.2f}"),
            ("KV cache", f"{fitted.kv_cache_bytes_per_core / GIB:.2f}"),
            ("activations (estimate)", f"{fitted.activation_bytes_per_core / GIB:.2f}"),
            ("runtime reserve (estimate)", f"{fitted.reserve_bytes_per_core / GIB:.2f}"),
            ("together", f"{fitted.bytes_per_core / GIB:.2f}"),
            ("there is", f"{fitted.instance.hbm_bytes_per_core / GIB:.2f}"),
        ],
    )
    if plan.proposals:
        yield "<h2>Nearest plans that fit</h2>"
        yield _table(
            ("change", "TPOT ms", "$ / million output tokens"),
            [
                (
                    ", ".join(item.changes),
                    f"{item.tpot_ms:.1f}",
                    "no price"
                    if item.usd_per_million_output_tokens is None
                    else f"{item.usd_per_million_output_tokens:.2f}",
                )
                for item in plan.proposals
            ],
        )


def _frontier_table(points: Sequence[Point]) -> Iterator[str]:
    best = [point for point in points if point.on_frontier]
    if best:
        yield _table(
            ("on the frontier", "TP", "batch", "TPOT ms", "TTFT ms", "tokens/s", "$ / million"),
            [
                (
                    point.instance,
                    str(point.tp_degree),
                    str(point.batch_size),
                    f"{point.tpot_ms:.1f}",
                    f"{point.ttft_ms:.0f}",
                    f"{point.tokens_per_s:.0f}",
                    f"{point.usd_per_million:.2f}",
                )
                for point in best
            ],
        )


def _price_table(prices: PriceBook) -> Iterator[str]:
    """Sizes and the GPU instances that they are compared with: price, memory, bandwidth, and what it
    costs."""
    yield f"<h2>Beside GPU instances ({DEFAULT_REGION})</h2>"
    hardware = [
        (item.name, f"{item.chips} x Inferentia2", item.hbm_mib / 1024, item.hbm_gb_per_s)
        for item in INF2.values()
    ]
    hardware += [
        (
            item.name,
            f"{item.gpus} x {item.gpu}",
            item.gpus * item.gpu_memory_mib / 1024,
            item.gpus * item.gpu_gb_per_s,
        )
        for item in GPU.values()
    ]
    rows = []
    for name, chips, memory, bandwidth in hardware:
        hourly = prices.find(name, DEFAULT_REGION, "on_demand")
        reserved = prices.find(name, DEFAULT_REGION, "reserved_1y")
        rows.append(
            (
                f"{name}, {chips}",
                "-" if hourly is None else f"{hourly:.2f}",
                "-" if reserved is None else f"{reserved:.2f}",
                f"{memory:.0f}",
                f"{bandwidth:,.0f}",
                "-" if hourly is None else f"{hourly / bandwidth * 1000:.2f}",
            )
        )
    yield _table(
        ("", "$ / h", "$ / h, 1 year", "GiB", "GB/s", "$ / h for 1 TB/s"),
        rows,
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    header = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{header}</tr>{body}</table></div>'


def _list(kind: str, items: Sequence[str]) -> str:
    if not items:
        return ""
    return f'<ul class="{kind}">' + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def _number(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"
