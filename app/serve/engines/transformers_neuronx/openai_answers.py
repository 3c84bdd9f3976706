"""OpenAI answers: the documents of completions and chat completions, whole and in chunks."""

from __future__ import annotations

import json
import time
from typing import Any

from app.serve.engines.transformers_neuronx.request import Output, TokenLogprob


class Answer:
    """Builds one request's documents; ``chat`` chooses the form.

    ``usage`` counts what was streamed so far, in tokens.
    """

    def __init__(
        self, request_id: str, model: str, tokenizer: Any, *, chat: bool, prompt_tokens: int
    ) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = 0
        self._text = ""
        self._logprobs: list[TokenLogprob] = []
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
            "created": int(time.time()),
            "model": model,
        }

    @property
    def usage(self) -> dict[str, int]:
        """Token counts."""
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
        }

    def opening(self) -> dict[str, Any] | None:
        """The first chunk of a chat stream, which names the role."""
        if not self._chat:
            return None
        return self._chunk([self._choice({"delta": {"role": "assistant", "content": ""}}, None, None)])

    def chunk(self, output: Output) -> dict[str, Any] | None:
        """A stream's chunk; None: the step gave nothing to tell yet (held back text)."""
        self._completion_tokens += len(output.tokens)
        offset, self._text = len(self._text), self._text + output.text
        logprobs = self._logprob_document(output.logprobs, offset) if output.logprobs else None
        if not output.text and output.finish is None and logprobs is None:
            return None
        body = {"delta": {"content": output.text}} if self._chat else {"text": output.text}
        return self._chunk([self._choice(body, output, logprobs)])

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk when the client asked for counts."""
        return {**self._chunk([]), "usage": self.usage}

    def add(self, output: Output) -> None:
        """Collect a step for the whole answer."""
        self._completion_tokens += len(output.tokens)
        self._text += output.text
        self._logprobs += output.logprobs

    def whole(self, last: Output) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        logprobs = self._logprob_document(tuple(self._logprobs), 0) if self._logprobs else None
        message = {"message": {"role": "assistant", "content": self._text}}
        body = message if self._chat else {"text": self._text}
        kind = "chat.completion" if self._chat else "text_completion"
        choice = self._choice(body, last, logprobs)
        return {**self._head, "object": kind, "choices": [choice], "usage": self.usage}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices}

    def _choice(self, body: dict[str, Any], output: Output | None, logprobs: Any) -> dict[str, Any]:
        finish = None if output is None else output.finish
        stop_reason = None if output is None else output.stop_reason
        return {"index": 0, **body, "logprobs": logprobs, "finish_reason": finish, "stop_reason": stop_reason}

    def _logprob_document(self, logprobs: tuple[TokenLogprob, ...], offset: int) -> dict[str, Any]:
        if self._chat:
            return {
                "content": [
                    {
                        **self._token(item.token, item.logprob),
                        "top_logprobs": [self._token(token, value) for token, value in item.top],
                    }
                    for item in logprobs
                ]
            }
        tokens = [self._tokenizer.decode([item.token]) for item in logprobs]
        offsets = [offset + sum(map(len, tokens[:index])) for index in range(len(tokens))]
        return {
            "tokens": tokens,
            "token_logprobs": [item.logprob for item in logprobs],
            "top_logprobs": [
                {self._tokenizer.decode([token]): value for token, value in item.top} for item in logprobs
            ],
            "text_offset": offsets,
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def event(document: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(document, ensure_ascii=False).encode() + b"\n\n"
