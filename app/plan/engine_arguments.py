"""From a profile and what is to be served, the engine's exact arguments.

Each rule of the vendor's vLLM guide (aws-neuron-sdk@v2.28.1 vllm-user-guide-v1.rst) is one function here.
Only flags and ``NeuronConfig`` keys that the guide or the engine's own help names ever leave this module; the
unit tests hold both lists.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from app.plan.profiles import EngineArguments, EngineProfile

_TORCH_DTYPE = "bfloat16"


class EngineArgumentError(ValueError):
    """The engine cannot be started like this; the message names every rule that is broken."""


def engine_arguments(profile: EngineProfile, wanted: EngineArguments) -> list[str]:
    """Command line arguments of vLLM's OpenAI server (without the program and ``serve``).

    Raises:
        EngineArgumentError: every rule that ``wanted`` breaks; or the engine has no command line.
    """
    if profile.engine == "transformers_neuronx":
        raise EngineArgumentError(
            f"profile {profile.name} has no command line: transformers-neuronx is a library; "
            f"use transformers_neuronx_options()"
        )
    _check(profile, wanted)
    arguments = [
        *("--model", wanted.model_path),
        *("--served-model-name", wanted.served_model_name),
        *("--max-model-len", str(wanted.max_model_len)),
        *("--max-num-seqs", str(wanted.batch_size)),
        *("--dtype", _TORCH_DTYPE),
    ]
    if not profile.capabilities.neuron:
        # A CPU engine has no cores to divide a model over: the block's degree is only its address.
        return [*arguments, "--tensor-parallel-size", "1", _prefix_caching_flag(wanted)]
    arguments += [
        *("--tensor-parallel-size", str(wanted.tp_degree)),
        *("--num-gpu-blocks-override", str(num_gpu_blocks(wanted))),
        _prefix_caching_flag(wanted),
    ]
    if wanted.prefix_caching:
        arguments += ["--block-size", str(wanted.block_size)]
    override = {"override_neuron_config": override_neuron_config(profile, wanted)}
    return [*arguments, "--additional-config", json.dumps(override, sort_keys=True)]


def num_gpu_blocks(wanted: EngineArguments) -> int:
    """``--num-gpu-blocks-override``: what vLLM's scheduler may count on, as compiled into the model.

    Contiguous KV cache: exactly one block a sequence (the plugin sets the block size to the model length, and
    adds the null block itself). Block KV cache (prefix caching): enough blocks for every sequence at full
    length.
    """
    if not wanted.prefix_caching:
        return wanted.batch_size
    return -(-wanted.max_model_len // wanted.block_size) * wanted.batch_size


def override_neuron_config(profile: EngineProfile, wanted: EngineArguments) -> dict[str, Any]:
    """The ``override_neuron_config`` of ``--additional-config`` (the key with underscores: the plugin reads
    no other; its values are ``NeuronConfig`` attributes)."""
    return {
        **_bucket_config(wanted),
        **_sampling_config(profile),
        **_quantization_config(wanted),
        **_prefix_caching_config(wanted),
    }


def default_buckets(max_model_len: int) -> tuple[int, ...]:
    """The engine's automatic buckets: powers of two from 128 to the model length, always the last."""
    edges = []
    edge = 128
    while edge < max_model_len:
        edges.append(edge)
        edge *= 2
    return (*edges, max_model_len)


