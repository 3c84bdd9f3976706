"""AWS clients of the boot steps: the instance role's credentials, bounded waits, retries."""

from __future__ import annotations

from typing import Any

import boto3
from botocore.config import Config


def client(service: str, region: str) -> Any:
    """A boto3 client; throttling and lost answers are retried for about a minute."""
    config = Config(
        region_name=region,
        connect_timeout=5,
        read_timeout=20,
        retries={"mode": "standard", "max_attempts": 8},
    )
    return boto3.client(service, config=config)  # type: ignore[call-overload]
