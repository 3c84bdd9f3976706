"""The emulated engine's scheduler: slots, order, ends, and timing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.serve.engines.emulated import EmulatedRequest, FixedTiming, Scheduler

PASSAGE = [11, 12, 13]
EOS = 2


def scheduler(slots: int = 2, ttft_s: float = 1.0, output_tokens: int = 1000) -> Scheduler:
    return Scheduler(slots, FixedTiming(ttft_s, 0.1), PASSAGE, EOS, output_tokens)


def request(name: str, max_tokens: int = 5, **fields: object) -> EmulatedRequest:
    values = {"min_tokens": 0, "ignore_eos": False, "stop_token_ids": frozenset(), **fields}
    return EmulatedRequest(request_id=name, prompt_tokens=4, max_tokens=max_tokens, **values)  # type: ignore[arg-type]


def test_the_first_token_comes_after_prefill_and_then_one_a_step() -> None:
    engine = scheduler()
    engine.add(request("a", max_tokens=3))
    assert engine.step(10.0) == []
    first = engine.step(11.0)
    assert [(item.token, item.first, item.finish) for item in first] == [(11, True, None)]
    assert [item.token for item in engine.step(11.1)] == [12]
    last = engine.step(11.2)
    assert [(item.token, item.finish) for item in last] == [(13, "length")]
    assert engine.idle


def test_a_request_waits_for_a_slot_and_takes_it_in_order() -> None:
    engine = scheduler(slots=1, ttft_s=0)
    for name in "abc":
        engine.add(request(name, max_tokens=1))
    assert [engine.step(float(now))[0].request.request_id for now in range(3)] == ["a", "b", "c"]


def test_abort_frees_a_slot_and_drops_from_the_queue() -> None:
    engine = scheduler(slots=1, ttft_s=0)
    for name in "abc":
        engine.add(request(name))
    engine.step(0.0)
    engine.abort(["a", "b", "unknown"])
    assert [item.request.request_id for item in engine.step(1.0)] == ["c"]
    engine.abort(["c"])
    assert engine.idle


def test_an_answer_ends_itself_unless_told_not_to() -> None:
    engine = scheduler(ttft_s=0, output_tokens=2)
    engine.add(request("ends", max_tokens=9))
    engine.add(request("goes on", max_tokens=4, ignore_eos=True))
    steps = [engine.step(float(now)) for now in range(4)]
    ends = [item for step in steps for item in step if item.request.request_id == "ends"]
    assert [(item.token, item.finish) for item in ends] == [(11, None), (12, None), (EOS, "stop")]
    goes_on = [item for step in steps for item in step if item.request.request_id == "goes on"]
    assert [item.finish for item in goes_on] == [None, None, None, "length"]


def test_a_stop_token_ends_after_the_least_length() -> None:
    engine = scheduler(ttft_s=0)
    engine.add(request("a", max_tokens=9, stop_token_ids=frozenset({11}), min_tokens=2))
    finishes = [item.finish for now in range(4) for item in engine.step(float(now))]
    assert finishes == [None, None, None, "stop"]


@given(
    slots=st.integers(1, 4),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=12),
)
def test_every_request_gets_exactly_its_tokens_and_never_more_run_than_slots(
    slots: int, lengths: list[int]
) -> None:
    engine = scheduler(slots=slots, ttft_s=0)
    for index, length in enumerate(lengths):
        engine.add(request(str(index), max_tokens=length))
    given_tokens: dict[str, int] = {}
    for now in range(sum(lengths) + 1):
        assert len(engine.running) <= slots
        for item in engine.step(float(now)):
            given_tokens[item.request.request_id] = given_tokens.get(item.request.request_id, 0) + 1
    assert given_tokens == {str(index): length for index, length in enumerate(lengths)}
    assert engine.idle
