"""``neuronfleet artifacts``: publish a model's folder to the artifact store, list, show and verify.

What it does to whole artifacts (pull, gc, diff) is in ``app.compile.store_commands``.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

if TYPE_CHECKING:
    from app.compile.folder import Advance
    from app.compile.manifest import Manifest
    from app.compile.store import ArtifactStore, StoredArtifact

artifacts = typer.Typer(
    no_args_is_help=True, help="Model artifacts: publish, fetch, list, compare, verify, remove."
)

BucketOption = Annotated[
    str, typer.Option("--bucket", help="The store's bucket: output ArtifactBucketName of its stack.")
]
AwsOption = Annotated[bool, typer.Option("--aws", help="Ask the AWS account even if a rehearsal runs here.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
FolderArgument = Annotated[Path, typer.Argument(help="The artifact's folder.")]


def register(app: typer.Typer) -> None:
    """Add the ``artifacts`` group to the command line."""
    # It adds its commands to the group.
    importlib.import_module("app.compile.store_commands")

    app.add_typer(artifacts, name="artifacts")


@contextmanager
def shown_errors() -> Iterator[None]:
    from app.compile.folder import ArtifactError
    from app.compile.store import StoreError
    from app.node.fetch import FetchError
    from app.operate.target import OperateError
    from app.plan.catalogue import UnknownNameError

    try:
        yield
    except (ArtifactError, StoreError, FetchError, OperateError, UnknownNameError) as error:
        Console(stderr=True).print(f"[red]error:[/red] {error}", highlight=False)
        raise typer.Exit(1) from None


@contextmanager
def _progress(what: str, total: int) -> Iterator[Advance]:
    """A bar on standard error, so that standard output stays the answer's."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


