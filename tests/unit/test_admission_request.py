"""What admission reads of a request, and what can never be served."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest

from app.serve.admission_request import ANONYMOUS, Ask, NeverFits, Reader


def words(text: str) -> int:
    return len(text.split())


def read(document: dict[str, Any], headers: dict[str, str] | None = None, **reader: Any) -> Ask:
    made = Reader(100, reader.pop("largest", 60), words, **reader)
    pairs = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    path = "/v1/chat/completions" if "messages" in document else "/v1/completions"
    return asyncio.run(made.read(path, document, pairs))


def chat(*contents: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": item} for item in contents], **fields}


def test_lengths_of_all_forms_of_a_prompt() -> None:
    assert read({"prompt": "a b c"}).prompt_tokens == 3
    assert read({"prompt": [1, 2, 3, 4]}).prompt_tokens == 4
    two = read({"prompt": ["a", "b c"], "n": 2})
    assert (two.prompt_tokens, two.choices) == (2, 4)
    assert read(chat("a b", "c")).prompt_tokens == 3
    parts = [{"type": "text", "text": "a b c"}, {"type": "image_url", "image_url": {"url": "x"}}]
    assert read(chat(parts)).prompt_tokens == 3


def test_an_answer_without_a_limit_may_fill_the_room() -> None:
    assert read({"prompt": "a b"}).max_tokens == 98
    assert read({"prompt": "a b", "max_tokens": 5}).max_tokens == 5
    assert read(chat("a", max_tokens=50, max_completion_tokens=7)).max_tokens == 7


def test_a_prompt_over_the_largest_bucket_never_fits() -> None:
    with pytest.raises(NeverFits, match=r"61 tokens or more.*has 60") as refusal:
        read({"prompt": "a " * 61})
    assert refusal.value.param == "prompt"
    with pytest.raises(NeverFits) as refusal:
        read(chat("a " * 61))
    assert refusal.value.param == "messages"
    assert read({"prompt": "a " * 60}).prompt_tokens == 60
    assert read({"prompt": "a " * 61, "truncate_prompt_tokens": 20}).prompt_tokens == 60


def test_prompt_and_answer_over_the_limit_never_fit() -> None:
    with pytest.raises(
        NeverFits, match=r"50 tokens.*max_tokens is 51.*101.*limit of 100.*at most 50"
    ) as refusal:
        read({"prompt": "a " * 50, "max_tokens": 51})
    assert refusal.value.param == "max_tokens"
    assert read({"prompt": "a " * 50, "max_tokens": 50}).max_tokens == 50


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"prompt": None},
        {"prompt": 7, "max_tokens": "many"},
        {"prompt": [], "n": True},
        {"prompt": [{"x": 1}], "max_tokens": -5},
        {"messages": "hello"},
        {"messages": [1, None, {"content": {"a": 1}}]},
        {"messages": [{"content": [[[[["deep"]]]]]}]},
    ],
)
def test_fields_of_a_wrong_type_are_the_engines_to_refuse(document: dict[str, Any]) -> None:
    assert read(document).max_tokens >= 1


def test_keys_priorities_and_timeouts_come_from_headers() -> None:
    plain = read({"prompt": "a"})
    assert (plain.key, plain.priority, plain.timeout_s) == (ANONYMOUS, 1, None)
    secret = "sk-secret"
    given = read(
        {"prompt": "a"},
        {"Authorization": f"Bearer {secret}", "X-Priority": "High", "x-request-timeout": "2.5"},
    )
    assert given.key == hashlib.sha256(secret.encode()).hexdigest()[:16]
    assert (given.priority, given.timeout_s) == (0, 2.5)
    assert read({"prompt": "a"}, {"x-api-key": secret}).key == given.key
    for nonsense in ("nan", "-1", "inf", "soon", ""):
        assert read({"prompt": "a"}, {"x-request-timeout": nonsense, "x-priority": "vip"}).timeout_s is None


def test_high_priority_may_be_kept_for_some_keys() -> None:
    listed = (hashlib.sha256(b"boss").hexdigest(),)
    for key, rank in (("boss", 0), ("other", 1)):
        headers = {"authorization": f"bearer {key}", "x-priority": "high"}
        assert read({"prompt": "a"}, headers, high_keys=listed).priority == rank
    assert read({"prompt": "a"}, {"x-priority": "low"}, high_keys=listed).priority == 2
