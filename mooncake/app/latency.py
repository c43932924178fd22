"""Results of a load test per request, and their summary. Pure: no clock, no network.

TTFT is the time from sending to the first token. TBT, the time between tokens, is reported by both common definitions,
always with its name: the mean of a request's gaps, and the mean of the longest tenth of them (as in Mooncake, FAST'25),
which shows stalls that the mean hides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    OK = "ok"
    REJECTED = "rejected"  # refused early with a retry time
    FAILED = "failed"
    TOO_LONG = "too_long"  # does not fit the model's context: not sent


@dataclass(frozen=True, slots=True)
class RequestResult:
    """One request of a load test; times in seconds since its start, durations in milliseconds."""

    index: int
    planned_s: float
    sent_s: float
    outcome: Outcome
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    ttft_ms: float = 0.0
    gaps_ms: tuple[float, ...] = ()
    total_ms: float = 0.0
    prefill_node: str = ""
    decode_node: str = ""
    error: str = ""

    @property
    def mean_tbt_ms(self) -> float:
        return mean(self.gaps_ms)

    @property
    def tail_tbt_ms(self) -> float:
        return longest_tenth_mean(self.gaps_ms)

    def meets(self, slo: SLO) -> bool:
        is_in_time = self.ttft_ms <= slo.ttft_ms and self.tail_tbt_ms <= slo.tbt_ms and self.total_ms <= slo.total_ms
        return self.outcome is Outcome.OK and is_in_time


@dataclass(frozen=True, slots=True)
class SLO:
    """Limits for one request: on its TTFT, the mean of the longest tenth of its token gaps, and the time of it all."""

    ttft_ms: float = math.inf
    tbt_ms: float = math.inf
    total_ms: float = math.inf

    @property
    def is_set(self) -> bool:
        return any(map(math.isfinite, (self.ttft_ms, self.tbt_ms, self.total_ms)))

    def __str__(self) -> str:
        limits = {"TTFT": self.ttft_ms, "TBT (longest tenth)": self.tbt_ms, "whole answer": self.total_ms}
        return ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in limits.items() if math.isfinite(limit))


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles (nearest rank) of one measure over requests; zeros without requests."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @staticmethod
    def of(values: Iterable[float]) -> Spread:
        ordered = sorted(values)
        return Spread(mean(ordered), *(percentile(ordered, share) for share in (0.5, 0.9, 0.99, 1.0)))


def percentile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank: the smallest value that at least ``share`` of all values do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def longest_tenth_mean(gaps: Sequence[float]) -> float:
    """Mean of the longest tenth (at least one) of a request's token gaps."""
    return mean(sorted(gaps)[-math.ceil(len(gaps) / 10) :]) if gaps else 0.0


@dataclass(frozen=True, slots=True)
class HitRates:
    """The share of prompts served from cache, by three definitions that differ by percents."""

    block: float  # whole blocks reused / blocks of prompts, including partial last ones
    token: float  # tokens reused / prompt tokens
    request_mean: float  # mean over requests of the share of blocks reused


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """Summary of a load test. Latencies, hit rates and tokens are over the requests that succeeded."""

    requests: int
    ok: int
    rejected: int
    failed: int
    too_long: int
    duration_s: float
    ttft_ms: Spread
    mean_tbt_ms: Spread
    tail_tbt_ms: Spread
    total_ms: Spread
    hits: HitRates
    prompt_tokens: int
    completion_tokens: int
    completion_tokens_per_s: float
    met_slo: int  # requests within both limits
    goodput_per_s: float  # met_slo per second
    goodput_share: float  # met_slo over all requests sent, including rejected ones
    late_ms: Spread  # delay of sending after the planned time, caused by the load generator


def summarize(results: Sequence[RequestResult], block_tokens: int, duration_s: float, slo: SLO) -> LoadSummary:
    ok = [result for result in results if result.outcome is Outcome.OK]
    sent = [result for result in results if result.outcome is not Outcome.TOO_LONG]
    count = {outcome: sum(result.outcome is outcome for result in results) for outcome in Outcome}
    met = sum(result.meets(slo) for result in ok)
    duration_s = max(duration_s, 1e-9)
    completion_tokens = sum(result.completion_tokens for result in ok)
    return LoadSummary(
        requests=len(results),
        ok=count[Outcome.OK],
        rejected=count[Outcome.REJECTED],
        failed=count[Outcome.FAILED],
        too_long=count[Outcome.TOO_LONG],
        duration_s=duration_s,
        ttft_ms=Spread.of(result.ttft_ms for result in ok),
        mean_tbt_ms=Spread.of(result.mean_tbt_ms for result in ok if result.gaps_ms),
        tail_tbt_ms=Spread.of(result.tail_tbt_ms for result in ok if result.gaps_ms),
        total_ms=Spread.of(result.total_ms for result in ok),
        hits=hit_rates(ok, block_tokens),
        prompt_tokens=sum(result.prompt_tokens for result in ok),
        completion_tokens=completion_tokens,
        completion_tokens_per_s=completion_tokens / duration_s,
        met_slo=met,
        goodput_per_s=met / duration_s,
        goodput_share=met / max(1, len(sent)),
        # a timer may fire a moment too early
        late_ms=Spread.of(max(result.sent_s - result.planned_s, 0.0) * 1000 for result in sent),
    )


def hit_rates(results: Sequence[RequestResult], block_tokens: int) -> HitRates:
    num_blocks = [-(-result.prompt_tokens // block_tokens) for result in results]
    hit = [result.cached_tokens // block_tokens for result in results]
    return HitRates(
        block=sum(hit) / max(1, sum(num_blocks)),
        token=sum(result.cached_tokens for result in results) / max(1, sum(result.prompt_tokens for result in results)),
        request_mean=mean([found / max(1, total) for found, total in zip(hit, num_blocks, strict=True)]),
    )
