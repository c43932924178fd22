"""Anthropic's Messages API: blocks and events, thoughts and calls, and what it refuses; by its official client, too."""

from __future__ import annotations

import itertools
import json

import pytest
import pytest_asyncio

from mooncake.errors import NodeUnavailable
from mooncake.sampling import GuideKind

pytestmark = pytest.mark.asyncio(loop_scope="module")

PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
ASK = [{"role": "user", "content": "Weather?"}]
WEATHER = {
    "name": "get_weather",
    "description": "Of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'
THOUGHT_BLOCK = {"type": "thinking", "thinking": "Hm.", "signature": ""}
CALL_BLOCK = {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {}}
RESULT_BLOCK = {"type": "tool_result", "tool_use_id": "call_1", "content": "12"}
TEXT = f"<think>\nHm.\n</think>\n\nLet me see. {CALL}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_front(module_front_of):
    async with module_front_of(template="{{ tools }} <tool_call> tool_calls <think> </think>") as front:
        yield front


async def ask(front, **wishes):
    return await front.http.post("/v1/messages", json={"model": "bytes", "max_tokens": 200, "messages": ASK} | wishes)


async def events_of(front, **wishes):
    body = {"model": "bytes", "max_tokens": 200, "messages": ASK, "stream": True} | wishes
    async with front.http.stream("POST", "/v1/messages", json=body) as answer:
        lines = [line async for line in answer.aiter_lines() if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert lines[::2] == [f"event: {event['type']}" for event in events]
    return events


async def test_a_text_is_answered_whole(front):
    front.script.cached_tokens = 3
    answer = (await ask(front, system="Be brief.", temperature=0.5, metadata={"user_id": "me"})).json()

    assert answer["id"].startswith("msg_") and (answer["type"], answer["role"]) == ("message", "assistant")
    assert answer["content"] == [{"type": "text", "text": "Hello, wörld!"}]
    assert (answer["stop_reason"], answer["stop_sequence"], answer["model"]) == ("end_turn", None, "bytes")
    assert front.prompt == "<system>Be brief.<user>Weather?<assistant>"
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(front.prompt)
    assert (usage["cache_read_input_tokens"], usage["output_tokens"]) == (3, len("Hello, wörld!".encode()) + 1)
    assert (front.script.asked[0].sampling.temperature, front.script.asked[0].session) == (0.5, "me")


async def test_a_stream_tells_the_same_block_by_block(front):
    front.script.text = TEXT
    answer = (await ask(front, tools=[WEATHER])).json()
    events = await events_of(front, tools=[WEATHER])

    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    kinds = [kind for kind, _ in itertools.groupby(event["type"] for event in events)]
    assert kinds == ["message_start", *block * 3, "message_delta", "message_stop"]
    assert events[0]["message"]["content"] == [] and events[0]["message"]["usage"]["input_tokens"] > 0
    blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    said = [""] * 3
    for event in events:
        if event["type"] == "content_block_delta":
            [text] = (value for name, value in event["delta"].items() if name != "type")
            said[event["index"]] += text
    assert [part["type"] for part in blocks] == ["thinking", "text", "tool_use"]
    assert blocks[2]["input"] == {} and said == ["Hm.", "Let me see. ", '{"city": "Bern"}']
    assert answer["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "Let me see. "},
        {"type": "tool_use", "id": answer["content"][2]["id"], "name": "get_weather", "input": {"city": "Bern"}},
    ]
    end = events[-2]
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None} and answer["stop_reason"] == "tool_use"
    assert end["usage"] == answer["usage"]


async def test_thoughts_are_left_out_for_who_does_not_want_them(front):
    front.script.text = "<think>Hm.</think>So."
    answer = (await ask(front, thinking={"type": "adaptive", "display": "omitted"})).json()
    assert [block["type"] for block in answer["content"]] == ["text"]
    assert front.prompt.startswith("[enable_thinking=True]")
    answer = (await ask(front, include_reasoning=False)).json()
    assert [block["type"] for block in answer["content"]] == ["text"]
    await ask(front, thinking={"type": "disabled"}, output_config={"effort": "low"})
    assert "[enable_thinking=False]" in front.prompt and "[reasoning_effort=low]" in front.prompt


async def test_calls_and_their_results_come_back(front):
    front.script.text = TEXT
    first = (await ask(front, tools=[WEATHER])).json()
    call_id = first["content"][2]["id"]
    result = {"type": "tool_result", "tool_use_id": call_id, "content": [{"type": "text", "text": "12"}]}
    turns = [
        *ASK,
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    front.script.text = "Mild."
    answer = (await ask(front, tools=[WEATHER], messages=turns)).json()
    assert answer["content"] == [{"type": "text", "text": "Mild."}]
    prompt = front.prompt
    assert "<assistant>Let me see. {'reasoning_content': 'Hm.'" in prompt and "'arguments': {'city': 'Bern'}" in prompt
    assert f"<tool>12{{'tool_call_id': '{call_id}'}}<user>And?<assistant>" in prompt


async def test_the_stop_reason_says_why_an_answer_ended(front):
    cut = (await ask(front, max_tokens=5)).json()
    assert (cut["stop_reason"], cut["content"][0]["text"]) == ("max_tokens", "Hello")
    stopped = (await ask(front, stop_sequences=["wör"])).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "wör")
    assert stopped["content"][0]["text"] == "Hello, "
    front.script.text = TEXT
    halved = (await ask(front, tools=[WEATHER], stop_sequences=["ern"])).json()
    assert (halved["stop_reason"], halved["stop_sequence"]) == ("stop_sequence", "ern")
    assert halved["content"][-1]["input"] == {}
    front.script.ends = False
    full = (await ask(front, max_tokens=100_000)).json()  # clients ask for more than a context holds
    assert full["stop_reason"] == "model_context_window_exceeded"


@pytest.mark.parametrize(
    ("choice", "is_guided"), [({"type": "auto"}, False), ({"type": "any"}, True), ({"type": "none"}, False)]
)
async def test_a_call_can_be_demanded(front, choice, is_guided):
    front.script.text = '{"name": "get_weather", "arguments": {"city": "Bern"}}'
    answer = (await ask(front, tools=[WEATHER], tool_choice=choice)).json()
    assert [block["type"] for block in answer["content"]] == ["tool_use" if is_guided else "text"]
    assert (front.script.asked[0].sampling.guide is not None) == is_guided
    assert ("get_weather" in front.prompt) == (choice["type"] != "none")


async def test_a_format_is_a_guide_and_a_last_turn_of_the_assistant_goes_on(front):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    turns = [*ASK, {"role": "assistant", "content": "It is"}]
    await ask(front, messages=turns, output_config={"format": {"type": "json_schema", "schema": schema}})
    guide = front.script.asked[0].sampling.guide
    assert guide.kind is GuideKind.JSON_SCHEMA and json.loads(guide.text) == schema
    assert front.prompt == "<user>Weather?<assistant>It is"


async def test_a_document_is_text_that_its_title_precedes(front):
    plain = {"type": "text", "media_type": "text/plain", "data": "Bern is sunny."}
    parts = {"type": "content", "content": [{"type": "text", "text": "So"}, {"type": "text", "text": "is Rome."}]}
    said = [
        {"type": "document", "source": plain, "title": "News", "context": "of today", "citations": {"enabled": True}},
        {"type": "document", "source": parts},
        {"type": "text", "text": "Where?"},
    ]
    answer = await ask(front, messages=[{"role": "user", "content": said}])
    assert front.prompt == "<user>News\nof today\nBern is sunny.\nSo\nis Rome.\nWhere?<assistant>"
    assert "x-mooncake-warning" not in answer.headers
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "document", "source": plain}]}
    await ask(front, messages=[*ASK, {"role": "user", "content": [result]}])
    assert "Bern is sunny." in front.prompt