def engine_environment(
    profile: EngineProfile, wanted: EngineArguments, *, compiled_artifacts: str | None = None
) -> dict[str, str]:
    """Environment variables that the engine needs beside its arguments (none hold secrets).

    ``compiled_artifacts`` is the local folder of the compiled model: with it, the Neuron engine loads and
    never compiles as long as it is readable; the caller checks the manifest before.
    """
    if not profile.capabilities.neuron:
        # KV cache in GiB, rounded up to vLLM's least.
        return {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_TARGET_DEVICE": "cpu"}
    environment = {}
    if compiled_artifacts is not None and profile.engine == "vllm":
        environment["NEURON_COMPILED_ARTIFACTS"] = compiled_artifacts
    return environment


def transformers_neuronx_options(wanted: EngineArguments) -> dict[str, Any]:
    """Keyword arguments of ``LlamaForSampling.from_pretrained`` (plain values; the engine makes the
    ``NeuronConfig`` of them): n_positions and context_length_estimate are bucket lists.

    Context buckets are those of the tokens unless given: the library's own default (half of each) leaves the
    longest prompts without one.
    """
    tokens = list(wanted.token_buckets or default_buckets(wanted.max_model_len))
    contexts = list(wanted.context_buckets or default_buckets(wanted.max_model_len))
    options: dict[str, Any] = {
        "tp_degree": wanted.tp_degree,
        "batch_size": wanted.batch_size,
        "n_positions": tokens,
        "context_length_estimate": contexts,
        "amp": "bf16",
    }
    if wanted.weights_dtype == "int8":
        options["quant_dtype"] = "s8"
    return options


def _prefix_caching_flag(wanted: EngineArguments) -> str:
    return "--enable-prefix-caching" if wanted.prefix_caching else "--no-enable-prefix-caching"


def _bucket_config(wanted: EngineArguments) -> dict[str, Any]:
    """``enable_bucketing`` alone makes powers of two from 128; lists replace them."""
    config: dict[str, Any] = {"enable_bucketing": True}
    if wanted.context_buckets:
        config["context_encoding_buckets"] = list(wanted.context_buckets)
    if wanted.token_buckets:
        config["token_generation_buckets"] = list(wanted.token_buckets)
    return config


def _sampling_config(profile: EngineProfile) -> dict[str, Any]:
    """On-device sampling is on by default but greedy: ``dynamic`` lets each request bring its parameters, and
    ``global_topk`` bounds ``top_k`` (the guide strongly recommends it)."""
    if not profile.capabilities.on_device_sampling:
        return {}
    return {
        "on_device_sampling_config": {
            "do_sample": True,
            "dynamic": True,
            "global_topk": profile.capabilities.max_top_k,
        }
    }


def _quantization_config(wanted: EngineArguments) -> dict[str, Any]:
    """int8 weights come from a checkpoint quantized beforehand, in the model's own folder; vLLM's own
    ``--quantization`` stays unset."""
    if wanted.weights_dtype != "int8":
        return {}
    return {
        "quantized": True,
        "quantization_dtype": "int8",
        "quantization_type": "per_channel_symmetric",
        "quantized_checkpoints_path": wanted.model_path,
    }


def _prefix_caching_config(wanted: EngineArguments) -> dict[str, Any]:
    """Prefix caching needs the block KV layout, and the compiled block count equal to the scheduler's."""
    if not wanted.prefix_caching:
        return {}
    return {
        "is_prefix_caching": True,
        "is_block_kv_layout": True,
        "pa_num_blocks": num_gpu_blocks(wanted),
        "pa_block_size": wanted.block_size,
    }


def _check(profile: EngineProfile, wanted: EngineArguments) -> None:
    problems = [
        *_bucket_problems("context_buckets", wanted.context_buckets, wanted.max_model_len),
        *_bucket_problems("token_buckets", wanted.token_buckets, wanted.max_model_len),
    ]
    if not wanted.model_path.startswith("/"):
        problems.append(
            f"model_path {wanted.model_path!r} must be an absolute local folder: by hub id, models with "
            f"tied embeddings fail to shard on load, and hosts download no models"
        )
    if wanted.tp_degree not in profile.tp_degrees:
        degrees = ", ".join(str(degree) for degree in profile.tp_degrees)
        problems.append(f"tp_degree {wanted.tp_degree} is not one of {degrees} (profile {profile.name})")
    if wanted.weights_dtype not in profile.capabilities.weights_dtypes:
        problems.append(
            f"weights_dtype {wanted.weights_dtype} is not one of "
            f"{', '.join(profile.capabilities.weights_dtypes)} (profile {profile.name})"
        )
    if wanted.prefix_caching and not profile.capabilities.prefix_caching:
        problems.append(f"prefix caching is not supported by profile {profile.name}")
    if problems:
        raise EngineArgumentError("; ".join(problems))


def _bucket_problems(name: str, buckets: Sequence[int], max_model_len: int) -> list[str]:
    if not buckets:
        return []
    problems = []
    if list(buckets) != sorted(set(buckets)) or buckets[0] < 1:
        problems.append(f"{name} {list(buckets)} must be positive, ascending and without repeats")
    if buckets[-1] != max_model_len:
        problems.append(f"{name} must end with max_model_len {max_model_len}, not {buckets[-1]}")
    return problems
