"""Model configs: the registry's sizes are right, and faulty configs are named whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.plan.catalogue import UnknownNameError
from app.plan.models import ModelError, known_models, load_model, parse_config

GOOD = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}

# Parameter counts as their makers publish them (safetensors metadata on the hub).
PUBLISHED = {
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama/Meta-Llama-3-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "codellama/CodeLlama-34b-hf": 33_743_970_304,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-0.6B": 596_049_920,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_registry_sizes_give_the_published_parameter_counts(name: str) -> None:
    assert load_model(name).parameters == PUBLISHED[name]


def test_every_registered_model_loads() -> None:
    for name in known_models():
        model = load_model(name)
        assert model.heads % model.kv_heads == 0


@pytest.mark.parametrize(
    ("name", "same_as"),
    [
        ("Llama-3-8B", "meta-llama/Meta-Llama-3-8B"),
        ("llama-3-70b-instruct", "meta-llama/Meta-Llama-3-70B"),
        ("Llama-2-7b", "meta-llama/Llama-2-7b-hf"),
        ("Llama3-8B-Instruct", "meta-llama/Meta-Llama-3-8B"),
        ("llama 2 13b chat", "meta-llama/Llama-2-13b-hf"),
        ("Llama-2-13b", "meta-llama/Llama-2-13b-chat-hf"),
        ("Llama-2-70b", "meta-llama/Llama-2-70b-hf"),
        ("CodeLlama-13b-hf", "codellama/CodeLlama-13b-Instruct-hf"),
        ("Mistral-7B", "mistralai/Mistral-7B-v0.1"),
        ("Mistral-7B-Instruct-v0.2", "mistralai/Mistral-7B-Instruct-v0.2"),
        ("SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M"),
        ("TinyLlama-1.1B", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
    ],
)
def test_names_as_tables_have_them(name: str, same_as: str) -> None:
    ours, theirs = load_model(name), load_model(same_as)
    assert ours.model_copy(update={"name": ""}) == theirs.model_copy(update={"name": ""})


def test_names_of_different_models_stay_apart() -> None:
    assert load_model("Llama-3-8B").parameters != load_model("Llama-3.2-3B").parameters
    assert load_model("Mistral-7B-v0.3").vocab_size != load_model("Mistral-7B-v0.1").vocab_size


def test_unknown_name_lists_those_known() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown model 'gpt-2'.*meta-llama/Meta-Llama-3-8B"):
        load_model("gpt-2")


def test_folder_and_file_give_the_same_model(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(GOOD))
    assert load_model(str(folder)) == load_model(str(folder / "config.json"))
    assert load_model(str(folder)).name == "my-model"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot read"),
        ("[]", "must hold a JSON object, not list"),
        (b"\xff\xfe", "cannot read"),
        ("[" * 100_000, "cannot read"),
        ('{"hidden_size": ' + "9" * 5000 + "}", r"cannot read .*config\.json"),
    ],
)
def test_unreadable_configs(tmp_path: Path, text: str | bytes, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ModelError, match=said):
        load_model(str(path))


def test_folder_without_config_and_missing_path(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        load_model(str(tmp_path))
    with pytest.raises(ModelError, match="no such file or folder"):
        load_model(str(tmp_path / "nothing"))
    with pytest.raises(ModelError, match="name is empty"):
        load_model(" ")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "many"}, "vocab_size 'many' must be a whole number, 1 to"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0 must be"),
        ({"intermediate_size": -1}, "intermediate_size -1 must be"),
        ({"num_hidden_layers": True}, "num_hidden_layers True must be"),
        ({"hidden_size": 4096.5}, "hidden_size 4096.5 must be"),
        ({"num_attention_heads": 33}, "33 does not divide hidden_size 4096"),
        ({"num_key_value_heads": 7}, "7 does not divide num_attention_heads 32"),
        ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not known"),
        ({"architectures": None}, "architectures is missing"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architecture ['LlamaForCausalLM'] is not known"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is missing or no list"),
        ({"tie_word_embeddings": "yes"}, "must be true or false"),
        ({"attention_bias": 1}, "attention_bias 1 must be true or false"),
        ({"head_dim": 127}, "a head of 127 elements cannot hold rotary positions"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": None},
            "num_key_value_heads is missing",
        ),
    ],
)
def test_faults_are_named(changes: dict, said: str) -> None:
    config = {key: value for key, value in {**GOOD, **changes}.items() if value is not None}
    with pytest.raises(ModelError) as caught:
        parse_config(config, name="m")
    assert said in str(caught.value)


def test_all_faults_are_named_at_once() -> None:
    config = {"architectures": ["X"], "hidden_size": 10, "num_attention_heads": 3}
    with pytest.raises(ModelError) as caught:
        parse_config(config, name="m")
    for text in ("'X'", "num_hidden_layers is missing", "vocab_size is missing", "3 does not divide"):
        assert text in str(caught.value)
    with pytest.raises(ModelError) as caught:
        parse_config({k: v for k, v in GOOD.items() if k != "num_attention_heads"}, name="m")
    assert str(caught.value) == "config of m: num_attention_heads is missing"


def test_what_a_config_leaves_open_is_said() -> None:
    assert parse_config(GOOD, name="m").notes == ()
    model = parse_config({k: v for k, v in GOOD.items() if k != "num_key_value_heads"}, name="m")
    assert model.kv_heads == 32
    assert model.notes == ("its config has no num_key_value_heads: taken as 32, one a query head",)
    more = {**GOOD, "max_position_embeddings": None, "quantization_config": {"quant_method": "awq"}}
    assert [note.split()[4] for note in parse_config(more, name="m").notes] == [
        "max_position_embeddings:",
        "quantization_config,",
    ]


def test_a_bias_on_attention_counts() -> None:
    biased = parse_config({**GOOD, "attention_bias": True}, name="m")
    assert biased.parameters - parse_config(GOOD, name="m").parameters == 32 * 128 * (32 + 2 * 8)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)


@given(st.dictionaries(st.sampled_from([*GOOD, "head_dim", "tie_word_embeddings"]), json_values))
def test_no_config_raises_anything_but_a_named_fault(changes: dict) -> None:
    try:
        parse_config({**GOOD, **changes}, name="m")
    except ModelError as error:
        assert str(error).startswith("config of m: ")
