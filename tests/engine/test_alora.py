"""Activated LoRA: an adapter that acts from its invocation on gives the tokens of the reference, over shared KV of the
base model."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from greedy import greedy
from tiny_lora import activated, write_adapter
from tiny_model import write_tiny_model

from mooncake import LLM, SamplingParams
from mooncake.adapters import last_occurrence, open_adapter
from mooncake.checkpoint import open_checkpoint
from mooncake.engine import sequence as engine_sequence
from mooncake.errors import InvalidRequest, ModelError
from mooncake.hashing import Chain
from mooncake.model import CausalLM
from mooncake.model.batch import ForwardBatch, NoHook
from mooncake.model.lora import load_adapter
from mooncake.model.reading.weights import load_weights
from mooncake.precision import Coding

NEW, BLOCK = 12, 8
GREEDY = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
CHECK, REWRITE = (7, 9, 11), (5, 6)  # what invokes each of two adapters


NEVER = 1 << 20


def random_tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(20, 320, count).tolist()


def invoking(invocation: Sequence[int], at: int, length: int = 41, seed: int = 0) -> list[int]:
    """A prompt of ``length`` tokens in which the invocation begins at token ``at``."""
    tokens = random_tokens(length, seed)
    tokens[at : at + len(invocation)] = invocation
    return tokens


@dataclass(frozen=True)
class Models:
    """A folder with a model, two activated adapters in it, and an ordinary one that has the first one's weights."""

    folder: Path
    base: Any

    def expected(self, name: str, prompt: Sequence[int], start: int, count: int = NEW) -> list[int]:
        return greedy(activated(self.base, self.folder / name, start), prompt, count)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp(request.param)
    base = write_tiny_model(folder, request.param, head_dim=16)
    write_adapter(folder / "check", base, seed=1, invocation=CHECK)
    write_adapter(folder / "rewrite", base, seed=2, targets=("q_proj", "k_proj", "v_proj"), invocation=REWRITE)
    write_adapter(folder / "always", base, seed=1)
    return Models(folder, base)


@pytest.fixture
def llm(models: Models) -> Iterator[LLM]:
    adapters = {name: str(models.folder / name) for name in ("check", "rewrite", "always")}
    with LLM(
        str(models.folder), kv_gb=0.01, block_tokens=BLOCK, chunk_tokens=16, speculative_tokens=2, adapters=adapters
    ) as llm:
        yield llm
        llm.engine.block_pool.check()


@pytest.mark.parametrize("start", [0, 3, 16, 21, 38])  # at a prompt's begin and end, a block's, and within a chunk
def test_an_adapter_acts_from_its_invocation_on(models: Models, llm: LLM, start: int) -> None:
    prompt = invoking(CHECK, start)
    expected = models.expected("check", prompt, start)
    [answer] = llm.generate([prompt], GREEDY, adapter="check")
    assert answer.token_ids == expected
    others = {tuple(greedy(models.base, prompt, NEW)), tuple(models.expected("always", prompt, 0))}
    assert (tuple(expected) in others) == (start == 0), "it makes no difference where the adapter begins: no test"


