"""The official client, unchanged, against our HTTP port."""

from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest

from mooncake.errors import HandoffFailed, InvalidRequest, NodeUnavailable, Overloaded

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO = [{"role": "user", "content": "Hello"}]


async def test_it_lists_the_model_and_finds_it_by_name(client):
    models = [model.id async for model in client.models.list()]

    assert models == ["bytes"]
    assert (await client.get("models/", cast_to=dict))["data"][0]["id"] == "bytes"
    assert (await client.models.retrieve("bytes")).id == "bytes"
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


async def test_a_chat_answers_with_text_usage_and_a_reason(front, client):
    front.script.cached_tokens = 8

    answer = await client.chat.completions.create(model="bytes", messages=HELLO)

    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello, wörld!", "stop")
    assert answer.usage.prompt_tokens == len("<user>Hello<assistant>")
    assert answer.usage.completion_tokens == len("Hello, wörld!".encode()) + 1
    assert answer.usage.prompt_tokens_details.cached_tokens == 8
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint.startswith("fp_")
    # a chat that does not say how long may use the whole context
    assert front.script.asked[0].sampling.max_tokens == 4096 - answer.usage.prompt_tokens


async def test_a_streamed_chat_says_the_same_in_pieces(client):
    stream = await client.chat.completions.create(
        model="bytes", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]

    *choices, usage = chunks
    assert choices[0].choices[0].delta.role == "assistant"
    assert choices[0].choices[0].delta.content == ""
    assert "".join(chunk.choices[0].delta.content or "" for chunk in choices) == "Hello, wörld!"
    assert [chunk.choices[0].finish_reason for chunk in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert usage.choices == []
    assert usage.usage.total_tokens == usage.usage.prompt_tokens + usage.usage.completion_tokens
    assert all(chunk.usage is None for chunk in choices)


async def test_what_was_blended_is_told_where_anything_was(front, client):
    front.script.cached_tokens = 2

    plain = await client.chat.completions.create(model="bytes", messages=HELLO)
    front.script.blended_tokens = 5
    blended = await client.chat.completions.create(model="bytes", messages=HELLO, n=2)
    answer = await client.responses.create(model="bytes", input="Hello")

    assert "blended_tokens" not in plain.usage.prompt_tokens_details.model_extra
    assert blended.usage.prompt_tokens_details.cached_tokens == 2
    assert blended.usage.prompt_tokens_details.model_extra["blended_tokens"] == 5
    assert answer.usage.input_tokens_details.model_extra["blended_tokens"] == 5


async def test_three_choices_are_one_request(front, client):
    answer = await client.chat.completions.create(model="bytes", messages=HELLO, n=3, seed=7)

    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == ["Hello, wörld!"] * 3
    [asked] = front.script.asked
    assert (asked.sampling.n, asked.sampling.seed) == (3, 7)
    assert answer.usage.prompt_tokens == len(asked.tokens)  # the prompt counts once
    assert answer.usage.completion_tokens == 3 * (len("Hello, wörld!".encode()) + 1)


async def test_a_choice_that_meets_a_stop_string_ends_alone(front, client):
    """All answers are the same here, so the last one to meet it ends the whole request; the core is notified, too."""
    front.script.ends = False
    answer = await client.completions.create(model="bytes", prompt="x", n=3, stop="w", max_tokens=999)

    assert [choice.text for choice in answer.choices] == ["Hello, "] * 3
    [asked] = front.script.asked
    assert front.script.ended_choices == [(asked.request_id, choice) for choice in range(3)]
    await front.script.until_closed()


@pytest.mark.parametrize("reported_to", [0, 1])
async def test_choices_that_meet_stop_strings_tell_of_the_cache_whichever_brought_the_report(
    front, client, reported_to
):
    front.script.ends, front.script.cached_tokens, front.script.reported_to = False, 1, reported_to
    answer = await client.completions.create(model="bytes", prompt="xy", n=2, stop="w", max_tokens=999)
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


async def test_best_of_keeps_the_likeliest_answers(front, client):
    front.script.late_logprob = 0.1
    answer = await client.completions.create(model="bytes", prompt="x", n=2, best_of=4)

    [asked] = front.script.asked
    assert asked.sampling.num_answers == 4 and asked.sampling.logprobs == 0
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].logprobs is None
    ranked = await client.completions.create(model="bytes", prompt="x", n=2, best_of=4, logprobs=0)
    means = [choice.logprobs.token_logprobs[0] for choice in ranked.choices]
    assert means == pytest.approx([-0.2, -0.3])
    with pytest.raises(openai.BadRequestError, match="best_of cannot be streamed"):
        await client.completions.create(model="bytes", prompt="x", n=2, best_of=4, stream=True)


