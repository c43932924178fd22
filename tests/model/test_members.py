"""Families built of the parts of others: folders as publishers write them, against transformers' own models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import ranks_of
from safetensors.torch import load_file, save_file
from tiny_families import VOCAB, YARN, Published
from tiny_members import GROWING, MEMBERS
from tiny_mixtures import answers, answers_of

from mooncake.checkpoint import open_checkpoint
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.errors import ModelError
from mooncake.model.batch import ForwardBatch, NoHook
from mooncake.model.load import load_model
from mooncake.precision import FLOAT32

PROMPTS = [np.random.default_rng(4).integers(2, VOCAB, length).tolist() for length in (75, 1, 30, 12, 5, 50, 3, 7)]


@pytest.fixture(params=MEMBERS, scope="module")
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(request.param, tmp_path_factory.mktemp(request.param), MEMBERS)


@pytest.mark.slow
@pytest.mark.parametrize("use_reference", [True, False], ids=["reference", "chosen"])
def test_tokens_are_theirs_one_for_one(published: Published, use_reference: bool) -> None:
    found = answers_of(published.checkpoint, PROMPTS, use_reference=use_reference)
    assert found == published.greedy_all(PROMPTS, found)
    assert len({token for tokens in found for token in tokens}) >= 6, "a model that repeats itself proves nothing"


OVER_RANKS = ["ministral3", "mistral4", "glm-4.7-flash-in-groups", "youtu", "solar-open", "k-exaone", "hy3", "trinity"]
OVER_RANKS += ["hunyuan-moe", "llama-4", "flex-olmo", "mellum-2", "command-a-plus", "minicpm3"]
MAMBA = {"layer_types": ["mamba", "attention", "mamba"]}
IN_STAGES = [*OVER_RANKS, "afm", "apertus", "granite-4", "olmo-1", "nanochat", "hyperclova-x"]


@pytest.mark.parametrize(
    "family",
    [family if family == "mistral4" else pytest.param(family, marks=pytest.mark.slow) for family in OVER_RANKS],
)
def test_two_ranks_give_the_same_tokens(family: str, tmp_path: Path) -> None:
    folder = Published(family, tmp_path, MEMBERS)
    with ranks_of(str(tmp_path), 2, 60, 16) as ranks:
        found = answers(ranks.model, ranks.cache, PROMPTS)
        assert found == folder.greedy_all(PROMPTS, found)


@pytest.mark.parametrize("family", IN_STAGES)
def test_what_leaves_a_stage_is_all_that_the_next_one_needs(family: str, tmp_path: Path) -> None:
    checkpoint = Published(family, tmp_path, MEMBERS).checkpoint
    num_layers = checkpoint.config.num_layers
    stages = [load_model(checkpoint, FLOAT32, layers=layers) for layers in (range(1), range(1, num_layers))]
    whole, cache = (KVCache(checkpoint.kv_layout(16, "float32"), 60) for _ in range(2))
    batch = ForwardBatch.of_prompt(torch.tensor(PROMPTS[0]), 16, torch.tensor([74, 40]))
    wanted = load_model(checkpoint, FLOAT32).forward(batch, whole.tensor, NoHook())
    between = torch.empty(len(PROMPTS[0]), checkpoint.config.hidden_size)
    stages[0].forward(batch, cache.tensor, NoHook(), None, between)
    assert torch.equal(stages[1].forward(batch, cache.tensor, NoHook(), between), wanted)
    assert torch.equal(cache.tensor, whole.tensor)


@pytest.mark.parametrize("family", ["ministral3", "mistral4"])
def test_queries_grow_with_their_position(family: str, tmp_path: Path) -> None:
    """Otherwise the tokens above would be no evidence of it."""
    folder = Published(family, tmp_path, MEMBERS)
    wanted = [folder.greedy(prompt) for prompt in PROMPTS]
    folder.rewrite(rope_parameters=GROWING | {"llama_4_scaling_beta": 0.0})
    assert answers_of(folder.checkpoint, PROMPTS) != wanted


@pytest.mark.parametrize(
    ("change", "is_the_same"),
    [
        ({"attn_temperature_tuning": False}, False),
        ({"attention_chunk_size": 19}, False),
        ({"layer_types": ["full_attention"] * 4}, False),
        ({"no_rope_layers": [], "layer_types": None, "no_rope_layer_interval": 2}, True),  # as published
    ],
)
def test_what_llama_4_says_of_attention_matters(change: dict[str, object], is_the_same: bool, tmp_path: Path) -> None:
    folder = Published("llama-4", tmp_path, MEMBERS)
    wanted = [folder.greedy(prompt) for prompt in PROMPTS]
    folder.rewrite(**change)
    assert (answers_of(folder.checkpoint, PROMPTS) == wanted) == is_the_same


def test_layers_that_guess_tokens_are_left_out(tmp_path: Path) -> None:
    folder = Published("k-exaone", tmp_path, MEMBERS)
    file, config = tmp_path / "model.safetensors", folder.checkpoint.config
    assert config.still_layers == (1,) and config.layer_windows == (20, 0, 20)
    save_file(load_file(file) | {"mtp.fc.weight": torch.ones(96, 192)}, file)
    assert folder.checkpoint.config == config


@pytest.mark.parametrize(
    ("family", "change", "sentence"),
    [
        ("ministral3", {"rope_parameters": None}, "does not say how positions are scaled"),
        ("ministral3", {"rope_parameters": YARN | {"llama_4_scaling_beta": -0.5}}, "must not be negative"),
        ("ministral3", {"rope_parameters": {"llama_4_scaling_beta": 0.5}}, "needs original_max_position_embeddings"),
        ("ministral3", {"attention_bias": True}, "asks for attention_bias"),
        ("mistral4", {"n_group": 2}, "from groups"),
        ("mistral4", {"n_routed_experts": 7}, "mlp.gate.weight has the shape"),
        ("glm-4.7-flash", {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}, "dense layers, then sparse"),
        ("glm-4.7-flash", {"mlp_layer_types": ["dense", "sparse"]}, "4 in all"),
        ("glm-4.7-flash", {"mlp_layer_types": "dense"}, "mlp_layer_types must be"),
        ("minicpm3", {"scale_depth": 0}, "scale_depth and dim_model_base must be positive"),
        ("minicpm3", {"dim_model_base": 0}, "must be positive, got a factor of -96"),
        ("youtu", {"attention_bias": True}, "asks for attention_bias"),
        ("solar-open", {"n_group": 4}, "cannot be chosen from"),
        ("k-exaone", {"layer_types": None, "sliding_window_pattern": "LLG"}, "must be an integer"),
        ("k-exaone", {"num_experts": 9}, "cannot be chosen from"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma", {"hidden_activation": "mish"}, "activation 'mish'"),
        ("vaultgemma", {"attn_logit_softcapping": -1.0}, "must be a positive number or null"),
        ("afm", {"hidden_act": "mish"}, "activation 'mish'"),
        ("afm", {"mlp_bias": True}, "asks for mlp_bias"),
        ("apertus", {"hidden_act": "silu"}, "only xielu"),
        ("apertus", {"rope_parameters": None}, "does not say how positions are scaled"),
        (
            "granite-4",
            {"layer_types": ["mamba", "attention", "mamba"]},
            "lacks the weight model.layers.0.mamba.in_proj",
        ),
        ("granite-4", {"layer_types": ["mamba"] * 3}, "some of 3 layers must attend"),
        ("granite-4", {"layer_types": ["mamba", "attention", "rwkv"]}, "of the kind 'rwkv'"),
        ("granite-4", {"layer_types": None}, "layer_types must name the kind"),
        ("granite-4", {"num_local_experts": 4}, "experts and no layers of Mamba"),
        ("granite-4", {**MAMBA, "time_step_limit": [0.0, 0.5]}, "time_step_limit"),
        ("granite-4", {**MAMBA, "mamba_d_head": 40}, "4 heads of Mamba of 40 are not 192"),
        ("trinity", {"score_func": "softmax"}, "score_func"),
        ("trinity", {"route_norm": False}, "normalised sigmoids"),
        ("trinity", {"attention_bias": True}, "asks for attention_bias"),
        ("trinity", {"global_attn_every_n_layers": 0, "layer_types": None}, "must be positive"),
        ("hunyuan-moe", {"moe_topk": [3, 2, 3]}, "moe_topk differs between layers"),
        ("hunyuan-moe", {"num_experts": 7}, "mlp.gate.wg.weight has the shape"),
        ("iquest-coder", {"clip_qkv": 8.0}, "asks for clip_qkv"),
        ("internlm3", {"bias": True}, "asks for bias"),
        ("command-a-plus", {"rms_norm_eps": 1e-5}, "norms of another kind"),
        ("command-a-plus", {"expert_selection_fn": "top"}, "chooses experts by 'top'"),
        ("command-a-plus", {"shared_expert_combination_strategy": "most"}, "adds its shared expert by 'most'"),
        ("command-a-plus", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must be dense or sparse"),
        ("command-a-plus", {"layer_types": None, "sliding_window_pattern": 0}, "must be positive, got 0 and 1"),
        ("command-a-plus", {"num_experts": 5}, "mlp.gate.weight has the shape"),
        ("starcoder", {"multi_query": False}, "multi_query"),
        ("jais-2", {"mlp_bias": False}, "leaves out the biases"),
        ("olmo-1", {"clip_qkv": -1.0}, "clip_qkv must be a positive number or null"),
        ("olmo-1", {"attention_bias": True}, "asks for attention_bias"),
        ("nanochat", {"final_logit_softcapping": -1.0}, "must be a positive number or null"),
        ("hyperclova-x", {"use_post_norm": False}, "leaves out norms"),
        ("flex-olmo", {"num_experts": 5}, "mlp.gate.weight has the shape"),
        ("mellum-2", {"mlp_layer_types": ["dense", "sparse", "sparse"]}, "only some layers experts"),
        ("mellum-2", {"rope_parameters": None}, "how layers of full_attention rotate"),
        ("cwm", {"rope_parameters": None}, "does not say how positions are scaled"),
        ("hy3", {"model_type": "mistral_large4_text"}, "an indexer that chooses"),
        ("hy3", {"model_type": "laguna"}, "layers with different numbers of heads"),
        ("llama-4", {"attention_bias": True}, "asks for attention_bias"),
        ("llama-4", {"attention_chunk_size": 0}, "attention_chunk_size must be positive"),
        ("llama-4", {"layer_types": ["full_attention"]}, "each of the 4 layers"),
        ("llama-4", {"layer_types": ["sliding_attention"] * 4}, "of the kind 'sliding_attention'"),
        ("llama-4", {"moe_layers": None, "interleave_moe_layer_step": 0}, "interleave_moe_layer_step must be positive"),
        ("llama-4", {"moe_layers": ["all"]}, "moe_layers must be numbers"),
        ("llama-4", {"moe_layers": [0]}, "model.layers.0.feed_forward"),
        ("llama-4", {"floor_scale": 0}, "floor_scale must be positive"),
        ("llama-4", {"no_rope_layers": [1, 0]}, "no_rope_layers must be 0 or 1"),
        ("llama-4", {"num_hidden_layers": 10**9}, "num_layers of the model must be between"),
        ("hy3", {"model_type": "kimi_linear"}, "a recurrent state in place of KV"),
        ("hy3", {"mlp_bias": True}, "asks for mlp_bias"),
        ("hy3", {"attention_bias": True}, "asks for attention_bias"),
        ("hy3", {"num_shared_experts": 2}, "mlp.shared_mlp.gate_proj.weight has the shape"),
    ],
)
def test_what_is_not_supported_is_one_sentence(
    family: str, change: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    Published(family, tmp_path, MEMBERS).rewrite(**change)
    with pytest.raises(ModelError, match=sentence):
        open_checkpoint(str(tmp_path))
