"""Tools: described to the model, called by it, and parsed by the official client, whole and streamed."""

from __future__ import annotations

import json
import time
import timeit

import openai
import pytest

from conductor.ingress.parsers.json_calls import CLOSE, OPEN, JsonCallParser
from conductor.ingress.parsers.parts import CallPart, FirstCallParser, joined_calls
from conductor.ingress.tools import SaidCall, SaidFunction, chat_calls
from mooncake.errors import ConfigError
from mooncake.sampling import GuideKind

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASK = [{"role": "user", "content": "Weather?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
BROKEN = {"type": "function", "function": {"name": "f", "parameters": {"type": 3}}}
TIME = {"type": "function", "function": {"name": "get_time"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


async def test_a_call_comes_out_as_a_call(front, client):
    front.script.text = f"Let me see.\n{CALL}\n{CALL.replace('Zürich', 'Bern')}"

    answer = await client.chat.completions.create(model="bytes", messages=ASK, tools=[WEATHER, TIME])

    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.\n")
    calls = choice.message.tool_calls
    assert [call.function.name for call in calls] == ["get_weather", "get_weather"]
    assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Zürich", "Bern"]
    assert len({call.id for call in calls}) == 2
    prompt = front.prompts[0]
    assert prompt.startswith("<system>") and '"name":"get_weather"' in prompt and '"name":"get_time"' in prompt
    assert front.script.asked[0].sampling.guide is None


@pytest.mark.parametrize("text", [f"So. {CALL}\n{CALL} And?", f'So. {OPEN}[{{"name": "f"}}, {{"name": "g"}}]{CLOSE}'])
async def test_there_is_one_call_where_parallel_ones_are_not_wanted(front, client, text):
    front.script.text = text
    for said, calls in cut(text, lambda: FirstCallParser(JsonCallParser())):
        assert said == "So. " and len(calls) == 1

    answer = await client.chat.completions.create(
        model="bytes", messages=ASK, tools=[WEATHER], parallel_tool_calls=False
    )
    tool = {"type": "function"} | WEATHER["function"]
    response = await client.responses.create(model="bytes", input="W?", tools=[tool], parallel_tool_calls=False)

    assert len(answer.choices[0].message.tool_calls) == 1 and answer.choices[0].message.content == "So. "
    assert [item.type for item in response.output] == ["message", "function_call"]


async def test_calls_in_tags_stream_as_they_are_written(front, client):
    arguments = [f'{{"city": "{city}", "days": [1, {{"n": "</b>"}}]}}' for city in ("Zürich", "Bern")]
    calls = [f'{OPEN}\n{{"name": "get_weather", "arguments": {each}}}\n{CLOSE}' for each in arguments]
    front.script.text = f"Let me <b>see</b>. {calls[0]}\n{calls[1]}\nThat is all."

    stream = await client.chat.completions.create(model="bytes", messages=ASK, tools=[WEATHER], stream=True)
    choices = [chunk.choices[0] async for chunk in stream]

    deltas = [choice.delta for choice in choices]
    assert "".join(delta.content or "" for delta in deltas) == "Let me <b>see</b>. That is all."
    told = [call for delta in deltas for call in delta.tool_calls or []]
    for index, whole in enumerate(arguments):
        [first, *more] = [call for call in told if call.index == index]
        assert first.id and (first.type, first.function.name, first.function.arguments) == (
            "function",
            "get_weather",
            "{",
        )
        assert {(call.id, call.type, call.function.name) for call in more} == {(None, None, None)}
        assert len(more) >= len(whole) - 3  # as its letters come
        assert "".join(call.function.arguments for call in [first, *more]) == whole
    assert [call.index for call in told] == sorted(call.index for call in told)
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]


async def test_a_call_in_tags_that_is_cut_shows_what_there_is_of_it(front, client):
    front.script.text = CALL
    wishes = {"model": "bytes", "messages": ASK, "tools": [WEATHER], "max_tokens": CALL.index("Z")}

    whole = (await client.chat.completions.create(**wishes)).choices[0]
    choices = [chunk.choices[0] async for chunk in await client.chat.completions.create(**wishes, stream=True)]

    assert whole.finish_reason == choices[-1].finish_reason == "length"
    assert whole.message.tool_calls[0].function.arguments == '{"city": "'
    parts = [call.function.arguments for choice in choices for call in choice.delta.tool_calls or []]
    assert "".join(parts) == '{"city": "' and len(parts) > 5


async def test_a_call_that_a_stop_string_cuts_asks_for_nothing(front, client):
    front.script.text = CALL
    wishes = {"model": "bytes", "messages": ASK, "tools": [WEATHER], "stop": "Z"}

    whole = (await client.chat.completions.create(**wishes)).choices[0]
    choices = [chunk.choices[0] async for chunk in await client.chat.completions.create(**wishes, stream=True)]

    assert whole.finish_reason == choices[-1].finish_reason == "stop"
    assert whole.message.tool_calls[0].function.arguments == '{"city": "'


async def test_a_call_s_arguments_take_little_longer_than_their_json_however_many_escapes_they_have():
    text = json.dumps({"file": "\n" * 300_000})
    call = SaidCall(SaidFunction("write", text))
    parsing, taking = (
        min(timeit.repeat(work, number=1, repeat=5))
        for work in (lambda: json.loads(text), lambda: chat_calls([call], "messages[0].tool_calls"))
    )

    assert taking < 20 * parsing


async def test_half_a_surrogate_pair_in_a_call_does_not_lock_its_conversation(front, client):
    """Such a text cannot be tokenized: the call was once sent as generated, and refused when it came back."""
    front.script.text = CALL.replace("Zürich", r"Zürich \ud83d")
    stream = await client.chat.completions.create(model="bytes", messages=ASK, tools=[WEATHER], stream=True)
    told = [call async for chunk in stream for call in chunk.choices[0].delta.tool_calls or []]
    arguments = "".join(call.function.arguments for call in told)
    assert json.loads(arguments) == {"city": "Zürich ?"}

    for said in (arguments, r'{"city": "\ud83d"}'):  # as told, and as an older server told it
        call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": said}}
        turns = [
            *ASK,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "12"},
        ]
        answer = await client.chat.completions.create(model="bytes", messages=turns, tools=[WEATHER])
        assert answer.choices[0].finish_reason
    assert "?" in front.prompt


async def test_items_of_a_streamed_response_come_in_the_order_of_the_answer(front, client):
    front.script.text = f"One. {CALL} Two."
    tool = {"type": "function"} | WEATHER["function"]

    events = [
        event async for event in await client.responses.create(model="bytes", input="?", tools=[tool], stream=True)
    ]

    output = events[-1].response.output
    assert [item.type for item in output] == ["message", "function_call", "message"]
    assert [item.content[0].text for item in output if item.type == "message"] == ["One. ", "Two."]
    parts = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(parts) > 10 and json.loads("".join(parts)) == {"city": "Zürich"} == json.loads(output[1].arguments)


async def test_a_template_that_has_words_for_tools_is_given_them(open_front):
    async with open_front(template="tools <tool_call>") as front:
        front.script.text = CALL
        asked = await front.http.post("/v1/chat/completions", json={"messages": ASK, "tools": [WEATHER]})
        [call] = asked.json()["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "get_weather"
        prompt = front.prompts[0]
        assert prompt == f"[tools={[WEATHER]}]<user>Weather?<assistant>"


XML = "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n</function>\n</tool_call>"
CHANNEL = '<|channel|>commentary to=functions.get_weather<|message|>{"city": "Zürich"}'


@pytest.mark.parametrize(
    ("template", "parser", "text"),
    [
        ("<tool_call>", "auto", CALL),
        ("<tool_call> <function=", "auto", XML),
        ("<|tool_call|>", "auto", '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Zürich"}}]'),
        ("[TOOL_CALLS]", "auto", '[TOOL_CALLS]get_weather{"city": "Zürich"}'),
        ("<|python_tag|>", "auto", '{"name": "get_weather", "parameters": {"city": "Zürich"}}'),
        ("<|python_start|>", "auto", '[get_weather(city="Zürich")]'),
        ("<|channel|>", "auto", CHANNEL),
        ("", "llama3_json", '{"name": "get_weather", "parameters": {"city": "Zürich"}}'),
        ("<tool_call>", "qwen3_xml", XML),
    ],
)
async def test_calls_are_read_in_the_form_that_the_template_has_or_that_is_named(open_front, template, parser, text):
    async with open_front(template=f"tools {template} tool_calls", tool_call_parser=parser) as front:
        front.script.text = text
        async with openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client:
            asked = {"model": "bytes", "messages": ASK, "tools": [WEATHER]}
            answer = await client.chat.completions.create(**asked)
            stream = await client.chat.completions.create(**asked, stream=True)
            deltas = [chunk.choices[0].delta async for chunk in stream]
        message = answer.choices[0].message
        assert message.content is None and answer.choices[0].finish_reason == "tool_calls"
        [call] = message.tool_calls
        told = [part.function for delta in deltas for part in delta.tool_calls or []]
        arguments = "".join(function.arguments for function in told)
        assert [call.function.name] == [function.name for function in told if function.name] == ["get_weather"]
        assert json.loads(call.function.arguments) == json.loads(arguments) == {"city": "Zürich"}
        prompt = front.prompts[0]
        assert prompt == f"[tools={[WEATHER]}]<user>Weather?<assistant>"


@pytest.mark.parametrize(
    ("template", "parser", "sentence"),
    [
        ("tools", "hermes2", "must be one of auto, hermes, granite, llama3_json.*got 'hermes2'"),
        ("", "mistral", "needs a chat template that lists tools"),
    ],
)
async def test_a_parser_that_cannot_be_is_refused_at_the_start(open_front, template, parser, sentence):
    with pytest.raises(ConfigError, match=sentence):
        async with open_front(template=template, tool_call_parser=parser):
            pass


@pytest.mark.parametrize("choice", [None, "none", {"type": "function", "function": {"name": "get_time"}}])
@pytest.mark.parametrize("takes_tools", [False, True])
async def test_tools_are_among_the_tokens_of_a_chat_that_is_tokenized(open_front, takes_tools, choice):
    body = {"messages": ASK, "tools": [WEATHER, TIME], "tool_choice": choice}
    async with open_front(template="tools <tool_call>" if takes_tools else "") as front:
        tokens = (await front.http.post("/tokenize", json=body)).json()["tokens"]
        await front.http.post("/v1/chat/completions", json=body)
        assert tokens == front.script.asked[0].tokens.tolist()


async def test_a_stream_tells_calls_piece_by_piece_and_never_a_tag(front, client):
    front.script.text = f"Well <b>. {CALL}"

    content, calls, reasons = "", {}, []
    async for chunk in await client.chat.completions.create(model="bytes", messages=ASK, tools=[WEATHER], stream=True):
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            calls.setdefault(call.index, []).append(call)
        reasons.append(choice.finish_reason)

    assert content == "Well <b>. "
    [[call, *more]] = calls.values()
    assert call.id and call.type == "function" and call.function.name == "get_weather"
    assert json.loads("".join(part.function.arguments for part in [call, *more])) == {"city": "Zürich"}
    assert [reason for reason in reasons if reason] == ["tool_calls"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_a_call_can_be_demanded(front, client, choice):
    front.script.text = '{"name": "get_weather", "arguments": {"city": "Bern"}}'

    answer = await client.chat.completions.create(
        model="bytes", messages=ASK, tools=[TIME, WEATHER], tool_choice=choice
    )

    guide = front.script.asked[0].sampling.guide
    assert guide.kind is GuideKind.JSON_SCHEMA
    assert ("get_time" in guide.text) == (choice == "required")
    assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.content is None
    assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments) == {"city": "Bern"}


async def test_a_demanded_call_streams_as_it_is_made(front, client):
    arguments = '{"city": "Z\\"}ürich", "days": [{"n": 1}, {}]}'
    front.script.text = f'{{"name": "get_weather", "arguments": {arguments}}}'

    stream = await client.chat.completions.create(
        model="bytes", messages=ASK, tools=[WEATHER], tool_choice="required", stream=True
    )
    choices = [chunk.choices[0] async for chunk in stream]

    [first, *more] = [call for choice in choices for call in choice.delta.tool_calls or []]
    assert (first.index, first.type, first.function.name) == (0, "function", "get_weather") and first.id
    assert len(more) > 20 and {(call.index, call.id, call.function.name) for call in more} == {(0, None, None)}
    assert "".join(call.function.arguments for call in [first, *more]) == arguments
    assert not any(choice.delta.content for choice in choices)
    assert choices[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("length", "told"), [(15, None), (47, '{"city": "')])
async def test_a_demanded_call_that_is_cut_shows_what_there_is_of_it(front, client, stream, length, told):
    front.script.text = '{"name": "get_weather", "arguments": {"city": "Bern"}}'
    wishes = {"messages": ASK, "tools": [WEATHER], "tool_choice": "required", "max_tokens": length}

    answer = await client.chat.completions.create(model="bytes", stream=stream, **wishes)
    if stream:
        choices = [chunk.choices[0] async for chunk in answer]
        messages = [choice.delta for choice in choices]
    else:
        choices = answer.choices
        messages = [choice.message for choice in choices]

    calls = [call for message in messages for call in message.tool_calls or []]
    assert ("".join(call.function.arguments for call in calls) if calls else None) == told
    assert choices[-1].finish_reason == "length" and not any(message.content for message in messages)


def booking(field: str, place: dict) -> dict:
    """A tool as Pydantic describes one: a model within a model."""
    return {
        "type": "function",
        "function": {
            "name": f"book_{field}",
            "parameters": {
                "$defs": {"Place": {"type": "object", "properties": place, "required": [*place]}},
                "type": "object",
                "properties": {field: {"$ref": "#/$defs/Place"}, "then": {"$ref": "#"}},
                "required": [field],
                "additionalProperties": False,
            },
        },
    }


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "book_flight"}}])
async def test_a_call_is_held_to_what_its_parameters_refer_to(front, client, choice):
    tools = [TIME, booking("room", {"city": {"type": "string"}}), booking("flight", {"gate": {"type": "integer"}})]
    front.script.text = '{"name": "book_flight", "arguments": {"flight": {"gate": 3}}}'

    await client.chat.completions.create(model="bytes", messages=ASK, tools=tools, tool_choice=choice)

    def takes(call: str) -> bool:
        return front.guide_lets(f"[{call}, {call}]" if choice == "required" else call)

    assert takes(front.script.text)
    assert takes('{"name": "book_flight", "arguments": {"flight": {"gate": 3}, "then": {"flight": {"gate": 4}}}}')
    assert not takes('{"name": "book_flight", "arguments": {"flight": {"city": "Bern"}}}')
    assert takes('{"name": "book_room", "arguments": {"room": {"city": "Bern"}}}') == (choice == "required")
    assert takes('{"name": "get_time", "arguments": {}}') == (choice == "required")
    assert not takes('{"name": "get_time", "arguments": {"zone": "UTC"}}'), "it is described without any"


