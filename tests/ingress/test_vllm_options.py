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
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "chat_template")
    assert "--chat-template" in error["message"]
    assert front.script.asked == []


async def test_the_answer_has_the_id_that_was_asked_for(front):
    for path, prefix, body in (
        ("/v1/completions", "cmpl-", {"prompt": "x"}),
        ("/v1/chat/completions", "chatcmpl-", {"messages": MESSAGES}),
        ("/v1/responses", "resp_", {"input": "x"}),
    ):
        for own in ("mine.1", "i" * 128):  # the longest of which an error speaks
            answer = await front.http.post(path, json=body | {"request_id": own})
            assert answer.json()["id"] == f"{prefix}{own}" and "x-mooncake-warning" not in answer.headers
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


# Paths of vLLM's and others' that are here, or say why they are not


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v2/embed", "POST /v1/embeddings"),
        ("/classify", "no heads for classes"),
        ("/v1/audio/transcriptions", "neither audio nor images"),
        ("/v1/images/generations", "neither audio nor images"),
        ("/v1/batches/batch_1/cancel", "mooncake run-batch"),
        ("/v1/load_lora_adapter", "--lora NAME=FOLDER"),
        ("/reset_prefix_cache", "cache_salt"),
        ("/inference/v1/generate", "token ids"),
        ("/sleep", "does not sleep"),
        ("/finish_weight_update", "restart it with others"),
        ("/collective_rpc", "no workers"),
        ("/generative_scoring", "logprobs"),
        ("/v1/responses/render", "POST /tokenize"),
        ("/v1/completions/derender", "POST /detokenize"),
        ("/cohere/v2/chat", "/v1/chat/completions"),
        ("/scale_elastic_ep", "/status.json"),
        ("/get_model_info", "/v1/models"),
        ("/completion", "POST /v1/completions continues"),
        ("/docs", "GET /openapi.json"),
    ],
)
async def test_a_path_of_other_servers_says_what_there_is_instead(front, path, words):
    answer = await front.http.post(path, json={})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "not_found" and words in error["message"] and " meant?" not in error["message"]


async def test_below_anthropics_path_the_refusal_has_anthropics_form(front):
    answer = await front.http.get("/v1/messages/batches")
    assert answer.status_code == 404 and answer.json()["type"] == "error"
    assert "nothing is stored" in answer.json()["error"]["message"]


async def test_the_tokenizer_can_be_known_without_its_files(front):
    info = (await front.http.get("/tokenizer_info")).json()
    assert (info["eos_token"], info["bos_token"], info["model_max_length"]) == ("<end>", None, 4096)
    assert info["tokenizer_class"]


async def test_a_model_card_has_the_fields_of_vllms(front):
    [card] = (await front.http.get("/v1/models")).json()["data"]
    assert card["root"] and card["permission"][0]["allow_logprobs"] is True and card["parent"] is None


async def test_load_counts_the_requests_that_are_being_answered(front):
    assert (await front.http.get("/load")).json() == {"server_load": 0}
    front.script.ends = False
    front.script.delay_s = 0.05
    body = {"prompt": "x", "max_tokens": 4000, "stream": True}
    async with front.http.stream("POST", "/v1/completions", json=body) as answer:
        await anext(answer.aiter_lines())
        assert (await front.http.get("/load")).json() == {"server_load": 1}


async def test_sagemakers_path_takes_chats_and_completions(front):
    chat = (await front.http.post("/invocations", json={"messages": MESSAGES})).json()
    assert chat["choices"][0]["message"]["content"] == "Hello, wörld!"
    text = (await front.http.post("/invocations", json={"prompt": "x", "max_tokens": 4})).json()
    assert text["choices"][0]["text"] == "Hell"
    wrong = await front.http.post("/invocations", json={"input": "x"})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "prompt"


# Several conversations in one request


async def test_each_conversation_of_a_batch_has_the_choice_of_its_number(front):
    several = [MESSAGES, [{"role": "user", "content": "Hello there"}], MESSAGES]
    body = {"messages": several, "max_tokens": 5, "temperature": 0, "logprobs": True, "return_token_ids": True}
    answer = await front.http.post("/v1/chat/completions/batch", json=body)
    assert answer.status_code == 200 and "x-mooncake-warning" not in answer.headers, answer.text
    told = answer.json()
    assert told["object"] == "chat.completion" and [choice["index"] for choice in told["choices"]] == [0, 1, 2]
    for choice in told["choices"]:
        assert choice["message"]["content"] == "Hello" and choice["finish_reason"] == "length"
        assert choice["token_ids"] == list(b"Hello") and len(choice["logprobs"]["content"]) == 5
    prompts = [bytes(asked.tokens.tolist()) for asked in front.script.asked]
    assert sorted(prompts) == sorted([b"<user>Hi<assistant>", b"<user>Hello there<assistant>", b"<user>Hi<assistant>"])
    assert told["usage"]["prompt_tokens"] == sum(map(len, prompts)) and told["usage"]["completion_tokens"] == 15


