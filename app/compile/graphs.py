"""The graphs of one compilation: their names, where compiler and library leave each, and what became of it.

Static graphs are one for each kind and bucket. Each has a folder below the work folder with the compiler's
log and result; their states are kept in one file there, so that a run that was broken off goes on, and one
that failed says which graph of which bucket.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

STATE_NAME = "graphs.json"
NXD_FOLDER = "nxd"
"""Below the work folder: what NxD Inference is told to use (BASE_COMPILE_WORK_DIR)."""
CONTEXT_TAG, TOKEN_TAG = "context_encoding_model", "token_generation_model"
"""NxD Inference's names of its two submodels; each bucket's graph is in ``<tag>/_tp0_bk<rank>``."""

Status = Literal["pending", "compiled", "failed"]
Kind = Literal["context", "token", "speculation"]
_STATUS_LINE = re.compile(r"Compiler status (\w+)")
_ERROR_LINE = re.compile(r"\[NCC_\w+\]|\bERROR\b|\bError\b")
_TNX_KIND = re.compile(r"(context|token|speculation)-(?:k\d+-)?seqlen(\d+)-")


class GraphStateError(Exception):
    """The work folder's state cannot be gone on with; the message says why and what to do."""


class Graph(BaseModel):
    """One graph. ``bucket`` in tokens; ``log`` is the compiler's own log, relative to the work folder;
    ``error`` is its last line that tells of one."""

    model_config = ConfigDict(extra="forbid")

    name: str
    kind: Kind
    bucket: int
    status: Status = "pending"
    log: str | None = None
    error: str | None = None

    def describe(self) -> str:
        """Name, bucket, and where it failed."""
        said = f": {self.error}" if self.error else ""
        return f"{self.name} ({self.kind} bucket {self.bucket}){said}" + (
            f" [{self.log}]" if self.log else ""
        )


class GraphState(BaseModel):
    """What a work folder holds. ``fingerprint`` names what is compiled: another one's graphs do not count."""

    model_config = ConfigDict(extra="forbid")

    version: Literal[1] = 1
    fingerprint: str
    graphs: list[Graph] = Field(min_length=1)

    def of(self, status: Status) -> list[Graph]:
        """The graphs in that state."""
        return [graph for graph in self.graphs if graph.status == status]

    def save(self, work: Path) -> None:
        """Replace the file at once: a reader never sees half of it."""
        part = work / f".{STATE_NAME}.part"
        part.write_text(self.model_dump_json(indent=2) + "\n")
        part.replace(work / STATE_NAME)


def nxd_graphs(context_buckets: Sequence[int], token_buckets: Sequence[int]) -> list[Graph]:
    """Graphs of NxD Inference, named as its work folders: the rank is the bucket's place in the list."""
    submodels: tuple[tuple[str, Kind, Sequence[int]], ...] = (
        (CONTEXT_TAG, "context", context_buckets),
        (TOKEN_TAG, "token", token_buckets),
    )
    return [
        Graph(name=f"{tag}/_tp0_bk{rank}", kind=kind, bucket=bucket)
        for tag, kind, buckets in submodels
        for rank, bucket in enumerate(buckets)
    ]


def tnx_graphs(names: Iterable[str]) -> list[Graph]:
    """Graphs of transformers-neuronx from its tags."""
    found = []
    for name in names:
        match = _TNX_KIND.match(name)
        if match is None:
            raise ValueError(f"graph tag {name!r} is none that transformers-neuronx gives")
        found.append(Graph.model_validate({"name": name, "kind": match[1], "bucket": int(match[2])}))
    return found


def graph_folder(work: Path, graph: Graph) -> Path | None:
    """Where compiler and library put this graph, once they do: below NxD Inference's work folder whatever
    it adds to the path, or in a folder whose name begins with transformers-neuronx's tag."""
    if "/" in graph.name:
        nxd = work / NXD_FOLDER
        found = sorted(nxd.glob(f"**/{graph.name}")) if nxd.is_dir() else []
    else:
        found = sorted(work.glob(f"{graph.name}-*"))
    return found[0] if found else None


def look(work: Path, graph: Graph) -> Graph:
    """The graph as its folder shows it now: a result that is not empty counts, then the log's verdict."""
    folder = graph_folder(work, graph)
    if folder is None:
        return graph.model_copy(update={"status": "pending", "log": None, "error": None})
    logs = sorted(path for path in folder.glob("*") if path.suffix in (".txt", ".log"))
    shown = str(logs[0].relative_to(work)) if logs else None
    if any(path.stat().st_size > 0 for path in folder.glob("*.neff")):
        return graph.model_copy(update={"status": "compiled", "log": shown, "error": None})
    status, error = read_log(logs[0]) if logs else (None, None)
    if status is not None and status != "PASS":
        return graph.model_copy(update={"status": "failed", "log": shown, "error": error})
    return graph.model_copy(update={"status": "pending", "log": shown, "error": None})


def read_log(path: Path) -> tuple[str | None, str | None]:
    """The compiler's verdict (``PASS``, ``ERROR`` …; None: it has not ended) and its last line of error."""
    verdict = error = None
    with path.open(errors="replace") as lines:
        for line in lines:
            if found := _STATUS_LINE.search(line):
                verdict = found[1]
            elif _ERROR_LINE.search(line):
                error = line.strip()[:300]
    return verdict, error


def refresh(state: GraphState, work: Path) -> list[Graph]:
    """Look at every graph again and save; the graphs whose state changed."""
    now = [look(work, graph) for graph in state.graphs]
    changed = [new for new, old in zip(now, state.graphs, strict=True) if new.status != old.status]
    if now != state.graphs:
        state.graphs = now
        state.save(work)
    return changed


def open_state(work: Path, fingerprint: str, graphs: Sequence[Graph]) -> GraphState:
    """The work folder's state, or a new one.

    Raises:
        GraphStateError: the folder belongs to another compilation, or its state cannot be read.
    """
    path = work / STATE_NAME
    if not path.exists():
        strangers = [item.name for item in work.iterdir() if not item.name.startswith(".")]
        if strangers:
            raise GraphStateError(
                f"work folder {work} holds {', '.join(sorted(strangers)[:5])} and no {STATE_NAME}: it is not "
                "of a compilation; give another with --work"
            )
        state = GraphState(fingerprint=fingerprint, graphs=list(graphs))
        state.save(work)
        return state
    try:
        state = GraphState.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise GraphStateError(
            f"{path} cannot be read ({error.error_count()} faults): remove {work}"
        ) from error
    if state.fingerprint != fingerprint or [g.name for g in state.graphs] != [g.name for g in graphs]:
        raise GraphStateError(
            f"work folder {work} is of another model, compiler or set of options, whose graphs would not "
            "match: remove it, or give another with --work"
        )
    return state
