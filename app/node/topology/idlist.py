"""Lists of ids as the kernel and numactl write them: ``0-23,96-119``."""

from __future__ import annotations

from collections.abc import Iterable


def parse_idlist(text: str) -> tuple[int, ...]:
    """``"0-2,5"`` to ``(0, 1, 2, 5)``, ascending, each id once; an empty text gives no ids.

    Raises:
        ValueError: something that is neither an id nor an ascending range.
    """
    ids: set[int] = set()
    for part in text.strip().split(","):
        part = part.strip()
        if not part:
            continue
        first, dash, last = part.partition("-")
        try:
            low, high = int(first), int(last if dash else first)
        except ValueError:
            raise ValueError(f"{part!r} in {text!r} is neither an id nor a range like 0-23") from None
        if low < 0 or high < low or high - low > 1 << 16:
            raise ValueError(f"{part!r} in {text!r} is not an ascending range")
        ids.update(range(low, high + 1))
    return tuple(sorted(ids))


def format_idlist(ids: Iterable[int]) -> str:
    """The shortest text that ``parse_idlist`` reads back: ``(0, 1, 2, 5)`` to ``"0-2,5"``."""
    parts: list[str] = []
    run: list[int] = []
    for value in [*sorted(set(ids)), None]:
        if run and value != run[-1] + 1:
            parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
            run = []
        if value is not None:
            run.append(value)
    return ",".join(parts)
