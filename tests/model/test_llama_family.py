"""Our forward pass against transformers, on small random models of every family: whole, in chunks, and step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from mooncake.errors import ModelError
from mooncake.kernels import Kernels, choose_kernels, reference
from mooncake.model.batch import ForwardBatch, LayerHook, NoHook
from mooncake.model.llama import CausalLM
from mooncake.model_config import ModelConfig

BLOCK_TOKENS = 8
VOCAB = 97
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


def _llama(tied: bool = False, rope: dict[str, object] = PLAIN, head_dim: int = 16) -> PreTrainedModel:
    config = LlamaConfig(**SHAPE, head_dim=head_dim, tie_word_embeddings=tied, rope_parameters=rope)
    return LlamaForCausalLM(config)


FAMILIES = {
    "llama": lambda: _llama(),
    "llama-tied": lambda: _llama(tied=True),
    "llama-llama3-rope": lambda: _llama(rope=LLAMA3),
    "llama-linear-rope": lambda: _llama(rope=LINEAR),
    "llama-odd-head": lambda: _llama(head_dim=24),
    "mistral-window": lambda: MistralForCausalLM(
        MistralConfig(**SHAPE, head_dim=32, sliding_window=20, rope_parameters=PLAIN)
    ),
    "qwen2-bias": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True, rope_parameters=PLAIN)),
    "qwen3-norm": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=32, rope_parameters=PLAIN)),
}


@pytest.fixture(params=FAMILIES, scope="module")
def theirs(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(7)
    model = FAMILIES[request.param]().eval()
    with torch.no_grad():  # published models have neither zero biases nor all-one norms
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def ours_from(theirs: PreTrainedModel, kernels: Kernels) -> CausalLM:
    config, weights = theirs.config, theirs.state_dict()
    rope = dict(config.rope_parameters)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    ours = ModelConfig(
        architecture=config.model_type,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        max_model_len=config.max_position_embeddings,
        rope_theta=rope["rope_theta"],
        rope_scaling=None if rope["rope_type"] == "default" else rope,
        rms_eps=config.rms_norm_eps,
        tie_embeddings=config.tie_word_embeddings,
        qkv_bias="model.layers.0.self_attn.q_proj.bias" in weights,
        qk_norm="model.layers.0.self_attn.q_norm.weight" in weights,
        sliding_window=getattr(config, "sliding_window", None),
        bos_id=None,
        eos_ids=(),
    )
    return CausalLM(ours, weights, kernels=kernels)


class Paged:
    """Sequences in a paged cache, each in its own scattered blocks; ``run`` computes the next tokens of some."""

    def __init__(self, model: CausalLM, num_sequences: int, max_tokens: int) -> None:
        config = model.config
        per_sequence = -(-max_tokens // BLOCK_TOKENS)
        blocks = num_sequences * per_sequence
        self.model = model
        self.cache = torch.full(
            (blocks, config.num_layers, 2, config.num_kv_heads, BLOCK_TOKENS, config.head_dim), float("nan")
        )
        self.tables = torch.randperm(blocks).int().view(num_sequences, per_sequence)
        self.lengths = [0] * num_sequences

    def run(self, work: Sequence[tuple[int, Sequence[int]]], hook: LayerHook | None = None) -> list[torch.Tensor]:
        """``work``: (sequence, its next tokens). Returns logits ``[tokens, V]`` for each entry."""
        counts = [len(new) for _, new in work]
        logits = self.model.forward(self.batch(work, list(range(sum(counts)))), self.cache, hook or NoHook())
        return list(logits.split(counts))

    def batch(self, work: Sequence[tuple[int, Sequence[int]]], logit_rows: list[int]) -> ForwardBatch:
        rows = [row for row, _ in work]
        positions = [torch.arange(len(new)) + self.lengths[row] for row, new in work]
        slots = [
            self.tables[row].long()[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS
            for row, at in zip(rows, positions, strict=True)
        ]
        for row, new in work:
            self.lengths[row] += len(new)
        return ForwardBatch(
            tokens=torch.tensor([token for _, new in work for token in new]),
            positions=torch.cat(positions),
            query_starts=torch.tensor([0, *(len(new) for _, new in work)]).cumsum(0).int(),
            context_lens=torch.tensor([self.lengths[row] for row in rows], dtype=torch.int32),
            block_tables=self.tables[rows],
            slots=torch.cat(slots),
            logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
        )

    def written_layers(self) -> list[int]:
        """Layers that hold keys and values of the third token of sequence 0, all heads."""
        written = ~self.cache[int(self.tables[0, 0]), :, :, :, 2].isnan()
        return [layer for layer, whole in enumerate(written.flatten(1).all(1).tolist()) if whole]


def prompts(*lengths: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(11)
    return [torch.randint(VOCAB, (length,), generator=random).tolist() for length in lengths]


@torch.no_grad()
def expected(theirs: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    logits: torch.Tensor = theirs(torch.tensor([prompt])).logits[0]
    return logits


def assert_equal_logits(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("choose", [lambda: reference, choose_kernels], ids=["reference", "chosen"])
def test_a_whole_prompt_gives_their_logits(theirs: PreTrainedModel, choose: Callable[[], Kernels]) -> None:
    wanted = prompts(70, 1, 33)
    paged = Paged(ours_from(theirs, choose()), 3, 80)
    for prompt, logits in zip(wanted, paged.run(list(enumerate(wanted))), strict=True):
        assert_equal_logits(logits, expected(theirs, prompt))


def test_chunks_and_single_steps_of_a_mixed_batch_give_their_logits(theirs: PreTrainedModel) -> None:
    long, short = prompts(90, 40)
    paged = Paged(ours_from(theirs, choose_kernels()), 2, 96)
    logits: list[list[torch.Tensor]] = [[], []]
    done = 0
    for chunk in (16, 24, 1, 30, 9, 10):  # of the long one, while the short one goes token by token
        turn = [(0, long[done : done + chunk]), (1, [short[len(logits[1])]])]
        for row, part in enumerate(paged.run(turn)):
            logits[row].append(part)
        done += chunk
    while len(logits[1]) < len(short):
        logits[1].extend(paged.run([(1, [short[len(logits[1])]])]))
    assert_equal_logits(torch.cat(logits[0]), expected(theirs, long))
    assert_equal_logits(torch.cat(logits[1]), expected(theirs, short))


@pytest.fixture(scope="module")
def model() -> CausalLM:
    torch.manual_seed(7)
    return ours_from(_llama().eval(), choose_kernels())


@pytest.mark.parametrize("rows", [[19, 4], [0], []])
def test_only_the_wanted_rows_have_logits(model: CausalLM, rows: list[int]) -> None:
    (prompt,) = prompts(20)
    every = Paged(model, 1, 24).run([(0, prompt)])[0]
    paged = Paged(model, 1, 24)
    some = model.forward(paged.batch([(0, prompt)], rows), paged.cache, NoHook())
    assert some.dtype is torch.float32
    torch.testing.assert_close(some, every[rows], rtol=1e-5, atol=1e-5)


def test_the_hook_frames_each_layers_write(model: CausalLM) -> None:
    paged = Paged(model, 1, 8)
    seen = []

    class Watch(NoHook):
        wants_layers = True

        def before_layer(self, layer: int) -> None:
            seen.append(("before", layer, paged.written_layers()))

        def after_layer(self, layer: int) -> None:
            seen.append(("after", layer, paged.written_layers()))

    paged.run([(0, [3, 4, 5])], Watch())
    assert seen == [
        ("before", 0, []),
        ("after", 0, [0]),
        ("before", 1, [0]),
        ("after", 1, [0, 1]),
        ("before", 2, [0, 1]),
        ("after", 2, [0, 1, 2]),
    ]


def test_a_missing_weight_is_named(model: CausalLM) -> None:
    weights = _llama().state_dict()
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        CausalLM(model.config, weights)
