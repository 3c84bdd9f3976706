"""What a request asks of the engine, and what it gets back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

MAX_TOP_K = 256
"""As the vendor's on-device sampling has it, so that a request means the same on either engine."""
MAX_LOGPROBS = 20

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestError(ValueError):
    """The request cannot be served as it is; the message is for the client."""


class EngineDeadError(RuntimeError):
    """The engine failed and can serve no more; the replica must be replaced."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn and when to stop. ``temperature`` 0 is greedy; ``top_k`` 0 is off.

    ``stop`` strings end the text before they appear; ``logprobs`` is how many alternatives to report (None:
    no log probabilities at all).
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None

    def problems(self) -> list[str]:
        """What is wrong, all at once."""
        checks = [
            (self.max_tokens >= 1, f"max_tokens {self.max_tokens} must be at least 1"),
            (0 <= self.temperature <= 100, f"temperature {self.temperature} must be between 0 and 100"),
            (0 <= self.top_k <= MAX_TOP_K, f"top_k {self.top_k} must be between 0 (off) and {MAX_TOP_K}"),
            (0 < self.top_p <= 1, f"top_p {self.top_p} must be over 0 and at most 1"),
            (all(self.stop), "stop strings must not be empty"),
            (
                self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
                f"logprobs {self.logprobs} must be between 0 and {MAX_LOGPROBS}",
            ),
        ]
        return [message for good, message in checks if not good]


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt in tokens and how to go on from it."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True)
class TokenLogprob:
    """Natural logarithms of probabilities, from the model's own distribution (before temperature and
    filters)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Output:
    """What one step gave a request.

    ``text`` may lag behind ``tokens`` (an unfinished character, a possible stop string) and is complete when
    ``finish`` is set. ``stop_reason`` is the stop string or token id that ended it; ``error`` says why it
    failed.
    """

    request_id: str
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None


@dataclass
class EngineCounts:
    """The engine's counters; times in milliseconds."""

    waiting: int = 0
    running: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    decode_steps: int = 0
    prefill_steps: int = 0
    stalls: int = 0
    stall_ms_sum: float = 0.0
    stall_ms_max: float = 0.0
