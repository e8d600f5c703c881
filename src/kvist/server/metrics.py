"""Prometheus metrics, named as vLLM names its own with the prefix ``kvist_``.

Histograms and finish reasons are kept here; everything else is read from the engine's snapshot at each scrape, so that
nothing is counted twice.
"""

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvist._version import __version__
from kvist.engine.answer import FinishReason

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TPOT_BUCKETS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_E2E_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)

COUNTERS = {
    "kvist_prompt_tokens": ("prompt_tokens", "Prompt tokens of admitted requests."),
    "kvist_generation_tokens": ("output_tokens", "Tokens generated."),
    "kvist_prefix_cache_queries": ("query_tokens", "Prompt tokens looked up in the prefix cache."),
    "kvist_prefix_cache_hits": ("hit_tokens", "Prompt tokens found in the prefix cache."),
    "kvist_num_preemptions": ("preempted", "Requests preempted to make room, to be recomputed."),
    "kvist_pruned_tokens": ("pruned_tokens", "Tokens of running requests that pruning has dropped."),
    "kvist_pruned_blocks": ("pruned_blocks", "Blocks that pruning has given back."),
    "kvist_num_refused": ("refused", "Requests refused because they could never fit."),
}
"""Prometheus name (without ``_total``) -> key of the snapshot's counters, help."""


class ServerMetrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(self, snapshot: Callable[[], dict[str, Any]]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_SnapshotCollector(snapshot))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, buckets=buckets, registry=self._registry)

        self.time_to_first_token = histogram(
            "kvist_time_to_first_token_seconds", "From a request's arrival to its first token.", _TTFT_BUCKETS
        )
        self.time_per_output_token = histogram(
            "kvist_time_per_output_token_seconds", "Mean time between a request's tokens.", _TPOT_BUCKETS
        )
        self.end_to_end = histogram(
            "kvist_e2e_request_latency_seconds", "From a request's arrival to its last token.", _E2E_BUCKETS
        )
        self._finished = Counter(
            "kvist_request_success", "Requests that ended, by finish reason; n choices count n times.",
            ["finished_reason"], registry=self._registry,
        )  # fmt: skip

    def finished(self, reason: FinishReason) -> None:
        """Count one choice that ended."""
        self._finished.labels(reason).inc()

    def text(self) -> bytes:
        """Everything in Prometheus' text format; takes a snapshot, so not for the event loop."""
        return generate_latest(self._registry)


class _SnapshotCollector(Collector):
    def __init__(self, snapshot: Callable[[], dict[str, Any]]) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterator[Metric]:
        # Without this, registering would take a snapshot of an engine that may still be starting.
        return iter(())

    def collect(self) -> Iterator[Metric]:
        now = self._snapshot()
        info = GaugeMetricFamily("kvist_info", "1, with what is served.", labels=["model_name", "version"])
        info.add_metric([now["model"], __version__], 1)
        yield info
        states = [request["state"] for request in now["requests"]]
        yield GaugeMetricFamily("kvist_num_requests_running", "Requests in the batch.", states.count("running"))
        yield GaugeMetricFamily("kvist_num_requests_waiting", "Requests in the queue.", states.count("waiting"))
        sizes = now["bytes"]
        held = GaugeMetricFamily("kvist_cache_bytes", "Bytes of the cache by state.", labels=["state"])
        for state in ("free", "cached", "held", "waste"):
            held.add_metric([state], sizes[state])
        yield held
        usage = (sizes["held"] + sizes["waste"]) / max(1, now["arena"]["bytes"])
        yield GaugeMetricFamily("kvist_kv_cache_usage_perc", "Cache in use by requests, 0 to 1.", usage)
        yield from _tiers(now["tiers"])
        for name, (key, text) in COUNTERS.items():
            yield CounterMetricFamily(name, text, now["counters"][key])


def _tiers(tiers: list[dict[str, Any]]) -> Iterator[Metric]:
    """What lies behind the cache; no metric where there is nothing."""
    if not tiers:
        return
    held = GaugeMetricFamily("kvist_tier_bytes", "Bytes of a tier by state.", labels=["tier", "state"])
    counters = {
        "hit_tokens": ("kvist_tier_hits", "Prompt tokens found in a tier."),
        "read_bytes": ("kvist_tier_read_bytes", "Bytes that came back from a tier."),
        "written_bytes": ("kvist_tier_written_bytes", "Bytes that went to a tier."),
    }
    families = {key: CounterMetricFamily(name, text, labels=["tier"]) for key, (name, text) in counters.items()}
    for tier in tiers:
        for state in ("free", "cached", "swapped"):
            held.add_metric([tier["name"], state], tier[state])
        for key, family in families.items():
            family.add_metric([tier["name"]], tier[key])
    yield held
    yield from families.values()
