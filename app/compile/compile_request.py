"""What is to be compiled, and every reason not to start: all of them at once, before any work.

Nothing is downloaded: the model is a folder. Lengths are in tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from app.compile.folder import COMPILED_FOLDERS, model_faults
from app.compile.graphs import Graph, nxd_graphs, tnx_graphs
from app.compile.transformers_neuronx import TnxOptions
from app.plan.catalogue import UnknownNameError
from app.plan.engine_arguments import EngineArgumentError, default_buckets, engine_arguments
from app.plan.models import ModelConfig, ModelError, load_model
from app.plan.planner import Planner, PlanRequest
from app.plan.prices import load_prices
from app.plan.profiles import EngineArguments, EngineProfile, get_profile

COMPILER = "neuronx-cc"
COMPILED = "compiled"
"""The artifact's subfolder that engines load from (``app.serve.settings``)."""
SKIPPED = COMPILED_FOLDERS
"""Folders of an earlier compilation that a model's folder may hold: no part of the model."""
GATED_OWNERS = frozenset({"meta-llama"})
"""Owners whose models can be had only with a token, after their licence was accepted."""
_CORES_PER_DEVICE = 2  # of Inferentia2
_GIB = 1024**3
_GRAPH_BYTES = 2 * _GIB
_EMULATED_BYTES = _GIB // 2
_VERSION_TIMEOUT_S = 60


class CompileRefused(Exception):
    """Compilation cannot start; ``reasons`` holds every reason."""

    def __init__(self, reasons: list[str]) -> None:
        self.reasons = tuple(dict.fromkeys(reasons))
        super().__init__("; ".join(self.reasons))


@dataclass(frozen=True)
class CompileRequest:
    """What a user asks for. ``context_buckets`` and ``token_buckets`` empty: powers of two from 128.
    ``cross_compile``: for Inf2, on a machine without NeuronCores."""

    model: str
    profile: str
    tp_degree: int
    batch_size: int
    max_model_len: int
    out: Path
    work: Path
    name: str = ""
    context_buckets: tuple[int, ...] = ()
    token_buckets: tuple[int, ...] = ()
    chunk_sizes: tuple[int, ...] = ()
    dtype: Literal["bf16", "int8"] = "bf16"
    cross_compile: bool = False


@dataclass(frozen=True)
class Machine:
    """What the check must know of this machine; tests give another."""

    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    devices: Callable[[], int] = lambda: len(list(Path("/dev").glob("neuron[0-9]*")))
    free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free

    def compiler(self, profile: EngineProfile) -> str | None:
        """The compiler's path: the profile's own venv first, then PATH."""
        places = os.pathsep.join((f"{profile.venv}/bin", self.environment.get("PATH", os.defpath)))
        return shutil.which(COMPILER, path=places)


@dataclass(frozen=True)
class Checked:
    """A request that may start. ``fingerprint`` names everything that decides the graphs."""

    request: CompileRequest
    profile: EngineProfile
    model: ModelConfig
    model_dir: Path
    name: str
    compiler: str
    compiler_version: str
    arguments: EngineArguments
    graphs: tuple[Graph, ...]
    fingerprint: str
    warnings: tuple[str, ...]
    tnx: TnxOptions | None = None

    @property
    def emulated(self) -> bool:
        return self.profile.engine == "emulated"


def check(request: CompileRequest, machine: Machine | None = None) -> Checked:
    """Validate all of a request.

    Raises:
        CompileRefused: every reason at once.
    """
    machine = machine or Machine()
    reasons: list[str] = []
    profile = _profile(request, reasons)
    reasons += [
        f"{option} {value} must be at least 1"
        for option, value in (
            ("--tp-degree", request.tp_degree),
            ("--batch-size", request.batch_size),
            ("--max-model-len", request.max_model_len),
        )
        if value < 1
    ]
    folder, model = _model(request, machine, reasons)
    if profile is None or model is None:
        reasons += _folder_reasons(request, folder)
        raise CompileRefused(reasons)
    contexts = request.context_buckets or default_buckets(request.max_model_len)
    tokens = request.token_buckets or request.context_buckets or default_buckets(request.max_model_len)
    arguments = EngineArguments(
        model_path=str(folder.resolve()),
        served_model_name=request.name or model.name,
        tp_degree=max(request.tp_degree, 1),
        batch_size=max(request.batch_size, 1),
        max_model_len=max(request.max_model_len, 1),
        weights_dtype=request.dtype,
        context_buckets=contexts,
        token_buckets=tokens,
    )
    warnings = _plan_reasons(request, profile, model, contexts, reasons)
    tnx = _engine_reasons(request, profile, arguments, reasons)
    compiler, version = _compiler(request, profile, machine, reasons)
    graphs = tnx_graphs(tnx.graph_names()) if tnx else nxd_graphs(contexts, tokens)
    reasons += _folder_reasons(request, folder)
    reasons += _space_reasons(request, folder, machine, emulated=profile.engine == "emulated")
    if reasons:
        raise CompileRefused(reasons)
    return Checked(
        request=request,
        profile=profile,
        model=model,
        model_dir=folder.resolve(),
        name=request.name or model.name,
        compiler=compiler,
        compiler_version=version,
        arguments=arguments,
        graphs=tuple(graphs),
        fingerprint=_fingerprint(arguments, profile, version, folder, request.chunk_sizes),
        warnings=tuple(warnings),
        tnx=tnx,
    )


