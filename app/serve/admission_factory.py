"""Admission for a replica's settings: whose times predict, how prompts are counted."""

from __future__ import annotations

import os
from collections.abc import Mapping

from app.plan.catalogue import UnknownNameError, get_instance
from app.plan.engine_arguments import default_buckets
from app.plan.models import ModelError, load_model
from app.plan.performance import ReplicaModel, shipped_constants
from app.plan.profiles import get_profile
from app.plan.sharding import shard
from app.serve.admission_queue import Admission
from app.serve.admission_request import Reader, token_counter
from app.serve.policy.predict import FixedTimes, LengthHistory, PlanTimes, Predictor, StepTimes
from app.serve.settings import ReplicaSettings

INSTANCE_VARIABLE = "NEURONFLEET_INSTANCE_TYPE"
_SMALLEST = "inf2.xlarge"


def replica_model(settings: ReplicaSettings, model: str, instance: str) -> ReplicaModel:
    """The plan's model of a replica.

    Raises:
        app.plan.models.ModelError: a model that the plan does not know.
        app.plan.catalogue.UnknownNameError: an instance type that it does not know.
    """
    buckets = settings.buckets or default_buckets(settings.max_model_len)
    return ReplicaModel(
        sharding=shard(load_model(model), settings.tp_degree, settings.dtype),
        instance=get_instance(instance),
        max_model_len=settings.max_model_len,
        constants=shipped_constants(),
        context_buckets=tuple(buckets),
        token_buckets=tuple(buckets),
    )


def step_times(settings: ReplicaSettings, environment: Mapping[str, str] | None = None) -> StepTimes:
    """What predicts this replica's steps: the plan's model on this host's instance type.

    On hosts without NeuronCores the plan still weighs requests against each other; how fast the queue drains
    is measured. An emulated engine is predicted by the times that it was given.
    """
    environment = os.environ if environment is None else environment
    emulated = get_profile(settings.profile).engine == "emulated"
    fixed = FixedTimes(settings.emulated_ttft_ms / 1000, settings.emulated_itl_ms / 1000, settings.batch_size)
    if emulated and settings.emulated_plan_model is None:
        return fixed
    model = settings.emulated_plan_model if emulated else str(settings.model_dir)
    instance = settings.emulated_plan_instance if emulated else environment.get(INSTANCE_VARIABLE, _SMALLEST)
    try:
        replica = replica_model(settings, str(model), instance)
    except (ModelError, UnknownNameError):
        return fixed
    return PlanTimes(replica.prefill_s, replica.decode_step_s, settings.batch_size)


def make_admission(settings: ReplicaSettings) -> Admission:
    """The replica's queue, with what reads requests for it."""
    history = LengthHistory(settings.expected_output_tokens)
    reader = Reader(
        settings.max_model_len,
        max(settings.buckets, default=settings.max_model_len),
        token_counter(settings.model_dir),
        settings.priority_keys,
    )
    return Admission(settings.batch_size, settings, Predictor(step_times(settings), history), reader=reader)