@contextmanager
def progress_to(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error for work that tells how many bytes are done, and how many there are."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def open_store(bucket: str, aws: bool) -> ArtifactStore:
    """The store in the rehearsal if it runs here, else in the shell's AWS account."""
    import boto3
    from botocore.config import Config

    from app.compile.store import ArtifactStore
    from app.operate.target import find_target

    target = find_target(aws=aws)
    if target.endpoint_url is None:
        return ArtifactStore(target.client("s3"), bucket)
    make: Any = boto3.client
    client = make(
        "s3",
        region_name=target.region,
        endpoint_url=target.endpoint_url,
        aws_access_key_id="rehearsal",
        aws_secret_access_key="rehearsal",
        # The endpoint is a name of this machine, under which no bucket has one of its own.
        config=Config(s3={"addressing_style": "path"}, retries={"max_attempts": 5, "mode": "standard"}),
    )
    return ArtifactStore(client, bucket)


def _size_of(folder: Path) -> int:
    from app.compile.folder import artifact_paths

    return sum((folder / path).stat().st_size for path in artifact_paths(folder))


def _summary(digest: str, manifest: Manifest) -> dict[str, Any]:
    return {
        "digest": digest,
        **manifest.model_dump(mode="json", exclude={"files", "version"}),
        "files": len(manifest.files),
        "bytes": sum(file.size for file in manifest.files),
    }


@artifacts.command()
def push(
    folder: FolderArgument,
    bucket: BucketOption,
    model: Annotated[str | None, typer.Option(help="The model's name, as clients will say it.")] = None,
    profile: Annotated[str | None, typer.Option(help="Engine profile that it was made with.")] = None,
    tp_degree: Annotated[int, typer.Option(min=1, help="Cores of one replica.")] = 2,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences that the graphs hold.")] = 4,
    max_model_len: Annotated[int, typer.Option(min=1, help="Tokens of prompt and answer.")] = 2048,
    dtype: Annotated[str, typer.Option(help="Weights: bf16 or int8.")] = "bf16",
    aws: AwsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Publish a folder: files first, manifest last; what the store holds already is not sent again.

    A folder with a manifest.json (as a compilation leaves it) is verified against it; for a plain model
    folder give --model and --profile, and the manifest is made from the options.
    """
    from app.compile.folder import ArtifactError, build_manifest, folder_faults, read_manifest
    from app.compile.manifest import MANIFEST_NAME

    with shown_errors():
        store = open_store(bucket, aws)
        size = _size_of(folder)
        if (folder / MANIFEST_NAME).exists():
            if model or profile:
                raise ArtifactError(
                    f"{folder} has a {MANIFEST_NAME}, which says what it is: leave --model and --profile out"
                )
            manifest = read_manifest(folder)
            with _progress("verifying", size) as advance:
                faults = folder_faults(folder, manifest, advance)
            if faults:
                raise ArtifactError(f"{folder} is not what its manifest says: " + "; ".join(faults))
        elif model is None or profile is None:
            raise ArtifactError(f"{folder} has no {MANIFEST_NAME}: say what it is with --model and --profile")
        else:
            with _progress("hashing", size) as advance:
                manifest = build_manifest(
                    folder,
                    model=model,
                    profile=profile,
                    tp_degree=tp_degree,
                    batch_size=batch_size,
                    max_model_len=max_model_len,
                    dtype=dtype,
                    advance=advance,
                )
        with _progress("publishing", size) as advance:
            done = store.publish(folder, manifest, advance)
    if as_json:
        sent = {"sent_files": done.sent_files, "sent_bytes": done.sent_bytes, "held_files": done.held_files}
        typer.echo(json.dumps(_summary(done.digest, manifest) | sent))
        return
    Console().print(
        f"published [bold]{manifest.model}[/bold] for profile {manifest.profile}: {done.sent_files} files "
        f"sent ({done.sent_bytes / 1e6:,.1f} MB), {done.held_files} were there\n"
        f"ArtifactDigest: [bold]{done.digest}[/bold]",
        highlight=False,
        soft_wrap=True,
    )


@artifacts.command()
def verify(folder: FolderArgument, as_json: JsonOption = False) -> None:
    """Check a folder against its manifest.json; exit code 1 if a file is missing, too many or different."""
    from app.compile.folder import ArtifactError, folder_faults, read_manifest

    manifest, faults = None, []
    try:
        manifest = read_manifest(folder)
        with _progress("verifying", sum(file.size for file in manifest.files)) as advance:
            faults = folder_faults(folder, manifest, advance)
    except ArtifactError as error:
        faults = [str(error)]
    digest = manifest.digest() if manifest else None
    if as_json:
        typer.echo(json.dumps({"verified": not faults, "digest": digest, "faults": faults}))
    elif faults:
        console = Console(stderr=True)
        for fault in faults:
            console.print(f"[red]error:[/red] {fault}", highlight=False, soft_wrap=True)
    elif manifest:
        Console().print(
            f"{len(manifest.files)} files verified, digest {digest}", highlight=False, soft_wrap=True
        )
    if faults:
        raise typer.Exit(1)


@artifacts.command("list")
def list_artifacts(bucket: BucketOption, aws: AwsOption = False, as_json: JsonOption = False) -> None:
    """List what the store holds, newest first."""
    with shown_errors():
        found = open_store(bucket, aws).artifacts()
    if as_json:
        rows = [
            _summary(item.digest, item.manifest) | {"published": item.published.isoformat()} for item in found
        ]
        typer.echo(json.dumps({"artifacts": rows}))
    elif not found:
        Console().print(f"bucket {bucket} holds no artifact; `neuronfleet artifacts push` puts one there")
    else:
        Console().print(_table(found))


@artifacts.command()
def show(
    digest: Annotated[str, typer.Argument(help="The digest, or enough of its beginning.")],
    bucket: BucketOption,
    aws: AwsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show one artifact's manifest with its files."""
    with shown_errors():
        store = open_store(bucket, aws)
        full = store.resolve(digest)
        manifest = store.read_manifest(full)
    if as_json:
        typer.echo(json.dumps({"digest": full, **manifest.model_dump(mode="json")}))
        return
    console = Console()
    facts = Table("field", "value", title=full)
    for key, value in _summary(full, manifest).items():
        text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
        facts.add_row(key, text)
    files = Table("path", "bytes", "sha256")
    for file in manifest.files:
        files.add_row(file.path, f"{file.size:,}", file.sha256[:16])
    console.print(facts, files)


def _table(found: list[StoredArtifact]) -> Table:
    table = Table()
    table.add_column("digest", no_wrap=True, min_width=12)
    for title in ("model", "profile", "tp", "batch", "length", "dtype", "MB", "published"):
        table.add_column(title)
    for item in found:
        manifest = item.manifest
        table.add_row(
            item.digest[:12],
            manifest.model,
            manifest.profile,
            str(manifest.tp_degree),
            str(manifest.batch_size),
            str(manifest.max_model_len),
            manifest.dtype,
            f"{item.size / 1e6:,.0f}",
            item.published.strftime("%Y-%m-%d %H:%M"),
        )
    return table