async def test_three_streamed_choices_are_told_apart_by_their_index(client):
    stream = await client.chat.completions.create(model="bytes", messages=HELLO, n=3, stream=True)
    texts, reasons = {}, {}
    async for chunk in stream:
        choice = chunk.choices[0]
        texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
        reasons[choice.index] = choice.finish_reason

    assert texts == dict.fromkeys(range(3), "Hello, wörld!")
    assert reasons == dict.fromkeys(range(3), "stop")


async def test_negative_and_missing_seeds_are_welcome(front, client):
    await client.completions.create(model="bytes", prompt="x", seed=-2)
    await client.completions.create(model="bytes", prompt="x")
    await client.completions.create(model="bytes", prompt="x")

    given, drawn, again = (request.sampling.seed for request in front.script.asked)
    assert given == (1 << 64) - 2
    assert drawn != again


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_stop_string_cuts_the_text_and_ends_the_request(front, client, streamed):
    front.script.ends = False  # it would talk for ever
    front.script.cached_tokens = 4
    options = {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}

    answer = await client.completions.create(
        model="bytes", prompt="x", max_tokens=1000, stop=["never", "wör"], **options
    )

    if streamed:
        chunks = [chunk async for chunk in answer]
        text = "".join(chunk.choices[0].text for chunk in chunks[:-1])
        reason, usage = chunks[-2].choices[0].finish_reason, chunks[-1].usage
    else:
        text, reason, usage = answer.choices[0].text, answer.choices[0].finish_reason, answer.usage
    assert (text, reason) == ("Hello, ", "stop")
    assert usage.completion_tokens == len("Hello, wör".encode())
    assert usage.prompt_tokens_details.cached_tokens == 4
    await front.script.until_closed()


async def test_completions_take_sixteen_tokens_unless_told(front, client):
    front.script.ends = False

    answer = await client.completions.create(model="bytes", prompt="x")

    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("ab", [b"ab"]),
        (["ab", "c"], [b"ab", b"c"]),
        ([97, 98], [b"ab"]),
        ([[97, 98], [99]], [b"ab", b"c"]),
    ],
)
async def test_completions_take_a_prompt_in_four_forms(front, client, prompt, asked):
    answer = await client.completions.create(model="bytes", prompt=prompt)

    assert sorted(bytes(request.tokens.tolist()) for request in front.script.asked) == asked
    assert [choice.text for choice in answer.choices] == ["Hello, wörld!"] * len(asked)
    assert answer.usage.prompt_tokens == sum(map(len, asked))


async def test_echo_puts_the_prompt_before_the_answer(client):
    answer = await client.completions.create(model="bytes", prompt="Say: ", echo=True)
    stream = await client.completions.create(model="bytes", prompt="Say: ", echo=True, stream=True)

    assert answer.choices[0].text == "Say: Hello, wörld!"
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Say: Hello, wörld!"


async def test_a_chat_tells_log_probabilities_token_by_token(front, client):
    front.script.text = "ab€"

    answer = await client.chat.completions.create(model="bytes", messages=HELLO, logprobs=True, top_logprobs=2)

    content = answer.choices[0].logprobs.content
    assert [token.token for token in content[:2]] == ["a", "b"]
    assert content[0].bytes == [97]
    assert [token.bytes for token in content[2:5]] == [[0xE2], [0x82], [0xAC]]  # thirds of a character
    assert content[5].token == "<end>"
    assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [("a", -1.0), ("b", -2.0)]
    assert all(token.logprob == -0.5 for token in content)


