"""From tokens to text that can be sent as it comes: whole characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4
"""Bytes of the longest UTF-8 character: as many replacement characters may still become one."""
_CONTEXT_TOKENS = 6
"""Tokens before the new ones that are decoded with them: leading spaces depend on what stands before."""


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = ...) -> Any:
        """Text of tokens."""
        ...


class IncrementalDetokenizer:
    """Decodes a stream of tokens so that the pieces put together are the text of the whole.

    A token may end inside a character. What decodes to replacement characters at the end is held back until
    the character is whole; if the stream ends there, the fragment is dropped.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        # A window of tokens whose text is given, in pieces that end where a character ends, then new tokens.
        self._pieces = [self._start(prompt)]
        self._new: list[int] = []
        self._given = self._decode(self._pieces[0])
        self._sent = ""

    def add(self, token: int) -> str:
        """Text that this token completes; empty while a character is unfinished."""
        self._new.append(token)
        whole = self._decode([*self._known(), *self._new])
        # Where byte tokens are decoded in runs, an unfinished character spoils the whole ones before it.
        new = whole[len(self._given) :] if whole.startswith(self._given) else self._decode(self._new)
        held = len(new) - len(new.rstrip(_REPLACEMENT))
        if held == 0:
            text = new[len(self._sent) :]
            self._advance()
            return text
        # More of them than a character has bytes cannot all become one: bytes that are no text at all.
        sure = new[: len(new) - min(held, _LONGEST_CHARACTER)]
        if not sure.startswith(self._sent):
            return ""
        text = sure[len(self._sent) :]
        self._sent = sure
        return text

    def _advance(self) -> None:
        self._pieces.append(self._new)
        self._new = []
        self._sent = ""
        while len(self._pieces) > 1 and sum(map(len, self._pieces[1:])) >= _CONTEXT_TOKENS:
            del self._pieces[0]
        self._given = self._decode(self._known())

    def _known(self) -> list[int]:
        return [token for piece in self._pieces for token in piece]

    def _start(self, prompt: Sequence[int]) -> list[int]:
        """The prompt's last tokens, from where a character begins."""
        for count in range(_CONTEXT_TOKENS, _CONTEXT_TOKENS + _LONGEST_CHARACTER):
            if not self._decode(window := list(prompt[-count:])).startswith(_REPLACEMENT):
                break
        return window

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True)) if tokens else ""


@dataclass(frozen=True)
class Passed:
    """Text that may be sent; ``stop`` is the stop string that was met, if one was."""

    text: str
    stop: str | None = None


class StopStrings:
    """Finds stop strings across pieces of text, and holds back what may still become one.

    Of several, the one that is complete first ends the text; of those complete at the same character, the
    longest. So the result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def add(self, text: str) -> Passed:
        """What may be sent after this piece."""
        if not self._stops:
            return Passed(text)
        whole = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := whole.find(stop)) >= 0]
        if found:
            _, start, stop = min(found)
            self._held = ""
            return Passed(whole[:start], stop)
        keep = max(self._overlap(whole, stop) for stop in self._stops)
        self._held = whole[len(whole) - keep :]
        return Passed(whole[: len(whole) - keep])

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of ``text`` that begins ``stop``."""
        for length in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:length]):
                return length
        return 0