async def test_none_calls_nothing_and_tells_nothing(front, client):
    front.script.text = CALL

    answer = await client.chat.completions.create(model="bytes", messages=ASK, tools=[WEATHER], tool_choice="none")

    assert answer.choices[0].message.content == CALL and answer.choices[0].message.tool_calls is None
    assert b"get_weather" not in bytes(front.script.asked[0].tokens.tolist())


async def test_the_next_turn_holds_calls_and_their_results(front, client):
    front.script.text = CALL
    first = await client.chat.completions.create(model="bytes", messages=ASK, tools=[WEATHER])
    said = first.choices[0].message
    turns = [*ASK, said, {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "12 degrees"}]

    front.script.text = "Mild."
    answer = await client.chat.completions.create(model="bytes", messages=turns, tools=[WEATHER])

    assert answer.choices[0].message.content == "Mild." and answer.choices[0].finish_reason == "stop"
    prompt = front.prompt
    assert json.dumps({"name": "get_weather", "arguments": {"city": "Zürich"}}) in prompt
    assert "<user><tool_response>\n12 degrees\n</tool_response>" in prompt


async def test_a_format_of_texts_is_no_matter_where_a_tool_must_be_called(front, client):
    """Clients send both where one class describes the call and the answer."""
    front.script.text = '{"name": "get_weather", "arguments": {"city": "Bern"}}'
    form = {"name": "Weather", "schema": WEATHER["function"]["parameters"]}
    asked = {"model": "bytes", "tool_choice": "required"}

    chat = await client.chat.completions.create(
        messages=ASK, tools=[WEATHER], response_format={"type": "json_schema", "json_schema": form}, **asked
    )
    flat = {"type": "function", **WEATHER["function"]}
    response = await client.responses.create(
        input="W?", tools=[flat], text={"format": {"type": "json_schema", **form}}, **asked
    )

    assert chat.choices[0].message.tool_calls[0].function.arguments == '{"city": "Bern"}'
    assert (response.output[0].type, response.output[0].arguments) == ("function_call", '{"city": "Bern"}')
    await client.chat.completions.create(messages=ASK, tools=[WEATHER], **asked)
    first, second, alone = (request.sampling.guide for request in front.script.asked)
    assert first == second == alone


