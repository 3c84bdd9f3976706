"""What a compile job runs on, and how long: the time limit or what the cost limit buys, the lesser."""

from __future__ import annotations

from app.plan.catalogue import INF2, get_instance
from app.plan.prices import load_prices

LEAST_MINUTES = 30
"""Below this a job could not even boot, fetch and report."""


AUTO = "auto"
TOO_SMALL = frozenset({"inf2.xlarge"})
"""16 GiB of host memory: what a compilation of a model of any size takes is more."""


def job_instance(chosen: str, tp_degree: int) -> str:
    """The size that the job runs on: the libraries load what they compile, so it must have the cores.

    Raises:
        ValueError: the chosen one has too few.
    """
    if chosen == AUTO:
        return next(name for name, item in INF2.items() if name not in TOO_SMALL and item.cores >= tp_degree)
    if get_instance(chosen).cores < tp_degree:
        raise ValueError(
            f"{chosen} has {get_instance(chosen).cores} NeuronCores, and engine.tp_degree is {tp_degree}"
        )
    return chosen


def limit_minutes(instance_type: str, minutes: int, usd: int) -> int:
    """Minutes from boot to the end of the instance, at the dearest on-demand price of the book's regions.

    Raises:
        ValueError: the cost limit buys less than a job needs, or the book has no price.
    """
    book = load_prices()
    prices = [
        price
        for region in book.regions
        if (price := book.find(instance_type, region, "on_demand")) is not None
    ]
    if not prices:
        raise ValueError(f"no on-demand price for {instance_type}: its cost cannot be limited")
    bought = int(usd / max(prices) * 60)
    if bought < LEAST_MINUTES:
        raise ValueError(
            f"{usd} USD buy {bought} minutes of {instance_type} ({max(prices):g} USD an hour where it is "
            f"dearest), and a job needs {LEAST_MINUTES}"
        )
    return min(minutes, bought)
