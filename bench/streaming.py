"""Streaming side by side in one run: ``python -m bench.streaming [--json]``, with the engine venv.

vLLM's own server, our front on the replica's own server, and our front behind Serve's default proxy, over the
same emulated engine and by the same client; runs interleaved, the median of several. On a shared machine only
ratios within one run say something: ``noise`` is the spread of vLLM's server against itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.streaming_load import Load, run_load
from bench.streaming_server import KINDS, MODEL

NAMES = {"vllm": "vLLM's own server", "direct": "ours, direct", "proxy": "ours, Serve's default proxy"}


@contextlib.contextmanager
def server(kind: str, itl_ms: float) -> Iterator[tuple[int, int]]:
    """A server's port and process id."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "bench.streaming_server", kind, "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--itl-ms", str(itl_ms)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        if not any(line.strip() == "ready" for line in process.stdout):
            raise SystemExit(
                f"the {kind} server ended before it was ready; run it alone: {' '.join(command)}"
            )
        yield port, process.pid
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def percentile(values: list[float], part: float) -> float | None:
    """A percentile in ms; None of nothing."""
    ordered = sorted(values)
    return None if not ordered else round(ordered[min(len(ordered) - 1, int(part * len(ordered)))] * 1000, 2)


def described(load: Load) -> dict[str, Any]:
    """One run's numbers."""
    return {
        "tokens_per_s": round(load.tokens / load.seconds),
        "tokens_per_event": round(load.tokens / max(load.events, 1), 2),
        "cpu_s_per_1000_tokens": round(load.server_cpu_s / max(load.tokens, 1) * 1000, 4),
        "client_cpu": round(load.client_cpu_s / load.seconds, 2),
        "ttft_p50_ms": percentile(load.ttft, 0.5),
        "ttft_p99_ms": percentile(load.ttft, 0.99),
        "itl_p50_ms": percentile(load.gaps, 0.5),
        "itl_p99_ms": percentile(load.gaps, 0.99),
        "lost": load.lost,
    }


def median_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of each number; ``spread`` is of tokens/s, (most - least) / median."""
    keys = runs[0].keys()
    middle = {
        key: statistics.median([run[key] for run in runs if run[key] is not None] or [float("nan")])
        for key in keys
    }
    rates = [run["tokens_per_s"] for run in runs]
    return {**middle, "spread": round((max(rates) - min(rates)) / max(middle["tokens_per_s"], 1), 2)}


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every kind at every number of clients and pace, runs interleaved."""
    rows = []
    for itl_ms in options.itl_ms:
        with contextlib.ExitStack() as stack:
            running = {kind: stack.enter_context(server(kind, itl_ms)) for kind in options.kinds}
            for clients in options.clients:
                runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in options.kinds}
                for port, pid in running.values():
                    run_load(port, pid, clients, min(1.0, options.seconds), MODEL)
                for _ in range(options.rounds):
                    for kind, (port, pid) in running.items():
                        runs[kind].append(described(run_load(port, pid, clients, options.seconds, MODEL)))
                for kind in options.kinds:
                    row = {"kind": kind, "itl_ms": itl_ms, "clients": clients, **median_of(runs[kind])}
                    rows.append(row)
    return with_ratios(rows)


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row against vLLM's own server at the same load."""
    base = {(row["itl_ms"], row["clients"]): row for row in rows if row["kind"] == "vllm"}
    for row in rows:
        against = base.get((row["itl_ms"], row["clients"]))
        if against is not None:
            row["tokens_ratio"] = round(row["tokens_per_s"] / max(against["tokens_per_s"], 1), 2)
            row["cpu_ratio"] = round(
                row["cpu_s_per_1000_tokens"] / max(against["cpu_s_per_1000_tokens"], 1e-9), 2
            )
            row["noise"] = against["spread"]
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    columns = {
        "itl_ms": "ITL ms",
        "clients": "clients",
        "kind": "server",
        "tokens_per_s": "tokens/s",
        "tokens_ratio": "x vLLM",
        "cpu_s_per_1000_tokens": "CPU s / 1,000 tokens",
        "cpu_ratio": "x vLLM",
        "ttft_p50_ms": "TTFT p50 ms",
        "ttft_p99_ms": "p99",
        "itl_p50_ms": "ITL p50 ms",
        "itl_p99_ms": "p99",
        "tokens_per_event": "tokens / event",
        "client_cpu": "load's cores",
        "noise": "noise",
        "lost": "lost",
    }
    lines = ["| " + " | ".join(columns.values()) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        shown = {**row, "kind": NAMES[row["kind"]]}
        lines.append("| " + " | ".join(str(shown.get(key, "")) for key in columns) + " |")
    return "\n".join(lines)


def picture(rows: list[dict[str, Any]]) -> str:
    """Tokens/s as bars, an SVG document."""
    colours = {"vllm": "#7a869a", "direct": "#0a7d5a", "proxy": "#c98a1b"}
    most = max(row["tokens_per_s"] for row in rows) or 1
    parts, y = [], 30
    for row in rows:
        width = 380 * row["tokens_per_s"] / most
        label = f"ITL {row['itl_ms']:g} ms, {row['clients']} clients: {NAMES[row['kind']]}"
        parts.append(
            f'<text x="318" y="{y + 11}" text-anchor="end">{label}</text>'
            f'<rect x="325" y="{y}" width="{width:.1f}" height="14" fill="{colours[row["kind"]]}"/>'
            f'<text x="{330 + width:.1f}" y="{y + 11}">{row["tokens_per_s"]:.0f}</text>'
        )
        y += 20 if row["kind"] != rows[-1]["kind"] else 30
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="780" height="{y}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="325" y="18" font-weight="bold">streamed tokens/s</text>{"".join(parts)}</svg>\n'
    )


def main() -> None:
    """Measure, and print a table or one JSON document."""
    parser = argparse.ArgumentParser(prog="python -m bench.streaming", description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, default=3.0, help="of one run; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--itl-ms", type=float, nargs="+", default=[0.0, 10.0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--picture", type=Path, help="write the tokens/s as an SVG file")
    options = parser.parse_args()
    rows = measure(options)
    if options.picture:
        options.picture.write_text(picture(rows))
    if options.json:
        print(json.dumps({"rows": rows, "load_average": os.getloadavg(), "cpus": os.cpu_count()}, indent=1))
    else:
        print(table(rows))


if __name__ == "__main__":
    main()
