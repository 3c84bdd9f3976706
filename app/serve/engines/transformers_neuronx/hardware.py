"""Load a compiled model onto this replica's NeuronCores. Not yet run on hardware.

Loads and never compiles: the library compares each graph's digest with the saved ones and refuses when one
has no match. The claim has set NEURON_RT_VISIBLE_CORES before.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from app.compile.transformers_neuronx import CompileError, TnxOptions, build_model, read_options
from app.serve.engines.transformers_neuronx.contract import Geometry
from app.serve.settings import ReplicaSettings


class ArtifactMismatch(Exception):
    """The compiled model is not what the replica is to serve; each difference is named."""


def load_neuron_model(settings: ReplicaSettings) -> tuple[Any, Geometry]:
    """The model on its cores, behind the contract, and what it was compiled for.

    Raises:
        ArtifactMismatch: no compiled model, one made for other settings, or graphs that do not match the
        library.
    """
    if settings.compiled_dir is None:
        raise ArtifactMismatch(
            f"{settings.model_dir} comes with no compiled model, and a serving host compiles none; publish "
            "an artifact made with 'neuronfleet compile' for this profile"
        )
    try:
        options = read_options(settings.compiled_dir)
    except CompileError as error:
        raise ArtifactMismatch(str(error)) from error
    if differences := option_differences(options, settings):
        raise ArtifactMismatch(f"{settings.compiled_dir}: " + "; ".join(differences))
    model = build_model(options, settings.model_dir)
    model.load(str(settings.compiled_dir))  # before to_neuron, or it would compile
    try:
        model.to_neuron()
    except FileNotFoundError as error:
        raise ArtifactMismatch(
            f"{settings.compiled_dir} holds no graph for what the library builds now ({error}); it was "
            "compiled with another version or another model: compile it with this image"
        ) from error
    return model, geometry_of(options, settings.model_dir)


def option_differences(options: TnxOptions, settings: ReplicaSettings) -> list[str]:
    """Where a compiled model differs from what the replica is to serve: field, wanted, found."""
    pairs = (
        ("tp_degree", settings.tp_degree, options.tp_degree),
        ("batch_size", settings.batch_size, options.slots),
        ("max_model_len", settings.max_model_len, options.n_positions[-1]),
        ("dtype", settings.dtype, options.weights_dtype),
    )
    return [
        f"{name}: wanted {wanted}, compiled for {found}" for name, wanted, found in pairs if wanted != found
    ]


def geometry_of(options: TnxOptions, model_dir: Path) -> Geometry:
    """The scheduler's view of compiled options."""
    config = json.loads((model_dir / "config.json").read_text())
    return Geometry(
        slots=options.slots,
        token_buckets=options.n_positions,
        context_buckets=options.context_length_estimate,
        vocabulary=int(config["vocab_size"]),
        chunk_sizes=options.chunk_sizes,
    )
