"""Does it fit: geometry, documented degree and memory of a model on an instance size.

``fits`` is what the hardware and the documented degrees allow; what an engine profile makes of it is a
warning (``app.plan.planner`` adds those). Reserves are estimates: no source gives them, field reports bound
them (transformers-neuronx#49 and #92 ran out of a core's memory through DMA rings and graphs beside the
tensors).
"""

from __future__ import annotations

from dataclasses import dataclass

from app.plan.catalogue import DOCUMENTED_TP_DEGREES, GIB, InstanceType
from app.plan.models import ModelConfig
from app.plan.sharding import Sharding, WeightsDtype, shard

# Runtime, collectives and notification buffers of one core; and DMA rings and instructions beside its
# tensors.
_RUNTIME_BYTES = 1 * GIB
_RING_FRACTION = 0.10
# Beyond this share of a core's memory the estimate of the reserve decides: said as a warning.
_THIN = 0.85
# Prefill attention is tiled beyond this many positions, so scores are never held for all pairs.
_SCORE_TILE = 4096
# Host memory for the system, Ray and the serving processes; and a load's peak over the checkpoint it reads.
_HOST_BASE_BYTES = 4 * GIB
_HOST_LOAD_FACTOR = 1.2
# Root volume: the image (the vendor says only that environments fill most of it) and compiled graphs.
_IMAGE_BYTES = 100 * GIB
_GRAPH_BYTES = 2 * GIB
# Throughput of a gp3 volume at its maximum, bytes/s.
_GP3_BYTES_PER_S = 1e9
_BF16 = 2


@dataclass(frozen=True)
class Shape:
    """What is to be served on one replica; lengths in tokens."""

    tp_degree: int
    batch_size: int
    max_model_len: int
    weights_dtype: WeightsDtype = "bf16"


@dataclass(frozen=True)
class Fit:
    """The answer. Bytes; ``reasons`` is empty exactly when it fits.

    ``host_bytes`` is the host memory that loading takes, ``root_volume_bytes`` the disk; loading a host's
    replicas from the network, and from its volume, takes ``network_load_s`` and ``volume_load_s``.
    """

    sharding: Sharding
    instance: InstanceType
    shape: Shape
    weights_bytes_per_core: int
    kv_cache_bytes_per_core: int
    activation_bytes_per_core: int
    reserve_bytes_per_core: int
    replicas_per_instance: int
    idle_cores: int
    host_bytes: int
    root_volume_bytes: int
    network_load_s: float
    volume_load_s: float
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.reasons

    @property
    def checkpoint_bytes(self) -> int:
        """The checkpoint in the dtype that is served."""
        return _checkpoint_bytes(self.sharding.model, self.shape)

    @property
    def bytes_per_core(self) -> int:
        """Everything on one core."""
        return (
            self.weights_bytes_per_core
            + self.kv_cache_bytes_per_core
            + self.activation_bytes_per_core
            + self.reserve_bytes_per_core
        )


def fit(model: ModelConfig, instance: InstanceType, shape: Shape) -> Fit:
    """Fit ``model`` on ``instance`` in ``shape`` (all sizes at least 1)."""
    sharding = shard(model, shape.tp_degree, shape.weights_dtype)
    weights = sharding.weights_bytes_per_core
    kv = sharding.kv_bytes_per_core(shape.batch_size * shape.max_model_len)
    replicas = instance.cores // shape.tp_degree
    checkpoint = _checkpoint_bytes(model, shape)
    result = Fit(
        sharding=sharding,
        instance=instance,
        shape=shape,
        weights_bytes_per_core=weights,
        kv_cache_bytes_per_core=kv,
        activation_bytes_per_core=_activation_bytes(sharding, shape),
        reserve_bytes_per_core=_RUNTIME_BYTES + int(_RING_FRACTION * (weights + kv)),
        replicas_per_instance=replicas,
        idle_cores=instance.cores - replicas * shape.tp_degree,
        host_bytes=_HOST_BASE_BYTES + int(_HOST_LOAD_FACTOR * checkpoint) * max(replicas, 1),
        root_volume_bytes=_IMAGE_BYTES + _GRAPH_BYTES + 2 * checkpoint,
        network_load_s=checkpoint * 8 / (instance.network_gbps * 1e9),
        volume_load_s=checkpoint / min(instance.ebs_gbps * 1e9 / 8, _GP3_BYTES_PER_S),
        reasons=(),
        warnings=(),
    )
    return Fit(**{**result.__dict__, "reasons": _reasons(result), "warnings": _warnings(result)})


