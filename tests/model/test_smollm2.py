"""The demo model itself: greedy text equals transformers', and logits do not depend on how they were computed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from greedy import greedy
from transformers import LlamaConfig, LlamaForCausalLM

from mooncake.checkpoint import Checkpoint, open_checkpoint
from mooncake.model import CausalLM, ForwardBatch, NoHook, load_model
from mooncake.model.reading.weights import load_weights
from mooncake.precision import FLOAT32

SLOW = pytest.mark.slow
BLOCK_TOKENS = 64
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea, there lived an old fisherman who every morning " * 12,
]


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint("smollm2")


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> CausalLM:
    return load_model(checkpoint, FLOAT32, max_model_len=1024)


@pytest.fixture(scope="module")
def theirs(checkpoint: Checkpoint) -> LlamaForCausalLM:
    config = checkpoint.config
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_model_len,
                rms_norm_eps=config.rms_eps,
                rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
                tie_word_embeddings=True,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
    model = model.to_empty(device="cpu")
    weights = load_weights(checkpoint, "float32")
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    inverse = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    model.model.rotary_emb.inv_freq = inverse  # not a weight, so to_empty lost it
    return model.eval()


class OneSequence:
    """A sequence that owns a scattered cache: give it tokens, get the logits of the last one."""

    def __init__(self, model: CausalLM, max_tokens: int) -> None:
        config = model.config
        blocks = -(-max_tokens // BLOCK_TOKENS)
        self.model = model
        self.cache = torch.full(
            (blocks, config.num_layers, 2, config.num_kv_heads, BLOCK_TOKENS, config.head_dim), float("nan")
        )
        self.table = torch.randperm(blocks).int().unsqueeze(0)
        self.length = 0

    def feed(self, tokens: Sequence[int]) -> torch.Tensor:
        positions = torch.arange(len(tokens)) + self.length
        self.length += len(tokens)
        batch = ForwardBatch(
            tokens=torch.tensor(tokens),
            positions=positions,
            query_starts=torch.tensor([0, len(tokens)], dtype=torch.int32),
            context_lens=torch.tensor([self.length], dtype=torch.int32),
            block_tables=self.table,
            slots=self.table[0].long()[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS,
            logit_rows=torch.tensor([len(tokens) - 1]),
        )
        return self.model.forward(batch, self.cache, NoHook())[0]

    def continue_greedily(self, logits: torch.Tensor, num_tokens: int) -> list[int]:
        tokens = [int(logits.argmax())]
        while len(tokens) < num_tokens:
            tokens.append(int(self.feed(tokens[-1:]).argmax()))
        return tokens


@pytest.mark.parametrize(
    "text",
    [PROMPTS[0], pytest.param(PROMPTS[1], marks=SLOW), pytest.param(PROMPTS[2], marks=SLOW)],
    ids=["capital", "code", "long"],
)
def test_greedy_text_is_theirs(checkpoint: Checkpoint, model: CausalLM, theirs: LlamaForCausalLM, text: str) -> None:
    prompt = [int(token) for token in checkpoint.load_tokenizer().encode(text)]
    ours = OneSequence(model, len(prompt) + 32)
    tokens = ours.continue_greedily(ours.feed(prompt), 32)
    assert tokens == greedy(theirs, prompt, 32, tokens)


@pytest.mark.parametrize(
    ("chunk", "length"),
    [(1, BLOCK_TOKENS + 6), pytest.param(7, None, marks=SLOW), (64, None), (100, None)],
)
def test_chunks_change_no_bit(checkpoint: Checkpoint, model: CausalLM, chunk: int, length: int | None) -> None:
    prompt = [int(token) for token in checkpoint.load_tokenizer().encode(PROMPTS[2])][:length]
    assert len(prompt) > max(2 * chunk, BLOCK_TOKENS)
    whole, pieces = OneSequence(model, len(prompt)), OneSequence(model, len(prompt))
    expected = whole.feed(prompt)
    for first in range(0, len(prompt), chunk):
        logits = pieces.feed(prompt[first : first + chunk])
    assert torch.equal(logits, expected)
