"""What admission reads of a request: prompt and answer lengths, whose it is, its priority and deadline.

Token counts are the tokenizer's own, from the model's folder. Of a chat only the contents are counted, not
what the template adds, so a count is never above the engine's: what is refused here would be refused there
too, after more work; what only the engine can see, it still refuses itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.serve.policy.fair import PRIORITIES

ANONYMOUS = "anonymous"
PRIORITY_HEADER = b"x-priority"
TIMEOUT_HEADER = b"x-request-timeout"
_INLINE_CHARACTERS = 8192
_TYPICAL_BYTES_A_TOKEN = 4
_MOST_CHOICES = 128

CountTokens = Callable[[str], int]
Headers = Iterable[tuple[bytes, bytes]]


class NeverFits(ValueError):
    """The request can never be served as it is; ``param`` is the field to change."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class Ask:
    """A request as admission sees it. ``key`` is a digest of the API key, ``timeout_s`` the client's own."""

    route: str
    prompt_tokens: int
    max_tokens: int
    choices: int = 1
    key: str = ANONYMOUS
    priority: int = PRIORITIES["normal"]
    timeout_s: float | None = None


def token_counter(model_dir: Path) -> CountTokens | None:
    """Counts tokens with the model's own tokenizer, of an instance of its own (the engine's is not to be used
    from two threads at once). None where the folder has no ``tokenizer.json``,
    or the venv no ``tokenizers``."""
    path = model_dir / "tokenizer.json"
    if not path.is_file() or importlib.util.find_spec("tokenizers") is None:
        return None
    # By name: the engine's venv has it, the one where types are checked does not.
    tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    return count


class Reader:
    """Makes an :class:`Ask` of a request.

    Args:
        max_model_len: prompt and answer together, in tokens.
        largest_prompt: the largest compiled prompt bucket, in tokens.
        count: see :func:`token_counter`.
        high_keys: digests of the keys that may ask for high priority; empty: all.
    """

    def __init__(
        self,
        max_model_len: int,
        largest_prompt: int,
        count: CountTokens | None = None,
        high_keys: tuple[str, ...] = (),
    ) -> None:
        self._max_model_len = max_model_len
        self._largest_prompt = min(largest_prompt, max_model_len)
        self._count = count
        self._high_keys = frozenset(item.lower() for item in high_keys)

    async def read(self, path: str, document: Mapping[str, Any], headers: Headers) -> Ask:
        """The request's size and terms.

        Fields of a wrong type count as absent: the engine's server app answers for them.

        Raises:
            NeverFits: no state of the replica would let it be served.
        """
        given = {name.lower(): value.decode("latin-1").strip() for name, value in headers}
        tokens, prompts = await self._prompt_tokens(document)
        named, wanted = _max_tokens(document)
        if document.get("truncate_prompt_tokens") is None:
            self._check(path, tokens, named, wanted)
        tokens = min(tokens, self._largest_prompt)
        room = max(self._max_model_len - tokens, 1)
        key = api_key(given)
        return Ask(
            route=path,
            prompt_tokens=max(tokens, 1),
            max_tokens=room if wanted is None else min(wanted, room),
            choices=prompts * max(_whole(document.get("n")) or 1, 1) if prompts < _MOST_CHOICES else prompts,
            key=ANONYMOUS if key is None else key[:16],
            priority=self._priority(given, key),
            timeout_s=_seconds(given.get(TIMEOUT_HEADER)),
        )

    def _check(self, path: str, tokens: int, named: str, wanted: int | None) -> None:
        prompt = "messages" if "chat" in path else "prompt"
        if tokens > self._largest_prompt or tokens >= self._max_model_len:
            raise NeverFits(
                f"the prompt has {tokens} tokens or more; the largest prompt that this model takes has "
                f"{min(self._largest_prompt, self._max_model_len - 1)} (prompt and answer together: "
                f"{self._max_model_len}); shorten it",
                prompt,
            )
        # The tutorial's /generate takes max_tokens as a bound, cut to what is left.
        if wanted is not None and path != "/generate" and tokens + wanted > self._max_model_len:
            raise NeverFits(
                f"the prompt has {tokens} tokens or more and {named} is {wanted}: together "
                f"{tokens + wanted}, over the limit of {self._max_model_len} tokens; ask for at most "
                f"{self._max_model_len - tokens} or shorten the prompt",
                named,
            )

    async def _prompt_tokens(self, document: Mapping[str, Any]) -> tuple[int, int]:
        """Tokens of the longest prompt, and how many prompts there are."""
        prompt = document.get("prompt")
        if isinstance(prompt, list) and prompt:
            if all(isinstance(item, int) for item in prompt):
                return len(prompt), 1
            sizes = [
                len(item) if isinstance(item, list) else await self._tokens(item)
                for item in prompt[:_MOST_CHOICES]
                if isinstance(item, list | str)
            ]
            return max(sizes, default=0), max(len(sizes), 1)
        if isinstance(prompt, str):
            return await self._tokens(prompt), 1
        texts = _texts(document.get("messages", document.get("input")))
        return sum([await self._tokens(text) for text in texts]), 1

    async def _tokens(self, text: str) -> int:
        if self._count is None:
            return 0 if not text else len(text.encode()) // (2 * _TYPICAL_BYTES_A_TOKEN)
        if len(text) <= _INLINE_CHARACTERS:
            return self._count(text)
        return await asyncio.to_thread(self._count, text)

    def _priority(self, headers: Mapping[bytes, str], key: str | None) -> int:
        asked = PRIORITIES.get(headers.get(PRIORITY_HEADER, "normal").lower(), PRIORITIES["normal"])
        if asked < PRIORITIES["normal"] and self._high_keys and key not in self._high_keys:
            return PRIORITIES["normal"]
        return asked


def api_key(headers: Mapping[bytes, str]) -> str | None:
    """SHA-256 (hex) of the request's API key; None without one. The key itself is kept nowhere."""
    given = headers.get(b"authorization", "")
    scheme, _, secret = given.partition(" ")
    if scheme.lower() != "bearer" or not secret:
        secret = headers.get(b"x-api-key", "")
    return hashlib.sha256(secret.strip().encode()).hexdigest() if secret.strip() else None


def _texts(value: Any, depth: int = 0) -> Iterable[str]:
    """Contents of a chat's messages (or of ``input``), of all parts that are text."""
    if isinstance(value, str):
        yield value.strip()
    elif isinstance(value, list) and depth < 4:
        for item in value:
            if isinstance(item, dict):
                yield from _texts(item.get("content", item.get("text")), depth + 1)


def _max_tokens(document: Mapping[str, Any]) -> tuple[str, int | None]:
    for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        value = _whole(document.get(name))
        if value is not None and value >= 1:
            return name, value
    return "max_tokens", None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _seconds(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None
