"""What Ray needs before its raylets start: the authentication token, and the address of the head."""

from __future__ import annotations

import logging
import os
import pwd
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from app.node.config import NodeConfig
from app.node.host import RAY_TOKEN_PATH, SERVICE_USER, head_environment, write_atomically
from app.node.ports import GCS_PORT

HEAD_DEADLINE_S = 1800.0
_POLL_S = 2.0

log = logging.getLogger(__name__)


class RaySetupError(Exception):
    """The token or the head's address cannot be had; the message says what to look at."""


def write_token(config: NodeConfig, secrets_manager: Callable[[], Any], path: Path = RAY_TOKEN_PATH) -> None:
    """Put Ray's authentication token at ``path``, readable by the service user alone.

    A cell makes its own, once, and keeps it over reboots; the hosts of a cluster share the one in Secrets
    Manager.

    Args:
        config: the host's.
        secrets_manager: makes a boto3 client, only called in a cluster.
        path: the token file.

    Raises:
        RaySetupError: the secret cannot be read or is empty.
    """
    if config.cluster is None:
        if path.exists() and path.stat().st_size:
            log.info("the Ray token is there already")
            return
        token = secrets.token_hex(32)
    else:
        arn = config.cluster.auth_token_secret_arn
        try:
            token = secrets_manager().get_secret_value(SecretId=arn)["SecretString"].strip()
        except (ClientError, BotoCoreError, KeyError) as error:
            raise RaySetupError(
                f"Ray's token cannot be read from {arn}: {error}; the instance's role needs "
                "secretsmanager:GetSecretValue on it, and the secret must be a string"
            ) from error
        if len(token) < 16:
            raise RaySetupError(
                f"the secret {arn} holds {len(token)} characters; expected a token of at least 16"
            )
    write_atomically(path, token, mode=0o600)
    _hand_over(path)
    log.info("the Ray token is written", extra={"path": str(path)})


def _hand_over(path: Path) -> None:
    if os.geteuid() == 0:
        user = pwd.getpwnam(SERVICE_USER)
        os.chown(path, user.pw_uid, user.pw_gid)


def publish_head(config: NodeConfig, ip: str, ssm: Any, deadline_s: float = HEAD_DEADLINE_S) -> None:
    """Wait until this head's GCS listens, then write its address to the SSM parameter that workers poll.

    Raises:
        RaySetupError: the GCS does not listen within ``deadline_s`` seconds, or the parameter is refused.
    """
    name = _parameter(config)
    until = time.monotonic() + deadline_s
    while not _listens(ip, GCS_PORT):
        if time.monotonic() > until:
            raise RaySetupError(f"Ray's GCS does not listen on {ip}:{GCS_PORT} after {deadline_s:.0f} s")
        time.sleep(_POLL_S)
    try:
        ssm.put_parameter(Name=name, Value=ip, Type="String", Overwrite=True)
    except (ClientError, BotoCoreError) as error:
        raise RaySetupError(
            f"the head's address cannot be written to the SSM parameter {name}: {error}; the head's role "
            "needs ssm:PutParameter on it"
        ) from error
    log.info("the head's address is published", extra={"parameter": name, "address": ip})


def await_head(config: NodeConfig, ssm: Any, path: Path, deadline_s: float = HEAD_DEADLINE_S) -> str:
    """Poll the SSM parameter until it names a head that answers; write its address for the raylets' units.

    An address that does not answer may be the one of a head that was replaced: it is read again each time.

    Returns:
        The head's IP address.

    Raises:
        RaySetupError: no head within ``deadline_s`` seconds; the message says how far it came.
    """
    name = _parameter(config)
    until = time.monotonic() + deadline_s
    last = ""
    while True:
        try:
            ip = str(ssm.get_parameter(Name=name)["Parameter"]["Value"]).strip()
            state = (
                f"{ip}:{GCS_PORT} does not answer: does the security group let workers reach the head's GCS?"
            )
            if _is_address(ip) and _listens(ip, GCS_PORT):
                write_atomically(path, head_environment(ip))
                log.info("the cluster's head answers", extra={"address": ip})
                return ip
        except ClientError as error:
            if error.response["Error"]["Code"] == "AccessDeniedException":
                raise RaySetupError(
                    f"the SSM parameter {name} is refused to this host's role: {error}"
                ) from error
            state = f"parameter {name}: {error}"
        except BotoCoreError as error:
            state = f"parameter {name}: {error}"
        if state != last:
            log.info("waiting for the cluster's head", extra={"reason": state})
            last = state
        if time.monotonic() > until:
            raise RaySetupError(f"the cluster has no head after {deadline_s:.0f} s: {state}")
        time.sleep(_POLL_S)


def _parameter(config: NodeConfig) -> str:
    if config.cluster is None:
        raise RaySetupError(f"the node config has no 'cluster' table, which role {config.role!r} needs")
    return config.cluster.head_address_parameter


def _is_address(text: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET, text)
    except OSError:
        return False
    return True


def _listens(ip: str, port: int) -> bool:
    try:
        with socket.create_connection((ip, port), timeout=3.0):
            return True
    except OSError:
        return False
