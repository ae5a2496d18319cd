"""What /metrics tells, in Prometheus' text format."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nonet.serve.answering import Answering
from nonet.wire.ask import Usage

_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_EACH = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Metrics:
    """What one server has counted. Times are in seconds."""

    def __init__(self) -> None:
        self.registry = r = CollectorRegistry()
        self.requests = Counter("nonet_requests", "Requests by route and outcome.", ["route", "outcome"], registry=r)
        self._tokens = Counter("nonet_tokens", "Tokens by kind.", ["kind"], registry=r)
        self._open = Gauge("nonet_open_requests", "Requests being answered.", registry=r)
        self._queued = Gauge("nonet_queue_depth", "Answers that wait for their first token.", registry=r)
        about = "From a request's arrival to an answer's first token."
        self._first = Histogram("nonet_time_to_first_token_seconds", about, buckets=_FIRST, registry=r)
        about = "Mean time of an answer's tokens after its first."
        self._each = Histogram("nonet_time_per_token_seconds", about, buckets=_EACH, registry=r)

    def answered(self, answering: Answering, route: str, began: float) -> None:
        """Count a request that was let in. began: time.monotonic() at its arrival."""
        self.requests.labels(route, answering.outcome).inc()
        usage = answering.usage()
        for kind in ("prompt", "cached", "completion", "drafted", "accepted"):
            self._tokens.labels(kind).inc(getattr(usage, kind))
        for inbox, choice, ended in zip(answering.inboxes, answering.choices, answering.ended_at, strict=True):
            if inbox.started_at is not None:
                self._first.observe(inbox.started_at - began)
                if choice.tokens > 1:
                    self._each.observe(((ended or time.monotonic()) - inbox.started_at) / (choice.tokens - 1))

    def scored(self, route: str, usage: Usage) -> None:
        """Count a request for the log-probs of its own prompts."""
        self.requests.labels(route, "scored").inc()
        self._tokens.labels("prompt").inc(usage.prompt)

    def refused(self, route: str, status: int) -> None:
        self.requests.labels(route, f"refused_{status}").inc()

    def text(self, figures: Mapping[str, float], open_requests: int, queued: int) -> bytes:
        """Everything, with the generator's own figures (names ending in _total are counters) as nonet_engine_*."""
        self._open.set(open_requests)
        self._queued.set(queued)
        engine = CollectorRegistry()
        engine.register(_Figures(figures))
        return generate_latest(self.registry) + generate_latest(engine)


class _Figures(Collector):
    def __init__(self, figures: Mapping[str, float]):
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        for name, value in self._figures.items():
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield family(f"nonet_engine_{name.removesuffix('_total')}", f"The engine's {name}.", value=value)
