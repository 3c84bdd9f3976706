"""Text from tokens: whole characters only, and nothing of a stop string, however the stream is cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.serve.engines.transformers_neuronx.text import IncrementalDetokenizer, StopStrings


class ByteTokenizer:
    """Each token is one byte, as byte-level vocabularies have for what they have no token for."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


class RunTokenizer:
    """Byte fallback of SentencePiece vocabularies: a run of byte tokens that is no text is all replaced."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        try:
            return bytes(token_ids).decode("utf-8")
        except UnicodeDecodeError:
            return "\ufffd" * len(token_ids)


class PieceTokenizer:
    """Tokens that cut a text's bytes anywhere."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return b"".join(self.pieces[token] for token in token_ids).decode("utf-8", errors="replace")


plain_text = st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"]), max_size=40)


def streamed(tokenizer: object, prompt: Sequence[int], tokens: Sequence[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)  # type: ignore[arg-type]
    return [detokenizer.add(token) for token in tokens]


@given(prompt=plain_text, text=plain_text)
def test_bytes_come_out_as_whole_characters(prompt: str, text: str) -> None:
    pieces = streamed(ByteTokenizer(), prompt.encode(), text.encode())
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    for end in range(len(pieces)):
        assert text.startswith("".join(pieces[:end]))


@given(prompt=st.text("abc€😀", max_size=8), text=st.text("abé€😀", max_size=12))
def test_byte_fallback_runs_come_out_whole(prompt: str, text: str) -> None:
    assert "".join(streamed(RunTokenizer(), prompt.encode(), text.encode())) == text


@given(text=plain_text, cuts=st.lists(st.integers(0, 160), max_size=20))
def test_tokens_may_cut_characters_anywhere(text: str, cuts: list[int]) -> None:
    data = text.encode()
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [data[start:end] for start, end in itertools.pairwise(edges)]
    got = streamed(PieceTokenizer(pieces), [], range(len(pieces)))
    assert "".join(got) == text
    assert not any("\ufffd" in piece for piece in got)


def test_a_character_cut_off_by_the_end_is_dropped() -> None:
    assert streamed(ByteTokenizer(), [], "a😀".encode()[:-1]) == ["a", "", "", ""]


def test_bytes_that_are_no_text_do_not_hold_the_stream_back_for_ever() -> None:
    pieces = streamed(ByteTokenizer(), [], [0xFF] * 20 + list(b"ok"))
    assert "".join(pieces).endswith("ok")
    assert sum(map(bool, pieces[:20])) >= 16


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=10),
)
def test_stop_strings_do_not_depend_on_the_cuts(text: str, stops: list[str], cuts: list[int]) -> None:
    whole = StopStrings(stops)
    wanted = whole.add(text)
    wanted_text = wanted.text if wanted.stop else wanted.text + whole.flush()

    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    checker = StopStrings(stops)
    got, stop = "", None
    for start, end in itertools.pairwise(edges):
        passed = checker.add(text[start:end])
        got += passed.text
        assert not any(item in got for item in stops)
        if (stop := passed.stop) is not None:
            break
    got += "" if stop else checker.flush()
    assert (got, stop) == (wanted_text, wanted.stop)
    if stop is None:
        assert got == text
    else:
        assert text.startswith(got + stop)


@pytest.mark.parametrize(
    ("pieces", "sent", "stop"),
    [
        (["Hello ", "wor", "ld", "!"], ["Hello ", "", ""], "world"),
        (["wo", "man"], ["", "woman"], None),
        (["\n", "\n", "x"], ["", ""], "\n\n"),
    ],
)
def test_a_possible_stop_string_is_held_back_and_no_longer(
    pieces: list[str], sent: list[str], stop: str | None
) -> None:
    checker = StopStrings(["world", "\n\n"])
    got = []
    for piece in pieces:
        passed = checker.add(piece)
        got.append(passed.text)
        if passed.stop:
            break
    assert got == sent
    assert passed.stop == stop
