"""Compile a model with transformers-neuronx for continuous batching: ``from_pretrained -> to_neuron ->
save``.

Every graph is named before the compiler starts (:func:`graph_names`), so progress and failures are told by
graph and bucket. The library's own ``NEURONX_DUMP_TO`` gives each graph a folder with the compiler's log and
result; a graph whose result is there already is not compiled again, so an interrupted or partly failed run
goes on where it stopped, and a failed graph is tried again (nothing remembers failures).

Arguments and names are those of aws-neuron/transformers-neuronx (snapshot 2024-12: ``llama/model.py``,
``config.py``, ``base.py``, ``decoder.py``, ``compiler.py``). The library passes ``--target=trn1`` to the
compiler itself, which is what Inf2 takes. Not yet run on hardware, nor with the real compiler: the library
comes with the image of profile transformers-neuronx-2.25 only.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.plan.catalogue import DOCUMENTED_TP_DEGREES

OPTIONS_NAME = "transformers-neuronx.json"
"""Beside the compiled graphs: what they were made with. Loading needs the very same, or no graph matches."""
CHUNK_ARCHITECTURES = frozenset({"llama"})
"""Model types whose class has ``speculative_forward``."""
_POLL_S = 1.0
Progress = Callable[[str, int, int], None]
"""Told a graph's name, how many are compiled, and how many there are."""


class CompileError(Exception):
    """Compilation cannot start, or failed; the message says which graphs and where the logs are."""


class TnxOptions(BaseModel):
    """What the graphs are compiled for. Lengths in tokens, ascending.

    ``n_positions`` and ``context_length_estimate`` are the library's names for the decode graphs' cache
    lengths and the prompt buckets; ``chunk_sizes`` are lengths of ``enable_speculative_decoder``, by which a
    prompt can be prefilled in parts; ``slots`` is the batch of the shared KV cache.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tp_degree: int = Field(ge=1)
    slots: int = Field(ge=1)
    n_positions: tuple[int, ...] = Field(min_length=1)
    context_length_estimate: tuple[int, ...] = Field(min_length=1)
    chunk_sizes: tuple[int, ...] = ()
    amp: Literal["bf16", "f16", "f32"] = "bf16"
    weights_dtype: Literal["bf16", "int8"] = "bf16"

    def problems(self) -> list[str]:
        """What cannot be compiled or scheduled, each in one sentence."""
        found = geometry_problems(
            self.slots, self.n_positions, self.context_length_estimate, self.chunk_sizes
        )
        if self.tp_degree not in DOCUMENTED_TP_DEGREES:
            degrees = ", ".join(map(str, DOCUMENTED_TP_DEGREES))
            found.append(f"tp_degree {self.tp_degree} is not one of those documented for Inf2: {degrees}")
        return found

    def model_arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``from_pretrained``, but for ``neuron_config``."""
        return {
            "batch_size": self.slots,
            "n_positions": list(self.n_positions),
            "context_length_estimate": list(self.context_length_estimate),
            "tp_degree": self.tp_degree,
            "amp": self.amp,
        }

    def graph_names(self) -> tuple[str, ...]:
        """Every graph that these options make, as the library tags them: context graphs take one prompt,
        decode graphs all slots, speculative ones one slot."""
        return (
            *(f"context-seqlen{length}-batch1" for length in self.context_length_estimate),
            *(f"token-seqlen{length}-batch{self.slots}" for length in self.n_positions),
            *(
                f"speculation-k{size}-seqlen{length}-batch1"
                for size in self.chunk_sizes
                for length in self.n_positions
            ),
        )


def geometry_problems(
    slots: int,
    token_buckets: Sequence[int],
    context_buckets: Sequence[int],
    chunk_sizes: Sequence[int] = (),
) -> list[str]:
    """What is wrong with slots and buckets, each in one sentence; empty when they can be compiled and
    scheduled."""
    problems = []
    if slots < 1:
        problems.append(f"slots {slots} must be at least 1")
    for name, values in (
        ("token_buckets", token_buckets),
        ("context_buckets", context_buckets),
        ("chunk_sizes", chunk_sizes),
    ):
        if list(values) != sorted(set(values)) or any(value < 2 for value in values):
            problems.append(f"{name} {list(values)} must be ascending, without repeats, each at least 2")
    if not token_buckets or not context_buckets:
        problems.append("token_buckets and context_buckets each need at least one length")
        return problems
    if max(context_buckets) > max(token_buckets):
        problems.append(
            f"context_buckets go up to {max(context_buckets)}, more than the cache holds "
            f"({max(token_buckets)}); drop the longer ones or raise the last of token_buckets"
        )
    limit = min(min(context_buckets), min(token_buckets) - 1)
    if too_long := [value for value in chunk_sizes if value > limit]:
        problems.append(
            f"chunk_sizes {too_long} are over {limit}: a chunk must fit the smallest context bucket, and be "
            "shorter than the smallest token bucket (at equal length the library builds the context mask)"
        )
    return problems


@dataclass(frozen=True)
class CompileReport:
    """What was compiled: the graphs, where they are, and the folder with each graph's log."""

    graphs: tuple[str, ...]
    folder: Path
    logs: Path


