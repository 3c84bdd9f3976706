"""Which step the device does next: slots, admission, prefill between decode steps.

Pure: no clock, no model, no threads. The engine core asks for work, does it, and says so.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from app.serve.engines.transformers_neuronx.contract import Geometry, bucket_for
from app.serve.engines.transformers_neuronx.runner import DecodeEntry
from app.serve.policy.costs import StepCosts
from app.serve.policy.stall import Gap, StallPolicy


@dataclass(eq=False)
class Sequence:
    """One request's tokens and where they stand in the cache.

    ``cached`` counts the positions that hold this sequence's keys and values; ``slot`` is None while it
    waits.
    """

    request_id: str
    prompt: tuple[int, ...]
    generated: list[int] = field(default_factory=list)
    slot: int | None = None
    cached: int = 0
    overtaken: int = 0

    @property
    def length(self) -> int:
        """Prompt and answer, in tokens."""
        return len(self.prompt) + len(self.generated)


@dataclass(frozen=True)
class PrefillWork:
    """One prefill unit. ``start`` to ``start + count`` are the prompt's tokens it writes; ``last``: a token
    comes of it."""

    sequence: Sequence
    graph: Literal["context", "chunk"]
    bucket: int
    start: int
    count: int
    last: bool


@dataclass(frozen=True)
class DecodeWork:
    """One decode step: ``entries`` in the order of ``sequences``, then those of ``held`` slots, whose logits
    mean nothing: half prefilled sequences that would lose their position 0 if they were left out."""

    sequences: tuple[Sequence, ...]
    entries: tuple[DecodeEntry, ...]
    held: tuple[DecodeEntry, ...]
    bucket: int


Work = PrefillWork | DecodeWork


class Scheduler:
    """Static slots, first come first served within the policy's bounds."""

    def __init__(self, geometry: Geometry, costs: StepCosts, policy: StallPolicy) -> None:
        self.geometry = geometry
        self.costs = costs
        self.policy = policy
        self._gap = Gap(policy)
        self._free = list(range(geometry.slots - 1, -1, -1))
        self._waiting: collections.deque[Sequence] = collections.deque()
        self._partial: Sequence | None = None
        self._running: dict[int, Sequence] = {}

    @property
    def waiting(self) -> int:
        """Sequences without a slot."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Sequences with a slot."""
        return self.geometry.slots - len(self._free)

    @property
    def streams(self) -> int:
        """Sequences that are past their prefill: those that a prefill makes wait."""
        return len(self._running)

    @property
    def idle(self) -> bool:
        """Nothing waits or runs."""
        return not self._waiting and self.running == 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Its prompt must be one that the geometry takes."""
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is: finished, failed or cancelled. Its slot is free at once."""
        if sequence.slot is None:
            self._waiting.remove(sequence)
            return
        self._running.pop(sequence.slot, None)
        if self._partial is sequence:
            self._partial = None
        self._free.append(sequence.slot)
        sequence.slot = None
        if not self._running:
            self._gap.idle()

    def next_work(self) -> Work | None:
        """The next step, or None when there is nothing to do. Gives slots to those it admits."""
        self._join_single_token_prompts()
        unit = self._next_unit()
        if unit is not None and (not self._running or self._gap.allows(self._cost(unit), self._budget())):
            self._admit(unit)
            return unit
        return self._decode() if self._running else None

    def done(self, work: Work) -> None:
        """A step was done: positions are cached, and the gap's account is kept."""
        if isinstance(work, DecodeWork):
            for sequence in work.sequences:
                sequence.cached += 1
            unit = self._next_unit()
            self._gap.decoded(self._budget(), 0.0 if unit is None else self._cost(unit))
            return
        sequence = work.sequence
        sequence.cached = work.start + work.count
        if self._running:
            self._gap.prefilled(self._cost(work))
        if work.last and sequence.slot is not None:
            if self._partial is sequence:
                self._partial = None
            self._running[sequence.slot] = sequence

    def _join_single_token_prompts(self) -> None:
        """A prompt of one token needs no prefill: with a slot, it is in the next decode step."""
        while self._waiting and self._free and len(self._waiting[0].prompt) == 1:
            sequence = self._waiting.popleft()
            sequence.slot = self._free.pop()
            self._running[sequence.slot] = sequence

    def _admit(self, unit: PrefillWork) -> None:
        sequence = unit.sequence
        if sequence.slot is not None:
            return
        for earlier in self._earlier(sequence):
            earlier.overtaken += 1
        self._waiting.remove(sequence)
        sequence.slot = self._free.pop()
        if not unit.last:
            self._partial = sequence

    def _earlier(self, sequence: Sequence) -> Iterator[Sequence]:
        """Those before ``sequence``: the half prefilled one, then the queue's."""
        if self._partial is not None:
            yield self._partial
        yield from itertools.takewhile(lambda item: item is not sequence, self._waiting)

    def _next_unit(self) -> PrefillWork | None:
        """The unit to prefill next: the first in line's, unless another may overtake it."""
        first = self._partial
        if first is None and self._free and self._waiting:
            first = self._waiting[0]
        if first is None:
            return None
        unit = self._unit(first)
        if not self._running or not self.policy.bounded:
            return unit
        if self._gap.allows(self._cost(unit), self._budget()) and not self._grows_decode(first):
            return unit
        return self._overtaker(first) or unit

    def _overtaker(self, first: Sequence) -> PrefillWork | None:
        """A later prompt that fits the gap as a whole, while the first does not or would slow decode down.

        The first in line is overtaken a bounded number of times and keeps a slot for itself.
        """
        if first.overtaken >= self.policy.max_overtakes or len(self._free) < (
            1 if first.slot is not None else 2
        ):
            return None
        budget = self._budget()
        for sequence in itertools.islice(self._waiting, self.policy.lookahead):
            if sequence is first or not self._whole(sequence) or self._grows_decode(sequence):
                continue
            if sequence.overtaken >= self.policy.max_overtakes:
                return None  # it is next in line for its own turn: nobody behind it goes before it
            unit = self._unit(sequence)
            if unit.last and self._gap.allows(self._cost(unit), budget):
                return unit
        return None

    def _whole(self, sequence: Sequence) -> bool:
        """Whether the prompt is prefilled by one unit, as things stand."""
        return len(sequence.prompt) > 1 and self._unit(sequence).last

    def _grows_decode(self, sequence: Sequence) -> bool:
        """Whether admitting it moves every running stream to a larger, slower decode bucket, over the
        promise."""
        if not self._running or sequence.slot is not None or self.policy.tpot_slo_ms is None:
            return False
        bucket = bucket_for(self.geometry.token_buckets, len(sequence.prompt) + 1)
        return bucket > self._decode_bucket() and self.costs.ms("decode", bucket) > self.policy.tpot_slo_ms

    def _unit(self, sequence: Sequence) -> PrefillWork:
        """The unit that gets furthest within the budget, or else the cheapest one."""
        limit = self._budget() if self._running else float("inf")
        units = list(self._units(sequence))
        within = [unit for unit in units if self._cost(unit) <= limit]
        if within:
            return max(within, key=lambda unit: (unit.start + unit.count, -self._cost(unit)))
        return min(units, key=lambda unit: (self._cost(unit), -unit.start - unit.count))

    def _units(self, sequence: Sequence) -> Iterator[PrefillWork]:
        prompt = len(sequence.prompt)
        if sequence.cached == 0:
            for bucket in self.geometry.context_buckets:
                if bucket >= prompt:
                    yield PrefillWork(sequence, "context", bucket, 0, prompt, last=True)
                    return
                if self.geometry.chunk_sizes:
                    yield PrefillWork(sequence, "context", bucket, 0, bucket, last=False)
            return
        for size in self.geometry.chunk_sizes:
            # Moved back to end with the prompt rather than padded (see the contract).
            start = min(sequence.cached, prompt - size)
            yield PrefillWork(sequence, "chunk", size, start, size, last=start + size == prompt)

    def _cost(self, unit: PrefillWork) -> float:
        return self.costs.ms(unit.graph, unit.bucket)

    def _budget(self) -> float:
        if not self._running:
            return float("inf")
        return self.policy.budget_ms(self.costs.ms("decode", self._decode_bucket()))

    def _decode_bucket(self) -> int:
        lengths = [sequence.length for sequence in self._running.values()]
        if self._partial is not None:
            lengths.append(self._partial.cached + 1)
        return bucket_for(self.geometry.token_buckets, max(lengths))

    def _decode(self) -> DecodeWork:
        sequences = tuple(self._running.values())
        entries = tuple(
            (slot, (sequence.generated or sequence.prompt)[-1], sequence.cached)
            for slot, sequence in self._running.items()
        )
        held: tuple[DecodeEntry, ...] = ()
        if self._partial is not None and self._partial.slot is not None:
            held = ((self._partial.slot, 0, self._partial.cached),)
        return DecodeWork(sequences, entries, held, self._decode_bucket())
