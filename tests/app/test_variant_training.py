"""The variant of `mooncake bench variants`: its task, and that the trained weights are those served."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_model import write_tiny_model

from mooncake.app.variants.task import AMOUNTS, MostOfAll
from mooncake.app.variants.training import Trainee
from mooncake.checkpoint import open_checkpoint
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.errors import ConfigError
from mooncake.model import CausalLM, ForwardBatch, NoHook


@pytest.mark.parametrize("tied", [True, False])
def test_the_trained_pass_is_the_served_one(tmp_path: Path, tied: bool) -> None:
    write_tiny_model(tmp_path, num_hidden_layers=3, head_dim=16, tie_word_embeddings=tied)
    checkpoint = open_checkpoint(str(tmp_path))
    trainee = Trainee(checkpoint, rank=3, scale=2.0, seed=0)
    random = torch.Generator().manual_seed(1)
    for _, up in trainee.pairs.values():
        up.data.normal_(0, 0.3, generator=random)
    tokens = torch.randint(3, 300, (2, 20), generator=random)
    wanted = trainee.last_logits(tokens)

    model = CausalLM(checkpoint.config, trainee.merged())
    plain = CausalLM(checkpoint.config, Trainee(checkpoint, rank=3, scale=2.0, seed=0).merged())
    for row, prompt in zip(wanted, tokens, strict=True):
        batch = ForwardBatch.of_prompt(prompt, 8, torch.tensor([19]))
        got, before = (
            one.forward(batch, KVCache(checkpoint.kv_layout(8, "float32"), 3).tensor, NoHook())[0]
            for one in (model, plain)
        )
        torch.testing.assert_close(row.detach(), got, atol=2e-4, rtol=1e-3)
        assert not torch.allclose(before, got, atol=1e-2)


def test_every_projection_of_every_layer_learns(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, num_hidden_layers=3, head_dim=16)
    trainee = Trainee(open_checkpoint(str(tmp_path)), rank=2, scale=1.0, seed=0)
    trainee.last_logits(torch.randint(3, 300, (2, 9))).logsumexp(-1).sum().backward()  # type: ignore[no-untyped-call]
    assert len(trainee.pairs) == 3 * 7
    assert all(up.grad is not None and up.grad.any() for _, up in trainee.pairs.values())


def test_the_answer_is_the_name_with_the_highest_amount() -> None:
    tokenizer = open_checkpoint("smollm2").load_tokenizer()
    task = MostOfAll(tokenizer, 5)
    questions = task.questions(20, seed=3)
    assert questions == task.questions(20, seed=3) != task.questions(20, seed=4)
    assert len({len(question.prompt) for question in questions}) == 1
    order = AMOUNTS.split()
    for question in questions:
        *lines, ask = tokenizer.decode(question.prompt).split("\n")
        assert ask == "Most:" and len(lines) == 5
        pairs = [line.split(" has ") for line in lines]
        assert max(pairs, key=lambda pair: order.index(pair[1]))[0] == tokenizer.decode([question.answer])
    with pytest.raises(ConfigError, match="2 to 16 records"):
        MostOfAll(tokenizer, 17)
