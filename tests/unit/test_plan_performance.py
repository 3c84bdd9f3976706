"""The performance model: how good it is, how it behaves, and that its shipped constants are the fit's."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.plan.calibrate import PRIORS, calibrate, leave_one_model_out
from app.plan.catalogue import INF2
from app.plan.models import load_model
from app.plan.performance import (
    CONSTANT_NAMES,
    ReplicaModel,
    Workload,
    bucket_for,
    estimate,
    extrapolations,
    shipped_constants,
)
from app.plan.sharding import shard
from app.plan.validation import QUANTITIES, RowsError, mape, read_rows, score

DATA = Path(str(resources.files("app.plan").joinpath("data")))
ROWS_CSV = DATA / "published_inf2_performance.csv"
OTHER_MODELS_CSV = Path(__file__).parent / "plan_data" / "published_inf2_other_models.csv"
LIMITS = {"tpot": 0.15, "throughput": 0.15, "ttft": 0.30}  # leave-one-model-out, of the issue


@pytest.fixture(scope="module")
def rows():
    return read_rows(ROWS_CSV)


@pytest.fixture(scope="module")
def left_out(rows):
    return leave_one_model_out(rows)


def replica(
    model: str = "Llama-3-8B", tp: int = 24, dtype="bf16", length: int = 4096, **more
) -> ReplicaModel:
    instance = INF2["inf2.48xlarge" if tp > 2 else "inf2.8xlarge"]
    return ReplicaModel(shard(load_model(model), tp, dtype), instance, length, shipped_constants(), **more)


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_leaving_each_model_out_stays_within_the_limits(left_out, quantity: str) -> None:
    assert len(left_out) == 3
    for model, scored in left_out.items():
        error = mape(scored, quantity)
        assert error is not None
        assert error <= LIMITS[quantity], (model, quantity, error)


def test_shipped_constants_are_what_the_fit_gives(rows) -> None:
    """Nobody has turned a constant by hand: fitting again gives the file."""
    shipped = json.loads((DATA / "performance_constants.json").read_text())
    again = calibrate(rows, source=shipped["source"])
    for name in CONSTANT_NAMES:
        assert again["constants"][name]["value"] == pytest.approx(
            shipped["constants"][name]["value"], rel=0.01
        )
    assert again["log_noise"] == pytest.approx(shipped["log_noise"], rel=0.02)
    assert shipped["rows"] == len(rows) == 14


def test_constants_are_few_and_none_is_keyed_to_a_model() -> None:
    assert set(PRIORS) == set(CONSTANT_NAMES)
    assert len(CONSTANT_NAMES) <= 14
    names = (DATA / "performance_constants.json").read_text().split('"leave_one_model_out"')[0].casefold()
    assert not any(word in names for word in ("llama", "mistral", "qwen"))


def test_fitted_constants_stay_physical() -> None:
    constants = shipped_constants()
    assert 0.4 < constants["hbm_efficiency"] < 1
    assert 1 <= constants["int8_bytes"] < 2
    assert 0.05 < constants["tensor_efficiency"] < 1
    assert 1e-6 < constants["collective_latency_s"] < 200e-6


@given(
    st.sampled_from(("Llama-3-8B", "Llama-2-13b", "Llama-3-70B")),
    st.sampled_from((128, 1000, 4000)),
    st.sampled_from((1, 4, 16)),
)
def test_more_work_takes_longer(model: str, position: int, batch: int) -> None:
    r = replica(model)
    assert r.decode_step_s(position, batch + 1) > r.decode_step_s(position, batch)
    assert r.decode_step_s(4096, batch) >= r.decode_step_s(position, batch)
    assert r.prefill_s(4096, batch) >= r.prefill_s(position, batch)
    assert r.prefill_s(position, batch + 1) > r.prefill_s(position, batch)


@given(st.sampled_from(("Llama-3-8B", "Llama-3-70B", "SmolLM2-135M")), st.sampled_from((1, 8)))
def test_no_step_beats_the_memory_bandwidth(model: str, batch: int) -> None:
    r = replica(model)
    read = r.sharding.layer_bytes_per_core + r.sharding.lm_head_bytes_per_core
    assert r.decode_step_s(128, batch) > read / r.instance.hbm_bytes_per_s_per_core
    flops = 2 * 2048 * batch * r.sharding.model.layers * r.sharding.layer_matrix_elements / 24
    assert r.prefill_s(2048, batch) > flops / r.instance.flops_per_core


def test_int8_decodes_faster_and_more_cores_do_too() -> None:
    assert replica(dtype="int8").decode_step_s(2048, 1) < replica().decode_step_s(2048, 1)
    steps = [replica(tp=tp).decode_step_s(2048, 1) for tp in (1, 2, 4, 8, 24)]
    assert steps == sorted(steps, reverse=True)


@pytest.mark.parametrize("model", ["TinyLlama-1.1B", "Llama-3-8B", "Llama-2-13b"])
def test_a_sequence_more_reads_its_cache_once_for_each_query_head(model: str) -> None:
    """Whatever the size of its heads; at between half and all of the bandwidth."""
    r = replica(model, tp=2)
    shard = r.sharding
    more = r.decode_step_s(4096, 33) - r.decode_step_s(4096, 32)
    write = shard.model.layers * shard.kv_heads / 2 * r.constants["kv_write_s"]
    read = shard.kv_bytes_per_core(4096) / r.instance.hbm_bytes_per_s_per_core
    assert 1 < (more - write) / (read * shard.heads / shard.kv_heads) < 2


def test_prompts_pay_for_their_bucket() -> None:
    r = replica()
    assert r.prefill_s(1025) == r.prefill_s(2048)
    assert replica(context_buckets=(1100, 4096)).prefill_s(1025) < r.prefill_s(1025)
    assert bucket_for(5000, (128, 4096)) == 4096


def test_mean_step_lies_between_the_first_and_the_last() -> None:
    r, work = replica(length=8192), Workload(128, 8064, 8)
    factor = r.constants["mean_over_median"]
    assert r.decode_step_s(129, 8) * factor < r.mean_step_s(work) < r.decode_step_s(8192, 8) * factor
    assert r.decode_tokens_per_s(work) == pytest.approx(8 / r.mean_step_s(work))
    assert r.served_tokens_per_s(work) < r.decode_tokens_per_s(work)


def test_a_workload_within_one_bucket_has_equal_mean_and_median() -> None:
    r, work = replica(), Workload(2048, 2048, 8)
    assert r.mean_step_s(work) == pytest.approx(r.median_step_s(work) * r.constants["mean_over_median"])


def test_ranges_hold_the_value_and_widen() -> None:
    r, work = replica(), Workload(1024, 256, 8)
    narrow = estimate(r, "tpot", lambda item: item.median_step_s(work))
    wide = estimate(r, "tpot", lambda item: item.median_step_s(work), widen=2)
    assert wide.low < narrow.low < narrow.value < narrow.high < wide.high
    assert narrow.value == r.median_step_s(work)


def test_ranges_cover_about_as_many_rows_as_they_say(rows) -> None:
    """80 % ranges over the fitted rows hold at least 80 % of them (they were seen: more is no surprise)."""
    inside = []
    for row in rows:
        work, timing = row.work, row.replica(shipped_constants())
        tpot = estimate(timing, "tpot", lambda item, work=work: item.median_step_s(work))
        ttft = estimate(
            timing, "ttft", lambda item, work=work: item.prefill_s(work.input_tokens, work.batch_size)
        )
        inside += [
            tpot.low <= row.tpot_ms / 1e3 <= tpot.high,
            ttft.low <= row.ttft_ms / 1e3 <= ttft.high,
        ]
    assert sum(inside) / len(inside) >= 0.8


def test_extrapolation_is_said() -> None:
    work = Workload(1024, 256, 8)
    inside = extrapolations(replica(), work, engine="transformers_neuronx")
    assert inside == ()
    outside = extrapolations(replica(tp=8), Workload(1024, 256, 64), engine="vllm")
    text = "; ".join(outside)
    for said in (
        "parallel degree 8 (measured: 24)",
        "batch size 64 (measured: 1 to 8)",
        "nobody has published",
    ):
        assert said in text
    small = extrapolations(replica("TinyLlama-1.1B"), work, engine="transformers_neuronx")
    assert "head size 64 (measured: 128)" in small


def test_score_of_the_given_rows(rows) -> None:
    scored = score(rows, shipped_constants())
    assert mape(scored, "tpot") < 0.03
    assert mape(scored, "throughput") < 0.03
    assert mape(scored, "ttft") < 0.10


def test_score_of_published_models_that_the_fit_never_saw(rows) -> None:
    others = read_rows(OTHER_MODELS_CSV)
    assert {row.model.name for row in others}.isdisjoint({row.model.name for row in rows})
    scored = score(others, shipped_constants())
    assert mape(scored, "tpot") <= 0.08
    assert mape(scored, "throughput") <= 0.10
    assert mape(scored, "ttft") <= 0.25


def test_an_instance_may_be_spelled_as_the_published_tables_do(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(ROWS_CSV.read_text().replace("inf2.48xlarge", "Inf2.48xlarge"))
    assert [row.instance for row in read_rows(path)] == [row.instance for row in read_rows(ROWS_CSV)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("Llama-3-8B", "GPT-9"), "line 2: unknown model 'GPT-9'"),
        ((",24,", ",48,"), "tp_degree 48 is more than the 24 cores"),
        (("128,8064", "0,8064"), "input_tokens '0' must be"),
        (("649", "fast"), "output_tokens_per_second 'fast' must be a positive number"),
        (("int8", "fp4"), "weights_dtype 'fp4' must be"),
        (("inf2.48xlarge", "trn2"), "unknown instance type 'trn2'"),
        (("15.2", "nan"), "tpot_p50_ms 'nan'"),
    ],
)
def test_faulty_rows_are_named(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    head, first = ROWS_CSV.read_text().splitlines()[:2]
    path = tmp_path / "rows.csv"
    path.write_text(f"{head}\n{first.replace(*change, 1)}\n")
    with pytest.raises(RowsError, match=r"rows\.csv") as caught:
        read_rows(path)
    assert said in str(caught.value)


def test_rows_may_leave_a_quantity_out(tmp_path: Path) -> None:
    head, first = ROWS_CSV.read_text().splitlines()[:2]
    path = tmp_path / "rows.csv"
    path.write_text(f"{head}\n{first.replace('69,99,15.2', ',,15.2')}\n")
    scored = score(read_rows(path), shipped_constants())
    assert mape(scored, "ttft") is None
    assert mape(scored, "tpot") is not None


@pytest.mark.parametrize(
    ("text", "said"), [("", "missing column"), ("model,tp_degree\n", "missing column"), (None, "cannot read")]
)
def test_wrong_files_of_rows(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "rows.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(RowsError, match=said):
        read_rows(path)


def test_a_header_alone_is_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(ROWS_CSV.read_text().splitlines()[0] + "\n")
    with pytest.raises(RowsError, match="no rows"):
        read_rows(path)
