"""``neuronfleet-node``: the boot steps of a host, one command each; systemd units call them.

A step that fails ends with exit code 1 and its reason as its last log line, which
``neuronfleet-failed@`` reports.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from app.node.config import NODE_CONFIG_PATH, NodeConfig, load_node_config
from app.node.log import set_up_logging

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
log = logging.getLogger("app.node")


class _BadConfig(Exception):
    """The node config cannot be read."""


def _config() -> NodeConfig:
    try:
        return load_node_config()
    except (OSError, ValueError, ValidationError) as error:
        reason = (
            "; ".join(
                f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']} (found {item['input']!r})"
                for item in error.errors()
            )
            if isinstance(error, ValidationError)
            else str(error)
        )
        raise _BadConfig(f"node config {NODE_CONFIG_PATH} cannot be used: {reason}") from error


def _instance_id() -> str:
    """From host.env where configure has written it, else from the metadata service."""
    from app.node.host import read_identity

    return os.environ.get("NEURONFLEET_INSTANCE_ID") or read_identity(deadline_s=30).instance_id


@contextmanager
def _step(name: str, *expected: type[Exception]) -> Iterator[None]:
    """Log begin and end; an expected failure is one line with its reason, any other keeps its traceback."""
    set_up_logging()
    started = time.monotonic()
    log.info("%s begins", name)
    try:
        yield
    except typer.Exit:
        raise
    except Exception as error:
        if isinstance(error, (*expected, _BadConfig)):
            log.error("%s failed: %s", name, error)
        else:
            log.exception("%s failed", name)
        raise typer.Exit(1) from error
    log.info("%s is done", name, extra={"seconds": round(time.monotonic() - started, 1)})


@app.command()
def configure() -> None:
    """Plan the host, render its units and start neuronfleet.target."""
    from app.node.configure import configure as run
    from app.node.host import MetadataError, read_identity
    from app.node.topology import TopologyError, read_host

    with _step("configure", MetadataError, TopologyError):
        config = _config()
        identity = read_identity()
        # What the units' environment says to the steps is not yet written; log lines name the host already.
        os.environ |= {
            "NEURONFLEET_INSTANCE_ID": identity.instance_id,
            "NEURONFLEET_ENVIRONMENT": config.environment,
        }
        set_up_logging()
        run(config, identity, read_host(Path("/"), instance_type=identity.instance_type))


@app.command("install-units")
def install_units(root: Annotated[Path, typer.Option(help="Folder in place of /.")] = Path("/")) -> None:
    """Write the units that outlast a boot (configure and the failure handler)."""
    from app.node.configure import install_units as run

    for path in run(root):
        print(path)


@app.command()
def preflight() -> None:
    """Check the host against its engine profile and its artifact's manifest; name every fault."""
    from app.compile.manifest import Manifest
    from app.node.fetch import FetchError, read_manifest
    from app.node.preflight import PreflightError, faults
    from app.node.store import S3Reader, s3_client
    from app.node.topology import TopologyError, load_plan

    with _step("preflight", PreflightError, TopologyError):
        config = _config()

        def manifest() -> Manifest:
            reader = S3Reader(s3_client(config.region, 2), config.artifact.bucket)
            return read_manifest(reader, config.artifact.digest)

        found = faults(
            config,
            load_plan(),
            instance_type=os.environ.get("NEURONFLEET_INSTANCE_TYPE"),
            read_manifest=manifest,
            manifest_errors=(FetchError,),
        )
        if found:
            raise PreflightError(f"{len(found)} fault{'s' if len(found) > 1 else ''}: " + "; ".join(found))


