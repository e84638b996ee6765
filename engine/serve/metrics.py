"""What /metrics tells, in Prometheus' format; names are llama-server's where it has them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.metrics import Metrics
from engine.serve.service import Service


class ServerMetrics:
    """A collector of the service's figures, and of the times of requests that have ended."""

    def __init__(self, service: Service):
        self._service = service
        self._lock = threading.Lock()
        self._prompt = self._predicted = (0, 0.0)  # tokens, seconds
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def ended(self, metrics: Metrics, n_tokens: int) -> None:
        """Count a request's times: its prompt's are those to the first token."""
        first, rate = metrics.time_to_first_token_ms, metrics.decode_tokens_per_second
        with self._lock:
            if first is not None:
                computed = metrics.prompt_tokens - metrics.cached_tokens
                self._prompt = self._prompt[0] + computed, self._prompt[1] + first / 1e3
            if rate:
                n, took = n_tokens - 1, (n_tokens - 1) / rate
                self._predicted = self._predicted[0] + n, self._predicted[1] + took

    def collect(self) -> Iterator[Metric]:
        stats = self._service.stats()
        with self._lock:
            prompt, predicted = self._prompt, self._predicted
        total = stats.kv_blocks_total
        for name, text, value in (
            ("llamacpp:prompt_tokens", "Prompt tokens computed", stats.prompt_tokens_total),
            ("llamacpp:prompt_seconds", "Time to the first tokens", prompt[1]),
            ("llamacpp:tokens_predicted", "Tokens generated", stats.generated_tokens_total),
            ("llamacpp:tokens_predicted_seconds", "Time of generating", predicted[1]),
            ("engine:prefix_hit_tokens", "Prompt tokens not computed", stats.prefix_hit_tokens),
            ("engine:preemptions", "Requests that gave their blocks back", stats.preemptions),
        ):
            yield CounterMetricFamily(name, text, value=value)
        for name, text, value in (
            ("llamacpp:prompt_tokens_seconds", "Mean prompt tokens a second", rate_of(*prompt)),
            ("llamacpp:predicted_tokens_seconds", "Mean tokens a second", rate_of(*predicted)),
            ("llamacpp:requests_processing", "Requests that run", stats.running),
            ("llamacpp:requests_deferred", "Requests that wait", stats.queued),
            (
                "llamacpp:kv_cache_usage_ratio",
                "Share of blocks in use",
                stats.kv_blocks_used / total if total else 0,
            ),
            ("engine:kv_blocks_used", "KV blocks in use", stats.kv_blocks_used),
            ("engine:kv_blocks_cached", "KV blocks of known prefixes", stats.kv_blocks_cached),
            ("engine:kv_blocks_total", "KV blocks there are", total),
        ):
            yield GaugeMetricFamily(name, text, value=value)
        ended = CounterMetricFamily("engine:requests", "Requests that ended", labels=["reason"])
        for reason, n in sorted(stats.finished.items()):
            ended.add_metric([reason], n)
        yield ended


def rate_of(n: int, seconds: float) -> float:
    return n / seconds if seconds > 0 else 0.0
