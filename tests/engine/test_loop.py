"""The engine's thread: it reports how every request ended, and no error ends it."""

from __future__ import annotations

import gc
import logging
import queue
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from mooncake.engine.contract import NO_HOOK, StepOutput
from mooncake.engine.engine import Engine
from mooncake.engine.hosting.node_hook import NodeHook, StepSamples
from mooncake.engine.loop import EngineThread
from mooncake.engine.reused_kv import ReusedKV
from mooncake.engine.sequence import Sequence
from mooncake.engine.step_plan import BlockToLoad, StepPlan
from mooncake.errors import (
    Cancelled,
    InternalError,
    InvalidRequest,
    KVLoadFailed,
    MooncakeError,
    NodeUnavailable,
    OutOfMemory,
)
from mooncake.model.batch import ForwardBatch, LayerHook
from mooncake.sampling import SamplingParams
from mooncake.types import SampledToken
from tests.engine.hash_model import GREEDY, HashModel, hash_engine, hash_sequence, random_prompt, true_answer

WAIT_S = 20.0


class Inbox:
    """The outputs that a listener received."""

    def __init__(self) -> None:
        self._told: queue.Queue[StepOutput | MooncakeError] = queue.Queue()

    def __call__(self, output: StepOutput | MooncakeError) -> None:
        self._told.put(output)

    def next(self) -> StepOutput | MooncakeError:
        return self._told.get(timeout=WAIT_S)

    def answer(self) -> list[int]:
        tokens: list[int] = []
        while True:
            output = self.next()
            if isinstance(output, MooncakeError):
                raise output
            tokens.append(output.token.token_id)
            if output.finish_reason is not None:
                return tokens


class FragileModel(HashModel):
    """Fails once, when it is told to."""

    failure: Exception | None = None

    def forward(self, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook) -> torch.Tensor:
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        return super().forward(batch, cache, hook)


class BrokenLink:
    """A hook whose loads always fail."""

    def admitted(self, sequence: Sequence, to_load: list[BlockToLoad]) -> None:
        pass

    def begin_step(self, plan: StepPlan) -> None:
        self.loading = tuple(entry.sequence.request_id for entry in plan.entries if entry.sequence.blocks.is_loading)

    def before_layer(self, layer: int) -> None:
        if layer == 1 and self.loading:
            raise KVLoadFailed("the link broke", self.loading)

    def after_layer(self, layer: int) -> None:
        pass

    def end_step(self, plan: StepPlan) -> None:
        pass


@pytest.fixture
def model() -> FragileModel:
    return FragileModel()


@pytest.fixture
def thread(model: FragileModel) -> Iterator[EngineThread]:
    thread = EngineThread(hash_engine(model=model))
    thread.start(BrokenLink())
    yield thread
    thread.stop()
    thread.engine.block_pool.check()


def in_use(thread: EngineThread) -> int:
    return thread.call(lambda engine: engine.block_pool.num_in_use).result(WAIT_S)


def test_requests_from_many_threads_are_all_answered(thread: EngineThread) -> None:
    inboxes = {i: Inbox() for i in range(20)}

    def ask(i: int) -> None:
        thread.add(hash_sequence(f"r{i}", random_prompt(3 + i, i)), inboxes[i])

    askers = [threading.Thread(target=ask, args=(i,)) for i in inboxes]
    for asker in askers:
        asker.start()
    for i, inbox in inboxes.items():
        assert inbox.answer() == true_answer(random_prompt(3 + i, i), 12)
    for asker in askers:
        asker.join()
    assert in_use(thread) == 0


def test_a_refused_request_is_told_so(thread: EngineThread) -> None:
    inbox = Inbox()
    thread.add(hash_sequence("r", [5_000]), inbox)
    assert isinstance(inbox.next(), InvalidRequest)


def test_an_aborted_request_is_told_so(thread: EngineThread) -> None:
    inbox = Inbox()
    thread.add(hash_sequence("r", random_prompt(3, 0), SamplingParams(max_tokens=190, temperature=0.0)), inbox)
    assert isinstance(inbox.next(), StepOutput)
    thread.call(lambda engine: engine.abort("r")).result(WAIT_S)
    while isinstance(last := inbox.next(), StepOutput):
        pass
    assert isinstance(last, Cancelled)
    assert in_use(thread) == 0


