"""Scripts for vLLM's ``LLM``, as its users write them, with ``mooncake`` in the import."""

from __future__ import annotations

import json
import math
import pickle
import re
import time
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from greedy import greedy
from tiny_lora import write_adapter
from tiny_model import write_tiny_model

import mooncake
from mooncake import (
    LLM,
    BeamSearchParams,
    LoRARequest,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    TokensPrompt,
)
from mooncake.errors import ConfigError, InvalidRequest, ModelError

ROLES = ("system", "developer")
PROMPTS = ["Hello, my name is", "The president of the United States is", "The capital of France is"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    threads = torch.get_num_threads()
    with LLM(model="smollm2", kv_gb=0.2, threads=1) as llm:
        yield llm
        llm.engine.block_pool.check()
        assert llm.engine.block_pool.num_in_use == 0
    torch.set_num_threads(threads)


def test_basic(llm: LLM) -> None:
    # a seed: another answer may end with a control token, or amid a character, which a text has not
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8, seed=1)
    outputs = llm.generate(PROMPTS, sampling_params, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.prompt == prompt and output.finished
        assert output.outputs[0].text == llm.get_tokenizer().decode(output.outputs[0].token_ids)
    assert len({output.request_id for output in outputs}) == 3


def test_a_dtype_may_be_one_of_torch_s_and_the_version_is_told(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    with LLM(str(tmp_path), dtype=torch.bfloat16, kv_gb=0.01) as tiny:
        assert tiny.engine.cache.tensor.dtype is torch.bfloat16
    with pytest.raises(ConfigError, match="dtype must be one of auto, float32, bfloat16, got 'float64'"):
        LLM(str(tmp_path), dtype=torch.float64, kv_gb=0.01)
    assert mooncake.__version__ == version("mooncake-cluster")


def test_prompts_and_results_have_their_names(llm: LLM) -> None:
    from mooncake import CompletionOutput, RequestOutput, TextPrompt

    ids = llm.get_tokenizer().encode(PROMPTS[0])
    prompts = [TextPrompt(prompt=PROMPTS[0]), TokensPrompt(prompt_token_ids=ids, prompt="another")]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert all(isinstance(output, RequestOutput) for output in outputs)
    assert all(isinstance(output.outputs[0], CompletionOutput) for output in outputs)
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids


def test_progress_is_told_beside_what_a_script_prints(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, SamplingParams(max_tokens=1), use_tqdm=True)
    said = capsys.readouterr()
    assert said.out == "" and f"{len(PROMPTS)}/{len(PROMPTS)}" in said.err
    llm.generate(PROMPTS, SamplingParams(max_tokens=1))
    assert capsys.readouterr() == ("", ""), "no terminal"


def test_chat_with_defaults_that_are_changed(llm: LLM) -> None:
    sampling_params = llm.get_default_sampling_params()
    sampling_params.max_tokens = 12
    sampling_params.temperature = 0
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    [first, second] = llm.chat([conversation, conversation], sampling_params, use_tqdm=False, priority=[1, 0])
    assert first.outputs[0].text == second.outputs[0].text and "Paris" in first.outputs[0].text
    assert llm.get_default_sampling_params() != sampling_params
    sampling_params.top_p = 3.0
    with pytest.raises(InvalidRequest, match="top_p must be between"):
        llm.chat(conversation, sampling_params)
    with pytest.raises(AttributeError):
        sampling_params.max_new_tokens = 5  # type: ignore[attr-defined]


def test_a_developer_speaks_as_the_system_does(llm: LLM) -> None:
    said = [[{"role": role, "content": "Answer in French."}, {"role": "user", "content": "Hello!"}] for role in ROLES]
    first, second = llm.chat(said, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert first.prompt == second.prompt and "Answer in French." in str(first.prompt)


def test_structured_outputs(llm: LLM) -> None:
    def ask(prompt: str, **form: Any) -> str:
        params = StructuredOutputsParams(**form)
        wanted = SamplingParams(structured_outputs=params, max_tokens=40, temperature=0)
        return llm.generate(prompt, sampling_params=wanted, use_tqdm=False)[0].outputs[0].text

    sentiment = "Classify this sentiment: vLLM is wonderful!"
    assert ask(sentiment, choice=["Positive", "Negative"]) in ("Positive", "Negative")
    address = r"[a-z]{1,9}@[a-z]{1,9}\.com\n"
    assert re.fullmatch(address, ask("An email address, e.g. alan.turing@enigma.com:", regex=address))
    schema = {
        "type": "object",
        "properties": {"brand": {"type": "string", "maxLength": 8}, "car_type": {"enum": ["sedan", "SUV"]}},
        "required": ["brand", "car_type"],
        "additionalProperties": False,
    }
    for given in (schema, json.dumps(schema)):
        assert set(json.loads(ask("A car as JSON:", json=given))) == {"brand", "car_type"}
    query = 'root ::= "SELECT " column " from table_1"\ncolumn ::= "col_1" | "col_2"'
    assert ask("An SQL query:", grammar=query) in ("SELECT col_1 from table_1", "SELECT col_2 from table_1")
    assert ask("A car as JSON:", json_object=True).startswith("{")


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({}, "need one of"),
        ({"regex": "a", "choice": ["a"]}, "only one of structured_outputs.regex, structured_outputs.choice"),
        ({"json": {"a": object()}}, "not JSON"),
    ],
)
def test_a_form_is_one_of_the_known_ones(form: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        StructuredOutputsParams(**form)


@pytest.mark.parametrize("choice", ["yes", {"yes": 1}, []])
def test_choices_are_a_list_of_texts(llm: LLM, choice: Any) -> None:
    """Letters of a single text, or keys, were taken for choices."""
    wanted = SamplingParams(structured_outputs=StructuredOutputsParams(choice=choice), max_tokens=4)
    with pytest.raises(InvalidRequest, match="a choice is a list of texts"):
        llm.generate("yes or no?", wanted)


def test_stop_strings_and_tokens(llm: LLM) -> None:
    [free] = llm.generate("1, 2, 3, 4,", SamplingParams(temperature=0, max_tokens=12))
    stopping = SamplingParams(temperature=0, max_tokens=12, stop=[" 6", "\n"])
    own = SamplingParams(temperature=0, max_tokens=12, stop=" 7", include_stop_str_in_output=True)
    [six, seven] = llm.generate(["1, 2, 3, 4,"] * 2, [stopping, own])  # each its own
    assert six.outputs[0].text == free.text.partition(" 6")[0] and six.outputs[0].stop_reason == " 6"
    assert seven.outputs[0].text == free.text.partition(" 7")[0] + " 7"
    by_id = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[six.token_ids[-1]])
    assert llm.generate("1, 2, 3, 4,", by_id)[0].outputs[0].stop_reason == six.token_ids[-1]


def test_logprobs_of_the_whole_vocabulary(llm: LLM, tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    asked = {"temperature": 0, "max_tokens": 2}
    with LLM(str(tmp_path), kv_gb=0.01, max_logprobs=-1) as tiny:
        [output] = tiny.generate([[5, 6, 7]], SamplingParams(**asked, logprobs=-1, prompt_logprobs=-1))
        places = [*(output.logprobs or ()), *(output.prompt_logprobs or ())[1:]]
        assert len(places) == 4
        for place in places:
            assert place is not None and sorted(place) == list(range(320))
            assert sorted(each.rank for each in place.values()) == list(range(1, len(place) + 1))
            assert sum(math.exp(each.logprob) for each in place.values()) == pytest.approx(1.0)
        [more] = tiny.generate([[5, 6, 7]], SamplingParams(**asked, logprobs=30))
        assert more.logprobs is not None and [len(place) for place in more.logprobs] == [30, 30]
    for wanted in (21, -1):
        with pytest.raises(InvalidRequest, match=rf"logprobs are at most 20 here.*LLM\(…, max_logprobs={wanted}\)"):
            llm.generate("a", SamplingParams(logprobs=wanted))


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ({"prompt": "x", "multi_modal_data": {}}, "without multi_modal_data; models take text alone"),
        ([{"role": "user", "content": "Hi"}], "without content, role; LLM.chat answers messages"),
        ({"text": "x"}, '{"prompt_token_ids": ids}, without text'),
    ],
)
def test_a_prompt_of_another_form_is_told_what_there_is(llm: LLM, prompt: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(words) + "$"):
        llm.generate(prompt)


