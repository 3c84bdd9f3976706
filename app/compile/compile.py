"""Compile a model into an artifact's folder: check all, compile graph by graph, put it together, name it.

    model folder ──> work folder (state, graphs, logs, the compiler's cache; stays until it succeeds)
                 └─> out.part-… (the model's files, linked, and compiled/) ──rename──> out

The folder appears whole or not at all. A run that was broken off goes on with the graphs that have no result;
one that failed names each failed graph with its bucket and log, and is gone on with by ``retry_failed``.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import app
from app.compile.compile_request import COMPILED, Checked, own_files
from app.compile.compile_worker import Spec, Way
from app.compile.folder import Advance, build_manifest
from app.compile.graphs import NXD_FOLDER, Graph, GraphState, look, open_state, refresh
from app.compile.manifest import MANIFEST_NAME, Manifest
from app.compile.vllm_neuron import TARGET, TARGET_VARIABLE, compile_environment, forget_failures

LOG_NAME = "compile.log"
"""In the work folder: everything that libraries and compiler print."""
_CACHE, _SPEC, _LOCK, _COMPILED = "cache", "spec.json", ".lock", ".compiled"
_MODULE_OF = {"vllm": "vllm", "nxdi": "vllm", "transformers_neuronx": "transformers_neuronx"}
_POLL_S = 0.2
_TAIL_BYTES = 4096

Progress = Callable[[Graph, int, int], None]
"""Told a graph whose state changed, how many are compiled, and how many there are."""


class CompileFailed(Exception):
    """Graphs failed, or the libraries did; the message says which and where the logs are."""


@dataclass(frozen=True)
class Compiled:
    """A whole artifact folder."""

    folder: Path
    manifest: Manifest
    graphs: tuple[Graph, ...]


def compile_model(
    checked: Checked,
    *,
    retry_failed: bool = False,
    progress: Progress = lambda *_: None,
    advance: Advance | None = None,
) -> Compiled:
    """Compile into ``checked.request.out``.

    Args:
        checked: a request that passed :func:`app.compile.compile_request.check`.
        retry_failed: try graphs again that failed in an earlier run.
        progress: told of each graph.
        advance: told of bytes hashed for the manifest.

    Raises:
        CompileFailed: with every failed graph.
        GraphStateError: the work folder is of another compilation.
    """
    work = checked.request.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    with _locked(work) as lock:
        state = open_state(work, checked.fingerprint, checked.graphs)
        refresh(state, work)
        if failed := state.of("failed"):
            if not retry_failed:
                raise CompileFailed(_failure(state, work, "an earlier run ended with failed graphs") + _RETRY)
            _forget(failed, work)
            refresh(state, work)
        compiled = work / _COMPILED
        shutil.rmtree(compiled, ignore_errors=True)
        compiled.mkdir()
        for graph in state.of("compiled"):
            progress(graph, len(state.of("compiled")), len(state.graphs))
        _compile(checked, state, work, compiled, lock, retry_failed=retry_failed, progress=progress)
        manifest = _assemble(checked, compiled, advance)
    shutil.rmtree(work)
    return Compiled(checked.request.out, manifest, tuple(state.graphs))


_RETRY = "; --retry-failed tries them again"


def way_of(checked: Checked) -> Way:
    """Which code compiles: the profile's engine decides, and NxD Inference alone where there are no cores."""
    if checked.emulated:
        return "emulated"
    if checked.profile.engine == "transformers_neuronx":
        return "transformers_neuronx"
    return "nxdi" if checked.request.cross_compile else "vllm"


