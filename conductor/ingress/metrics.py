"""Prometheus metrics: what ingress measures itself, and what the conductor reports when it is scraped.

The names vLLM dashboards expect (prefix ``vllm:``, labels ``model_name`` and ``engine``) beside our own (prefix
``mooncake_``). Intervals come from ingress's monotonic clock. It has its own registry, no globals.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from conductor.ingress.answers import Outcome
from conductor.ingress.cluster_load import ClusterLoad
from conductor.stats import DispatchStats
from mooncake.rpc.cluster_pb2 import Load, StatusResponse
from mooncake.sampling import SamplingParams
from mooncake.types import Role

_OPENMETRICS = "application/openmetrics-text"
_ENGINE = "0"
_VLLM_LABELS = ("model_name", "engine")
_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
_LEVELS = frozenset(
    {"blocks_quarantined", "handoffs_open", "handoffs_waiting", "last_switch_us", "leases", "ssd_in_trouble"}
)  # counts of nodes that are gauges: they can fall
_COUNTS = (1, 2, 5, 10, 20, 50, 100)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Metrics:
    """Implements ``pipeline.Observer``; ``page`` makes what Prometheus reads."""

    def __init__(self, model: str, status: Callable[[], Callable[[], StatusResponse]], stats: DispatchStats) -> None:
        self._registry = CollectorRegistry()
        self._model = model
        self._status = status
        self._stats = stats
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "Arrival to first token", _LATENCY_S)
        self._gap = self._histogram("vllm:inter_token_latency_seconds", "Between two tokens of a request", _LATENCY_S)
        self._mean_gap = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean gap between the tokens of a request", _LATENCY_S
        )
        self._total = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to last token", _LATENCY_S)
        self._queue = self._histogram("vllm:request_queue_time_seconds", "Waiting at the prefill node", _LATENCY_S)
        self._prefill = self._histogram("vllm:request_prefill_time_seconds", "Computing the prompt", _LATENCY_S)
        self._decode = self._histogram("vllm:request_decode_time_seconds", "First token to last", _LATENCY_S)
        self._prompt_size = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self._answer_size = self._histogram("vllm:request_generation_tokens", "Tokens generated for one", _TOKENS)
        self._longest = self._histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of the longest answer to a request", _TOKENS
        )
        self._max_tokens = self._histogram("vllm:request_params_max_tokens", "The request's max_tokens", _TOKENS)
        self._n = self._histogram("vllm:request_params_n", "The request's n", _COUNTS)
        self._inference = self._histogram(
            "vllm:request_inference_time_seconds", "Arrival to last token, without waiting", _LATENCY_S
        )
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of finished requests")
        self._tokens = self._counter("vllm:generation_tokens", "Tokens generated")
        self._queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache")
        self._hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the cache")
        self._finished = Counter(
            "vllm:request_success",
            "Requests that finished",
            (*_VLLM_LABELS, "finished_reason"),
            registry=self._registry,
        )
        for reason in ("stop", "length", "repetition"):  # dashboards expect the series from the start
            self._finished.labels(model, _ENGINE, reason)
        self._tail_gap = Histogram(
            "mooncake_tail_tbt_seconds",
            "Mean of the longest tenth of a request's token gaps",
            buckets=_LATENCY_S,
            registry=self._registry,
        )
        self._handoff = Histogram(
            "mooncake_handoff_seconds",
            "End of prefill to commit at the decode node",
            buckets=_LATENCY_S,
            registry=self._registry,
        )
        self._retried = Counter("mooncake_request_retries", "Retries of finished requests", registry=self._registry)
        self._failed = Counter(
            "mooncake_request_errors", "Requests that ended in an error", ("code",), registry=self._registry
        )
        self._http = Counter("mooncake_http_responses", "HTTP responses", ("route", "status"), registry=self._registry)
        ProcessCollector(registry=self._registry)

    def page(self, accept: str = "") -> Callable[[], tuple[bytes, str]]:
        """What writes a page of the cluster as it is now, in the format that ``accept`` asks for (OpenMetrics, or else
        Prometheus's text), and names that format. Call it in a thread: a thousand nodes take it half a second."""
        status, stats = self._status(), copy.deepcopy(self._stats)
        wanted = {kind.partition(";")[0].strip() for kind in accept.split(",")}

        def page() -> tuple[bytes, str]:
            whole = _Together(self._registry, _Cluster(self._model, status(), stats))
            if _OPENMETRICS not in wanted:
                return generate_latest(whole), "text/plain; version=0.0.4; charset=utf-8"
            # By default it writes vllm_… for vllm:…, and dashboards look for that.
            text: bytes = openmetrics.generate_latest(whole, escaping="allow-utf-8")  # type: ignore[no-untyped-call]
            return text, f"{_OPENMETRICS}; version=1.0.0; charset=utf-8"

        return page

    def first_token(self, ttft_s: float) -> None:
        self._ttft.observe(ttft_s)
        self._tokens.inc()

    def token_gap(self, gap_s: float) -> None:
        self._gap.observe(gap_s)
        self._tokens.inc()

    def finished(self, outcome: Outcome, prompt_counts: bool) -> None:
        usage, latency, timings = outcome.usage, outcome.latency, outcome.summary.report.timings
        self._finished.labels(self._model, _ENGINE, str(outcome.finish_reason)).inc()
        self._total.observe(latency.total_ms / 1e3)
        if usage.completion_tokens:
            self._decode.observe((latency.total_ms - latency.ttft_ms) / 1e3)
            self._answer_size.observe(usage.completion_tokens)
        if usage.completion_tokens > 1:
            self._mean_gap.observe(latency.mean_tbt_ms / 1e3)
            self._tail_gap.observe(latency.tail_tbt_ms / 1e3)
        if prompt_counts:
            self._queue.observe(timings.queue_ms / 1e3)
            self._prefill.observe(timings.prefill_ms / 1e3)
            self._handoff.observe(timings.handoff_ms / 1e3)
            self._retried.inc(outcome.summary.retries)
            self._prompt_size.observe(usage.prompt_tokens)
            self._prompt_tokens.inc(usage.prompt_tokens)
            self._queries.inc(usage.prompt_tokens)
            self._hits.inc(usage.cached_tokens)
            self._inference.observe(max(0.0, latency.total_ms - timings.queue_ms) / 1e3)

    def answered(self, sampling: SamplingParams, longest: int) -> None:
        self._longest.observe(longest)
        self._max_tokens.observe(sampling.max_tokens)
        self._n.observe(sampling.n)

    def failed(self, code: str) -> None:
        self._failed.labels(code).inc()

    def http_response(self, route: str, status: int) -> None:
        self._http.labels(route, str(status)).inc()

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, text, _VLLM_LABELS, buckets=buckets, registry=self._registry)
        return histogram.labels(self._model, _ENGINE)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, _VLLM_LABELS, registry=self._registry).labels(self._model, _ENGINE)