@pytest.mark.parametrize(
    ("wishes", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [MESSAGES, []]}, "messages[1]"),
        ({"messages": [MESSAGES] * 129}, "messages"),
        ({"messages": MESSAGES}, "messages[0]"),
        ({"messages": [MESSAGES, [{"role": "nobody", "content": "x"}]]}, "messages[1][0].role"),
        ({"messages": [MESSAGES, [{"role": "user", "content": "x" * 5000}]]}, "messages[1]"),
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)
async def test_what_a_batch_cannot_ask_for_is_refused_by_its_field(front, wishes, param):
    refused = await front.http.post("/v1/chat/completions/batch", json={"messages": [MESSAGES]} | wishes)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param
    assert not front.script.asked


# Fields


@pytest.mark.parametrize(("side", "kept"), [(None, "hij"), ("left", "hij"), ("right", "abc")])
async def test_a_prompt_is_cut_on_the_side_that_is_named(front, side, kept):
    await complete(front, prompt="abcdefghij", truncate_prompt_tokens=3, truncation_side=side)
    assert front.prompt == kept


async def test_seed_minus_one_is_a_random_one(front):
    await complete(front, seed=-1)
    await complete(front, seed=-1)
    first, second = (request.sampling.seed for request in front.script.asked[-2:])
    assert first != second


async def test_a_chunk_holds_as_many_tokens_as_stream_interval_says(front):
    body = {"prompt": "x", "max_tokens": 50, "stream": True, "stream_interval": 5, "return_token_ids": True}
    for path, wishes in (("/v1/completions", {}), ("/v1/chat/completions", {"messages": MESSAGES})):
        sizes, text = [], ""
        async with front.http.stream("POST", path, json=(body if not wishes else {**body, **wishes})) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    [choice] = json.loads(line[6:])["choices"]
                    text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                    sizes.append(len(choice.get("token_ids") or ()))
        assert text == "Hello, wörld!"
        assert [size for size in sizes if size][:3] == [1, 5, 5]


async def test_a_chat_tells_the_prompt_that_its_template_made(front):
    body = {"messages": MESSAGES, "return_prompt_text": True}
    answer = (await front.http.post("/v1/chat/completions", json=body)).json()
    assert answer["prompt_text"] == "<user>Hi<assistant>"
    async with front.http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as stream:
        chunks = [json.loads(line[6:]) async for line in stream.aiter_lines() if line.startswith("data: {")]
    assert [chunk.get("prompt_text") for chunk in chunks[:2]] == ["<user>Hi<assistant>", None]


@pytest.mark.parametrize(
    ("wishes", "param"),
    [
        ({"prompt_embeds": "AA=="}, "prompt_embeds"),
        ({"watermarking": True, "prompt": "x"}, "watermarking"),
        ({"stream_interval": 0, "prompt": "x"}, "stream_interval"),
        ({"truncation_side": "middle", "prompt": "x"}, "truncation_side"),
        ({"messages": MESSAGES, "echo": True}, "echo"),
        ({"messages": MESSAGES, "thinking_token_budget": 5}, "thinking_token_budget"),
        ({"prompt": "x", "thinking_token_budget": 5}, "thinking_token_budget"),
        ({"prompt": "x", "repetition_detection": {"max_pattern_size": 3}}, "repetition_detection.min_count"),
        ({"prompt": "x", "repetition_detection": {"max_size": 3}}, "repetition_detection"),
        ({"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ({}, "prompt"),
    ],
)
async def test_a_field_that_cannot_be_served_is_refused_by_name(front, wishes, param):
    answer = await front.http.post(f"/v1/{'chat/' if 'messages' in wishes else ''}completions", json=wishes)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


async def test_embeddings_of_a_prompt_are_refused_in_words(front):
    refused = await front.http.post("/v1/completions", json={"prompt_embeds": "AA=="})
    assert "a prompt is text or token ids" in refused.json()["error"]["message"]


async def test_fields_without_effect_bring_no_warning(front):
    harmless = {"spaces_between_special_tokens": True, "watermarking": False, "stream_interval": 2}
    await complete(front, **harmless)
    chat = await front.http.post(
        "/v1/chat/completions", json={"messages": MESSAGES, "add_special_tokens": False, "echo": False} | harmless
    )
    assert chat.status_code == 200 and "x-mooncake-warning" not in chat.headers


@pytest.mark.parametrize("salt", ["kH3+/9=", "tenant:7", "a" * 128])
async def test_a_salt_may_be_base64(front, salt):
    await complete(front, cache_salt=salt)
    assert front.script.asked[-1].salt == salt
