"""Traces and histograms of prompt lengths, read from CSV with every fault named, counted and placed.

Accepted: a request a row, with a length column (``ContextTokens`` as the Azure traces have it, or a common
name; optionally a time and an output length); a histogram, with a length and a count column; or one number
a line.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

INPUT_COLUMNS = (
    "ContextTokens",
    "input_tokens",
    "prompt_tokens",
    "prompt_length",
    "prompt_len",
    "length",
    "tokens",
)
OUTPUT_COLUMNS = ("GeneratedTokens", "output_tokens", "completion_tokens")
TIME_COLUMNS = ("TIMESTAMP", "timestamp", "time", "arrival_s")
COUNT_COLUMNS = ("count", "requests", "frequency")
_SHOWN = 5


class TraceError(ValueError):
    """A trace that cannot be used: what is wrong, how many rows have it, and which come first."""


@dataclass
class Faults:
    """Rows that cannot be used, by what is wrong with them: line numbers of the file."""

    lines: dict[str, list[int]] = field(default_factory=dict)

    def add(self, kind: str, line: int) -> None:
        """Note a faulty row."""
        self.lines.setdefault(kind, []).append(line)

    @property
    def count(self) -> int:
        """Rows with a fault."""
        return sum(len(lines) for lines in self.lines.values())

    def describe(self) -> str:
        """Each kind with its count and first rows."""
        parts = []
        for kind, lines in self.lines.items():
            first = ", ".join(str(line) for line in lines[:_SHOWN])
            more = ", …" if len(lines) > _SHOWN else ""
            parts.append(f"{len(lines)} row(s) with {kind} (row {first}{more})")
        return "; ".join(parts)


@dataclass(frozen=True)
class Trace:
    """Prompt lengths with how often each occurs, and what else the file told.

    ``arrivals_s`` (seconds from the first) and ``output_tokens`` are of each request in file order, empty
    where the file has no such column. ``first_line`` is where a length first occurs.
    """

    counts: Mapping[int, int]
    first_line: Mapping[int, int]
    arrivals_s: Sequence[float] = ()
    input_tokens: Sequence[int] = ()
    output_tokens: Sequence[int] = ()
    faults: Faults = field(default_factory=Faults)

    @property
    def requests(self) -> int:
        """How many requests there are."""
        return sum(self.counts.values())

    @property
    def duration_h(self) -> float | None:
        """Hours from the first to the last arrival, None where the file has no times."""
        return (max(self.arrivals_s) - min(self.arrivals_s)) / 3600 if len(self.arrivals_s) > 1 else None

    def over(self, max_len: int) -> tuple[int, int | None]:
        """How many requests are longer than ``max_len``, and the row of the first of them."""
        longer = [length for length in self.counts if length > max_len]
        rows = [self.first_line[length] for length in longer]
        return sum(self.counts[length] for length in longer), min(rows) if rows else None


def read_trace(path: Path, *, column: str | None = None, skip_bad: bool = False) -> Trace:
    """Read a trace or histogram; ``column`` names the length column.

    Raises:
        TraceError: an unreadable or empty file, no length column, or (unless ``skip_bad``) any faulty row.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            trace = _read(csv.reader(file), path, column)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"cannot read {path}: {error}") from error
    if trace.faults.count and not skip_bad:
        raise TraceError(
            f"{path}: {trace.faults.describe()}; lengths must be whole numbers, at least 1. "
            f"Mend the file, or leave those rows out with --skip-bad"
        )
    if not trace.counts:
        faults = f": {trace.faults.describe()}" if trace.faults.count else ""
        raise TraceError(f"{path}: no usable rows{faults}")
    return trace


def _read(reader: Iterator[list[str]], path: Path, column: str | None) -> Trace:
    header = next(reader, None)
    if header is None:
        raise TraceError(f"{path} is empty")
    names = [name.strip() for name in header]
    plain = column is None and len(names) == 1 and _number(names[0]) is not None
    length_at = 0 if plain else _column(names, (column,) if column else INPUT_COLUMNS, path)
    count_at = None if plain else _find(names, COUNT_COLUMNS)
    time_at = None if plain else _find(names, TIME_COLUMNS)
    output_at = None if plain else _find(names, OUTPUT_COLUMNS)
    counts: Counter[int] = Counter()
    first: dict[int, int] = {}
    faults = Faults()
    times: list[float] = []
    inputs: list[int] = []
    outputs: list[int] = []

    rows = enumerate(reader, start=2)
    if plain:
        rows = enumerate(_chain(names, reader), start=1)
    blank: list[int] = []
    for line, row in rows:
        if not row:
            blank.append(line)
            continue
        if len(names) == 1 and not plain:
            # Under a header of one column, an empty line between others is a row without its length.
            for empty in blank:
                faults.add("a missing length", empty)
        blank.clear()
        length = _length(row, length_at, "length", line, faults)
        if length is None:
            continue
        weight = 1 if count_at is None else _length(row, count_at, "count", line, faults, least=0)
        output = 0 if output_at is None else _length(row, output_at, "output length", line, faults, least=0)
        time = 0.0 if time_at is None else _time(row, time_at, line, faults)
        if weight is None or output is None or time is None:
            continue
        counts[length] += weight
        first.setdefault(length, line)
        if time_at is not None:
            times.append(time)
        if output_at is not None:
            outputs.append(output)
        if count_at is None:
            inputs.append(length)
    start = min(times, default=0.0)
    return Trace(
        {length: count for length, count in counts.items() if count},
        first,
        [time - start for time in times],
        inputs,
        outputs,
        faults,
    )


def _chain(first: list[str], reader: Iterator[list[str]]) -> Iterator[list[str]]:
    yield first
    yield from reader


def _find(names: Sequence[str], wanted: Sequence[str]) -> int | None:
    lower = [name.casefold() for name in names]
    for name in wanted:
        if name.casefold() in lower:
            return lower.index(name.casefold())
    return None


def _column(names: Sequence[str], wanted: Sequence[str], path: Path) -> int:
    found = _find(names, wanted)
    if found is None:
        raise TraceError(
            f"{path}: no length column; expected {' or '.join(wanted)}, the header has {', '.join(names)} "
            f"(name it with --column)"
        )
    return found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _length(
    row: Sequence[str], at: int, what: str, line: int, faults: Faults, *, least: int = 1
) -> int | None:
    text = row[at].strip() if at < len(row) else ""
    if not text:
        faults.add(f"a missing {what}", line)
        return None
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or "_" in text:  # Python reads 1_000, tables do not
        faults.add(f"a {what} that is no whole number", line)
        return None
    if value < least:
        faults.add(f"a negative {what}" if value < 0 else f"a {what} of zero", line)
        return None
    return value


def _time(row: Sequence[str], at: int, line: int, faults: Faults) -> float | None:
    text = row[at].strip() if at < len(row) else ""
    seconds = _number(text)
    if seconds is not None and math.isfinite(seconds):
        return seconds
    try:
        # Azure's traces have seven digits of a second; Python reads six.
        whole, _, fraction = text.partition(".")
        return datetime.fromisoformat(whole).timestamp() + float(f"0.{fraction or 0}")
    except ValueError:
        faults.add("a time that is neither seconds nor a date and time", line)
        return None
