"""The load of the cluster, sampled at intervals."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Timeline:
    """One entry per sample; values are means over machines."""

    at_s: list[float] = field(default_factory=list)
    prefill_load: list[float] = field(default_factory=list)  # share of prefill machines that are computing
    queued: list[float] = field(default_factory=list)  # waiting prompts per prefill machine
    batch: list[float] = field(default_factory=list)  # sequences per decode machine, over 64
    step_ms: list[float] = field(default_factory=list)  # of decode machines with a batch
