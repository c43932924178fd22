"""The Responses API, by the official client: whole and streamed, with forms and tools, and what it refuses."""

from __future__ import annotations

import json
import time

import openai
import pytest
from weather import CALL, WEATHER

from conductor.ingress.apis.responses_input import MAX_ITEMS, input_messages
from conductor.ingress.apis.responses_types import ResponsesRequest
from conductor.ingress.fields.request_json import decode_request
from mooncake.errors import NodeUnavailable
from mooncake.sampling import GuideKind

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_text_is_answered_whole(front, client):
    front.script.cached_tokens = 3

    response = await client.responses.create(
        model="bytes", input="Hi", instructions="Be brief.", temperature=0.5, metadata={"who": "me"}
    )

    assert response.id.startswith("resp_") and response.object == "response" and response.status == "completed"
    assert response.output_text == "Hello, wörld!"
    [item] = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert front.prompt == "<system>Be brief.<user>Hi<assistant>"
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens) == (len(front.prompt), len("Hello, wörld!".encode()) + 1)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens == 3
    assert (response.temperature, response.top_p, response.metadata) == (0.5, 1.0, {"who": "me"})
    assert (response.model, response.instructions, response.error) == ("bytes", "Be brief.", None)
    assert front.script.asked[-1].sampling.temperature == 0.5


async def test_a_stream_tells_the_same_in_typed_events(front, client):
    events = [event async for event in await client.responses.create(model="bytes", input="Hi", stream=True)]

    kinds = [event.type for event in events]
    before = ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    after = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    assert kinds[:4] == before and kinds[-4:] == [*after, "response.completed"]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events[4:-4])
    done = events[-1].response
    assert text == events[-4].text == events[-3].part.text == done.output_text == "Hello, wörld!"
    assert {event.item_id for event in events[3:-2]} == {done.output[0].id}
    assert events[0].response.status == "in_progress" and not events[0].response.output
    assert done.id == events[0].response.id and done.usage.output_tokens == 15


async def test_the_frames_of_a_stream_are_named_and_there_is_no_done(front):
    body = {"input": "Hi", "stream": True}
    async with front.http.stream("POST", "/v1/responses", json=body) as answer:
        lines = [line async for line in answer.aiter_lines() if line]
    names, data = lines[::2], lines[1::2]
    assert all(line.startswith("data: ") for line in data)
    assert [f"event: {json.loads(line[6:])['type']}" for line in data] == names


async def test_an_answer_that_is_cut_is_incomplete(front, client):
    response = await client.responses.create(model="bytes", input="Hi", max_output_tokens=5)
    assert (response.status, response.output_text) == ("incomplete", "Hello")
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"
    stream = await client.responses.create(model="bytes", input="Hi", max_output_tokens=5, stream=True)
    assert [event.type async for event in stream][-1] == "response.incomplete"


async def test_an_answer_without_a_word_is_an_empty_message(front, client):
    front.script.text = ""
    response = await client.responses.create(model="bytes", input="Hi")
    assert [item.type for item in response.output] == ["message"] and response.output_text == ""


