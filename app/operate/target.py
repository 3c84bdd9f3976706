"""Which AWS an operator's command speaks to: the account of the shell, or the rehearsal on this machine."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

REHEARSAL_HOME = Path("/var/lib/neuronfleet-rehearsal")


class OperateError(Exception):
    """A command cannot do its work; the message says why and what to do next."""


@dataclass(frozen=True)
class Target:
    """Where to find an environment. ``endpoint_url`` is set for the rehearsal only."""

    region: str
    endpoint_url: str | None

    @property
    def is_rehearsal(self) -> bool:
        return self.endpoint_url is not None

    def client(self, service: str) -> Any:
        """A boto3 client of ``service`` there."""
        options: dict[str, Any] = {"region_name": self.region}
        if self.endpoint_url:
            # The rehearsal's API checks no signature; no credentials of the user's shell are sent to it.
            options |= {
                "endpoint_url": self.endpoint_url,
                "aws_access_key_id": "rehearsal",
                "aws_secret_access_key": "rehearsal",
            }
        make: Any = boto3.client
        return make(service, config=Config(retries={"max_attempts": 5, "mode": "standard"}), **options)


def rehearsal_state(home: Path | None = None) -> dict[str, Any] | None:
    """What the running rehearsal daemon says of itself, or None when none runs."""
    home = home or Path(os.environ.get("NEURONFLEET_REHEARSAL_HOME", str(REHEARSAL_HOME)))
    try:
        state: dict[str, Any] = json.loads((home / "state.json").read_text())
        os.kill(int(state["pid"]), 0)
    except (FileNotFoundError, ProcessLookupError, json.JSONDecodeError, KeyError):
        return None
    except PermissionError:
        pass
    return state


def ask_rehearsal(op: str, home: Path | None = None, timeout_s: float = 10.0) -> Any:
    """Ask the rehearsal's daemon over its control socket: one JSON line there, one back.

    Raises:
        OperateError: no daemon answers, or it refused.
    """
    home = home or Path(os.environ.get("NEURONFLEET_REHEARSAL_HOME", str(REHEARSAL_HOME)))
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(home / "control.sock"))
            connection.sendall(json.dumps({"op": op}).encode() + b"\n")
            answer = json.loads(connection.makefile("rb").readline())
    except (OSError, json.JSONDecodeError) as error:
        raise OperateError(
            f"the rehearsal in {home} does not answer ({error}): run `make up` again"
        ) from None
    if not answer["ok"]:
        raise OperateError(f"the rehearsal refused {op}: {answer['error']}")
    return answer["result"]


def find_target(*, aws: bool = False) -> Target:
    """The rehearsal when it runs on this machine, else the AWS account of the shell.

    Args:
        aws: the account of the shell even when a rehearsal runs here.

    Raises:
        OperateError: no rehearsal runs and the shell names no region.
    """
    state = None if aws else rehearsal_state()
    if state:
        return Target(region=state["region"], endpoint_url=state["api_endpoint"])
    region = boto3.Session().region_name
    if not region:
        raise OperateError(
            "no rehearsal runs on this machine and no AWS region is set: run `make up`, or set AWS_REGION "
            "and credentials for the account that holds the environment"
        )
    return Target(region=region, endpoint_url=None)
