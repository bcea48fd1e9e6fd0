"""The metrics that `/metrics` reports to Prometheus. Each server has its own counters."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hybrid_engine.generation.live.thread import LiveThread

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Counters, gauges and histograms of one server; the gauges query its `worker` when they are read."""

    def __init__(self, worker: LiveThread):
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "hybrid_engine_requests",
            "Requests answered, by path and status.",
            ("path", "status"),
            registry=self.registry,
        )
        self.prompt_tokens = Counter("hybrid_engine_prompt_tokens", "Tokens of prompts.", registry=self.registry)
        self.generated_tokens = Counter("hybrid_engine_generated_tokens", "Tokens drawn.", registry=self.registry)
        self.cancelled = Counter(
            "hybrid_engine_cancelled_requests", "Requests whose client went away.", registry=self.registry
        )
        self.first_token = Histogram(
            "hybrid_engine_time_to_first_token_seconds",
            "From a request to its first token.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.between_tokens = Histogram(
            "hybrid_engine_time_between_tokens_seconds",
            "Between tokens of a choice.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self._gauge("running_sequences", "Sequences that decode.", lambda: worker.num_running)
        self._gauge("waiting_sequences", "Sequences not begun.", lambda: worker.num_waiting)
        self._gauge(
            "kv_cache_usage_perc",
            "Share of the KV blocks that running sequences use, from 0 to 1.",
            lambda: worker.kv_blocks.usage,
        )
        self._gauge("kv_blocks_used", "KV blocks of running sequences.", lambda: worker.kv_blocks.used)
        self._gauge(
            "kv_blocks_kept",
            "KV blocks of finished turns of conversations, given up where others need them.",
            lambda: worker.kv_blocks.kept,
        )
        self._gauge("kv_blocks_free", "KV blocks that hold nothing.", lambda: worker.kv_blocks.free)

    def _gauge(self, name: str, meaning: str, value: Callable[[], float]) -> None:
        Gauge(f"hybrid_engine_{name}", meaning, registry=self.registry).set_function(value)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)