async def test_streamed_log_probabilities_come_with_the_text_of_their_tokens(front, client):
    front.script.text = "a€b"

    stream = await client.chat.completions.create(
        model="bytes", messages=HELLO, logprobs=True, top_logprobs=1, stream=True
    )
    told = [
        (chunk.choices[0].delta.content, len(chunk.choices[0].logprobs.content))
        async for chunk in stream
        if chunk.choices[0].logprobs
    ]

    assert told == [("a", 1), ("€", 3), ("b", 1), (None, 1)]


async def test_completions_tell_log_probabilities_in_their_own_shape(front, client):
    front.script.text = "xy"

    answer = await client.completions.create(model="bytes", prompt="q", logprobs=2, max_tokens=2)

    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["x", "y"]
    assert logprobs.token_logprobs == [-0.5, -0.5]
    assert logprobs.text_offset == [0, 1]
    assert logprobs.top_logprobs[0] == {"x": -0.5, "a": -1.0, "b": -2.0}


async def test_sampling_reaches_the_engine_as_it_was_asked(front, client):
    await client.chat.completions.create(
        model="bytes",
        messages=HELLO,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias={"97": 5},
        max_completion_tokens=7,
        user="anna",
        extra_body={
            "top_k": 3,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [98],
            "cache_salt": "tenant-1",
        },
    )

    request = front.script.asked[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 3, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.25, -0.5, 1.2)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.ignore_eos) == (7, 2, True)
    assert (sampling.logit_bias, sampling.stop_token_ids) == (((97, 5.0),), (98,))
    assert (request.salt, request.session) == ("tenant-1", "anna")


async def test_token_ids_come_back_when_asked_for(client):
    body = {"return_token_ids": True}
    answer = await client.completions.create(model="bytes", prompt="q", max_tokens=2, extra_body=body)
    stream = await client.chat.completions.create(
        model="bytes", messages=HELLO, max_tokens=2, stream=True, extra_body=body
    )
    chunks = [chunk async for chunk in stream]

    assert (answer.choices[0].prompt_token_ids, answer.choices[0].token_ids) == ([113], [72, 101])
    assert bytes(chunks[0].prompt_token_ids) == b"<user>Hello<assistant>"
    assert [token for chunk in chunks[1:] for token in chunk.choices[0].token_ids] == [72, 101]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"top_p": 1.5}, "top_p"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 10_000}, "stop"),
        ({"logit_bias": {"257": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 40: 1}}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"cache_salt": "a b"}, "cache_salt"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"top_k": -2}, "top_k"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"seed": 1 << 70}, "seed"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"guided_regex": "(["}, "guided_regex"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex"),
        ({"guided_choice": ["a"], "min_tokens": 2}, "guided_choice"),
        ({"structured_outputs": {"regex": "(["}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 3}}}}, "response_format"),
        ({"guided_json": {"type": 3}}, "guided_json"),
        ({"guided_json": {"allOf": [{"pattern": f"[a-z]{{3,}}{number}"} for number in range(37)]}}, "guided_json"),
        ({"guided_json": [1]}, "guided_json"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"regx": "[0-9]"}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"guided_grammar": "root ::= ::"}, "guided_grammar"),
        ({"use_beam_search": True, "presence_penalty": 1.0}, "n"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ],
)
async def test_a_wrong_value_is_named(front, client, body, param):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(**({"model": "bytes", "messages": HELLO} | {"extra_body": body}))

    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert front.script.asked == []


@pytest.mark.parametrize(
    ("wishes", "given"),
    [
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.json, structured_outputs.regex"),
        (
            {"guided_choice": ["a"], "response_format": {"type": "json_object"}},
            "guided_choice, response_format",
        ),
    ],
)
async def test_an_answer_follows_one_guide_and_several_are_named(client, wishes, given):
    with pytest.raises(openai.BadRequestError, match=f"give only one of {given}") as caught:
        await client.chat.completions.create(model="bytes", messages=HELLO, extra_body=wishes)

    assert caught.value.param == given.partition(",")[0]


