"""Continuous batching: what the next step computes. Decodes come first, then chunks of prompts, within a token budget.

Pure: it moves sequences between the waiting and the running queue, has blocks allocated, and returns a plan. It knows
nothing of torch, clocks, the tokens' meaning or the hook. Both queues are in order of priority (lower first), then of
arrival. When blocks run out, the last running sequence is preempted: its blocks are freed, and later it is recomputed
or swapped in. The first one always advances, so there is no livelock. A long prompt leaves half of a step's budget to
prompts after it, if they can use it.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice

from mooncake.engine.cache.block_manager import BlockManager
from mooncake.engine.cache.block_pool import BlockPool
from mooncake.engine.sequence import Sequence, SequenceState
from mooncake.engine.step_plan import Admission, BlockToLoad, StepEntry, StepPlan
from mooncake.errors import OutOfBlocks, Overloaded
from mooncake.page_groups import UNIFORM, PageGroups

MAX_LOOKAHEAD = 8  # waiting sequences that a long prompt leaves budget for
MAX_SCORED = 512  # prompt tokens of a step with log-probabilities: each has a row of logits, half a megabyte and more
WATERMARK = 100  # one block in this many stays free at admission while others run, so that they can grow


class StepScheduler:
    """The waiting and the running queue, and the blocks of the sequences in them."""

    def __init__(
        self,
        pool: BlockPool,
        chunk_tokens: int,
        max_sequences: int,
        max_model_len: int,
        max_waiting: int,
        num_places: int = 0,
        groups: PageGroups = UNIFORM,
        shares_parts: bool = True,
    ) -> None:
        """``chunk_tokens``: maximum prompt tokens in a step, 0 for whole prompts only; ``num_places``: blocks of swap
        space; ``shares_parts``: whether sequences share the beginnings of blocks."""
        self.pool = pool
        self._max_budget = chunk_tokens or max_model_len
        self.block_manager = BlockManager(
            pool, max_sequences, max_model_len, num_places, groups, self._max_budget, shares_parts
        )
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._block_tokens = pool.block_tokens
        self._num_groups = groups.num_groups
        self._max_sequences = max_sequences
        self._max_waiting = max_waiting
        self._splits_prompts = chunk_tokens > 0
        self._max_scored = max(MAX_SCORED, pool.block_tokens)
        self._arrivals = 0

    # Arrival and departure

    def add(self, sequence: Sequence) -> None:
        """Raises Overloaded when too many wait already, OutOfBlocks when it can never fit."""
        if len(self.waiting) >= self._max_waiting:
            raise Overloaded(f"{len(self.waiting)} sequences are waiting already")
        self._check_fits(sequence)
        self._arrive(sequence)
        self._add_waiting(sequence)

    def undo_add(self, sequence: Sequence) -> None:
        """As if it had never been added, however far ``add`` got."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)

    def reserve(self, sequence: Sequence) -> int:
        """Allocate blocks for all its tokens, without running it. Returns how many leading ones are cached.

        Raises OutOfBlocks when there is no room now; waiting sequences that were preempted or forked here go first.
        """
        self._check_fits(sequence)
        if not self.block_manager.tables.has_free_row:
            raise OutOfBlocks(f"{self._max_sequences} sequences are running or about to")
        if self.waiting and self.waiting[0].has_begun:
            raise OutOfBlocks("sequences that have begun here come first")
        sequence.extend_keys(self._block_tokens)
        num_cached = self.block_manager.allocate(
            sequence, len(sequence.block_keys), self._watermark, sequence.num_tokens
        )
        if num_cached is None:
            needed = self.block_manager.num_needed(sequence)
            raise OutOfBlocks(f"{needed} blocks are needed, {self.pool.num_available} are available")
        self._arrive(sequence)
        sequence.move(SequenceState.RESERVED)
        return num_cached

    def start_reserved(self, sequence: Sequence) -> None:
        """Its blocks are filled: it runs from now on."""
        sequence.move(SequenceState.RUNNING)
        self._add_running(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """``child`` shares the blocks of all its tokens but the last, which the running ``parent`` has computed.

        If too many sequences run, or the parent was preempted, the child waits for its turn, and then uses what is
        cached.
        """
        child.arrival = parent.arrival
        if not self.block_manager.tables.has_free_row or parent.state is not SequenceState.RUNNING:
            self._add_waiting(child)
            return
        self.block_manager.fork(parent, child)
        child.move(SequenceState.RUNNING)
        self._add_running(child)

    def finish(self, sequence: Sequence, *, hold: bool = False) -> None:
        """Remove it, whatever its state; with ``hold`` its blocks stay."""
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
        elif sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
        self.block_manager.free_swapped(sequence)
        if hold:
            self.block_manager.free_row(sequence)
            sequence.move(SequenceState.HELD)
            return
        if sequence.state in (SequenceState.RUNNING, SequenceState.HELD):
            self.block_manager.seal_part(sequence)
        sequence.move(SequenceState.FINISHED)
        self.block_manager.free(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """From running back to waiting: its blocks are freed, its tokens stay."""
        self.running.remove(sequence)
        self._free_blocks(sequence)
        sequence.move(SequenceState.WAITING)
        self._add_waiting(sequence)

    # The step

    def plan(
        self,
        prompt_budget: Callable[[int], int] | None = None,
        propose: Callable[[Sequence], list[int]] | None = None,
    ) -> StepPlan:
        """Moves sequences between the queues and allocates blocks, but computes nothing: a plan may be abandoned.

        ``prompt_budget`` returns how many prompt tokens may be computed beside this many decodes, ``propose`` a
        sequence's draft tokens.
        """
        plan = StepPlan()
        self._plan_decodes(plan, propose)
        num_decodes = len(plan.entries)
        budget = self._max_budget if prompt_budget is None else min(prompt_budget(num_decodes), self._max_budget)
        budget = self._plan_chunks(plan, budget)
        if not plan.has_preempted:
            budget = self._admit(plan, budget)
        self._spend_leftover(plan, num_decodes, budget)
        if not (plan.entries or plan.variant_entries) and any(not sequence.is_parked for sequence in self.waiting):
            self._preempt_parked(plan)
        return plan

    def _plan_decodes(self, plan: StepPlan, propose: Callable[[Sequence], list[int]] | None) -> None:
        """One token of every sequence that is past its prompt, and its drafts."""
        for sequence in list(self.running):
            position = sequence.num_computed
            blocks = sequence.blocks
            if position + 1 != sequence.num_tokens or blocks.is_loading or sequence.state is not SequenceState.RUNNING:
                continue
            if position < blocks.num_writable or self._make_writable(sequence, position, plan):
                num_draft = self._draft(sequence, propose, plan) if propose is not None else 0
                plan.entries.append(StepEntry(sequence, position, 1 + num_draft, num_draft))

    def _draft(self, sequence: Sequence, propose: Callable[[Sequence], list[int]], plan: StepPlan) -> int:
        """Write draft tokens after its tokens, if there are blocks for them without a preemption. Returns how many."""
        if sequence.is_beam or sequence.num_left < 2:
            return 0
        draft = propose(sequence)[: sequence.num_left - 1]
        if not draft:
            return 0
        held = len(sequence.blocks.block_table) * self._block_tokens
        free = self.pool.num_available - len(self.running) * self._num_groups  # each running sequence may need one
        room = held + max(free, 0) // self._num_groups * self._block_tokens - sequence.num_tokens
        draft = draft[: max(room, 0)]
        sequence.write_draft(draft)
        for position in range(held, sequence.num_tokens + len(draft), self._block_tokens):
            self._make_writable(sequence, position, plan)
        return len(draft)

    def make_room(self, entries: list[StepEntry]) -> bool:
        """Make sure that these tokens can be written. False if that would take a preemption or a copy."""
        new = [(entry.sequence, entry.first) for entry in entries if entry.first >= entry.sequence.blocks.num_writable]
        if len(new) * self._num_groups > self.pool.num_available:
            return False
        if any(self.block_manager.needs_copy(sequence, position) for sequence, position in new):
            return False
        for sequence, position in new:
            self.block_manager.make_writable(sequence, position, [])
        return True

    def _plan_chunks(self, plan: StepPlan, budget: int) -> int:
        """The next chunk of running prompts, in order. Returns the rest of the budget (tokens).

        Each leaves up to half of what it finds to those after it, which are often short.
        """
        if len(plan.entries) == len(self.running):  # all are past their prompts
            return budget
        prompts = [s for s in self.running if (not s.is_decoding or s.blocks.is_loading) and not s.is_parked]
        behind = sum(s.num_tokens - s.num_computed for s in prompts)
        if self.block_manager.tables.has_free_row:
            behind += sum(s.num_tokens for s in islice(self.waiting, MAX_LOOKAHEAD))
        for sequence in prompts:
            behind -= sequence.num_tokens - sequence.num_computed
            left_to_others = min(budget // 2, behind) // self._block_tokens * self._block_tokens
            if budget > 0:
                mine = budget - left_to_others if self._splits_prompts else budget
                budget -= self._plan_chunk(sequence, mine, plan)
        return budget

    def _spend_leftover(self, plan: StepPlan, first_chunk: int, budget: int) -> None:
        """Budget that later prompts could not use goes back to the prompts that left it to them."""
        if not self._splits_prompts:
            return
        for index in range(first_chunk, len(plan.entries)):
            entry = plan.entries[index]
            left = entry.sequence.num_tokens - entry.end
            mine = min(budget, self._scorable(entry.sequence, plan))
            aligned = (entry.end + mine) // self._block_tokens * self._block_tokens - entry.end
            more = left if left <= mine else aligned
            more = self.block_manager.extend_to(entry.sequence, entry.end + more) - entry.end
            if left > 0 and more > 0:
                longer = plan.entries[index] = StepEntry(entry.sequence, entry.first, entry.num_tokens + more)
                plan.num_scored += len(longer.scored) - len(entry.scored)
                budget -= more

    def _plan_chunk(self, sequence: Sequence, budget: int, plan: StepPlan) -> int:
        """Plan as many tokens of the sequence as the budget and the block borders allow. Returns how many.

        A chunk ends at its prompt's end or on a block border, so that a prompt is always cut at the same places,
        whatever else runs. Only a budget below one block makes it end elsewhere, and ``MAX_SCORED`` sooner.
        """
        budget = min(budget, self._scorable(sequence, plan))
        first, left, entries = sequence.num_computed, sequence.num_tokens - sequence.num_computed, plan.entries
        if first in sequence.reused.variant_tokens:
            left, entries = sequence.reused.variant_tokens.stop - first, plan.variant_entries
        count = min(left, budget)
        if count < left:
            aligned = (first + count) // self._block_tokens * self._block_tokens - first
            is_cut = self._splits_prompts or sequence.is_scoring
            if not is_cut or (aligned <= 0 and budget < self._max_budget):
                return 0
            count = aligned if aligned > 0 else count
        count = self.block_manager.extend_to(sequence, first + count) - first
        if count <= 0:  # it lacks pages of its windows; sequences admitted later advance, and free some
            return 0
        entry = StepEntry(sequence, first, count)
        entries.append(entry)
        plan.num_scored += len(entry.scored)
        return count

    def _scorable(self, sequence: Sequence, plan: StepPlan) -> int:
        """How many more tokens of it the step may have because of their log-probabilities."""
        return self._max_scored - plan.num_scored if sequence.is_scoring else self._max_budget

    def _next_waiting(self, plan: StepPlan) -> Sequence | None:
        """Prompts to be scored wait for those before them, and are overtaken meanwhile."""
        for sequence in self.waiting:
            if not sequence.is_parked and self._scorable(sequence, plan) >= min(self._block_tokens, self._max_budget):
                return sequence
        return None

    def _admit(self, plan: StepPlan, budget: int) -> int:
        """Admit sequences there is room for. Returns the rest of the budget."""
        while self.block_manager.tables.has_free_row and budget > 0:
            sequence = self._next_waiting(plan)
            if sequence is None:
                break
            if not self.block_manager.fits_at_all(sequence):  # it grew, was preempted, and no longer fits
                plan.failures.append((sequence, self._never_fits(sequence)))
                self.finish(sequence)
                continue
            admission = self._allocate(sequence)
            if admission is None:
                break
            planned = self._plan_chunk(sequence, budget, plan)
            if planned == 0:  # exceeds the rest of this step's budget
                self._free_blocks(sequence)
                break
            self.waiting.remove(sequence)
            sequence.move(SequenceState.RUNNING)
            self._add_running(sequence)
            plan.copies += admission.copies
            self.block_manager.swap_in(sequence, plan.copies)
            if sequence.blocks.num_sealed * self._block_tokens > sequence.num_computed:  # its last block is shared
                self._make_writable(sequence, sequence.num_computed, plan)
            plan.admissions.append(admission)
            budget -= planned
        return budget

    @property
    def may_admit(self) -> bool:
        """Whether the next plan may admit a sequence, or report that it never fits."""
        sequence = next((waiting for waiting in self.waiting if not waiting.is_parked), None)
        if sequence is None or not self.block_manager.tables.has_free_row:
            return False
        usable = self.block_manager.num_reusable(sequence, self._watermark)
        has_room = self.block_manager.can_allocate(sequence, usable, self._watermark)
        return has_room or not self.block_manager.fits_at_all(sequence)

    def _allocate(self, sequence: Sequence) -> Admission | None:
        """Blocks for all its tokens: cached ones, ones to load, ones to compute. None when there is no room."""
        usable = self.block_manager.num_reusable(sequence, self._watermark)
        num_cached = self.block_manager.allocate(sequence, usable, self._watermark)
        if num_cached is None:
            return None
        sequence.num_computed = self.block_manager.num_ready(sequence, num_cached, usable)
        sequence.reused.variant_tokens = range(0)
        if sequence.swapped is not None:
            return Admission(sequence, [])
        to_load = self._find_elsewhere(sequence, num_cached, usable)
        copies: list[tuple[int, int]] = []
        num_found = num_cached * self._block_tokens
        if not (sequence.blocks.is_loading or sequence.computes_all):
            num_copied = self.block_manager.copy_part(sequence, copies)
            sequence.num_computed += num_copied
            num_found += num_copied
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = min(num_found, sequence.num_tokens - 1)
        return Admission(sequence, to_load, copies)

    def _find_elsewhere(self, sequence: Sequence, num_cached: int, usable: int) -> list[BlockToLoad]:
        """The blocks to load after its cached ones; then come those of which a variant has KV."""
        blocks, reused = sequence.blocks, sequence.reused
        num_filled = max(num_cached, min(reused.external_blocks, usable))
        num_variant = min(reused.variant_blocks, (sequence.num_tokens - 1) // self._block_tokens)
        if num_variant > num_filled and not sequence.computes_all:
            reused.variant_tokens = range(sequence.num_computed, num_variant * self._block_tokens)
        blocks.is_loading = num_filled > num_cached or bool(reused.variant_tokens)
        table, keys = blocks.block_table, sequence.block_keys
        return [BlockToLoad(i, table[i], keys[i]) for i in range(num_cached, num_filled)]

    def _free_blocks(self, sequence: Sequence) -> None:
        """And with them what it has computed."""
        self.block_manager.free(sequence)
        sequence.num_computed = 0

    # Preemption

    @property
    def _watermark(self) -> int:
        """Blocks that stay free at admission."""
        return -(-self.pool.num_blocks // WATERMARK) if self.running else 0

    def _make_writable(self, sequence: Sequence, position: int, plan: StepPlan) -> bool:
        """Like ``BlockManager.make_writable``, preempting others. False when the sequence itself was preempted."""
        while not self.block_manager.make_writable(sequence, position, plan.copies):
            victim = self._victim(sequence)
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        return True

    def _victim(self, asking: Sequence) -> Sequence:
        """The last in order whose blocks nobody else reads or writes; ``asking`` itself if there is no other."""
        movable = (s for s in reversed(self.running) if not (s.blocks.is_loading or s.hold_blocks))
        return next(movable, asking)

    def _preempt_parked(self, plan: StepPlan) -> None:
        """Beams that wait for another beam of theirs must not hold the blocks that it needs."""
        parked = next((sequence for sequence in reversed(self.running) if sequence.is_parked), None)
        if parked is not None:
            self._preempt(parked, plan)

    def _preempt(self, victim: Sequence, plan: StepPlan) -> None:
        victim.num_preemptions += 1
        self.num_preemptions += 1
        plan.has_preempted = True
        self.block_manager.swap_out(victim, plan.copies)
        self.requeue(victim)
        plan.entries[:] = [entry for entry in plan.entries if entry.sequence is not victim]

    # Helpers

    def _arrive(self, sequence: Sequence) -> None:
        self._arrivals += 1
        sequence.arrival = self._arrivals

    def _add_running(self, sequence: Sequence) -> None:
        insort(self.running, sequence, key=_order)

    def _add_waiting(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_order)

    def _check_fits(self, sequence: Sequence) -> None:
        if not self.block_manager.fits_at_all(sequence):
            raise self._never_fits(sequence)

    def _never_fits(self, sequence: Sequence) -> OutOfBlocks:
        needed = self.block_manager.num_needed(sequence)
        return OutOfBlocks(
            f"{sequence.num_tokens} tokens need {needed} blocks of {self._block_tokens} tokens, "
            f"the whole cache has {self.pool.num_blocks}: raise kv_gb"
        )


def _order(sequence: Sequence) -> tuple[int, int]:
    """Lower priorities first, then earlier arrivals."""
    return sequence.priority, sequence.arrival


def num_prompt_tokens_left(sequences: Iterable[Sequence]) -> int:
    """Tokens still to compute, without the newest one of those that are decoding."""
    return sum(s.num_tokens - s.num_computed for s in sequences if not s.is_decoding)