def own_files(folder: Path) -> list[Path]:
    """The model's own files: what an earlier compilation left, hidden files and a manifest are not."""
    found = []
    for base, folders, names in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and not (Path(base) == folder and name in SKIPPED)
        ]
        found += [Path(base, name) for name in names if not name.startswith(".")]
    return sorted(path for path in found if path != folder / "manifest.json")


def _profile(request: CompileRequest, reasons: list[str]) -> EngineProfile | None:
    try:
        profile = get_profile(request.profile)
    except UnknownNameError as error:
        reasons.append(str(error))
        return None
    if not profile.capabilities.neuron and profile.engine != "emulated":
        reasons.append(
            f"profile {profile.name} compiles nothing: its engine takes the model as it is; choose a Neuron "
            "profile, or emulated to try the flow"
        )
    return profile


def _model(request: CompileRequest, machine: Machine, reasons: list[str]) -> tuple[Path, ModelConfig | None]:
    folder = Path(request.model)
    if not folder.is_dir():
        reasons.append(_absent(request.model, machine))
        try:
            # What the plan knows of it is enough to tell everything else that is wrong.
            return folder, load_model(request.model)
        except (ModelError, UnknownNameError):
            return folder, None
    reasons += model_faults(folder)
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        reasons.append(
            f"{folder} holds no weights (*.safetensors or pytorch_model*.bin): copy the model whole"
        )
    try:
        return folder, load_model(request.model)
    except (ModelError, UnknownNameError) as error:
        reasons.append(str(error))
        return folder, None


def _absent(name: str, machine: Machine) -> str:
    get = f"hf download {name} --local-dir DIR"
    if name.split("/")[0] in GATED_OWNERS and name.count("/") == 1:
        token = "HF_TOKEN is set" if machine.environment.get("HF_TOKEN") else "HF_TOKEN is not set"
        return (
            f"{name} is a gated model and no folder ({token}): accept its licence on its page, set HF_TOKEN "
            f"to a token of that account, run `{get}` and give --model DIR"
        )
    try:
        load_model(name)
    except (ModelError, UnknownNameError):
        return f"unknown model {name!r}: no such folder; give the folder of a model in Hugging Face's format"
    return f"{name} is no folder, and compiling downloads nothing: run `{get}` and give --model DIR"


def _plan_reasons(
    request: CompileRequest,
    profile: EngineProfile,
    model: ModelConfig,
    contexts: tuple[int, ...],
    reasons: list[str],
) -> list[str]:
    """Refusals of the plan on the Inf2 size that fits best; its warnings are returned."""
    if min(request.tp_degree, request.batch_size, request.max_model_len) < 1:
        return []
    longest = max(1, min(request.max_model_len - 1, max(contexts)))
    plan = Planner(load_prices()).plan(
        PlanRequest(
            model=model,
            profile=profile,
            tp_degree=request.tp_degree,
            batch_size=request.batch_size,
            max_model_len=request.max_model_len,
            input_tokens=longest,
            output_tokens=1,
            weights_dtype=request.dtype,
        )
    )
    reasons += plan.refusals
    # What is said of speed and price is for the plan's own command.
    return [
        message
        for message in plan.warnings
        if message in plan.fit.warnings or message.startswith(f"profile {profile.name}:")
        if message not in plan.refusals
    ]


