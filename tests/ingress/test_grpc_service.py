"""The gRPC door: the service as any client finds it by reflection, its health, its errors, and our own client."""

from __future__ import annotations

import asyncio

import grpc
import pytest
import pytest_asyncio
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from mooncake.app.talk import TalkOptions, generate
from mooncake.client import Client
from mooncake.errors import (
    ContextTooLong,
    DeadlineExceeded,
    HandoffFailed,
    InvalidRequest,
    NodeUnavailable,
    NotFound,
    Overloaded,
)
from mooncake.rpc import inference_pb2 as pb
from mooncake.rpc import inference_pb2_grpc
from mooncake.sampling_params import SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def stub(front):
    async with grpc.aio.insecure_channel(front.grpc_address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def say(front, **wishes):
    """What our blocking client gets, asked from a thread of its own."""

    def ask():
        with Client(front.grpc_address) as client:
            return client.generate(**wishes)

    return asyncio.to_thread(ask)


async def test_a_client_that_knows_nothing_finds_and_calls_the_service_by_reflection(front):
    def ask():
        with grpc.insecure_channel(front.grpc_address) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            services = set(database.get_services())
            pool = descriptor_pool.DescriptorPool(database)
            method = pool.FindServiceByName("mooncake.v1.Inference").methods_by_name["Generate"]
            request = message_factory.GetMessageClass(method.input_type)()
            request.chat.messages.add(role="user", content="Hello")
            response_class = message_factory.GetMessageClass(method.output_type)
            call = channel.unary_stream(
                "/mooncake.v1.Inference/Generate",
                request_serializer=type(request).SerializeToString,
                response_deserializer=response_class.FromString,
            )
            return services, list(call(request))

    services, responses = await asyncio.to_thread(ask)

    assert {"mooncake.v1.Inference", "grpc.health.v1.Health"} <= services
    assert "".join(response.text for response in responses) == "Hello, wörld!"
    assert responses[-1].finish_reason == "stop"


async def test_health_is_the_standard_one(front):
    async with grpc.aio.insecure_channel(front.grpc_address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service="mooncake.v1.Inference"))

    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_an_answer_has_tokens_text_usage_and_timings(front):
    front.script.cached_tokens = 1

    answer = await say(front, prompt="ab", sampling=SamplingParams(max_tokens=5, logprobs=1, seed=9))

    assert (answer.text, answer.finish_reason) == ("Hello", "length")
    assert answer.token_ids == list(b"Hello")
    assert [token.index for token in answer.tokens] == [0, 1, 2, 3, 4]
    assert answer.tokens[0].logprob.logprob == pytest.approx(-0.5)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.cached_tokens) == (2, 5, 1)
    assert answer.timings.total_ms >= answer.timings.ttft_ms > 0
    assert answer.timings.tail_tbt_ms >= answer.timings.mean_tbt_ms > 0
    assert answer.timings.prefill.timings.prefill_ms == 3
    assert (answer.timings.prefill_node, answer.timings.decode_node) == ("prefill-0", "decode-0")
    assert front.script.asked[0].sampling.seed == 9


async def test_the_texts_of_sampling_go_with_it(front):
    sampling = SamplingParams(max_tokens=None, stop=["wör"], include_stop_str_in_output=True, bad_words=["z"])
    answer = await say(front, prompt="ab", sampling=sampling, stop="never")
    assert (answer.text, answer.finish_reason) == ("Hello, wör", "stop")
    [asked] = front.script.asked
    assert (asked.sampling.max_tokens, asked.sampling.bad_words) == (16, ((ord("z"),), (ord(" "), ord("z"))))
    short = await say(front, prompt="ab", sampling=SamplingParams(stop="lo"), stop="He")
    assert short.text == ""


@pytest.mark.parametrize("best_of", [0, 3])
async def test_the_prompt_s_log_probabilities_come_with_every_answer(front, best_of):
    sampling = SamplingParams(max_tokens=2, prompt_logprobs=1, n=2, best_of=best_of)
    answer = await say(front, prompt="abc", sampling=sampling)
    plain = await say(front, prompt="abc")

    for each in (answer, *answer.others):
        assert [(token.token_id, token.logprob.logprob) for token in each.prompt_logprobs] == [(98, -0.25), (99, -0.5)]
        assert each.prompt_logprobs[0].logprob.top == ((97, -1.0),)
    assert len(answer.others) == 1 and plain.prompt_logprobs is None