def _checkpoint_bytes(model: ModelConfig, shape: Shape) -> int:
    return model.checkpoint_bytes // (2 if shape.weights_dtype == "int8" else 1)


def _activation_bytes(sharding: Sharding, shape: Shape) -> int:
    """Working memory of one core while it prefills one prompt of full length, and the logits of a step."""
    model, length, tp = sharding.model, shape.max_model_len, shape.tp_degree
    hidden = 4 * length * model.hidden_size * _BF16
    mlp = 2 * length * sharding.intermediate_size // tp * _BF16
    scores = sharding.heads // tp * length * min(length, _SCORE_TILE) * _BF16
    logits = shape.batch_size * sharding.vocab_size // tp * 4
    return hidden + max(mlp, scores) + logits


def _reasons(fit: Fit) -> tuple[str, ...]:
    model, instance, shape = fit.sharding.model, fit.instance, fit.shape
    found = []
    if shape.tp_degree not in DOCUMENTED_TP_DEGREES:
        degrees = ", ".join(str(degree) for degree in DOCUMENTED_TP_DEGREES)
        found.append(
            f"tensor parallel degree {shape.tp_degree} is not documented for Inf2 (documented: {degrees})"
            + _padding_note(fit.sharding)
        )
    if shape.tp_degree > instance.cores:
        found.append(
            f"tensor parallel degree {shape.tp_degree} needs {shape.tp_degree} NeuronCores, "
            f"{instance.name} has {instance.cores}"
        )
    if fit.bytes_per_core > instance.hbm_bytes_per_core:
        found.append(
            f"a core needs {_gib(fit.bytes_per_core)} of its {_gib(instance.hbm_bytes_per_core)} GiB: "
            f"weights {_gib(fit.weights_bytes_per_core)}, KV cache {_gib(fit.kv_cache_bytes_per_core)} "
            f"({shape.batch_size} x {shape.max_model_len} tokens), "
            f"activations {_gib(fit.activation_bytes_per_core)}, "
            f"runtime reserve {_gib(fit.reserve_bytes_per_core)}"
        )
    if model.max_positions is not None and shape.max_model_len > model.max_positions:
        found.append(
            f"a model length of {shape.max_model_len} is more than the {model.max_positions} positions "
            f"of {model.name}"
        )
    return tuple(found)


def _warnings(fit: Fit) -> tuple[str, ...]:
    instance, shape = fit.instance, fit.shape
    found = []
    if fit.host_bytes > instance.memory_bytes:
        found.append(
            f"{instance.name} has {_gib(instance.memory_bytes)} GiB of host memory; loading "
            f"{fit.sharding.model.name} in {shape.weights_dtype} takes about {_gib(fit.host_bytes)} GiB "
            f"and would be killed: choose a larger size, or int8"
        )
    share = fit.bytes_per_core / instance.hbm_bytes_per_core
    if _THIN < share <= 1:
        found.append(
            f"{share:.0%} of a core's memory is taken; the runtime reserve in it is an estimate, so try it "
            f"before relying on it"
        )
    if fit.sharding.kv_replication > 1 and shape.tp_degree <= instance.cores:
        found.append(
            f"at degree {shape.tp_degree} each KV head is held {fit.sharding.kv_replication:.3g} times "
            f"({fit.sharding.model.kv_heads} become {fit.sharding.kv_heads})"
        )
    if fit.replicas_per_instance and fit.idle_cores:
        found.append(f"{fit.idle_cores} of {instance.cores} cores stay idle at degree {shape.tp_degree}")
    return tuple(found)


def _padding_note(sharding: Sharding) -> str:
    model = sharding.model
    if sharding.heads == model.heads and sharding.kv_heads == model.kv_heads:
        return ""
    return (
        f"; it would make {model.heads} query heads {sharding.heads} and {model.kv_heads} KV heads "
        f"{sharding.kv_heads}"
    )


def _gib(value: int) -> str:
    return f"{value / GIB:.2f}"