async def test_tokens_are_counted_as_they_would_be_read(front):
    wishes = {"messages": ASK, "system": "Be brief.", "tools": [WEATHER]}
    counted = (await front.http.post("/v1/messages/count_tokens", json={"model": "bytes"} | wishes)).json()
    await ask(front, **wishes)
    assert counted == {"input_tokens": len(front.script.asked[0].tokens)}


@pytest.mark.parametrize(
    ("wishes", "status", "kind", "sentence"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens must be given"),
        ({"n": 2}, 400, "invalid_request_error", "n: "),
        ({"max_tokens": "5"}, 400, "invalid_request_error", "max_tokens: Expected"),  # its name once
        ({"temperature": 200}, 400, "invalid_request_error", "temperature must be"),
        ({"tools": [{"input_schema": {}}]}, 400, "invalid_request_error", "tools[0]: Object missing"),
        ({"messages": []}, 400, "invalid_request_error", "messages: at least one"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "invalid_request_error", "messages[0].role: "),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            400,
            "invalid_request_error",
            "messages[0].content[0]: only text, document, thinking, tool_use and tool_result are supported, this one",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": PDF}]}]},
            400,
            "invalid_request_error",
            "messages[0].content[0].source: a document is a text here",
        ),
        *(
            ({"messages": [{"role": role, "content": [block]}]}, 400, "invalid_request_error", sentence)
            for role, block, sentence in (
                ("assistant", CALL_BLOCK | {"name": ""}, "messages[0].content[0].name: a tool_use needs"),
                ("user", THOUGHT_BLOCK, "messages[0].content[0]: thinking is the assistant's"),
                ("user", CALL_BLOCK, "messages[0].content[0]: tool_use is the assistant's"),
                ("system", CALL_BLOCK, "messages[0].content[0]: tool_use is the assistant's"),
                ("assistant", RESULT_BLOCK, "messages[0].content[0]: a tool_result is the user's"),
            )
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "invalid_request_error", "tools[0].type: "),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice"),
        ({"model": "other"}, 404, "not_found_error", "the model 'other' is not served"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_cannot_be_is_refused_in_its_words(front, wishes, status, kind, sentence, stream):
    refused = await ask(front, stream=stream, **wishes)
    assert refused.status_code == status
    body = refused.json()
    assert (body["type"], body["error"]["type"]) == ("error", kind) and body["error"]["message"].startswith(sentence)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_a_wrong_method_is_refused_in_its_words(front, path):
    refused = await front.http.get(path)
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert refused.json()["type"] == "error"


async def test_arguments_that_utf_8_cannot_say_are_no_error_of_ours(front):
    front.script.text = CALL.replace("Bern", "Bern \\ud800")
    [block] = (await ask(front, tools=[WEATHER])).json()["content"]
    assert block["input"] == {"city": "Bern ?"}


async def test_a_failure_ends_a_stream_with_an_event(front):
    front.script.error, front.script.error_after = NodeUnavailable("gone"), 3
    events = await events_of(front)
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "overloaded_error"


async def test_a_key_may_stand_where_its_clients_show_it(open_front):
    async with open_front(api_keys=("sk-1",)) as front:
        body = {"model": "bytes", "max_tokens": 5, "messages": ASK}
        for key, status in (("sk-1", 200), ("sk-2", 401)):
            answer = await front.http.post("/v1/messages", json=body, headers={"x-api-key": key})
            assert answer.status_code == status
        refused = answer.json()
        assert refused["type"] == "error" and refused["error"]["type"] == "authentication_error"
        assert refused["error"]["message"] == "the API key is not one of this server's"


async def test_the_official_client_reads_all_of_it(front):
    anthropic = pytest.importorskip("anthropic")
    front.script.text = TEXT
    async with anthropic.AsyncAnthropic(base_url=front.url, api_key="none", max_retries=0) as client:
        asked = {"model": "bytes", "max_tokens": 200, "messages": ASK, "tools": [WEATHER]}
        message = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            told = [text async for text in stream.text_stream]
            streamed = await stream.get_final_message()
        counted = await client.messages.count_tokens(model="bytes", messages=ASK, tools=[WEATHER])
        with pytest.raises(anthropic.NotFoundError, match="is not served"):
            await client.messages.create(**asked | {"model": "other"})
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.messages.create(**asked | {"max_tokens": 0})

    assert message._request_id and refused.value.request_id  # from a header that only it reads
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.content[2].input == streamed.content[2].input == {"city": "Bern"}
    assert streamed.content[0].thinking == "Hm." and "".join(told) == "Let me see. "
    assert streamed.stop_reason == message.stop_reason == "tool_use"
    assert streamed.usage.output_tokens == message.usage.output_tokens
    assert counted.input_tokens == message.usage.input_tokens


async def test_its_clients_find_the_models_in_its_form(front):
    anthropic = pytest.importorskip("anthropic")
    async with anthropic.AsyncAnthropic(base_url=front.url, api_key="none", max_retries=0) as client:
        [model] = [model async for model in client.models.list()]
        found = await client.models.retrieve("bytes")
        with pytest.raises(anthropic.NotFoundError, match="is not served") as refused:
            await client.models.retrieve("other")

    assert (model.id, model.display_name, model.type, model.lifecycle) == ("bytes", "bytes", "model", "active")
    assert model.created_at.tzinfo is not None and model.max_tokens == model.max_input_tokens == 4096
    assert found == model
    assert refused.value.body["type"] == "error"


async def test_its_clients_loop_over_tools_sends_the_whole_conversation(front):
    """It would have the server keep it, and send only the result of the call."""
    anthropic = pytest.importorskip("anthropic")
    front.script.text = CALL

    @anthropic.beta_async_tool
    async def get_weather(city: str) -> str:
        return f"12 degrees in {city}"

    asked = {"model": "bytes", "max_tokens": 200, "messages": ASK, "tools": [get_weather], "max_iterations": 2}
    async with anthropic.AsyncAnthropic(base_url=front.url, api_key="none", max_retries=0) as client:
        answers = [message async for message in client.beta.messages.tool_runner(**asked)]

    assert len(answers) == 2
    prompt = front.prompt
    assert "Weather?" in prompt and "Bern" in prompt and prompt.index("Weather?") < prompt.index("12 degrees in Bern")


async def test_a_conversation_is_neither_kept_nor_summarized(front):
    refused = await ask(front, thread={"type": "continue", "previous_message_id": "msg_1"})
    assert refused.status_code == 400
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert refused.json()["error"]["details"] == details

    refused = await ask(front, compaction={"type": "summarize"})
    assert (refused.status_code, "details" in refused.json()["error"]) == (400, False)
