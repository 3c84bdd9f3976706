"""What a replica takes on: its engine's batch and a bounded queue. Beyond it a request is answered at once.

The bound is the replica's own, whoever calls: Serve's limit counts per caller and says no when to come again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class Overloaded(Exception):
    """The queue is full; ``retry_after_s`` is a whole number of seconds after which to try again."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Admission:
    """Counts requests that generate; ``limit`` is the batch and the queue together."""

    def __init__(self, batch_size: int, queue_limit: int) -> None:
        self._batch_size = batch_size
        self._limit = batch_size + queue_limit
        self.active = 0

    @contextlib.contextmanager
    def admit(self) -> Iterator[None]:
        """Hold a place while a request is served.

        Raises:
            Overloaded: no place is free.
        """
        if self.active >= self._limit:
            # One second for each batch that waits ahead, within reason: a queue of strangers' answers.
            waiting = self.active - self._batch_size
            raise Overloaded(
                f"this replica has {self.active} requests, the most it takes "
                f"(batch {self._batch_size}, queue {self._limit - self._batch_size}); try again later",
                max(1, min(30, waiting // self._batch_size)),
            )
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1