async def test_a_text_part_without_text_is_told_what_it_lacks(client):
    with pytest.raises(openai.BadRequestError, match="a part of the type text needs text"):
        await client.chat.completions.create(
            model="bytes", messages=[{"role": "user", "content": [{"type": "text", "content": "x"}]}]
        )


@pytest.mark.parametrize(
    ("wish", "param"),
    [({"n": 65}, "n"), ({"best_of": 65}, "best_of"), ({"n": 2, "best_of": 128}, "best_of"), ({"n": 128}, "n")],
)
async def test_the_answers_to_all_prompts_have_a_bound_those_that_are_only_compared_included(
    front, client, wish, param
):
    with pytest.raises(openai.BadRequestError, match="at most 128 choices") as caught:
        await client.completions.create(model="bytes", prompt=["a", "b"], max_tokens=1, **wish)

    assert caught.value.param == param
    assert front.script.asked == []
    await client.completions.create(model="bytes", prompt=["a", "b"], max_tokens=1, best_of=64)


async def test_a_prompt_that_does_not_fit_with_its_answer_is_refused(front, client):
    async def refused(**wishes):
        with pytest.raises(openai.BadRequestError) as caught:
            if "messages" in wishes:
                await client.chat.completions.create(model="bytes", **wishes)
            elif "input" in wishes:
                await client.responses.create(model="bytes", **wishes)
            else:
                await client.completions.create(model="bytes", **wishes)
        assert caught.value.code == "context_length_exceeded"
        return caught.value.param

    assert await refused(prompt="x" * 4096) == "prompt"
    assert await refused(prompt=["x", "x" * 4090], max_tokens=7) == "max_tokens"
    assert await refused(messages=HELLO, max_tokens=1 << 70) == "max_tokens"
    assert await refused(messages=HELLO, max_completion_tokens=4096) == "max_completion_tokens"
    assert await refused(input="x", max_output_tokens=4096) == "max_output_tokens"
    assert not front.script.asked

    await client.completions.create(model="bytes", prompt="x" * 4090, max_tokens=6)
    await client.completions.create(model="bytes", prompt="x" * 4090)  # the sixteen of the default are not asked for
    assert [asked.sampling.max_tokens for asked in front.script.asked] == [6, 6]


async def test_text_parts_and_developers_are_understood(front, client):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    await client.chat.completions.create(
        model="bytes", messages=[{"role": "developer", "content": "Be brief"}, {"role": "user", "content": parts}]
    )
    with pytest.raises(openai.BadRequestError, match="known: assistant, developer, system, tool, user"):
        await client.chat.completions.create(model="bytes", messages=[{"role": "wizard", "content": "x"}])

    assert bytes(front.script.asked[0].tokens.tolist()) == b"<system>Be brief<user>Hel\nlo<assistant>"


@pytest.mark.parametrize(
    ("error", "expected", "retry_ms"),
    [
        (Overloaded("full", 1.25), openai.RateLimitError, "1250"),
        (NodeUnavailable("gone"), openai.InternalServerError, "1000"),
        (HandoffFailed("lost"), openai.InternalServerError, "1000"),
        (MemoryError(), openai.InternalServerError, "1000"),
        (InvalidRequest("no", "prompt"), openai.BadRequestError, None),
        (RuntimeError("a secret"), openai.InternalServerError, None),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_an_error_before_the_first_token_has_a_status(front, client, error, expected, retry_ms, streamed):
    front.script.error = error

    with pytest.raises(expected) as caught:
        await client.completions.create(model="bytes", prompt="x", stream=streamed)

    assert caught.value.response.headers.get("retry-after-ms") == retry_ms
    assert "secret" not in str(caught.value)


async def test_the_client_tries_again_when_told_to(front):
    front.script.error = Overloaded("full", 0.05)
    async with openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=2) as client:
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model="bytes", prompt="x")

    assert len(front.script.asked) == 3


