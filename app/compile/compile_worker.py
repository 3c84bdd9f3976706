"""The process that compiles: ``python -m app.compile.compile_worker SPEC.json``.

It is one of its own so that a library's crash, its output and its environment are contained. Exit code 0: the
compiled folder is whole; 1: it is not, and the reason is on standard error.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import traceback
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from app.compile.graphs import Graph
from app.compile.transformers_neuronx import TnxOptions
from app.plan.profiles import EngineArguments, get_profile

_PR_SET_PDEATHSIG = 1
Way = Literal["vllm", "nxdi", "transformers_neuronx", "emulated"]


class Spec(BaseModel):
    """What one process is to compile."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    way: Way
    profile: str
    arguments: EngineArguments
    architecture: str
    layers: int
    compiler: str
    graphs: tuple[Graph, ...]
    work: Path
    compiled: Path
    tnx: TnxOptions | None = None
    on_cpu: bool = False


def run(spec: Spec) -> None:
    """Compile as ``spec`` says."""
    profile = get_profile(spec.profile)
    if spec.way == "emulated":
        from app.compile.emulated_neuron import compile_emulated

        compile_emulated(spec.compiler, spec.graphs, spec.layers, spec.arguments, spec.work, spec.compiled)
    elif spec.way == "transformers_neuronx":
        from app.compile.transformers_neuronx import compile_transformers_neuronx

        assert spec.tnx is not None
        compile_transformers_neuronx(
            spec.tnx, Path(spec.arguments.model_path), spec.compiled, work=spec.work, on_cpu=spec.on_cpu
        )
    elif spec.way == "nxdi":
        from app.compile.vllm_neuron import compile_with_nxdi

        compile_with_nxdi(profile, spec.arguments, spec.architecture, spec.compiled)
    else:
        from app.compile.vllm_neuron import compile_with_vllm

        compile_with_vllm(profile, spec.arguments)


def _end_with_parent() -> None:
    """Ask the kernel (Linux) for SIGTERM when the run that started this process is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def main() -> int:
    _end_with_parent()
    spec = Spec.model_validate_json(Path(sys.argv[1]).read_bytes())
    try:
        run(spec)
    except Exception as error:
        traceback.print_exc()
        print(f"compile failed: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