class _Together(Collector):
    """Several collectors as one: OpenMetrics marks the end of a page, so it is written at once."""

    def __init__(self, *parts: Collector) -> None:
        self._parts = parts

    def collect(self) -> Iterator[Metric]:
        for part in self._parts:
            yield from part.collect()


class _Cluster(Collector):
    """One status, so that the values of one page are consistent."""

    def __init__(self, model: str, status: StatusResponse, stats: DispatchStats) -> None:
        self._model = model
        self._status = status
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        yield from self._engine(self._status)
        yield from _nodes(self._status)
        yield from _transports(self._status)
        yield from self._requests(self._status)

    def _engine(self, status: StatusResponse) -> Iterator[Metric]:
        """The whole cluster as the single engine of a vLLM dashboard."""
        whole = ClusterLoad.of(status)
        loads = [node.load for node in status.nodes if node.info.role in ("prefill", "decode")]
        for name, text, value in (
            ("vllm:num_requests_running", "Sequences in the running batches", whole.running),
            ("vllm:num_requests_waiting", "Sequences that wait for a place", whole.waiting),
            ("vllm:kv_cache_usage_perc", "Blocks in use, 0 to 1", whole.usage),
        ):
            family = GaugeMetricFamily(name, text, labels=_VLLM_LABELS)
            family.add_metric((self._model, _ENGINE), value)
            yield family
        for name, text, count in (
            ("vllm:num_preemptions", "Preemptions of sequences", sum(load.preemptions for load in loads)),
            ("vllm:spec_decode_num_draft_tokens", "Draft tokens proposed", _counted(loads, "tokens_drafted")),
            ("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted", _counted(loads, "drafts_accepted")),
        ):
            counter = CounterMetricFamily(name, text, labels=_VLLM_LABELS)
            counter.add_metric((self._model, _ENGINE), count)
            yield counter
        sizes = {node.info.block_tokens for node in status.nodes if node.info.role in ("prefill", "decode")}
        facts = GaugeMetricFamily(
            "vllm:cache_config_info", "The cache of all nodes", labels=(*_VLLM_LABELS, "block_size", "num_gpu_blocks")
        )
        facts.add_metric((self._model, _ENGINE, str(max(sizes, default=0)), str(whole.blocks_total)), 1)
        yield facts

    def _requests(self, status: StatusResponse) -> Iterator[Metric]:
        stats = self._stats
        yield GaugeMetricFamily("mooncake_ready", "1 when requests can be served", float(status.ready))
        yield GaugeMetricFamily("mooncake_requests_running", "Requests admitted and not ended", status.requests_running)
        yield CounterMetricFamily("mooncake_requests", "Requests that came, refused ones too", status.requests_total)
        yield CounterMetricFamily("mooncake_requests_cancelled", "Requests whose client left", stats.cancelled)
        yield CounterMetricFamily("mooncake_retries", "Attempts tried again on another pair", stats.retries)
        yield CounterMetricFamily("mooncake_tails", "Local prefills, on decode nodes", stats.local_prefills)
        yield CounterMetricFamily("mooncake_block_queries", "Prompt blocks asked for", status.block_queries)
        yield CounterMetricFamily("mooncake_block_hits", "Prompt blocks found in a cache", status.block_hits)
        yield CounterMetricFamily(
            "mooncake_index_dropped_blocks",
            "Blocks that the full prefix index did not take",
            status.index_dropped_blocks,
        )
        yield GaugeMetricFamily(
            "mooncake_ttft_prediction_error_seconds",
            "Mean difference of predicted and measured TTFT of recent requests",
            status.prediction_error_ms / 1e3,
        )
        for name, text, label, counts in (
            ("mooncake_requests_failed", "Requests that the conductor ended in an error", "code", stats.failures),
            ("mooncake_attempts_failed", "Failed attempts, retried or not", "code", stats.failed_attempts),
            ("mooncake_handoffs", "Hand-offs by their end", "state", stats.handoffs),
            ("mooncake_admission", "What admission under a limit decides", "decision", asdict(stats.admission)),
        ):
            family = CounterMetricFamily(name, text, labels=(label,))
            for value, count in sorted(counts.items()):
                family.add_metric((value,), count)
            yield family


