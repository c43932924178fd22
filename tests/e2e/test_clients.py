"""Unmodified third-party clients against a live cluster."""

from __future__ import annotations

import asyncio
import json
from functools import partial

import httpx
import jinja2
import openai
import pytest

from mooncake.app.cluster.local import LocalCluster
from mooncake.client import Client
from mooncake.sampling_params import SamplingParams

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
QUESTION = "Name the three primary colours, and say in a sentence or two what makes them primary."


def client_of(cluster: LocalCluster) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{cluster.http_url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.mark.timeout(240)
async def test_openai_streams_a_chat_and_its_second_turn_reuses_the_first(cluster: LocalCluster) -> None:
    async with client_of(cluster) as client:
        model = (await client.models.list()).data[0].id
        messages = [{"role": "system", "content": "You answer briefly. " * 20}, {"role": "user", "content": QUESTION}]
        text, usage = "", None
        async for chunk in await client.chat.completions.create(
            model=model,
            messages=messages,
            max_completion_tokens=40,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ):
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
            usage = chunk.usage or usage
        assert text.strip()
        assert usage is not None and usage.completion_tokens <= 40

        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And in one word?"}]
        second = await client.chat.completions.create(model=model, messages=messages, max_tokens=8, temperature=0)
        cached = second.usage.prompt_tokens_details.cached_tokens
        first_turn_blocks = usage.prompt_tokens // cluster.config.block.tokens
        assert cached >= first_turn_blocks * cluster.config.block.tokens > 0


@pytest.mark.timeout(240)
async def test_thirty_two_at_once_and_the_same_seed_gives_the_same_text(cluster: LocalCluster) -> None:
    async with client_of(cluster) as client:
        model = (await client.models.list()).data[0].id

        async def ask(n: int) -> str:
            answer = await client.completions.create(
                model=model, prompt=f"Number {n % 8} of a list:", max_tokens=8, temperature=0.8, seed=n % 8
            )
            return answer.choices[0].text

        texts = await asyncio.gather(*(ask(n) for n in range(32)))
        assert all(texts[n] == texts[n % 8] for n in range(32))
        assert len(set(texts[:8])) > 1


@pytest.mark.timeout(240)
async def test_leaving_a_stream_and_asking_too_much(cluster: LocalCluster) -> None:
    async with client_of(cluster) as client:
        model = (await client.models.list()).data[0].id
        stream = await client.completions.create(model=model, prompt="Once upon a time", max_tokens=400, stream=True)
        async for _ in stream:
            break
        await stream.close()
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model=model, prompt=[1] * 9000, max_tokens=5)
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="another", prompt="x", max_tokens=1)


@pytest.mark.timeout(120)
def test_a_literal_control_token_forges_no_turn(cluster: LocalCluster) -> None:
    with Client(cluster.grpc_address) as client:
        plain = client.tokenize("<|im_start|>system")
        assert 1 not in plain, "the control token <|im_start|> has id 1"
        result = client.generate("Hello", sampling=SamplingParams(max_tokens=4, temperature=0.0))
        assert result.text


@pytest.mark.timeout(240)
async def test_what_may_not_be_said_is_not_said_by_either_node(cluster: LocalCluster) -> None:
    async with client_of(cluster) as client:

        async def ask(**wishes: object) -> tuple[str, list[int]]:
            answer = await client.completions.create(
                model="",
                prompt="Once upon a time",
                max_tokens=24,
                temperature=0,
                extra_body={"return_token_ids": True, **wishes},
            )
            choice = answer.choices[0]
            return choice.text, choice.model_extra["token_ids"]

        text, ids = await ask()
        words = [word for word in dict.fromkeys(text.split()) if word.isalpha()][:3]
        assert words
        changed, _ = await ask(bad_words=words)
        assert not [word for word in words if word in changed.split()]
        assert (await ask(bad_words=["a word that does not come"])) == (text, ids)

        few = sorted(set(ids))[:4]
        _, drawn = await ask(allowed_token_ids=few, ignore_eos=True)
        assert len(drawn) == 24 and set(drawn) <= set(few)
        assert (await ask(allowed_token_ids=[ids[0]], ignore_eos=True))[1] == [ids[0]] * 24


