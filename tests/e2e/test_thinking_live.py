"""A model with thoughts, and tool calls after a control token, through a whole cluster."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import anthropic
import grpc
import httpx
import numpy as np
import openai
import pytest
from drive import computing_node, wait_idle
from live import running_cluster, small_config
from tiny_model import tiny_model, tiny_tokenizer
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from mooncake.app.cluster.local import LocalCluster
from mooncake.repetition import Repetitions
from mooncake.sampling import RepetitionDetection

TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content }}{% for call in message.tool_calls or [] %}"
    "[TOOL_CALLS]{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
ASK = [{"role": "user", "content": "the quick brown fox"}]
TOOL = {"type": "function", "function": {"name": "jump", "parameters": {"type": "object"}}}


def write_thinking_model(folder: Path) -> dict[str, int]:
    """Write random weights. Returns the ids of the tags around thoughts and calls."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    tokenizer.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    tiny_model("qwen3", vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=2048).save_pretrained(folder)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return {name: tokenizer.token_to_id(name) for name in ("</think>", "[TOOL_CALLS]")}


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalCluster, dict[str, int]]]:
    folder = tmp_path_factory.mktemp("thinking")
    ids = write_thinking_model(folder)
    small = ("cluster.decode=4", "block.tokens=8", "prefill.kv_gb=0.02", "decode.kv_gb=0.02", "store.dram_gb=0.02")
    small += ("conductor.heartbeat_interval_s=0.05",)  # who decodes is known long before it has ended
    with running_cluster(small_config(f"model.path={folder}", *small)) as cluster:
        yield cluster, ids


@pytest.mark.timeout(240)
async def test_thoughts_are_free_and_answers_are_guided(thinking: tuple[LocalCluster, dict[str, int]]) -> None:
    cluster, ids = thinking
    async with openai.AsyncOpenAI(base_url=f"{cluster.http_url}/v1", api_key="none", timeout=120) as client:
        asked = {
            "model": (await client.models.list()).data[0].id,
            "messages": ASK,
            "n": 4,
            "seed": 1,
            "logit_bias": {str(ids["</think>"]): 4},  # so that a random model stops thinking
            "max_tokens": 120,
            "extra_body": {"guided_choice": ["fox", "dog"]},
        }
        answer = await client.chat.completions.create(**asked)
        messages = [choice.message for choice in answer.choices if choice.finish_reason == "stop"]
        assert messages and {message.content for message in messages} <= {"fox", "dog"}
        assert any(message.reasoning for message in messages)
        assert answer.usage.completion_tokens_details.reasoning_tokens > len(messages)

        thoughts, texts = [""] * 4, [""] * 4
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                thoughts[choice.index] += getattr(choice.delta, "reasoning_content", None) or ""
                texts[choice.index] += choice.delta.content or ""
        assert thoughts == [choice.message.reasoning or "" for choice in answer.choices]
        assert texts == [choice.message.content for choice in answer.choices]


@pytest.mark.timeout(240)
async def test_a_thought_has_no_more_tokens_than_its_budget(thinking: tuple[LocalCluster, dict[str, int]]) -> None:
    """OpenAI's and Anthropic's clients; the budget is that of each answer, and what is below it stays as it was."""
    cluster, ids = thinking
    async with openai.AsyncOpenAI(base_url=f"{cluster.http_url}/v1", api_key="none", timeout=120) as client:
        asked = {
            "model": (await client.models.list()).data[0].id,
            "messages": ASK,
            "n": 3,
            "seed": 5,
            "max_tokens": 60,
            "logit_bias": {str(ids["</think>"]): -5},
        }
        wishes = {"return_token_ids": True, "min_tokens": 40}  # a random model would end its answer in its thought
        limits = wishes | {"thinking_token_budget": 9}
        free = await client.chat.completions.create(**asked, extra_body=wishes)
        limited = await client.chat.completions.create(**asked, extra_body=limits)
        for long, short in zip(free.choices, limited.choices, strict=True):
            assert ids["</think>"] not in long.token_ids[:30]
            assert short.token_ids[:10] == [*long.token_ids[:9], ids["</think>"]]
            assert short.message.reasoning
        assert limited.usage.completion_tokens_details.reasoning_tokens == 3 * 10

        guided = await client.chat.completions.create(
            **asked, extra_body={"thinking_token_budget": 9, "guided_choice": ["fox", "dog"]}
        )
        assert {choice.message.content for choice in guided.choices} <= {"fox", "dog"}

    async with anthropic.AsyncAnthropic(base_url=cluster.http_url, api_key="none") as claude:
        message = await claude.messages.create(
            model=asked["model"],
            messages=ASK,
            max_tokens=40,
            thinking={"type": "enabled", "budget_tokens": 9},
            extra_body={"seed": 5, "min_tokens": 40, "logit_bias": asked["logit_bias"]},
        )
        assert message.content[0].type == "thinking"
        assert message.content[0].thinking == limited.choices[0].message.reasoning


