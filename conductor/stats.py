"""What the conductor counts about its requests. Plain numbers: ingress exports them, this module does not know how."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from mooncake.types import PrefillReport

RECENT = 256  # requests in a recent mean


class RecentMean:
    """The mean of the last ``RECENT`` integers, in constant time: it is read for every request."""

    __slots__ = ("_total", "_values")

    def __init__(self) -> None:
        self._values: deque[int] = deque(maxlen=RECENT)
        self._total = 0

    def append(self, value: int) -> None:
        if len(self._values) == RECENT:
            self._total -= self._values[0]
        self._values.append(value)
        self._total += value

    def mean(self) -> float | None:
        return self._total / len(self._values) if self._values else None


@dataclass(slots=True)
class AdmissionStats:
    """Decisions since the conductor started. One owner writes: ``Admission``."""

    admitted: int = 0
    refused: int = 0  # or held back (again), or only counted, as ``conductor.admission_mode`` says
    refused_after_prefill: int = 0
    refusals_checked: int = 0  # refusals for decode load, looked at again when the request would have decoded
    refusals_unneeded: int = 0  # of those: there was room then
    returned_on_time: int = 0  # clients that came back at the time an earlier refusal had given
    refused_again: int = 0  # of those


@dataclass(slots=True)
class DispatchStats:
    """Totals since the conductor started, and a few recent means. One owner writes: the dispatcher."""

    requests: int = 0
    running: int = 0
    finished: int = 0
    cancelled: int = 0
    retries: int = 0
    failures: Counter[str] = field(default_factory=Counter)  # failed requests by error code
    failed_attempts: Counter[str] = field(default_factory=Counter)  # by error code, retried or not
    handoffs: Counter[str] = field(default_factory=Counter)  # by final state
    prompt_tokens: int = 0  # of requests whose prefill has reported
    cached_tokens: int = 0  # of those, reused from a cache
    blended_tokens: int = 0  # of the others, those of known passages at other positions
    local_prefills: int = 0  # prompts computed on their decode node
    block_queries: int = 0  # full prompt blocks looked up
    block_hits: int = 0  # of them, found in a cache
    output_tokens: int = 0
    admission: AdmissionStats = field(default_factory=AdmissionStats)
    recent_ttft_errors_ms: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    recent_durations_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    recent_output_tokens: RecentMean = field(default_factory=RecentMean)

    @property
    def failed(self) -> int:
        return self.failures.total()

    @property
    def prediction_error_ms(self) -> float:
        """Mean |predicted − measured| TTFT of recent requests."""
        errors = self.recent_ttft_errors_ms
        return sum(errors) / len(errors) if errors else 0.0

    def count_prompt(self, report: PrefillReport, block_tokens: int) -> None:
        """What a prefill node has reported of a request's prompt."""
        self.prompt_tokens += report.prompt_tokens
        self.cached_tokens += report.cached_tokens
        self.blended_tokens += report.blended_tokens
        self.block_queries += report.prompt_tokens // block_tokens
        self.block_hits += report.cached_tokens // block_tokens

    def count_end(self, is_whole: bool, duration_s: float, num_tokens: int | None) -> None:
        """Of a request that has not failed: it finished, or was cancelled. Without ``num_tokens`` it had no answer."""
        self.finished += is_whole
        self.cancelled += not is_whole
        self.recent_durations_s.append(duration_s)
        if num_tokens is not None:
            self.recent_output_tokens.append(max(num_tokens, 1))

    def compare_ttft(self, predicted_ms: float, measured_ms: float) -> None:
        self.recent_ttft_errors_ms.append(abs(predicted_ms - measured_ms))

    def retry_after_s(self) -> float:
        """When a place is likely to be free: the mean time between the ends of recent requests."""
        durations = self.recent_durations_s
        if not durations:
            return 1.0
        return min(max(sum(durations) / len(durations) / max(self.running, 1), 0.1), 30.0)

    def expected_output_tokens(self, max_tokens: int) -> float:
        """Mean length of recent answers, at most ``max_tokens``; ``max_tokens`` if there were none."""
        mean = self.recent_output_tokens.mean()
        return float(max_tokens) if mean is None else min(mean, max_tokens)
