"""The emulated engine with an accelerator's static graphs: a prefill runs alone, and every stream waits.

Which step comes next is decided by the scheduler of the transformers-neuronx engine with its stall policy,
and how long a step takes by the plan's model of a replica on Inf2 (predicted; not measured on hardware).
"""

from __future__ import annotations

from app.plan.engine_arguments import default_buckets
from app.plan.performance import ReplicaModel
from app.serve.engines.emulated import EmulatedRequest, FixedTiming, Scheduler, StepToken
from app.serve.engines.transformers_neuronx.contract import Geometry
from app.serve.engines.transformers_neuronx.scheduler import DecodeWork, Sequence, Work
from app.serve.engines.transformers_neuronx.scheduler import Scheduler as SlotScheduler
from app.serve.policy.costs import StepCosts
from app.serve.policy.stall import StallPolicy

_VOCABULARY = 2
"""Nothing is computed; the geometry wants a number."""


def planned_costs(replica: ReplicaModel, geometry: Geometry) -> StepCosts:
    """What the plan predicts for each graph, in milliseconds.

    The time of a chunk is taken as a prefill of its length and a decode step of one sequence together, which
    is on the high side.
    """
    one = replica.decode_step_s(geometry.context_limit, 1)
    return StepCosts(
        context={bucket: replica.prefill_s(bucket) * 1000 for bucket in geometry.context_buckets},
        decode={
            bucket: replica.decode_step_s(bucket, geometry.slots) * 1000 for bucket in geometry.token_buckets
        },
        chunk={size: (replica.prefill_s(size) + one) * 1000 for size in geometry.chunk_sizes},
    )


def planned_geometry(slots: int, max_model_len: int, buckets: tuple[int, ...] = ()) -> Geometry:
    """Context and decode graphs of the same buckets, the last of them ``max_model_len``."""
    edges = tuple(sorted({*(buckets or default_buckets(max_model_len)), max_model_len}))
    return Geometry(slots, edges, edges, _VOCABULARY)


class StaticScheduler(Scheduler):
    """Serial steps over static slots, in the terms of the emulated engine's loop.

    ``step_s`` decides on the next step and says how long it takes; ``step`` ends it.
    """

    def __init__(
        self,
        geometry: Geometry,
        costs: StepCosts,
        policy: StallPolicy,
        passage: list[int],
        eos: int | None,
        output_tokens: int,
    ) -> None:
        super().__init__(geometry.slots, FixedTiming(0.0, 0.0), passage, eos, output_tokens)
        self._costs = costs
        self._inner = SlotScheduler(geometry, costs, policy)
        self._sequences: dict[str, Sequence] = {}
        self._work: Work | None = None

    def add(self, request: EmulatedRequest) -> None:
        """Queue a request."""
        super().add(request)
        sequence = Sequence(request.request_id, (0,) * max(request.prompt_tokens, 1))
        self._sequences[request.request_id] = sequence
        self._inner.add(sequence)

    def abort(self, request_ids: list[str]) -> None:
        """Drop requests wherever they are; their slots are free at once. A step that runs is finished."""
        super().abort(request_ids)
        for request_id in request_ids:
            self._forget(request_id)

    def step_s(self) -> float:
        """How long the next step takes; it is decided on here."""
        if self._work is None:
            self._work = self._inner.next_work()
            self._note_slots()
        work = self._work
        if work is None:
            return 0.0
        graph = "decode" if isinstance(work, DecodeWork) else work.graph
        return self._costs.ms(graph, work.bucket) / 1000

    def step(self, now: float) -> list[StepToken]:
        """The step's tokens: one for each stream, or the first of a prompt; none of those that are gone."""
        self.step_s()
        work, self._work = self._work, None
        if work is None:
            return []
        self._inner.done(work)
        given = work.sequences if isinstance(work, DecodeWork) else (work.sequence,) * work.last
        tokens = []
        for sequence in given:
            request = self.running.get(sequence.request_id)
            if request is None or sequence.slot is None:
                continue
            sequence.generated.append(0)
            item = self._next(request)
            tokens.append(item)
            if item.finish is not None:
                del self.running[request.request_id]
                self._forget(request.request_id)
        return tokens

    def _forget(self, request_id: str) -> None:
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._inner.remove(sequence)

    def _note_slots(self) -> None:
        for request in [item for item in self.waiting if self._sequences[item.request_id].slot is not None]:
            self.waiting.remove(request)
            self.running[request.request_id] = request