async def test_an_error_after_the_first_token_ends_the_stream_as_an_error(front, client):
    front.script.error, front.script.error_after = NodeUnavailable("decode-0 is gone"), 3

    stream = await client.completions.create(model="bytes", prompt="x", stream=True)
    text = ""
    with pytest.raises(openai.APIError, match="decode-0 is gone"):
        async for chunk in stream:
            text += chunk.choices[0].text
    assert text == "Hel"


async def test_one_failed_choice_fails_the_answer_and_cancels_the_others(front, client):
    front.script.ends, front.script.delay_s = False, 0.01
    front.script.error, front.script.error_after = NodeUnavailable("gone"), 5

    with pytest.raises(openai.InternalServerError):
        await client.completions.create(model="bytes", prompt=["a", "b", "c"], max_tokens=1000)
    assert not front.script.running


async def test_leaving_a_stream_closes_the_request_within_a_second(front, client):
    front.script.ends, front.script.delay_s = False, 0.01

    stream = await client.chat.completions.create(model="bytes", messages=HELLO, stream=True)
    async for _ in stream:
        break
    await stream.close()

    await front.script.until_closed()


@pytest.mark.parametrize("streamed", [False, True])
async def test_leaving_before_the_first_token_closes_the_request_within_a_second(front, client, streamed):
    front.script.first_delay_s = 60
    asking = asyncio.create_task(client.completions.create(model="bytes", prompt="x", stream=streamed))
    await front.script.until(lambda: len(front.script.running) == 1)

    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await front.script.until_closed()


async def test_leaving_an_answer_with_three_choices_closes_all(front, client):
    front.script.ends, front.script.delay_s = False, 0.01
    asking = asyncio.create_task(client.completions.create(model="bytes", prompt="x", n=3, max_tokens=4000))
    await front.script.until(lambda: len(front.script.running) == 1)

    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking

    await front.script.until_closed()


