"""The requests in an engine: their sequences, the answers each still expects, and how sequences join, fork and leave.

It keeps the scheduler, the beam searches and its own table consistent. It knows nothing of steps, tokens or the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from mooncake.engine.decoding.beam_search import BeamSearches
from mooncake.engine.scheduler import StepScheduler
from mooncake.engine.sequence import SCHEDULABLE, Sequence, SequenceState
from mooncake.errors import MooncakeError, NotFinite


class Requests:
    """A request begins with one sequence and one expected answer; its forks are further answers, or beams."""

    def __init__(self, scheduler: StepScheduler, before_free: Callable[[Sequence], None]) -> None:
        """``before_free`` is called with each sequence whose blocks are about to be freed."""
        self.searches = BeamSearches(self.fork, self.remove, self.stop_early)
        self._scheduler = scheduler
        self._before_free = before_free
        self._sequences: dict[str, Sequence] = {}
        self._open: Counter[str] = Counter()  # by request: answers that have neither ended nor failed
        self._failures: list[tuple[str, MooncakeError]] = []

    def __contains__(self, sequence_id: str) -> bool:
        return sequence_id in self._sequences

    def get(self, sequence_id: str) -> Sequence | None:
        return self._sequences.get(sequence_id)

    def sequences_of(self, root_id: str) -> list[Sequence]:
        return [sequence for sequence in self._sequences.values() if sequence.root_id == root_id]

    def is_open(self, root_id: str) -> bool:
        """Whether some answer of the request has not ended."""
        return root_id in self._open

    def take_failures(self) -> list[tuple[str, MooncakeError]]:
        """Answers that ended without their last token since the last call: by request, and why."""
        failures, self._failures = self._failures, []
        return failures

    # Joining

    def add(self, sequence: Sequence) -> None:
        """A new request waits for its turn. Raises what ``StepScheduler.add`` does."""
        try:
            self._insert(sequence)
            self._scheduler.add(sequence)
        except BaseException:  # including KeyboardInterrupt, which can come anywhere
            self._scheduler.undo_add(sequence)
            self._undo_add(sequence)
            raise

    def reserve(self, sequence: Sequence) -> int:
        """A new request gets blocks, which another engine fills. Returns and raises as the scheduler's ``reserve``."""
        num_cached = self._scheduler.reserve(sequence)
        self._insert(sequence)
        return num_cached

    def fork(self, parent: Sequence, children: list[Sequence]) -> None:
        """``children`` continue with the parent's blocks. If they are answers, ``expect`` counts them."""
        for child in children:
            self._scheduler.fork(parent, child)
            self._sequences[child.request_id] = child

    def expect(self, root_id: str, num_answers: int) -> None:
        self._open[root_id] += num_answers

    def _insert(self, sequence: Sequence) -> None:
        self._sequences[sequence.request_id] = sequence
        self.expect(sequence.root_id, 1)

    def _undo_add(self, sequence: Sequence) -> None:
        """As if it had never been added, however far ``add`` got."""
        self._sequences.pop(sequence.request_id, None)
        self._open.pop(sequence.root_id, None)

    # Leaving

    def close(self, root_id: str) -> None:
        """One answer of the request has ended."""
        self._open[root_id] -= 1
        if not self._open[root_id]:
            del self._open[root_id]

    def finish(self, sequence: Sequence) -> None:
        """It has its last token, or none can be sampled (``failure``)."""
        if sequence.failure is None:
            self.close(sequence.root_id)
        elif sequence.state is SequenceState.FINISHED:  # with another beam of its search
            return
        else:
            if isinstance(sequence.failure, NotFinite):  # the content of its blocks may be the cause
                self._scheduler.block_manager.discard(sequence)
            self.report_failure(sequence, sequence.failure)
        if sequence.hold_blocks:
            self._scheduler.finish(sequence, hold=True)
        elif sequence.request_id in self._sequences:
            self.remove(sequence)

    def fail(self, sequence: Sequence, error: MooncakeError) -> None:
        """It ends without its last token (or has it, if held: then nobody is told)."""
        if sequence.state is SequenceState.FINISHED:  # with another beam of its search
            return
        was_held = sequence.state is SequenceState.HELD
        self.remove(sequence)
        if not was_held:
            self.report_failure(sequence, error)

    def fail_scheduled(self, error: MooncakeError, sequence_ids: set[str] | None) -> None:
        """These waiting and running sequences (None: all) end with ``error``; blocks that others may be reading or
        filling stay."""
        for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
            is_meant = sequence_ids is None or sequence.request_id in sequence_ids
            if is_meant and sequence.state in SCHEDULABLE:  # otherwise it ended with another beam of its search
                self.stop_early(sequence)
                self.report_failure(sequence, error)
        self._close_orphans()

    def forget(self, sequence: Sequence, error: MooncakeError) -> None:
        """The scheduler has given it up, with this error."""
        del self._sequences[sequence.request_id]
        if self.is_open(sequence.root_id):  # otherwise its search ended with another beam
            self.report_failure(sequence, error)

    def report_failure(self, sequence: Sequence, error: MooncakeError) -> None:
        """One answer of its request, or its whole beam search, ends with ``error``."""
        self.searches.drop(sequence.root_id)
        self.close(sequence.root_id)
        self._failures.append((sequence.root_id, error))

    def stop_early(self, sequence: Sequence) -> None:
        """Remove it, but keep blocks that others may be reading or filling."""
        if sequence.state is SequenceState.RUNNING and (sequence.hold_blocks or sequence.blocks.is_loading):
            self._scheduler.finish(sequence, hold=True)
        else:
            self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Free its blocks, whatever its state."""
        self._before_free(sequence)
        self._scheduler.finish(sequence)
        del self._sequences[sequence.request_id]

    def _close_orphans(self) -> None:
        """End answers that have no sequence: those that would have been forked in a step that failed."""
        here = {sequence.root_id for sequence in self._sequences.values()}
        for root_id in self._open.keys() - here:
            del self._open[root_id]
