"""Guided answers: only tokens that the guide allows are sampled, also when another engine continues the answer."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from mooncake import LLM, SamplingParams
from mooncake.checkpoint import GGUFCheckpoint, open_checkpoint
from mooncake.engine import sequence as engine_sequence
from mooncake.errors import InvalidRequest
from mooncake.gguf.tokenizer import tokenizer_from_gguf
from mooncake.guides import Guides
from mooncake.hashing import Chain
from mooncake.sampling import Guide, GuideKind
from mooncake.types import FinishReason
from tests.engine.hash_model import hash_engine, hash_sequence

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "people": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["old", "new"]}, "maxItems": 2},
    },
    "required": ["city", "people", "tags"],
    "additionalProperties": False,
}
WIDE = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(1000)}}
WIDE["required"] = ["p999"]
"""Any of a thousand properties may come first: more than the grammar engine looks at."""

PROMPT = "Tell me about a city as JSON: "


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    threads = torch.get_num_threads()
    with LLM("smollm2", kv_gb=0.1, threads=1) as llm:
        yield llm
        llm.engine.block_pool.check()
        assert llm.engine.block_pool.num_in_use == 0
    torch.set_num_threads(threads)


def guided(kind: GuideKind, text: str = "", **sampling: float | int) -> SamplingParams:
    settings: dict[str, float | int] = {"max_tokens": 80, "temperature": 0.0, **sampling}
    return SamplingParams(guide=Guide(kind, text), **settings)  # type: ignore[arg-type]


def check_city(text: str) -> None:
    city = json.loads(text)
    assert set(city) == {"city", "people", "tags"}
    assert isinstance(city["city"], str) and 0 <= city["people"] <= 99 and set(city["tags"]) <= {"old", "new"}


def test_answers_keep_to_a_schema_greedy_and_drawn(llm: LLM) -> None:
    schema = json.dumps(SCHEMA)
    samplings = [guided(GuideKind.JSON_SCHEMA, schema)]
    samplings += [guided(GuideKind.JSON_SCHEMA, schema, temperature=1.5, seed=seed) for seed in range(1, 5)]
    for answer in llm.generate([PROMPT] * len(samplings), samplings):
        assert answer.finish_reason is FinishReason.STOP
        check_city(answer.text)


def test_each_of_several_answers_follows_the_guide_on_its_own(llm: LLM) -> None:
    [answer] = llm.generate(PROMPT, guided(GuideKind.REGEX, "[a-z]{3}-[0-9]{2}", temperature=2.0, seed=1, n=4))
    assert all(re.fullmatch("[a-z]{3}-[0-9]{2}", output.text) for output in answer.outputs)
    assert len({output.text for output in answer.outputs}) > 1


@pytest.mark.parametrize(
    ("kind", "text", "pattern"),
    [
        (GuideKind.CHOICE, '["Paris", "Rome", "Oslo"]', "Paris|Rome|Oslo"),
        (GuideKind.GRAMMAR, 'root ::= "a" root | "b"', "a*b|a+"),
        (GuideKind.GRAMMAR, 'start: /[0-9]+/ "!"', "[0-9]+!|[0-9]+"),
        (GuideKind.JSON_OBJECT, "", r"\{.*"),
    ],
)
def test_every_kind_of_guide_guides(llm: LLM, kind: GuideKind, text: str, pattern: str) -> None:
    [answer] = llm.generate("The capital of France is ", guided(kind, text, max_tokens=24))
    assert re.fullmatch(pattern, answer.text, re.DOTALL)
    if kind is GuideKind.CHOICE:
        assert answer.text == "Paris"


@pytest.mark.slow
def test_whoever_takes_an_answer_over_goes_on_in_its_guide(llm: LLM) -> None:
    """The state depends only on the guide and the tokens, so any engine can continue at any token."""
    sampling = guided(GuideKind.JSON_SCHEMA, json.dumps(SCHEMA), temperature=1.0, seed=9)
    [whole] = llm.generate(PROMPT, sampling)
    prompt = llm.tokenizer.encode(PROMPT)
    for cut in range(1, len(whole.token_ids), 4):
        tokens = np.concatenate([prompt, np.array(whole.token_ids[:cut], np.uint32)])
        taken_over = engine_sequence.Sequence(
            f"cut-{cut}",
            tokens,
            len(prompt),
            sampling.for_engine(),
            Chain(b"s"),
            eos_ids=llm.tokenizer.eos_ids,
            max_model_len=1024,
        )
        llm.engine.add(taken_over)
        while llm.engine.has_work:
            llm.engine.step()
        assert taken_over.tokens[len(prompt) :].tolist() == whole.token_ids


def test_a_guide_that_makes_no_sense_is_refused(llm: LLM) -> None:
    for guide in (
        Guide(GuideKind.REGEX, "(["),
        Guide(GuideKind.CHOICE, "[]"),
        Guide(GuideKind.CHOICE, "yes"),
        Guide(GuideKind.JSON_SCHEMA, '{"type": 3}'),
        Guide(GuideKind.GRAMMAR, "root ::= ::"),
    ):
        with pytest.raises(InvalidRequest, match="guide is not valid"):
            llm.generate(PROMPT, SamplingParams(guide=guide))
    with pytest.raises(InvalidRequest, match="decides when the answer ends"):
        guided(GuideKind.JSON_OBJECT, ignore_eos=True)
    with pytest.raises(InvalidRequest, match="cannot guide"):
        hash_engine().add(hash_sequence("r", [1, 2], guided(GuideKind.JSON_OBJECT).for_engine()))
    with pytest.raises(InvalidRequest, match="is not valid"):
        llm.generate(PROMPT, guided(GuideKind.CHOICE, "[" * 5000))


@pytest.mark.parametrize(
    "guide",
    [
        Guide(GuideKind.JSON_SCHEMA, '{"$ref": "#"}'),
        Guide(GuideKind.GRAMMAR, "start: start"),
        Guide(GuideKind.REGEX, r"a&&b[^\x00-\U0010ffff]"),
    ],
)
def test_a_guide_that_nothing_can_satisfy_is_refused(llm: LLM, guide: Guide) -> None:
    with pytest.raises(InvalidRequest, match="no text can satisfy it"):
        Guides(lambda: llm.tokenizer, llm.tokenizer.vocab_size).compile(guide)


def test_a_guide_that_only_an_empty_answer_satisfies_is_taken(llm: LLM) -> None:
    [answer] = llm.generate(PROMPT, guided(GuideKind.REGEX, ""))
    assert answer.text == "" and answer.finish_reason is FinishReason.STOP


def test_an_answer_whose_guide_fails_on_the_way_ends_with_an_error_and_the_others_go_on(llm: LLM) -> None:
    prompt = llm.tokenizer.encode(PROMPT)

    def add(name: str, sampling: SamplingParams) -> engine_sequence.Sequence:
        eos_ids, length = llm.tokenizer.eos_ids, len(prompt)
        sequence = engine_sequence.Sequence(
            name,
            prompt,
            length,
            sampling.for_engine(),
            Chain(b"s"),
            eos_ids=eos_ids,
            max_model_len=1024,
            hold_blocks=name == "held",
        )
        llm.engine.add(sequence)
        return sequence

    add("wide", guided(GuideKind.JSON_SCHEMA, json.dumps(WIDE)))
    add("several", guided(GuideKind.JSON_SCHEMA, json.dumps(WIDE), n=2))
    held = add("held", guided(GuideKind.JSON_SCHEMA, json.dumps(WIDE)))
    city = add("city", guided(GuideKind.JSON_SCHEMA, json.dumps(SCHEMA)))
    outputs = []
    while llm.engine.has_work:
        outputs += llm.engine.step()

    failed = llm.engine.take_ended()
    assert sorted(request_id for request_id, _ in failed) == ["held", "several", "several", "wide"]
    for _, error in failed:
        assert isinstance(error, InvalidRequest) and "Current row has" in error.message
        assert "\n" not in error.message
    told = [(output.request_id, output.finish_reason) for output in outputs if output.finish_reason]
    assert told == [("city", FinishReason.STOP)]
    assert {output.request_id for output in outputs} == {"wide", "several", "held", "city"}  # each had begun
    check_city(llm.tokenizer.decode(city.tokens[len(prompt) :], skip_special=True))
    assert held.state is engine_sequence.SequenceState.HELD  # someone may be reading its blocks
    llm.engine.abort("held")


def test_a_grammar_that_reads_a_text_in_ever_more_ways_ends_before_it_holds_up_the_others(llm: LLM) -> None:
    guides = Guides(lambda: llm.tokenizer, llm.tokenizer.vocab_size)
    state = guides.state(Guide(GuideKind.GRAMMAR, 'start: s\ns: s s s s | s s s | s s | "a" | "b"'))
    [a] = llm.tokenizer.encode("a")
    with pytest.raises(InvalidRequest, match="Too many items"):
        for length in range(80):  # 0.02 seconds for the slowest; without a limit it goes on and takes ever longer
            state.follow(np.full(length, a, np.uint32))
            state.allowed()


def test_nobody_waits_for_the_compilation_of_another_guide(llm: LLM) -> None:
    guides = Guides(lambda: llm.tokenizer, llm.tokenizer.vocab_size)
    ready = Guide(GuideKind.REGEX, "ab*c")
    guides.compile(ready)
    words = {"enum": [f"v{7919 * number}" for number in range(40_000)]}
    slow = Guide(GuideKind.JSON_SCHEMA, json.dumps({"allOf": [words, {"type": "string", "pattern": "[13579]$"}]}))

    def compile_slowly() -> None:
        with contextlib.suppress(InvalidRequest):
            guides.compile(slow)

    threads = [threading.Thread(target=compile_slowly) for _ in range(2)]  # the second waits for the first
    for thread in threads:
        thread.start()
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        guides.state(ready)
        time.sleep(0.01)

    assert all(thread.is_alive() for thread in threads)
    for thread in threads:
        thread.join()


def test_a_model_whose_answers_have_no_end_token_cannot_be_guided() -> None:
    checkpoint = open_checkpoint("smollm2")
    assert isinstance(checkpoint, GGUFCheckpoint)
    guides = Guides(lambda: tokenizer_from_gguf(checkpoint.file, ()), checkpoint.config.vocab_size)
    with pytest.raises(InvalidRequest, match="no token that ends an answer"):
        guides.compile(Guide(GuideKind.JSON_OBJECT))


@pytest.mark.parametrize("num_more", [100, -100])
def test_a_model_may_have_more_rows_than_there_are_tokens_or_fewer(llm: LLM, num_more: int) -> None:
    num_rows = llm.tokenizer.vocab_size + num_more
    guides = Guides(lambda: llm.tokenizer, num_rows)
    choice, anything = (
        guides.state(Guide(GuideKind.CHOICE, '["ab"]')).allowed(),
        guides.state(Guide(GuideKind.REGEX, "(?s:.)*")).allowed(),
    )
    assert choice[llm.tokenizer.encode("ab")[0]] and len(anything) == num_rows
    assert not anything[llm.tokenizer.vocab_size :].any()


def test_a_state_can_go_back(llm: LLM) -> None:
    guides = Guides(lambda: llm.tokenizer, llm.tokenizer.vocab_size)
    state = guides.state(Guide(GuideKind.REGEX, "ab*c"))
    a, b, c = (llm.tokenizer.encode(letter)[0] for letter in "abc")
    state.follow(np.array([a, b, b, c], np.uint32))
    state.follow(np.array([a], np.uint32))
    allowed = state.allowed()
    assert allowed[b] and allowed[c] and not allowed[a]


THOUGHT = '%llguidance {}\nstart: thought @answer\nthought[suffix="</t>"]: /(?s:.*)/'


@pytest.mark.parametrize(
    ("kind", "text", "answer"),
    [
        (GuideKind.JSON_SCHEMA, '{"type": "object", "properties": {"a&b": {"type": "integer"}}}', '{"a&b": 1}'),
        (GuideKind.JSON_OBJECT, "", '{"a": [1, {}]}'),
        (GuideKind.REGEX, "[a/]+\\n", "a/\n"),
        (GuideKind.CHOICE, '["a\\"b", "c"]', 'a"b'),
        (GuideKind.GRAMMAR, 'start: "a" start | "b"', "aab"),
        (GuideKind.GRAMMAR, 'root ::= "a" root | "b"', "aab"),
    ],
)
def test_what_leads_to_the_answer_is_free_and_the_answer_is_not(
    llm: LLM, kind: GuideKind, text: str, answer: str
) -> None:
    guides = Guides(lambda: llm.tokenizer, llm.tokenizer.vocab_size)

    def takes(said: str) -> bool:
        state = guides.state(Guide(kind, text, THOUGHT))
        state.follow(llm.tokenizer.encode(said))
        try:
            return bool(state.allowed()[llm.tokenizer.eos_ids[0]])
        except InvalidRequest:  # it has left the guide
            return False

    assert takes(f"Hm {{\n</ </t>{answer}") and takes(f"</t>{answer}")
    assert not takes(answer) and not takes("Hm</t>") and not takes(f"Hm</t>?{answer}")


@pytest.mark.parametrize("lead", ["start: @answer )", "start: @other", "start: @answer" + "&" * 9])
def test_a_lead_that_makes_no_sense_is_refused(llm: LLM, lead: str) -> None:
    guides = Guides(lambda: llm.tokenizer, llm.tokenizer.vocab_size)
    with pytest.raises(InvalidRequest):
        guides.compile(Guide(GuideKind.REGEX, "a", lead))


def test_a_token_that_the_guide_does_not_allow_is_an_error(llm: LLM) -> None:
    guides = Guides(lambda: llm.tokenizer, llm.tokenizer.vocab_size)
    state = guides.state(Guide(GuideKind.REGEX, "ab*c"))
    state.follow(llm.tokenizer.encode("c"))
    with pytest.raises(InvalidRequest, match="cannot be followed any further"):
        state.allowed()
