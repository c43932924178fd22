"""What the next step computes: decodes first, then chunks of prompts, within the available blocks.

Pure: it moves sequences and block numbers and returns a plan. It knows nothing of torch, clocks, the tokens' meaning or
the hook. Lower priorities come first, then earlier arrivals. When blocks run out, the sequence last in order is
preempted: it releases its blocks and is recomputed later. The first one always advances, so there is no livelock. A
long prompt leaves half of a step's budget to prompts after it, if they can use it.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from mooncake.engine.block_pool import BlockPool
from mooncake.engine.holdings import Holdings
from mooncake.engine.sequence import Sequence, SequenceState
from mooncake.errors import MooncakeError, OutOfBlocks, Overloaded
from mooncake.page_groups import UNIFORM, PageGroups
from mooncake.types import BlockKey

MOST_LOOKED_AT = 8  # waiting sequences that a long prompt leaves budget for
HEADROOM = 100  # one block in this many stays free at admission while others run, so that they can grow


class StepEntry(NamedTuple):
    """The tokens ``first ≤ i < first + num_tokens`` of a sequence are computed in this step.

    The last ``num_draft`` of them are guesses, which may be wrong. (A tuple, because there is one per sequence and
    step, and loops unpack it.)
    """

    sequence: Sequence
    first: int
    num_tokens: int
    num_draft: int = 0

    @property
    def end(self) -> int:
        return self.first + self.num_tokens

    @property
    def scored(self) -> range:
        """Prompt positions whose logits are wanted too, to score the prompt's next token."""
        if not self.sequence.is_scoring:
            return range(0)
        return range(self.first, min(self.end, self.sequence.num_prompt - 1))


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence got its blocks. ``to_load`` are those to be filled from elsewhere: (index in the table, id, key)."""

    sequence: Sequence
    to_load: list[tuple[int, int, BlockKey]]


@dataclass(slots=True)
class StepPlan:
    """One step: decodes come first in ``entries``. ``copies`` of blocks (from, to) are made before anything else, in
    order; numbers above the cache's blocks are places of the swap space. The tokens of ``inherited`` are computed
    only in some layers, before the others."""

    entries: list[StepEntry] = field(default_factory=list)
    inherited: list[StepEntry] = field(default_factory=list)
    has_preempted: bool = False
    admissions: list[Admission] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    failures: list[tuple[Sequence, MooncakeError]] = field(default_factory=list)


class Scheduler:
    """Waiting and running sequences, and the block tables of those that have blocks."""

    def __init__(
        self,
        pool: BlockPool,
        chunk_tokens: int,
        max_sequences: int,
        max_model_len: int,
        max_waiting: int,
        num_places: int = 0,
        groups: PageGroups = UNIFORM,
    ) -> None:
        """``chunk_tokens``: maximum prompt tokens in a step, 0 for whole prompts only; ``num_places``: blocks of
        preempted sequences that can be kept."""
        self.pool = pool
        self._budget = chunk_tokens or max_model_len
        self.blocks = Holdings(pool, max_sequences, max_model_len, num_places, groups, self._budget)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of turn, like the queue
        self.propose: Callable[[Sequence], list[int]] | None = None  # returns guesses of what follows
        self.drafts = False  # whether to call it
        self.num_preemptions = 0
        self._block_tokens = pool.block_tokens
        self._num_groups = groups.num_groups
        self._max_sequences = max_sequences
        self._max_waiting = max_waiting
        self._splits_prompts = chunk_tokens > 0
        self._arrivals = 0

    # Arrival and departure

    def add(self, sequence: Sequence) -> None:
        """Raises Overloaded when too many wait already, OutOfBlocks when it can never fit."""
        if len(self.waiting) >= self._max_waiting:
            raise Overloaded(f"{len(self.waiting)} sequences are waiting already")
        self._check_fits_at_all(sequence)
        self._arrive(sequence)
        self._wait(sequence)

    def withdraw(self, sequence: Sequence) -> None:
        """As if it had never been added, however far ``add`` got."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)

    def reserve(self, sequence: Sequence) -> int:
        """Give it blocks for all its tokens, without running it. Returns how many leading ones are filled already.

        Raises OutOfBlocks when there is no room now; preempted sequences waiting for blocks go first.
        """
        self._check_fits_at_all(sequence)
        if not self.blocks.tables.has_room:
            raise OutOfBlocks(f"{self._max_sequences} sequences are running or about to")
        if self.waiting and (self.waiting[0].num_preemptions or self.waiting[0].choice):
            raise OutOfBlocks("sequences that have begun here come first")
        sequence.extend_keys(self._block_tokens)
        num_cached = self.blocks.give(sequence, len(sequence.block_keys), self._headroom, sequence.num_tokens)
        if num_cached is None:
            needed = self.blocks.num_needed(sequence)
            raise OutOfBlocks(f"{needed} blocks are needed, {self.pool.num_available} are available")
        self._arrive(sequence)
        sequence.move(SequenceState.RESERVED)
        return num_cached

    def start_reserved(self, sequence: Sequence) -> None:
        """Its blocks are filled: it runs from now on."""
        sequence.move(SequenceState.RUNNING)
        self._run(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """``child`` shares the blocks of all its tokens but the last, which the running ``parent`` has computed.

        If too many sequences run, or the parent was preempted, the child waits for its turn, and then uses what is
        cached.
        """
        child.arrival = parent.arrival
        if not self.blocks.tables.has_room or parent.state is not SequenceState.RUNNING:
            self._wait(child)
            return
        self.blocks.share(parent, child)
        child.move(SequenceState.RUNNING)
        self._run(child)

    def finish(self, sequence: Sequence, *, hold: bool = False) -> None:
        """It leaves, from whatever state it is in; with ``hold`` its blocks stay."""
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
        elif sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
        self.blocks.forget_swapped(sequence)
        if hold:
            self.blocks.take_row(sequence)
            sequence.move(SequenceState.HELD)
            return
        sequence.move(SequenceState.FINISHED)
        self.blocks.take_back(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """From running back to its place in the queue, without its blocks; its tokens stay."""
        self.running.remove(sequence)
        self._take_blocks_back(sequence)
        sequence.move(SequenceState.WAITING)
        self._wait(sequence)

    # The step

    def plan(self, budget_beside: Callable[[int], int] | None = None) -> StepPlan:
        """Moves sequences between the queues and allocates blocks, but computes nothing: a plan may be abandoned.

        ``budget_beside`` returns how many prompt tokens may be computed beside this many decodes.
        """
        plan = StepPlan()
        self._plan_decodes(plan)
        num_decodes = len(plan.entries)
        budget = self._budget if budget_beside is None else min(budget_beside(num_decodes), self._budget)
        budget = self._plan_chunks(plan, budget)
        if not plan.has_preempted:
            budget = self._admit(plan, budget)
        self._use_up(plan, num_decodes, budget)
        if not (plan.entries or plan.inherited) and any(not sequence.is_parked for sequence in self.waiting):
            self._make_parked_give_way(plan)
        return plan

    def _plan_decodes(self, plan: StepPlan) -> None:
        """One token of every sequence that is past its prompt."""
        for sequence in list(self.running):
            place = sequence.num_computed
            holding = sequence.holding
            if place + 1 != sequence.num_tokens or holding.is_loading or sequence.state is not SequenceState.RUNNING:
                continue
            if place < holding.num_writable or self._make_writable(sequence, place, plan):
                num_draft = self._draft(sequence, plan) if self.drafts else 0
                plan.entries.append(StepEntry(sequence, place, 1 + num_draft, num_draft))

    def _draft(self, sequence: Sequence, plan: StepPlan) -> int:
        """Append guesses to its tokens, as many as there is room for without taking any from others. Returns how
        many."""
        if self.propose is None or sequence.sampling.beam_search is not None or sequence.num_left < 2:
            return 0
        draft = self.propose(sequence)[: sequence.num_left - 1]
        if not draft:
            return 0
        held = len(sequence.holding.block_table) * self._block_tokens
        free = self.pool.num_available - len(self.running) * self._num_groups  # each running sequence may need one
        room = held + max(free, 0) // self._num_groups * self._block_tokens - sequence.num_tokens
        draft = draft[: max(room, 0)]
        sequence.write_draft(draft)
        for position in range(held, sequence.num_tokens + len(draft), self._block_tokens):
            self._make_writable(sequence, position, plan)
        return len(draft)

    def make_room(self, entries: list[StepEntry]) -> bool:
        """Make sure that these tokens can be written. False if that would take a preemption or a copy."""
        new = [(entry.sequence, entry.first) for entry in entries if entry.first >= entry.sequence.holding.num_writable]
        if len(new) * self._num_groups > self.pool.num_available:
            return False
        if any(self.blocks.needs_copy(sequence, position) for sequence, position in new):
            return False
        for sequence, position in new:
            self.blocks.make_writable(sequence, position, [])
        return True

    def _plan_chunks(self, plan: StepPlan, budget: int) -> int:
        """The next chunk of running prompts, in order of turn. Returns the rest of the budget (tokens).

        Each leaves up to half of what it finds to those after it, which are often short.
        """
        if len(plan.entries) == len(self.running):  # all are past their prompts
            return budget
        prompts = [s for s in self.running if (not s.is_decoding or s.holding.is_loading) and not s.is_parked]
        behind = sum(s.num_tokens - s.num_computed for s in prompts)
        behind += sum(s.num_tokens for s in islice(self.waiting, MOST_LOOKED_AT)) if self.blocks.tables.has_room else 0
        for sequence in prompts:
            behind -= sequence.num_tokens - sequence.num_computed
            left_to_others = min(budget // 2, behind) // self._block_tokens * self._block_tokens
            if budget > 0:
                mine = budget - left_to_others if self._splits_prompts else budget
                budget -= self._plan_chunk(sequence, mine, plan)
        return budget

    def _use_up(self, plan: StepPlan, first_chunk: int, budget: int) -> None:
        """Budget left over by later prompts goes back to the prompts that left it."""
        if not self._splits_prompts:
            return
        for index in range(first_chunk, len(plan.entries)):
            entry = plan.entries[index]
            left = entry.sequence.num_tokens - entry.end
            aligned = (entry.end + budget) // self._block_tokens * self._block_tokens - entry.end
            more = left if left <= budget else aligned
            more = self.blocks.covered(entry.sequence, entry.end + more) - entry.end
            if left > 0 and more > 0:
                plan.entries[index] = StepEntry(entry.sequence, entry.first, entry.num_tokens + more)
                budget -= more

    def _plan_chunk(self, sequence: Sequence, budget: int, plan: StepPlan) -> int:
        """Plan as much of the sequence as the budget and the grid allow. Returns how many tokens.

        A chunk ends at its prompt's end or on a block border, counted from the start of the sequence, so that a prompt
        is always cut at the same places, whatever else runs. Only a budget below one block makes it end elsewhere.
        """
        first, left, entries = sequence.num_computed, sequence.num_tokens - sequence.num_computed, plan.entries
        if first in sequence.borrowed.inherits:
            left, entries = sequence.borrowed.inherits.stop - first, plan.inherited
        count = min(left, budget)
        if count < left:
            aligned = (first + count) // self._block_tokens * self._block_tokens - first
            if not self._splits_prompts or (aligned <= 0 and budget < self._budget):
                return 0
            count = aligned if aligned > 0 else count
        count = self.blocks.covered(sequence, first + count) - first
        if count <= 0:  # it lacks pages of its windows; sequences admitted later advance, and free some
            return 0
        entries.append(StepEntry(sequence, first, count))
        return count

    def _admit(self, plan: StepPlan, budget: int) -> int:
        """Admit sequences there is room for. Returns the rest of the budget."""
        while self.blocks.tables.has_room and budget > 0:
            sequence = next((waiting for waiting in self.waiting if not waiting.is_parked), None)
            if sequence is None:
                break
            if not self.blocks.can_ever_hold(sequence):  # it grew, was preempted, and no longer fits
                plan.failures.append((sequence, self._never_fits(sequence)))
                self.finish(sequence)
                continue
            admission = self._give_prompt_blocks(sequence)
            if admission is None:
                break
            planned = self._plan_chunk(sequence, budget, plan)
            if planned == 0:  # exceeds the rest of this step's budget
                self._take_blocks_back(sequence)
                break
            self.waiting.remove(sequence)
            sequence.move(SequenceState.RUNNING)
            self._run(sequence)
            self.blocks.swap_in(sequence, plan.copies)
            if sequence.holding.num_sealed * self._block_tokens > sequence.num_computed:  # its last block is shared
                self._make_writable(sequence, sequence.num_computed, plan)
            plan.admissions.append(admission)
            budget -= planned
        return budget

    @property
    def may_admit(self) -> bool:
        """Whether the next plan may admit a sequence, or report that it never fits."""
        sequence = next((waiting for waiting in self.waiting if not waiting.is_parked), None)
        if sequence is None or not self.blocks.tables.has_room:
            return False
        usable = self.blocks.num_usable(sequence, self._headroom)
        has_room = self.blocks.num_cached(sequence, usable, self._headroom) is not None
        return has_room or not self.blocks.can_ever_hold(sequence)

    def _give_prompt_blocks(self, sequence: Sequence) -> Admission | None:
        """Blocks for all tokens: cached ones, ones to load, ones to compute."""
        usable = self.blocks.num_usable(sequence, self._headroom)
        num_cached = self.blocks.give(sequence, usable, self._headroom)
        if num_cached is None:
            return None
        num_ready = self.blocks.num_ready(sequence, num_cached, usable)
        holding, borrowed = sequence.holding, sequence.borrowed
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = min(num_cached * self._block_tokens, sequence.num_tokens - 1)
        sequence.num_computed = num_ready
        borrowed.inherits = range(0)
        if sequence.swapped is not None:
            return Admission(sequence, [])
        num_filled = max(num_cached, min(borrowed.external_blocks, usable))
        num_inherited = min(borrowed.inheritable_blocks, (sequence.num_tokens - 1) // self._block_tokens)
        if num_inherited > num_filled and not sequence.is_scoring:
            borrowed.inherits = range(num_ready, num_inherited * self._block_tokens)
        holding.is_loading = num_filled > num_cached or bool(borrowed.inherits)
        to_load = [(i, holding.block_table[i], sequence.block_keys[i]) for i in range(num_cached, num_filled)]
        return Admission(sequence, to_load)

    def _take_blocks_back(self, sequence: Sequence) -> None:
        """And with them what it has computed."""
        self.blocks.take_back(sequence)
        sequence.num_computed = 0

    # Preemption

    @property
    def _headroom(self) -> int:
        """Blocks that stay free at admission."""
        return -(-self.pool.num_blocks // HEADROOM) if self.running else 0

    def _make_writable(self, sequence: Sequence, position: int, plan: StepPlan) -> bool:
        """Like ``Holdings.make_writable``, preempting others. False when the sequence itself was preempted."""
        while not self.blocks.make_writable(sequence, position, plan.copies):
            victim = self._victim(sequence)
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        return True

    def _victim(self, asking: Sequence) -> Sequence:
        """The last in order whose blocks nobody else reads or writes; ``asking`` itself if there is no other."""
        movable = (s for s in reversed(self.running) if not (s.holding.is_loading or s.hold_blocks))
        return next(movable, asking)

    def _make_parked_give_way(self, plan: StepPlan) -> None:
        """Beams that wait for another beam of theirs must not hold the blocks that it needs."""
        parked = next((sequence for sequence in reversed(self.running) if sequence.is_parked), None)
        if parked is not None:
            self._preempt(parked, plan)

    def _preempt(self, victim: Sequence, plan: StepPlan) -> None:
        victim.num_preemptions += 1
        self.num_preemptions += 1
        plan.has_preempted = True
        self.blocks.swap_out(victim, plan.copies)
        self.put_back(victim)
        plan.entries[:] = [entry for entry in plan.entries if entry.sequence is not victim]

    # Helpers

    def _arrive(self, sequence: Sequence) -> None:
        self._arrivals += 1
        sequence.arrival = self._arrivals

    def _run(self, sequence: Sequence) -> None:
        insort(self.running, sequence, key=_turn)

    def _wait(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_turn)

    def _check_fits_at_all(self, sequence: Sequence) -> None:
        if not self.blocks.can_ever_hold(sequence):
            raise self._never_fits(sequence)

    def _never_fits(self, sequence: Sequence) -> OutOfBlocks:
        needed = self.blocks.num_needed(sequence)
        return OutOfBlocks(
            f"{sequence.num_tokens} tokens need {needed} blocks of {self._block_tokens} tokens, "
            f"the whole cache has {self.pool.num_blocks}: raise kv_gb"
        )


def _turn(sequence: Sequence) -> tuple[int, int]:
    """The order of turns: lower priorities, then earlier arrivals."""
    return sequence.priority, sequence.arrival


def num_prompt_tokens_left(sequences: Iterable[Sequence]) -> int:
    """Tokens still to compute, without the newest one of those that are decoding."""
    return sum(s.num_tokens - s.num_computed for s in sequences if not s.is_decoding)
