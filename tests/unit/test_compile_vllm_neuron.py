"""The vLLM and NxD Inference paths, against doubles that take the vendor's arguments and no others.

Signatures: NxD Inference 0.8 ``NeuronConfig`` (names of the guide), ``application_base.compile``; vLLM 0.13.0
``EngineArgs`` and ``LLMEngine``. Nothing here says that the real compiler takes it.
"""

from __future__ import annotations

import argparse
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from app.compile.vllm_neuron import (
    compile_environment,
    compile_with_nxdi,
    compile_with_vllm,
    forget_failures,
    neuron_config_values,
)
from app.plan.profiles import EngineArguments, get_profile

PROFILE = get_profile("vllm-neuron-2.28")
WANTED = EngineArguments(
    model_path="/models/llama",
    served_model_name="llama",
    tp_degree=8,
    batch_size=4,
    max_model_len=2048,
    context_buckets=(512, 2048),
    token_buckets=(1024, 2048),
)
NEURON_CONFIG = {
    "tp_degree", "batch_size", "ctx_batch_size", "seq_len", "max_context_length", "enable_bucketing",
    "context_encoding_buckets", "token_generation_buckets", "is_continuous_batching", "padding_side",
    "on_device_sampling_config", "torch_dtype",
}  # fmt: skip


def test_only_attributes_that_the_library_has() -> None:
    values = neuron_config_values(PROFILE, WANTED)
    assert set(values) <= NEURON_CONFIG
    assert values["context_encoding_buckets"] == [512, 2048]
    assert values["token_generation_buckets"] == [1024, 2048]
    assert values["is_continuous_batching"] is True


def environment(**changes: Any) -> dict[str, str]:
    base: dict[str, Any] = {"retry_failed": False, "cross_compile": False, **changes}
    paths = {"compiled": Path("/w/compiled"), "nxd": Path("/w/nxd"), "cache": Path("/w/cache")}
    return compile_environment(PROFILE, WANTED, **paths, **base)


def test_the_environment_names_folders_and_only_flags_that_exist() -> None:
    plain = environment()
    assert plain["NEURON_COMPILED_ARTIFACTS"] == "/w/compiled"
    assert plain["BASE_COMPILE_WORK_DIR"] == "/w/nxd/"
    assert plain["NEURON_COMPILE_CACHE_URL"] == "/w/cache"
    assert "NEURON_PLATFORM_TARGET_OVERRIDE" not in plain
    assert "NEURON_CC_FLAGS" not in plain
    assert environment(cross_compile=True)["NEURON_PLATFORM_TARGET_OVERRIDE"] == "inf2"
    assert environment(retry_failed=True)["NEURON_CC_FLAGS"] == "--retry_failed_compilation"


def test_nxdi_compiles_into_the_folder_and_loads_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: dict[str, Any] = {}

    class NeuronConfig:
        def __init__(self, **values: Any) -> None:
            assert set(values) <= NEURON_CONFIG, set(values) - NEURON_CONFIG
            seen["config"] = values

    class OnDeviceSamplingConfig:
        def __init__(self, do_sample: bool, dynamic: bool, global_topk: int) -> None:
            seen["sampling"] = (do_sample, dynamic, global_topk)

    class Llama:
        def __init__(self, path: str, config: Any) -> None:
            seen["model"] = (path, config)

        @staticmethod
        def get_neuron_config_cls() -> Any:
            return NeuronConfig

        @staticmethod
        def get_config_cls() -> Any:
            return lambda neuron_config, load_config: ("config", load_config)

        def compile(self, folder: str) -> None:
            seen["compiled"] = folder

        def load(self, folder: str) -> None:
            raise AssertionError("a build machine has no cores to load onto")

    package = "neuronx_distributed_inference"
    double(monkeypatch, f"{package}.models.config", OnDeviceSamplingConfig=OnDeviceSamplingConfig)
    double(monkeypatch, f"{package}.utils.constants", MODEL_TYPES={"llama": {"causal-lm": Llama}})
    double(monkeypatch, f"{package}.utils.hf_adapter", load_pretrained_config=lambda path: f"hf:{path}")
    double(monkeypatch, "torch", bfloat16="bfloat16")
    compile_with_nxdi(PROFILE, WANTED, "LlamaForCausalLM", tmp_path)
    assert seen["compiled"] == f"{tmp_path}/"
    assert seen["model"] == ("/models/llama", ("config", "hf:/models/llama"))
    assert seen["sampling"] == (True, True, 256)
    assert seen["config"]["torch_dtype"] == "bfloat16"


def test_vllm_is_started_once_with_the_engines_own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class EngineArgs:
        @staticmethod
        def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            for flag in ("--model", "--served-model-name", "--dtype", "--additional-config"):
                parser.add_argument(flag)
            for flag in ("--max-model-len", "--max-num-seqs", "--tensor-parallel-size"):
                parser.add_argument(flag, type=int)
            parser.add_argument("--num-gpu-blocks-override", type=int)
            parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction)
            return parser

        @staticmethod
        def from_cli_args(arguments: argparse.Namespace) -> argparse.Namespace:
            return arguments

    class LLMEngine:
        @staticmethod
        def from_engine_args(engine_args: Any, *, enable_multiprocessing: bool = False) -> None:
            seen.append((engine_args, enable_multiprocessing))

    double(monkeypatch, "vllm", EngineArgs=EngineArgs, LLMEngine=LLMEngine)
    double(monkeypatch, "vllm.utils.argparse_utils", FlexibleArgumentParser=argparse.ArgumentParser)
    compile_with_vllm(PROFILE, WANTED)
    ((arguments, apart),) = seen
    assert apart is False
    assert (arguments.tensor_parallel_size, arguments.num_gpu_blocks_override) == (8, 4)
    assert arguments.enable_prefix_caching is False
    assert "context_encoding_buckets" in arguments.additional_config


def test_only_remembered_failures_are_forgotten(tmp_path: Path) -> None:
    for name, result in (("good", b"neff"), ("bad", None), ("torn", b"")):
        folder = tmp_path / "neuronxcc-2.23" / f"MODULE_{name}"
        folder.mkdir(parents=True)
        (folder / "model.log").write_text("log")
        if result is not None:
            (folder / "model.neff").write_bytes(result)
    assert forget_failures(tmp_path) == 2
    assert [path.parent.name for path in tmp_path.glob("*/*/model.log")] == ["MODULE_good"]


def double(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    """A module of that name, and the packages above it."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        above = ".".join(parts[:count])
        if above not in sys.modules or not hasattr(sys.modules[above], "__path__"):
            made = types.ModuleType(above)
            made.__path__ = []
            monkeypatch.setitem(sys.modules, above, made)
    for key, value in content.items():
        monkeypatch.setattr(sys.modules[name], key, value, raising=False)