@pytest.mark.timeout(240)
@pytest.mark.parametrize("dies", [False, True])
async def test_an_answer_that_loops_ends_by_itself_also_on_another_node(
    thinking: tuple[LocalCluster, dict[str, int]], dies: bool
) -> None:
    cluster, ids = thinking
    pattern = {"max_pattern_size": 8, "min_count": 60}
    async with (
        openai.AsyncOpenAI(base_url=f"{cluster.http_url}/v1", api_key="none", timeout=120) as client,
        grpc.aio.insecure_channel(cluster.grpc_address) as channel,
    ):
        await wait_idle(channel)  # a node that an earlier test has killed is back
        model = (await client.models.list()).data[0].id
        wishes = {"repetition_detection": pattern, "return_token_ids": True, "guided_regex": "fox (dog lazy ){1000}"}
        bias = {str(ids["</think>"]): 100}
        tokens, reason, retries = [], None, num_retries(cluster)
        async for chunk in await client.chat.completions.create(
            model=model, messages=ASK, temperature=0, max_tokens=1500, logit_bias=bias, extra_body=wishes, stream=True
        ):
            [choice] = chunk.choices
            if not tokens and dies and choice.delta.content:
                os.kill(cluster.pids[await computing_node(channel, "decode")], signal.SIGKILL)
            tokens += getattr(choice, "token_ids", None) or []
            reason = choice.finish_reason or reason
        wanted = RepetitionDetection(8, 60)
        assert reason == "repetition" and choice.stop_reason == "repetition_detected"
        assert Repetitions(wanted, np.array(tokens)).are_enough
        assert not Repetitions(wanted, np.array(tokens[:-1])).are_enough
        assert (num_retries(cluster) > retries) == dies


@pytest.mark.timeout(240)
async def test_a_call_behind_a_control_token_is_read(thinking: tuple[LocalCluster, dict[str, int]]) -> None:
    cluster, ids = thinking
    async with openai.AsyncOpenAI(base_url=f"{cluster.http_url}/v1", api_key="none", timeout=120) as client:
        asked = {
            "model": (await client.models.list()).data[0].id,
            "tools": [TOOL],
            "temperature": 0,
            "logit_bias": {str(ids["</think>"]): 100},
            "max_tokens": 60,
            "extra_body": {"guided_grammar": f'start: <[{ids["[TOOL_CALLS]"]}]> "jump{{" /"over": [0-9]/ "}}"'},
        }
        answer = await client.chat.completions.create(messages=ASK, **asked)
        said = answer.choices[0].message
        assert (said.content, answer.choices[0].finish_reason) == (None, "tool_calls")
        [call] = said.tool_calls
        assert call.function.name == "jump" and json.loads(call.function.arguments)["over"] in range(10)

        turns = [*ASK, said, {"role": "tool", "tool_call_id": call.id, "content": "over"}]
        again = await client.chat.completions.create(messages=turns, **asked)
        assert again.usage.prompt_tokens_details.cached_tokens > 0  # what the template made of it is what was said


def num_retries(cluster: LocalCluster) -> float:
    lines = httpx.get(f"{cluster.http_url}/metrics", trust_env=False).text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith("mooncake_retries_total"))


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("place", ["reasoning_content", "content"])
async def test_a_guided_answer_goes_on_elsewhere_from_where_it_was(
    thinking: tuple[LocalCluster, dict[str, int]], place: str
) -> None:
    """Its node dies during the thought, or within the guide: the next one derives the state from the tokens sent."""
    cluster, ids = thinking
    wishes = {
        "messages": ASK,
        "seed": 7,
        "temperature": 1.5,
        "max_tokens": 1500,
        "logit_bias": {str(ids["</think>"]): -0.5},
        "guided_regex": "((fox|dog|lazy) ){400}",
    }
    async with (
        openai.AsyncOpenAI(base_url=f"{cluster.http_url}/v1", api_key="none", timeout=120) as client,
        grpc.aio.insecure_channel(cluster.grpc_address) as channel,
    ):
        await wait_idle(channel)  # a node that an earlier test has killed is back
        asked = {"model": (await client.models.list()).data[0].id, "messages": ASK, "extra_body": wishes}
        undisturbed = (await client.chat.completions.create(**asked)).choices[0]
        retries = num_retries(cluster)
        said = {"reasoning_content": "", "content": ""}
        victim = ""
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            for kind in said:
                said[kind] += getattr(chunk.choices[0].delta, kind, None) or ""
            if said[place] and not victim:
                victim = await computing_node(channel, "decode")
                os.kill(cluster.pids[victim], signal.SIGKILL)

        assert num_retries(cluster) > retries, "it was over before its node died"
        message = undisturbed.message
        assert said == {"reasoning_content": message.reasoning_content, "content": message.content}
        assert len(message.reasoning_content) > 20 and message.content.startswith(("fox ", "dog ", "lazy "))