async def test_the_prompt_s_log_probabilities_have_a_bound_over_all_answers(front, stub):
    wishes = {"n": 20, "prompt_logprobs": 20, "max_tokens": 1}
    with pytest.raises(grpc.aio.AioRpcError, match="told for each choice and with alternatives, are 1260000"):
        await stub.Generate(pb.GenerateRequest(text="x" * 3000, sampling=wishes)).read()
    assert not front.script.asked


async def test_the_client_says_what_comes_first_and_which_model_answers(front):
    await say(front, prompt="ab", priority=-7, model="bytes", session="s-1")

    [asked] = front.script.asked
    assert (asked.priority, asked.session) == (-7, "s-1")
    with pytest.raises(NotFound, match="'other' is not served here"):
        await say(front, prompt="ab", model="other")


async def test_a_client_that_names_no_seed_gets_one_of_its_own(front):
    for sampling in (None, SamplingParams(), SamplingParams(), SamplingParams(seed=7), SamplingParams(seed=7)):
        await say(front, prompt="x", sampling=sampling)

    *drawn, first, again = [asked.sampling.seed for asked in front.script.asked]
    assert len({0, *drawn}) == 4
    assert first == again == 7


async def test_a_person_reads_an_error_after_streamed_text_on_a_line_of_its_own(front, capsys):
    front.script.error, front.script.error_after = HandoffFailed("lost"), 5
    options = TalkOptions(front.grpc_address, SamplingParams(max_tokens=9))

    with pytest.raises(HandoffFailed):
        await asyncio.to_thread(generate, "x", options, raw=True, as_json=False)

    assert capsys.readouterr().out == "Hello\n"


@pytest.mark.parametrize("raw", [False, True])
async def test_a_person_asks_for_tokens_at_most(front, raw, capsys):
    front.script.ends = False
    options = TalkOptions(front.grpc_address, SamplingParams(max_tokens=512))

    await asyncio.to_thread(generate, "x" * 4000, options, raw=raw, as_json=False)

    [asked] = front.script.asked
    assert len(asked.tokens) + asked.sampling.max_tokens == 4096 and capsys.readouterr().out.endswith("\n")
    with pytest.raises(ContextTooLong, match="prompt is too long"):
        await asyncio.to_thread(generate, "x" * 5000, options, raw=raw, as_json=False)


async def test_the_client_streams_and_closing_it_cancels(front):
    front.script.ends, front.script.delay_s = False, 0.01

    def ask():
        with Client(front.grpc_address) as client:
            chunks = client.stream(token_ids=[97], sampling=SamplingParams(max_tokens=1000))
            first = next(chunks)
            chunks.close()
            return first

    first = await asyncio.to_thread(ask)

    assert first.text == "H"
    await front.script.until_closed()


async def test_the_other_calls_of_the_client(front):
    def ask():
        with Client(front.grpc_address) as client:
            tokens = client.tokenize("hé", model="bytes")
            chat = client.tokenize(messages=[{"role": "user", "content": "x"}])
            return tokens, bytes(chat), client.detokenize([*tokens, 256]), client.models()[0]

    tokens, chat, text, model = await asyncio.to_thread(ask)

    assert (tokens, chat, text) == ([104, 195, 169], b"<user>x<assistant>", "hé<end>")
    assert (model.id, model.max_model_len, model.vocab_size, model.block_tokens) == ("bytes", 4096, 257, 64)


async def test_defaults_of_length_are_those_of_the_kind_of_prompt(front):
    front.script.ends = False

    text = await say(front, prompt="ab")
    ids = await say(front, token_ids=[1, 2])
    chat = await say(front, messages=[{"role": "user", "content": "x" * 4000}])

    assert [answer.usage.completion_tokens for answer in (text, ids)] == [16, 16]
    assert chat.usage.prompt_tokens + chat.usage.completion_tokens == 4096


async def test_more_tokens_than_the_context_leaves_are_refused_in_the_words_of_http(front):
    message = {"role": "user", "content": "x" * 3960}
    with pytest.raises(ContextTooLong) as caught:
        await say(front, messages=[message], sampling=SamplingParams(max_tokens=120))
    answer = await front.http.post("/v1/chat/completions", json={"messages": [message], "max_tokens": 120})

    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == caught.value.message
    context = "this model's maximum context length is 4096 tokens"
    assert caught.value.message == f"max_tokens is 120: {context}, and a prompt of 3977 leaves 119"
    await say(front, messages=[message], sampling=SamplingParams(max_tokens=119))
    assert front.script.asked[-1].sampling.max_tokens == 119


