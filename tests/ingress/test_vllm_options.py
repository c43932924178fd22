"""vLLM's options for prompts and answers: what each does, and the error for a wrong value."""

from __future__ import annotations

import json

import grpc
import pytest

from mooncake.rpc import common_pb2, inference_pb2_grpc
from mooncake.rpc import inference_pb2 as pb

in_module_loop = pytest.mark.asyncio(loop_scope="module")
pytestmark = in_module_loop
MESSAGES = [{"role": "user", "content": "Hi"}]


async def complete(front, **wishes):
    answer = await front.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 50} | wishes)
    assert answer.status_code == 200 and "x-mooncake-warning" not in answer.headers, answer.text
    return answer.json()["choices"][0]


@pytest.mark.parametrize(
    ("include", "stop", "text"),
    [
        (True, "wör", "Hello, wör"),
        (False, "wör", "Hello, "),
        (None, ["ld", "lo"], "Hel"),
        (True, ["ld", "lo"], "Hello"),
        (True, "nowhere", "Hello, wörld!"),
    ],
)
async def test_the_stop_string_is_told_where_that_is_asked(front, include, stop, text):
    choice = await complete(front, stop=stop, include_stop_str_in_output=include)
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")


async def test_a_stop_string_that_is_told_streams_in_order(front):
    body = {"prompt": "x", "max_tokens": 50, "stop": "wör", "include_stop_str_in_output": True, "stream": True}
    text = ""
    async with front.http.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    assert text == "Hello, wör"


async def test_a_stop_token_is_told_too_but_not_the_end_token(front):
    stopping = {"stop_token_ids": [ord("o")]}
    assert (await complete(front, **stopping, include_stop_str_in_output=True))["text"] == "Hello"
    assert (await complete(front, **stopping))["text"] == "Hell"
    assert (await complete(front, include_stop_str_in_output=True))["text"] == "Hello, wörld!"


@pytest.mark.parametrize(
    ("wishes", "reason"),
    [
        ({}, None),
        ({"max_tokens": 3}, None),
        ({"stop": ["ld", "lo"]}, "lo"),
        ({"stop": "lo", "include_stop_str_in_output": True}, "lo"),
        ({"stop": "nowhere", "stop_token_ids": [5]}, None),
        ({"stop_token_ids": [256]}, None),  # the model's own end
        ({"stop_token_ids": [256], "ignore_eos": True}, 256),
    ],
)
async def test_what_ended_an_answer_is_told(front, wishes, reason):
    assert (await complete(front, **wishes))["stop_reason"] == reason
    body = {"messages": MESSAGES, "max_tokens": 50, **wishes}
    choice = (await front.http.post("/v1/chat/completions", json=body)).json()["choices"][0]
    assert choice["stop_reason"] == reason


async def test_a_chat_template_reads_documents_and_how_much_to_think(front):
    chat = {"messages": MESSAGES, "documents": [{"title": "T"}], "reasoning_effort": "none"}
    thinks = {
        "messages": MESSAGES,
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False},
    }
    await front.http.post("/v1/chat/completions", json=chat)
    await front.http.post("/v1/chat/completions", json=thinks)
    response = await front.http.post("/v1/responses", json={"input": "Hi", "reasoning": {"effort": "high"}})
    tokens = (await front.http.post("/tokenize", json=chat)).json()["tokens"]

    first, second, third = (asked.tokens.tolist() for asked in front.script.asked)
    assert tokens == first
    assert bytes(first).startswith(
        b"[reasoning_effort=none][enable_thinking=False][documents=[{'title': 'T'}]]<user>Hi"
    )
    assert bytes(second).startswith(b"[reasoning_effort=low][enable_thinking=False]<user>")  # what is named counts
    assert bytes(third).startswith(b"[reasoning_effort=high][enable_thinking=True]<user>")
    assert response.json()["reasoning"]["effort"] == "high"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("wishes", [{"chat_template": "x"}, {"chat_template_kwargs": {"chat_template": "x"}}])
async def test_a_request_brings_no_template_of_its_own(front, path, wishes):
    answer = await front.http.post(path, json={"messages": MESSAGES} | wishes)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template")
    assert front.script.asked == []


