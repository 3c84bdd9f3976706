"""Fit the performance model's constants on published rows: ``python -m app.plan.calibrate CSV [--write
FILE]``.

A maximum a posteriori fit of the constants' logarithms: each constant has a prior from physics, wide enough
to be moved by data and narrow enough that rows of one model cannot drive it to nonsense. Reported with the
fit: leave-one-model-out errors, whose scatter becomes the noise of shipped predictions. Needs scipy
(development only); hosts and the CLI read the shipped constants.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from app.plan.performance import CONSTANT_NAMES, Constants
from app.plan.validation import QUANTITIES, MeasuredRow, ScoredRow, mape, read_rows, score


@dataclass(frozen=True)
class Prior:
    """A constant before any row was seen: its median, the standard deviation of its logarithm, what it is."""

    median: float
    log_sd: float
    unit: str
    meaning: str


PRIORS: dict[str, Prior] = {
    "hbm_efficiency": Prior(0.7, 0.15, "ratio", "HBM bandwidth reached while streaming weights, of the peak"),
    "int8_bytes": Prior(1.3, 0.3, "bytes", "bytes a streamed int8 weight costs, its conversion included"),
    "collective_latency_s": Prior(30e-6, 0.6, "s", "one small all-reduce over 24 cores"),
    "attention_position_s": Prior(
        1e-9, 1.0, "s", "attention of one query head over one cached position, whatever the batch"
    ),
    "attention_position_sequence_s": Prior(
        2e-9, 0.5, "s", "the same, a sequence: 512 B of K and V at about 0.6 of a core's bandwidth"
    ),
    "kv_write_s": Prior(5e-6, 1.0, "s", "writing one sequence's new K and V line, a layer and KV head"),
    "step_overhead_s": Prior(0.3e-3, 1.0, "s", "starting a step and bringing its tokens back"),
    "mean_over_median": Prior(
        1.02, 0.02, "ratio", "mean step time over the bucket-weighted step: stragglers"
    ),
    "tensor_efficiency": Prior(0.5, 0.4, "ratio", "tensor engine rate reached in prefill, of the BF16 peak"),
    "collective_bandwidth": Prior(96e9, 0.7, "B/s", "bandwidth of large all-reduces, a core"),
    "attention_square_s": Prior(0.1e-9, 0.7, "s", "prefill attention of one query head, a pair of positions"),
    "kv_write_prefill_s": Prior(0.1e-6, 1.0, "s", "writing one prompt token's K and V, a layer and KV head"),
    "prefill_layer_overhead_s": Prior(
        0.4e-3, 0.7, "s", "one layer of prefill at no tokens (weights, collectives)"
    ),
    "prefill_overhead_s": Prior(5e-3, 1.0, "s", "starting a prefill: embedding, host transfer, first token"),
}
# Standard deviation of a row's logarithm that is not the constants' doing: rounding, runs, SDK patch
# versions.
ROW_SIGMA = {"tpot": 0.03, "throughput": 0.03, "ttft": 0.10}


def fit(rows: Sequence[MeasuredRow]) -> Constants:
    """Constants fitted on ``rows``, with the covariance of their logarithms (noise is left empty)."""
    means = np.array([math.log(PRIORS[name].median) for name in CONSTANT_NAMES])
    sds = np.array([PRIORS[name].log_sd for name in CONSTANT_NAMES])

    def residuals(logs: Any) -> Any:
        constants = _constants(np.exp(logs))
        found = list((logs - means) / sds)
        for item in score(rows, constants):
            found += [
                math.log(item.predicted[name] / value) / ROW_SIGMA[name]
                for name, value in item.measured.items()
            ]
        return np.array(found)

    solution = least_squares(residuals, means, x_scale=sds)
    covariance = np.linalg.inv(solution.jac.T @ solution.jac)
    return Constants(_constants(np.exp(solution.x)).values, covariance.tolist(), {}, domain(rows))


def leave_one_model_out(rows: Sequence[MeasuredRow]) -> dict[str, list[ScoredRow]]:
    """For each model, its rows scored by constants fitted on the other models' rows."""
    names = sorted({row.model.name for row in rows})
    return {
        name: score(
            [row for row in rows if row.model.name == name],
            fit([row for row in rows if row.model.name != name]),
        )
        for name in names
    }


def domain(rows: Sequence[MeasuredRow]) -> dict[str, tuple[float, float]]:
    """Least and greatest value of each feature over the rows."""
    features: dict[str, list[float]] = {
        "tp_degree": [row.tp_degree for row in rows],
        "batch_size": [row.work.batch_size for row in rows],
        "input_tokens": [row.work.input_tokens for row in rows],
        "sequence": [row.work.input_tokens + row.work.output_tokens for row in rows],
        "parameters_b": [round(row.model.parameters / 1e9, 2) for row in rows],
    }
    return {name: (float(min(values)), float(max(values))) for name, values in features.items()}


def calibrate(rows: Sequence[MeasuredRow], *, source: str) -> dict[str, Any]:
    """The constants file's contents: constants, covariance, noise, domain, and how good they are."""
    fitted = fit(rows)
    left_out = leave_one_model_out(rows)
    held = [item for items in left_out.values() for item in items]
    own = score(rows, fitted)
    return {
        "version": 1,
        "source": source,
        "rows": len(rows),
        "method": "maximum a posteriori fit of log constants, app.plan.calibrate",
        "constants": {
            name: {
                "value": _rounded(fitted[name]),
                "prior": PRIORS[name].median,
                "unit": PRIORS[name].unit,
                "meaning": PRIORS[name].meaning,
            }
            for name in CONSTANT_NAMES
        },
        "log_covariance": [[_rounded(value) for value in row] for row in fitted.covariance],
        "log_noise": {name: _rounded(_scatter(held, name)) for name in QUANTITIES},
        "domain": {name: list(bounds) for name, bounds in fitted.domain.items()},
        "mape": {name: _rounded(mape(own, name) or 0.0) for name in QUANTITIES},
        "leave_one_model_out": {
            model: {name: _rounded(mape(items, name) or 0.0) for name in QUANTITIES}
            for model, items in left_out.items()
        },
    }


def _constants(values: Any) -> Constants:
    return Constants(
        {name: float(value) for name, value in zip(CONSTANT_NAMES, values, strict=True)}, (), {}, {}
    )


def _scatter(scored: Sequence[ScoredRow], quantity: str) -> float:
    logs = [
        math.log(item.predicted[quantity] / item.measured[quantity])
        for item in scored
        if quantity in item.measured
    ]
    return math.sqrt(sum(value * value for value in logs) / len(logs))


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def main() -> None:
    """Command line: fit, report, and with ``--write`` replace the shipped constants."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--write", type=Path, help="constants file to write")
    parser.add_argument("--source", default="", help="where the rows come from, kept in the file")
    arguments = parser.parse_args()
    contents = calibrate(read_rows(arguments.csv), source=arguments.source)
    text = json.dumps(contents, indent=1) + "\n"
    if arguments.write:
        arguments.write.write_text(text)
    print(json.dumps({key: contents[key] for key in ("constants", "mape", "leave_one_model_out")}, indent=1))


if __name__ == "__main__":
    main()