@pytest.mark.filterwarnings("ignore")  # what the two libraries have to say to each other
def test_the_definition_is_what_peft_computes(models: Models) -> None:
    """For prompts that invoke once, twice and not at all, and for whole answers."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    for prompt, start in (
        (invoking(CHECK, 21), 21),
        (invoking(CHECK, 5)[:30] + invoking(CHECK, 3, seed=1), 33),
        (random_tokens(30, 2), NEVER),
    ):
        ours = activated(models.base, models.folder / "check", start)
        theirs = peft.PeftModel.from_pretrained(copy.deepcopy(models.base), models.folder / "check")
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            logits = theirs(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(logits, ours(ids, use_cache=False).logits)
        answer = theirs.generate(input_ids=ids, max_new_tokens=NEW, do_sample=False)[0, len(prompt) :].tolist()
        assert answer == greedy(ours, prompt, len(answer))


@pytest.mark.parametrize("is_fused", [True, False], ids=["one call", "product by product"])
@pytest.mark.parametrize("coding", ["", "int8", "w8a8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_before_an_invocation_is_the_models_own_to_the_bit(
    models: Models, dtype: str, coding: Coding, is_fused: bool
) -> None:
    checkpoint, adapter = open_checkpoint(str(models.folder)), open_adapter("check", str(models.folder / "check"))
    config = checkpoint.config
    weights, adapters = load_weights(checkpoint, dtype), [load_adapter(adapter, config)]
    model = CausalLM(config, weights, 64, coding=coding, is_fused=is_fused, adapters=adapters)
    for count, start in ((41, 21), (9, 8), (3, 1)):
        acting = torch.zeros(count, dtype=torch.int32)
        acting[:start] = -1
        batch = ForwardBatch.of_prompt(torch.tensor(random_tokens(count, 9)), BLOCK, torch.arange(count))
        own, shared = (torch.zeros(8, config.num_layers, 2, config.num_kv_heads, BLOCK, 16) for _ in range(2))
        logits = model.forward(batch, own, NoHook())
        adapted = model.forward(replace(batch, adapters=acting), shared, NoHook())
        assert torch.equal(adapted[:start], logits[:start]) and not torch.equal(adapted[start:], logits[start:])
        same = (own == shared).all(dim=5).all(dim=3).all(dim=2).all(dim=1).flatten()  # by token
        assert same[:start].all() and not same[start:count].any()


def test_the_model_and_all_activated_adapters_share_what_is_before_an_invocation(models: Models, llm: LLM) -> None:
    text = random_tokens(45, seed=3)
    checking, rewriting = [*text, *CHECK, 30], [*text, *REWRITE, 31]
    whole = len(text) // BLOCK * BLOCK
    [alone] = llm.generate([checking], GREEDY, adapter="check")
    assert alone.cached_tokens == 0 and alone.token_ids == models.expected("check", checking, len(text))
    [of_base] = llm.generate([text], GREEDY)  # what an adapter left is the model's own
    assert of_base.cached_tokens == whole and of_base.token_ids == greedy(models.base, text, NEW)
    [other] = llm.generate([rewriting], GREEDY, adapter="rewrite")
    assert other.cached_tokens == whole and other.token_ids == models.expected("rewrite", rewriting, len(text))
    [again] = llm.generate([checking], GREEDY, adapter="check")
    assert again.cached_tokens == len(checking) - 1 and again.token_ids == alone.token_ids
    [ordinary] = llm.generate([checking], GREEDY, adapter="always")
    assert ordinary.cached_tokens == 0 and ordinary.token_ids == models.expected("always", checking, 0)


def test_a_turn_goes_on_in_the_answer_before_it_only_while_the_adapter_does(models: Models, llm: LLM) -> None:
    prompt = invoking(CHECK, 21)
    [first] = llm.generate([prompt], GREEDY, adapter="check")
    following = [*prompt, *first.token_ids, 40, 41]
    [same] = llm.generate([following], GREEDY, adapter="check")
    assert same.cached_tokens == len(prompt) + NEW - 1
    assert same.token_ids == models.expected("check", following, 21)
    anew = [*following, *CHECK]
    [invoked_again] = llm.generate([anew], GREEDY, adapter="check")
    assert invoked_again.cached_tokens == 21 // BLOCK * BLOCK, "tokens between two invocations are the model's own"
    assert invoked_again.token_ids == models.expected("check", anew, len(following))


def test_equal_blocks_in_which_an_adapter_begins_at_different_tokens_are_not_taken_for_each_other(
    models: Models, llm: LLM
) -> None:
    """The second invocation of ``twice`` begins with the last token of a block, whose tokens are those of ``once``."""
    head = random_tokens(BLOCK, seed=4)
    block = [20, *CHECK, 21, 22, 23, CHECK[0]]
    once, twice = [*head, *block, 50, *random_tokens(9, seed=5)], [*head, *block, *CHECK[1:], *random_tokens(9, seed=6)]
    for prompt, start in ((once, BLOCK + 1), (twice, 2 * BLOCK - 1)):
        [answer] = llm.generate([prompt], GREEDY, adapter="check")
        assert answer.token_ids == models.expected("check", prompt, start)
    assert answer.cached_tokens == BLOCK


def test_a_prompt_without_an_invocation_is_the_models_own(models: Models, llm: LLM) -> None:
    prompt = random_tokens(40, seed=7)
    [of_base] = llm.generate([prompt], GREEDY)
    [answer] = llm.generate([prompt], GREEDY, adapter="check")
    assert answer.token_ids == of_base.token_ids == greedy(models.base, prompt, NEW)
    assert answer.cached_tokens == len(prompt) - 1


def test_whoever_takes_an_answer_over_lets_the_adapter_begin_where_it_began(models: Models, llm: LLM) -> None:
    """Also if the answer so far happens to contain the invocation, which only counts in prompts."""
    prompt, told = invoking(CHECK, 21), [*CHECK, 60]
    expected = models.expected("check", [*prompt, *told], 21, NEW - len(told))
    sequence = engine_sequence.Sequence(
        "taken over",
        np.array([*prompt, *told], np.uint32),
        len(prompt),
        GREEDY.for_engine(),
        Chain(bytes(32), "digest", 21),
        eos_ids=(),
        max_model_len=200,
        adapter=0,
    )
    llm.engine.add(sequence)
    while llm.engine.has_work:
        llm.engine.step()
    assert sequence.tokens[len(prompt) + len(told) :].tolist() == expected


def test_several_answers_beams_and_drafts_keep_the_place_where_it_begins(models: Models, llm: LLM) -> None:
    prompt = invoking(CHECK, 21, seed=8)
    expected = models.expected("check", prompt, 21)
    two = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True, n=2)
    [completion] = llm.generate([prompt], two, adapter="check")
    assert [answer.token_ids for answer in completion.outputs] == [expected, expected]
    repeated = (prompt[:10] * 3)[:24] + list(CHECK) + prompt[:10] * 2  # there is something to draft
    [answer] = llm.generate([repeated], GREEDY, adapter="check")
    assert answer.token_ids == models.expected("check", repeated, 24)
    names = ["check", None, "rewrite", "always"]
    prompts = [invoking(REWRITE if name == "rewrite" else CHECK, 13, seed=20 + i) for i, name in enumerate(names)]
    answers = llm.generate(prompts, GREEDY, adapter=names)
    for name, prompt, answer in zip(names, prompts, answers, strict=True):
        start = {"check": 13, "rewrite": 13, "always": 0, None: NEVER}[name]
        assert answer.token_ids == models.expected(name or "check", prompt, start)


def test_sequences_that_give_way_lose_nothing(models: Models) -> None:
    adapters = {"check": str(models.folder / "check")}
    prompts = [invoking(CHECK, 10 + seed, length=30, seed=seed) for seed in range(3)]
    block_bytes = open_checkpoint(str(models.folder)).kv_layout(BLOCK, "float32").block_bytes
    kv_gb, long = 13 * block_bytes / 1e9, replace(GREEDY, max_tokens=20)  # for two of three
    with LLM(str(models.folder), kv_gb=kv_gb, block_tokens=BLOCK, chunk_tokens=16, adapters=adapters) as small:
        answers = small.generate(prompts, long, adapter="check")
        assert small.engine.load().preemptions > 0
    for seed, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert answer.token_ids == models.expected("check", prompt, 10 + seed, 20)


def test_the_last_occurrence_is_the_last() -> None:
    random = np.random.default_rng(0)
    for _ in range(500):
        tokens, wanted = (random.integers(0, 3, random.integers(least, most)) for least, most in ((0, 40), (1, 5)))
        places = [at for at in range(len(tokens)) if tokens[at : at + len(wanted)].tolist() == wanted.tolist()]
        assert last_occurrence(tokens.astype(np.uint32), wanted.tolist()) == (places[-1] if places else None)


def test_invocations_that_no_prompt_can_have_are_refused(models: Models, tmp_path: Path) -> None:
    config = json.loads((models.folder / "check" / "adapter_config.json").read_text())
    (tmp_path / "adapter_model.safetensors").write_bytes(
        (models.folder / "check" / "adapter_model.safetensors").read_bytes()
    )

    def opened(invocation: object) -> Any:
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"alora_invocation_tokens": invocation}))
        return open_adapter("check", str(tmp_path))

    assert opened(None).invocation == () and opened([7, 9]).invocation == (7, 9)
    with pytest.raises(ModelError, match="without tokens"):
        opened([])
    for wrong in ([-1], [1 << 32], "7", [[7]]):
        with pytest.raises(ModelError, match="is not PEFT's"):
            opened(wrong)
    with pytest.raises(ModelError, match="tokens that the model does not have"):
        load_adapter(opened([7, 320]), open_checkpoint(str(models.folder)).config)
    with pytest.raises(InvalidRequest, match="within the prompt"):
        engine_sequence.Sequence(
            "late",
            np.arange(5, dtype=np.uint32),
            4,
            GREEDY.for_engine(),
            Chain(b"", "digest", 4),
            eos_ids=(),
            max_model_len=200,
        )
