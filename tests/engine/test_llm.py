"""``mooncake.LLM`` as a user meets it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from tiny_model import write_tiny_model

from mooncake import LLM, AsyncEngineArgs, SamplingParams
from mooncake.errors import ConfigError, ContextTooLong, InvalidRequest, MooncakeError
from mooncake.in_process.interrupts import HeldInterrupts
from mooncake.text.chat_template import ChatMessage
from mooncake.types import FinishReason

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    threads = torch.get_num_threads()
    with LLM("smollm2", kv_gb=0.2, threads=1) as llm:
        yield llm
        llm.engine.block_pool.check()
        assert llm.engine.block_pool.num_in_use == 0
    torch.set_num_threads(threads)


def test_importing_mooncake_does_not_import_torch() -> None:
    code = "import sys, mooncake; mooncake.SamplingParams; mooncake.AsyncEngineArgs; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


def test_a_prompt_is_answered(llm: LLM) -> None:
    [answer] = llm.generate("The capital of France is", GREEDY)
    assert "Paris" in answer.text
    assert answer.text == llm.tokenizer.decode(answer.token_ids)
    assert answer.finish_reason is FinishReason.LENGTH and len(answer.token_ids) == 12
    assert answer.prompt_tokens == len(llm.tokenizer.encode("The capital of France is"))


def test_many_prompts_are_answered_in_their_order(llm: LLM) -> None:
    prompts = ["The capital of France is", "1, 2, 3, 4,", "Once upon a time"]
    together = llm.generate(prompts, GREEDY)
    assert [answer.text for answer in together] == [llm.generate(prompt, GREEDY)[0].text for prompt in prompts]
    ids = [llm.tokenizer.encode(prompt) for prompt in prompts]
    assert [answer.token_ids for answer in llm.generate(ids, GREEDY)] == [answer.token_ids for answer in together]


def test_a_prompt_with_a_lower_priority_is_computed_first(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, head_dim=16)
    short = SamplingParams(max_tokens=1, temperature=0.0)
    prompt = list(range(100, 300))
    with LLM(str(tmp_path), kv_gb=0.01, threads=1, max_sequences=1) as llm:
        first, second = llm.generate([prompt, prompt], short, priority=[1, 0])
        assert first.cached_tokens == 192 and second.cached_tokens == 0
        assert first.token_ids == second.token_ids
        llm.reset_prefix_cache()
        first, second = llm.generate([prompt, prompt], short)  # else in their order
        assert first.cached_tokens == 0 and second.cached_tokens == 192
        with pytest.raises(InvalidRequest, match="1 priorities were given for 2 prompts"):
            llm.generate([prompt, prompt], short, priority=[1])
        with pytest.raises(InvalidRequest, match="whole number"):
            llm.generate(prompt, short, priority=[0.5])  # type: ignore[list-item]


def test_each_answer_says_what_it_answers(llm: LLM) -> None:
    short = SamplingParams(max_tokens=1, temperature=0.0)
    assert [answer.prompt for answer in llm.generate(["Hello", "Hi"], short)] == ["Hello", "Hi"]
    assert llm.generate([[1, 2, 3]], short)[0].prompt is None
    assert "<|im_start|>user\nHello<|im_end|>" in (
        llm.chat([{"role": "user", "content": "Hello"}], short)[0].prompt or ""
    )


def test_each_prompt_may_have_its_own_sampling(llm: LLM) -> None:
    samplings = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (1, 5)]
    answers = llm.generate(["Hello", "Hello"], samplings)
    assert [len(answer.token_ids) for answer in answers] == [1, 5]
    with pytest.raises(InvalidRequest, match="2 sampling parameters were given for 1 prompts"):
        llm.generate("Hello", samplings)


def test_a_stop_string_ends_the_answer_before_it(llm: LLM) -> None:
    [free] = llm.generate("1, 2, 3, 4,", GREEDY)
    [stopped] = llm.generate("1, 2, 3, 4,", replace(GREEDY, stop=" 6"))
    assert stopped.text == free.text[: free.text.index(" 6")]
    assert stopped.finish_reason is FinishReason.STOP
    assert llm.engine.block_pool.num_in_use == 0


def test_an_answer_says_what_it_stopped_at_and_not_before_it_has_its_least_tokens(llm: LLM) -> None:
    [free] = llm.generate("1, 2, 3, 4,", GREEDY)
    [stopped] = llm.generate("1, 2, 3, 4,", replace(GREEDY, stop=["never", " 6"]))
    assert (free.outputs[0].stop_reason, stopped.outputs[0].stop_reason) == (None, " 6")
    [later] = llm.generate("1, 2, 3, 4,", replace(GREEDY, min_tokens=len(stopped.token_ids), stop=" 6"))
    assert (later.text, later.outputs[0].stop_reason) == (free.text, None) and free.text.count(" 6") == 1
    stop_id = stopped.token_ids[-1]
    [by_id] = llm.generate("1, 2, 3, 4,", replace(GREEDY, stop_token_ids=(stop_id,)))
    assert by_id.outputs[0].stop_reason == stop_id and by_id.token_ids[-1] == stop_id


def test_a_conversation_reuses_its_first_turn(llm: LLM) -> None:
    story = "Tell me about the sea. " * 20
    messages = [{"role": "user", "content": story}]
    [first] = llm.chat(messages, GREEDY)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And the sky?"}]
    [second] = llm.chat(messages, GREEDY)
    assert second.cached_tokens >= first.prompt_tokens // 64 * 64 > 0


def test_a_conversation_has_known_roles_and_its_texts_may_come_in_parts(llm: LLM) -> None:
    parts = [{"type": "text", "text": "Hello."}, {"type": "text", "text": "Who are you?"}]
    [whole] = llm.chat([{"role": "user", "content": "Hello.\nWho are you?"}], GREEDY)
    [answer] = llm.chat([{"role": "user", "content": parts}], GREEDY)
    assert (answer.text, answer.prompt_tokens) == (whole.text, whole.prompt_tokens)
    for message in (ChatMessage("foo", "x"), {"role": "foo", "content": "x"}):
        with pytest.raises(InvalidRequest, match="the role 'foo' is not supported; known: assistant, system, user"):
            llm.chat([message], GREEDY)
    with pytest.raises(InvalidRequest, match="only text parts are supported, this one is 'image_url'"):
        llm.chat([{"role": "user", "content": [{"type": "image_url"}]}])
    for content in (None, 5, ["x"], [{"type": "text"}]):
        with pytest.raises(InvalidRequest, match="needs its content, as text or parts of text"):
            llm.chat([{"role": "user", "content": content}], GREEDY)


def test_a_seed_repeats_an_answer_and_no_seed_does_not(llm: LLM) -> None:
    seeded = SamplingParams(max_tokens=12, temperature=1.0, seed=99)
    first, second = llm.generate(["Once upon a time", "Once upon a time"], seeded)
    assert first.token_ids == second.token_ids
    free = SamplingParams(max_tokens=24, temperature=1.5)
    assert len({tuple(answer.token_ids) for answer in llm.generate(["Once"] * 3, free)}) > 1


def test_logprobs_come_with_each_token(llm: LLM) -> None:
    [answer] = llm.generate("The capital of France is", SamplingParams(max_tokens=3, temperature=0.0, logprobs=2))
    assert answer.logprobs is not None and len(answer.logprobs) == 3
    for token_id, place in zip(answer.token_ids, answer.logprobs, strict=True):
        (first, chosen), (_, other) = place.items()
        assert first == token_id and (chosen.rank, other.rank) == (1, 2) and chosen.logprob > other.logprob
        assert chosen.decoded_token == llm.tokenizer.decode([token_id])
    assert answer.outputs[0].cumulative_logprob == pytest.approx(
        sum(place[token_id].logprob for token_id, place in zip(answer.token_ids, answer.logprobs, strict=True))
    )
    [unscored] = llm.generate("The capital of France is", GREEDY)
    assert (unscored.logprobs, unscored.outputs[0].cumulative_logprob) == (None, None)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("block_tokens", 0),
        ("max_sequences", -1),
        ("chunk_tokens", -2),
        ("max_model_len", -1),
        ("speculative_tokens", -3),
        ("tbt_limit_ms", float("nan")),
        ("kv_gb", float("inf")),
        ("swap_gb", -0.25),
        ("threads", -1),
        ("tensor_parallel_size", 0),
        ("context_parallel_size", 0),
    ],
)
def test_a_number_that_no_engine_can_have_is_told_by_its_name(argument: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{argument} must be at least [01], got {value}"):
        LLM("smollm2", **{argument: value})


@pytest.mark.parametrize("share", [0, 1.5, float("nan")])
def test_a_part_of_a_gpu_is_a_fraction(share: float) -> None:
    with pytest.raises(MooncakeError, match="gpu_memory_utilization"):
        LLM("smollm2", gpu_memory_utilization=share)


def test_settings_left_open_follow_from_the_device() -> None:
    def limits(**settings: Any) -> tuple[int, int]:
        args = AsyncEngineArgs(**settings)
        return args.step_tokens, args.most_sequences

    assert limits() == (1024, 64)
    assert limits(device="cuda:1") == (8192, 256)
    assert limits(device="cuda", chunk_tokens=0, max_sequences=5) == (0, 5)


@pytest.mark.parametrize("argument", ["kv_gb", "threads", "tensor_parallel_size", "max_sequences"])
def test_a_setting_that_is_no_number_is_told_by_its_name(argument: str) -> None:
    with pytest.raises(ConfigError, match=f"{argument} must be a number, got '1'"):
        LLM("smollm2", **{argument: "1"})


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"device": "gpu"}, 'device must be "cpu", "cuda" or "cuda:N", got \'gpu\''),
        ({"kv_gb": 1e8}, "the system does not give 1000000.* GB: lower kv_gb"),
        ({"kv_gb": 1e12}, "the system does not give .* GB: lower kv_gb"),
    ],
)
def test_what_is_not_to_be_had_is_said_in_a_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        LLM("smollm2", **settings)


def test_more_threads_than_there_can_be_are_as_many_as_there_are(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    ask = f"LLM({str(tmp_path)!r}, kv_gb=0.01, threads=100_000).generate([[5, 6, 7]], use_tqdm=False)"
    done = subprocess.run([sys.executable, "-c", f"from mooncake import LLM\n{ask}"], check=False, timeout=60)
    assert done.returncode == 0


def test_prompts_that_are_never_cut_keep_no_limit() -> None:
    with pytest.raises(ConfigError, match="tbt_limit_ms cuts prompts, and chunk_tokens = 0"):
        LLM("smollm2", chunk_tokens=0, tbt_limit_ms=50.0)


def test_what_cannot_be_answered_is_refused_and_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(ContextTooLong):
        llm.generate([[1] * (llm.max_model_len + 1)], GREEDY)
    for prompts, sentence in (
        ([[1_000_000]], "token ids must be between 0 and 49151"),
        ([[-1]], "token ids must be between"),
        ("", "a prompt is empty"),
        ([[]], "a prompt is empty"),
        ([[1.5, 2.0]], "text or token ids"),
        (["Hello", 5], "text or token ids"),
        ({"text": "Hello"}, "a prompt with names"),
        (None, "text or token ids"),
    ):
        with pytest.raises(InvalidRequest, match=sentence):
            llm.generate(prompts, GREEDY)
    for messages in ([], [[]], "Hello", [{"role": "user"}], [{"role": "user", "content": [{"type": "text"}]}]):
        with pytest.raises(InvalidRequest, match="message"):
            llm.chat(messages, GREEDY)
    for sampling in ({"max_tokens": 3}, [GREEDY, "warm"]):
        with pytest.raises(InvalidRequest, match=r"sampling_params are one mooncake\.SamplingParams, or one for each"):
            llm.generate(["Hello", "Hi"], sampling)  # type: ignore[arg-type]
    assert not llm.engine.has_work
    assert llm.generate([], GREEDY) == []


def test_several_answers_to_one_prompt_are_those_of_their_own_seeds(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=8, temperature=1.0, seed=11, n=3)
    [together] = llm.generate("Once upon a time", sampling)
    assert [answer.index for answer in together.outputs] == [0, 1, 2]
    for number, answer in enumerate(together.outputs):
        [alone] = llm.generate("Once upon a time", replace(sampling, n=1, seed=11 + number))
        assert answer.token_ids == alone.token_ids and answer.text == alone.text


def test_best_of_keeps_the_likeliest_answers(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=8, temperature=1.2, seed=3, n=5, logprobs=0)
    [five] = llm.generate("Once upon a time", sampling)
    [best] = llm.generate("Once upon a time", replace(sampling, n=2, best_of=5))
    ranked = sorted(five.outputs, key=lambda answer: answer.cumulative_logprob / len(answer.token_ids), reverse=True)
    assert [answer.token_ids for answer in best.outputs] == [answer.token_ids for answer in ranked[:2]]


def test_a_stop_string_ends_one_answer_of_several(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=24, temperature=1.0, seed=5, n=4)
    [free] = llm.generate("1, 2, 3, 4,", sampling)
    [stopped] = llm.generate("1, 2, 3, 4,", replace(sampling, stop=" 6"))
    assert [answer.text for answer in stopped.outputs] == [answer.text.partition(" 6")[0] for answer in free.outputs]


def test_without_sampling_a_model_s_own_is_used(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"temperature": 0.0, "max_new_tokens": 5}))
    with LLM(str(tmp_path), kv_gb=0.01) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, max_tokens=5)
        for ask in (llm.generate, lambda text: llm.chat([{"role": "user", "content": text}])):
            [first], [again] = ask("the quick"), ask("the quick")
            assert first.token_ids == again.token_ids and len(first.token_ids) <= 5
    with LLM(str(tmp_path), kv_gb=0.01, generation_config="none") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
    with pytest.raises(InvalidRequest, match="auto, none"):
        LLM(str(tmp_path), generation_config="mine")


# What scripts for vLLM write


def test_prompts_may_have_vllms_names_and_results_tell_their_tokens(llm: LLM) -> None:
    [plain] = llm.generate("The capital of France is", sampling_params=GREEDY)
    named = llm.generate(
        [
            {"prompt": "The capital of France is"},
            {"prompt_token_ids": plain.prompt_token_ids},
            {"prompt_token_ids": plain.prompt_token_ids, "prompt": None},
        ],
        sampling_params=GREEDY,
    )
    assert [each.token_ids for each in named] == [plain.token_ids] * 3
    assert llm.generate({"prompt": "The capital of France is"}, GREEDY)[0].token_ids == plain.token_ids
    assert plain.prompt_token_ids == llm.tokenizer.encode("The capital of France is").tolist()
    for wrong in ({}, {"text": "x"}, {"prompt": "x", "multi_modal_data": {}}):
        with pytest.raises(InvalidRequest, match="a prompt with names"):
            llm.generate(wrong, GREEDY)
    with pytest.raises(InvalidRequest, match=r"without multi_modal_data; models take text alone$"):
        llm.generate({"prompt": "x", "multi_modal_data": {}}, GREEDY)


def test_the_text_may_hold_its_stop_string_and_control_tokens(llm: LLM) -> None:
    [free] = llm.generate("The capital of France is", GREEDY)
    assert "Paris" in free.text
    [cut] = llm.generate("The capital of France is", replace(GREEDY, stop="Paris", include_stop_str_in_output=True))
    assert cut.text == free.text[: free.text.index("Paris") + len("Paris")]

    asked = [{"role": "user", "content": "Say hello."}]
    long = SamplingParams(max_tokens=80, temperature=0.0)
    [chat] = llm.chat(asked, long)
    assert chat.finish_reason is FinishReason.STOP
    [whole] = llm.chat(asked, replace(long, include_stop_str_in_output=True, skip_special_tokens=False))
    assert whole.text == f"{chat.text}<|im_end|>"


def test_a_forgotten_prefix_is_computed_again(llm: LLM) -> None:
    prompt = [7] * 200
    short = SamplingParams(max_tokens=1, temperature=0.0)
    llm.generate([prompt], short)
    assert llm.generate([prompt], short)[0].cached_tokens > 0
    llm.reset_prefix_cache()
    assert llm.generate([prompt], short)[0].cached_tokens == 0


def test_the_last_message_is_continued(llm: LLM) -> None:
    turns = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "The answer is"}]
    [begun] = llm.chat(turns, GREEDY, continue_final_message=True)
    assert begun.prompt is not None and begun.prompt.endswith("<|im_start|>assistant\nThe answer is")
    [closed] = llm.chat(turns, GREEDY, add_generation_prompt=False)
    assert closed.prompt is not None and closed.prompt.endswith("The answer is<|im_end|>\n")


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def test_the_template_gets_tools_calls_and_variables(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% if tools %}tools={{ tools[0].function.name }} {% endif %}{% if mood %}mood={{ mood }} {% endif %}"
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for call in m.tool_calls or [] %}[{{ call.function.name }}{{ call.function.arguments.city }}]{% endfor %}"
        "{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %} {% endfor %}"
    )
    function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    turns = [
        {"role": "user", "content": "rain?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": "yes"},
    ]
    with LLM(str(tmp_path), kv_gb=0.01) as tiny:
        one = SamplingParams(max_tokens=1, temperature=0.0)
        [answer] = tiny.chat(turns, one, tools=[TOOL], chat_template_kwargs={"mood": "dry"})
        assert answer.prompt == "tools=weather mood=dry user:rain? assistant:[weatherOslo] tool:yes(c1) "
        function["arguments"] = "Oslo"
        with pytest.raises(InvalidRequest, match="a call is"):
            tiny.chat(turns, one)


def test_tools_are_refused_where_the_template_would_drop_them(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="no place for tools"):
        llm.chat([{"role": "user", "content": "rain?"}], GREEDY, tools=[TOOL])


class InterruptAt:
    """While it traces, Ctrl-C is pressed before a line of the engine, the ``number``-th."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        if "/mooncake/engine/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)
        return self


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Background jobs of a shell ignore interrupts, and what they start does."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_anywhere_leaves_nothing_half_done(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, head_dim=16)
    prompts = [list(range(100 + i, 120 + 5 * i)) for i in range(3)]
    several = SamplingParams(max_tokens=8, temperature=1.0, seed=1, n=2, ignore_eos=True)
    with LLM(str(tmp_path), kv_gb=5e-5, block_tokens=8, chunk_tokens=16, threads=1, max_model_len=64) as llm:
        wanted = [[answer.token_ids for answer in each.outputs] for each in llm.generate(prompts, several)]
        assert llm.engine.load().preemptions, "blocks are to be given away and taken again"
        before = sys.gettrace()
        for number in range(1, 6000, 83):
            llm.reset_prefix_cache()
            pressed = InterruptAt(number)
            sys.settrace(pressed)
            try:
                llm.generate(prompts, several)
            except KeyboardInterrupt:
                assert pressed.left <= 0
            finally:
                sys.settrace(before)
            assert llm.engine.block_pool.num_in_use == 0 and not llm.engine.has_work
            llm.engine.block_pool.check()
        got = llm.generate(prompts, several)
        assert [[answer.token_ids for answer in each.outputs] for each in got] == wanted
        assert pressed.left < 0 and signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interruptible")
def test_a_second_interrupt_does_not_wait() -> None:
    with pytest.raises(KeyboardInterrupt), HeldInterrupts():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("it waited")


def test_what_is_closed_answers_no_more(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    llm = LLM(str(tmp_path), kv_gb=0.01)
    llm.close()
    llm.close()
    for ask in (lambda: llm.generate([[1, 2]]), lambda: llm.chat([{"role": "user", "content": "x"}])):
        with pytest.raises(InvalidRequest, match="this LLM is closed"):
            ask()
