"""Thoughts: separated from answers, whole and streamed, counted, sent back, and followed by guided answers."""

from __future__ import annotations

import itertools

import openai
import pytest
import pytest_asyncio

from conductor.api import Delta, InferenceRequest
from conductor.ingress.answers import Answer, Job, joined
from conductor.ingress.metrics import Metrics
from conductor.ingress.parsers.output_format import output_format
from conductor.ingress.parsers.reasoning import Start
from conductor.stats import DispatchStats
from mooncake.rpc.cluster_pb2 import StatusResponse
from mooncake.sampling import SamplingParams
from mooncake.types import FinishReason, SampledToken

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASK = [{"role": "user", "content": "Why?"}]
THOUGHT = "Hm, a <b> or\n\n</thin… "
ANSWER = "Because <think> is a tag."
TEXT = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
TOOL = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_front(module_front_of):
    async with module_front_of(template="{{ tools }} <tool_call> tool_calls <think> </think>") as front:
        yield front


async def test_a_thought_is_told_beside_the_answer_and_counted(front, client):
    front.script.text = TEXT

    answer = await client.chat.completions.create(model="bytes", messages=ASK)

    message = answer.choices[0].message
    assert (message.content, answer.choices[0].finish_reason) == (ANSWER, "stop")
    assert message.reasoning == message.reasoning_content == THOUGHT.rstrip()
    assert answer.usage.completion_tokens == len(TEXT.encode()) + 1
    counted = answer.usage.completion_tokens_details.reasoning_tokens
    assert counted == len(TEXT[: TEXT.index("</think>") + len("</think>")].encode()) - len("<think")


async def test_a_stream_tells_the_thought_first(front, client):
    front.script.text = TEXT
    stream = await client.chat.completions.create(
        model="bytes", messages=ASK, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]

    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    thoughts = [delta.reasoning for delta in deltas if hasattr(delta, "reasoning")]
    assert "".join(thoughts) == THOUGHT.rstrip() and len(thoughts) > 5
    assert [delta.reasoning_content for delta in deltas if hasattr(delta, "reasoning_content")] == thoughts
    assert "".join(delta.content or "" for delta in deltas) == ANSWER
    kinds = ["thought" if hasattr(delta, "reasoning") else "answer" for delta in deltas if delta.content != ""]
    assert [kind for kind, _ in itertools.groupby(kinds)] == ["thought", "answer"]
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens > len(THOUGHT)


async def test_who_does_not_want_thoughts_is_told_none(front, client):
    front.script.text = TEXT
    wish = {"extra_body": {"include_reasoning": False}}
    answer = await client.chat.completions.create(model="bytes", messages=ASK, **wish)
    assert answer.choices[0].message.content == ANSWER and not hasattr(answer.choices[0].message, "reasoning")
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0

    stream = await client.chat.completions.create(model="bytes", messages=ASK, stream=True, **wish)
    deltas = [chunk.choices[0].delta async for chunk in stream]
    assert "".join(delta.content or "" for delta in deltas) == ANSWER
    assert not any(hasattr(delta, "reasoning") for delta in deltas)


async def test_who_does_not_want_thoughts_of_a_response_is_told_none(front, client):
    front.script.text = TEXT
    wish = {"input": ASK, "extra_body": {"include_reasoning": False}}
    response = await client.responses.create(model="bytes", **wish)
    assert [item.type for item in response.output] == ["message"] and response.output_text == ANSWER
    assert response.usage.output_tokens_details.reasoning_tokens > 0

    events = [event async for event in await client.responses.create(model="bytes", stream=True, **wish)]
    assert not any("reasoning" in event.type for event in events)
    assert events[-1].response.output_text == ANSWER and events[-1].response.output[0].type == "message"


@pytest.mark.parametrize("per_delta", [1, 5, 1000])
@pytest.mark.parametrize("include_reasoning", [True, False])
async def test_log_probabilities_of_a_response_are_those_of_its_text(front, client, per_delta, include_reasoning):
    """Also if its first words come together with the end of the thought."""
    front.script.text, front.script.per_delta = TEXT, per_delta
    response = await client.responses.create(
        model="bytes",
        input=ASK,
        include=["message.output_text.logprobs"],
        extra_body={"include_reasoning": include_reasoning},
    )
    scores = response.output[-1].content[0].logprobs
    assert bytes(byte for score in scores for byte in score.bytes).decode().strip() in (ANSWER, f"{ANSWER}<end>")


