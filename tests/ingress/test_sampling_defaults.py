"""Sampling defaults of a model's generation_config.json in every API: they override the API's defaults, and requests
override them."""

from __future__ import annotations

import grpc
import pytest
import pytest_asyncio

from mooncake.errors import ConfigError
from mooncake.rpc import common_pb2, inference_pb2_grpc
from mooncake.rpc import inference_pb2 as pb
from mooncake.sampling_defaults import NEUTRAL, SamplingDefaults

pytestmark = pytest.mark.asyncio(loop_scope="module")

OF_MODEL = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, min_p=0.05, repetition_penalty=1.1, max_tokens=7)
NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
SAID = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}  # what the API would say
HI = [{"role": "user", "content": "Hi"}]


@pytest_asyncio.fixture(loop_scope="module")
async def front(open_front):
    async with open_front(defaults=OF_MODEL) as front:
        yield front


def values(sampling) -> dict[str, float]:
    return {name: getattr(sampling, name) for name in NAMES}


async def test_an_openai_client_that_names_nothing_gets_the_model_s(front, client):
    await client.completions.create(model="bytes", prompt="x")
    await client.chat.completions.create(model="bytes", messages=HI)
    response = await client.responses.create(model="bytes", input="Hi")

    text, chat, other = (asked.sampling for asked in front.script.asked)
    assert values(text) == values(chat) == values(other) == values(OF_MODEL)
    assert (text.max_tokens, chat.max_tokens, other.max_tokens) == (16, 7, 7)  # 16 is the API's own, as in vLLM
    assert (response.temperature, response.top_p) == (0.6, 0.95)


async def test_what_an_openai_client_names_counts(front, client):
    extra = {name: SAID[name] for name in ("top_k", "min_p", "repetition_penalty")}
    await client.completions.create(model="bytes", prompt="x", temperature=0, top_p=1, extra_body=extra)
    await client.chat.completions.create(
        model="bytes", messages=HI, temperature=0, top_p=1, max_completion_tokens=50, extra_body=extra
    )
    await client.chat.completions.create(model="bytes", messages=HI, temperature=0.3)

    text, chat, some = (asked.sampling for asked in front.script.asked)
    assert values(text) == values(chat) == SAID and chat.max_tokens == 50
    assert values(some) == values(OF_MODEL) | {"temperature": 0.3}


async def test_beams_draw_nothing_and_take_no_defaults(front, client):
    beams = {"use_beam_search": True}
    await client.completions.create(model="bytes", prompt="x", n=2, extra_body=beams)
    async with grpc.aio.insecure_channel(front.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        sampling = common_pb2.SamplingParams(n=2, beam_search=common_pb2.BeamSearch(length_penalty=1.0))
        _ = [message async for message in stub.Generate(pb.GenerateRequest(text="x", sampling=sampling))]

    assert [values(asked.sampling) for asked in front.script.asked] == [values(NEUTRAL), values(NEUTRAL)]


async def test_on_the_wire_of_grpc_unset_is_the_model_s_and_zero_is_zero(front):
    async with grpc.aio.insecure_channel(front.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="Hi")])
        for request in (
            pb.GenerateRequest(text="x"),
            pb.GenerateRequest(chat=chat),
            pb.GenerateRequest(chat=chat, sampling=common_pb2.SamplingParams(max_tokens=50, **SAID)),
        ):
            _ = [message async for message in stub.Generate(request)]

    text, chat, named = (asked.sampling for asked in front.script.asked)
    assert values(text) == values(chat) == values(OF_MODEL)
    assert (text.max_tokens, chat.max_tokens, named.max_tokens) == (16, 7, 50)
    assert values(named) == SAID


async def test_a_default_length_is_cut_to_what_fits(open_front):
    async with open_front(defaults=SamplingDefaults(max_tokens=4000)) as front:
        long = [{"role": "user", "content": "x" * 1000}]
        answer = await front.http.post("/v1/chat/completions", json={"messages": long})
        assert answer.status_code == 200
        assert front.script.asked[0].sampling.max_tokens == 4096 - len(front.script.asked[0].tokens)


async def test_the_operator_s_defaults_count_before_the_model_s_and_after_the_request_s(open_front):
    overrides = '{"temperature": 0.2, "top_k": -1, "max_new_tokens": 9}'
    async with open_front(defaults=OF_MODEL, overrides=overrides) as front:
        await front.http.post("/v1/chat/completions", json={"messages": HI})
        await front.http.post("/v1/chat/completions", json={"messages": HI, "temperature": 0.7})
        asked, named = (request.sampling for request in front.script.asked)
    assert values(asked) == values(OF_MODEL) | {"temperature": 0.2, "top_k": 0} and asked.max_tokens == 9
    assert named.temperature == 0.7


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ('{"heat": 1}', "model.generation_overrides knows temperature, .*, not heat"),
        ('{"top_p": 2}', "model.generation_overrides: top_p must be between 0 and 1, got 2$"),
    ],
)
async def test_defaults_that_no_request_could_have_stop_the_start(open_front, overrides, sentence):
    with pytest.raises(ConfigError, match=sentence):
        async with open_front(overrides=overrides):
            pass


async def test_the_template_s_variables_have_defaults_in_every_api(open_front):
    async with open_front(variables='{"enable_thinking": false, "tone": "dry"}') as front:
        await front.http.post("/v1/chat/completions", json={"messages": HI})
        more = {"messages": HI, "chat_template_kwargs": {"tone": "warm"}, "reasoning_effort": "low"}
        await front.http.post("/v1/chat/completions", json=more)
        await front.http.post("/v1/messages", json={"messages": HI, "max_tokens": 5})
        async with grpc.aio.insecure_channel(front.grpc_address) as channel:
            chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="Hi")])
            stub = inference_pb2_grpc.InferenceStub(channel)
            async for _ in stub.Generate(pb.GenerateRequest(chat=chat)):
                pass
        prompts = front.prompts
    assert prompts[0] == prompts[2] == prompts[3] == "[enable_thinking=False][tone=dry]<user>Hi<assistant>"
    assert "[enable_thinking=True]" in prompts[1] and "[tone=warm]" in prompts[1]
