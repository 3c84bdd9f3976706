"""Settings of admission, part of a replica's."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _listed(value: Any) -> Any:
    """A comma list, as an environment variable has it."""
    return [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value


class AdmissionSettings(BaseModel):
    """Which requests a replica takes on. Times in seconds unless the name says otherwise."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    queue_limit: int = Field(default=256, ge=0, description="requests a replica holds beyond its batch")
    queue_work_s: float = Field(
        default=120.0, gt=0, description="predicted time that working off the queue may take"
    )
    ttft_slo_ms: float = Field(
        default=30_000.0, gt=0, description="a request whose first token cannot come by then is refused"
    )
    tpot_slo_ms: float = Field(
        default=100.0,
        gt=0,
        description="time per output token that running streams keep while others are prefilled",
    )
    admission_margin: float = Field(
        default=0.7, gt=0, le=1, description="share of a deadline that the prediction may fill"
    )
    engine_ahead: int | None = Field(
        default=None, ge=0, description="requests given to the engine beyond its batch; none: a quarter of it"
    )
    priority_aging_s: float = Field(
        default=30.0, gt=0, description="a lower priority that waited so long goes first"
    )
    priority_keys: Annotated[tuple[str, ...], BeforeValidator(_listed)] = Field(
        default=(),
        description="SHA-256 (hex; comma list) of API keys whose x-priority: high counts; none: all",
    )
    expected_output_tokens: int = Field(
        default=256, ge=1, description="taken as an answer's length until some were seen"
    )
