"""Start the engine for a replica: model, warm-up, thread, server app."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.plan.engine_arguments import default_buckets
from app.serve.engines.base import RequestRefused, TextRequest, TokenNote
from app.serve.engines.transformers_neuronx.api import OpenAIApp
from app.serve.engines.transformers_neuronx.contract import Geometry
from app.serve.engines.transformers_neuronx.core import EngineCore
from app.serve.engines.transformers_neuronx.engine import AsyncEngine
from app.serve.engines.transformers_neuronx.hardware import load_neuron_model
from app.serve.engines.transformers_neuronx.metrics import EngineMetrics
from app.serve.engines.transformers_neuronx.request import GenerationRequest, RequestError, Sampling
from app.serve.engines.transformers_neuronx.runner import ContractRunner, warm_up
from app.serve.policy.stall import StallPolicy
from app.serve.settings import ReplicaSettings, SettingsError

ENVIRONMENT_PREFIX = "NEURONFLEET_TNX_"


class TnxSettings(BaseModel):
    """What is this engine's alone; each is set by ``NEURONFLEET_TNX_<FIELD>``. Times in milliseconds.

    ``contract`` is who runs the model: NeuronCores, or the CPU emulation of the library's contract (a Llama
    model in float32, slow: for rehearsals and tests). ``chunk_sizes`` (comma list) are the emulation's;
    compiled models bring their own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    contract: Literal["neuron", "cpu"] = "neuron"
    tpot_slo_ms: float | None = Field(default=100.0, ge=0)
    max_stall_ms: float | None = Field(default=None, ge=0)
    chunk_sizes: tuple[int, ...] = ()

    @property
    def policy(self) -> StallPolicy:
        """The scheduler's policy."""
        return StallPolicy(tpot_slo_ms=self.tpot_slo_ms, max_stall_ms=self.max_stall_ms)


def tnx_settings(environment: Mapping[str, str]) -> TnxSettings:
    """This engine's settings from the environment.

    Raises:
        SettingsError: every wrong or unknown one.
    """
    found: dict[str, Any] = {
        name.removeprefix(ENVIRONMENT_PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(ENVIRONMENT_PREFIX)
    }
    if "chunk_sizes" in found:
        found["chunk_sizes"] = [item for item in found["chunk_sizes"].split(",") if item]
    try:
        return TnxSettings.model_validate(found)
    except ValidationError as error:
        problems = "; ".join(
            f"{ENVIRONMENT_PREFIX}{str(item['loc'][0]).upper()}={item.get('input')!r}: {item['msg']}"
            for item in error.errors()
        )
        raise SettingsError(f"wrong engine settings: {problems}") from error


class TransformersNeuronxEngine:
    """A started engine, as the replica takes it (:class:`app.serve.engines.base.Engine`)."""

    def __init__(self, engine: AsyncEngine, app: OpenAIApp, tokenizer: Any, context_limit: int) -> None:
        self.app: Any = app
        self.engine = engine
        self._tokenizer = tokenizer
        self._context_limit = context_limit

    def dead_reason(self) -> str | None:
        """Why the engine can serve no more, or None."""
        return self.engine.dead_reason

    async def stream_text(self, request: TextRequest) -> AsyncGenerator[str, None]:
        """Text as it is generated, without the prompt."""
        prompt = tuple(self._tokenizer.encode(request.prompt))
        sampling = Sampling(
            max_tokens=min(request.max_tokens, max(self._context_limit - len(prompt), 1)),
            temperature=request.temperature,
            top_p=request.top_p,
            stop=request.stop,
            seed=request.seed,
        )
        wanted = GenerationRequest(request.request_id, prompt, sampling)
        try:
            self.engine.check(wanted)
        except RequestError as error:
            raise RequestRefused(str(error)) from error
        async with contextlib.aclosing(self.engine.generate(wanted)) as outputs:
            async for output in outputs:
                if output.text:
                    yield output.text

    def shutdown(self) -> None:
        """End the engine's thread. May be called twice."""
        self.engine.shutdown()


async def start_transformers_neuronx(
    settings: ReplicaSettings, note_tokens: TokenNote, own: TnxSettings | None = None
) -> TransformersNeuronxEngine:
    """Load the model, run every graph once, and start to serve.

    Raises:
        SettingsError: settings of this engine are wrong.
        app.serve.engines.transformers_neuronx.hardware.ArtifactMismatch: the compiled model does not fit.
    """
    own = tnx_settings(os.environ) if own is None else own
    model, geometry, tokenizer = await asyncio.to_thread(_load, settings, own)
    runner = ContractRunner(model, geometry)
    costs = await asyncio.to_thread(warm_up, runner, time.monotonic)
    metrics = EngineMetrics()
    core = EngineCore(
        runner,
        tokenizer,
        costs,
        policy=own.policy,
        eos=end_tokens(settings.model_dir, tokenizer),
        clock=time.monotonic,
        metrics=metrics,
        queue_limit=settings.batch_size + settings.queue_limit + 64,
    )
    engine = AsyncEngine(core, note_tokens)
    limit = geometry.context_limit
    app = OpenAIApp(engine, tokenizer, metrics, model=settings.model_name, context_limit=limit)
    return TransformersNeuronxEngine(engine, app, tokenizer, limit)


def end_tokens(model_dir: Path, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer: the generation config's (a model may have several), else the tokenizer's."""
    path = model_dir / "generation_config.json"
    found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    if found is None:
        found = tokenizer.eos_token_id
    listed = found if isinstance(found, list) else [found]
    return frozenset(int(token) for token in listed if token is not None)


def _load(settings: ReplicaSettings, own: TnxSettings) -> tuple[Any, Geometry, Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(settings.model_dir), local_files_only=True)
    if own.contract == "neuron":
        model, geometry = load_neuron_model(settings)
        return model, geometry, tokenizer
    from app.serve.engines.transformers_neuronx.cpu_contract import load_cpu_contract

    buckets = settings.buckets or default_buckets(settings.max_model_len)
    config = json.loads((settings.model_dir / "config.json").read_text())
    geometry = Geometry(
        settings.batch_size, buckets, buckets, int(config["vocab_size"]), chunk_sizes=own.chunk_sizes
    )
    return load_cpu_contract(settings.model_dir, geometry), geometry, tokenizer
