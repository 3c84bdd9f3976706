"""Where the time of a `make up` went, from the hosts' own unit times."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rich.table import Table

from app.operate.status import Host, Status
from rehearsal.answer import QUESTION, Answer

__all__ = ["QUESTION", "Clock", "phases", "table"]


@dataclass(frozen=True)
class Clock:
    """Wall-clock times, seconds since the epoch: `make up` began, the main deploy began, it ended."""

    started: float
    deploy_started: float
    deployed: float


def phases(host: Host) -> dict[str, float]:
    """Seconds that a host spent in each phase of its boot, from its units' times.

    A phase whose units did not run on this host (the head loads no model) is absent.
    """
    units = {unit["name"].removeprefix("neuronfleet-"): unit for unit in host.units}

    def at(name: str, key: str) -> float | None:
        value = units.get(name, {}).get(key)
        return None if value is None else float(value)

    raylets = [unit for name, unit in units.items() if name.startswith("ray-") and unit["active"]]
    spans: dict[str, tuple[float | None, float | None]] = {
        "boot": (_launched(host), at("configure", "started")),
        "cluster": (
            min((float(unit["started"]) for unit in raylets), default=None),
            max((float(unit["active"]) for unit in raylets), default=None),
        ),
        "artifact": (at("fetch", "started"), at("fetch", "ended")),
        "model load": (
            max((float(unit["active"]) for unit in raylets), default=None) if host.replicas else None,
            at("ready", "ended") or at("ready", "active"),
        ),
    }
    return {
        name: end - begin for name, (begin, end) in spans.items() if begin is not None and end is not None
    }


def table(status: Status, clock: Clock, answer: Answer) -> Table:
    """Where the time went; a host's phases overlap (the artifact is fetched while Ray starts)."""
    shown = Table(title="Where the time went", title_justify="left", show_edge=False, pad_edge=False)
    shown.add_column("phase")
    shown.add_column("seconds", justify="right")
    shown.add_column("", style="dim")
    set_up = clock.deploy_started - clock.started
    shown.add_row("set-up", f"{set_up:.1f}", "installs, image, model, synth, store")
    shown.add_row(
        "deploy", f"{clock.deployed - clock.deploy_started:.1f}", "cdk deploy until every host signalled"
    )
    slowest: dict[str, tuple[float, str]] = {}
    # Hosts of an earlier `make up` booted then, not now.
    booted = [host for host in status.hosts if (_launched(host) or 0.0) >= clock.started]
    for host in booted:
        for phase, seconds in phases(host).items():
            if seconds > slowest.get(phase, (-1.0, ""))[0]:
                slowest[phase] = (seconds, host.instance_id)
    for phase in ("boot", "cluster", "artifact", "model load"):
        if phase in slowest:
            seconds, instance_id = slowest[phase]
            shown.add_row(f"  {phase}", f"{seconds:.1f}", f"slowest host: {instance_id}")
    shown.add_row("first token", f"{answer.first_token_s:.2f}", f"{len(answer.chunk_times_s)} chunks")
    return shown


def _launched(host: Host) -> float | None:
    value: Any = host.launched
    return datetime.fromisoformat(value).timestamp() if value else None
