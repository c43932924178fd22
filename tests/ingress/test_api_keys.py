"""API keys over HTTP and gRPC: what is open, what needs a key, and that keys are never revealed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import grpc
import openai
import pytest

from conductor.ingress.access import OPEN_PATHS
from mooncake.api_keys import API_KEY_ENV, ApiKeys
from mooncake.client import Client
from mooncake.config import ConductorSection, Config, load_config, masked
from mooncake.errors import ConfigError, Overloaded, Unauthenticated
from mooncake.rpc import inference_pb2 as pb
from mooncake.rpc import inference_pb2_grpc

KEYS = ("sk-first-3b7e", "sk-second-91ac")
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


@pytest.fixture(autouse=True)
def no_key_of_the_environment(monkeypatch):
    monkeypatch.delenv(API_KEY_ENV, raising=False)


async def test_every_path_but_the_open_ones_needs_one_of_the_keys(open_front):
    async with open_front(api_keys=KEYS) as front:
        for path in OPEN_PATHS:
            assert (await front.http.get(path)).status_code == 200
        for method, path in (
            ("GET", "/v1/models"),
            ("GET", "/v1/models/bytes"),
            ("GET", "/status.json"),
            ("GET", "/no-such-path"),
            ("POST", "/v1/completions"),
            ("POST", "/tokenize"),
        ):
            refused = await front.http.request(method, path, json={})
            assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer", path
            assert refused.headers["x-request-id"]
        for key in KEYS:
            headers = {"authorization": f"Bearer {key}"}
            assert (await front.http.get("/v1/models", headers=headers)).status_code == 200
            assert (await front.http.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer  x",
        KEYS[0],
        f"Basic {KEYS[0]}",
        f"Bearer {KEYS[0]}x",
        f"Bearer {KEYS[0][:-1]}",
        "Bearer é",
    ],
)
async def test_what_is_not_a_key_is_refused_in_openais_words_and_not_repeated(open_front, header):
    async with open_front(api_keys=KEYS) as front:
        refused = await front.http.get("/v1/models", headers={"authorization": header.encode()})
        assert refused.status_code == 401
        error = refused.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)
        assert "sk-" not in refused.text


async def test_without_keys_nobody_is_asked(front_without_keys):
    assert (await front_without_keys.http.get("/v1/models")).status_code == 200
    with_any = await front_without_keys.http.get("/v1/models", headers={"authorization": "Bearer whatever"})
    assert with_any.status_code == 200


@pytest.fixture
async def front_without_keys(open_front):
    async with open_front() as front:
        yield front


async def test_openais_client_gets_its_own_exception(open_front):
    async with open_front(api_keys=KEYS) as front:
        for key, right in ((KEYS[1], True), ("sk-other", False)):
            async with openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key=key, max_retries=0) as client:
                if right:
                    assert (await client.models.list()).data[0].id == "bytes"
                    continue
                with pytest.raises(openai.AuthenticationError):
                    await client.models.list()


async def test_grpc_wants_the_same_keys_and_leaves_health_open(open_front):
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with open_front(api_keys=KEYS) as front, grpc.aio.insecure_channel(front.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = pb.GenerateRequest(text="x")
        for metadata in ((), (("authorization", "Bearer no"),)):
            with pytest.raises(grpc.aio.AioRpcError) as one:
                await stub.Tokenize(pb.TokenizeRequest(text="x"), metadata=metadata)
            with pytest.raises(grpc.aio.AioRpcError) as many:
                [_ async for _ in stub.Generate(request, metadata=metadata)]
            for caught in (one.value, many.value):
                assert caught.code() is grpc.StatusCode.UNAUTHENTICATED
                assert "sk-" not in str(caught.details())
        right = (("authorization", f"Bearer {KEYS[1]}"),)
        assert (await stub.Tokenize(pb.TokenizeRequest(text="x"), metadata=right)).ids == [ord("x")]
        assert [response.text async for response in stub.Generate(request, metadata=right)]
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING


async def test_our_client_shows_the_key_that_it_was_given_or_that_its_environment_has(open_front, monkeypatch):
    import asyncio

    def ask(**options):
        with Client(front.grpc_address, **options) as client:
            return client.generate("x").text

    async with open_front(api_keys=KEYS) as front:
        with pytest.raises(Unauthenticated, match="API key"):
            await asyncio.to_thread(ask)
        assert await asyncio.to_thread(ask, api_key=KEYS[0])
        monkeypatch.setenv(API_KEY_ENV, KEYS[1])
        assert await asyncio.to_thread(ask)


def test_the_environment_gives_a_key_where_the_configuration_has_none(monkeypatch):
    monkeypatch.setenv(API_KEY_ENV, "sk-env")
    assert load_config().conductor.api_keys == ("sk-env",)
    assert load_config(None, ['conductor.api_keys=["a", "b"]']).conductor.api_keys == ("a", "b")


@pytest.mark.parametrize("keys", ['[""]', '["a b"]', '["é"]', '["a", "line\\nbreak"]', "sk-bare", "[5]", '[["sk-1"]]'])
def test_a_key_that_no_header_can_carry_is_refused_without_saying_it(keys):
    with pytest.raises(ConfigError, match=r"conductor\.api_keys") as caught:
        load_config(None, [f"conductor.api_keys={keys}"])
    assert "sk-" not in caught.value.message


def test_no_text_made_of_a_configuration_has_a_secret(tmp_path: Path):
    secret = Config(conductor=ConductorSection(api_keys=KEYS))
    texts = [repr(secret), str(secret), f"{secret.conductor}", repr(masked(secret)), repr(ApiKeys(KEYS))]
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["api_keys=sk-first-3b7e"])
    texts.append(caught.value.message)
    file = tmp_path / "c.toml"
    file.write_text(f'[conductor]\napi_keys = {json.dumps(KEYS)}\n[directory]\nredis = "redis://me:sk-@x@host:1/0"\n')
    mooncake = str(Path(sys.executable).parent / "mooncake")
    for flags in ([], ["--json"], ["--origin"], ["--origin", "--json"]):
        shown = subprocess.run(
            [mooncake, "config", "show", "--config", str(file), *flags], capture_output=True, text=True, check=True
        )
        assert "(hidden)" in shown.stdout and "host:1/0" in shown.stdout
        texts += [shown.stdout, shown.stderr]
    assert not [text for text in texts if "sk-" in text]


async def test_scripts_of_web_pages_call_where_their_origin_is_allowed(open_front):
    asks = {"origin": "https://page", "access-control-request-method": "POST"}
    asks |= {"access-control-request-headers": "authorization,content-type"}
    async with open_front(api_keys=KEYS, allowed_origins=("https://page",)) as front:
        before = await front.http.options("/v1/chat/completions", headers=asks)
        assert before.status_code == 200 and before.headers["access-control-allow-origin"] == "https://page"
        assert "authorization" in before.headers["access-control-allow-headers"].lower()
        headers = {"origin": "https://page", "authorization": f"Bearer {KEYS[0]}"}
        answer = await front.http.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://page")
        refused = await front.http.post("/v1/chat/completions", json=CHAT, headers={"origin": "https://page"})
        assert refused.status_code == 401 and "access-control-allow-origin" in refused.headers  # the page can tell why
        front.script.refusal = Overloaded("full", 2.5)
        busy = await front.http.post("/v1/chat/completions", json=CHAT, headers=headers)
        read_by_clients = {"retry-after", "retry-after-ms", "x-should-retry", "x-request-id"}
        assert busy.status_code == 429
        assert read_by_clients <= set(busy.headers["access-control-expose-headers"].split(", "))
        other = await front.http.get("/health", headers={"origin": "https://other"})
        assert "access-control-allow-origin" not in other.headers


async def test_without_allowed_origins_no_page_is_told_anything(front_without_keys):
    answer = await front_without_keys.http.get("/health", headers={"origin": "https://page"})
    assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers
