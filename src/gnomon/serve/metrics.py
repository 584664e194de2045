"""Numbers for Prometheus, in a registry of this server's own. Read next: `api.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gnomon.data.dialects.asked import Cost
from gnomon.serve.admission import Admission

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
GAPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)


class Metrics:
    """Counters and histograms of a server; `page` is what a Prometheus server reads. The engine's own numbers are read when asked."""

    def __init__(self, admission: Admission, stats: Callable[[], object]) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("gnomon_requests", "Requests by path and status", ("path", "status"), registry=self.registry)
        self.prompt_tokens = Counter("gnomon_prompt_tokens", "Tokens of prompts", registry=self.registry)
        self.cached_tokens = Counter("gnomon_cached_tokens", "Tokens of prompts that were not computed again", registry=self.registry)
        self.output_tokens = Counter("gnomon_output_tokens", "Tokens that were sampled for clients", registry=self.registry)
        self.first_token = self._histogram("gnomon_first_token_seconds", "From a request in the engine to its first token", SECONDS)
        self.between_tokens = self._histogram("gnomon_between_tokens_seconds", "Between two tokens of a choice", GAPS)
        self.seconds = self._histogram("gnomon_request_seconds", "From a request's first byte to its answer's last", SECONDS)
        self.registry.register(_Now(admission, stats))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self.registry)

    def answered(self, cost: Cost, first_token_seconds: float | None) -> None:
        """Count an answer."""
        self.prompt_tokens.inc(cost.prompt_tokens)
        self.cached_tokens.inc(cost.cached_tokens)
        self.output_tokens.inc(cost.output_tokens)
        if first_token_seconds is not None:
            self.first_token.observe(first_token_seconds)

    def page(self) -> bytes:
        """The text format of Prometheus."""
        return generate_latest(self.registry)


class _Now(Collector):
    """What is true at the moment: the lanes of admission, and every number that the engine tells about itself and its cache."""

    def __init__(self, admission: Admission, stats: Callable[[], object]) -> None:
        self._admission = admission
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """The gauges."""
        running = GaugeMetricFamily("gnomon_running_requests", "Requests that were let in", labels=["lane"])
        waiting = GaugeMetricFamily("gnomon_waiting_requests", "Requests that wait to be let in", labels=["lane"])
        used = GaugeMetricFamily("gnomon_admitted_tokens", "Tokens of the requests that were let in", labels=["lane"])
        for name, lane in self._admission.lanes.items():
            running.add_metric([name], lane.running)
            waiting.add_metric([name], len(lane.waiting))
            used.add_metric([name], lane.used)
        yield from (running, waiting, used)
        for name, value in numbers(self._stats()):
            yield GaugeMetricFamily(f"gnomon_engine_{name}", name.replace("_", " "), value=value)

    def describe(self) -> Iterator[Metric]:
        """Nothing: the engine's numbers are not known before they are asked for."""
        return iter(())


def numbers(stats: object, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a dataclass, those inside it with its field's name before them."""
    if not dataclasses.is_dataclass(stats) or isinstance(stats, type):
        return
    for entry in dataclasses.fields(stats):
        value = getattr(stats, entry.name)
        if isinstance(value, (bool, int, float)):
            yield prefix + entry.name, float(value)
        else:
            yield from numbers(value, f"{prefix}{entry.name}_")
