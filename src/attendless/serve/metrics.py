"""Prometheus metrics of the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class Metrics:
    def __init__(self, batch: int, inside: Callable[[], float], workers: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        of: Any = {"registry": self.registry}
        self.requests = Counter("attendless_requests", "Requests by status", ["status"], **of)
        self.errors = Counter("attendless_errors", "Failed requests by kind of error", ["kind"], **of)
        self.latency = Histogram(
            "attendless_latency_seconds", "Time from the headers of a request to its response", buckets=SECONDS, **of
        )
        sizes = sorted({1, 2, 4, 8, 16, 32, 64, 128, batch} & set(range(1, batch + 1)))
        self.batches = Histogram("attendless_batch_size", "Images per forward pass", buckets=sizes, **of)
        self.model = Histogram("attendless_model_seconds", "Time of a batch in the model", buckets=SECONDS, **of)
        self.restarts = Counter("attendless_worker_restarts", "Workers restarted after a failure", **of)
        Gauge("attendless_requests_inside", "Requests in progress", **of).set_function(inside)
        Gauge("attendless_workers", "Workers that are running", **of).set_function(workers)

    def on_batch(self, size: int, seconds: float) -> None:
        self.batches.observe(size)
        self.model.observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class Counted:
    """ASGI middleware that counts requests by status and measures the time to the response."""

    def __init__(self, app: Any, metrics: Metrics, clock: Callable[[], float]) -> None:
        self.app, self.metrics, self.clock = app, metrics, clock

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = self.clock()

        async def counting(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.metrics.requests.labels(str(message["status"])).inc()
                if scope["path"] == "/predict":
                    self.metrics.latency.observe(self.clock() - began)
            await send(message)

        await self.app(scope, receive, counting)
