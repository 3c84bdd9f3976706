"""Each rule of the vendor's vLLM guide, and that no flag leaves that does not exist."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.plan.engine_arguments import (
    EngineArgumentError,
    default_buckets,
    engine_arguments,
    engine_environment,
    num_gpu_blocks,
    override_neuron_config,
    transformers_neuronx_options,
)
from app.plan.profiles import EngineArguments, get_profile

# vLLM's OpenAI server options that the guide of plugin 0.4.1 uses, and what the CPU engine is given.
VLLM_FLAGS = {
    "--model",
    "--served-model-name",
    "--tensor-parallel-size",
    "--max-num-seqs",
    "--max-model-len",
    "--dtype",
    "--block-size",
    "--num-gpu-blocks-override",
    "--enable-prefix-caching",
    "--no-enable-prefix-caching",
    "--additional-config",
}
# NeuronConfig attributes (NxD Inference API guide at SDK 2.28.1, and the vLLM guide on prefix caching).
NEURON_CONFIG = {
    "enable_bucketing",
    "context_encoding_buckets",
    "token_generation_buckets",
    "on_device_sampling_config",
    "quantized",
    "quantization_dtype",
    "quantization_type",
    "quantized_checkpoints_path",
    "is_prefix_caching",
    "is_block_kv_layout",
    "pa_num_blocks",
    "pa_block_size",
}
NEURON = get_profile("vllm-neuron-2.28")

wanteds = st.builds(
    EngineArguments,
    model_path=st.just("/models/m"),
    served_model_name=st.just("m"),
    tp_degree=st.sampled_from((1, 2, 4, 8, 24)),
    batch_size=st.integers(1, 64),
    max_model_len=st.integers(128, 32768),
    weights_dtype=st.sampled_from(("bf16", "int8")),
    prefix_caching=st.booleans(),
    block_size=st.sampled_from((16, 32)),
)


def wanted(**changes) -> EngineArguments:
    given_ = {
        "model_path": "/models/m",
        "served_model_name": "m",
        "tp_degree": 8,
        "batch_size": 4,
        "max_model_len": 2048,
        **changes,
    }
    return EngineArguments(**given_)


def options(arguments: list[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for at, item in enumerate(arguments):
        if item.startswith("--"):
            following = arguments[at + 1] if at + 1 < len(arguments) else "--"
            found[item] = None if following.startswith("--") else following
    return found


@given(wanteds)
def test_only_flags_and_keys_that_exist(item: EngineArguments) -> None:
    found = options(engine_arguments(NEURON, item))
    assert set(found) <= VLLM_FLAGS
    config = json.loads(found["--additional-config"] or "")
    assert set(config) == {"override_neuron_config"}  # underscores: the plugin reads no other
    assert set(config["override_neuron_config"]) <= NEURON_CONFIG


@given(wanteds)
def test_block_count_is_the_one_the_scheduler_may_count_on(item: EngineArguments) -> None:
    blocks = num_gpu_blocks(item)
    if item.prefix_caching:
        assert blocks % item.batch_size == 0
        assert blocks // item.batch_size * item.block_size >= item.max_model_len
        assert (blocks // item.batch_size - 1) * item.block_size < item.max_model_len
    else:
        assert blocks == item.batch_size
    found = options(engine_arguments(NEURON, item))
    assert found["--num-gpu-blocks-override"] == str(blocks)


def test_without_prefix_caching_no_block_size_is_given() -> None:
    found = options(engine_arguments(NEURON, wanted()))
    assert "--no-enable-prefix-caching" in found
    assert "--block-size" not in found
    assert "--enable-prefix-caching" not in found


def test_prefix_caching_compiles_what_the_scheduler_counts_on() -> None:
    item = wanted(prefix_caching=True, block_size=16)
    found = options(engine_arguments(NEURON, item))
    config = override_neuron_config(NEURON, item)
    assert found["--block-size"] == "16"
    assert config["is_prefix_caching"] is config["is_block_kv_layout"] is True
    assert config["pa_block_size"] == 16
    assert str(config["pa_num_blocks"]) == found["--num-gpu-blocks-override"] == str(2048 // 16 * 4)


def test_sampling_is_dynamic_and_bounded() -> None:
    sampling = override_neuron_config(NEURON, wanted())["on_device_sampling_config"]
    assert sampling == {"do_sample": True, "dynamic": True, "global_topk": 256}


def test_quantization_is_in_the_neuron_config_only() -> None:
    item = wanted(weights_dtype="int8")
    config = override_neuron_config(NEURON, item)
    assert (config["quantized"], config["quantization_dtype"]) == (True, "int8")
    assert "--quantization" not in options(engine_arguments(NEURON, item))
    assert "quantized" not in override_neuron_config(NEURON, wanted())


def test_buckets_are_passed_on_as_given() -> None:
    config = override_neuron_config(NEURON, wanted(context_buckets=(512, 2048), token_buckets=(1024, 2048)))
    assert config["context_encoding_buckets"] == [512, 2048]
    assert config["token_generation_buckets"] == [1024, 2048]


@pytest.mark.parametrize(
    ("length", "edges"),
    [(100, (100,)), (128, (128,)), (129, (128, 129)), (1152, (128, 256, 512, 1024, 1152))],
)
def test_automatic_buckets(length: int, edges: tuple[int, ...]) -> None:
    assert default_buckets(length) == edges


def test_everything_wrong_is_named_at_once() -> None:
    item = wanted(model_path="org/model", tp_degree=12, context_buckets=(512, 256), token_buckets=(128, 1024))
    with pytest.raises(EngineArgumentError) as caught:
        engine_arguments(NEURON, item)
    for text in ("absolute local folder", "tp_degree 12", "[512, 256]", "must end with max_model_len 2048"):
        assert text in str(caught.value)


def test_cpu_engine_gets_no_neuron_arguments() -> None:
    found = options(engine_arguments(get_profile("cpu"), wanted()))
    assert set(found) <= VLLM_FLAGS
    assert found["--tensor-parallel-size"] == "1"
    assert "--additional-config" not in found
    assert "--num-gpu-blocks-override" not in found


def test_transformers_neuronx_has_options_instead_of_a_command_line() -> None:
    with pytest.raises(EngineArgumentError, match="transformers_neuronx_options"):
        engine_arguments(get_profile("transformers-neuronx-2.25"), wanted())
    options_ = transformers_neuronx_options(wanted(weights_dtype="int8"))
    assert options_["n_positions"] == [128, 256, 512, 1024, 2048]
    assert options_["context_length_estimate"][-1] == 2048  # the longest prompt has a bucket
    assert options_["quant_dtype"] == "s8"


def test_compiled_artifacts_reach_the_neuron_engine_only() -> None:
    assert engine_environment(NEURON, wanted(), compiled_artifacts="/a") == {
        "NEURON_COMPILED_ARTIFACTS": "/a"
    }
    assert engine_environment(NEURON, wanted()) == {}
    assert "NEURON_COMPILED_ARTIFACTS" not in engine_environment(
        get_profile("cpu"), wanted(), compiled_artifacts="/a"
    )
