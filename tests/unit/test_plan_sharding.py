"""Padding and replication: against the documented cases, and against an arrangement built head by head."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from app.plan.models import ModelConfig, load_model
from app.plan.sharding import padded_heads, shard

degrees = st.sampled_from((1, 2, 3, 4, 8, 12, 16, 24))
kv_counts = st.integers(1, 16)
groups = st.integers(1, 16)


@pytest.mark.parametrize(
    ("tp_degree", "heads", "kv_heads"),
    [(1, 32, 8), (2, 32, 8), (4, 32, 8), (8, 32, 8), (12, 36, 36), (24, 48, 24)],
)
def test_llama_3_8b(tp_degree: int, heads: int, kv_heads: int) -> None:
    sharding = shard(load_model("Llama-3-8B"), tp_degree)
    assert (sharding.heads, sharding.kv_heads) == (heads, kv_heads)
    assert sharding.kv_replication == kv_heads / 8


@pytest.mark.parametrize(
    ("model", "heads", "kv_heads"), [("Llama-3-70B", 72, 24), ("Llama-2-7b", 48, 48), ("Qwen2.5-7B", 48, 24)]
)
def test_tp_24(model: str, heads: int, kv_heads: int) -> None:
    sharding = shard(load_model(model), 24)
    assert (sharding.heads, sharding.kv_heads) == (heads, kv_heads)


@given(kv_counts, groups, degrees)
def test_every_query_head_finds_its_kv_head_on_its_core(kv_heads: int, group: int, tp_degree: int) -> None:
    """Lay the heads out as the engine does and look: each core's KV heads serve each core's query heads."""
    heads, kv = padded_heads(kv_heads * group, kv_heads, tp_degree)
    assert heads % tp_degree == kv % tp_degree == 0
    assert heads >= kv_heads * group
    assert kv >= kv_heads
    per_core = heads // tp_degree
    if kv == kv_heads and group > 1:  # divided: whole groups stay together
        assert kv_heads % tp_degree == 0
        assert heads == kv_heads * group
    elif group > 1 and kv == tp_degree and tp_degree % kv_heads == 0:  # one KV head a core
        cores_of_a_group = tp_degree // kv_heads
        assert cores_of_a_group * per_core >= group
    else:  # one KV head a query head
        assert kv == heads


@given(kv_counts, groups, degrees)
def test_nothing_is_padded_where_the_degree_divides_the_kv_heads(
    kv_heads: int, group: int, tp_degree: int
) -> None:
    assume(kv_heads % tp_degree == 0)
    assert padded_heads(kv_heads * group, kv_heads, tp_degree) == (kv_heads * group, kv_heads)


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    kv_heads = draw(kv_counts)
    head_dim = draw(st.sampled_from((32, 64, 128)))
    heads = kv_heads * draw(groups)
    return ModelConfig(
        name="m",
        architecture="LlamaForCausalLM",
        family="llama",
        hidden_size=heads * head_dim,
        layers=draw(st.integers(1, 4)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=draw(st.integers(1, 500)),
        vocab_size=draw(st.integers(1, 1000)),
        max_positions=4096,
        tied_embeddings=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
    )


def tensors_of_a_core(model: ModelConfig, tp_degree: int) -> int:
    """Bytes of one core, tensor by tensor, in bf16."""
    sharding = shard(model, tp_degree)
    q = sharding.heads // tp_degree * model.head_dim
    kv = sharding.kv_heads // tp_degree * model.head_dim
    mlp = sharding.intermediate_size // tp_degree
    vocab = sharding.vocab_size // tp_degree
    shapes = [(vocab, model.hidden_size), (vocab, model.hidden_size), (model.hidden_size,)]
    for _ in range(model.layers):
        shapes += [(q, model.hidden_size), (kv, model.hidden_size), (kv, model.hidden_size)]
        shapes += [(model.hidden_size, q), (mlp, model.hidden_size), (mlp, model.hidden_size)]
        shapes += [(model.hidden_size, mlp), (model.hidden_size,), (model.hidden_size,)]
        shapes += [(q,), (kv,), (kv,)] if model.qkv_bias else []
        shapes += [(model.head_dim,), (model.head_dim,)] if model.qk_norm else []
    return sum(2 * shape[0] * (shape[1] if len(shape) == 2 else 1) for shape in shapes)


@given(models(), degrees)
def test_bytes_of_a_core_are_those_of_its_tensors(model: ModelConfig, tp_degree: int) -> None:
    assert shard(model, tp_degree).weights_bytes_per_core == tensors_of_a_core(model, tp_degree)


@given(models(), degrees, st.integers(1, 10_000))
def test_kv_cache_is_that_of_the_heads_on_the_core(model: ModelConfig, tp_degree: int, tokens: int) -> None:
    sharding = shard(model, tp_degree)
    expected = sum(
        2 * 2 * model.head_dim * tokens for _ in range(sharding.kv_heads // tp_degree * model.layers)
    )
    assert sharding.kv_bytes_per_core(tokens) == expected


@given(models())
def test_one_core_holds_the_checkpoint_and_its_second_embedding(model: ModelConfig) -> None:
    extra = 2 * model.vocab_size * model.hidden_size if model.tied_embeddings else 0
    assert shard(model, 1).weights_bytes_per_core == model.checkpoint_bytes + extra


@given(models(), degrees)
def test_int8_is_smaller_and_more_than_half(model: ModelConfig, tp_degree: int) -> None:
    whole = shard(model, tp_degree).weights_bytes_per_core
    small = shard(model, tp_degree, "int8").weights_bytes_per_core
    assert small > whole / 2
    if model.hidden_size >= 512 and model.head_dim * model.heads // tp_degree > 64:
        assert small < whole