def test_arguments_of_a_wrong_kind_are_told_by_their_name(llm: LLM) -> None:
    wrong: dict[str, Any] = {"sampling_params": BeamSearchParams(2, 3), "priority": "high"}
    for name, words in (("sampling_params", "one mooncake.SamplingParams"), ("priority", "is a whole number")):
        with pytest.raises(InvalidRequest, match=words) as error:
            llm.generate("a", **{name: wrong[name]})
        assert error.value.param == name
    with pytest.raises(TypeError, match="LoRARequest takes no lora_local_path: it is lora_path here"):
        LoRARequest("a", 1, lora_local_path="b")  # type: ignore[call-arg]


def test_names_that_only_vllm_has_say_so_where_they_are_imported() -> None:
    with pytest.raises(ImportError, match="mooncake has no GuidedDecodingParams, which is vLLM's: it is StructuredOut"):
        from mooncake import GuidedDecodingParams  # type: ignore[attr-defined] # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'LMM'"):
        from mooncake import LMM  # type: ignore[attr-defined] # noqa: F401
    assert not hasattr(mooncake, "LMM")
    assert not hasattr(mooncake, "LLMEngine"), "who asks whether there is one hears that there is not"
    with pytest.raises(AttributeError, match="mooncake has no LLMEngine, which is vLLM's: LLM answers lists"):
        mooncake.LLMEngine  # noqa: B018