def _engine_reasons(
    request: CompileRequest, profile: EngineProfile, arguments: EngineArguments, reasons: list[str]
) -> TnxOptions | None:
    """What the engine's own rules say of buckets, degree and dtype; its options for transformers-neuronx."""
    if profile.engine == "transformers_neuronx":
        options = TnxOptions(
            tp_degree=arguments.tp_degree,
            slots=arguments.batch_size,
            n_positions=arguments.token_buckets,
            context_length_estimate=arguments.context_buckets,
            chunk_sizes=request.chunk_sizes,
            weights_dtype=request.dtype,
        )
        reasons += options.problems()
        if arguments.token_buckets[-1] != request.max_model_len:
            reasons.append(
                f"token_buckets must end with max_model_len {request.max_model_len}, not "
                f"{arguments.token_buckets[-1]}"
            )
        return options
    if request.chunk_sizes:
        reasons.append("--chunk-sizes is of profile transformers-neuronx-2.25 only; leave it out")
    if profile.engine == "vllm" and request.dtype == "int8":
        reasons.append(
            "int8 with profile vllm-neuron-2.28 records the path of a checkpoint on this machine in the "
            "artifact (quantized_checkpoints_path), which no host has; compile bf16"
        )
    try:
        engine_arguments(profile, arguments)
    except EngineArgumentError as error:
        reasons.append(str(error))
    return None


def _compiler(
    request: CompileRequest, profile: EngineProfile, machine: Machine, reasons: list[str]
) -> tuple[str, str]:
    """The compiler and its version. An emulated one is for profile emulated, a real one for the others."""
    if not profile.capabilities.neuron and profile.engine != "emulated":
        return "", ""
    path = machine.compiler(profile)
    if path is None:
        reasons.append(
            f"no {COMPILER} in {profile.venv}/bin or on PATH: "
            + (
                "put rehearsal/compiler of this project first on PATH"
                if profile.engine == "emulated"
                else f"run this on an image of profile {profile.name}"
            )
        )
        return "", ""
    try:
        said = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        reasons.append(f"{path} --version failed: {error}")
        return path, ""
    version = said.split("version", 1)[-1].split()[0] if said.split() else ""
    emulated = "EMULATED" in said
    if emulated and profile.engine != "emulated":
        reasons.append(f"{path} is an emulated compiler, and profile {profile.name} needs the real one")
    if profile.engine == "emulated":
        if not emulated:
            reasons.append(f"{path} is a real compiler; profile emulated takes rehearsal/compiler/{COMPILER}")
        return path, version
    pinned = profile.versions["neuronx-cc"]
    if not emulated and version.split("+")[0] != pinned:
        reasons.append(f"{path} is {version or 'of no version'}; profile {profile.name} pins {pinned}")
    cores = _CORES_PER_DEVICE * machine.devices()
    if not request.cross_compile and cores < max(request.tp_degree, 1):
        reasons.append(
            f"this machine has {cores} NeuronCores (/dev/neuron*), and the libraries load what they compile "
            f"onto {request.tp_degree}: compile on an Inf2 instance that has them, or give --cross-compile"
        )
    return path, version


def _folder_reasons(request: CompileRequest, folder: Path) -> list[str]:
    found = []
    out, work, model = (path.absolute() for path in (request.out, request.work, folder))
    if ".." in request.out.parts or ".." in request.work.parts:
        found.append("--out and --work must not go through '..'")
    if request.out.exists():
        found.append(f"{request.out} exists: artifacts are never written over; give a new folder")
    for option, path in (("--out", out), ("--work", work)):
        if path == model or model in path.parents:
            found.append(f"{option} {path} lies in the model's folder; give one outside")
    if work == out or out in work.parents:
        found.append(f"--work {work} must not lie in --out")
    return found


def _space_reasons(request: CompileRequest, folder: Path, machine: Machine, *, emulated: bool) -> list[str]:
    """The compiled graphs, and the model's files once more where they cannot be linked."""
    place = request.out.absolute().parent
    while not place.exists():
        place = place.parent
    need = _EMULATED_BYTES if emulated else _GRAPH_BYTES
    if folder.is_dir() and place.stat().st_dev != folder.stat().st_dev:
        need += sum(path.stat().st_size for path in own_files(folder) if path.is_file())
    free = machine.free_bytes(place)
    if free >= need:
        return []
    return [
        f"{place} has {free / _GIB:.1f} GiB free; the artifact may take {need / _GIB:.1f} GiB: make room or "
        "give --out on another disk"
    ]


def _fingerprint(
    arguments: EngineArguments,
    profile: EngineProfile,
    version: str,
    folder: Path,
    chunk_sizes: tuple[int, ...],
) -> str:
    """sha256 over what decides the graphs. Weights are no part of a graph, so their sizes will do."""
    document = {
        "arguments": arguments.model_dump(mode="json"),
        "chunk_sizes": chunk_sizes,
        "profile": profile.name,
        "compiler": version,
        "config": hashlib.sha256((folder / "config.json").read_bytes()).hexdigest(),
        "files": [(str(path.relative_to(folder)), path.stat().st_size) for path in own_files(folder)],
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
