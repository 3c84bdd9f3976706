"""What the replica needs of an engine, whichever it is."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from app.plan.profiles import get_profile
from app.serve.settings import ReplicaSettings

TokenNote = Callable[[int], None]
"""Called with the number of tokens that an engine step gave."""


@dataclass(frozen=True)
class TextRequest:
    """A plain completion: ``/generate`` and the readiness canary. Times none, lengths in tokens."""

    request_id: str
    prompt: str
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None


class RequestRefused(ValueError):
    """The engine cannot take this request as it is; the message is for the client."""


class Engine(Protocol):
    """A started engine, with the OpenAI server app over it.

    ``app`` is ASGI and answers ``/v1/...`` and ``/metrics``. ``dead_reason`` is None while the engine can
    serve; once it is not, the replica must be replaced.
    """

    app: Any

    def dead_reason(self) -> str | None:
        """Why the engine can serve no more, or None."""
        ...

    def stream_text(self, request: TextRequest) -> AsyncGenerator[str, None]:
        """Text as it is generated. Closing the generator frees the engine's slot.

        Raises:
            RequestRefused: the request can never be served (too long, wrong parameters).
        """
        ...

    def shutdown(self) -> None:
        """End the engine's processes. May be called twice."""
        ...


async def start_engine(settings: ReplicaSettings, note_tokens: TokenNote) -> Engine:
    """Start the engine that the settings' profile names; returns when it can serve.

    Raises:
        app.plan.catalogue.UnknownNameError: no such profile.
        app.plan.engine_arguments.EngineArgumentError: a setting that the profile does not support.
    """
    profile = get_profile(settings.profile)
    if profile.engine == "transformers_neuronx":
        from app.serve.engines.transformers_neuronx.start import start_transformers_neuronx

        return await start_transformers_neuronx(settings, note_tokens)
    from app.serve.engines.vllm_engine import start_vllm

    return await start_vllm(settings, profile, note_tokens)