async def test_the_answer_has_the_id_that_was_asked_for(front):
    for path, prefix, body in (
        ("/v1/completions", "cmpl-", {"prompt": "x"}),
        ("/v1/chat/completions", "chatcmpl-", {"messages": MESSAGES}),
        ("/v1/responses", "resp_", {"input": "x"}),
    ):
        answer = await front.http.post(path, json=body | {"request_id": "mine.1"})
        assert answer.json()["id"] == f"{prefix}mine.1" and "x-mooncake-warning" not in answer.headers
    refused = await front.http.post("/v1/completions", json={"prompt": "x", "request_id": "a b"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "request_id")


async def test_what_belongs_together_is_said_in_several_ways(front):
    names = ("session_id", "prompt_cache_key", "user")
    for count in range(len(names) + 1):
        await complete(front, **{name: name for name in names[count:]})
    assert [asked.session for asked in front.script.asked] == [*names, ""]


async def test_control_tokens_are_text_where_that_is_asked(front):
    assert (await complete(front, skip_special_tokens=False, include_stop_str_in_output=True))["text"].endswith("<end>")
    assert (await complete(front, skip_special_tokens=False))["text"] == "Hello, wörld!"


async def test_tokens_of_log_probabilities_are_named_by_their_ids_where_that_is_asked(front):
    logprobs = (await complete(front, logprobs=1, return_tokens_as_token_ids=True, max_tokens=3))["logprobs"]
    assert logprobs["tokens"] == ["token_id:72", "token_id:101", "token_id:108"]
    assert set(logprobs["top_logprobs"][0]) == {"token_id:72", "token_id:97"} and logprobs["text_offset"] == [0, 1, 2]
    body = {"messages": MESSAGES, "max_tokens": 1, "logprobs": True, "return_tokens_as_token_ids": True}
    choice = (await front.http.post("/v1/chat/completions", json=body)).json()["choices"][0]
    assert choice["logprobs"]["content"][0]["token"] == "token_id:72"


async def test_what_may_be_drawn_reaches_the_nodes_as_tokens(front):
    await complete(front, allowed_token_ids=[5, 7], bad_words=["no", " nay"])
    sampling = front.script.asked[-1].sampling
    words = tuple(tuple(text.encode()) for text in ("no", " no", "nay", " nay"))
    assert (sampling.allowed_token_ids, sampling.bad_words) == ((5, 7), words)
    answer = await front.http.post("/v1/chat/completions", json={"messages": MESSAGES, "bad_words": ["no"]})
    assert answer.status_code == 200
    assert front.script.asked[-1].sampling.bad_words == words[:2]


async def test_grpc_says_the_same(front):
    async with grpc.aio.insecure_channel(front.grpc_address) as channel:
        sampling = common_pb2.SamplingParams(
            max_tokens=50, allowed_token_ids=[5], bad_words=[common_pb2.TokenRun(ids=[1, 2])]
        )
        request = pb.GenerateRequest(
            text="x", sampling=sampling, bad_words=["no"], stop=["wör"], include_stop_str_in_output=True
        )
        stub = inference_pb2_grpc.InferenceStub(channel)
        assert "".join([piece.text async for piece in stub.Generate(request)]) == "Hello, wör"
    arrived = front.script.asked[-1].sampling
    assert (arrived.allowed_token_ids, arrived.bad_words) == ((5,), ((1, 2), tuple(b"no"), tuple(b" no")))


@pytest.mark.parametrize(
    ("prompt", "keep", "left"),
    [("abcdef", 4, b"cdef"), ("abcdef", 40, b"abcdef"), ([97, 98, 99], 2, b"bc"), ("ab" * 4096, -1, b"ab" * 2038)],
)
async def test_a_prompt_is_cut_to_its_last_tokens(front, prompt, keep, left):
    await complete(front, prompt=prompt, truncate_prompt_tokens=keep, max_tokens=20)
    assert bytes(front.script.asked[-1].tokens.tolist()) == left


async def test_minus_one_leaves_a_chat_the_room_that_it_asks_for(front):
    chat = {"messages": [{"role": "user", "content": "x" * 5000}], "truncate_prompt_tokens": -1}
    for asked, length in ((100, 3996), (None, 4095)):
        answer = await front.http.post("/v1/chat/completions", json=chat | {"max_completion_tokens": asked})
        assert answer.status_code == 200
        assert len(front.script.asked[-1].tokens) == length
    without = await front.http.post("/v1/chat/completions", json={"messages": chat["messages"]})
    assert without.json()["error"]["code"] == "context_length_exceeded"


async def test_variables_reach_the_chat_template(front):
    chat = {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}}
    assert (await front.http.post("/v1/chat/completions", json=chat)).status_code == 200
    told = bytes(front.script.asked[-1].tokens.tolist())
    assert told == b"[enable_thinking=False]<user>Hi<assistant>"
    assert (await front.http.post("/tokenize", json=chat)).json()["tokens"] == list(told)


async def test_the_last_message_is_continued_or_no_turn_is_begun(front):
    chat = {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": False}
    for path in ("/v1/chat/completions", "/tokenize"):
        assert (await front.http.post(path, json=chat)).status_code == 200
    told = bytes(front.script.asked[-1].tokens.tolist())
    assert told == b"[add_generation_prompt=False]<user>Hi"
    both = chat | {"add_generation_prompt": True}
    refused = await front.http.post("/v1/chat/completions", json=both)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "continue_final_message")


async def test_tokens_are_told_by_their_names_where_that_is_asked(front):
    body = {"prompt": "ab", "add_special_tokens": False}
    assert (await front.http.post("/tokenize", json=body)).json() == {
        "count": 2,
        "max_model_len": 4096,
        "tokens": [97, 98],
    }
    told = await front.http.post("/tokenize", json=body | {"return_token_strs": True})
    assert told.json()["token_strs"] == ["<97>", "<98>"] and "x-mooncake-warning" not in told.headers


@pytest.mark.parametrize(
    ("wishes", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [300]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": "all"}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["  "]}, "bad_words"),
        ({"bad_words": ["x" * 65]}, "bad_words"),
        ({"bad_words": ["x" * 300]}, "bad_words"),
        ({"bad_words": ["x"] * 513}, "bad_words"),
        ({"bad_words": [5]}, "bad_words[0]"),
        ({"use_beam_search": True, "n": 2, "bad_words": ["no"]}, "n"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 4097}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 4096, "prompt": "x" * 5000}, "prompt"),
        ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output"),
    ],
)
async def test_a_wrong_value_is_refused_by_its_field(front, wishes, param):
    refused = await front.http.post("/v1/completions", json={"prompt": "x"} | wishes)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
    assert not front.script.asked
