"""How a model is divided over the cores of a tensor-parallel group, with the engine's own padding.

Query heads are padded to a multiple of the degree; KV heads are kept where the degree divides them,
replicated to one a core where they divide the degree, and otherwise turned into one a query head; the MLP
and the vocabulary are padded to a multiple. These are the rules of NxD Inference (modules/attention/gqa.py)
and of transformers-neuronx with replicated heads.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from app.plan.models import ModelConfig

WeightsDtype = Literal["bf16", "int8"]

_BF16 = 2
_SCALE = 4  # one float32 scale an output channel


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class Sharding(BaseModel):
    """One model over ``tp_degree`` cores. Head counts, ``intermediate_size`` and ``vocab_size`` are totals
    after padding, so each is a multiple of the degree."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelConfig
    tp_degree: int
    weights_dtype: WeightsDtype
    heads: int
    kv_heads: int
    intermediate_size: int
    vocab_size: int

    @property
    def kv_replication(self) -> float:
        """How many times the model's own KV cache the group holds."""
        return self.kv_heads / self.model.kv_heads

    @property
    def layer_matrix_elements(self) -> int:
        """Elements of one layer's matrices, all cores together."""
        hidden, head_dim = self.model.hidden_size, self.model.head_dim
        attention = hidden * head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * hidden * self.intermediate_size

    @property
    def layer_bytes_per_core(self) -> int:
        """Bytes of the layers on one core: matrices divided, norms whole on each core."""
        model = self.model
        width = 1 if self.weights_dtype == "int8" else _BF16
        layer = width * self.layer_matrix_elements // self.tp_degree
        if self.weights_dtype == "int8":
            channels = model.head_dim * (self.heads + 2 * self.kv_heads) + 2 * self.intermediate_size
            layer += _SCALE * (channels // self.tp_degree + 2 * model.hidden_size)
        if model.qkv_bias:
            layer += _BF16 * model.head_dim * (self.heads + 2 * self.kv_heads) // self.tp_degree
        layer += _BF16 * (2 * model.hidden_size + (2 * model.head_dim if model.qk_norm else 0))
        return model.layers * layer

    @property
    def lm_head_bytes_per_core(self) -> int:
        """Bytes of the output projection on one core; bf16 with either weights dtype."""
        return _BF16 * self.model.hidden_size * self.vocab_size // self.tp_degree

    @property
    def embedding_bytes_per_core(self) -> int:
        """Bytes of the embedding on one core (its own copy, tied or not)."""
        return _BF16 * self.model.hidden_size * self.vocab_size // self.tp_degree

    @property
    def weights_bytes_per_core(self) -> int:
        """Bytes of all weights on one core."""
        final_norm = _BF16 * self.model.hidden_size
        return (
            self.layer_bytes_per_core
            + self.lm_head_bytes_per_core
            + self.embedding_bytes_per_core
            + final_norm
        )

    def kv_bytes_per_core(self, tokens: int) -> int:
        """Bytes of KV cache on one core for ``tokens`` positions (summed over sequences), bf16."""
        per_core = self.kv_heads // self.tp_degree
        return 2 * _BF16 * self.model.layers * per_core * self.model.head_dim * tokens


def shard(model: ModelConfig, tp_degree: int, weights_dtype: WeightsDtype = "bf16") -> Sharding:
    """Divide ``model`` over ``tp_degree`` cores (at least 1)."""
    heads, kv_heads = padded_heads(model.heads, model.kv_heads, tp_degree)
    return Sharding(
        model=model,
        tp_degree=tp_degree,
        weights_dtype=weights_dtype,
        heads=heads,
        kv_heads=kv_heads,
        intermediate_size=_round_up(model.intermediate_size, tp_degree),
        vocab_size=_round_up(model.vocab_size, tp_degree),
    )


def padded_heads(heads: int, kv_heads: int, tp_degree: int) -> tuple[int, int]:
    """Query and KV heads after padding and replication.

    >>> padded_heads(32, 8, 24)
    (48, 24)
    >>> padded_heads(32, 8, 12)
    (36, 36)
    """
    padded = _round_up(heads, tp_degree)
    if heads == kv_heads:
        return padded, padded
    if kv_heads % tp_degree == 0:
        return padded, kv_heads
    if tp_degree % kv_heads == 0:
        return padded, tp_degree
    return padded, padded
