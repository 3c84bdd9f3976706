"""TTFT, TPOT and throughput of one replica, from first principles and a few fitted constants.

A decode step streams the weights once and, for every sequence, the KV cache up to the bucket in use; it
pays two all-reduces a layer, the write of one KV line a sequence, and a fixed overhead::

    step = (weights + lm_head) / (HBM bandwidth x hbm_efficiency)
         + layers x 2 x collective latency
         + layers x query heads a core x bucket
           x (attention_position + batch x attention_position_sequence x head size / 128)
         + layers x KV heads a core x batch x kv_write
         + step_overhead

Prefill of ``batch`` prompts, each padded to its bucket::

    prefill = FLOPs / (peak x tensor_efficiency) + layers x 2 x all-reduced bytes / collective_bandwidth
            + layers x query heads a core x batch x bucket² x attention_square
            + layers x KV heads a core x batch x bucket x kv_write_prefill
            + layers x prefill_layer_overhead + prefill_overhead

The constants were fitted by ``app.plan.calibrate`` on published rows, all of TP 24 on inf2.48xlarge with
transformers-neuronx on SDK 2.18. Everything else is extrapolation and says so. Nobody has published a
measurement of NxD Inference with vLLM on Inf2. No numpy here: the emulated engine paces its tokens by this
module on hosts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from app.plan.catalogue import InstanceType
from app.plan.engine_arguments import default_buckets
from app.plan.sharding import Sharding

# Constants whose logarithm was fitted, in the order of the covariance's rows.
CONSTANT_NAMES = (
    "hbm_efficiency",
    "int8_bytes",
    "collective_latency_s",
    "attention_position_s",
    "attention_position_sequence_s",
    "kv_write_s",
    "step_overhead_s",
    "mean_over_median",
    "tensor_efficiency",
    "collective_bandwidth",
    "attention_square_s",
    "kv_write_prefill_s",
    "prefill_layer_overhead_s",
    "prefill_overhead_s",
)
FITTED_TP_DEGREE = 24
# Every measured model has heads of this size; a sequence's K and V, and the time to read them, follow it.
FITTED_HEAD_DIM = 128
# Two-sided 80 % interval of a normal distribution.
_Z80 = 1.2816
_BF16 = 2


@dataclass(frozen=True)
class Constants:
    """Fitted constants, and what the fit knows of their error.

    ``values`` by name, in seconds, bytes/s or ratios; ``covariance`` of their logarithms; ``noise`` the
    standard deviation of the logarithm of measured over predicted, by quantity, from leaving one model out.
    ``domain`` are the least and greatest values seen in the rows, by feature.
    """

    values: Mapping[str, float]
    covariance: Sequence[Sequence[float]]
    noise: Mapping[str, float]
    domain: Mapping[str, tuple[float, float]]

    def __getitem__(self, name: str) -> float:
        return self.values[name]


@dataclass(frozen=True)
class Estimate:
    """A predicted value and the range that it lies in with 80 % probability, as far as the rows can tell."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> Estimate:
        """The estimate in another unit, or of its inverse's multiple (``factor`` > 0)."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True)
class Workload:
    """Requests of one shape, ``batch_size`` at a time; lengths in tokens."""

    input_tokens: int
    output_tokens: int
    batch_size: int


@cache
def shipped_constants() -> Constants:
    """The constants that ship with the plan (``data/performance_constants.json``)."""
    data = json.loads(resources.files("app.plan").joinpath("data/performance_constants.json").read_text())
    return Constants(
        values={name: float(data["constants"][name]["value"]) for name in CONSTANT_NAMES},
        covariance=data["log_covariance"],
        noise=data["log_noise"],
        domain={name: (float(low), float(high)) for name, (low, high) in data["domain"].items()},
    )


@dataclass(frozen=True)
class ReplicaModel:
    """The timing of one replica: a sharded model on the cores of one instance size.

    ``max_model_len`` is the longest sequence (tokens); buckets default to the engine's powers of two.
    """

    sharding: Sharding
    instance: InstanceType
    max_model_len: int
    constants: Constants
    context_buckets: tuple[int, ...] = ()
    token_buckets: tuple[int, ...] = ()

    def decode_step_s(self, position: int, batch_size: int) -> float:
        """Seconds of one decode step of ``batch_size`` sequences, the longest at ``position``."""
        return self._step_s(bucket_for(position, self._token_edges), batch_size)

    def prefill_s(self, prompt_tokens: int, batch_size: int = 1) -> float:
        """Seconds to prefill ``batch_size`` prompts of ``prompt_tokens`` together."""
        c, shard, model = self.constants, self.sharding, self.sharding.model
        bucket = bucket_for(prompt_tokens, self._context_edges)
        tokens, tp = batch_size * bucket, shard.tp_degree
        flops = 2 * tokens * model.layers * shard.layer_matrix_elements / tp
        seconds = flops / (self.instance.flops_per_core * c["tensor_efficiency"])
        reduced = _BF16 * tokens * model.hidden_size * 2 * (tp - 1) / tp
        seconds += model.layers * 2 * reduced / c["collective_bandwidth"]
        heads = shard.heads // tp
        seconds += model.layers * heads * tokens * bucket * c["attention_square_s"]
        seconds += model.layers * (shard.kv_heads // tp) * tokens * c["kv_write_prefill_s"]
        return seconds + model.layers * c["prefill_layer_overhead_s"] + c["prefill_overhead_s"]

    def median_step_s(self, work: Workload) -> float:
        """Median time per output token: the step at the middle of the output."""
        return self.decode_step_s(work.input_tokens + max(work.output_tokens // 2, 1), work.batch_size)

    def mean_step_s(self, work: Workload) -> float:
        """Mean time per output token: each bucket's step, weighted by the positions spent in it."""
        total, position = 0.0, work.input_tokens
        end = work.input_tokens + work.output_tokens
        for bucket in self._token_edges:
            steps = max(min(bucket, end) - position, 0)
            total += steps * self._step_s(bucket, work.batch_size)
            position += steps
        total += (end - position) * self._step_s(self._token_edges[-1], work.batch_size)
        return total / work.output_tokens * self.constants["mean_over_median"]

    def decode_tokens_per_s(self, work: Workload) -> float:
        """Output tokens a second of one replica while it decodes a full batch (the published protocol)."""
        return work.batch_size / self.mean_step_s(work)

    def served_tokens_per_s(self, work: Workload) -> float:
        """Output tokens a second of one replica under continuous batching at a full batch.

        Each request's prefill, one at a time, stalls the decode of the others, so a request's share of the
        replica is its prefill and its part of the decode steps.
        """
        per_request = self.prefill_s(work.input_tokens) + (
            work.output_tokens * self.mean_step_s(work) / work.batch_size
        )
        return work.output_tokens / per_request

    @property
    def _token_edges(self) -> tuple[int, ...]:
        return self.token_buckets or default_buckets(self.max_model_len)

    @property
    def _context_edges(self) -> tuple[int, ...]:
        return self.context_buckets or default_buckets(self.max_model_len)

    def _step_s(self, bucket: int, batch_size: int) -> float:
        c, shard, model = self.constants, self.sharding, self.sharding.model
        tp = shard.tp_degree
        width = c["int8_bytes"] if shard.weights_dtype == "int8" else _BF16
        streamed = width * model.layers * shard.layer_matrix_elements / tp + shard.lm_head_bytes_per_core
        seconds = streamed / (self.instance.hbm_bytes_per_s_per_core * c["hbm_efficiency"])
        # Only TP 24 was measured: a collective is taken to cost in proportion to the depth of a tree.
        depth = math.log2(tp) / math.log2(FITTED_TP_DEGREE)
        seconds += model.layers * 2 * c["collective_latency_s"] * depth
        read = c["attention_position_sequence_s"] * model.head_dim / FITTED_HEAD_DIM
        position = c["attention_position_s"] + batch_size * read
        seconds += model.layers * (shard.heads // tp) * bucket * position
        seconds += model.layers * (shard.kv_heads // tp) * batch_size * c["kv_write_s"]
        return seconds + c["step_overhead_s"]


def bucket_for(tokens: int, edges: Sequence[int]) -> int:
    """The smallest bucket that holds ``tokens``; the last one if none does (the engine refuses such
    requests)."""
    for edge in edges:
        if tokens <= edge:
            return edge
    return edges[-1]


def estimate(
    replica: ReplicaModel, quantity: str, of: Callable[[ReplicaModel], float], *, widen: float = 1.0
) -> Estimate:
    """The value of ``of(replica)`` with its 80 % range.

    The range joins the constants' covariance (carried through numerically) and the scatter of ``quantity``
    (``ttft``, ``tpot`` or ``throughput``) around left-out models; ``widen`` multiplies its width.
    """
    value = of(replica)
    gradient = []
    for name in CONSTANT_NAMES:
        shifted = dict(replica.constants.values)
        shifted[name] *= 1.01
        changed = Constants(
            shifted, replica.constants.covariance, replica.constants.noise, replica.constants.domain
        )
        moved = ReplicaModel(
            replica.sharding,
            replica.instance,
            replica.max_model_len,
            changed,
            replica.context_buckets,
            replica.token_buckets,
        )
        gradient.append(math.log(of(moved) / value) / math.log(1.01))
    variance = replica.constants.noise[quantity] ** 2
    for i, row in enumerate(replica.constants.covariance):
        for j, element in enumerate(row):
            variance += gradient[i] * element * gradient[j]
    factor = math.exp(_Z80 * widen * math.sqrt(variance))
    return Estimate(value, value / factor, value * factor)


def extrapolations(replica: ReplicaModel, work: Workload, *, engine: str) -> tuple[str, ...]:
    """In what respects a configuration lies outside the measured rows; empty when it lies inside."""
    found = []
    model, domain = replica.sharding.model, replica.constants.domain
    features = {
        "tensor parallel degree": ("tp_degree", float(replica.sharding.tp_degree)),
        "batch size": ("batch_size", float(work.batch_size)),
        "input tokens": ("input_tokens", float(work.input_tokens)),
        "sequence length": ("sequence", float(work.input_tokens + work.output_tokens)),
        "parameters (billions)": ("parameters_b", round(model.parameters / 1e9, 2)),
    }
    for label, (key, value) in features.items():
        low, high = domain[key]
        if not low <= value <= high:
            measured = f"{low:g}" if low == high else f"{low:g} to {high:g}"
            found.append(f"{label} {value:g} (measured: {measured})")
    if model.head_dim != FITTED_HEAD_DIM:
        found.append(f"head size {model.head_dim} (measured: {FITTED_HEAD_DIM})")
    if engine != "transformers_neuronx":
        found.append(
            "nobody has published a measurement of NxD Inference with vLLM on Inf2 "
            "(measured: transformers-neuronx on SDK 2.18)"
        )
    return tuple(found)
