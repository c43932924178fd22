"""Several answers to one prompt, live: computed once, sent once, and each as it would be alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from drive import ask, counters, status, wait_idle

from mooncake import LLM, BeamSearchParams, SamplingParams
from mooncake.app.cluster.local import LocalCluster
from mooncake.rpc import common_pb2, inference_pb2, inference_pb2_grpc
from mooncake.sampling import Guide, GuideKind

PROMPT = [int(i) for i in range(1000, 1150)]  # two full blocks and a partial one
NUM_ANSWERS = 4
SEED = 77
SAMPLING = {"temperature": 0.9, "top_p": 0.95}


@pytest_asyncio.fixture
async def channel(cluster: LocalCluster) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
        yield channel


async def ask_for_several(channel: grpc.aio.Channel, prompt: list[int], **sampling: Any) -> list[list[int]]:
    wanted = {"max_tokens": 24, "ignore_eos": True, **sampling}
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt), sampling=common_pb2.SamplingParams(**wanted)
    )
    answers: dict[int, list[int]] = {}
    async for response in inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=120):
        tokens = answers.setdefault(response.choice, [])
        for token in response.tokens:
            assert token.index == len(tokens), "a gap or a repeat in the stream"
            tokens.append(token.token_id)
    return [answers[choice] for choice in sorted(answers)]


@pytest.mark.timeout(240)
async def test_four_answers_take_one_prefill_and_one_transfer(channel: grpc.aio.Channel) -> None:
    await wait_idle(channel)
    prompt = [(await status(channel)).requests_total + token for token in PROMPT]  # that nobody has cached
    before = {role: await counters(channel, role) for role in ("prefill", "decode")}
    together = await ask_for_several(channel, prompt, n=NUM_ANSWERS, seed=SEED, **SAMPLING)
    await wait_idle(channel)
    after = {role: await counters(channel, role) for role in ("prefill", "decode")}
    prefill, decode = ({key: after[role][key] - before[role][key] for key in after[role]} for role in after)
    assert prefill["tokens_computed"] == len(prompt)
    assert decode["tokens_computed"] == NUM_ANSWERS * (24 - 1)
    assert decode["handoffs_taken"] == 1
    assert decode["sequences_forked"] == NUM_ANSWERS - 1
    assert decode["blocks_shared_by_forks"] == (NUM_ANSWERS - 1) * (len(prompt) // 64)
    assert decode["blocks_copied_on_write"] == NUM_ANSWERS - 1

    for number, answer in enumerate(together):
        alone = await ask(channel, prompt, 24, seed=SEED + number, **SAMPLING)
        assert answer == alone.tokens, f"answer {number} is another one when it is asked for alone"
    await wait_idle(channel)


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_beams_and_guides_go_on_after_the_hand_off(channel: grpc.aio.Channel) -> None:
    def here() -> tuple[list[list[int]], str]:
        with LLM("smollm2", kv_gb=0.2, threads=1) as llm:
            [found] = llm.beam_search([PROMPT], BeamSearchParams(4, 24, ignore_eos=True), use_tqdm=False)
            [guided] = llm.generate(PROMPT, SamplingParams(max_tokens=40, temperature=0.0, guide=guide))
            return [beam.tokens[len(PROMPT) :] for beam in found.sequences], guided.text

    guide = Guide(GuideKind.JSON_SCHEMA, json.dumps({"enum": [["one", 1], ["two", 2], {"three": [3, 3, 3]}]}))
    await wait_idle(channel)
    before = await counters(channel, "decode")
    beams = await ask_for_several(channel, PROMPT, n=4, beam_search=common_pb2.BeamSearch(length_penalty=1.0))
    wire = common_pb2.Guide(kind=guide.kind, text=guide.text)
    guided = await ask(channel, PROMPT, 40, ignore_eos=False, guide=wire)
    assert json.loads(guided.text) in json.loads(guide.text)["enum"]
    assert (beams, guided.text) == await asyncio.to_thread(here)
    await wait_idle(channel)
    after = await counters(channel, "decode")
    assert after["handoffs_taken"] - before["handoffs_taken"] == 2
    assert after["blocks_shared_by_forks"] > before["blocks_shared_by_forks"]
