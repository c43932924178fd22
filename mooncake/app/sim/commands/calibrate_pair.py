"""Times of a prefill and a decode node, measured through a running cluster as its clients see them.

``mooncake calibrate`` times the engine alone. A node does more: it streams layers, writes to the pool, answers calls,
and shares caches and memory with its neighbour. Clients wait for all of that, so it is measured there, while the other
node is idle and while it works. It sends requests and evaluates their times, and starts no process.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from conductor.placement.cost import ALL_NODES, NO_FORGETTING, CostModel, DecodeCost, PrefillCost
from mooncake.app.bench.load.traffic import Answer, Traffic, Watched
from mooncake.app.latency import longest_tenth_mean
from mooncake.errors import InternalError

ROUNDS = 3  # each over all sizes, so that a slow moment of the machine does not affect only one size
PROMPTS = ((640, 4), (32, 4), (1280, 2), (96, 4), (256, 4))  # tokens, number sent together
WITH_HANDOFF = 2  # new tokens: with one, the decode node would not be involved
CONTEXTS = (96, 640)  # prompt lengths to decode from, one per round
BATCHES = (1, 2, 4)
STEPS = 32
BESIDE_TOKENS = (96, 256)  # lengths of prompts computed during decoding: those measured most recently
BESIDE_PROMPTS, BESIDE_BATCH, DECODED_TOKENS = 4, 2, 32
STEPS_BESIDE = 240  # decode steps per sequence while prompts are computed


@dataclass(frozen=True, slots=True)
class PairCosts:
    """Costs of a pair of nodes: step curves while the other node is idle (``prefill``, ``decode``), factors by which
    they are slower while it works (``*_beside``), and further waits of a request: before its first token
    (``request_ms``), and from then until its first decode step (``handoff_ms``)."""

    prefill: PrefillCost
    decode: DecodeCost
    request_ms: float
    handoff_ms: float
    decode_tail: float  # mean of the longest tenth of equal steps, over the mean of all
    prefill_beside: float
    decode_beside: float


class PairSamples:
    """Measurements so far. Measure before and after the run to predict: a shared machine's speed changes from minute
    to minute."""

    def __init__(self) -> None:
        self._fitted = CostModel(forgetting=NO_FORGETTING)  # all measurements have the same weight
        self._request_ms: list[float] = []
        self._handoff_ms: list[float] = []
        self._tails: list[float] = []
        self._prefill_slower: list[float] = []  # factors during decoding
        self._decode_slower: list[float] = []  # factors during prefill

    async def measure(self, served: Watched, traffic: Traffic, longest: int, tell: Callable[[str], None]) -> None:
        """Measure with prompts of up to ``longest`` tokens, plus their answers. Takes two minutes with one core per
        node. Raises MooncakeError when the cluster does not answer."""
        for turn in range(ROUNDS):

            def say(what: str, turn: int = turn) -> None:
                tell(f"round {turn + 1} of {ROUNDS}: {what}")

            await self._measure_once(served, traffic, longest, turn, say)

    async def _measure_once(
        self, served: Watched, traffic: Traffic, longest: int, turn: int, tell: Callable[[str], None]
    ) -> None:
        context_tokens = CONTEXTS[turn % len(CONTEXTS)]
        prompts: dict[int, list[list[int]]] = {}  # by length; cached once they were sent
        alone_ms: dict[int, float] = {}  # of one prompt, by length
        for tokens, count in PROMPTS:
            if tokens <= max(longest, *BESIDE_TOKENS):
                tell(f"prefill of {tokens} tokens")
                prompts[tokens] = [traffic.prompt(tokens) for _ in range(count)]
                alone_ms[tokens], more_ms = one_by_one(await _ask_all(served, prompts[tokens], WITH_HANDOFF))
                self._fitted.observe_prefill(ALL_NODES, tokens, 0, alone_ms[tokens])
                self._request_ms.append(more_ms)
        alone = await self._measure_decode(served, prompts[min(context_tokens, max(prompts))], tell)
        tell("both at once")
        beside = await _measure_beside(served, traffic)
        more_ms = self._fitted.decode(ALL_NODES).context_ms * (beside.steps.context - alone.context)
        self._prefill_slower.append(beside.prefill_ms / sum(alone_ms[tokens] for tokens in BESIDE_TOKENS))
        self._decode_slower.append(beside.steps.ms / (alone.ms + more_ms))

    async def _measure_decode(self, served: Watched, prompts: list[list[int]], tell: Callable[[str], None]) -> _Steps:
        """Decode after these cached prompts. Returns the steps of BESIDE_BATCH."""
        tokens, found = len(prompts[0]), dict[int, _Steps]()
        for batch in BATCHES:
            tell(f"decode of {batch} sequences of {tokens} tokens")
            answers = await _ask_all(served, prompts[:batch], STEPS)
            steps = found[batch] = together(answers, tokens)
            self._tails.append(steps.tail)
            self._fitted.observe_decode(ALL_NODES, batch, round(steps.context), steps.ms)
            if batch == 1:
                self._handoff_ms.append(answers[0].gaps_ms[0] - steps.ms)
        return found[BESIDE_BATCH]

    def costs(self) -> PairCosts:
        return PairCosts(
            self._fitted.prefill(ALL_NODES),
            self._fitted.decode(ALL_NODES),
            request_ms=max(statistics.median(self._request_ms), 0.0),
            handoff_ms=max(statistics.median(self._handoff_ms), 0.0),
            decode_tail=max(statistics.median(self._tails), 1.0),
            prefill_beside=max(statistics.mean(self._prefill_slower), 1.0),
            decode_beside=max(statistics.mean(self._decode_slower), 1.0),
        )


class _Steps(NamedTuple):
    """Decode steps: mean ms, tokens of context of all sequences, and the longest tenth over the mean."""

    ms: float
    context: float
    tail: float


class _Beside(NamedTuple):
    """While both nodes work: the ms of one prompt of each size, summed, and the decode steps."""

    prefill_ms: float
    steps: _Steps


async def _ask_all(served: Watched, prompts: list[list[int]], new: int) -> list[Answer]:
    return list(await asyncio.gather(*(served.ask(prompt, new) for prompt in prompts)))


def one_by_one(answers: list[Answer]) -> tuple[float, float]:
    """From prompts of one length, sent together and computed one after the other: ms per prompt, and the ms that the
    first one waited in addition."""
    firsts = sorted(answer.token_times_s[0] for answer in answers)
    each_s = (firsts[-1] - firsts[0]) / (len(firsts) - 1)
    sent_s = min(answer.sent_s for answer in answers)
    return each_s * 1e3, (firsts[0] - sent_s - each_s) * 1e3


def together(answers: list[Answer], tokens: int) -> _Steps:
    """Decode steps during which all answers received tokens."""
    begin = max(answer.token_times_s[1] for answer in answers)
    end = min(answer.token_times_s[-1] for answer in answers)
    return _steps_within(answers, tokens, begin, end)


def _steps_within(answers: list[Answer], tokens: int, begin_s: float, end_s: float) -> _Steps:
    step_ms, contexts, tails = [], [], []
    for answer in answers:
        inside = [at for at, time_s in enumerate(answer.token_times_s) if begin_s <= time_s <= end_s]
        if len(inside) > 1:
            gaps_ms = answer.gaps_ms[inside[0] : inside[-1]]
            step_ms.append(statistics.mean(gaps_ms))
            tails.append(longest_tenth_mean(gaps_ms) / step_ms[-1])
            contexts.append(tokens + (inside[0] + inside[-1]) / 2)
    if not step_ms:
        raise InternalError("fewer than two tokens came in the measured interval")
    return _Steps(statistics.mean(step_ms), sum(contexts), statistics.mean(tails))


async def _measure_beside(served: Watched, traffic: Traffic) -> _Beside:
    """Measure prompts while other sequences are decoded."""
    all_run, running = asyncio.Event(), set[int]()

    def note(client: int, count: int) -> None:
        if count > 2:
            running.add(client)
        if len(running) == BESIDE_BATCH:
            all_run.set()

    async def decode(client: int) -> Answer:
        return await served.ask(traffic.prompt(DECODED_TOKENS), STEPS_BESIDE, lambda count: note(client, count))

    decoding = [asyncio.create_task(decode(client)) for client in range(BESIDE_BATCH)]
    try:
        await all_run.wait()
        answers, each_ms = list[Answer](), 0.0
        for tokens in BESIDE_TOKENS:
            prompts = [traffic.prompt(tokens) for _ in range(BESIDE_PROMPTS)]
            answers += (found := await _ask_all(served, prompts, WITH_HANDOFF))
            each_ms += one_by_one(found)[0]
        begin = min(answer.sent_s for answer in answers)
        end = max(answer.token_times_s[0] for answer in answers)
        steps = _steps_within(await asyncio.gather(*decoding), DECODED_TOKENS, begin, end)
    finally:
        for task in decoding:
            task.cancel()
        await asyncio.gather(*decoding, return_exceptions=True)
    return _Beside(each_ms, steps)