async def test_a_conversation_comes_back_as_input(front, client):
    first = await client.responses.create(model="bytes", input="Hi")
    await client.responses.create(
        model="bytes",
        input=[
            {"role": "developer", "content": "Be kind."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            *(item.model_dump(exclude_none=True) for item in first.output),
            {"role": "user", "content": "And?"},
        ],
    )
    assert front.prompt == "<system>Be kind.<user>Hi<assistant>Hello, wörld!<user>And?<assistant>"


async def test_a_form_is_a_guide(front, client):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    response = await client.responses.create(model="bytes", input="Hi", text={"format": form})
    guide = front.script.asked[-1].sampling.guide
    assert guide.kind is GuideKind.JSON_SCHEMA and json.loads(guide.text) == schema
    assert response.text.format.name == "answer"
    await client.responses.create(model="bytes", input="Hi", text={"format": {"type": "json_object"}})
    assert front.script.asked[-1].sampling.guide.kind is GuideKind.JSON_OBJECT
    await client.responses.create(model="bytes", input="Hi", text={"format": {"type": "text"}})
    assert front.script.asked[-1].sampling.guide is None


async def test_log_probabilities_come_where_they_are_included(front, client):
    wishes = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = await client.responses.create(model="bytes", input="Hi", **wishes)
    logprobs = response.output[0].content[0].logprobs
    assert "".join(part.token for part in logprobs[:7]) == "Hello, " and len(logprobs[0].top_logprobs) == 2
    events = [event async for event in await client.responses.create(model="bytes", input="Hi", stream=True, **wishes)]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert sum(len(event.logprobs) for event in deltas) == 14  # all but the end
    assert not (await client.responses.create(model="bytes", input="Hi")).output[0].content[0].logprobs


async def test_calls_are_items_of_their_own_and_their_results_are_input(front, client):
    front.script.text = f"Let me see. {CALL}"
    response = await client.responses.create(model="bytes", input="Weather?", tools=[WEATHER])
    message, call = response.output
    assert message.content[0].text == "Let me see. "
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Bern"})
    assert response.tools[0].name == "get_weather"

    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    told = [item.model_dump(exclude_none=True) for item in response.output]
    await client.responses.create(
        model="bytes", input=[{"role": "user", "content": "Weather?"}, *told, result], tools=[WEATHER]
    )
    prompt = front.prompt
    assert prompt.count("<assistant>") == 2  # text and call are one turn, then comes the next
    assert '"city": "Bern"' in prompt and "<tool_response>\nRain.\n</tool_response>" in prompt


async def test_the_arguments_of_a_call_stream_in_parts_which_add_up(front, client):
    front.script.text = CALL
    events = [
        event async for event in await client.responses.create(model="bytes", input="W?", tools=[WEATHER], stream=True)
    ]
    [added, *deltas, done, item, completed] = events[2:]
    assert [event.type for event in (added, done, item, completed)] == [
        "response.output_item.added",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert {event.type for event in deltas} == {"response.function_call_arguments.delta"} and len(deltas) > 10
    assert json.loads("".join(event.delta for event in deltas)) == json.loads(done.arguments) == {"city": "Bern"}
    assert item.item.name == "get_weather"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
async def test_a_call_can_be_demanded(front, client, choice):
    front.script.text = '{"name": "get_weather", "arguments": {"city": "Bern"}}'
    response = await client.responses.create(model="bytes", input="W?", tools=[WEATHER], tool_choice=choice)
    assert front.script.asked[-1].sampling.guide.kind is GuideKind.JSON_SCHEMA
    assert [item.type for item in response.output] == ["function_call"]


async def test_a_demanded_call_streams_as_it_is_made_and_may_be_cut(front, client):
    front.script.text = '{"name": "get_weather", "arguments": {"city": "Bern"}}'
    wishes = {"model": "bytes", "input": "W?", "tools": [WEATHER], "tool_choice": "required", "stream": True}
    for limit, status, arguments in ((None, "completed", '{"city": "Bern"}'), (50, "incomplete", '{"city": "Ber')):
        events = [event async for event in await client.responses.create(**wishes, max_output_tokens=limit)]
        [added, *deltas, _, _, last] = events[2:]
        assert (added.type, added.item.name, last.type) == (
            "response.output_item.added",
            "get_weather",
            f"response.{status}",
        )
        assert len(deltas) > 10 and "".join(event.delta for event in deltas) == arguments
        [call] = last.response.output
        assert (call.type, call.status, call.arguments) == ("function_call", status, arguments)


async def test_a_call_of_harmony_s_that_breaks_off_ends_before_what_follows(open_front):
    async with open_front(template="{{ tools }} <|channel|> tool_calls") as front:
        header = " to=functions.get_weather<|channel|>commentary<|message|>"
        front.script.text = f'{header}{{"city": <|end|><|start|>assistant<|channel|>final<|message|>So.'
        body = {"model": "bytes", "input": "W?", "tools": [WEATHER]}
        answer = await front.http.post("/v1/responses", json=body)
        call, message = answer.json()["output"]
        assert (call["arguments"], message["content"][0]["text"]) == ('{"city": ', "So.")


async def test_an_error_before_the_first_token_has_its_status_and_one_after_it_an_event(front, client):
    front.script.error = NodeUnavailable("gone")
    with pytest.raises(openai.InternalServerError, match="gone"):
        await client.responses.create(model="bytes", input="Hi", stream=True)
    front.script.error_after = 3
    events = [event async for event in await client.responses.create(model="bytes", input="Hi", stream=True)]
    assert events[-1].type == "response.failed"
    assert (events[-1].response.status, events[-1].response.error.code) == ("failed", "server_error")
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_what_is_stored_elsewhere_is_not_stored_here(front, client):
    raw = await client.responses.with_raw_response.create(model="bytes", input="Hi", store=True)
    assert "not stored" in raw.headers["x-mooncake-warning"] and raw.parse().store is False
    with pytest.raises(openai.NotFoundError, match="not stored"):
        await client.responses.retrieve(raw.parse().id)
    with pytest.raises(openai.BadRequestError, match="send the conversation"):
        await client.responses.create(model="bytes", input="And?", previous_response_id=raw.parse().id)
    with pytest.raises(openai.BadRequestError, match="send the conversation"):
        await client.responses.create(model="bytes", input="And?", conversation="conv_1")


async def test_the_tokens_of_an_input_are_counted(client):
    asked = {"model": "bytes", "input": "How is Bern?", "instructions": "Be brief.", "tools": [WEATHER]}
    counted = await client.responses.input_tokens.count(**asked)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == (await client.responses.create(**asked)).usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="only tools of the type function"):
        await client.responses.input_tokens.count(model="bytes", input="Hi", tools=[{"type": "web_search"}])


async def test_a_call_that_is_not_offered_is_not_taken_for_a_response(front):
    refused = await front.http.post("/v1/responses/compact", json={"input": "Hi"})
    assert refused.status_code == 404
    assert refused.json()["error"]["message"].startswith("/v1/responses/compact is not offered here")


async def test_one_turn_of_the_assistant_may_come_in_many_items():
    """They are read in time that grows with their number, not with its square: nobody else is served meanwhile."""

    def read(count):
        thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]}
        said, call = {"role": "assistant", "content": "x" * 200}, {"type": "function_call", "name": "f", "call_id": "c"}
        items = [{"role": "user", "content": "Hi"}, thought, *[call] * count, *[said] * count]
        request, _ = decode_request(json.dumps({"input": items}).encode(), ResponsesRequest)
        times = []
        for _ in range(3):
            began = time.process_time()
            messages = input_messages(request)
            times.append(time.process_time() - began)
        return messages, min(times)

    (user, turn), taken_s = read(1000)
    assert (user.role, turn.role, turn.thought, len(turn.calls)) == ("user", "assistant", "Hm", 1000)
    assert turn.content == "\n".join(["x" * 200] * 1000)
    assert read(8000)[1] < 24 * taken_s


@pytest.mark.parametrize(
    ("wishes", "param"),
    [
        ({"input": 5}, "input"),
        ({"input": [{"role": "assistant", "content": "x"}] * (MAX_ITEMS + 1)}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "tool", "content": "x"}], "instructions": "x"}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{"}]}, "input[0].arguments"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"background": True}, "background"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"truncation": "some"}, "truncation"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 3}}}}, "text.format"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "bad name"}]}, "tools[0]"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"temperature": -1}, "temperature"),
        ({"metadata": {"a": 5}}, "metadata[...]"),
    ],
)
async def test_a_wrong_value_is_refused_by_its_field(front, wishes, param):
    refused = await front.http.post("/v1/responses", json={"input": "Hi"} | wishes)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param
    assert not front.script.asked


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"max_tokens": 5}, "max_output_tokens is meant"),
        ({"response_format": {"type": "json_object"}}, "text.format is meant"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "beside its type here, not in a function"),
    ],
)
async def test_what_is_written_as_in_a_chat_is_told_how_to_write_it(front, wishes, words):
    refused = await front.http.post("/v1/responses", json={"input": "Hi"} | wishes)
    assert refused.status_code == 400 and words in refused.json()["error"]["message"]
