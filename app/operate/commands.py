"""``neuronfleet status`` and ``neuronfleet logs``."""

from __future__ import annotations

import json
import shlex
from typing import Annotated

import typer
from rich.console import Console

EnvOption = Annotated[
    str | None, typer.Option("--env", help="Environment; needed when several are deployed.")
]
AwsOption = Annotated[bool, typer.Option("--aws", help="Ask the AWS account even if a rehearsal runs here.")]


def _fail(message: str) -> typer.Exit:
    Console(stderr=True).print(f"[red]error:[/red] {message}", highlight=False)
    return typer.Exit(1)


def status(
    env: EnvOption = None,
    aws: AwsOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Show stacks, hosts, raylets with their NUMA nodes and cores, replicas, target health."""
    from app.operate.show import print_status
    from app.operate.status import choose_environment, read_status
    from app.operate.target import OperateError, find_target

    try:
        target = find_target(aws=aws)
        found = read_status(target, choose_environment(target, env))
    except OperateError as error:
        raise _fail(str(error)) from None
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
    else:
        print_status(Console(), found)


def logs(
    host: Annotated[str, typer.Argument(help="Instance id or private IP, as `neuronfleet status` shows it.")],
    env: EnvOption = None,
    aws: AwsOption = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many of the last lines.")] = 200,
    unit: Annotated[str, typer.Option(help="systemd unit, a pattern.")] = "neuronfleet-*",
    console: Annotated[
        bool, typer.Option("--console", help="The console output (works before boot ended).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Print a host's log (its units' journal, or its console)."""
    from app.operate.remote import run_on_hosts
    from app.operate.status import choose_environment, read_status
    from app.operate.target import OperateError, find_target

    try:
        target = find_target(aws=aws)
        hosts = read_status(target, choose_environment(target, env), ask_hosts=False).hosts
    except OperateError as error:
        raise _fail(str(error)) from None
    chosen = [item for item in hosts if host in (item.instance_id, item.private_ip)]
    if not chosen:
        there = ", ".join(f"{item.instance_id} ({item.private_ip})" for item in hosts) or "none"
        raise _fail(f"no host {host!r}; hosts: {there}")
    instance_id = chosen[0].instance_id
    if console:
        output = target.client("ec2").get_console_output(InstanceId=instance_id).get("Output", "")
        _print_log(instance_id, output.splitlines()[-lines:], as_json)
        return
    # Run Command cuts its output at 24,000 characters and keeps the first: cut here and keep the newest.
    command = f"journalctl --no-pager -o cat -n {lines} -u {shlex.quote(unit)} | tail -c 23000"
    result = run_on_hosts(target.client("ssm"), {instance_id: command})[instance_id]
    if result.error:
        raise _fail(f"{instance_id}: {result.error}. Its console: neuronfleet logs {host} --console")
    _print_log(instance_id, result.output.splitlines(), as_json)


def _print_log(instance_id: str, lines: list[str], as_json: bool) -> None:
    """The lines as they are, or one document in which structured lines are objects and others strings."""
    if not as_json:
        typer.echo("\n".join(lines))
        return
    typer.echo(json.dumps({"instance_id": instance_id, "lines": [_parsed(line) for line in lines]}, indent=2))


def _parsed(line: str) -> object:
    try:
        found = json.loads(line)
    except ValueError:
        return line
    return found if isinstance(found, dict) else line


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(status)
    app.command()(logs)
