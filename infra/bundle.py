"""The bundle: the zip that user data fetches. ``make setup`` builds it; here it is only found and hashed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

ROOT = Path(__file__).resolve().parent.parent


class BundleMissingError(Exception):
    """No bundle for the profile; the message says how to get one."""


class Bundle(BaseModel):
    """A bundle file and the sha256 of its bytes, in hex."""

    model_config = ConfigDict(frozen=True)

    path: Path
    sha256: str


def find_bundle(profile: str, override: Any = None) -> Bundle:
    """The bundle of an engine profile, or the file that ``-c bundle=PATH`` names.

    Raises:
        BundleMissingError: there is no such file.
    """
    path = Path(str(override)) if override else ROOT / "dist" / f"bundle-{profile}.zip"
    if not path.is_file():
        remedy = (
            "give an existing file with -c bundle=PATH"
            if override
            else f"run `make setup`, or `.venv/bin/python scripts/build_bundle.py --profile {profile}`"
        )
        raise BundleMissingError(f"no bundle for engine profile {profile} at {path}: {remedy}")
    with path.open("rb") as file:
        return Bundle(path=path.resolve(), sha256=hashlib.file_digest(file, "sha256").hexdigest())
