"""Steps with names, times and a spinner: what a person sees while `make up` works."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.status import Status
from rich.text import Text


@dataclass
class Steps:
    """Runs named steps and keeps how long each took, in seconds."""

    console: Console
    seconds: dict[str, float] = field(default_factory=dict)
    _status: Status | None = None
    _step: str = ""
    _last: str = ""

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Show ``name`` while the body runs; a step that raises is shown as failed."""
        started = time.monotonic()
        self._step, self._last = name, ""
        self._status = self.console.status(f"[bold]{name}[/bold]")
        if self.console.is_terminal:
            self._status.start()
        else:
            self.console.print(f"… {name}", highlight=False)
        try:
            yield
        except BaseException:
            self._status.stop()
            self.console.print(f"[red]✗[/red] {name}  {time.monotonic() - started:.1f} s", highlight=False)
            raise
        self._status.stop()
        took = time.monotonic() - started
        self.seconds[name] = self.seconds.get(name, 0.0) + took
        self.console.print(f"[green]✓[/green] {name}  [dim]{took:.1f} s[/dim]", highlight=False)

    def say(self, message: str) -> None:
        """Show what the step is doing: on a terminal beside the spinner, else a line each."""
        if message == self._last:
            return
        self._last = message
        if self._status is not None and self.console.is_terminal:
            self._status.update(Text.assemble((self._step, "bold"), "  ", (message, "dim")))
        else:
            self.console.print(Text(f"  {message}", style="dim"), soft_wrap=True)
