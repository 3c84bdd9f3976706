"""What the compile step refuses before any work, all reasons at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.compile.compile_request import CompileRefused, check
from tests.unit.compile_model_folder import machine, model_folder, real_compiler, request


def reasons(tmp_path: Path, on: object = None, **changes: object) -> str:
    with pytest.raises(CompileRefused) as caught:
        check(request(tmp_path, **changes), on or machine())  # type: ignore[arg-type]
    assert not (tmp_path / "work").exists()
    return "\n".join(caught.value.reasons)


def test_a_good_request_names_every_graph_with_its_bucket(tmp_path: Path) -> None:
    model_folder(tmp_path / "model")
    checked = check(request(tmp_path, token_buckets=(1024, 2048)), machine())
    assert [(graph.name, graph.bucket) for graph in checked.graphs] == [
        ("context_encoding_model/_tp0_bk0", 512),
        ("context_encoding_model/_tp0_bk1", 2048),
        ("token_generation_model/_tp0_bk0", 1024),
        ("token_generation_model/_tp0_bk1", 2048),
    ]
    assert checked.emulated


def test_many_faults_are_told_at_once(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model")
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}})
    )
    (tmp_path / "out").mkdir()
    told = reasons(
        tmp_path, machine(free=1), tp_degree=3, context_buckets=(2048, 512), dtype="bf16", chunk_sizes=(128,)
    )
    for part in (
        "model-00001-of-00002.safetensors",
        "tensor parallel degree 3 is not documented",
        "context_buckets [2048, 512] must be positive, ascending",
        "must end with max_model_len 2048",
        "exists: artifacts are never written over",
        "GiB free",
        "--chunk-sizes is of profile transformers-neuronx-2.25 only",
    ):
        assert part in told, told


def test_unknown_and_gated_models_and_ids_are_no_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "unknown model 'nobody/nothing'" in reasons(tmp_path, model="nobody/nothing")
    gated = reasons(tmp_path, model="meta-llama/Meta-Llama-3-8B-Instruct")
    assert "gated model" in gated
    assert "HF_TOKEN is not set" in gated
    assert "tensor parallel degree 3 is not documented" in reasons(
        tmp_path, model="meta-llama/Meta-Llama-3-8B-Instruct", tp_degree=3
    ), "a model that is not here hides no other reason"
    known = reasons(tmp_path, model="Qwen/Qwen2.5-7B-Instruct", profile="nonsense", batch_size=0)
    assert "--batch-size 0 must be at least 1" in known
    assert "compiling downloads nothing" in known
    assert "unknown engine profile 'nonsense'" in known


def test_a_model_without_weights_or_config(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model")
    (model / "model.safetensors").unlink()
    assert "holds no weights" in reasons(tmp_path)
    (model / "config.json").write_text("{")
    assert "config.json is not JSON" in reasons(tmp_path)


def test_known_bad_combinations_and_what_does_not_fit(tmp_path: Path) -> None:
    real = machine(real_compiler(tmp_path / "bin"), devices=4)
    model_folder(tmp_path / "Qwen3-8B", architectures=["Qwen3ForCausalLM"], head_dim=64)
    told = reasons(tmp_path, real, model=str(tmp_path / "Qwen3-8B"), profile="vllm-neuron-2.28", tp_degree=8)
    assert "aws-neuron-sdk#1303" in told
    model_folder(tmp_path / "large", hidden_size=8192, num_hidden_layers=80, num_attention_heads=64,
                 num_key_value_heads=8, intermediate_size=28672)  # fmt: skip
    assert "a core needs" in reasons(tmp_path, model=str(tmp_path / "large"))


def test_the_compiler_is_never_taken_for_another(tmp_path: Path) -> None:
    model_folder(tmp_path / "model")
    real = real_compiler(tmp_path / "bin")
    assert "is a real compiler" in reasons(tmp_path, machine(real))
    assert "is an emulated compiler" in reasons(tmp_path, profile="vllm-neuron-2.28", cross_compile=True)
    (tmp_path / "none").mkdir()
    empty = machine(tmp_path / "none")
    assert "no neuronx-cc in" in reasons(tmp_path, empty)
    older = machine(real_compiler(tmp_path / "old", "2.20.9961.0+0acef03a"), devices=4)
    assert "pins 2.23.6484.0" in reasons(tmp_path, older, profile="vllm-neuron-2.28")


def test_without_cores_only_a_cross_compilation_may_start(tmp_path: Path) -> None:
    model_folder(tmp_path / "model")
    real = real_compiler(tmp_path / "bin")
    assert "has 0 NeuronCores" in reasons(tmp_path, machine(real), profile="vllm-neuron-2.28")
    small = machine(real, devices=1)
    assert "onto 8" in reasons(tmp_path, small, profile="vllm-neuron-2.28", tp_degree=8)
    assert not check(
        request(tmp_path, profile="vllm-neuron-2.28", cross_compile=True), machine(real)
    ).emulated


def test_profiles_that_compile_nothing_and_int8_paths(tmp_path: Path) -> None:
    model_folder(tmp_path / "model")
    real = machine(real_compiler(tmp_path / "bin"), devices=4)
    assert "profile cpu compiles nothing" in reasons(tmp_path, real, profile="cpu")
    assert "which no host has" in reasons(tmp_path, real, profile="vllm-neuron-2.28", dtype="int8")


def test_transformers_neuronx_has_its_own_rules(tmp_path: Path) -> None:
    model_folder(tmp_path / "model")
    real = machine(real_compiler(tmp_path / "bin", "2.20.9961.0+0acef03a"), devices=4)
    checked = check(request(tmp_path, profile="transformers-neuronx-2.25", chunk_sizes=(128,)), real)
    assert "speculation-k128-seqlen512-batch1" in [graph.name for graph in checked.graphs]
    assert {graph.bucket for graph in checked.graphs} == {512, 2048}
    told = reasons(
        tmp_path, real, profile="transformers-neuronx-2.25", context_buckets=(512, 4096), chunk_sizes=(512,)
    )
    assert "chunk_sizes [512] are over 511" in told
    assert "must end with max_model_len 2048, not 4096" in told


@pytest.mark.parametrize("out", ["model/out", "../escape", "work/../out"])
def test_paths_that_trick(tmp_path: Path, out: str) -> None:
    model_folder(tmp_path / "model")
    told = reasons(tmp_path, out=tmp_path / out)
    assert "lies in the model's folder" in told or "must not go through '..'" in told