def _nodes(status: StatusResponse) -> Iterator[Metric]:
    blocks = GaugeMetricFamily("mooncake_node_blocks", "KV blocks by state", labels=("node", "role", "state"))
    sequences = GaugeMetricFamily("mooncake_node_sequences", "Sequences by state", labels=("node", "role", "state"))
    up = GaugeMetricFamily("mooncake_node_up", "1 for the state a node is in", labels=("node", "role", "state"))
    health = GaugeMetricFamily(
        "mooncake_node_health", "1 for how a node is found to be", labels=("node", "role", "health")
    )
    age = GaugeMetricFamily("mooncake_node_heartbeat_age_seconds", "Since the last heartbeat", labels=("node", "role"))
    sent = CounterMetricFamily("mooncake_node_sent_bytes", "KV bytes that a store has sent", labels=("node", "role"))
    received = CounterMetricFamily("mooncake_node_received_bytes", "KV bytes sent to a store", labels=("node", "role"))
    preempted = CounterMetricFamily("mooncake_node_preemptions", "Preemptions of sequences", labels=("node", "role"))
    events = CounterMetricFamily("mooncake_node_events", "What a node counts", labels=("node", "role", "event"))
    levels = GaugeMetricFamily("mooncake_node_level", "What a node has at present", labels=("node", "role", "level"))
    limits = GaugeMetricFamily("mooncake_node_limit", "What a node has room for", labels=("node", "role", "limit"))
    for node in status.nodes:
        load, who = node.load, (node.info.node_id, node.info.role)
        for state, count in _block_states(load):
            blocks.add_metric((*who, state), count)
        up.add_metric((*who, node.state), 1)
        health.add_metric((*who, node.health), 1)
        age.add_metric(who, node.heartbeat_age_s)
        if node.info.role == Role.STORE:
            sent.add_metric(who, load.bytes_out)
            received.add_metric(who, load.bytes_in)
        else:
            sequences.add_metric((*who, "running"), load.running)
            sequences.add_metric((*who, "waiting"), load.waiting)
            preempted.add_metric(who, load.preemptions)
            for name in ("kv_bytes", "chunk_tokens", "max_sequences"):
                limits.add_metric((*who, name), getattr(node.info, name))
        for name, count in sorted(load.counters.items()):
            (levels if name in _LEVELS else events).add_metric((*who, name), count)
    yield from (blocks, sequences, up, health, age, sent, received, preempted, events, levels, limits)


def _counted(loads: Sequence[Load], name: str) -> int:
    return sum(load.counters.get(name, 0) for load in loads)


def _block_states(load: Load) -> tuple[tuple[str, int], ...]:
    return ("free", load.blocks_free), ("cached", load.blocks_cached), ("in_use", load.blocks_in_use)


def _transports(status: StatusResponse) -> Iterator[Metric]:
    labels = ("node", "peer", "transport")
    moved = CounterMetricFamily("mooncake_transport_bytes", "KV bytes moved to or from a peer", labels=labels)
    speed = GaugeMetricFamily("mooncake_transport_bytes_per_second", "Measured speed to a peer", labels=labels)
    failed = CounterMetricFamily(
        "mooncake_transport_failures", "Times that another transport had to take over", labels=labels
    )
    for node in status.nodes:
        for link in node.transports:
            names = (node.info.node_id, link.peer, link.transport)
            moved.add_metric(names, link.bytes)
            speed.add_metric(names, link.gb_per_s * 1e9)
            failed.add_metric(names, link.failures)
    yield from (moved, speed, failed)