async def test_thirty_two_requests_at_once_get_whole_answers(front, client):
    front.script.delay_s = 0.005

    async def ask(number):
        stream = await client.chat.completions.create(
            model="bytes", messages=[{"role": "user", "content": str(number)}], stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    texts = await asyncio.gather(*map(ask, range(32)))

    assert texts == ["Hello, wörld!"] * 32
    assert front.script.running == set()


async def test_the_blocking_client_works_too(front):
    def ask():
        with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none") as client:
            return client.completions.create(model="bytes", prompt="x").choices[0].text

    assert await asyncio.to_thread(ask) == "Hello, wörld!"


async def test_a_server_that_stops_says_so_to_those_who_wait(open_front):
    async with open_front() as front:
        front.script.first_delay_s = 60
        waiting = asyncio.create_task(front.http.post("/v1/completions", json={"prompt": "x"}))
        await front.script.until(lambda: front.script.running)
        await front.ingress.stop()
        response = await waiting

        with pytest.raises(httpx.ConnectError):
            await front.http.get("/")

    assert response.status_code == 503
    assert response.json()["error"]["message"] == "the server is shutting down"


async def test_a_server_that_drains_finishes_what_runs_and_takes_nothing_new(open_front):
    async with open_front() as front:
        front.script.delay_s = 0.02
        running = asyncio.create_task(front.http.post("/v1/completions", json={"prompt": "x"}))
        await front.script.until(lambda: front.script.running)
        draining = asyncio.create_task(front.ingress.drain(10.0))
        await asyncio.sleep(0)
        refused = await front.http.post("/v1/completions", json={"prompt": "y"})
        ready, live = await front.http.get("/health/ready"), await front.http.get("/health/live")
        await draining
        assert not front.script.running
        await front.ingress.stop()
        answer = (await running).json()["choices"][0]

    assert refused.status_code == 503
    assert (ready.status_code, ready.json(), live.status_code) == (503, {"status": "stopping"}, 200)
    assert (answer["text"], answer["finish_reason"]) == ("Hello, wörld!", "stop")


async def test_a_drain_does_not_wait_longer_than_it_was_told(open_front):
    async with open_front() as front:
        front.script.first_delay_s = 60
        waiting = asyncio.create_task(front.http.post("/v1/completions", json={"prompt": "x"}))
        await front.script.until(lambda: front.script.running)
        await front.ingress.drain(0.05)
        assert front.script.running and not waiting.done()
        await front.ingress.stop()
        assert (await waiting).status_code == 503


UNSET = {  # of vLLM's StructuredOutputsParams, as a client sends them with the field that it means
    "regex": None,
    "json_object": None,
    "disable_any_whitespace": False,
    "disable_additional_properties": False,
    "whitespace_pattern": None,
    "structural_tag": None,
}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize(
    ("wish", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            "json_schema",
            SCHEMA,
        ),
        ({"extra_body": {"guided_json": SCHEMA}}, "json_schema", SCHEMA),
        ({"extra_body": {"guided_json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA),
        ({"extra_body": {"guided_regex": "[a-z]+"}}, "regex", "[a-z]+"),
        ({"extra_body": {"guided_choice": ["yes", "no"]}}, "choice", ["yes", "no"]),
        ({"extra_body": {"guided_grammar": 'root ::= "a"'}}, "grammar", 'root ::= "a"'),
        ({"extra_body": {"structured_outputs": {"choice": ["yes"], "disable_fallback": True}}}, "choice", ["yes"]),
        (
            {"extra_body": {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}}},
            "json_schema",
            SCHEMA,
        ),
        ({"extra_body": {"structured_outputs": {"json": SCHEMA} | UNSET}}, "json_schema", SCHEMA),
    ],
)
async def test_guides_have_the_names_that_openai_and_vllm_give_them(front, client, wish, kind, text):
    await client.chat.completions.create(model="bytes", messages=HELLO, **wish)
    [asked] = front.script.asked
    guide = asked.sampling.guide
    assert guide.kind == kind
    assert (guide.text if isinstance(text, str) else json.loads(guide.text)) == text


async def test_what_is_wrong_with_a_guide_is_told_in_a_line(client):
    for guided in ({"guided_regex": "([a-z"}, {"guided_grammar": "start: foo\n"}):
        with pytest.raises(openai.BadRequestError, match=r"unclosed character class|unknown name") as caught:
            await client.chat.completions.create(model="bytes", messages=HELLO, extra_body=guided)
        assert "\n" not in caught.value.body["message"] and len(caught.value.body["message"]) < 150


async def test_beam_search_has_vllms_names(front, client):
    extra = {"use_beam_search": True, "length_penalty": 0.5}
    await client.completions.create(model="bytes", prompt="x", n=3, extra_body=extra)
    [asked] = front.script.asked
    assert (asked.sampling.n, asked.sampling.beam_search.length_penalty) == (3, 0.5)


@pytest.mark.parametrize("n", [1, 2])
async def test_echo_with_logprobs_tells_those_of_the_prompt(front, client, n):
    front.script.text = "yo"
    answer = await client.completions.create(model="bytes", prompt="Hi!", echo=True, logprobs=1, max_tokens=2, n=n)
    for choice in answer.choices:
        assert choice.text == "Hi!yo"
        assert choice.logprobs.tokens == ["H", "i", "!", "y", "o"]
        assert choice.logprobs.token_logprobs == [None, -0.25, -0.5, -0.5, -0.5]
        assert choice.logprobs.top_logprobs[:2] == [None, {"i": -0.25, "a": -1.0}]
        assert choice.logprobs.text_offset == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("skips", "echoed", "offsets"),
    [(True, "é\ufffd", [0, 0, 0, 1, 2, 3, 3, 4]), (False, "<end>é\ufffd", [0, 5, 5, 6, 7, 8, 8, 9])],
)
async def test_the_offsets_of_tokens_fit_the_text(front, client, stream, skips, echoed, offsets):
    """A control token may have no text, part of a character has none yet, and half of one ends the prompt."""
    front.script.text = "bäc"
    wishes = {"echo": True, "logprobs": 0, "max_tokens": 4, "extra_body": {"skip_special_tokens": skips}}

    answer = await client.completions.create(model="bytes", prompt=[256, *"é".encode(), 0xC3], stream=stream, **wishes)
    choices = [chunk.choices[0] async for chunk in answer] if stream else answer.choices

    text = "".join(choice.text for choice in choices)
    told = [offset for choice in choices if choice.logprobs for offset in choice.logprobs.text_offset]
    assert (text, told) == (f"{echoed}bäc", offsets)


@pytest.mark.parametrize("max_tokens", [0, 2])
async def test_a_prompt_without_text_is_scored_too(front, client, max_tokens):
    front.script.text = "yo"
    wishes = {"model": "bytes", "prompt": [256, 256], "echo": True, "logprobs": 0, "max_tokens": max_tokens}
    [choice] = (await client.completions.create(**wishes)).choices
    assert choice.text == "yo"[:max_tokens]
    assert choice.logprobs.tokens == ["<end>", "<end>", "y", "o"][: 2 + max_tokens]
    assert choice.logprobs.text_offset == [0, 0, 0, 1][: 2 + max_tokens]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_alone_is_scored_by_asking_for_no_tokens(front, client, stream):
    wishes = {"model": "bytes", "prompt": [[72, 105], [72, 111]], "echo": True, "logprobs": 1, "max_tokens": 0}
    if stream:
        told = [chunk.choices[0] async for chunk in await client.completions.create(**wishes, stream=True)]
        choices = sorted((choice for choice in told if choice.text), key=lambda choice: choice.index)
        assert [choice.finish_reason for choice in told if choice.finish_reason] == ["length", "length"]
    else:
        answer = await client.completions.create(**wishes)
        choices = answer.choices
        assert [choice.finish_reason for choice in choices] == ["length", "length"]
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 0)

    assert [choice.text for choice in choices] == ["Hi", "Ho"]
    assert [choice.logprobs.tokens for choice in choices] == [["H", "i"], ["H", "o"]]
    assert [choice.logprobs.token_logprobs for choice in choices] == [[None, -0.25]] * 2
    with pytest.raises(openai.BadRequestError, match="max_tokens must be between 1 and 1048576, got 0"):
        await client.completions.create(model="bytes", prompt="Hi", max_tokens=0)


