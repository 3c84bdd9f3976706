"""User data: ``userdata.sh`` with its placeholders filled. Pure data; it holds no secret."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

TEMPLATE = Path(__file__).resolve().parent / "userdata.sh"
MAX_BYTES = 4096
"""Our own limit for the rendered script; EC2's is 16384 bytes before base64."""

_PLACEHOLDER = re.compile(r"@([A-Z][A-Z0-9_]*)@")


def render(values: Mapping[str, str]) -> str:
    """The script with every placeholder filled; values may hold CDK tokens.

    Raises:
        ValueError: placeholders and values do not match one to one.
    """
    template = TEMPLATE.read_text()
    wanted = set(_PLACEHOLDER.findall(template))
    if wanted != set(values):
        raise ValueError(
            f"user data has the placeholders {sorted(wanted)} and was given values for {sorted(values)}"
        )
    return _PLACEHOLDER.sub(lambda match: values[match.group(1)], template)