def test_a_failed_load_is_computed_instead(thread: EngineThread) -> None:
    inbox = Inbox()
    thread.add(hash_sequence("r", random_prompt(21, 0), reused=ReusedKV(4)), inbox)
    assert inbox.answer() == true_answer(random_prompt(21, 0), 12)


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (RuntimeError("out of luck"), InternalError),
        (KVLoadFailed("for no reason"), KVLoadFailed),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."), OutOfMemory),
        (MemoryError(), OutOfMemory),
    ],
)
def test_a_step_that_fails_ends_its_requests_and_nothing_else(
    thread: EngineThread,
    model: FragileModel,
    failure: Exception,
    told: type[MooncakeError],
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = Inbox(), Inbox()
    with caplog.at_level(logging.CRITICAL):
        model.failure = failure
        thread.add(hash_sequence("first", random_prompt(5, 0)), first)
        error = first.next()
    assert type(error) is told
    thread.add(hash_sequence("second", random_prompt(5, 0)), second)
    assert second.answer() == true_answer(random_prompt(5, 0), 12)
    assert in_use(thread) == 0


def test_an_engine_that_cannot_even_fail_says_so_to_everybody(
    model: FragileModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise requests would hang, because nothing else ends them."""

    def lose_the_books(output: StepOutput | MooncakeError) -> None:
        broken.engine._requests._sequences.clear()  # whoever shall end now is not there
        model.failure = RuntimeError("out of luck")

    broken = EngineThread(hash_engine(model=model))
    broken.start()
    other, waiting = Inbox(), Inbox()
    long_answer = SamplingParams(max_tokens=190, temperature=0.0)
    with caplog.at_level(logging.CRITICAL):
        broken.add(hash_sequence("other", random_prompt(3, 0), long_answer), other)
        assert isinstance(other.next(), StepOutput)
        broken.add(hash_sequence("r", random_prompt(5, 0), long_answer), lose_the_books)
        error = broken.broken.result(WAIT_S)
    assert "the engine is broken" in error.message and "the engine is broken" in caplog.text
    while isinstance(last := other.next(), StepOutput):
        pass
    assert isinstance(last, NodeUnavailable)
    broken.add(hash_sequence("late", [1]), waiting)
    refused = waiting.next()
    assert isinstance(refused, NodeUnavailable) and refused.message == error.message
    with pytest.raises(NodeUnavailable, match="the engine is broken"):
        broken.call(lambda engine: None).result(WAIT_S)
    broken.stop()


def test_a_failed_step_leaves_blocks_that_others_may_be_reading(thread: EngineThread, model: FragileModel) -> None:
    inbox = Inbox()
    model.failure = RuntimeError("out of luck")
    thread.add(hash_sequence("r", random_prompt(9, 0), hold_blocks=True), inbox)
    assert isinstance(inbox.next(), InternalError)
    assert in_use(thread) == 3
    thread.call(lambda engine: engine.abort("r")).result(WAIT_S)
    assert in_use(thread) == 0


def test_a_listener_that_fails_hurts_nobody_else(thread: EngineThread) -> None:
    def broken(output: StepOutput | MooncakeError) -> None:
        raise ValueError("a bug of the listener")

    inbox = Inbox()
    thread.add(hash_sequence("broken", random_prompt(5, 0)), broken)
    thread.add(hash_sequence("r", random_prompt(5, 1)), inbox)
    assert inbox.answer() == true_answer(random_prompt(5, 1), 12)


def test_a_reserved_sequence_is_listened_to_from_its_first_token(thread: EngineThread) -> None:
    inbox = Inbox()
    sequence = hash_sequence("r", random_prompt(4, 0), eos_ids=(7,))
    thread.call(lambda engine: engine.reserve(sequence)).result(WAIT_S)
    thread.listen("r", inbox)

    def start(engine: Engine) -> None:
        engine.start_reserved("r", [SampledToken(0, 7)])

    thread.call(start).result(WAIT_S)
    assert inbox.answer() == [7]


def test_nobody_is_kept_who_no_longer_listens(thread: EngineThread) -> None:
    """While other requests keep the engine busy, and although no answer of this request has ended."""
    thread.add(hash_sequence("other", random_prompt(3, 0), SamplingParams(max_tokens=190, temperature=0.0)), Inbox())
    inbox = Inbox()
    listener = weakref.ref(inbox)
    thread.add(hash_sequence("r", random_prompt(5, 1), SamplingParams(max_tokens=190, temperature=0.0, n=2)), inbox)
    assert isinstance(inbox.next(), StepOutput)
    for choice in range(2):
        thread.call(lambda engine, choice=choice: engine.end_choice("r", choice)).result(WAIT_S)
    thread.drop("r").result(WAIT_S)
    del inbox
    gc.collect()
    assert listener() is None
    thread.drop("other").result(WAIT_S)
    assert in_use(thread) == 0


def test_errors_of_a_call_reach_the_caller(thread: EngineThread) -> None:
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda engine: 1 // 0).result(WAIT_S)


def test_stopping_tells_everyone_and_later_calls_are_refused() -> None:
    thread = EngineThread(hash_engine())
    thread.start()
    running, late = Inbox(), Inbox()
    long_answer = SamplingParams(max_tokens=190, temperature=0.0)
    thread.add(hash_sequence("r", random_prompt(3, 0), long_answer), running)
    assert isinstance(running.next(), StepOutput)
    thread.stop()
    thread.stop()
    while isinstance(last := running.next(), StepOutput):
        assert last.finish_reason is None
    assert isinstance(last, NodeUnavailable)
    thread.add(hash_sequence("late", [1], GREEDY), late)
    assert isinstance(late.next(), NodeUnavailable)
    assert thread.engine.block_pool.num_in_use == 0


class HangingModel(HashModel):
    """Computes nothing from its third step on, until it is let go; then it may fail."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error
        self.is_there = threading.Event()
        self.let_go = threading.Event()

    def forward(self, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook) -> torch.Tensor:
        if len(self.batches) == 2:
            self.is_there.set()
            self.let_go.wait(WAIT_S)
            if self.error is not None:
                raise self.error
        return super().forward(batch, cache, hook)


def test_a_step_that_hangs_can_be_given_up() -> None:
    model, inbox = HangingModel(), Inbox()
    thread = EngineThread(hash_engine(model=model))
    thread.start()
    thread.add(hash_sequence("r", random_prompt(5, 0)), inbox)
    assert model.is_there.wait(WAIT_S)
    behind = thread.call(lambda engine: None)
    thread.give_up("it hangs")
    assert [inbox.next(), inbox.next()][0].token.index == 0  # type: ignore[union-attr]
    told = [inbox.next(), thread.broken.result(timeout=WAIT_S)]
    told += [call.exception(timeout=WAIT_S) for call in (behind, thread.call(lambda engine: None))]  # type: ignore[misc]
    assert [(type(error), str(error)) for error in told] == 4 * [(NodeUnavailable, "it hangs")]
    thread.stop()  # does not wait for it
    assert thread._thread.is_alive()
    model.let_go.set()
    thread._thread.join(WAIT_S)
    assert not thread._thread.is_alive() and thread.engine.block_pool.num_in_use == 0
    thread.give_up("again")
    assert str(thread.broken.result()) == "it hangs"


def test_a_step_that_fails_after_it_was_given_up_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """What it waited for has been ended, because it hung. A launcher reports a node's last words."""
    model, inbox = HangingModel(NodeUnavailable("a rank was killed")), Inbox()
    thread = EngineThread(hash_engine(model=model))
    thread.start()
    thread.add(hash_sequence("r", random_prompt(5, 0)), inbox)
    assert model.is_there.wait(WAIT_S)
    thread.give_up("it hangs")
    model.let_go.set()
    thread._thread.join(WAIT_S)
    assert not thread._thread.is_alive() and thread.engine.block_pool.num_in_use == 0
    assert not caplog.records


class Rests:
    """Long rests, until they are over; remembers which steps they followed."""

    def __init__(self) -> None:
        self.are_over = False
        self.has_begun = threading.Event()
        self.steps_s: list[float] = []

    def __call__(self, step_s: float) -> float:
        self.steps_s.append(step_s)
        self.has_begun.set()
        return 0.0 if self.are_over else 10 * WAIT_S


def test_a_resting_engine_serves_calls_and_goes_on_when_they_end_its_rest() -> None:
    rests, inbox = Rests(), Inbox()
    thread = EngineThread(hash_engine())
    thread.start(rest_after=rests)
    prompt = random_prompt(5, 0)
    thread.add(hash_sequence("r", prompt), inbox)
    assert rests.has_begun.wait(WAIT_S)
    computed = thread.call(lambda engine: engine.load().computed_tokens).result(WAIT_S)
    assert thread.call(lambda engine: engine.load().computed_tokens).result(WAIT_S) == computed  # no step in between
    assert len(set(rests.steps_s)) <= 2  # of one step, or of that which had nothing to do before it

    def end(_: object) -> None:
        rests.are_over = True

    thread.call(end)
    assert inbox.answer() == true_answer(prompt, 12)
    thread.stop()


def test_a_hook_tells_steps_with_prompts_from_decode_steps() -> None:
    engine, hook, told = hash_engine(), NodeHook(NO_HOOK, StepSamples(), lambda: None), []
    engine.add(hash_sequence("r", random_prompt(5, 0)))
    while engine.has_work:
        engine.step(hook)
        told.append(hook.computed_prompts)
    assert told == [True] + 11 * [False]


def test_an_engine_that_rests_stops_at_once() -> None:
    rests, inbox = Rests(), Inbox()
    thread = EngineThread(hash_engine())
    thread.start(rest_after=rests)
    thread.add(hash_sequence("r", random_prompt(5, 0)), inbox)
    assert rests.has_begun.wait(WAIT_S)
    thread.stop()
    while isinstance(last := inbox.next(), StepOutput):
        assert last.finish_reason is None
    assert isinstance(last, NodeUnavailable)
