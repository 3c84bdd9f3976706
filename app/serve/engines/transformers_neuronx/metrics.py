"""What the engine counts: queue, slots, tokens, and the stalls that prefills cause.

Prometheus metrics in a registry of their own (one engine a process), and the same as plain numbers for tests
and logs. Times in seconds in Prometheus, as its convention has it; in milliseconds in :class:`EngineCounts`.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from app.serve.engines.transformers_neuronx.request import EngineCounts

_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class EngineMetrics:
    """Counters and histograms of one engine."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.counts = EngineCounts()
        name = "neuronfleet_tnx_"
        self._waiting = Gauge(name + "requests_waiting", "Requests without a slot", registry=self.registry)
        self._running = Gauge(name + "requests_running", "Requests with a slot", registry=self.registry)
        self._prompt = Counter(name + "prompt_tokens", "Prompt tokens prefilled", registry=self.registry)
        self._tokens = Counter(name + "generation_tokens", "Tokens generated", registry=self.registry)
        self._finished = Counter(
            name + "requests_finished", "Requests ended, by reason", ["reason"], registry=self.registry
        )
        self._first = self._histogram("time_to_first_token_seconds", "From arrival to the first token")
        self._inter = self._histogram("inter_token_seconds", "Between two tokens of a stream")
        self._stall = self._histogram(
            "stall_seconds", "Prefill between two decode steps, while streams were running"
        )
        self._step = Histogram(
            name + "step_seconds", "Device steps", ["graph"], buckets=_SECONDS, registry=self.registry
        )

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram("neuronfleet_tnx_" + name, text, buckets=_SECONDS, registry=self.registry)

    def queue(self, waiting: int, running: int) -> None:
        """The queue and the slots in use now."""
        self.counts.waiting, self.counts.running = waiting, running
        self._waiting.set(waiting)
        self._running.set(running)

    def step(self, graph: str, milliseconds: float) -> None:
        """A device step ran."""
        if graph == "decode":
            self.counts.decode_steps += 1
        else:
            self.counts.prefill_steps += 1
        self._step.labels(graph).observe(milliseconds / 1000)

    def stall(self, milliseconds: float) -> None:
        """Running streams waited for prefill between two decode steps."""
        counts = self.counts
        counts.stalls += 1
        counts.stall_ms_sum += milliseconds
        counts.stall_ms_max = max(counts.stall_ms_max, milliseconds)
        self._stall.observe(milliseconds / 1000)

    def prompt(self, tokens: int) -> None:
        """A prompt is prefilled."""
        self.counts.prompt_tokens += tokens
        self._prompt.inc(tokens)

    def token(self, seconds: float, first: bool) -> None:
        """A token came, so long after the arrival (the first) or after the one before."""
        self.counts.generated_tokens += 1
        self._tokens.inc()
        (self._first if first else self._inter).observe(seconds)

    def finished(self, reason: str) -> None:
        """A request ended."""
        self.counts.finished[reason] = self.counts.finished.get(reason, 0) + 1
        self._finished.labels(reason).inc()

    def text(self) -> bytes:
        """Prometheus exposition text."""
        return generate_latest(self.registry)
