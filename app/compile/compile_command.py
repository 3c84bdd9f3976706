"""``neuronfleet compile``: a model's folder into an artifact, ahead of time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from app.compile.compile import Compiled
    from app.compile.compile_request import Checked
    from app.compile.graphs import Graph


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("compile")(compile_command)


def compile_command(
    model: Annotated[str, typer.Option(help="Folder of a model in Hugging Face's format.")],
    tp_degree: Annotated[int, typer.Option(help="NeuronCores of one replica.")],
    batch_size: Annotated[int, typer.Option(help="Sequences that the graphs hold.")],
    max_model_len: Annotated[int, typer.Option(help="Tokens of prompt and answer.")],
    out: Annotated[Path, typer.Option(help="The artifact's folder; must not exist.")],
    profile: Annotated[str, typer.Option(help="Engine profile to compile for.")] = "vllm-neuron-2.28",
    name: Annotated[str, typer.Option(help="The model's name, as clients will say it.")] = "",
    buckets: Annotated[
        str, typer.Option(help="Prompt buckets, comma list ending with the model length.")
    ] = "",
    token_buckets: Annotated[str, typer.Option(help="Decode buckets; left out: the prompt buckets.")] = "",
    chunk_sizes: Annotated[str, typer.Option(help="Prefill chunks (transformers-neuronx only).")] = "",
    dtype: Annotated[str, typer.Option(help="Weights: bf16 or int8.")] = "bf16",
    work: Annotated[Path | None, typer.Option(help="Work folder; left out: OUT.work.")] = None,
    cross_compile: Annotated[
        bool, typer.Option("--cross-compile", help="For Inf2, on a machine without NeuronCores.")
    ] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Try failed graphs again.")] = False,
    check_only: Annotated[bool, typer.Option("--check", help="Only say whether it may start.")] = False,
    publish: Annotated[str | None, typer.Option(help="Publish to this bucket when it is whole.")] = None,
    aws: Annotated[bool, typer.Option("--aws", help="Publish to AWS even if a rehearsal runs here.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Compile a model for Inf2. Exit 0: the artifact is whole; 1: it failed; 2: it may not start.

    Run again after a break, it goes on with the graphs that are missing.
    """
    from rich.console import Console

    from app.compile.compile import CompileFailed
    from app.compile.compile_request import CompileRefused, CompileRequest, check
    from app.compile.folder import ArtifactError
    from app.compile.graphs import GraphStateError

    shown = Console(stderr=True)
    faults: list[str] = []
    lists = {
        option: _lengths(option, text, faults)
        for option, text in (
            ("--buckets", buckets),
            ("--token-buckets", token_buckets),
            ("--chunk-sizes", chunk_sizes),
        )
    }
    if dtype not in ("bf16", "int8"):
        faults.append(f"--dtype {dtype!r} must be bf16 or int8")
    request = CompileRequest(
        model=model,
        profile=profile,
        tp_degree=tp_degree,
        batch_size=batch_size,
        max_model_len=max_model_len,
        out=out,
        work=work or out.with_name(f"{out.name}.work"),
        name=name,
        context_buckets=lists["--buckets"],
        token_buckets=lists["--token-buckets"],
        chunk_sizes=lists["--chunk-sizes"],
        dtype="int8" if dtype == "int8" else "bf16",
        cross_compile=cross_compile,
    )
    checked: Checked | None = None
    try:
        checked = check(request)
    except CompileRefused as error:
        faults += error.reasons
    if faults or checked is None:
        _refuse(shown, faults, as_json=as_json)
        raise typer.Exit(2)
    for warning in checked.warnings:
        shown.print(f"[yellow]warning:[/yellow] {warning}", highlight=False)
    if checked.emulated:
        shown.print("[yellow]emulated:[/yellow] no NeuronCore can run what this makes", highlight=False)
    if check_only:
        if as_json:
            typer.echo(json.dumps({"may_start": True, "graphs": [g.model_dump() for g in checked.graphs]}))
        else:
            Console().print(f"{len(checked.graphs)} graphs, may start", highlight=False)
        return
    try:
        result = _run(checked, retry_failed=retry_failed, console=shown)
        digest = result.manifest.digest()
        if publish is not None:
            _publish(result, publish, aws=aws)
    except (CompileFailed, GraphStateError, ArtifactError) as error:
        shown.print(f"[red]error:[/red] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(_document(result, publish)))
        return
    where = f", published to {publish}" if publish else ""
    Console().print(
        f"{result.folder}: {len(result.graphs)} graphs{where}\nArtifactDigest: [bold]{digest}[/bold]",
        highlight=False,
        soft_wrap=True,
    )


def _run(checked: Checked, *, retry_failed: bool, console: Any) -> Compiled:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from app.compile.compile import compile_model

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("compiling", total=len(checked.graphs))

        def tell(graph: Graph, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)
            colour = {"compiled": "green", "failed": "red"}.get(graph.status, "yellow")
            bar.console.print(f"[{colour}]{graph.status}[/{colour}] {graph.describe()}", highlight=False)

        return compile_model(checked, retry_failed=retry_failed, progress=tell)


def _publish(result: Compiled, bucket: str, *, aws: bool) -> None:
    from app.compile.commands import open_store, shown_errors

    with shown_errors():
        open_store(bucket, aws).publish(result.folder, result.manifest)


def _document(result: Compiled, published: str | None) -> dict[str, Any]:
    return {
        "digest": result.manifest.digest(),
        "folder": str(result.folder.resolve()),
        "published": published,
        "graphs": [graph.model_dump() for graph in result.graphs],
        **result.manifest.model_dump(mode="json", exclude={"files", "version"}),
        "files": len(result.manifest.files),
        "bytes": sum(file.size for file in result.manifest.files),
    }


def _refuse(console: Any, reasons: list[str], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"may_start": False, "reasons": reasons}))
    for reason in reasons:
        console.print(f"[red]refused:[/red] {reason}", highlight=False, soft_wrap=True)


def _lengths(option: str, text: str, faults: list[str]) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if any(not part.isascii() or not part.isdigit() for part in parts):
        faults.append(f"{option} {text!r} must be whole numbers with commas between, such as 512,2048")
        return ()
    return tuple(int(part) for part in parts)
