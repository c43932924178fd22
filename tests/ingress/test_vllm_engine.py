"""The gRPC door for gateways, ``vllm.grpc.engine.VllmEngine``, through the client that its own package has."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import logging
import sys
import zipfile

import grpc
import numpy as np
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mooncake.errors import HandoffFailed, Overloaded
from mooncake.rpc import inference_pb2, inference_pb2_grpc
from mooncake.sampling import Guide, GuideKind, SamplingParams
from mooncake.sampling_defaults import SamplingDefaults
from tests.ingress.conftest import states_of

pytest.importorskip("smg_grpc_proto", reason="the extra `gateway` is not installed")

from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

pytestmark = pytest.mark.asyncio(loop_scope="module")
SERVICE = "vllm.grpc.engine.VllmEngine"
HELLO = list("Hello, wörld!".encode())
END = 256


@pytest_asyncio.fixture(loop_scope="module")
async def engine(front):
    async with grpc.aio.insecure_channel(front.grpc_address) as channel:
        yield VllmEngineStub(channel)


def ask(prompt="ab", stream=False, request_id="", **sampling):
    tokens = pb.TokenizedInput(input_ids=prompt.encode(), original_text=prompt)
    params = pb.SamplingParams(**sampling)
    return pb.GenerateRequest(request_id=request_id, tokenized=tokens, sampling_params=params, stream=stream)


async def whole(engine, request):
    """The answers to a request that wants no stream."""
    return [response.complete async for response in engine.Generate(request)]


async def refusal(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call if not hasattr(call, "read") else call.read())
    return caught.value.code(), caught.value.details()


async def test_an_answer_is_one_message_with_all_its_tokens(front, engine):
    front.script.cached_tokens = 1
    [answer] = await whole(engine, ask(request_id="chatcmpl-1", max_tokens=50))

    assert list(answer.output_ids) == [*HELLO, END]
    assert (answer.finish_reason, answer.WhichOneof("matched_stop"), answer.index) == ("stop", None, 0)
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (2, len(HELLO) + 1, 1)
    assert not answer.HasField("output_logprobs") and not answer.HasField("input_logprobs")
    [asked] = front.script.asked
    assert (asked.request_id, asked.tokens.tolist()) == ("chatcmpl-1", [97, 98])


async def test_a_stream_has_its_tokens_as_they_come_and_ends_with_the_whole(engine):
    *chunks, last = [response async for response in engine.Generate(ask(stream=True, max_tokens=5, logprobs=1))]
    assert not last.complete.HasField("output_logprobs"), "a long answer's would not fit into a message"

    assert [list(each.chunk.token_ids) for each in chunks] == [[token_id] for token_id in HELLO[:5]]
    assert [each.chunk.completion_tokens for each in chunks] == [1, 2, 3, 4, 5]
    assert {each.chunk.prompt_tokens for each in chunks} == {2}
    assert [list(each.chunk.output_logprobs.token_logprobs) for each in chunks] == [[-0.5]] * 5
    assert (list(last.complete.output_ids), last.complete.finish_reason) == (HELLO[:5], "length")


async def test_a_text_is_tokenized_here(front, engine):
    await whole(engine, pb.GenerateRequest(text="hé", sampling_params={"max_tokens": 1}))
    assert front.prompt == "hé"


async def test_several_answers_and_log_probabilities(engine):
    request = ask("abc", n=2, max_tokens=2, logprobs=2, prompt_logprobs=1)
    answers = await whole(engine, request)

    assert [answer.index for answer in answers] == [0, 1]
    for answer in answers:
        output, prompt = answer.output_logprobs, answer.input_logprobs
        assert (list(output.token_ids), list(output.token_logprobs)) == (HELLO[:2], [-0.5, -0.5])
        assert [list(top.token_ids) for top in output.top_logprobs] == [[97, 98]] * 2
        assert list(output.top_logprobs[0].values) == [-1.0, -2.0]
        assert list(prompt.token_ids) == [97, 98, 99]
        assert not prompt.token_logprobs[0].HasField("value"), "nothing comes before the first token"
        assert [score.value for score in prompt.token_logprobs[1:]] == [-0.25, -0.5]
        assert [list(top.token_ids) for top in prompt.top_logprobs] == [[], [97], [97]]
    request.stream = True
    chunks = [each.chunk async for each in engine.Generate(request) if each.HasField("chunk")]
    scored = [chunk for chunk in chunks if chunk.HasField("input_logprobs")]
    assert [(chunk.index, len(chunk.input_logprobs.token_ids)) for chunk in scored] == [(1, 3), (0, 3)]


async def test_answers_come_in_their_order_whichever_ends_first(front, engine):
    front.script.last_first = True
    assert [answer.index for answer in await whole(engine, ask(n=3))] == [0, 1, 2]
    ends = [each.complete.index async for each in engine.Generate(ask(stream=True, n=3)) if each.HasField("complete")]
    assert ends == [2, 1, 0], "a stream waits for none"


async def test_every_parameter_of_sampling_arrives(front, engine):
    request = ask(
        temperature=0.5,
        top_p=0.75,
        top_k=7,
        min_p=0.25,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.5,
        max_tokens=9,
        min_tokens=2,
        stop=["zz"],
        stop_token_ids=[3],
        ignore_eos=True,
        n=2,
        logprobs=0,
        prompt_logprobs=0,
        seed=11,
        logit_bias={5: 1.5, 4: -2.0},
    )
    await whole(engine, request)

    assert front.script.asked[0].sampling == SamplingParams(
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_p=0.75,
        top_k=7,
        min_p=0.25,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias=((4, -2.0), (5, 1.5)),
        seed=11,
        stop_token_ids=(3,),
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=0,
        n=2,
    )


async def test_what_is_left_out_is_off_since_the_gateway_knows_the_model_s_defaults(open_front):
    defaults = SamplingDefaults(temperature=0.25, top_k=20, top_p=0.5, min_p=0.125, max_tokens=7)
    async with open_front(defaults=defaults) as front, grpc.aio.insecure_channel(front.grpc_address) as channel:
        engine = VllmEngineStub(channel)
        info = await engine.GetModelInfo(pb.GetModelInfoRequest())
        await whole(engine, ask())

    told = {"temperature": 0.25, "top_k": 20, "top_p": 0.5, "min_p": 0.125, "max_tokens": 7}
    assert json.loads(info.default_sampling_params_json) == told
    sampling = front.script.asked[0].sampling
    assert (sampling.top_k, sampling.top_p, sampling.min_p, sampling.n) == (0, 1.0, 0.0, 1)
    assert (sampling.temperature, sampling.max_tokens) == (0.25, 7), "of these, none can be told from nothing"


async def test_an_answer_without_a_length_may_fill_the_context(front, engine):
    await whole(engine, ask("x" * 4000))
    assert front.script.asked[0].sampling.max_tokens == 96


@pytest.mark.parametrize(
    ("constraint", "guide"),
    [
        ({"json_schema": '{"type": "object"}'}, Guide(GuideKind.JSON_SCHEMA, '{"type": "object"}')),
        ({"json_object": True}, Guide(GuideKind.JSON_OBJECT)),
        ({"json_object": False}, None),
        ({"regex": "[0-9]+"}, Guide(GuideKind.REGEX, "[0-9]+")),
        ({"grammar": 'start: "a"'}, Guide(GuideKind.GRAMMAR, 'start: "a"')),
        ({"choice": {"choices": ["yes", "no"]}}, Guide(GuideKind.CHOICE, '["yes","no"]')),
    ],
)
@pytest.mark.parametrize("from_first_token", [False, True])
async def test_a_constraint_is_a_guide_from_the_first_token(front, engine, constraint, guide, from_first_token):
    info = await engine.GetServerInfo(pb.GetServerInfoRequest())
    await whole(engine, ask(grammar_from_first_token=from_first_token, **constraint))
    assert front.script.asked[0].sampling.guide == guide
    assert info.constrained_decoding_start == "first_token"


async def test_a_prompt_is_cut_to_its_last_tokens(front, engine):
    await whole(engine, ask("abcdef", truncate_prompt_tokens=2, max_tokens=1))
    await whole(engine, ask("x" * 5000, truncate_prompt_tokens=-1, max_tokens=96))
    assert [front.prompts[0], len(front.prompts[1])] == ["ef", 4000]


@pytest.mark.parametrize(
    ("sampling", "matched"),
    [
        ({"stop": ["lo"]}, {"matched_stop_str": "lo"}),
        ({"stop_token_ids": [ord("o")]}, {"matched_token_id": ord("o")}),
    ],
)
async def test_a_stop_is_told_and_its_tokens_stay(front, engine, sampling, matched):
    front.script.ends = False
    [answer] = await whole(engine, ask(max_tokens=500, **sampling))
    assert (list(answer.output_ids), answer.finish_reason) == (HELLO[:5], "stop")
    assert {answer.WhichOneof("matched_stop"): getattr(answer, answer.WhichOneof("matched_stop"))} == matched


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sampling_params": {"structural_tag": "{}"}}, "take no structural_tag: a grammar"),
        ({"sampling_params": {"regex": "("}}, "regex"),
        ({"sampling_params": {"regex": "a", "ignore_eos": True}}, "excludes ignore_eos"),
        ({"sampling_params": {"logprobs": -1}}, "logprobs must be between 0 and 20, got -1"),
        ({"sampling_params": {"prompt_logprobs": 21}}, "prompt_logprobs must be between 0 and 20"),
        ({"sampling_params": {"temperature": -1}}, "temperature must be between"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens must be between 1"),
        ({"sampling_params": {"max_tokens": 4095}}, "a prompt of 2 leaves 4094"),
        ({"sampling_params": {"stop_token_ids": [999]}}, "token ids must be between 0 and 256"),
        ({"sampling_params": {"truncate_prompt_tokens": 0}}, "truncate_prompt_tokens must be -1 or between"),
        ({"tokenized": {"input_ids": [257]}}, "token ids must be between 0 and 256"),
        ({"tokenized": {}}, "the prompt is empty"),
        ({"request_id": "a b"}, "request_id takes"),
        ({"mm_inputs": {}}, "mm_inputs is not taken: models take and generate text"),
        ({"extra_mm_inputs": [{}]}, "extra_mm_inputs is not taken"),
        ({"media_refs": {"items": [{"url": "http://x"}]}}, "media_refs is not taken"),
        ({"kv_transfer_params": {}}, "kv_transfer_params is not taken: prefill and decode nodes"),
        ({"kv_transfer_params_json": '{"do_remote_decode": true}'}, "kv_transfer_params_json is not taken"),
        ({"data_parallel_rank": 1}, "data_parallel_rank is not taken"),
    ],
)
async def test_what_cannot_be_done_is_refused_in_words(front, engine, changes, words):
    request = ask()
    for name in changes:
        request.ClearField(name)
    request.MergeFrom(pb.GenerateRequest(**changes))
    code, details = await refusal(engine.Generate(request))

    assert (code, front.script.asked) == (grpc.StatusCode.INVALID_ARGUMENT, [])
    assert words in details


async def test_an_aborted_request_ends_with_what_there_is(front, engine):
    front.script.ends, front.script.delay_s = False, 60.0
    call = engine.Generate(ask(request_id="mine", stream=True, max_tokens=500, n=2))
    first = [(await call.read()).chunk for _ in range(2)]
    await engine.Abort(pb.AbortRequest(request_ids=["another"]))
    await engine.Abort(pb.AbortRequest(request_ids=["mine", "mine"]))
    ends = [(await call.read()).complete for _ in range(2)]
    assert await call.read() is grpc.aio.EOF

    assert [chunk.index for chunk in first] == [end.index for end in ends] == [0, 1]
    assert [(list(end.output_ids), end.finish_reason) for end in ends] == [(HELLO[:1], "abort")] * 2
    await front.script.until_closed()
    front.script.forget()
    [again] = await whole(engine, ask(request_id="mine"))
    assert again.finish_reason == "stop"


async def test_a_request_that_waits_for_its_first_token_is_aborted_too(front, engine):
    front.script.first_delay_s = 60
    reading = asyncio.create_task(whole(engine, ask(request_id="mine")))
    await front.script.until(lambda: front.script.running)
    await engine.Abort(pb.AbortRequest(request_ids=["mine"]))
    [end] = await reading
    assert (list(end.output_ids), end.finish_reason) == ([], "abort")
    await front.script.until_closed()


async def test_only_requests_that_came_this_way_are_aborted(front, engine):
    front.script.first_delay_s = 60
    async with grpc.aio.insecure_channel(front.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(inference_pb2.GenerateRequest(text="x", request_id="theirs"))
        await front.script.until(lambda: front.script.running)
        await engine.Abort(pb.AbortRequest(request_ids=["theirs"]))
        code, _ = await refusal(engine.Generate(ask(request_id="theirs")))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and front.script.running == {"theirs"}
        call.cancel()
        await front.script.until_closed()


async def test_a_gateway_that_hangs_up_cancels(front, engine):
    front.script.ends, front.script.delay_s = False, 0.01
    call = engine.Generate(ask(stream=True, max_tokens=4000))
    await call.read()
    call.cancel()
    await front.script.until_closed()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Overloaded("full", 2.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (HandoffFailed("lost"), grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_errors_of_the_core_have_their_status(front, engine, error, code):
    front.script.error = error
    assert await refusal(engine.Generate(ask())) == (code, error.message)


async def test_a_request_that_has_no_room_is_refused_before_it_is_looked_at(front, engine):
    front.script.refusal = Overloaded("full", 2.5)
    assert (await refusal(engine.Generate(ask(""))))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_the_deadline_of_the_gateway_counts(front, engine):
    front.script.first_delay_s = 60
    assert (await refusal(engine.Generate(ask(), timeout=0.2)))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    await front.script.until_closed()


async def test_it_is_healthy_when_requests_can_be_served(front, engine):
    assert (await engine.HealthCheck(pb.HealthCheckRequest())).healthy
    front.status.waiting_for.append("decode")
    health = await engine.HealthCheck(pb.HealthCheckRequest())
    assert (health.healthy, health.message) == (False, "waiting for decode")


async def test_it_is_not_healthy_while_it_stops(open_front):
    async with open_front() as front, grpc.aio.insecure_channel(front.grpc_address) as channel:
        await front.ingress.drain(0.0)
        health = await VllmEngineStub(channel).HealthCheck(pb.HealthCheckRequest())
    assert (health.healthy, health.message) == (False, "stopping")


async def test_the_model_and_the_server_describe_themselves(front, engine):
    model = await engine.GetModelInfo(pb.GetModelInfoRequest())
    server = await engine.GetServerInfo(pb.GetServerInfoRequest())

    assert (model.served_model_name, model.model_type, model.is_generation) == ("bytes", "bytes", True)
    assert (model.max_context_length, model.max_req_input_len, model.vocab_size) == (4096, 4095, 257)
    assert (list(model.eos_token_ids), model.default_sampling_params_json) == ([END], "{}")
    assert (server.active_requests, server.data_parallel_size, server.block_size) == (0, 1, 64)
    assert (server.kv_connector, server.max_num_seqs) == ("", 256)
    assert server.uptime_seconds > 0


async def test_the_load_is_that_of_all_engines(front, engine):
    front.status.block_queries, front.status.block_hits = 8, 2
    [load] = (await engine.GetLoads(pb.GetLoadsRequest())).loads
    nobody = await engine.GetLoads(pb.GetLoadsRequest(dp_rank=1))
    front.status.nodes[0].load.blocks_total = 1 << 30
    [huge] = (await engine.GetLoads(pb.GetLoadsRequest())).loads
    assert huge.max_total_num_tokens == (1 << 31) - 1

    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (2, 0, 2)
    assert (load.num_used_tokens, load.max_total_num_tokens) == (4 * 64, 20 * 64)
    assert (load.token_usage, load.cache_hit_rate, load.max_running_requests) == (0.2, 0.25, 256)
    assert not nobody.loads


async def test_the_tokenizer_comes_as_an_archive_with_its_digest(front, engine):
    async def fetched():
        chunks = [chunk async for chunk in engine.GetTokenizer(common_pb2.GetTokenizerRequest())]
        data = b"".join(chunk.data for chunk in chunks)
        assert [chunk.sha256 for chunk in chunks] == [*[""] * (len(chunks) - 1), hashlib.sha256(data).hexdigest()]
        return data

    first = await fetched()
    assert await fetched() == first
    assert front.tokenizer.num_exported == 1, "it does not change"
    with zipfile.ZipFile(io.BytesIO(first)) as archive:
        assert {name: archive.read(name).decode() for name in archive.namelist()} == front.tokenizer.exported()


async def test_token_ids_are_embedded(front, engine):
    request = pb.EmbedRequest(request_id="e1", tokenized=pb.TokenizedInput(input_ids=[5, 6]))
    answer = await engine.Embed(request)
    assert (answer.prompt_tokens, answer.embedding_dim) == (2, 8)
    states = states_of(front.script.asked[-1].tokens)
    assert list(answer.embedding) == pytest.approx((states / np.linalg.norm(states)).tolist())


@pytest.mark.parametrize(
    ("method", "request_", "words"),
    [
        ("FlushCache", common_pb2.FlushCacheRequest(), "it is never stale"),
        ("StartProfile", common_pb2.StartProfileRequest(), "GET /metrics"),
        ("StopProfile", common_pb2.StopProfileRequest(), "GET /metrics"),
        ("SubscribeKvEvents", common_pb2.SubscribeKvEventsRequest(), "routes by them itself"),
    ],
)
async def test_what_is_not_here_says_so(engine, method, request_, words):
    code, details = await refusal(getattr(engine, method)(request_))
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert words in details


async def test_it_needs_the_api_key(open_front):
    async with open_front(api_keys=("sk-a",)) as front, grpc.aio.insecure_channel(front.grpc_address) as channel:
        engine = VllmEngineStub(channel)
        assert (await refusal(engine.Generate(ask())))[0] is grpc.StatusCode.UNAUTHENTICATED
        assert (await refusal(engine.HealthCheck(pb.HealthCheckRequest())))[0] is grpc.StatusCode.UNAUTHENTICATED
        key = (("authorization", "Bearer sk-a"),)
        assert (await engine.HealthCheck(pb.HealthCheckRequest(), metadata=key)).healthy


async def services_of(front):
    async with grpc.aio.insecure_channel(front.grpc_address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        status = await health.Check(health_pb2.HealthCheckRequest(service="mooncake.v1.Inference"))
        try:
            await health.Check(health_pb2.HealthCheckRequest(service=SERVICE))
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.NOT_FOUND
            return status.status, False
        return status.status, True


async def test_without_its_package_everything_else_is_served(open_front, monkeypatch, caplog):
    serving = health_pb2.HealthCheckResponse.SERVING
    caplog.set_level(logging.INFO)
    async with open_front() as front:
        assert await services_of(front) == (serving, True)
    assert f"gateways may use this conductor as an engine: {SERVICE}" in caplog.text

    caplog.clear()
    with monkeypatch.context() as absent:
        absent.setitem(sys.modules, "smg_grpc_proto", None)
        async with open_front() as front:
            assert await services_of(front) == (serving, False)
    assert "gateways" not in caplog.text

    from conductor.ingress import apis

    monkeypatch.delattr(apis, "vllm_engine")
    monkeypatch.setitem(sys.modules, "conductor.ingress.apis.vllm_engine", None)  # as if its import failed
    async with open_front() as front:
        assert await services_of(front) == (serving, False)
    assert "smg-grpc-proto does not work here" in caplog.text
