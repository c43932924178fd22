"""The conductor as it is started: one process, real ports, the demo model's tokenizer, and no torch."""

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import grpc
import httpx
import pytest
from certificates import make_certificate
from tiny_lora import write_adapter
from tiny_model import write_tiny_model

from conductor.model_facts import model_facts
from conductor.node import ConductorNode
from mooncake.app.cluster.directory import open_directory
from mooncake.checkpoint import open_checkpoint
from mooncake.config import load_config
from mooncake.errors import ConfigError
from mooncake.membership import Membership
from mooncake.rpc import cluster_pb2, inference_pb2
from mooncake.rpc.cluster_pb2_grpc import ClusterStub
from mooncake.rpc.inference_pb2_grpc import InferenceStub
from mooncake.text.chat_template import ChatMessage


async def test_it_starts_says_what_it_waits_for_and_stops() -> None:
    overrides = ["conductor.grpc_port=0", "conductor.http_port=0", "conductor.node_wait_s=0"]
    node = ConductorNode(load_config(overrides=overrides), open_directory)
    await node.start()
    try:
        async with grpc.aio.insecure_channel(node.control_address) as channel:
            status = await ClusterStub(channel).Status(cluster_pb2.StatusRequest(), timeout=5)
            assert (status.ready, list(status.waiting_for)) == (False, ["prefill", "decode"])
            ids = await InferenceStub(channel).Tokenize(inference_pb2.TokenizeRequest(text="Hello"), timeout=5)
            assert list(ids.ids)
            call = InferenceStub(channel).Generate(inference_pb2.GenerateRequest(text="Hello"), timeout=5)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert node.http_port
    finally:
        await node.stop()


async def test_every_api_renders_the_template_of_the_configuration(tmp_path: Path) -> None:
    own = "{% for m in messages %}<|im_start|>{{ m.role }}> {{ m.content }}{% endfor %}"
    (tmp_path / "own.jinja").write_text(own)
    ports = ["conductor.grpc_port=0", "conductor.http_port=0"]
    node = ConductorNode(load_config(overrides=[*ports, f"model.chat_template={tmp_path}/own.jinja"]), open_directory)
    await node.start()
    try:
        tokenizer = open_checkpoint("smollm2").load_tokenizer(own)
        wanted = tokenizer.encode_chat([ChatMessage("user", "Hi <|im_start|>")]).tolist()
        chat = {"messages": [{"role": "user", "content": "Hi <|im_start|>"}]}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{node.http_port}", trust_env=False) as http:
            assert (await http.post("/tokenize", json=chat)).json()["tokens"] == wanted
            count = await http.post("/v1/messages/count_tokens", json=chat | {"model": "SmolLM2-135M-Instruct"})
            assert count.json()["input_tokens"] == len(wanted)
            assert (await http.get("/tokenizer_info")).json()["chat_template"] == own
        async with grpc.aio.insecure_channel(node.control_address) as channel:
            said = inference_pb2.ChatMessage(role="user", content="Hi <|im_start|>")
            request = inference_pb2.TokenizeRequest(chat=inference_pb2.ChatMessages(messages=[said]))
            assert list((await InferenceStub(channel).Tokenize(request, timeout=5)).ids) == wanted
    finally:
        await node.stop()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")
async def test_nodes_join_over_tls_whatever_the_certificate_s_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, key = make_certificate(tmp_path, "conductor", names="DNS:llm.example")
    other, _ = make_certificate(tmp_path, "other")
    ports = ["conductor.grpc_port=0", "conductor.http_port=0"]
    behind = [f"conductor.ssl_certfile={certificate}", f"conductor.ssl_keyfile={key}"]
    node = ConductorNode(load_config(overrides=[*ports, *behind]), open_directory)
    await node.start()

    def member(*overrides: str) -> Membership:
        info = cluster_pb2.NodeInfo(node_id="p", role="prefill", control_address="127.0.0.1:9")
        address = f"node.conductor={node.control_address}"
        return Membership(load_config(overrides=[address, *overrides]), info, cluster_pb2.HeartbeatRequest)

    try:
        for overrides, sentence in (
            ((), "it may want TLS"),
            ([f"node.ssl_ca_certs={other}"], "its certificate is not signed by anyone who is trusted here"),
            ([f"node.ssl_ca_certs={certificate}"], "its certificate has another name than the one that was called"),
        ):
            stranger = member(*overrides)
            await stranger.start()
            assert not stranger.is_registered and sentence in caplog.records[-1].message
            await stranger.stop()
        with pytest.raises(ConfigError, match="give every node the same configuration"):  # it was heard
            await member(*behind).start()
    finally:
        await node.stop()


async def test_a_load_of_an_adapter_that_it_does_not_live_to_finish_is_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path / "model/sql", write_tiny_model(tmp_path / "model"))
    overrides = [f"model.path={tmp_path / 'model'}", "conductor.max_loaded_adapters=1"]
    config = load_config(overrides=[*overrides, "conductor.grpc_port=0", "conductor.http_port=0"])
    node = ConductorNode(config, open_directory)
    await node.start()
    facts = model_facts(config, open_checkpoint(config.model.path))
    async with (
        grpc.aio.insecure_channel(node.control_address) as channel,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{node.http_port}", trust_env=False) as http,
    ):
        try:
            for role in ("prefill", "decode"):  # which never say that they have it
                info = cluster_pb2.NodeInfo(
                    node_id=role,
                    role=role,
                    incarnation=1,
                    control_address="127.0.0.1:9",
                    kv_fingerprint=facts.kv_fingerprint,
                    block_tokens=config.block.tokens,
                    max_model_len=facts.max_model_len,
                    settings=facts.settings,
                )
                await ClusterStub(channel).Register(cluster_pb2.RegisterRequest(node=info), timeout=5)
            fields = {"lora_name": "mine", "lora_path": str(tmp_path / "model/sql")}
            loading = asyncio.create_task(http.post("/v1/load_lora_adapter", json=fields, timeout=30))
            async with asyncio.timeout(10):
                while not await wanted(channel):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        finally:
            await node.stop()
        answer = await loading
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the server is shutting down")


async def wanted(channel: grpc.aio.Channel) -> int:
    """How many adapters the conductor has its nodes load."""
    beat = cluster_pb2.HeartbeatRequest(node_id="prefill", incarnation=1)
    return len((await ClusterStub(channel).Heartbeat(beat, timeout=5)).adapters)


async def test_a_taken_port_is_one_sentence() -> None:
    first = ConductorNode(load_config(overrides=["conductor.grpc_port=0", "conductor.http_port=0"]), open_directory)
    await first.start()
    second = ConductorNode(
        load_config(overrides=[f"conductor.grpc_port={first.grpc_port}", "conductor.http_port=0"]), open_directory
    )
    try:
        with pytest.raises(ConfigError, match="cannot listen"):
            await second.start()
    finally:
        await second.stop()
        await first.stop()


def test_it_never_imports_torch() -> None:
    code = "import sys, conductor.node; print(sorted({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "[]"