def test_sampling_params_are_cloned_and_a_schema_is_no_class() -> None:
    params = SamplingParams(n=2, stop=["a"])
    copied = params.clone()
    copied.n, copied.stop = 3, ["b"]
    assert (params.n, params.stop) == (2, ["a"])

    class Pydantic:
        model_json_schema: Any = None

    with pytest.raises(InvalidRequest, match=r"model_json_schema\(\) of this class makes one"):
        StructuredOutputsParams(json=Pydantic)  # type: ignore[arg-type]


def test_results_tell_when_it_happened(llm: LLM) -> None:
    before = time.time()
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=4, n=1))
    for metrics in (output.metrics for output in outputs):
        assert metrics is not None and metrics.num_generation_tokens == 4
        times = [metrics.arrival_time, metrics.first_token_time, metrics.last_token_time, metrics.finished_time]
        assert times == sorted(times) and before <= metrics.arrival_time  # type: ignore[type-var]
        assert metrics.first_token_time is not None and metrics.first_token_latency is not None
        assert metrics.first_token_latency == metrics.first_token_time - metrics.arrival_time > 0


def test_words_tokens_and_texts_that_are_not_wanted(llm: LLM) -> None:
    asked = {"temperature": 0, "max_tokens": 8}
    [free] = llm.generate("The capital of France is", SamplingParams(**asked))
    assert "Paris" in free.text
    [other] = llm.generate("The capital of France is", SamplingParams(**asked, bad_words=["Paris"]))
    assert "Paris" not in other.text
    few = free.token_ids[:3]
    [drawn] = llm.generate("The capital of France is", SamplingParams(**asked, ignore_eos=True, allowed_token_ids=few))
    assert set(drawn.token_ids) <= set(few) and len(drawn.token_ids) == 8
    biased = SamplingParams(**asked, logit_bias={few[0]: -100.0})
    assert few[0] not in llm.generate("The capital of France is", biased)[0].token_ids
    silent = SamplingParams(**asked, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
    [tokens] = llm.generate("The capital of France is", silent)
    assert (tokens.text, tokens.token_ids) == ("", free.token_ids)


@pytest.mark.parametrize(
    ("wishes", "param", "words"),
    [
        ({"stop": [5]}, "stop", "stop must be a text or a list of texts, got [5]"),
        ({"bad_words": 5}, "bad_words", "bad_words must be a text or a list of texts, got 5"),
        ({"stop": "x", "detokenize": False}, "stop", "a stop string is found in the text: detokenize must be true"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "allowed_token_ids is empty: no token could be drawn"),
        ({"stop_token_ids": 5}, "stop_token_ids", "stop_token_ids must be a list of token ids, got 5"),
        ({"logit_bias": 5}, "logit_bias", "logit_bias must be pairs of a token id and its bias"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs", "structured_outputs must be a Structured"),
        ({"seed": 1 << 64}, "seed", "seed must be a 64-bit integer, got 18446744073709551616"),
        ({"seed": "x"}, "seed", "seed must be a whole number, got 'x'"),
        ({"min_tokens": 20}, "min_tokens", "min_tokens is 20, and max_tokens only 16"),
        ({"temperature": -1.0}, "temperature", "temperature must be between 0 and 100, got -1"),
    ],
)
def test_a_wrong_value_is_told_by_its_field(wishes: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**wishes)
    assert refused.value.param == param and refused.value.message.startswith(words)


def test_no_most_tokens_means_what_the_context_leaves(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    with LLM(str(tmp_path), kv_gb=0.01, max_model_len=48) as tiny:
        [answer] = tiny.generate([[5] * 20], SamplingParams(max_tokens=None, temperature=0, ignore_eos=True))
        assert len(answer.token_ids) == 28 and answer.finish_reason == "length"


def test_a_seed_of_zero_is_a_seed(llm: LLM) -> None:
    def drawn(seed: int | None) -> list[int]:
        return llm.generate("Once", SamplingParams(temperature=1.5, max_tokens=12, seed=seed))[0].token_ids

    assert drawn(0) == drawn(0)
    assert len({tuple(drawn(seed)) for seed in (None, None, -1, -1)}) > 1


def test_several_answers_and_their_log_probabilities(llm: LLM) -> None:
    asked = SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=4, logprobs=2, prompt_logprobs=1)
    [output] = llm.generate(["The capital of France is"], asked)
    for answer in output.outputs:
        assert answer.logprobs is not None and answer.cumulative_logprob is not None
        for token_id, place in zip(answer.token_ids, answer.logprobs, strict=True):
            assert next(iter(place)) == token_id and 2 <= len(place) <= 3
            ranks = sorted(entry.rank or 0 for entry in place.values())
            assert ranks[:2] == [1, 2] and all(rank > 2 for rank in ranks[2:])
        chosen = [place[i].logprob for i, place in zip(answer.token_ids, answer.logprobs, strict=True)]
        assert answer.cumulative_logprob == pytest.approx(sum(chosen))
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    last = output.prompt_logprobs[-1]
    assert last is not None and last[output.prompt_token_ids[-1]].decoded_token == " is"


def test_prefix_caching(llm: LLM) -> None:
    llm.reset_prefix_cache()
    prefix = "You are an expert school principal, skilled in managing staff. " * 12
    short = SamplingParams(temperature=0.0, max_tokens=2)
    cold = llm.generate(prefix + PROMPTS[0], short)
    warm = llm.generate([prefix + prompt for prompt in PROMPTS], short)
    assert cold[0].num_cached_tokens == 0 and all(each.num_cached_tokens >= 64 for each in warm)
    assert warm[0].token_ids == cold[0].token_ids


def test_a_cache_salt_separates_prompts(llm: LLM) -> None:
    llm.reset_prefix_cache()
    ids = llm.get_tokenizer().encode("The rain in Spain stays mainly in the plain. " * 12)
    short = SamplingParams(temperature=0.0, max_tokens=2)

    def ask(*salts: str | None) -> tuple[list[int], list[list[int]]]:
        prompts = [TokensPrompt(prompt_token_ids=ids, **({"cache_salt": salt} if salt else {})) for salt in salts]
        answers = llm.generate(prompts, short)
        return [each.num_cached_tokens for each in answers], [each.token_ids for each in answers]

    cached, [plain] = ask(None)
    assert cached == [0]
    cached, answers = ask("anna", "ben")
    assert cached == [0, 0] and answers == [plain, plain], "also within a block, nothing of others' is used"
    cached, answers = ask("ben", None, "anna", "cleo")
    assert cached == [len(ids) - 1] * 3 + [0] and answers == [plain] * 4


@pytest.mark.parametrize(
    ("salt", "words"),
    [("", "a text that is not empty"), (5, "a text that is not empty"), ("a b", "at most 128 visible ASCII")],
)
def test_a_cache_salt_is_one_of_the_server_s(llm: LLM, salt: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as error:
        llm.generate({"prompt": "a", "cache_salt": salt})
    assert error.value.param == "cache_salt"


def test_beam_search(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    [output] = llm.beam_search([{"prompt": PROMPTS[2]}], params, use_tqdm=False)
    assert len(output.sequences) == 3
    assert all(beam.text.startswith(PROMPTS[2]) for beam in output.sequences)
    scores = [beam.cum_logprob for beam in output.sequences]
    assert scores == sorted(scores, reverse=True) and all(len(beam.logprobs) == 8 for beam in output.sequences)
    for width in (0, 33):
        with pytest.raises(InvalidRequest, match=f"beam_width must be between 1 and 32, got {width}"):
            llm.beam_search(PROMPTS[2], BeamSearchParams(beam_width=width, max_tokens=8))


def test_lora_requests(tmp_path: Path) -> None:
    base = write_tiny_model(tmp_path)
    merged = {name: write_adapter(tmp_path / name, base, rank=4, seed=i) for i, name in enumerate(("one", "two"), 1)}
    merged[""] = base
    prompt, sampling = list(range(5, 30)), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    folders = {name: str(tmp_path / name) for name in ("one", "two")}
    requests = [LoRARequest(name, number, folders[name]) for number, name in enumerate(folders, 1)]
    with LLM(str(tmp_path), kv_gb=0.01, adapters=folders) as tiny:
        answers = tiny.generate([prompt] * 3, sampling, lora_request=[*requests, None])
        for name, answer in zip(("one", "two", ""), answers, strict=True):
            assert answer.token_ids == greedy(merged[name], prompt, 8), name
        [alone] = tiny.generate([prompt], sampling, lora_request=requests[0])
        assert alone.token_ids == answers[0].token_ids
        for wrong, words in (
            (LoRARequest("sql", 1), "LLM(…, adapters={'sql': 'FOLDER'}), or name its lora_path"),
            (LoRARequest("one", 1, folders["two"]), "was opened from"),
            ([requests[0]] * 2, "2 adapters were given for 1 prompts"),
        ):
            with pytest.raises(InvalidRequest, match=re.escape(words)):
                tiny.generate([prompt], sampling, lora_request=wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="give one of them"):
            tiny.generate([prompt], sampling, adapter="one", lora_request=requests[0])


@pytest.mark.parametrize(("family", "shape"), [("llama", {"head_dim": 16}), ("qwen2", {}), ("llama", {"head_dim": 24})])
def test_adapters_are_loaded_when_they_are_first_named(family: str, shape: dict[str, int], tmp_path: Path) -> None:
    base = write_tiny_model(tmp_path, family, **shape)
    merged = {name: write_adapter(tmp_path / name, base, seed=i) for i, name in enumerate(("one", "two", "three"))}
    merged[""] = base
    prompt, sampling = list(range(5, 30)), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    expected = {name: greedy(model, prompt, 8) for name, model in merged.items()}
    requests = {name: LoRARequest(name, 1, str(tmp_path / name)) if name else None for name in merged}
    with LLM(str(tmp_path), kv_gb=0.01, block_tokens=8, adapters={"one": str(tmp_path / "one")}) as tiny:
        for names in (["two"], ["three", "", "one", "two"], ["two", "three"]):
            answers = tiny.generate([prompt] * len(names), sampling, lora_request=[requests[name] for name in names])
            for name, answer in zip(names, answers, strict=True):
                assert answer.token_ids == expected[name], name
        [by_name] = tiny.generate([prompt], sampling, adapter="three")
        assert by_name.token_ids == expected["three"]
        with pytest.raises(ModelError, match="cannot read"):
            tiny.generate([prompt], sampling, lora_request=LoRARequest("gone", 1, str(tmp_path / "gone")))


def test_ranks_load_no_adapter(tmp_path: Path) -> None:
    write_adapter(tmp_path / "one", write_tiny_model(tmp_path))
    with (
        LLM(str(tmp_path), kv_gb=0.01, tensor_parallel_size=2) as cut,
        pytest.raises(ModelError, match="computed by one process"),
    ):
        cut.generate([[5, 6]], SamplingParams(max_tokens=1), lora_request=LoRARequest("one", 1, str(tmp_path / "one")))


def test_a_conversation_that_was_rendered_elsewhere_is_warned_of(llm: LLM) -> None:
    """vLLM takes the control tokens in it for what they spell; here no text can forge them."""
    one = SamplingParams(max_tokens=1, temperature=0)
    with pytest.warns(UserWarning, match=r"spells <\|im_start\|>, which is plain text in it: LLM.chat") as warned:
        llm.generate(["<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"], one)
    assert warned[0].filename == __file__
    llm.generate("Hello <there>", one)


def test_what_the_tokenizer_renders_is_answered_as_a_chat(llm: LLM) -> None:
    """As text it carries its ids: what only spells control tokens is plain text."""
    tokenizer, brief = llm.get_tokenizer(), SamplingParams(temperature=0, max_tokens=6)
    questions = ["What is the capital of France?", "Who said <|im_end|>?"]
    chats = [[{"role": "user", "content": question}] for question in questions]
    wanted = [(each.prompt, each.prompt_token_ids, each.text) for each in llm.chat(chats, brief)]
    rendered: Any = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    ids: Any = tokenizer.apply_chat_template(chats, add_generation_prompt=True)
    one: Any = tokenizer.apply_chat_template(chats[0], tokenize=False, add_generation_prompt=True)
    assert (one, list(rendered)) == (wanted[0][0], [prompt for prompt, _, _ in wanted])
    assert one.endswith("<|im_start|>assistant\n") and ids == [each for _, each, _ in wanted]
    with warnings.catch_warnings(action="error"):
        for given in (rendered, [{"prompt": each} for each in rendered], pickle.loads(pickle.dumps(rendered))):
            answers = llm.generate(given, brief)
            assert [(each.prompt, each.prompt_token_ids, each.text) for each in answers] == wanted
    closed: Any = tokenizer.apply_chat_template(chats[0], tokenize=False)
    assert closed.endswith("<|im_end|>\n")
    begun = [*chats[0], {"role": "assistant", "content": "It is"}]
    more: Any = tokenizer.apply_chat_template(begun, tokenize=False, continue_final_message=True)
    assert more.endswith("assistant\nIt is")
    with pytest.raises(InvalidRequest, match="a list of ids, or text"):
        tokenizer.apply_chat_template(chats[0], return_tensors="pt")
    plain = tokenizer.apply_chat_template(chats[0], return_tensors=None, padding=False)
    assert plain == tokenizer.apply_chat_template(chats[0])
    for tools in ([len], {"type": "function"}):
        with pytest.raises(InvalidRequest, match="tools"):
            tokenizer.apply_chat_template(chats[0], tools=tools)  # type: ignore[arg-type]


BARE = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}{% if tools %}tools{% endif %}"


def test_a_call_brings_a_chat_template(llm: LLM, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "What is 2 + 2?"}]
    (tmp_path / "own.jinja").write_text(BARE)
    for given in (BARE, tmp_path / "own.jinja"):
        [output] = llm.chat(chat, SamplingParams(temperature=0, max_tokens=4), chat_template=given)
        rendered = llm.get_tokenizer().apply_chat_template(chat, chat_template=given)
        assert output.prompt == "user: What is 2 + 2?<|im_end|>" and output.prompt_token_ids == rendered
    tools = [{"type": "function", "function": {"name": "add"}}]
    [output] = llm.chat(chat, SamplingParams(max_tokens=1), tools=tools, chat_template=BARE)
    assert output.prompt is not None and output.prompt.endswith("tools")
    [output] = llm.chat(chat, SamplingParams(max_tokens=1))
    assert output.prompt is not None and output.prompt.startswith("<|im_start|>")
    for wrong, words in (("no/own.jinja", "cannot read no/own.jinja"), ("{% if %}", "the chat template is broken")):
        with pytest.raises(InvalidRequest, match=words):
            llm.chat(chat, chat_template=wrong)


def test_a_base_model_chats_by_a_template_of_one_s_own(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with LLM(str(tmp_path), kv_gb=0.01, chat_template=BARE) as tiny:
        [output] = tiny.chat([{"role": "user", "content": "hello"}], SamplingParams(max_tokens=1))
        assert output.prompt == "user: hello<|im_end|>"
        assert tiny.get_tokenizer().chat_template == BARE
    with pytest.raises(ModelError, match="the chat template is broken"):
        LLM(str(tmp_path), kv_gb=0.01, chat_template="{% if %}")


def test_the_tokenizer_has_the_names_of_transformers(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.eos_token_id == end and tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token_id == tokenizer.convert_tokens_to_ids(tokenizer.pad_token)
    ids = tokenizer.encode("Hello there", add_special_tokens=False)
    assert tokenizer.decode(ids) == "Hello there" and tokenizer.decode(ids[0]) == "Hello"
    assert tokenizer.convert_ids_to_tokens(ids) == ["Hello", "Ġthere"]
    assert tokenizer.convert_tokens_to_ids(["Hello", "no such token"]) == [ids[0], None]
    assert tokenizer.decode([*ids, end]) == "Hello there<|im_end|>"  # type: ignore[list-item]
    assert tokenizer.decode([*ids, end], skip_special_tokens=True) == "Hello there"  # type: ignore[list-item]
    assert len(tokenizer) == tokenizer.vocab_size
    with pytest.raises(AttributeError, match=r"batch_decode.*decode\(ids\) gives the text of one"):
        tokenizer.batch_decode([ids])
    with pytest.raises(TypeError, match=r"encode\(text\) gives the ids"):
        tokenizer("Hello there", return_tensors="pt")
    assert not hasattr(tokenizer, "colour")


@pytest.mark.parametrize("prompt", [b"Hello", [b"Hello"], 5, [[1.5]], None])
def test_a_prompt_is_text_or_token_ids(llm: LLM, prompt: Any) -> None:
    """Bytes were taken for token ids, one each."""
    with pytest.raises(InvalidRequest, match="a prompt is text or token ids"):
        llm.generate(prompt, SamplingParams(max_tokens=1))


def test_what_a_request_may_not_say_is_a_value_error(llm: LLM) -> None:
    with pytest.raises(ValueError, match="top_p must be between"):
        SamplingParams(top_p=3.0)
    with pytest.raises(ValueError, match="surrogate"):
        llm.generate("\ud800", SamplingParams(max_tokens=1))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("encode", "embed gives embeddings"),
        ("classify", "no heads for classes"),
        ("sleep", "close\\(\\) frees its memory"),
        ("wake_up", "does not sleep"),
        ("collective_rpc", "no workers"),
        ("enqueue", "any number of prompts at once"),
        ("geenrate", "an LLM has no 'geenrate'"),
    ],
)
def test_what_is_vllms_alone_says_what_there_is_instead(llm: LLM, name: str, words: str) -> None:
    assert not hasattr(llm, name)
    with pytest.raises(AttributeError, match=words):
        getattr(llm, name)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("kv_cache_memory_bytes", "LLM takes no kv_cache_memory_bytes: kv_gb is the size of the KV cache"),
        ("max_num_seqs", "it is max_sequences here"),
        ("spec_tokens", "speculative_tokens"),
        ("kv_transfer_config", "a cluster \\(mooncake serve\\) has several"),
        ("kv_gbs", "is kv_gb meant?"),
        ("colour", "LLM takes no colour$"),
    ],
)
def test_an_argument_that_is_not_taken_says_what_there_is_instead(argument: str, words: str) -> None:
    settings: dict[str, Any] = {argument: 1}
    with pytest.raises(TypeError, match=words):
        LLM("smollm2", **settings)