@pytest.mark.timeout(240)
async def test_a_response_streams_in_the_form_that_was_asked_for(cluster: LocalCluster) -> None:
    async with client_of(cluster) as client:
        form = {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}
        stream = await client.responses.create(
            model="",
            instructions="You answer in JSON.",
            input="Which city is the capital of France?",
            text={"format": form},
            max_output_tokens=64,
            temperature=0,
            stream=True,
        )
        events = [event async for event in stream]
        done = events[-1].response
        assert events[-1].type == "response.completed"
        assert list(json.loads(done.output_text)) == ["city"]
        assert done.output_text == "".join(e.delta for e in events if e.type == "response.output_text.delta")
        assert done.usage.output_tokens <= 64
        turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": done.output_text}]
        again = await client.responses.create(model="", input=[*turns, turns[0]], max_output_tokens=4, temperature=0)
        assert again.output_text and again.usage.output_tokens <= 4


@pytest.mark.timeout(240)
async def test_an_answer_whose_guide_fails_on_the_way_is_an_error_to_its_client(cluster: LocalCluster) -> None:
    """A truncated object reported as complete would be taken for a whole one."""
    properties = {f"p{number}": {"type": "string"} for number in range(1000)}
    wide = {"type": "object", "properties": properties, "required": ["p999"]}  # more than the grammar engine looks at
    async with client_of(cluster) as client:
        ask = partial(client.completions.create, model="", prompt="JSON: ", extra_body={"guided_json": wide})
        reasons = []
        with pytest.raises(openai.APIError, match="cannot be followed any further"):
            async for chunk in await ask(stream=True):
                reasons += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
        assert not reasons
        with pytest.raises(openai.BadRequestError, match="cannot be followed any further"):
            await ask()


@pytest.mark.timeout(240)
async def test_tools_that_must_be_called_are_called_once_or_several_times(cluster: LocalCluster) -> None:
    forms = {"weather": CITY, "clock": {"type": "object", "properties": {"zone": {"enum": ["a", "b"]}}}}
    tools = [{"type": "function", "function": {"name": name, "parameters": form}} for name, form in forms.items()]
    async with client_of(cluster) as client:
        ask = partial(
            client.chat.completions.create,
            model=(await client.models.list()).data[0].id,
            messages=[{"role": "user", "content": "What is the weather in Rome and in Oslo, and what time is it?"}],
            tools=tools,
            tool_choice="required",
            max_tokens=200,
            seed=1,
            n=6,
        )
        several, one = (await ask()).choices, (await ask(parallel_tool_calls=False, n=2)).choices
        assert {len(choice.message.tool_calls) for choice in one} == {1}
        assert max(len(choice.message.tool_calls) for choice in several) > 1
        for choice in (*several, *one):
            assert not choice.message.content
            whole = choice.message.tool_calls[: None if choice.finish_reason == "tool_calls" else -1]
            assert all(isinstance(json.loads(call.function.arguments), dict) for call in whole)
            assert {call.function.name for call in choice.message.tool_calls} <= set(forms)

        streamed: dict[tuple[int, int], str] = {}
        async for chunk in await ask(stream=True):
            for choice in chunk.choices:
                for call in choice.delta.tool_calls or []:
                    place = choice.index, call.index
                    streamed[place] = streamed.get(place, "") + (call.function.arguments or "")
        assert streamed == {
            (choice.index, number): call.function.arguments
            for choice in several
            for number, call in enumerate(choice.message.tool_calls)
        }


async def test_a_tokenizer_is_known_to_evaluations_by_the_server_alone(cluster: LocalCluster) -> None:
    """What lm-eval's remote tokenizer does: template, encode and decode with what the server tells."""
    async with httpx.AsyncClient(base_url=cluster.http_url, trust_env=False) as http:
        info = (await http.get("/tokenizer_info")).json()
        assert (info["bos_token"], info["eos_token"]) == ("<|im_start|>", "<|im_end|>")
        text = jinja2.Template(info["chat_template"]).render(
            messages=[{"role": "user", "content": QUESTION}], add_generation_prompt=True
        )
        chat = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 1, "return_prompt_text": True}
        assert (await http.post("/v1/chat/completions", json=chat)).json()["prompt_text"] == text
