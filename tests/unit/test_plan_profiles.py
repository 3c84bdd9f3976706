"""Engine profiles: what each supports, and what it says of what it does not."""

from __future__ import annotations

import pytest

from app.plan.catalogue import UnknownNameError
from app.plan.profiles import DEFAULT_PROFILE, PROFILES, EngineProfile, get_profile


def messages(profile: str, **wanted) -> tuple[list[str], list[str]]:
    """Messages that refuse, and that only inform."""
    asked = {"model": "meta-llama/Llama-3.1-8B", "family": "llama", "tp_degree": 8, "batch_size": 4, **wanted}
    found = get_profile(profile).findings(**asked)
    return [f.message for f in found if f.refuses], [f.message for f in found if not f.refuses]


def test_default_is_the_last_set_documented_for_inf2() -> None:
    profile = get_profile(DEFAULT_PROFILE)
    assert profile.versions["sdk"] == "2.28.1"
    assert (profile.versions["vllm"], profile.versions["plugin"]) == ("0.13.0", "0.4.1")
    assert profile.python == "3.12"
    assert profile.ami_ssm_parameter == (
        "/aws/service/neuron/dlami/pytorch-inference-vllm-0.13/ubuntu-24.04/latest/image_id"
    )


def test_unknown_profile_lists_those_that_exist() -> None:
    with pytest.raises(UnknownNameError) as caught:
        get_profile("vllm-neuron-2.32")
    assert all(name in str(caught.value) for name in PROFILES)


@pytest.mark.parametrize("profile", PROFILES.values(), ids=list(PROFILES))
def test_profiles_are_whole(profile: EngineProfile) -> None:
    assert PROFILES[profile.name] is profile
    assert profile.venv.startswith("/opt/aws_neuronx_venv")
    assert profile.families
    assert profile.tp_degrees == (1, 2, 4, 8, 24)
    if profile.capabilities.neuron:
        assert {"sdk", "neuronx-cc", "torch"} <= set(profile.versions)
        assert profile.ami_ssm_prefix is not None
    else:
        assert profile.ami_ssm_prefix is None
        assert "sdk" not in profile.versions


def test_a_supported_configuration_has_nothing_said_of_it() -> None:
    assert messages("vllm-neuron-2.28") == ([], [])


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"model": "mistralai/Mistral-7B-v0.3", "family": "mistral"}, "transformers-neuronx-2.25"),
        ({"tp_degree": 12}, "12 is not one of 1, 2, 4, 8, 24"),
        ({"model": "Qwen/Qwen3-8B", "family": "qwen3"}, "aws-neuron-sdk#1303"),
        ({"model": "/models/qwen2.5-14b-instruct/", "family": "qwen2"}, "aws-neuron-sdk#1303"),
        ({"model": "meta-llama/Llama-3.2-1B-Instruct"}, "helix#2724"),
        ({"batch_size": 1, "prefix_caching": True}, "wrong output at batch size 1"),
    ],
)
def test_what_vllm_neuron_refuses(wanted: dict, said: str) -> None:
    refused, _ = messages("vllm-neuron-2.28", **wanted)
    assert len(refused) == 1
    assert said in refused[0]


def test_a_failure_seen_elsewhere_informs_and_does_not_refuse() -> None:
    refused, informed = messages("vllm-neuron-2.28", tp_degree=4)
    assert refused == []
    assert "#1123" in informed[0]


def test_prefix_caching_at_a_larger_batch_is_supported() -> None:
    assert messages("vllm-neuron-2.28", batch_size=2, prefix_caching=True) == ([], [])
    assert "prefix caching" in messages("transformers-neuronx-2.25", prefix_caching=True)[0][0]


def test_int8_is_refused_where_there_is_none() -> None:
    assert "int8" in messages("cpu", weights_dtype="int8")[0][0]


@pytest.mark.parametrize(
    ("ami", "pinned", "said"),
    [
        ("ami-0123456789abcdef0", True, []),
        ("/aws/service/neuron/dlami/pytorch-inference-vllm-0.13/ubuntu-24.04/latest/image_id", False, []),
        ("/aws/service/neuron/dlami/pytorch-inference-vllm-0.13/ubuntu-24.04", True, ["is no pin"]),
        (
            "/aws/service/neuron/dlami/multi-framework/ubuntu-24.04/latest/image_id",
            True,
            ["use /aws/service/neuron/dlami/pytorch-inference-vllm-0.13", "is no pin"],
        ),
        ("ubuntu", False, ["neither an AMI id nor an SSM parameter"]),
        ("ami-xyz", False, ["neither an AMI id"]),
    ],
)
def test_ami_choice(ami: str, pinned: bool, said: list[str]) -> None:
    problems = get_profile("vllm-neuron-2.28").ami_problems(ami, pinned=pinned)
    assert len(problems) == len(said)
    for problem, text in zip(problems, said, strict=True):
        assert text in problem


def test_versions_that_differ_are_named() -> None:
    profile = get_profile("vllm-neuron-2.28")
    assert profile.version_problems(profile.versions) == ()
    assert profile.version_problems({"sdk": "2.29.1", "vllm": "0.13.0", "unknown": "1"}) == (
        "sdk 2.29.1 is not the 2.28.1 of profile vllm-neuron-2.28",
    )
