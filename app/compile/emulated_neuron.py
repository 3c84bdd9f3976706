"""Compile with the emulated compiler: the flow of a compilation, with nothing in it that can run on a core.

What the libraries do is done in their place: a graph for each bucket is written, the compiler is called for
each, in the layout that NxD Inference gives its work folder, and the results go to the compiled folder, whose
config says that it is emulated. Used by profile ``emulated`` alone.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from app.compile.graphs import NXD_FOLDER, Graph, look
from app.plan.profiles import EngineArguments

CONFIG_NAME = "neuron_config.json"
_AT_ONCE = 2


class EmulatedCompileError(Exception):
    """Graphs failed; the message names them."""


def compile_emulated(
    compiler: str, graphs: Sequence[Graph], layers: int, wanted: EngineArguments, work: Path, compiled: Path
) -> None:
    """Compile what has no result yet, then put all results into ``compiled``.

    Raises:
        EmulatedCompileError: graphs whose compiler failed; the others are compiled and stay in ``work``.
    """
    due = [graph for graph in graphs if look(work, graph).status != "compiled"]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        codes = list(pool.map(lambda graph: _compile(compiler, graph, layers, work), due))
    failed = [graph.name for graph, code in zip(due, codes, strict=True) if code]
    if failed:
        raise EmulatedCompileError(f"the compiler failed for {', '.join(failed)}")
    for graph in graphs:
        target = compiled / f"{graph.name}.neff"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(work / NXD_FOLDER / graph.name / "graph.neff", target)
    document = {
        "emulated": True,
        "tp_degree": wanted.tp_degree,
        "batch_size": wanted.batch_size,
        "seq_len": wanted.max_model_len,
        "context_encoding_buckets": wanted.context_buckets,
        "token_generation_buckets": wanted.token_buckets,
    }
    (compiled / CONFIG_NAME).write_text(json.dumps(document, indent=2) + "\n")


def _compile(compiler: str, graph: Graph, layers: int, work: Path) -> int:
    folder = work / NXD_FOLDER / graph.name
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "graph.hlo"
    source.write_text(json.dumps({"name": graph.name, "layers": layers, "bucket": graph.bucket}))
    command = [compiler, "compile", str(source), "--framework", "XLA", "--target", "trn1"]
    command += ["--model-type", "transformer", "--output", str(folder / "graph.neff")]
    command += ["--logfile", str(folder / "log-neuron-cc.txt")]
    return subprocess.run(command, check=False).returncode