def _compile(
    checked: Checked,
    state: GraphState,
    work: Path,
    compiled: Path,
    lock: int,
    *,
    retry_failed: bool,
    progress: Progress,
) -> None:
    way = way_of(checked)
    spec = Spec(
        way=way,
        profile=checked.profile.name,
        arguments=checked.arguments,
        architecture=checked.model.architecture,
        layers=checked.model.layers,
        compiler=checked.compiler,
        graphs=tuple(state.graphs),
        work=work,
        compiled=compiled,
        tnx=checked.tnx,
        on_cpu=checked.request.cross_compile,
    )
    (work / _SPEC).write_text(spec.model_dump_json(indent=2) + "\n")
    with (work / LOG_NAME).open("ab") as log:
        process = subprocess.Popen(
            [_python(checked, way), "-m", "app.compile.compile_worker", str(work / _SPEC)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(checked, work, compiled, retry_failed=retry_failed),
            cwd=work,
            # Its compilers are its children: ended together.
            process_group=0,
            # The lock is held until the last that may write is gone.
            pass_fds=(lock,),
        )
        try:
            code = _follow(process, state, work, progress)
        finally:
            if process.poll() is None:
                _end_group(process)
    if code == 0 and not any(path.is_file() for path in compiled.rglob("*")):
        raise CompileFailed(f"the libraries ended well and left nothing in {compiled}; see {work / LOG_NAME}")
    if code != 0:
        raise CompileFailed(_failure(state, work, f"compilation ended with exit code {code}"))


def _follow(process: subprocess.Popen[bytes], state: GraphState, work: Path, progress: Progress) -> int:
    """Tell of graphs until the process ends; its exit code."""
    while True:
        try:
            code: int | None = process.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            code = None
        for graph in refresh(state, work):
            progress(graph, len(state.of("compiled")), len(state.graphs))
        if code is not None:
            return code


def _end_group(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, 15)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()


def _failure(state: GraphState, work: Path, what: str) -> str:
    failed, pending = state.of("failed"), state.of("pending")
    parts = [f"{what}: {len(state.of('compiled'))} of {len(state.graphs)} graphs are compiled"]
    parts += [f"failed: {graph.describe()}" for graph in failed]
    if not failed:
        parts += [f"not reached: {', '.join(graph.name for graph in pending) or 'none'}"]
        if tail := _tail(work / LOG_NAME):
            parts.append(f"last line: {tail}")
    parts.append(f"logs are in {work}")
    return "; ".join(parts)


def _tail(path: Path) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else ""


def _forget(failed: list[Graph], work: Path) -> None:
    """Take failed graphs back to the start: their logs are kept under another name."""
    for graph in failed:
        shown = look(work, graph).log
        if shown is not None:
            path = work / shown
            count = len(list(path.parent.glob(f"{path.name}.failed-*"))) + 1
            path.rename(path.with_name(f"{path.name}.failed-{count}"))
    if (work / _CACHE).is_dir():
        forget_failures(work / _CACHE)


def _python(checked: Checked, way: Way) -> str:
    """This interpreter if it has the engine's library, else the image's."""
    module = _MODULE_OF.get(way)
    if module is None or importlib.util.find_spec(module) is not None:
        return sys.executable
    python = f"{checked.profile.venv}/bin/python"
    if not os.access(python, os.X_OK):
        raise CompileFailed(
            f"neither this Python nor {python} has {module}: run on an image of profile "
            f"{checked.profile.name}"
        )
    return python


def _environment(checked: Checked, work: Path, compiled: Path, *, retry_failed: bool) -> dict[str, str]:
    found = dict(os.environ)
    places = [str(Path(place).parent) for place in app.__path__]
    found["PYTHONPATH"] = os.pathsep.join([*places, *filter(None, [found.get("PYTHONPATH")])])
    # The libraries start the compiler by its name.
    found["PATH"] = os.pathsep.join([str(Path(checked.compiler).parent), found.get("PATH", os.defpath)])
    if checked.profile.engine == "vllm":
        return found | compile_environment(
            checked.profile,
            checked.arguments,
            compiled=compiled,
            nxd=work / NXD_FOLDER,
            cache=work / _CACHE,
            retry_failed=retry_failed,
            cross_compile=checked.request.cross_compile,
        )
    if checked.request.cross_compile and not checked.emulated:
        found[TARGET_VARIABLE] = TARGET
    return found


def _assemble(checked: Checked, compiled: Path, advance: Advance | None) -> Manifest:
    """The model's files and the compiled ones in a new folder beside ``out``, its manifest, then the name."""
    out = checked.request.out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.part-", dir=out.parent) as part:
        folder = Path(part, out.name)
        for source in own_files(checked.model_dir):
            target = folder / source.relative_to(checked.model_dir)
            target.parent.mkdir(parents=True, exist_ok=True)
            _link(source.resolve(), target)
        shutil.copytree(compiled, folder / COMPILED)
        versions = {**checked.profile.versions}
        if checked.emulated:
            versions["neuronx-cc"] = checked.compiler_version
        manifest = build_manifest(
            folder,
            model=checked.name,
            profile=checked.profile.name,
            tp_degree=checked.arguments.tp_degree,
            batch_size=checked.arguments.batch_size,
            max_model_len=checked.arguments.max_model_len,
            dtype=checked.arguments.weights_dtype,
            buckets=checked.arguments.context_buckets,
            versions=versions,
            advance=advance,
        )
        (folder / MANIFEST_NAME).write_bytes(manifest.canonical_bytes())
        if out.exists():
            raise CompileFailed(f"{out} appeared meanwhile and is left as it is; give another --out")
        folder.rename(out)
    return manifest


def _link(source: Path, target: Path) -> None:
    """The same bytes without another copy, where the disk allows it."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


@contextmanager
def _locked(work: Path) -> Iterator[int]:
    """One run at a time; the kernel lets go when the process ends, however it ends."""
    with (work / _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CompileFailed(f"another run is compiling in {work}; wait for it, or give --work") from None
        yield file.fileno()
