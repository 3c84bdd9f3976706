"""Prices by region and way of buying, as data that a user can replace with a file of the same shape."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Purchase = Literal["on_demand", "reserved_1y", "spot"]
DEFAULT_REGION = "us-east-1"


class PriceError(ValueError):
    """A price that is not known, or a price file that is wrong; the message says which and what is known."""


class InstancePrices(BaseModel):
    """USD an instance hour, Linux. ``reserved_1y`` is one year without upfront, as an hourly rate."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    on_demand: float | None = Field(default=None, gt=0)
    reserved_1y: float | None = Field(default=None, gt=0)
    spot: float | None = Field(default=None, gt=0)


class PriceBook(BaseModel):
    """Prices by region and instance type, with their source and date."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: Literal[1]
    dated: str
    source: str
    regions: dict[str, dict[str, InstancePrices]]

    def usd_per_hour(
        self, instance: str, region: str = DEFAULT_REGION, purchase: Purchase = "on_demand"
    ) -> float:
        """USD an hour of one instance.

        Raises:
            PriceError: the book has no such price; the message lists what it has.
        """
        prices = self.regions.get(region)
        if prices is None:
            raise PriceError(f"no prices for region {region!r}; known: {', '.join(sorted(self.regions))}")
        if instance not in prices:
            offered = sorted(name for name, book in self.regions.items() if instance in book)
            raise PriceError(
                f"no price for {instance} in {region}; known in: {', '.join(offered) or 'no region'}"
            )
        value: float | None = getattr(prices[instance], purchase)
        if value is None:
            hint = "give it with --prices" if purchase == "spot" else "choose another way of buying"
            raise PriceError(f"no {purchase} price for {instance} in {region}; {hint}")
        return value

    def find(self, instance: str, region: str, purchase: Purchase) -> float | None:
        """USD an hour, or None where the book has no such price."""
        try:
            return self.usd_per_hour(instance, region, purchase)
        except PriceError:
            return None


def load_prices(path: Path | None = None) -> PriceBook:
    """The shipped prices, with those of ``path`` laid over them (a file of the same shape).

    Raises:
        PriceError: a file that cannot be read or is not of the shape.
    """
    shipped = PriceBook.model_validate_json(
        resources.files("app.plan").joinpath("data/prices.json").read_text()
    )
    if path is None:
        return shipped
    try:
        own = PriceBook.model_validate(json.loads(path.read_text()))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PriceError(f"cannot read prices from {path}: {error}") from error
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(str(part) for part in item['loc']) or 'file'}: {item['msg']}"
            for item in error.errors()
        )
        raise PriceError(f"prices in {path}: {faults}") from error
    regions = {name: dict(prices) for name, prices in shipped.regions.items()}
    for name, prices in own.regions.items():
        for instance, given in prices.items():
            known = regions.setdefault(name, {}).get(instance, InstancePrices())
            regions[name][instance] = known.model_copy(update=given.model_dump(exclude_none=True))
    return PriceBook(
        version=1, dated=own.dated, source=f"{own.source}; else {shipped.source}", regions=regions
    )


def usd_per_million(usd_per_hour: float, tokens_per_s: float, utilisation: float = 1.0) -> float:
    """USD for a million tokens at ``tokens_per_s`` while busy, busy ``utilisation`` of the hour."""
    return usd_per_hour / (tokens_per_s * utilisation * 3600) * 1e6