@pytest.mark.parametrize(
    "wishes",
    [
        {"n": 20, "extra_body": {"prompt_logprobs": 20}},
        {"n": 20, "extra_body": {"prompt_logprobs": 20}, "stream": True},
        {"n": 20, "echo": True, "logprobs": 20},
        {"prompt": ["x" * 3000] * 20, "extra_body": {"prompt_logprobs": 20}},
    ],
)
async def test_the_scores_of_prompts_have_a_bound_over_all_choices(front, client, wishes):
    """Each choice tells them all, and nobody else is served while they are put into words."""
    with pytest.raises(openai.BadRequestError, match="told for each choice and with alternatives, are 1260000"):
        await client.completions.create(**{"model": "bytes", "prompt": "x" * 3000, "max_tokens": 1} | wishes)
    assert not front.script.asked


async def test_prompt_logprobs_have_vllms_form(front, client):
    extra = {"prompt_logprobs": 1}
    answer = await client.completions.create(model="bytes", prompt="Hi", max_tokens=1, extra_body=extra)
    wanted = [
        None,
        {
            str(ord("i")): {"logprob": -0.25, "decoded_token": "i", "rank": 7},
            str(ord("a")): {"logprob": -1.0, "decoded_token": "a", "rank": 1},
        },
    ]
    assert answer.choices[0].prompt_logprobs == wanted
    chat = await client.chat.completions.create(model="bytes", messages=HELLO, max_tokens=1, extra_body=extra)
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens and chat.prompt_logprobs[0] is None
    assert not hasattr(chat.choices[0], "prompt_logprobs")
    plain = await client.completions.create(model="bytes", prompt="Hi", max_tokens=1)
    assert not hasattr(plain.choices[0], "prompt_logprobs")
    short = await client.completions.create(model="bytes", prompt="H", max_tokens=1, extra_body=extra)
    assert short.choices[0].prompt_logprobs == [None]
    async for chunk in await client.completions.create(
        model="bytes", prompt="Hi", max_tokens=1, stream=True, extra_body=extra
    ):
        assert chunk.choices[0].prompt_logprobs == wanted
