"""Admission's metrics, in a registry of their own, joined to the engine's on ``/metrics``."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from app.serve.errors import ASGIApp, Receive, Scope, Send

REASONS = ("queue_full", "queue_work", "deadline", "deadline_passed", "share", "pushed_out")
_PREFIX = "neuronfleet_admission_"
_SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60)


class AdmissionMetrics:
    """What was taken on, what waits, what was refused and why."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.queued = self._gauge("queue_length", "Requests that wait before the engine")
        self.queued_work = self._gauge("queue_work_seconds", "Predicted device seconds of those that wait")
        self.running = self._gauge("running", "Requests given to the engine and not ended")
        self.outstanding = self._gauge(
            "outstanding_work_seconds", "Predicted device seconds of all that was taken on and is not done"
        )
        self.drain_rate = self._gauge(
            "drain_rate", "Predicted device seconds done in a second while every slot is taken"
        )
        self.admitted = Counter(
            _PREFIX + "admitted", "Requests given to the engine", ["priority"], registry=self.registry
        )
        self.refused = Counter(
            _PREFIX + "refused", "Requests refused, by reason", ["reason"], registry=self.registry
        )
        for reason in REASONS:
            self.refused.labels(reason)
        self.waited = Histogram(
            _PREFIX + "wait_seconds", "Time before the engine", buckets=_SECONDS, registry=self.registry
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(_PREFIX + name, text, registry=self.registry)

    async def joined(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the engine's ``/metrics`` with these behind it."""
        start: dict[str, Any] = {}
        body = bytearray()

        async def collect(message: Any) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            else:
                body.extend(message.get("body", b""))

        await app(scope, receive, collect)
        if start.get("status") == 200:
            if body and not body.endswith(b"\n"):
                body.extend(b"\n")
            body.extend(generate_latest(self.registry))
        headers = [item for item in start.get("headers", ()) if item[0].lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await send({**start, "headers": headers})
        await send({"type": "http.response.body", "body": bytes(body)})
