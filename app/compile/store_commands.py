"""``neuronfleet artifacts pull``, ``gc`` and ``diff``."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from app.compile.commands import (
    AwsOption,
    BucketOption,
    JsonOption,
    artifacts,
    open_store,
    progress_to,
    shown_errors,
)

DigestArgument = Annotated[str, typer.Argument(help="The digest, or enough of its beginning.")]


@artifacts.command()
def pull(
    digest: DigestArgument,
    bucket: BucketOption,
    into: Annotated[Path, typer.Option(help="Folder that holds artifacts, each under its digest.")] = Path(
        "artifacts"
    ),
    aws: AwsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Bring an artifact here as a host does: in parallel, verified, resumed after a break."""
    from app.node.fetch import FetchSettings, fetch
    from app.node.store import S3Reader

    with shown_errors():
        store = open_store(bucket, aws)
        full = store.resolve(digest)
        reader = S3Reader(store.client, bucket)
        with progress_to("fetching") as show:
            folder = fetch(reader, full, into, settings=FetchSettings(), tell=show)
    if as_json:
        typer.echo(json.dumps({"digest": full, "folder": str(folder.resolve())}))
    else:
        Console().print(f"{folder} is whole and verified", highlight=False, soft_wrap=True)


@artifacts.command()
def diff(
    first: Annotated[str, typer.Argument(help="A digest (or enough of it), or an artifact's folder.")],
    second: Annotated[str, typer.Argument(help="What to compare it with.")],
    bucket: Annotated[str | None, typer.Option("--bucket", help="The store's bucket, for digests.")] = None,
    aws: AwsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show how two artifacts differ: fields, versions, files, and the bytes that a host would fetch anew."""
    from app.compile.compare import compare
    from app.compile.folder import ArtifactError, read_manifest
    from app.compile.manifest import Manifest

    def read(name: str) -> Manifest:
        if Path(name).is_dir():
            return read_manifest(Path(name))
        if bucket is None:
            raise ArtifactError(f"{name} is no folder; for an artifact of the store give its --bucket")
        store = open_store(bucket, aws)
        return store.read_manifest(store.resolve(name))

    with shown_errors():
        found = compare(read(first), read(second))
    if as_json:
        typer.echo(json.dumps(found.as_json()))
        return
    table = Table("what", "first", "second")
    for field, (one, two) in found.fields.items():
        table.add_row(field, _text(one), _text(two))
    for word, paths in (("added", found.added), ("removed", found.removed), ("changed", found.changed)):
        for path in paths:
            table.add_row(f"{path} {word}", "" if word == "added" else "•", "" if word == "removed" else "•")
    console = Console()
    if table.row_count:
        console.print(table)
    console.print(
        f"{found.shared_bytes / 1e6:,.1f} MB shared, {found.new_bytes / 1e6:,.1f} MB to fetch for the second",
        highlight=False,
    )


@artifacts.command()
def gc(
    bucket: BucketOption,
    delete: Annotated[bool, typer.Option("--delete", help="Remove; without it only show.")] = False,
    keep: Annotated[
        list[str] | None, typer.Option("--keep", help="A digest that must stay; may be given again.")
    ] = None,
    keep_file: Annotated[
        Path | None, typer.Option(help="File with digests that must stay, one a line; # begins a comment.")
    ] = None,
    older_than_days: Annotated[float, typer.Option(min=0, help="What was published later stays.")] = 7,
    aws: AwsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show, or with --delete remove, artifacts that no environment points at, and files of no artifact.

    An artifact stays if a stack of this account and region has it as its ArtifactDigest, if it is named by
    --keep or --keep-file, or if it was published lately. Another account's or region's stacks are not seen:
    name their artifacts.
    """
    from app.compile.collect import collect, in_use, plan_collection
    from app.operate.target import find_target

    removed = 0
    with shown_errors():
        names = [*(keep or []), *(_lines(keep_file) if keep_file else [])]
        store = open_store(bucket, aws)
        used = in_use(find_target(aws=aws).client("cloudformation"))
        plan = plan_collection(store, used, names, timedelta(days=older_than_days), datetime.now(UTC))
        if delete:
            removed = collect(store, plan)
    if as_json:
        document = {
            "deleted": delete,
            "artifacts": [item.digest for item in plan.artifacts],
            "blobs": len(plan.blobs),
            "bytes": removed if delete else plan.size,
            "kept": dict(plan.kept),
        }
        typer.echo(json.dumps(document))
        return
    table = Table("digest", "model", "published", "what becomes of it")
    fate = "[red]removed[/red]" if delete else "[yellow]may be removed[/yellow]"
    for item in plan.artifacts:
        when = item.published.strftime("%Y-%m-%d %H:%M")
        table.add_row(item.digest[:12], item.manifest.model, when, fate)
    for digest, reason in plan.kept.items():
        table.add_row(digest[:12], "", "", f"[green]kept[/green]: {reason}")
    console = Console()
    console.print(table)
    word = "removed" if delete else "may be removed; --delete does it"
    size = removed if delete else plan.size
    console.print(f"{len(plan.blobs)} files, {size / 1e6:,.1f} MB {word}", highlight=False)


def _lines(path: Path) -> list[str]:
    from app.compile.store import StoreError

    try:
        lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
    except OSError as error:
        raise StoreError(f"nothing is removed: {path} cannot be read ({error.strerror})") from error
    return [line for line in lines if line]


def _text(value: object) -> str:
    return "-" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)