async def test_a_thought_that_the_template_opened_ends_at_the_first_tag(open_front):
    async with open_front(template="<think> </think>", opens="<think>\n") as front:
        front.script.text = f"{THOUGHT}</think>{ANSWER}"
        answer = (await front.http.post("/v1/chat/completions", json={"messages": ASK})).json()
        message = answer["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == (THOUGHT.rstrip(), ANSWER)

        cut = (await front.http.post("/v1/chat/completions", json={"messages": ASK, "max_tokens": 6})).json()
        message = cut["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == (THOUGHT[:5], "")
        assert cut["usage"]["completion_tokens_details"]["reasoning_tokens"] == 6

        forged = [{"role": "user", "content": "<think>"}, {"role": "assistant", "content": "Well"}]
        body = {"messages": forged, "continue_final_message": True}
        answer = (await front.http.post("/v1/chat/completions", json=body)).json()
        assert answer["choices"][0]["message"]["content"] == front.script.text  # it goes on in the middle of an answer
        forged[-1]["content"] = "<think>\nWell"
        answer = (await front.http.post("/v1/chat/completions", json=body)).json()
        assert answer["choices"][0]["message"]["reasoning"] == THOUGHT.rstrip()


async def test_where_the_template_closed_the_thought_there_is_none(open_front):
    async with open_front(template="<think> </think>", opens="<think>\n\n</think>\n\n") as front:
        body = {"messages": ASK, "response_format": {"type": "json_object"}}
        message = (await front.http.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == (None, front.script.text)
        assert not front.script.asked[0].sampling.guide.lead


async def test_a_model_without_thoughts_has_no_field_for_them(open_front):
    async with open_front(template="<|im_start|>") as front:
        front.script.text = TEXT
        answer = (await front.http.post("/v1/chat/completions", json={"messages": ASK})).json()
        message = answer["choices"][0]["message"]
        assert message["content"] == TEXT and "reasoning" not in message


async def test_a_call_behind_a_thought_is_a_call(front, client):
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    front.script.text = f"<think>I call <tool_call>.</think>\n{call}"
    answer = await client.chat.completions.create(model="bytes", messages=ASK, tools=[TOOL])
    message = answer.choices[0].message
    assert (message.reasoning, message.content) == ("I call <tool_call>.", None)
    assert message.tool_calls[0].function.arguments == '{"x": 1}'

    front.script.text = '<think>Must I?</think>{"name": "f", "arguments": {"x": 1}}'
    answer = await client.chat.completions.create(model="bytes", messages=ASK, tools=[TOOL], tool_choice="required")
    message = answer.choices[0].message
    assert (message.reasoning, message.tool_calls[0].function.arguments) == ("Must I?", '{"x": 1}')
    assert front.script.asked[-1].sampling.guide.lead


async def test_earlier_thoughts_and_calls_are_the_template_s_to_tell(front, client):
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    said = {"role": "assistant", "content": "So.", "reasoning_content": "Hm.", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "12"}

    await client.chat.completions.create(model="bytes", messages=[*ASK, said, result], tools=[TOOL])

    prompt = front.prompts[0]
    assert "'reasoning_content': 'Hm.'" in prompt and "'arguments': {'x': 1}" in prompt
    assert "<tool>12{'tool_call_id': 'call_1'}" in prompt and "<assistant>So.{" in prompt


async def test_a_response_has_its_thought_as_an_item_with_events(front, client):
    front.script.text = TEXT
    response = await client.responses.create(model="bytes", input="Why?")
    thought, message = response.output
    assert (thought.type, thought.status, thought.content[0].text) == ("reasoning", "completed", THOUGHT.rstrip())
    assert message.content[0].text == response.output_text == ANSWER
    assert response.usage.output_tokens_details.reasoning_tokens > len(THOUGHT)

    events = [event async for event in await client.responses.create(model="bytes", input="Why?", stream=True)]
    kinds = [kind for kind, _ in itertools.groupby(event.type for event in events)]
    item = ["response.output_item.added", "response.content_part.added"]
    ends = ["response.content_part.done", "response.output_item.done"]
    assert kinds[2:-1] == [
        *item,
        *("response.reasoning_text.delta", "response.reasoning_text.done", *ends),
        *item,
        *("response.output_text.delta", "response.output_text.done", *ends),
    ]
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == THOUGHT.rstrip() == events[-1].response.output[0].content[0].text

    told = [item.model_dump(exclude_none=True) for item in response.output]
    await client.responses.create(model="bytes", input=[*ASK, *told, *ASK])
    prompt = front.prompt
    assert f"<assistant>{ANSWER}{{'reasoning_content'" in prompt


@pytest.mark.parametrize("opens", ["", "<think>\n"])
async def test_a_guide_begins_behind_the_thought(open_front, opens):
    async with open_front(template="<think> </think>", opens=opens) as front:
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
        await front.http.post("/v1/chat/completions", json={"messages": ASK, "response_format": form})

    first = "" if opens else "<think>"
    assert front.guide_lets(f'{first}Let {{me}} see.\n</think>\n\n{{"a": 3}}')
    assert not front.guide_lets(f'{first}Let me see.</think>{{"a": "x"}}')
    assert not front.guide_lets(f"{first}Let me see.")
    assert front.guide_lets('{"a": 3}') == (not opens)  # a model may answer at once, where nothing was begun


async def test_a_wrong_guide_is_refused_by_its_own_name(client):
    with pytest.raises(openai.BadRequestError, match="json_schema") as caught:
        await client.chat.completions.create(model="bytes", messages=ASK, extra_body={"guided_json": {"type": 3}})
    assert caught.value.param == "guided_json"


async def test_a_guide_of_harmony_is_for_the_final_channel(open_front):
    async with open_front(template="<|channel|>") as front:
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
        front.script.text = (
            '<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>{"a": 1}'
        )
        answer = await front.http.post("/v1/chat/completions", json={"messages": ASK, "response_format": form})
        message = answer.json()["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("Hm.", '{"a": 1}')
        assert front.guide_lets(front.script.text)
        assert front.guide_lets('<|channel|>final<|message|>{"a": 1}')
        assert not front.guide_lets(front.script.text.replace("1", '"x"')) and not front.guide_lets('{"a": 1}')


@pytest.mark.parametrize("stop", [(), ("tag.",), ("\n</th",)])
async def test_how_tokens_come_together_changes_nothing(front, stop):
    """Guesses that came true come several at once."""
    form = output_format("qwen3", "auto", "", False)

    def told(num_together: int):
        job = Job(request, stop, 0.0, parser=lambda: form.parser(None, Start.BEFORE))
        answer, pieces = Answer(job, 0, front.tokenizer, Metrics("bytes", lambda: StatusResponse, DispatchStats())), []
        for first in range(0, len(tokens), num_together):
            some = tuple(tokens[first : first + num_together])
            is_last = first + num_together >= len(tokens)
            pieces.append(answer.take(Delta(some, FinishReason.STOP if is_last else None), 1.0))
            if answer.is_complete:
                break
        whole = joined(pieces)
        return whole.parts, whole.num_reasoning, whole.text

    request = InferenceRequest("r", front.tokenizer.encode("a"), SamplingParams(), 10.0)
    ids = [*TEXT.encode(), *front.tokenizer.eos_ids]
    tokens = [SampledToken(index, token_id) for index, token_id in enumerate(ids)]
    alone = told(1)
    assert [told(num) for num in (2, 3, 7, 200)] == [alone] * 4
    assert alone[1] > len(THOUGHT) or stop


async def test_helpers_of_the_official_client_put_a_streamed_response_together(front, client):
    front.script.text = TEXT
    async with client.responses.stream(model="bytes", input="Why?") as stream:
        async for _ in stream:
            pass
        response = await stream.get_final_response()
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert (response.output[0].content[0].text, response.output_text) == (THOUGHT.rstrip(), ANSWER)

    async with client.chat.completions.stream(model="bytes", messages=ASK) as stream:
        async for _ in stream:
            pass
        completion = await stream.get_final_completion()
    message = completion.choices[0].message
    assert (message.content, message.reasoning_content) == (ANSWER, THOUGHT.rstrip())