FORM = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "City", "schema": FORM}}


@pytest.mark.parametrize(
    ("template", "thought", "text"),
    [
        ("<tool_call>", "", f"{CALL}\n{CALL}"),
        ("<tool_call> <function=", "", XML),
        ("<tool_call> <think> </think>", "<think>\nHm. {}\n</think>\n\n", CALL),
        ("<|tool_call|>", "", '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Zürich"}}]'),
        ("[TOOL_CALLS]", "", '[TOOL_CALLS]get_weather{"city": "Zürich"}'),
        ("<|python_tag|>", "", '{"name": "get_weather", "parameters": {"city": "Zürich"}}'),
        ("<|python_start|>", "", '[get_weather(city="Zürich")]'),
        ("<|channel|>", "", CHANNEL),
        ("<|channel|>", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant", CHANNEL),
        ("<|channel|>", "", CHANNEL.removeprefix("<|channel|>commentary").replace("<|m", "<|channel|>commentary<|m")),
    ],
)
async def test_who_may_call_a_tool_calls_it_or_answers_in_the_format(open_front, template, thought, text):
    """As with OpenAI: agents send the format of their last answer with every turn."""
    answers = {"final": f'{thought}<|channel|>final<|message|>{{"city": "Bern"}}', "": f'{thought}{{"city": "Bern"}}'}
    answer = answers["final" if "channel" in template else ""]
    async with open_front(template=f"tools {template} tool_calls") as front:
        told = []
        for front.script.text in (f"{thought}{text}", answer):
            wishes = {"messages": ASK, "tools": [WEATHER], "response_format": FORMAT}
            asked = await front.http.post("/v1/chat/completions", json=wishes)
            told.append(asked.json()["choices"][0])
            assert front.guide_lets(front.script.text)

    assert told[0]["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert [choice["finish_reason"] for choice in told] == ["tool_calls", "stop"]
    assert told[1]["message"]["content"] == '{"city": "Bern"}'
    for wrong in ("It is warm.", answer.replace('"Bern"', "3"), f"It is warm. {text}"):
        assert not front.guide_lets(wrong)
    if CALL in text:  # a form that is known exactly
        assert not front.guide_lets(thought + CALL.replace("get_weather", "get_it"))
        assert not front.guide_lets(thought + CALL.replace('{"city": "Zürich"}', "3"))


async def test_tools_that_no_guide_could_follow_go_with_a_format(front, client):
    odd = {"description": "&" * 20, "not": {"required": ["x"]}}
    tools = [BROKEN, {"type": "function", "function": {"name": "odd", "parameters": {"type": "object"} | odd}}]
    await client.chat.completions.create(model="bytes", messages=ASK, tools=tools, response_format=FORMAT)
    assert front.guide_lets(CALL.replace("get_weather", "odd")) and front.guide_lets('{"city": "Bern"}')


async def test_a_guide_that_is_no_format_is_for_the_whole_answer(front, client):
    extra = {"structured_outputs": {"json": FORM}}
    for more in ({"extra_body": extra}, {"extra_body": extra, "response_format": {"type": "text"}}):
        await client.chat.completions.create(model="bytes", messages=ASK, tools=[WEATHER], **more)
        assert front.guide_lets('{"city": "Bern"}') and not front.guide_lets(CALL)


@pytest.mark.parametrize("more", [{}, {"tool_calls": []}, {"refusal": "No."}])
async def test_a_turn_without_content_and_calls_is_an_empty_one(front, client, more):
    """Clients send an answer back as they read it."""
    said = {"role": "assistant", "content": None} | more
    await client.chat.completions.create(model="bytes", messages=[*ASK, said, *ASK])

    assert b"<assistant><user>" in bytes(front.script.asked[0].tokens.tolist())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0]"),
        (
            {"tools": [WEATHER], "tool_choice": "required", "extra_body": {"structured_outputs": {"choice": ["yes"]}}},
            "tool_choice",
        ),
        ({"tools": [BROKEN], "tool_choice": "required"}, "tools"),
    ],
)
async def test_what_makes_no_sense_is_refused(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="bytes", messages=ASK, **fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("tool", "sentence"),
    [
        ({"type": "custom", "custom": {"name": "f"}}, "a tool of the type 'custom' is not called here"),
        ({"type": "function", "name": "f", "parameters": {}}, "a tool is a function with a name of up to 128"),
    ],
)
async def test_a_tool_of_another_form_is_refused_in_words(client, tool, sentence):
    with pytest.raises(openai.BadRequestError, match=sentence) as caught:
        await client.chat.completions.create(model="bytes", messages=ASK, tools=[tool])
    assert caught.value.param == "tools[0]"


