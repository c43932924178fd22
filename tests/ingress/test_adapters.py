"""Adapters at ingress: names are resolved, and the token of a prompt from which an adapter acts is found."""

from __future__ import annotations

import json

import pytest

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