def build_model(options: TnxOptions, model_dir: Path) -> Any:
    """The library's model object for these options, weights not loaded and nothing compiled yet."""
    tnx = importlib.import_module("transformers_neuronx")
    arguments: dict[str, Any] = {
        "continuous_batching": tnx.ContinuousBatchingConfig(batch_size_for_shared_caches=options.slots)
    }
    if options.weights_dtype == "int8":
        arguments["quant"] = tnx.QuantizationConfig(quant_dtype="s8", dequant_dtype=options.amp)
    model = tnx.NeuronAutoModelForCausalLM.from_pretrained(
        str(model_dir), neuron_config=tnx.NeuronConfig(**arguments), **options.model_arguments()
    )
    if options.chunk_sizes:
        model.enable_speculative_decoder(list(options.chunk_sizes), batch_sizes=1)
    return model


def compile_transformers_neuronx(
    options: TnxOptions,
    model_dir: Path,
    out: Path,
    *,
    work: Path,
    on_cpu: bool = False,
    progress: Progress = lambda *_: None,
) -> CompileReport:
    """Compile all graphs into ``out``, with the options beside them.

    ``work`` keeps each graph's log and result between runs. ``on_cpu`` is for build boxes without NeuronCores
    (``cpu_compile``): the compiler runs, nothing is loaded.

    Raises:
        CompileError: every reason not to start, or the graphs that failed.
    """
    problems = [*options.problems(), *_model_problems(options, model_dir), *_target_problems(out)]
    if problems:
        raise CompileError("; ".join(problems))
    work.mkdir(parents=True, exist_ok=True)
    for torn in (path for path in work.glob("*/*.neff") if path.stat().st_size == 0):
        torn.unlink()
    names = options.graph_names()
    with _environment("NEURONX_DUMP_TO", str(work)), _watching(names, work, progress):
        try:
            model = build_model(options, model_dir)
            if on_cpu:
                model.cpu_compile()
            else:
                model.to_neuron()
        except Exception as error:
            missing = [name for name in names if not _result(work, name)]
            raise CompileError(
                f"{len(missing)} of {len(names)} graphs have no result: {', '.join(missing) or 'none'} "
                f"({type(error).__name__}: {error}); each graph's log is in its folder under {work}; the "
                "next run goes on with these only"
            ) from error
        model.save(str(out))
    saved = list(out.glob("*.neff"))
    if not saved or any(path.stat().st_size == 0 for path in saved):
        raise CompileError(f"{out} holds no compiled graphs, or empty ones, after save(); see {work}")
    (out / OPTIONS_NAME).write_text(options.model_dump_json(indent=2) + "\n")
    return CompileReport(names, out, work)


def read_options(compiled_dir: Path) -> TnxOptions:
    """What the graphs in a folder were compiled with.

    Raises:
        CompileError: the folder holds no compiled graphs of this library, or its options are not readable.
    """
    path = compiled_dir / OPTIONS_NAME
    try:
        return TnxOptions.model_validate_json(path.read_text())
    except (OSError, ValidationError) as error:
        raise CompileError(
            f"{compiled_dir} is not a transformers-neuronx artifact: {path.name} cannot be read ({error}); "
            "compile the model with profile transformers-neuronx-2.25"
        ) from error


def _model_problems(options: TnxOptions, model_dir: Path) -> list[str]:
    config = model_dir / "config.json"
    if not config.is_file():
        return [f"{model_dir} is no model folder: it has no config.json"]
    import json

    document = json.loads(config.read_text())
    kind = document.get("model_type")
    found = []
    if options.chunk_sizes and kind not in CHUNK_ARCHITECTURES:
        found.append(
            f"chunk_sizes need speculative_forward, which {kind!r} models do not have in this library (only "
            f"{', '.join(sorted(CHUNK_ARCHITECTURES))}); leave chunk_sizes out"
        )
    longest = document.get("max_position_embeddings")
    if isinstance(longest, int) and max(options.n_positions) > longest:
        found.append(f"n_positions go up to {max(options.n_positions)}; the model was made for {longest}")
    weights = [*model_dir.glob("*.safetensors"), *model_dir.glob("pytorch_model*.bin")]
    if not weights:
        found.append(f"{model_dir} holds no weights (*.safetensors or pytorch_model*.bin)")
    return found


def _target_problems(out: Path) -> list[str]:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        return [f"{out} exists and is not an empty folder; give a new one"]
    return []


def _result(work: Path, name: str) -> Path | None:
    """The graph's compiled file; its folder's name begins with the tag, and the module's name follows."""
    return next((path for path in work.glob(f"{name}-*/*.neff") if path.stat().st_size > 0), None)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def _watching(names: Sequence[str], work: Path, progress: Progress) -> Iterator[None]:
    """Tell of each graph as its result appears: the library compiles all at once and reports nothing."""
    stop = threading.Event()

    def tell(done: set[str]) -> None:
        for name in names:
            if name not in done and _result(work, name):
                done.add(name)
                progress(name, len(done), len(names))

    def watch() -> None:
        done: set[str] = set()
        while not stop.wait(_POLL_S):
            tell(done)
        tell(done)

    thread = threading.Thread(target=watch, name="tnx-compile-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
