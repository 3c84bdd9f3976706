"""The transformers-neuronx compile step and loading, against a double with the library's own signatures.

The double takes the arguments that the library's source takes and no others, compiles by writing what the
library writes under NEURONX_DUMP_TO, and matches saved graphs by digest as the library does.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from app.compile.transformers_neuronx import (
    OPTIONS_NAME,
    CompileError,
    TnxOptions,
    compile_transformers_neuronx,
    read_options,
)
from app.serve.engines.transformers_neuronx.hardware import ArtifactMismatch, load_neuron_model
from app.serve.engines.transformers_neuronx.start import end_tokens, tnx_settings
from app.serve.settings import ReplicaSettings, SettingsError

OPTIONS = TnxOptions(
    tp_degree=8, slots=4, n_positions=(512, 2048), context_length_estimate=(256, 1024), chunk_sizes=(128,)
)
GRAPHS = {
    "context-seqlen256-batch1",
    "context-seqlen1024-batch1",
    "token-seqlen512-batch4",
    "token-seqlen2048-batch4",
    "speculation-k128-seqlen512-batch1",
    "speculation-k128-seqlen2048-batch1",
}


class Library:
    """What the double saw and how it behaves."""

    def __init__(self) -> None:
        self.version = "0.13"
        self.fails: set[str] = set()
        self.compiled: list[str] = []
        self.calls: list[str] = []


class ContinuousBatchingConfig:
    def __init__(self, *, batch_size_for_shared_caches: int) -> None:
        self.batch_size_for_shared_caches = batch_size_for_shared_caches


class QuantizationConfig:
    def __init__(self, quant_dtype: str = "s8", dequant_dtype: str = "f16") -> None:
        self.names = (quant_dtype, dequant_dtype)


class NeuronConfig:
    def __init__(
        self,
        *,
        continuous_batching: ContinuousBatchingConfig | None = None,
        quant: QuantizationConfig | None = None,
    ) -> None:
        self.continuous_batching = continuous_batching
        self.quant = quant


class Model:
    def __init__(self, library: Library, arguments: dict[str, Any]) -> None:
        self._library = library
        self._tags = [f"context-seqlen{n}-batch1" for n in arguments["context_length_estimate"]]
        self._tags += [f"token-seqlen{n}-batch{arguments['batch_size']}" for n in arguments["n_positions"]]
        self._positions = arguments["n_positions"]
        self._identity = json.dumps([arguments["tp_degree"], arguments["amp"], library.version])
        self._neff: dict[str, bytes] = {}
        self._loaded: Path | None = None

    def enable_speculative_decoder(
        self, speculation_length: list[int], batch_sizes: int | None = None
    ) -> None:
        for size in speculation_length:
            self._tags += [f"speculation-k{size}-seqlen{n}-batch{batch_sizes}" for n in self._positions]

    def cpu_compile(self) -> None:
        self._library.calls.append("cpu_compile")
        self._compile()

    def to_neuron(self) -> None:
        self._library.calls.append("to_neuron")
        if self._loaded is None:
            self._compile()
            return
        for tag in self._tags:
            path = self._loaded / self._name(tag)
            if not path.exists():
                raise FileNotFoundError("Could not find a matching NEFF for your HLO in this directory.")

    def load(self, directory: str) -> None:
        self._loaded = Path(directory)

    def save(self, directory: str) -> None:
        Path(directory).mkdir(exist_ok=True, parents=True)
        for tag in self._tags:
            Path(directory, self._name(tag)).write_bytes(self._neff[tag])

    def _name(self, tag: str) -> str:
        return hashlib.sha256((tag + self._identity).encode()).hexdigest()[:20] + ".neff"

    def _compile(self) -> None:
        failed = []
        for tag in self._tags:
            folder = Path(os.environ["NEURONX_DUMP_TO"]) / f"{tag}-Scribe.1.2.20.0+abc"
            folder.mkdir(parents=True, exist_ok=True)
            result = folder / f"{folder.name}.pb.neff"
            if not result.exists():
                self._library.compiled.append(tag)
                (folder / "log-neuron-cc.txt").write_text("compiling\n")
                if tag in self._library.fails:
                    failed.append(tag)
                    continue
                result.write_bytes(tag.encode())
            self._neff[tag] = result.read_bytes()
        if failed:
            raise RuntimeError("neuronx-cc returned 70")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()

    class NeuronAutoModelForCausalLM:
        @staticmethod
        def from_pretrained(
            path: str,
            *,
            n_positions: list[int],
            batch_size: int,
            amp: str,
            tp_degree: int,
            context_length_estimate: list[int],
            neuron_config: NeuronConfig,
        ) -> Model:
            batching = neuron_config.continuous_batching
            assert batching is not None and batching.batch_size_for_shared_caches == batch_size
            assert Path(path, "config.json").is_file()
            library.calls.append(f"quant={neuron_config.quant and neuron_config.quant.names}")
            return Model(
                library,
                {
                    "n_positions": n_positions,
                    "batch_size": batch_size,
                    "amp": amp,
                    "tp_degree": tp_degree,
                    "context_length_estimate": context_length_estimate,
                },
            )

    module = types.ModuleType("transformers_neuronx")
    module.__dict__.update(
        ContinuousBatchingConfig=ContinuousBatchingConfig,
        QuantizationConfig=QuantizationConfig,
        NeuronConfig=NeuronConfig,
        NeuronAutoModelForCausalLM=NeuronAutoModelForCausalLM,
    )
    monkeypatch.setitem(sys.modules, "transformers_neuronx", module)
    return library


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 8192}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_every_graph_is_compiled_and_told_of(library: Library, model_dir: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    out = tmp_path / "out"
    report = compile_transformers_neuronx(
        OPTIONS, model_dir, out, work=tmp_path / "work", progress=lambda *item: told.append(item)
    )
    assert set(report.graphs) == GRAPHS == set(library.compiled)
    assert {name for name, _, _ in told} == GRAPHS
    assert [(done, total) for _, done, total in told] == [(n, 6) for n in range(1, 7)]
    assert len(list(out.glob("*.neff"))) == 6
    assert read_options(out) == OPTIONS
    assert library.calls == ["quant=None", "to_neuron"]
    assert "NEURONX_DUMP_TO" not in os.environ


def test_a_build_box_compiles_on_the_cpu_and_int8_weights_are_asked_for(
    library: Library, model_dir: Path, tmp_path: Path
) -> None:
    options = OPTIONS.model_copy(update={"weights_dtype": "int8"})
    compile_transformers_neuronx(options, model_dir, tmp_path / "out", work=tmp_path / "work", on_cpu=True)
    assert library.calls == ["quant=('s8', 'bf16')", "cpu_compile"]


def test_a_failed_graph_is_named_and_the_next_run_compiles_only_what_is_missing(
    library: Library, model_dir: Path, tmp_path: Path
) -> None:
    out, work = tmp_path / "out", tmp_path / "work"
    library.fails = {"token-seqlen2048-batch4"}
    with pytest.raises(
        CompileError, match=r"1 of 6 graphs.*token-seqlen2048-batch4.*neuronx-cc returned 70"
    ) as error:
        compile_transformers_neuronx(OPTIONS, model_dir, out, work=work)
    assert str(work) in str(error.value)
    assert not out.exists(), "nothing half compiled may look like an artifact"
    torn = next(work.glob("context-seqlen256-*/*.neff"))
    torn.write_bytes(b"")
    library.fails, library.compiled = set(), []
    compile_transformers_neuronx(OPTIONS, model_dir, out, work=work)
    assert library.compiled == ["context-seqlen256-batch1", "token-seqlen2048-batch4"]


def test_all_reasons_not_to_start_are_given_at_once(library: Library, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "mistral", "max_position_embeddings": 1024}')
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").touch()
    options = OPTIONS.model_copy(update={"tp_degree": 12, "n_positions": (2048, 512)})
    with pytest.raises(CompileError) as error:
        compile_transformers_neuronx(options, folder, out, work=tmp_path / "work")
    for part in (
        "token_buckets [2048, 512] must be ascending",
        "tp_degree 12",
        "'mistral' models do not have",
        "up to 2048; the model was made for 1024",
        "holds no weights",
        "is not an empty folder",
    ):
        assert part in str(error.value)
    assert library.compiled == []
    with pytest.raises(CompileError, match=r"no config\.json"):
        compile_transformers_neuronx(OPTIONS, tmp_path / "none", tmp_path / "out2", work=tmp_path / "work")


def settings(model_dir: Path, compiled: Path | None, **changes: Any) -> ReplicaSettings:
    values = {"tp_degree": 8, "batch_size": 4, "max_model_len": 2048, **changes}
    return ReplicaSettings(
        profile="transformers-neuronx-2.25",
        model_dir=model_dir,
        model_name="m",
        compiled_dir=compiled,
        **values,
    )


@pytest.fixture
def compiled(library: Library, model_dir: Path, tmp_path: Path) -> Path:
    out = tmp_path / "compiled"
    compile_transformers_neuronx(OPTIONS, model_dir, out, work=tmp_path / "work")
    library.compiled, library.calls = [], []
    return out


def test_a_compiled_model_is_loaded_and_not_compiled_again(
    library: Library, model_dir: Path, compiled: Path
) -> None:
    _, geometry = load_neuron_model(settings(model_dir, compiled))
    assert library.calls == ["quant=None", "to_neuron"]
    assert library.compiled == []
    assert (geometry.slots, geometry.context_limit, geometry.vocabulary) == (4, 2048, 128256)
    assert (geometry.context_buckets, geometry.chunk_sizes) == ((256, 1024), (128,))


def test_each_difference_from_what_is_to_be_served_is_named(
    library: Library, model_dir: Path, compiled: Path
) -> None:
    wrong = settings(model_dir, compiled, tp_degree=2, batch_size=8, max_model_len=4096, dtype="int8")
    with pytest.raises(ArtifactMismatch) as error:
        load_neuron_model(wrong)
    for part in (
        "tp_degree: wanted 2, compiled for 8",
        "batch_size: wanted 8, compiled for 4",
        "max_model_len: wanted 4096, compiled for 2048",
        "dtype: wanted int8, compiled for bf16",
    ):
        assert part in str(error.value)
    assert library.calls == []


def test_another_version_of_the_library_is_refused_and_never_compiles(
    library: Library, model_dir: Path, compiled: Path
) -> None:
    library.version = "0.14"
    with pytest.raises(ArtifactMismatch, match="compiled with another version or another model"):
        load_neuron_model(settings(model_dir, compiled))
    assert library.compiled == []


def test_a_host_without_a_compiled_model_says_so(library: Library, model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactMismatch, match="comes with no compiled model"):
        load_neuron_model(settings(model_dir, None))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / OPTIONS_NAME).write_text("{}")
    with pytest.raises(ArtifactMismatch, match="cannot be read"):
        load_neuron_model(settings(model_dir, tmp_path / "other"))
    assert library.calls == []


def test_the_engines_own_settings_come_from_the_environment() -> None:
    found = tnx_settings(
        {"NEURONFLEET_TNX_TPOT_SLO_MS": "35", "NEURONFLEET_TNX_CHUNK_SIZES": "16,32", "OTHER": "x"}
    )
    assert (found.policy.tpot_slo_ms, found.chunk_sizes, found.contract) == (35.0, (16, 32), "neuron")
    wrong = {"NEURONFLEET_TNX_TPOT_SLO_MS": "-1", "NEURONFLEET_TNX_CONTRACT": "gpu", "NEURONFLEET_TNX_X": "1"}
    with pytest.raises(SettingsError) as error:
        tnx_settings(wrong)
    for name in wrong:
        assert name in str(error.value)


@pytest.mark.parametrize(
    ("generation_config", "ends"),
    [('{"eos_token_id": [1, 2]}', {1, 2}), ('{"eos_token_id": 5}', {5}), ("{}", {9}), (None, {9})],
)
def test_an_answer_ends_at_any_of_the_models_end_tokens(
    tmp_path: Path, generation_config: str | None, ends: set[int]
) -> None:
    if generation_config is not None:
        (tmp_path / "generation_config.json").write_text(generation_config)
    assert end_tokens(tmp_path, types.SimpleNamespace(eos_token_id=9)) == ends
