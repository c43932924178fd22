"""Token for token: what the live cluster answers, in every mode that moves KV differently, against the reference.

Real processes, the real model, fp32, greedy. One run is compared in full with the reference; every other mode must give
the same tokens, and where it does not, that answer is compared too (a tie may go either way).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence

import grpc
import pytest
import pytest_asyncio
from drive import Answer, ask, ask_all
from reference import Verdict, check_greedy, prompts

from mooncake.app.cluster.local import LocalCluster
from mooncake.config import load_config

NEW_TOKENS = 64
MAX_TIES = 1 / 5000

QUICK = prompts(5, 300, seed=1)
FULL = prompts(64, 2000, seed=2)


def settings(*extra: str) -> list[str]:
    return [
        "conductor.http_port=0",
        "conductor.grpc_port=0",
        "prefill.kv_gb=1.2",
        "decode.kv_gb=2.0",
        "store.dram_gb=2.0",
        *extra,
    ]


class Judge:
    """Collects verdicts; answers already judged for the same prompt and tokens are not computed again."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], Verdict] = {}

    async def __call__(self, asked: Sequence[list[int]], answers: Sequence[Answer]) -> Verdict:
        total = Verdict()
        for prompt, answer in zip(asked, answers, strict=True):
            assert len(answer.tokens) == NEW_TOKENS
            key = (tuple(prompt), tuple(answer.tokens))
            if key not in self._known:
                self._known[key] = await asyncio.to_thread(check_greedy, prompt, answer.tokens)
            total.add(self._known[key])
        assert total.wrong == 0, f"{total.wrong} of {total.checked} tokens differ, first {total.first_wrong}"
        assert total.ties <= max(1, total.checked * MAX_TIES), f"{total.ties} ties in {total.checked} tokens"
        return total


JUDGE = Judge()


@pytest_asyncio.fixture
async def channel(request: pytest.FixtureRequest) -> AsyncIterator[grpc.aio.Channel]:
    """A live cluster with the overrides that the test gives by indirect parametrisation."""
    overrides = getattr(request, "param", [])
    async with (
        LocalCluster(load_config(None, settings(*overrides))) as cluster,
        grpc.aio.insecure_channel(cluster.grpc_address) as channel,
    ):
        yield channel


def follow_up(prompt: list[int], answer: Answer) -> list[int]:
    """The next turn of a conversation: all that was said, and something new."""
    return prompt + answer.tokens + [1 + (len(prompt) + i) % 997 for i in range(17)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "channel",
    [["transfer.transports=['shm']"], ["prefill.context_parallel=2", "prefill.threads=2"]],
    indirect=True,
    ids=["shm", "prompts over two ranks"],
)
async def test_a_few_prompts_cold_reused_and_as_turns(channel: grpc.aio.Channel) -> None:
    cold = await ask_all(channel, QUICK, NEW_TOKENS, at_once=3)
    await JUDGE(QUICK, cold)

    again = await ask_all(channel, QUICK, NEW_TOKENS, at_once=1)
    assert [a.tokens for a in again] == [a.tokens for a in cold]
    assert any(answer.cached_tokens > 0 for answer in again)

    whole = max(QUICK, key=len)[:128]  # of which only the last token is left to compute
    answers = [await ask(channel, whole, NEW_TOKENS) for _ in range(3)]
    await JUDGE([whole] * 3, answers)
    assert [answer.cached_tokens for answer in answers[1:]] == [127, 127]

    second = [follow_up(prompt, answer) for prompt, answer in zip(QUICK, cold, strict=True)]
    await JUDGE(second, await ask_all(channel, second, NEW_TOKENS, at_once=3))


MODES = [
    pytest.param(["transfer.transports=['shm']", "prefill.chunk_tokens=64"], id="shm-chunk64"),
    pytest.param(["transfer.transports=['tcp']", "prefill.chunk_tokens=256"], id="tcp-chunk256"),
    pytest.param(
        ["transfer.transports=['shm']", "prefill.chunk_tokens=0", "cluster.prefill=2", "cluster.decode=2"],
        id="shm-whole-2x2",
    ),
    pytest.param(["transfer.transports=['tcp']", "prefill.chunk_tokens=0"], id="tcp-whole"),
]


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("channel", MODES, indirect=True)
async def test_every_prompt_in_every_mode(channel: grpc.aio.Channel) -> None:
    # in a batch of 16, arriving at random
    order = list(range(len(FULL)))
    random.Random(3).shuffle(order)
    gate = asyncio.Semaphore(16)
    pause = random.Random(4)

    async def arrive(index: int, after_s: float) -> tuple[int, Answer]:
        await asyncio.sleep(after_s)
        async with gate:
            return index, await ask(channel, FULL[index], NEW_TOKENS)

    arrivals = [arrive(index, pause.uniform(0, 10)) for index in order]
    batched = dict(await asyncio.gather(*arrivals))
    await JUDGE(FULL, [batched[i] for i in range(len(FULL))])

    # alone, with whatever is cached now: own prefixes reused
    alone = list(range(0, len(FULL), 6))
    for index in alone:
        again = await ask(channel, FULL[index], NEW_TOKENS)
        assert again.tokens == batched[index].tokens or (await JUDGE([FULL[index]], [again])).ties
        assert again.cached_tokens >= min(len(FULL[index]) // 64 * 64, len(FULL[index]) - 1)

    # second and third turns of conversations
    asked, answers = [FULL[i] for i in alone], [batched[i] for i in alone]
    for _ in range(2):
        asked = [follow_up(prompt, answer) for prompt, answer in zip(asked, answers, strict=True)]
        answers = await ask_all(channel, asked, NEW_TOKENS, at_once=8)
        await JUDGE(asked, answers)
        assert all(answer.cached_tokens > 0 for prompt, answer in zip(asked, answers, strict=True) if len(prompt) > 128)


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_one_process_gives_the_same_tokens() -> None:
    from mooncake import LLM, SamplingParams

    some = FULL[::4]
    llm = LLM("smollm2", kv_gb=2.0)
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    completions = await asyncio.to_thread(llm.generate, some, sampling)
    await JUDGE(some, [Answer(tokens=list(c.token_ids)) for c in completions])
