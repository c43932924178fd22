"""Adapters at ingress: names are resolved, the token of a prompt from which an adapter acts is found, and adapters are
loaded and unloaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mooncake.adapters import Adapter
from mooncake.errors import InvalidRequest, NotFound

CHECK = tuple(b"<check>")  # tokens are bytes here


def write_folder(path, **config):
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 8} | config))
    (path / "adapter_model.safetensors").write_bytes(path.name.encode())  # nobody computes with it


@pytest.fixture
async def front(tmp_path, open_front):
    write_folder(tmp_path / "plain")
    write_folder(tmp_path / "activated", alora_invocation_tokens=CHECK)
    adapters = tuple(f"{name}={tmp_path / name}" for name in ("plain", "activated"))
    async with open_front(adapters=adapters) as front:
        yield front


async def test_an_adapter_begins_where_a_prompt_invokes_it_last(front):
    async def asked(model, prompt, **more):
        path, body = ("chat/completions", {"messages": prompt}) if isinstance(prompt, list) else ("completions", {})
        answer = await front.http.post(
            f"/v1/{path}", json={"model": model, "prompt": prompt, "max_tokens": 4} | body | more
        )
        assert answer.status_code == 200, answer.text
        request = front.script.asked[-1]
        return request.adapter, request.adapter_start

    text = "text <check> more <check> end"
    plain, start = await asked("plain", text)
    assert plain and start == 0
    activated, start = await asked("activated", text)
    assert activated not in ("", plain) and start == text.rindex("<check>")
    assert await asked("activated", text + "<check>") == (activated, len(text))
    assert await asked("activated", "<check> this") == (activated, 0)
    assert await asked("activated", "nothing <check") == ("", 0), "not invoked: the model answers alone"
    assert await asked("bytes", text) == ("", 0)
    assert await asked("activated", text, truncate_prompt_tokens=10) == ("", 0), "what was cut off invokes nothing"
    turns = [{"role": "user", "content": "hi <check>"}]
    assert await asked("activated", turns) == (activated, len("<user>hi "))


async def test_anthropic_s_clients_page_through_the_models(front):
    anthropic = pytest.importorskip("anthropic")
    async with anthropic.AsyncAnthropic(base_url=front.url, api_key="none", max_retries=0) as client:
        pages = [page async for page in (await client.models.list(limit=1)).iter_pages()]
        before = await client.models.list(before_id="activated", limit=1)
        for wrong in ({"limit": 0}, {"limit": "x"}, {"after_id": "other"}):
            with pytest.raises(anthropic.BadRequestError):
                await client.models.list(**wrong)

    assert [[model.id for model in page.data] for page in pages] == [["bytes"], ["plain"], ["activated"]]
    assert ([model.id for model in before.data], before.has_more) == (["plain"], True)


class Loading:
    """``conductor.api.AdapterLoading`` without nodes."""

    def __init__(self):
        self.served = {}
        self.asked = []
        self.error = None

    async def load(self, name, path, in_place=False):
        self.asked.append((name, path, in_place))
        if self.error is not None:
            raise self.error
        self.served[name] = Adapter(name, Path(path), f"digest of {name}", 8.0, False)

    def unload(self, name):
        if self.served.pop(name, None) is None:
            raise NotFound(f"the adapter {name!r} cannot be found")


async def test_adapters_are_loaded_and_unloaded_by_vllms_routes(open_front):
    loading = Loading()
    async with open_front(max_loaded_adapters=2, loading=loading, api_keys=("secret",)) as front:
        key = {"authorization": "Bearer secret"}

        async def post(path, headers=key, **body):
            return await front.http.post(path, json=body, headers=headers)

        fields = {"lora_name": "mine", "lora_path": "/adapters/mine"}
        assert (await post("/v1/load_lora_adapter", headers={}, **fields)).status_code == 401
        assert not loading.asked
        done = await post("/v1/load_lora_adapter", **fields, load_inplace=True, lora_pth="x")
        assert done.status_code == 200 and done.headers["content-type"].startswith("text/plain")
        assert "lora_pth" in done.headers["x-mooncake-warning"]
        assert loading.asked == [("mine", "/adapters/mine", True)]
        cards = (await front.http.get("/v1/models", headers=key)).json()["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [("bytes", None), ("mine", "bytes")]
        assert cards[1]["root"] == "/adapters/mine"
        answer = await post("/v1/completions", model="mine", prompt="text", max_tokens=4)
        assert answer.status_code == 200 and front.script.asked[-1].adapter == "digest of mine"
        loading.error = InvalidRequest("decode node d0: no room", "lora_path")
        refused = await post("/v1/load_lora_adapter", **fields)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "lora_path"
        assert (await post("/v1/load_lora_adapter", lora_name=3)).status_code == 400
        assert (await post("/v1/unload_lora_adapter", headers={}, lora_name="mine")).status_code == 401
        assert (await post("/v1/unload_lora_adapter", lora_name="mine", lora_int_id=1)).status_code == 200
        assert (await post("/v1/unload_lora_adapter", lora_name="mine")).status_code == 404
        assert (await post("/v1/completions", model="mine", prompt="text")).status_code == 404


async def test_they_are_not_unless_the_configuration_allows_it(open_front):
    loading = Loading()
    async with open_front(loading=loading) as front:
        refused = await front.http.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/a"})
        assert refused.status_code == 404 and not loading.asked
        assert "conductor.max_loaded_adapters" in refused.json()["error"]["message"]


async def test_all_of_a_request_gets_the_weights_that_its_name_means_when_it_is_computed(open_front, monkeypatch):
    """Conversations of a batch are tokenized one after the other, and meanwhile an adapter is replaced: nodes have
    dropped the weights that the first one would have been given."""
    loading = Loading()
    async with open_front(max_loaded_adapters=1, loading=loading) as front:
        await loading.load("mine", "/old")
        encode_chat = front.tokenizer.encode_chat

        def encode_and_replace(messages, *more):
            if messages[0].content == "two":
                loading.served["mine"] = Adapter("mine", Path("/new"), "digest of new", 8.0, False)
            return encode_chat(messages, *more)

        monkeypatch.setattr(front.tokenizer, "encode_chat", encode_and_replace)
        turns = [[{"role": "user", "content": text}] for text in ("one", "two")]
        body = {"model": "mine", "messages": turns, "max_tokens": 4}
        answer = await front.http.post("/v1/chat/completions/batch", json=body)
        assert answer.status_code == 200, answer.text
        assert [asked.adapter for asked in front.script.asked] == ["digest of new"] * 2
