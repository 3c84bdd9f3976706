"""The emulated core in vLLM's terms: what AsyncLLM calls of an engine core. Imports vLLM (0.32)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats

from app.serve.engines.emulated import EmulatedRequest, Scheduler, StepLoop, StepToken, alive_resources

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class EmulatedCore(EngineCoreClient):  # type: ignore[misc]  # vLLM is not there when types are checked
    """An engine core in this process that gives one token a step to each running request."""

    def __init__(self, vllm_config: Any, scheduler: Scheduler, freeze_file: Path | None) -> None:
        self.resources = alive_resources()
        self.engine_ranks_managed = [0]
        self._scheduler = scheduler
        self._loop = StepLoop(scheduler, freeze_file)
        # What a real core reports back after start; metrics name it.
        cache = vllm_config.cache_config
        cache.num_gpu_blocks = cache.num_gpu_blocks or vllm_config.scheduler_config.max_num_seqs

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        """An emulated model generates and nothing else."""
        return ("generate",)

    async def add_request_async(self, request: Any) -> None:
        """Queue a request."""
        parameters = request.sampling_params
        prompt = request.prompt_token_ids or []
        self._scheduler.add(
            EmulatedRequest(
                request_id=request.request_id,
                prompt_tokens=len(prompt),
                max_tokens=parameters.max_tokens or 1,
                min_tokens=parameters.min_tokens,
                ignore_eos=parameters.ignore_eos,
                stop_token_ids=frozenset(parameters.stop_token_ids or ()),
            )
        )
        self._loop.wake()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Free the requests' slots."""
        if request_ids:
            self._scheduler.abort(list(request_ids))
            self._loop.wake()

    async def get_output_async(self) -> Any:
        """The next step's outputs, with the scheduler's counts."""
        tokens = await self._loop.next_step()
        return EngineCoreOutputs(
            outputs=[_output(item) for item in tokens],
            scheduler_stats=SchedulerStats(
                num_running_reqs=len(self._scheduler.running),
                num_waiting_reqs=len(self._scheduler.waiting),
            ),
        )

    async def reset_mm_cache_async(self) -> None:
        """Nothing is cached."""

    async def reset_prefix_cache_async(self, *args: Any, **kwargs: Any) -> bool:
        """Nothing is cached."""
        return True

    def dp_engines_running(self) -> bool:
        """Whether requests are waiting or running."""
        return not self._scheduler.idle

    def shutdown(self, timeout: float | None = None) -> None:
        """No process to end."""
        self.resources.engine_dead = True


def _output(item: StepToken) -> Any:
    prefill = None
    if item.first:
        prefill = PrefillStats()
        prefill.set(item.request.prompt_tokens, 0, 0)
    return EngineCoreOutput(
        request_id=item.request.request_id,
        new_token_ids=[item.token],
        finish_reason=None if item.finish is None else _FINISH[item.finish],
        stop_reason=item.stop_token,
        prefill_stats=prefill,
    )