@pytest.mark.parametrize("kind", ["hosted", "custom"])
async def test_a_choice_of_another_type_is_refused_by_its_name(client, kind):
    choice = {"type": kind, kind: {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_time"}}]}}
    sentence = f"the type '{kind}' is not supported; known: none, auto, required, a function"
    with pytest.raises(openai.BadRequestError, match=sentence):
        await client.chat.completions.create(model="bytes", messages=ASK, tools=[TIME], tool_choice=choice)
    tool = {"type": "function"} | TIME["function"]
    with pytest.raises(openai.BadRequestError, match=sentence):
        await client.responses.create(model="bytes", input="W?", tools=[tool], tool_choice={"type": kind})


async def test_json_that_nests_without_end_is_no_call(client):
    nested = '{"a":' * 100_000 + "1" + "}" * 100_000  # newer Pythons go thousands deep
    said = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": nested}}]}
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="bytes", messages=[*ASK, said])
    assert caught.value.param == "messages[1].tool_calls"
    assert JsonCallParser(is_call=True).push(nested, is_last=True) == [nested]


async def test_arguments_that_can_just_be_read_are_no_error_of_ours(open_front):
    async with open_front(template="tools <tool_call> tool_calls") as front:
        for depth in range(890, 990, 3):  # somewhere there, what is read cannot be written again
            call = {"function": {"name": "f", "arguments": '{"a":' * depth + "1" + "}" * depth}}
            body = {"messages": [{"role": "assistant", "tool_calls": [call]}], "max_tokens": 1}
            assert (await front.http.post("/v1/chat/completions", json=body)).status_code in (200, 400)


F = '{"name": "f", "arguments": {"x": 1}}'


@pytest.mark.parametrize(
    ("text", "said", "called"),
    [
        ("no call", "no call", []),
        (f"a{CALL}b", "ab", ['get_weather{"city": "Zürich"}']),
        (f"{CALL}\n{CALL}\n", "", ['get_weather{"city": "Zürich"}'] * 2),
        ("<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
        ('<tool_call>[{"name": "f"}, {"name": "g", "parameters": {}}]</tool_call>', "", ["f{}", "g{}"]),
        ("<tool_call>{", "<tool_call>{", []),
        ('<tool_call>{"name": ""}</tool_call>', '<tool_call>{"name": ""}</tool_call>', []),
        ('<tool_call>{"name": "f"}', "", ["f{}"]),  # some models end without the tag
        ("<tool_<tool_", "<tool_<tool_", []),
        # in the order of Hermes 2 Pro, and arguments that are no object: read when they are whole
        ('<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>!', "!", ['f{"x": 1}']),
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>!', "!", ["f{}"]),
        ('<tool_call>{"name": "a\\u0062", "arguments": {}}</tool_call>', "", ["ab{}"]),
        # several between the same tags
        (f"<tool_call> [ {F} ,\n{F}]\n</tool_call> b", "b", ['f{"x": 1}'] * 2),
        (f"<tool_call>{F}\n{F}</tool_call>b", "b", ['f{"x": 1}'] * 2),
        (f'<tool_call>[{F}, {{"name": "g"}}]</tool_call>b', "b", ['f{"x": 1}', "g{}"]),
        (f"<tool_call>[{F}, {{1}}]</tool_call> b", "b", ['f{"x": 1}']),
        # a tag inside of a string is text of it; one behind a line break, which no JSON string has, ends the call
        ('<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>b', "b", ['f{"x": "</tool_call>"}']),
        ('<tool_call>{"name": "f", "arguments": {"x": "1}}\n</tool_call>b', "b", ['f{"x": "1}}\n']),
        ('<tool_call>{"name": "f", "arguments": {"x": 1</tool_call>b', "b", ['f{"x": 1']),
        # more or fewer ends than beginnings
        (f"<tool_call>{F}}}\n</tool_call>b", "b", ['f{"x": 1}']),
        (f"a<tool_call>{F}\nb", "ab", ['f{"x": 1}']),
        (f"a<tool_call>[{F}]", "a", ['f{"x": 1}']),
        (f"a<tool_call>{F}\n</tool_c", "a", ['f{"x": 1}']),
        (f"<tool_call>{F}\n<tool_call>{F}</tool_call>b", "b", ['f{"x": 1}'] * 2),
        # cut short
        ('<tool_call>{"name": "f", "arguments": {"x": "y', "", ['f{"x": "y']),
        ('a <tool_call>{"name": "f", "argu', 'a <tool_call>{"name": "f", "argu', []),
    ],
)
async def test_where_the_text_is_cut_does_not_matter(text, said, called):
    for heard, calls in cut(text, JsonCallParser):
        assert heard == said
        assert [call.name + call.arguments for call in calls] == called


@pytest.mark.parametrize(
    "text",
    ['{"name": "aa', '{"name": "f", "arguments": {"x": "aa', "  ", f"{F}  ", f"{F}aa", '{"arguments": {"a": "aa'],
)
async def test_a_call_without_an_end_takes_no_more_time_with_each_token(text):
    """Clients can make a model generate anything, and one event loop parses for all."""
    parser = JsonCallParser()
    parser.push(OPEN + text[:-2], is_last=False)
    started = time.process_time()
    for _ in range(15_000):
        parser.push(text[-2:] * 2, is_last=False)
    assert time.process_time() - started < 2  # 40 ms; 20 s if all of it was read again each time


@pytest.mark.parametrize("arguments", ['{"a": "}\\"{", "b": [{}, 1]}', "{}", "[1, []]", "true", '"}"'])
async def test_where_a_demanded_call_is_cut_does_not_matter_either(arguments):
    for said, [call] in cut(f'{{"name": "f", "arguments": {arguments}}}', lambda: JsonCallParser(is_call=True)):
        assert (said, call.name, call.arguments, call.is_end) == ("", "f", arguments, True)


def cut(text, parser_of):
    """The text and the whole calls that a parser makes of ``text`` in three pieces, for many ways to cut it."""
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1, 3):
            parser = parser_of()
            parts = [
                *parser.push(text[:first], is_last=False),
                *parser.push(text[first:second], is_last=False),
                *parser.push(text[second:], is_last=True),
            ]
            said = "".join(part for part in parts if isinstance(part, str))
            yield said, joined_calls([part for part in parts if isinstance(part, CallPart)])


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_only_the_allowed_tools_are_shown_and_may_be_called(front, client, mode):
    front.script.text = '{"name": "get_time", "arguments": {}}'
    chosen = {"type": "function", "function": {"name": "get_time"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [chosen]}}
    await client.chat.completions.create(model="bytes", messages=ASK, tools=[WEATHER, TIME], tool_choice=choice)
    request = front.script.asked[-1]
    prompt = bytes(request.tokens.tolist()).decode()
    assert "get_time" in prompt and "get_weather" not in prompt
    assert (request.sampling.guide is not None) == (mode == "required")

    flat = [{"type": "function", **tool["function"]} for tool in (WEATHER, TIME)]
    choice = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "get_time"}]}
    answer = await client.responses.create(model="bytes", input="W?", tools=flat, tool_choice=choice)
    assert "get_weather" not in front.prompt
    assert answer.tool_choice.mode == mode


