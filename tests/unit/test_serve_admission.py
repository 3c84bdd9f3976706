"""A replica's bound: its batch and queue, freed however a request ends."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from app.serve.admission import Admission, Overloaded


def test_a_place_is_freed_however_the_request_ends() -> None:
    admission = Admission(batch_size=1, queue_limit=0)
    with pytest.raises(RuntimeError, match="engine"), admission.admit():
        raise RuntimeError("engine")
    with admission.admit():
        assert admission.active == 1
    assert admission.active == 0


@pytest.mark.parametrize(("queued", "seconds"), [(0, 1), (6, 3), (1000, 30)])
def test_the_next_one_is_told_when_to_come_back(queued: int, seconds: int) -> None:
    admission = Admission(batch_size=2, queue_limit=queued)
    with ExitStack() as held:
        for _ in range(2 + queued):
            held.enter_context(admission.admit())
        with pytest.raises(Overloaded) as caught, admission.admit():
            pytest.fail("admitted beyond the bound")
        assert caught.value.retry_after_s == seconds
        assert f"queue {queued}" in str(caught.value)
    with admission.admit():
        assert admission.active == 1
