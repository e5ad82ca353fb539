"""The receiver's figures in Prometheus's text form. Names of services, never of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tailrace.source.rqlite.cluster import Cluster

_MEANINGS = {
    "requests": "Requests that were answered with 200",
    "received": "Events that were stored",
    "duplicates": "Events that were known already",
    "zero_index": "Events that came with index 0",
    "late": "Events with index 0 that came after newer ones",
    "missing": "Events that came without images",
}


class ReceiverMetrics(Collector):
    """Reads the clusters and the answers whenever somebody asks; nothing is counted twice."""

    def __init__(self, clusters: Callable[[], Iterable[Cluster]], answers: Mapping[int, int]) -> None:
        self._clusters = clusters
        self._answers = answers
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        answers = CounterMetricFamily("tailrace_rqlite_answers", "Requests by the code they got", labels=["code"])
        for code, count in sorted(self._answers.items()):
            answers.add_metric([str(code)], count)
        yield answers
        clusters = list(self._clusters())
        for name, meaning in _MEANINGS.items():
            counter = CounterMetricFamily(f"tailrace_rqlite_{name}", meaning, labels=["service"])
            for cluster in clusters:
                counter.add_metric([cluster.service], cluster.counts.to_json()[name])
            yield counter
        index = GaugeMetricFamily("tailrace_rqlite_index", "The last Raft index that was stored", labels=["service"])
        size = GaugeMetricFamily("tailrace_rqlite_journal_bytes", "The size of the journal", labels=["service"])
        usage = GaugeMetricFamily(
            "tailrace_rqlite_journal_usage", "The journal's part of its bound", labels=["service"]
        )
        stopped = GaugeMetricFamily(
            "tailrace_rqlite_stopped", "1 when an error stopped the cluster", labels=["service"]
        )
        for cluster in clusters:
            level = cluster.level()
            index.add_metric([cluster.service], level.mark.commit)
            size.add_metric([cluster.service], level.bytes)
            usage.add_metric([cluster.service], level.usage)
            stopped.add_metric([cluster.service], cluster.error is not None)
        yield from (index, size, usage, stopped)