@pytest.mark.parametrize(
    ("call", "argument", "words"),
    [
        ("generate", "prompt_token_ids", "LLM.generate takes no prompt_token_ids: prompts may be lists of token ids"),
        ("chat", "chat_template_content_format", "LLM.chat takes no chat_template_content_format: templates take text"),
        ("chat", "toosl", "LLM.chat takes no toosl: is tools meant\\?"),
        ("chat", "enable_thinking", "chat_template_kwargs={…} has the template's variables"),
        ("beam_search", "concurrency_limit", "there is nothing to choose"),
    ],
)
def test_neither_is_an_argument_of_a_call(llm: LLM, call: str, argument: str, words: str) -> None:
    settings: dict[str, Any] = {argument: 1}
    with pytest.raises(TypeError, match=words):
        getattr(llm, call)(PROMPTS, **settings)


@pytest.mark.parametrize(
    ("form", "argument", "words"),
    [
        (SamplingParams, "guided_decoding", "SamplingParams takes no guided_decoding: structured_outputs=Structured"),
        (SamplingParams, "max_new_tokens", "it is max_tokens here"),
        (SamplingParams, "logits_processors", "logit_bias"),
        (SamplingParams, "prompt_logprob_start", "prompt_logprobs tells of all tokens of the prompt"),
        (SamplingParams, "temprature", "is temperature meant\\?"),
        (SamplingParams, "colour", "SamplingParams takes no colour$"),
        (StructuredOutputsParams, "structural_tag", "StructuredOutputsParams takes no structural_tag: grammar"),
        (BeamSearchParams, "max_new_tokens", "BeamSearchParams takes no max_new_tokens: it is max_tokens here"),
        (BeamSearchParams, "structured_outputs", "beam search ranks unmodified probabilities"),
    ],
)
def test_nor_one_of_the_parameters(form: type, argument: str, words: str) -> None:
    settings: dict[str, Any] = {argument: 1}
    with pytest.raises(TypeError, match=words):
        form(**settings)
    assert argument not in signature(form).parameters
    assert {"max_tokens", "regex"} & set(signature(form).parameters), "what it takes is still told"
