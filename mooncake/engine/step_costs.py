"""What an engine learns from step times: how much of a prompt fits beside decodes, whether drafts pay, and whether
recomputing a preempted sequence is cheaper than swapping it.

It passes measurements to those who decide. It does not know how a step is run.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from mooncake.engine.cache.swap import SwapSpace
from mooncake.engine.contract import EngineConfig
from mooncake.engine.decoding.draft_payoff import DraftPayoff
from mooncake.engine.sequence import Sequence
from mooncake.engine.step_curve import StepCurve
from mooncake.engine.step_plan import StepEntry


class StepCosts:
    def __init__(self, config: EngineConfig, swap: SwapSpace) -> None:
        limit_ms = config.tbt_limit_ms
        self.curve = StepCurve(limit_ms, config.block_tokens, config.max_step_tokens) if limit_ms else None
        self._payoff = DraftPayoff() if config.speculative_tokens else None
        self._swap = swap
        self._drafting_ms = 0.0  # since the last step that had drafts

    @property
    def prompt_budget(self) -> Callable[[int], int] | None:
        """Prompt tokens that may be computed beside this many decodes; None without a limit."""
        return self.curve.budget if self.curve else None

    @property
    def drafts_pay(self) -> bool:
        return self._payoff is not None and self._payoff.allows_drafts

    def timed(self, propose: Callable[[Sequence], list[int]]) -> Callable[[Sequence], list[int]]:
        """The same function, with its time charged to the next step that has drafts."""

        def timed(sequence: Sequence) -> list[int]:
            started_s = time.perf_counter()
            draft = propose(sequence)
            self._drafting_ms += (time.perf_counter() - started_s) * 1e3
            return draft

        return timed

    def note(self, entries: list[StepEntry], num_tokens: int, elapsed_ms: float) -> None:
        """A step of this many tokens is done, and took this long after planning; its sequences have their new
        tokens."""
        num_chunk_tokens, num_decodes, has_drafts = 0, len(entries), False
        if num_tokens > len(entries):  # otherwise one token each, as in most steps
            num_chunk_tokens = sum(entry.num_tokens for entry in entries if entry.num_tokens > 1 + entry.num_draft)
            num_decodes = sum(entry.num_tokens == 1 for entry in entries)
            has_drafts = any(entry.num_draft for entry in entries)
        if 2 * num_chunk_tokens > num_tokens:
            self._swap.note_prompt(num_tokens, elapsed_ms)
        if self.curve is not None and not has_drafts:
            self.curve.note(num_decodes, num_chunk_tokens, elapsed_ms)
        if self._payoff is not None and not num_chunk_tokens:
            num_made = sum(entry.sequence.num_computed - entry.first for entry in entries)
            if has_drafts:
                elapsed_ms += self._drafting_ms
                self._drafting_ms = 0.0
            self._payoff.note(len(entries), num_made, has_drafts, elapsed_ms)
