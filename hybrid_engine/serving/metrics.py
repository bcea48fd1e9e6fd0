"""What `/metrics` tells Prometheus. Each server counts for itself."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Counters and histograms of one server; `num_running` and `num_waiting` are asked when somebody reads."""

    def __init__(self, num_running: Callable[[], int], num_waiting: Callable[[], int]):
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
        Gauge("hybrid_engine_running_sequences", "Sequences that decode.", registry=self.registry).set_function(
            num_running
        )
        Gauge("hybrid_engine_waiting_sequences", "Sequences not begun.", registry=self.registry).set_function(
            num_waiting
        )

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)