@pytest.mark.parametrize("names", [[], ["other"]])
async def test_allowed_tools_are_among_the_tools(front, client, names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="bytes", messages=ASK, tools=[TIME], tool_choice=choice)
    assert caught.value.param == "tool_choice"


SEVERAL = (
    '[{"name": "get_weather", "arguments": {"city": "Bern"}}, {"name": "get_time", "arguments": {}} ,\n'
    '{"name": "get_weather", "arguments": {"city": "Z}, {"}}]'
)


@pytest.mark.parametrize("per_delta", [1, 7, 1000])
async def test_several_calls_can_be_demanded(front, client, per_delta):
    front.script.text, front.script.per_delta = SEVERAL, per_delta
    asked = {"model": "bytes", "messages": ASK, "tools": [WEATHER, TIME], "tool_choice": "required"}

    answer = (await client.chat.completions.create(**asked)).choices[0]
    said = [(call.function.name, json.loads(call.function.arguments)) for call in answer.message.tool_calls]
    assert said == [("get_weather", {"city": "Bern"}), ("get_time", {}), ("get_weather", {"city": "Z}, {"})]
    assert len({call.id for call in answer.message.tool_calls}) == 3
    assert (answer.message.content, answer.finish_reason) == (None, "tool_calls")
    schema = json.loads(front.script.asked[-1].sampling.guide.text)
    assert schema["type"] == "array" and schema["minItems"] == 1

    parts = {}
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        assert not chunk.choices[0].delta.content
        for call in chunk.choices[0].delta.tool_calls or []:
            parts.setdefault(call.index, []).append(call)
    assert [calls[0].function.name for calls in parts.values()] == ["get_weather", "get_time", "get_weather"]
    told = ["".join(call.function.arguments for call in calls) for calls in parts.values()]
    assert list(map(json.loads, told)) == [arguments for _, arguments in said]


async def test_not_in_parallel_means_one_call(front, client):
    front.script.text = '{"name": "get_time", "arguments": {}}'
    asked = {"model": "bytes", "messages": ASK, "tools": [TIME], "tool_choice": "required"}
    answer = await client.chat.completions.create(**asked, parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls) == 1
    assert json.loads(front.script.asked[-1].sampling.guide.text)["type"] == "object"


async def test_calls_that_are_cut_leave_no_text():
    for length in range(1, len(SEVERAL)):
        parser = JsonCallParser(is_call=True)
        parts = [*parser.push(SEVERAL[:length], is_last=True)]
        assert all(isinstance(part, CallPart) for part in parts)
        names = [part.name for part in parts if part.name]
        assert names == ["get_weather", "get_time", "get_weather"][: len(names)]
