"""Compile for vLLM on Neuron, in the process that is started for it: through vLLM's own path, or by NxD
Inference alone where the machine has no NeuronCores.

vLLM's path: with NEURON_COMPILED_ARTIFACTS at a folder that holds no compiled model, the plugin compiles with
the engine's own arguments and stores there, then loads. So what is compiled is what the same arguments ask
for when serving. It needs the cores, since it loads.

NxD Inference's path: the model class's ``compile(folder)`` with the ``NeuronConfig`` that the plugin would
make, and NEURON_PLATFORM_TARGET_OVERRIDE for Inf2; nothing is loaded. A serving engine takes the compiled
folder's own config (the plugin ignores overrides when a compiled model loads).

Names are those of vLLM 0.13.0, vllm-neuron 0.4.1 (``neuronx_distributed_model_loader.py``) and NxD Inference
0.8 (``application_base.py``). Not yet run on hardware, nor with the real compiler: these come with the image
of profile vllm-neuron-2.28 only.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from app.plan.engine_arguments import engine_arguments, engine_environment, override_neuron_config
from app.plan.profiles import EngineArguments, EngineProfile

TARGET_VARIABLE = "NEURON_PLATFORM_TARGET_OVERRIDE"
TARGET = "inf2"


def compile_environment(
    profile: EngineProfile,
    wanted: EngineArguments,
    *,
    compiled: Path,
    nxd: Path,
    cache: Path,
    retry_failed: bool,
    cross_compile: bool,
) -> dict[str, str]:
    """What the libraries read from the environment of the process that compiles.

    The compiler's cache lies in the work folder, so that graphs that are done are taken from it when a run
    goes on. That cache remembers failures too, and skips them until it is told to try them again.
    """
    environment = {
        **engine_environment(profile, wanted, compiled_artifacts=str(compiled)),
        "BASE_COMPILE_WORK_DIR": f"{nxd}/",
        "NEURON_COMPILE_CACHE_URL": str(cache),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if retry_failed:
        environment["NEURON_CC_FLAGS"] = "--retry_failed_compilation"
    if cross_compile:
        environment[TARGET_VARIABLE] = TARGET
    return environment


def compile_with_vllm(profile: EngineProfile, wanted: EngineArguments) -> None:
    """Start the engine once: it compiles into NEURON_COMPILED_ARTIFACTS, loads, and is let go."""
    vllm = importlib.import_module("vllm")
    parser = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()
    arguments = vllm.EngineArgs.add_cli_args(parser).parse_args(engine_arguments(profile, wanted))
    # In this process: its end is the engine's end, and its output is the log's.
    vllm.LLMEngine.from_engine_args(vllm.EngineArgs.from_cli_args(arguments), enable_multiprocessing=False)


def neuron_config_values(profile: EngineProfile, wanted: EngineArguments) -> dict[str, Any]:
    """Arguments of ``NeuronConfig`` as the plugin makes them from vLLM's (without chunked prefill, which it
    does not support), our overrides laid over them. ``on_device_sampling_config`` is still a plain table."""
    return {
        "tp_degree": wanted.tp_degree,
        "ctx_batch_size": 1,
        "batch_size": wanted.batch_size,
        "max_context_length": wanted.max_model_len,
        "seq_len": wanted.max_model_len,
        "is_continuous_batching": wanted.batch_size > 1,
        "padding_side": "right",
        **override_neuron_config(profile, wanted),
    }


def compile_with_nxdi(
    profile: EngineProfile, wanted: EngineArguments, architecture: str, compiled: Path
) -> None:
    """Trace and compile all graphs into ``compiled``; nothing is loaded onto a core."""
    config = importlib.import_module("neuronx_distributed_inference.models.config")
    types = importlib.import_module("neuronx_distributed_inference.utils.constants").MODEL_TYPES
    adapter = importlib.import_module("neuronx_distributed_inference.utils.hf_adapter")
    torch = importlib.import_module("torch")
    model_class = types[architecture.removesuffix("ForCausalLM").lower()]["causal-lm"]
    values = neuron_config_values(profile, wanted)
    values["torch_dtype"] = torch.bfloat16
    values["on_device_sampling_config"] = config.OnDeviceSamplingConfig(**values["on_device_sampling_config"])
    neuron_config = model_class.get_neuron_config_cls()(**values)
    loaded = adapter.load_pretrained_config(wanted.model_path)
    model = model_class(wanted.model_path, model_class.get_config_cls()(neuron_config, load_config=loaded))
    # With the slash: older releases join the file's name to it as it stands.
    model.compile(f"{compiled}/")


def forget_failures(cache: Path) -> int:
    """Remove what the compiler's cache remembers of failed graphs (a log, and no result); how many it was.

    The flag for it does not reach every caller: NxD's model builder asks the cache with
    ``retry_failed_compilation=False``.
    """
    count = 0
    for log in sorted(cache.glob("**/model.log")):
        result = log.with_name("model.neff")
        if not result.exists() or result.stat().st_size == 0:
            log.unlink()
            count += 1
    return count
