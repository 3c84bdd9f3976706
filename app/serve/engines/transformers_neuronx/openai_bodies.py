"""OpenAI request bodies, and what they become for the engine.

Fields that the engine cannot honour are refused when they ask for something, and ignored at their default, so
that clients that always send them work. Unknown fields are ignored, as vLLM's server does.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.serve.engines.base import RequestRefused
from app.serve.engines.transformers_neuronx.request import Sampling

_COMPLETION_TOKENS = 16
"""OpenAI's default for completions."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "suffix": ("",),
    "echo": (False,),
    "tools": ([],),
    "response_format": ({"type": "text"},),
}
"""What cannot be honoured, with the values that ask for nothing (None always does)."""


class _StreamOptions(BaseModel):
    include_usage: bool = False


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: _StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def token_limit(self) -> int | None:
        """How many tokens the client wants at most; None: what fits."""
        return self.max_tokens

    def logprob_count(self) -> int | None:
        """Alternatives to report for each token; None: no log probabilities."""
        return None

    def sampling(self, room: int) -> Sampling:
        """The engine's parameters, where ``room`` tokens are left after the prompt.

        Raises:
            RequestRefused: every parameter that is wrong or cannot be honoured.
        """
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        limit = self.token_limit()
        top_k = self.top_k or 0
        wanted = Sampling(
            max_tokens=max(room, 1) if limit is None else limit,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=0 if top_k == -1 else top_k,
            seed=self.seed,
            stop=tuple(stop),
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            logprobs=self.logprob_count(),
        )
        extra = self.model_extra or {}
        problems = wanted.problems() + [
            f"{name} {extra[name]!r} is not supported by this engine; leave it out"
            for name, neutral in _NEUTRAL.items()
            if extra.get(name) is not None and extra[name] not in neutral
        ]
        if problems:
            raise RequestRefused("; ".join(problems))
        return wanted


class CompletionBody(_Body):
    """``POST /v1/completions``: one prompt, as text or as tokens."""

    prompt: str | list[int] | list[str]
    logprobs: int | None = None

    def token_limit(self) -> int | None:
        """OpenAI's small default, unless the client says more."""
        return _COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    def logprob_count(self) -> int | None:
        """As asked."""
        return self.logprobs

    def prompt_tokens(self, tokenizer: Any) -> tuple[int, ...]:
        """The prompt in tokens.

        Raises:
            RequestRefused: several prompts at once.
        """
        prompt = self.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return tuple(tokenizer.encode(prompt))
        if any(isinstance(item, str) for item in prompt):
            raise RequestRefused(f"prompt holds {len(prompt)} prompts; send one a request")
        return tuple(item for item in prompt if isinstance(item, int))


class ChatBody(_Body):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None

    def token_limit(self) -> int | None:
        """The newer name wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def logprob_count(self) -> int | None:
        """``top_logprobs`` counts only together with ``logprobs``."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def prompt_tokens(self, tokenizer: Any) -> tuple[int, ...]:
        """The conversation through the model's chat template, in tokens.

        Raises:
            RequestRefused: content that is not text, or that the template does not take.
        """
        messages = [self._plain(message) for message in self.messages]
        try:
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates raise whatever they like
            raise RequestRefused(
                f"the model's chat template does not take these messages: {error}"
            ) from error
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    @staticmethod
    def _plain(message: dict[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if isinstance(content, list):
            if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
                raise RequestRefused("a message's content must be text: this engine takes no images or audio")
            content = "".join(str(part.get("text", "")) for part in content)
        if not isinstance(message.get("role"), str) or not isinstance(content, str):
            raise RequestRefused('each message needs a "role" and a text "content"')
        return {**message, "content": content}


def parse(kind: type[CompletionBody] | type[ChatBody], raw: bytes) -> CompletionBody | ChatBody:
    """A request's body.

    Raises:
        RequestRefused: what is wrong, with every field at fault.
    """
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in item['loc']) or 'body'}: {item['msg']}"
            for item in error.errors()
        )
        raise RequestRefused(problems) from error