@pytest.mark.parametrize("stop", [["lo"], "lo"])
async def test_stop_strings_cut_here_too(front, stop):
    front.script.ends = False

    answer = await say(front, prompt="x", sampling=SamplingParams(max_tokens=500), stop=stop)

    assert (answer.text, answer.finish_reason) == ("Hel", "stop")
    await front.script.until_closed()


@pytest.mark.parametrize(
    ("wishes", "error", "param"),
    [
        ({"prompt": ""}, InvalidRequest, "text"),
        ({"token_ids": []}, InvalidRequest, "token_ids"),
        ({"token_ids": [257]}, InvalidRequest, "token_ids"),
        ({"messages": []}, InvalidRequest, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, InvalidRequest, "messages[0].role"),
        ({"prompt": "x" * 4096}, ContextTooLong, "text"),
        ({"prompt": "x" * 4000, "sampling": SamplingParams(max_tokens=97)}, ContextTooLong, "max_tokens"),
        ({"prompt": "x", "stop": [""]}, InvalidRequest, "stop"),
        ({"prompt": "x", "cache_salt": "a b"}, InvalidRequest, "cache_salt"),
        ({"prompt": "x", "request_id": "a b"}, InvalidRequest, "request_id"),
        ({"prompt": "x", "sampling": SamplingParams(stop_token_ids=(300,))}, InvalidRequest, "stop_token_ids"),
    ],
)
async def test_a_wrong_value_is_named(front, wishes, error, param):
    with pytest.raises(error) as caught:
        await say(front, **wishes)

    assert type(caught.value) is error
    assert caught.value.param == param
    assert front.script.asked == []


@pytest.mark.parametrize("error", [Overloaded("full", 2.5), NodeUnavailable("gone"), HandoffFailed("lost")])
async def test_errors_of_the_core_arrive_as_they_left(front, error):
    front.script.error = error

    with pytest.raises(type(error), match=error.message) as caught:
        await say(front, prompt="x")

    assert getattr(caught.value, "retry_after_s", None) == getattr(error, "retry_after_s", None)


async def test_a_request_that_has_no_room_is_refused_before_it_is_tokenized(front):
    front.script.refusal = Overloaded("full", 2.5)
    with pytest.raises(Overloaded, match="full") as caught:
        await say(front, prompt="")  # an empty prompt would be refused for another reason
    assert caught.value.retry_after_s == 2.5


async def test_a_model_that_is_not_served_is_not_found(stub):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Tokenize(pb.TokenizeRequest(model="other", text="x"))

    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_request_without_a_prompt_is_refused(stub):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.Generate(pb.GenerateRequest()):
            pass

    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_deadline_of_the_caller_counts(front):
    front.script.first_delay_s = 60

    with pytest.raises(DeadlineExceeded):
        await say(front, prompt="x", timeout_s=0.2)

    await front.script.until_closed()


async def test_without_a_deadline_the_server_has_one(open_front):
    async with open_front(request_timeout_s=0.1) as front:
        front.script.first_delay_s = 60

        with pytest.raises(DeadlineExceeded):
            await say(front, prompt="x")

        await front.script.until_closed()


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 60.0])
async def test_cancelling_a_call_closes_the_generator_within_a_second(front, stub, delay_s):
    front.script.ends, front.script.delay_s = False, delay_s
    call = stub.Generate(pb.GenerateRequest(text="x", sampling={"max_tokens": 4000}))
    await call.read()

    call.cancel()

    await front.script.until_closed()


async def test_an_id_that_runs_already_is_refused(front, stub):
    front.script.first_delay_s = 60
    first = stub.Generate(pb.GenerateRequest(text="x", request_id="mine"))
    reading = asyncio.create_task(first.read())
    await front.script.until(lambda: front.script.running)

    with pytest.raises(InvalidRequest, match="running already"):
        await say(front, prompt="x", request_id="mine")

    first.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await front.script.until_closed()


async def test_nobody_there_is_said_as_such():
    def ask():
        with Client("127.0.0.1:1") as client:
            client.models()

    with pytest.raises(NodeUnavailable):
        await asyncio.to_thread(ask)


async def test_a_call_whose_answer_is_not_read_ends_at_its_deadline(open_front):
    async with open_front(request_timeout_s=0.5) as front:
        front.script.text, front.script.ends = "x" * 1000, False
        small_window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]
        async with grpc.aio.insecure_channel(front.grpc_address, options=small_window) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            call = stub.Generate(pb.GenerateRequest(text="x", sampling={"max_tokens": 4000, "logprobs": 20}))

            await front.script.until_closed(within_s=5)

            call.cancel()
