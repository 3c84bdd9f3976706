"""Fit: the cases that users ask about, and what must hold of every answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.plan.catalogue import DOCUMENTED_TP_DEGREES, INF2
from app.plan.fit import Shape, fit
from app.plan.models import known_models, load_model


def fitted(model: str, instance: str, tp_degree: int, batch: int = 1, length: int = 4096, dtype="bf16"):
    return fit(load_model(model), INF2[instance], Shape(tp_degree, batch, length, dtype))


def test_llama_3_8b_on_the_smallest_host_that_can_load_it() -> None:
    answer = fitted("Llama-3-8B", "inf2.8xlarge", 2)
    assert answer.fits
    assert answer.replicas_per_instance == 1
    assert answer.warnings == ()
    assert answer.weights_bytes_per_core == pytest.approx(8_030_261_248, rel=0.001)  # 2 bytes over 2 cores


def test_llama_3_70b_needs_the_largest_size() -> None:
    assert fitted("Llama-3-70B", "inf2.48xlarge", 24).fits
    for degree in range(1, 25):
        assert not fitted("Llama-3-70B", "inf2.24xlarge", degree).fits, degree
    (reason,) = fitted("Llama-3-70B", "inf2.24xlarge", 8).reasons
    assert "weights 16.43" in reason


@pytest.mark.parametrize("model", ["Llama-3-8B", "SmolLM2-135M", "Llama-2-7b"])
@pytest.mark.parametrize("tp_degree", [3, 12, 16])
def test_undocumented_degrees_do_not_fit(model: str, tp_degree: int) -> None:
    answer = fitted(model, "inf2.48xlarge", tp_degree)
    assert not answer.fits
    assert f"degree {tp_degree} is not documented" in answer.reasons[0]


def test_reason_for_degree_12_says_what_it_would_cost() -> None:
    assert "32 query heads 36 and 8 KV heads 36" in fitted("Llama-3-8B", "inf2.24xlarge", 12).reasons[0]


def test_degree_24_needs_24_cores() -> None:
    (reason,) = fitted("SmolLM2-135M", "inf2.24xlarge", 24).reasons
    assert "needs 24 NeuronCores, inf2.24xlarge has 12" in reason


def test_smallest_size_cannot_load_an_8b_in_bf16_and_says_so() -> None:
    answer = fitted("Llama-3-8B", "inf2.xlarge", 2)
    assert answer.fits  # its HBM is that of inf2.8xlarge
    assert "16.00 GiB of host memory" in answer.warnings[0]
    assert fitted("Llama-3-8B", "inf2.xlarge", 2, dtype="int8").warnings == ()


def test_length_beyond_the_model_is_a_reason() -> None:
    (reason,) = fitted("Llama-2-7b", "inf2.48xlarge", 8, length=8192).reasons
    assert "8192 is more than the 4096 positions" in reason


def test_idle_cores_and_thin_memory_are_warnings() -> None:
    assert "4 of 12 cores stay idle" in " ".join(fitted("Llama-3-8B", "inf2.24xlarge", 8).warnings)
    thin = fitted("Llama-3-8B", "inf2.8xlarge", 2, batch=16)
    assert thin.fits
    assert "of a core's memory is taken" in thin.warnings[0]


shapes = st.builds(
    Shape,
    st.sampled_from(DOCUMENTED_TP_DEGREES),
    st.integers(1, 64),
    st.sampled_from((128, 1024, 4096, 8192)),
    st.sampled_from(("bf16", "int8")),
)
models = st.sampled_from(known_models()).map(load_model)
instances = st.sampled_from(tuple(INF2.values()))


@given(models, instances, shapes)
def test_fits_exactly_when_the_numbers_do(model, instance, shape: Shape) -> None:
    answer = fit(model, instance, shape)
    parts = (
        answer.weights_bytes_per_core
        + answer.kv_cache_bytes_per_core
        + answer.activation_bytes_per_core
        + answer.reserve_bytes_per_core
    )
    assert answer.bytes_per_core == parts
    allowed = (
        shape.tp_degree <= instance.cores
        and parts <= instance.hbm_bytes_per_core
        and (model.max_positions is None or shape.max_model_len <= model.max_positions)
    )
    assert answer.fits == allowed
    assert answer.replicas_per_instance * shape.tp_degree + answer.idle_cores == instance.cores


@given(models, instances, shapes)
def test_asking_for_less_never_takes_more(model, instance, shape: Shape) -> None:
    more = fit(model, instance, shape)
    less = fit(model, instance, Shape(shape.tp_degree, 1, 128, shape.weights_dtype))
    assert less.bytes_per_core <= more.bytes_per_core
    if more.fits:
        assert less.fits
