"""How full the cluster was, looked at every now and then. Numbers only."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Timeline:
    """One entry a look: shares are means over machines."""

    at_s: list[float] = field(default_factory=list)
    prefill_load: list[float] = field(default_factory=list)  # share of prefill machines that compute
    queued: list[float] = field(default_factory=list)  # prompts that wait, a prefill machine
    batch: list[float] = field(default_factory=list)  # sequences a decode machine, over 64
    step_ms: list[float] = field(default_factory=list)  # of decode machines that run
