"""``mooncake.AsyncLLM`` as a user of vLLM's meets it: real model, real thread, the test's event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from tiny_lora import write_adapter
from tiny_model import write_tiny_model

from mooncake import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    EngineArgs,
    LoRARequest,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from mooncake.errors import ContextTooLong, InvalidRequest, ModelError, NodeUnavailable
from mooncake.types import FinishReason

pytestmark = pytest.mark.asyncio(loop_scope="module")

ARGS = AsyncEngineArgs(model="smollm2", kv_gb=0.2, threads=1)
PROMPTS = ["Hello, my name is", "The capital of France is", "1, 2, 3, 4,", "Once upon a time"]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
LONG = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[AsyncLLM]:
    threads = torch.get_num_threads()
    engine = AsyncLLM.from_engine_args(ARGS)
    try:
        yield engine
        assert await blocks_in_use(engine) == 0
    finally:
        engine.shutdown()
        torch.set_num_threads(threads)


async def blocks_in_use(engine: AsyncLLM) -> int:
    def count(inner: Any) -> int:
        inner.block_pool.check()
        return int(inner.block_pool.num_in_use)

    return await asyncio.wrap_future(engine._thread.call(count))


async def last(engine: AsyncLLM, prompt: Any, sampling: SamplingParams, name: str, **more: Any) -> RequestOutput:
    output = None
    async for output in engine.generate(prompt, sampling, name, **more):
        assert output.request_id == name
    assert output is not None and output.finished
    return output


async def test_requests_at_once_get_the_tokens_that_llm_gives_them(engine: AsyncLLM) -> None:
    several = SamplingParams(temperature=0.8, seed=7, n=2, max_tokens=8)
    stopped = SamplingParams(temperature=0, max_tokens=30, stop=[" I"], logprobs=2, prompt_logprobs=1)
    kept = SamplingParams(temperature=0.9, seed=3, n=1, best_of=3, max_tokens=6)
    asked = [(prompt, sampling) for prompt in PROMPTS for sampling in (GREEDY, several, stopped, kept)]
    with LLM(model="smollm2", kv_gb=0.2, threads=1) as llm:
        wanted = llm.generate([prompt for prompt, _ in asked], [sampling for _, sampling in asked])
    found = await asyncio.gather(*(last(engine, *each, f"r{number}") for number, each in enumerate(asked)))
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine.prompt, mine.prompt_token_ids, mine.outputs) == (
            theirs.prompt,
            theirs.prompt_token_ids,
            theirs.outputs,
        )
        assert mine.prompt_logprobs == theirs.prompt_logprobs


async def test_results_grow_or_have_what_is_new_or_come_at_the_end(engine: AsyncLLM) -> None:
    asked = {"temperature": 0, "max_tokens": 12, "logprobs": 0}
    whole, parts, counts = [], [], []
    async for output in engine.generate(PROMPTS[0], SamplingParams(**asked), "cumulative"):
        whole.append(output.outputs[0])
        counts.append(len(output.token_ids))
        assert len(output.outputs[0].logprobs or ()) == counts[-1]
        assert output.finished == (output.finish_reason is not None) == (counts[-1] == 12)
    assert counts == sorted(set(counts)) and len(counts) > 1
    delta = SamplingParams(**asked, output_kind=RequestOutputKind.DELTA)
    async for output in engine.generate(PROMPTS[0], delta, "delta"):
        parts.append(output.outputs[0])
        assert len(output.outputs[0].logprobs or ()) == len(output.token_ids) > 0
    assert "".join(part.text for part in parts) == whole[-1].text and len(parts) > 1
    assert [each for part in parts for each in part.token_ids] == whole[-1].token_ids
    assert parts[-1].cumulative_logprob == whole[-1].cumulative_logprob
    final = SamplingParams(**asked, output_kind=RequestOutputKind.FINAL_ONLY)
    assert [output.outputs[0] async for output in engine.generate(PROMPTS[0], final, "final")] == [whole[-1]]


async def test_who_stops_reading_frees_the_blocks(engine: AsyncLLM) -> None:
    async with aclosing(engine.generate(PROMPTS[0], LONG, "closed")) as outputs:
        await anext(outputs)
        assert await blocks_in_use(engine) > 0
    assert await blocks_in_use(engine) == 0

    began = asyncio.Event()

    async def read() -> None:
        async for _ in engine.generate(PROMPTS[1], LONG, "cancelled"):
            began.set()

    task = asyncio.create_task(read())
    await began.wait()
    other = asyncio.create_task(last(engine, PROMPTS[2], GREEDY, "other"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await other).finish_reason is FinishReason.LENGTH
    assert await blocks_in_use(engine) == 0
    assert (await last(engine, PROMPTS[1], GREEDY, "cancelled")).finished  # the name is free again


async def test_an_aborted_request_tells_what_there_is(engine: AsyncLLM) -> None:
    texts: list[str] = []
    async for output in engine.generate(PROMPTS[3], LONG, "aborted"):
        texts.append(output.text)
        if len(texts) == 2:
            await engine.abort(["aborted", "unknown"])
            assert await blocks_in_use(engine) == 0
            await engine.abort("aborted")
    assert output.finish_reason is FinishReason.ABORT and output.finished
    assert output.text.startswith(texts[0]) and len(output.token_ids) >= 2
    assert output.metrics is not None and output.metrics.finished_time is not None

    unread = engine.generate(PROMPTS[0], LONG, "early")
    first = asyncio.ensure_future(anext(unread))
    await asyncio.sleep(0)  # it has its name, and no place in the engine yet
    await engine.abort("early")
    assert (await first).finish_reason is FinishReason.ABORT
    await unread.aclose()


async def test_a_cache_salt_separates_prompts(engine: AsyncLLM) -> None:
    ids = engine.get_tokenizer().encode("A rolling stone gathers no moss. " * 20)
    for salt, cached in (("anna", 0), ("ben", 0), ("anna", len(ids) - 1)):
        output = await last(engine, {"prompt_token_ids": ids, "cache_salt": salt}, GREEDY, "salted")
        assert output.num_cached_tokens == cached


async def test_an_error_in_one_leaves_the_others_alone(engine: AsyncLLM) -> None:
    impossible = StructuredOutputsParams(regex="(")
    wrong: list[tuple[Any, SamplingParams, type[Exception]]] = [
        ("", GREEDY, InvalidRequest),
        ([1 << 30], GREEDY, InvalidRequest),
        ([1] * 9000, GREEDY, ContextTooLong),
        ("a", SamplingParams(logit_bias={1 << 20: 1.0}), InvalidRequest),
        ("a", SamplingParams(structured_outputs=impossible), InvalidRequest),
        (PROMPTS, GREEDY, InvalidRequest),
    ]
    good = [asyncio.create_task(last(engine, prompt, GREEDY, prompt)) for prompt in PROMPTS]
    for number, (prompt, sampling, error) in enumerate(wrong):
        with pytest.raises(error):
            await last(engine, prompt, sampling, f"wrong-{number}")
    assert all(output.finish_reason is FinishReason.LENGTH for output in await asyncio.gather(*good))
    async with aclosing(engine.generate("a", LONG, "twice")) as outputs:
        await anext(outputs)
        with pytest.raises(InvalidRequest, match="'twice' is being answered already"):
            await last(engine, "b", GREEDY, "twice")
        assert (await anext(outputs)).text
    with pytest.raises(TypeError, match="generate takes no data_parallel_rank: there is nothing to choose"):
        engine.generate("a", GREEDY, "x", data_parallel_rank=1)  # type: ignore[call-arg]
    await engine.check_health()
    assert engine.is_running and not engine.errored


async def test_a_chat_is_rendered_by_the_tokenizer(engine: AsyncLLM) -> None:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt: Any = engine.get_tokenizer().apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    output = await last(engine, prompt, GREEDY, "chat")
    assert "Paris" in output.text and output.prompt == prompt
    with pytest.warns(UserWarning, match="which is plain text in it") as warned:
        await last(engine, str(prompt)[:20], GREEDY, "plain")
    assert warned[0].filename == __file__


async def test_adapters_are_loaded_while_others_are_answered(tmp_path: Path) -> None:
    write_adapter(tmp_path / "lora", write_tiny_model(tmp_path / "model"))
    engine = AsyncLLM(EngineArgs(model=str(tmp_path / "model"), kv_gb=0.02, threads=1))
    lora = LoRARequest("lora", 1, str(tmp_path / "lora"))
    try:
        async with aclosing(engine.generate([5, 6, 7], LONG, "base")) as outputs:
            await anext(outputs)
            adapted, again, base = await asyncio.gather(
                last(engine, [5, 6, 7], GREEDY, "a", lora_request=lora),
                last(engine, [5, 6, 7], GREEDY, "b", lora_request=lora),
                last(engine, [5, 6, 7], GREEDY, "c"),
            )
        assert adapted.token_ids == again.token_ids != base.token_ids
        with pytest.raises(ModelError, match="cannot read"):
            await last(engine, [5], GREEDY, "d", lora_request=LoRARequest("other", 2, str(tmp_path)))
    finally:
        engine.shutdown()


async def test_steps_go_on_while_an_adapter_is_read(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", max_position_embeddings=8192)
    write_adapter(tmp_path / "lora", model, rank=8192)  # of 30 MB
    engine = AsyncLLM(EngineArgs(model=str(tmp_path / "model"), kv_gb=0.02, threads=1))
    try:
        async with aclosing(engine.generate([5, 6, 7], dataclasses.replace(LONG, max_tokens=8000), "base")) as outputs:
            await anext(outputs)
            before = engine._thread.num_done
            lora = LoRARequest("lora", 1, str(tmp_path / "lora"))
            await last(engine, [5], SamplingParams(max_tokens=1), "adapted", lora_request=lora)
            assert not (await anext(outputs)).finished
            assert engine._thread.num_done - before > 20, "it was a handful: the step with the adapter, and calls"
    finally:
        engine.shutdown()


async def test_a_shutdown_ends_what_is_under_way(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    engine = AsyncLLM(EngineArgs(model=str(tmp_path), kv_gb=0.02, threads=1))
    outputs = engine.generate([5, 6, 7], LONG, "long")
    await anext(outputs)
    engine.shutdown()
    with pytest.raises(NodeUnavailable, match="the engine is stopping"):
        async for _ in outputs:
            pass
    with pytest.raises(InvalidRequest, match="is shut down"):
        await last(engine, [5], GREEDY, "late")
    assert not engine.is_running
    engine.shutdown()


async def test_the_settings_are_those_of_llm() -> None:
    of_llm = list(inspect.signature(LLM).parameters.values())
    fields = dataclasses.fields(EngineArgs)
    assert [(each.name, each.default) for each in of_llm] == [(each.name, each.default) for each in fields]
    with pytest.raises(TypeError, match="EngineArgs takes no max_num_seqs: it is max_sequences here"):
        AsyncEngineArgs(max_num_seqs=4)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"AsyncLLM takes no model: give an AsyncEngineArgs\(…\)"):
        AsyncLLM(model="smollm2")  # type: ignore[call-arg]
    with pytest.raises(InvalidRequest, match="engine_args must be an AsyncEngineArgs"):
        AsyncLLM("smollm2")  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="encode: embed gives embeddings"):
        AsyncLLM.__getattr__(object.__new__(AsyncLLM), "encode")  # type: ignore[attr-defined]
