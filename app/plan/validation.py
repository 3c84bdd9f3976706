"""Published rows read from CSV, and the performance model scored against them (never fitted here)."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from app.plan.catalogue import InstanceType, UnknownNameError, get_instance
from app.plan.models import ModelConfig, ModelError, load_model
from app.plan.performance import Constants, ReplicaModel, Workload
from app.plan.sharding import WeightsDtype, shard

COLUMNS = (
    "model",
    "tp_degree",
    "batch_size",
    "input_tokens",
    "output_tokens",
    "output_tokens_per_second",
    "ttft_p50_ms",
    "tpot_p50_ms",
    "weights_dtype",
    "instance",
)
QUANTITIES = ("ttft", "tpot", "throughput")


class RowsError(ValueError):
    """A CSV of measured rows that cannot be scored; the message names every fault with its line."""


@dataclass(frozen=True)
class MeasuredRow:
    """One published measurement: medians in ms, throughput in output tokens/s of the whole instance.

    A quantity that the table leaves empty is None.
    """

    line: int
    model: ModelConfig
    instance: InstanceType
    tp_degree: int
    weights_dtype: WeightsDtype
    work: Workload
    ttft_ms: float | None
    tpot_ms: float | None
    tokens_per_s: float | None

    def replica(self, constants: Constants) -> ReplicaModel:
        """The row's replica; the published runs compiled exactly for input plus output."""
        return ReplicaModel(
            sharding=shard(self.model, self.tp_degree, self.weights_dtype),
            instance=self.instance,
            max_model_len=self.work.input_tokens + self.work.output_tokens,
            constants=constants,
        )

    @property
    def replicas(self) -> int:
        """Replicas on the instance (the published runs used one, of all cores)."""
        return max(self.instance.cores // self.tp_degree, 1)


@dataclass(frozen=True)
class ScoredRow:
    """A row with what the model says of it, by quantity: measured and predicted (ms, ms, tokens/s)."""

    row: MeasuredRow
    measured: dict[str, float]
    predicted: dict[str, float]

    def error(self, quantity: str) -> float:
        """Predicted over measured, less one."""
        return self.predicted[quantity] / self.measured[quantity] - 1


def read_rows(path: Path) -> list[MeasuredRow]:
    """Read measured rows.

    Raises:
        RowsError: an unreadable file, missing columns, or any wrong value, all at once.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise RowsError(
                    f"{path}: missing column(s) {', '.join(missing)}; expected {', '.join(COLUMNS)}"
                )
            raw = [(reader.line_num, record) for record in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RowsError(f"cannot read {path}: {error}") from error
    problems: list[str] = []
    rows = [row for line, record in raw if (row := _row(line, record, problems)) is not None]
    if not raw:
        problems.append("no rows below the header")
    if problems:
        raise RowsError(f"{path}: " + "; ".join(problems))
    return rows


def score(rows: Sequence[MeasuredRow], constants: Constants) -> list[ScoredRow]:
    """Predict each row with ``constants``."""
    return [_score(row, constants) for row in rows]


def mape(scored: Sequence[ScoredRow], quantity: str) -> float | None:
    """Mean absolute percentage error of a quantity, as a fraction; None when no row has it."""
    errors = [abs(item.error(quantity)) for item in scored if quantity in item.measured]
    return sum(errors) / len(errors) if errors else None


def _score(row: MeasuredRow, constants: Constants) -> ScoredRow:
    replica = row.replica(constants)
    predicted = {
        "ttft": 1e3 * replica.prefill_s(row.work.input_tokens, row.work.batch_size),
        "tpot": 1e3 * replica.median_step_s(row.work),
        "throughput": row.replicas * replica.decode_tokens_per_s(row.work),
    }
    measured = {"ttft": row.ttft_ms, "tpot": row.tpot_ms, "throughput": row.tokens_per_s}
    return ScoredRow(row, {name: value for name, value in measured.items() if value is not None}, predicted)


def _row(line: int, record: dict[str, str | None], problems: list[str]) -> MeasuredRow | None:
    before = len(problems)

    def wrong(message: str) -> None:
        problems.append(f"line {line}: {message}")

    def text(key: str) -> str:
        return (record.get(key) or "").strip()

    def whole(key: str) -> int:
        try:
            value = int(text(key))
        except ValueError:
            value = 0
        if value < 1:
            wrong(f"{key} {text(key)!r} must be a whole number, at least 1")
        return value

    def measured(key: str) -> float | None:
        if not text(key):
            return None
        try:
            value = float(text(key))
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf"):
            wrong(f"{key} {text(key)!r} must be a positive number, or empty")
        return value

    model = instance = None
    try:
        model = load_model(text("model"))
    except (UnknownNameError, ModelError) as error:
        wrong(str(error))
    try:
        # AWS's tables write Inf2.48xlarge, its API inf2.48xlarge.
        instance = get_instance(text("instance").casefold())
    except UnknownNameError as error:
        wrong(str(error))
    dtype = text("weights_dtype")
    if dtype not in ("bf16", "int8"):
        wrong(f"weights_dtype {dtype!r} must be bf16 or int8")
    tp_degree = whole("tp_degree")
    work = Workload(whole("input_tokens"), whole("output_tokens"), whole("batch_size"))
    ttft, tpot = measured("ttft_p50_ms"), measured("tpot_p50_ms")
    throughput = measured("output_tokens_per_second")
    if instance is not None and tp_degree > instance.cores:
        wrong(f"tp_degree {tp_degree} is more than the {instance.cores} cores of {instance.name}")
    if len(problems) > before or model is None or instance is None:
        return None
    return MeasuredRow(
        line=line,
        model=model,
        instance=instance,
        tp_degree=tp_degree,
        weights_dtype="int8" if dtype == "int8" else "bf16",
        work=work,
        ttft_ms=ttft,
        tpot_ms=tpot,
        tokens_per_s=throughput,
    )
