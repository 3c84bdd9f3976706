"""Names of tags."""

from __future__ import annotations

ENVIRONMENT_TAG = "neuronfleet:environment"