@app.command()
def fetch() -> None:
    """Fetch the artifact that the node config names, verified and whole."""
    from app.node.fetch import FetchError, FetchSettings
    from app.node.fetch import fetch as run
    from app.node.host import ARTIFACTS_DIR
    from app.node.match import host_facts, mismatches
    from app.node.progress import PROGRESS_PATH
    from app.node.store import S3Reader, s3_client

    with _step("fetch", FetchError):
        config = _config()
        settings = FetchSettings(progress_path=PROGRESS_PATH)
        reader = S3Reader(s3_client(config.region, settings.workers), config.artifact.bucket)
        instance_type = os.environ.get("NEURONFLEET_INSTANCE_TYPE")
        run(
            reader,
            config.artifact.digest,
            ARTIFACTS_DIR,
            check=lambda manifest: mismatches(manifest, config, instance_type, host_facts()),
            settings=settings,
        )


@app.command("ray-token")
def ray_token() -> None:
    """Write Ray's authentication token: made here in a cell, from Secrets Manager in a cluster."""
    from app.node.aws import client
    from app.node.ray_setup import RaySetupError, write_token

    with _step("ray-token", RaySetupError):
        config = _config()
        write_token(config, lambda: client("secretsmanager", config.region))


@app.command("await-head")
def await_head() -> None:
    """Wait for the address of the cluster's head, and write it for the raylets' units."""
    from app.node.aws import client
    from app.node.host import HEAD_ENV_PATH
    from app.node.ray_setup import RaySetupError
    from app.node.ray_setup import await_head as run

    with _step("await-head", RaySetupError):
        config = _config()
        run(config, client("ssm", config.region), HEAD_ENV_PATH)


@app.command("publish-head")
def publish_head() -> None:
    """Write this head's address to the SSM parameter that workers poll."""
    from app.node.aws import client
    from app.node.ray_setup import RaySetupError
    from app.node.ray_setup import publish_head as run

    with _step("publish-head", RaySetupError):
        config = _config()
        run(config, os.environ["NODE_IP_ADDRESS"], client("ssm", config.region))


@app.command()
def ready() -> None:
    """Wait until this host serves and the load balancer says so, then signal the stack."""
    from app.node.aws import client
    from app.node.ready import NotReadyError, wait_until_ready
    from app.node.report import signal_stack

    with _step("ready", NotReadyError):
        config = _config()
        instance_id = _instance_id()
        wait_until_ready(config, instance_id, client("elbv2", config.region))
        signal_stack(client("cloudformation", config.region), config, instance_id, "SUCCESS")


@app.command()
def fail(unit: Annotated[str, typer.Argument(help="The unit that failed.")]) -> None:
    """Report that a unit failed: FAILURE signal, Unhealthy mark, console. OnFailure= calls it."""
    from app.node.aws import client
    from app.node.host import MetadataError
    from app.node.report import last_message, not_to_report, report_failure, write_console

    with _step("fail", MetadataError):
        why_not = not_to_report(unit)
        if why_not:
            log.info("nothing to report of %s: %s", unit, why_not)
            return
        reason = last_message(unit)
        try:
            config = _config()
            instance_id = _instance_id()
        except Exception:
            # Without them nobody can be signalled; the console still says why.
            write_console(f"neuronfleet-failed: {unit}: {reason}")
            raise
        log.error("%s failed: %s", unit, reason)
        undelivered = report_failure(
            config,
            instance_id,
            unit,
            reason,
            cloudformation=client("cloudformation", config.region),
            autoscaling=client("autoscaling", config.region),
        )
        for line in undelivered:
            log.error("not delivered: %s", line)
        if undelivered:
            raise typer.Exit(1)


@app.command()
def status() -> None:
    """Print what this host says of itself, as one JSON document."""
    from app.node.status import host_status

    try:
        print(json.dumps(host_status()))
    except (OSError, ValueError) as error:
        print(f"this host has no status to give: {error}", file=sys.stderr)
        raise typer.Exit(1) from error


def main() -> None:
    """Entry point of the ``neuronfleet-node`` script."""
    app(prog_name="neuronfleet-node")


if __name__ == "__main__":
    main()
