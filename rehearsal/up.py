"""``make up``: deploy an environment onto this machine and stream an answer from it."""

from __future__ import annotations

import argparse
import os
import sys
import time

from rich.console import Console
from rich.table import Table

from app.operate.status import read_status
from app.operate.target import OperateError, find_target
from infra.settings import SettingsError, load_settings
from rehearsal import timeline
from rehearsal.answer import Answer, ask
from rehearsal.artifact import prepare_artifact, publish_artifact
from rehearsal.deploy import Cdk, ensure_bundle, import_certificate
from rehearsal.home import Home, default_home, require_free_port, start_daemon
from rehearsal.image import ensure_image
from rehearsal.interfaces import RehearsalError
from rehearsal.platform import image_variant
from rehearsal.steps import Steps


def main(argv: list[str] | None = None) -> int:
    """Run every step; exit code 1 with one reason when one fails, 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="python -m rehearsal.up", description=__doc__)
    parser.add_argument("--env", default="dev", help="environment to deploy (default: dev)")
    parser.add_argument(
        "-c",
        dest="context",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a setting, as `cdk deploy -c` does",
    )
    arguments = parser.parse_args(argv)
    console = Console()
    steps = Steps(console)
    context = dict(item.partition("=")[::2] for item in arguments.context)
    try:
        up(arguments.env, context, steps)
    except (RehearsalError, SettingsError, OperateError) as error:
        console.print(f"[red]error:[/red] {error}", highlight=False, soft_wrap=True)
        console.print("[dim]`make down` removes what was made; `make up` goes on from here[/dim]")
        return 1
    except KeyboardInterrupt:
        console.print("interrupted: `make up` goes on from here, `make down` removes what was made")
        return 130
    return 0


def up(environment: str, context: dict[str, str], steps: Steps) -> Answer:
    """Deploy ``environment`` and ask it something.

    Raises:
        RehearsalError: a step failed; the message has the reason and the log's place.
        SettingsError: the environment does not exist or its settings are wrong; names every mistake.
    """
    started = float(os.environ.get("NEURONFLEET_UP_STARTED") or time.time())
    settings = load_settings(environment, {"rehearsal": "true", **context})
    home = Home(default_home())
    require_free_port(home, 443 if settings.edge.https else 80)
    with steps.step("AWS API, metadata service and network"):
        state = start_daemon(home, progress=steps.say)
    with steps.step("Root image"):
        ensure_image(home.path, steps.say, image_variant(settings.fleet.image))
    with steps.step("Model artifact"):
        artifact = prepare_artifact(settings, steps.say)
    cdk = Cdk(home, state, environment)
    with steps.step("Host bundle"):
        ensure_bundle(settings.engine.profile, steps.say)
    with steps.step("cdk synth"):
        cdk.synth(steps.say, context)
    with steps.step("cdk bootstrap"):
        cdk.bootstrap(steps.say)
    with steps.step("cdk deploy: artifact store"):
        cdk.deploy(f"neuronfleet-{environment}-store", steps.say)
    with steps.step("Publish the artifact"):
        publish_artifact(artifact, environment, state, steps.say)
    deploy_started = time.time()
    with steps.step("cdk deploy: network, fleet, load balancer"):
        parameters = {"ArtifactDigest": artifact.digest}
        if settings.edge.https and settings.edge.certificate_arn is None:
            parameters["CertificateArn"] = import_certificate(home, state)
        cdk.deploy(f"neuronfleet-{environment}", steps.say, parameters)
    return _show_answer(environment, steps, timeline.Clock(started, deploy_started, time.time()))


def _show_answer(environment: str, steps: Steps, clock: timeline.Clock) -> Answer:
    console = steps.console
    authority = default_home() / "tls/authority.pem"
    status = read_status(find_target(), environment)
    console.print(f"\n[bold]> {timeline.QUESTION}[/bold]")
    try:
        answer = ask(
            status.url,
            show=lambda piece: console.print(piece, end="", highlight=False, markup=False),
            authority=authority,
        )
    except Exception as error:
        raise RehearsalError(
            f"{status.url} did not answer: {type(error).__name__}: {error}. See `neuronfleet status`"
        ) from error
    console.print("\n")
    if not answer.text.strip():
        raise RehearsalError(
            f"{status.url} streamed no text. See `.venv/bin/neuronfleet status --env {environment}`"
        )
    console.print(timeline.table(status, clock, answer))
    host = next((item.instance_id for item in status.hosts if item.target_health == "healthy"), "HOST")
    console.print(
        f"\n[bold cyan]{status.url}[/bold cyan]  OpenAI-compatible: base_url={status.url}/v1\n",
        highlight=False,
    )
    if status.url.startswith("https:"):
        console.print(f"[dim]its certificate is of the rehearsal's own authority: {authority}[/dim]\n")
    commands = Table.grid(padding=(0, 2))
    commands.add_row(f"[bold].venv/bin/neuronfleet status --env {environment}[/bold]", "[dim]all of it[/dim]")
    commands.add_row(
        f"[bold].venv/bin/neuronfleet logs {host} --env {environment}[/bold]", "[dim]a host's log[/dim]"
    )
    commands.add_row("[bold]make down[/bold]", "[dim]remove everything[/dim]")
    console.print(commands)
    return answer


if __name__ == "__main__":
    sys.exit(main())
