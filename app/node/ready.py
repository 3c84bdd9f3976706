"""Readiness: a token came out here, and the load balancer says so; then the stack gets its signal."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from botocore.exceptions import BotoCoreError, ClientError

from app.node.config import NodeConfig
from app.node.host import RAY_TOKEN_PATH
from app.node.ports import DASHBOARD_PORT

# A 70B model takes minutes from disk to HBM; the stack's CreationPolicy waits longer than this.
DEADLINE_S = 2700.0
REPORT_EVERY_S = 15.0

log = logging.getLogger(__name__)


class NotReadyError(Exception):
    """The host did not become ready in time; the message says which wait it was in and what it saw last."""


Probe = Callable[[], str | None]
"""None when what it asks for is so, else what it saw instead."""


def wait_for(what: str, probe: Probe, until: float, poll_s: float = 1.0) -> None:
    """Ask ``probe`` until it says None.

    Args:
        what: what is waited for, as log lines and the error say it.
        probe: the question.
        until: deadline on the monotonic clock, seconds.
        poll_s: pause between two questions, seconds.

    Raises:
        NotReadyError: the deadline passed.
    """
    started = time.monotonic()
    reported, last = started, ""
    while (seen := probe()) is not None:
        now = time.monotonic()
        if now > until:
            raise NotReadyError(f"no {what} after {now - started:.0f} s: {seen}")
        if seen != last or now - reported > REPORT_EVERY_S:
            log.info("waiting for %s", what, extra={"seen": seen, "seconds": round(now - started)})
            reported, last = now, seen
        time.sleep(poll_s)
    log.info("%s", what, extra={"seconds": round(time.monotonic() - started, 1)})


def http_probe(client: httpx.Client, url: str) -> Probe:
    """Does ``url`` answer 200? Else its status and what it said."""

    def probe() -> str | None:
        try:
            answer = client.get(url)
        except httpx.TimeoutException:
            return f"{url}: no answer yet"
        except httpx.HTTPError as error:
            return f"{url}: {type(error).__name__}"
        if answer.status_code == 200:
            return None
        return f"{url}: {answer.status_code} {' '.join(answer.text.split())[:200]}".strip()

    return probe


def target_probe(elbv2: Any, target_group_arn: str, instance_id: str) -> Probe:
    """Does the target group call this instance healthy? Else the state and its reason."""

    def probe() -> str | None:
        try:
            answer = elbv2.describe_target_health(TargetGroupArn=target_group_arn)
        except (ClientError, BotoCoreError) as error:
            return f"DescribeTargetHealth: {error}"
        for item in answer["TargetHealthDescriptions"]:
            if item["Target"]["Id"] == instance_id:
                health = item["TargetHealth"]
                if health["State"] == "healthy":
                    return None
                return " ".join(health[key] for key in ("State", "Reason", "Description") if health.get(key))
        return "this instance is not registered with the target group"

    return probe


def controller_probe(client: httpx.Client, token_path: Path = RAY_TOKEN_PATH) -> Probe:
    """Does this head's Serve controller run? Ray's dashboard on loopback tells."""
    url = f"http://127.0.0.1:{DASHBOARD_PORT}/api/serve/applications/"

    def probe() -> str | None:
        try:
            headers = {"authorization": f"Bearer {token_path.read_text().strip()}"}
            answer = client.get(url, headers=headers)
            if answer.status_code != 200:
                return f"{url}: {answer.status_code} {answer.text[:200]}"
            controller = answer.json().get("controller_info") or {}
        except (httpx.HTTPError, OSError, ValueError) as error:
            return f"{url}: {type(error).__name__}"
        return None if controller.get("actor_id") else "Ray runs, Serve's controller does not yet"

    return probe


def wait_until_ready(
    config: NodeConfig, instance_id: str, elbv2: Any, deadline_s: float = DEADLINE_S
) -> None:
    """Wait until this host does its work, as its role has it.

    Raises:
        NotReadyError: it does not within ``deadline_s`` seconds.
    """
    until = time.monotonic() + deadline_s
    with httpx.Client(timeout=5.0, trust_env=False) as client:
        if config.role == "head":
            wait_for("a Serve controller", controller_probe(client), until)
            return
        url = f"http://127.0.0.1:{config.serve.http_port}/readyz"
        wait_for("a token from this host's replicas (/readyz)", http_probe(client, url), until)
    if config.target_group_arn is not None:
        probe = target_probe(elbv2, config.target_group_arn, instance_id)
        wait_for("a healthy target in the load balancer", probe, until, poll_s=2.0)
