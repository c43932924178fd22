"""The families whose weights are not Llama's: folders as publishers write them, against transformers' own models."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from greedy import NEW_TOKENS, greedy_answers
from tiny_families import FAMILIES, VOCAB, YARN, Published

from mooncake.checkpoint import Checkpoint, open_checkpoint
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.engine.contract import EngineConfig
from mooncake.engine.engine import Engine
from mooncake.errors import ModelError
from mooncake.kernels import choose_kernels, reference
from mooncake.model.load import load_model
from mooncake.model.reading.weights import load_weights
from mooncake.precision import FLOAT32


@pytest.fixture(params=FAMILIES, scope="module")
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(request.param, tmp_path_factory.mktemp(request.param))


def answers(
    checkpoint: Checkpoint, prompts: list[list[int]], chunk_tokens: int, use_reference: bool
) -> list[list[int]]:
    """Greedy tokens through the engine: prompts in chunks, then all in one batch."""
    model = load_model(checkpoint, FLOAT32, kernels=reference if use_reference else choose_kernels())
    layout = checkpoint.kv_layout(16, "float32")
    limit = checkpoint.config.max_model_len
    engine = Engine(model, KVCache(layout, 80), EngineConfig(16, chunk_tokens, 8, limit))
    return greedy_answers(engine, prompts, NEW_TOKENS)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("use_reference", [True, False], ids=["reference", "chosen"])
def test_tokens_are_theirs_one_for_one(published: Published, use_reference: bool) -> None:
    random = np.random.default_rng(4)
    prompts = [random.integers(2, VOCAB, length).tolist() for length in (75, 1, 30, 12, 5, 50, 3, 7)]
    found = answers(published.checkpoint, prompts, chunk_tokens=32, use_reference=use_reference)
    assert found == published.greedy_all(prompts, found)
    assert len({token for tokens in found for token in tokens}) >= 6, "a model that repeats itself proves nothing"


def test_a_guess_changes_nothing_of_what_the_reference_answers(tmp_path: Path) -> None:
    published, prompt = Published("gpt-oss", tmp_path), [5, 6, 7]
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            tokens.append(int(published.theirs(torch.tensor([tokens])).logits[0, -1].argmax()))
    answer = tokens[3:]
    for guess in ([], answer, answer[:4], [*answer[:4], (answer[4] + 1) % VOCAB, *answer[5:]], [*answer, 9]):
        assert published.greedy(prompt, guess) == answer


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_names_without_the_familys_prefix_are_the_same_model(family: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    published = Published(family, tmp_path)
    expected = published.checkpoint.config
    file = tmp_path / "model.safetensors"
    prefix = {"gpt2": "transformer.", "opt": "model."}[family]
    bare = {name.removeprefix(prefix): tensor for name, tensor in load_file(file).items()}
    save_file(bare, file)
    assert published.checkpoint.config == expected
    assert answers(published.checkpoint, [[5, 6, 7]], 32, False) == [published.greedy([5, 6, 7])]


@pytest.mark.parametrize("family", ["gpt2", "gpt-neox"])
def test_tables_and_a_head_that_nobody_needs_may_be_there_and_nothing_else(family: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    published = Published(family, tmp_path)
    file, config = tmp_path / "model.safetensors", published.checkpoint.config
    stored = load_file(file)
    if family == "gpt2":
        spare, strange = ["transformer.h.0.attn.bias", "lm_head.weight"], "transformer.h.0.crossattention.c_attn.bias"
    else:
        attention = "gpt_neox.layers.0.attention."
        spare, strange = (
            [attention + "masked_bias", attention + "rotary_emb.inv_freq"],
            attention + "dense.weight_scale",
        )
    save_file(stored | {name: torch.ones(1) for name in spare}, file)
    assert published.checkpoint.config == config
    save_file(stored | {strange: torch.ones(1)}, file)
    with pytest.raises(ModelError, match=f"has the weight {strange}, which its"):
        open_checkpoint(str(tmp_path))


def test_layers_that_guess_further_tokens_are_left_out(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    published = Published("deepseek-v3", tmp_path)
    file = tmp_path / "model.safetensors"
    guessing = {"model.layers.4.eh_proj.weight": torch.ones(96, 192), "model.layers.4.enorm.weight": torch.ones(96)}
    save_file(load_file(file) | guessing, file)
    published.rewrite(num_nextn_predict_layers=1)
    assert answers(published.checkpoint, [[5, 6, 7]], 32, False) == [published.greedy([5, 6, 7])]
    published.rewrite(num_nextn_predict_layers=0, num_mtp_layers=0)
    with pytest.raises(ModelError, match=r"model\.layers\.4\.\w+\.weight, which its"):
        open_checkpoint(str(tmp_path))


def test_what_guesses_tokens_in_ernie_is_left_out(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    published = Published("ernie-4.5-moe", tmp_path)
    file, config = tmp_path / "model.safetensors", published.checkpoint.config
    save_file(load_file(file) | {"model.mtp_emb_norm.0.weight": torch.ones(96)}, file)
    assert published.checkpoint.config == config
    assert answers(published.checkpoint, [[5, 6, 7]], 32, False) == [published.greedy([5, 6, 7])]


def test_command_r_reads_as_much_as_its_publisher_says_and_not_what_it_was_trained_on(tmp_path: Path) -> None:
    published = Published("cohere", tmp_path)
    published.rewrite(max_position_embeddings=24, model_max_length=200)
    assert published.checkpoint.config.max_model_len == 200
    prompt = list(range(5, 65))
    assert answers(published.checkpoint, [prompt], 32, False) == [published.greedy(prompt)]


def test_olmo3_is_the_same_in_the_keys_of_its_publisher(tmp_path: Path) -> None:
    published = Published("olmo3", tmp_path)
    expected = published.checkpoint.config
    scaling = {name: value for name, value in YARN.items() if name != "rope_theta"}
    published.rewrite(rope_parameters=None, rope_theta=YARN["rope_theta"], rope_scaling=scaling)
    assert published.checkpoint.config == replace(expected, local_rope_theta=expected.rope_theta)


def test_minimax_is_the_same_in_the_keys_of_its_publisher(tmp_path: Path) -> None:
    published = Published("minimax-m2", tmp_path)
    expected = published.checkpoint.config
    assert expected.rotary_dim == 8
    published.rewrite(rope_parameters=None, rope_theta=expected.rope_theta, rotary_dim=8)
    assert published.checkpoint.config == expected


def test_what_chooses_experts_is_not_rounded(tmp_path: Path) -> None:
    checkpoint = Published("deepseek-v3", tmp_path).checkpoint
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    exact, rounded = (load_weights(checkpoint, dtype)[bias] for dtype in ("float32", "bfloat16"))
    assert exact.any() and torch.equal(exact, rounded)


def test_of_a_token_one_row_is_kept(tmp_path: Path) -> None:
    layout = Published("deepseek-v3", tmp_path).checkpoint.kv_layout(16, "bfloat16")
    assert layout.block_bytes == 4 * 16 * (48 + 16) * 2


@pytest.mark.parametrize(
    ("family", "change", "sentence"),
    [
        ("gpt2", {"activation_function": "mish"}, "activation 'mish'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("opt", {"do_layer_norm_before": False}, "norms after each layer"),
        ("opt", {"word_embed_proj_dim": 48}, "projects its embeddings"),
        ("gpt-neox", {"attention_bias": False}, "attention_bias"),
        ("gpt-neox", {"rope_parameters": {"partial_rotary_factor": float("nan")}}, "must be a share of a head"),
        ("starcoder2", {"use_bias": False}, "leaves out the biases"),
        ("granite", {"residual_multiplier": 0.0}, "must be positive"),
        ("granite", {"mlp_bias": True}, "asks for mlp_bias"),
        ("olmo2", {"attention_bias": True}, "asks for attention_bias"),
        ("olmo3", {"rope_parameters": {"sliding_attention": YARN, "full_attention": YARN}}, "scales its positions"),
        ("exaone-4", {"layer_types": None, "sliding_window_pattern": "LLG"}, "must be an integer"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "must be a positive number or null"),
        ("gemma2", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "not supported for this family"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("gemma3", {"layer_types": ["full_attention"]}, "each of the 3 layers"),
        ("qwen3-moe", {"decoder_sparse_step": 2}, "only some layers experts"),
        ("qwen3-moe", {"num_experts": 7}, "mlp.gate.weight has the shape"),
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "chooses experts by 'noaux_tc'"),
        ("deepseek-v2", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
        ("deepseek-v3", {"n_group": 3}, "cannot be chosen from 2 of 3 groups"),
        ("deepseek-v3", {"num_experts_per_tok": 5}, "cannot be chosen"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "only 'sigmoid'"),
        ("deepseek-v3", {"attention_bias": True}, "asks for attention_bias"),
        ("deepseek-v3", {"kv_lora_rank": 40}, "kv_a_proj_with_mqa.weight has the shape"),
        ("moonlight", {"moe_layer_freq": 2}, "only some layers experts"),
        ("qwen2-moe", {"mlp_only_layers": [1]}, "only some layers experts"),
        ("qwen2-moe", {"shared_expert_intermediate_size": 96}, "mlp.shared_expert.gate_proj.weight has the shape"),
        ("mixtral", {"num_local_experts": 5}, "block_sparse_moe.gate.weight has the shape"),
        ("mixtral", {"hidden_act": "gelu"}, "other than silu"),
        ("gpt-oss", {"attention_bias": False}, "leaves out the biases"),
        ("gpt-oss", {"swiglu_limit": 5.0}, "asks for a swiglu_limit of 5.0; supported: 7.0"),
        ("gpt-oss", {"rope_parameters": None}, "does not say how positions are scaled"),
        ("gpt-oss", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "'chunked_attention'"),
        ("olmoe", {"clip_qkv": 8.0}, "asks for clip_qkv"),
        ("granite-moe", {"num_local_experts": 5}, "block_sparse_moe.router.layer.weight has the shape"),
        ("dots1", {"layer_types": ["full_attention", "full_attention", "sliding_attention"]}, "a sliding window"),
        ("dots1", {"layer_types": None, "max_window_layers": 1}, "a sliding window"),
        ("ernie-4.5-moe", {"moe_layer_end_index": 1}, "gives its last layers no experts"),
        ("ernie-4.5-moe", {"moe_layer_interval": 2}, "only some layers experts"),
        ("minimax-m2", {"rope_parameters": None, "rotary_dim": 7}, "rotates 7 of a head's 16 elements"),
        ("glm4", {"attention_bias": False}, "k_proj.bias, which its"),
        ("cohere", {"attention_bias": True}, "asks for attention_bias"),
        ("cohere", {"use_qk_norm": True}, "lacks the weight model.layers.0.self_attn.q_norm.weight"),
        ("cohere2", {"sliding_window": -1}, "need a sliding_window, got -1"),
        ("mixtral", {"num_experts_per_tok": 7}, "a token cannot use 7 of 6 experts"),
        ("cohere2", {"logit_scale": 0.0}, "logit_scale must be positive"),
        ("gptj", {"rotary_dim": 18}, "rotates 18 of a head's 16 elements"),
        ("falcon-7b", {"multi_query": False}, r"self_attention\.query_key_value\.weight has the shape"),
        ("falcon-40b", {"parallel_attn": False}, "no parallel_attn in the new architecture"),
        ("falcon-40b", {"num_ln_in_parallel_attn": 1}, "lacks the weight transformer.h.0.input_layernorm.weight"),
        ("deepseek-v3", {"n_routed_experts": 10**9, "n_group": 1, "topk_group": 1}, "num_experts of the model must be"),
        ("qwen2-moe", {"num_experts": 10**9}, "num_experts of the model must be"),
        ("qwen2-moe", {"hidden_act": ["silu"]}, r"activation \['silu'\]"),
        ("deepseek-v3", {"qk_nope_head_dim": 10**400}, "qk_nope_head_dim must be between"),
        ("deepseek-v3", {"rms_norm_eps": 10**400}, "rms_norm_eps must be between"),
        ("deepseek-v3", {"routed_scaling_factor": math.nan}, "routed_scaling_factor must be positive"),
        ("deepseek-v3", {"rope_parameters": YARN | {"mscale": 1e308, "mscale_all_dim": 1e308}}, "mscale_all_dim"),
        ("glm4", {"rope_parameters": {"partial_rotary_factor": math.nan}}, "partial_rotary_factor"),
        ("glm4", {"rope_parameters": {"partial_rotary_factor": -1e308}}, "partial_rotary_factor"),
        ("cohere2", {"sliding_window_pattern": 0, "layer_types": None}, "sliding_window_pattern must be positive"),
        ("phi", {"qk_layernorm": True}, "asks for qk_layernorm"),
        ("stablelm", {"qk_layernorm": True}, "asks for qk_layernorm"),
        ("stablelm", {"hidden_act": "gelu"}, "other than silu"),
        ("stablelm", {"use_parallel_residual": True}, "post_attention_layernorm.bias, which its"),
        ("nemotron", {"mlp_bias": True}, "asks for mlp_bias"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers must be 0 or 1 for each of the 3 layers"),
        ("smollm3", {"no_rope_layers": [1, 0, 2]}, "no_rope_layers must be 0 or 1"),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval must be positive"),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 20}, "asks for use_sliding_window"),
        ("smollm3", {"use_cla": True, "cla_share_factor": 2}, "not supported for smollm3"),
        ("seed-oss", {"attention_bias": False}, "k_proj.bias, which its"),
        ("seed-oss", {"attention_out_bias": True}, "asks for attention_out_bias"),
        ("ernie-4.5", {"use_bias": True}, "asks for use_bias"),
        ("phi3", {"attention_bias": True}, "asks for attention_bias"),
        ("phi3", {"num_key_value_heads": 3}, "qkv_proj.weight has the shape"),
        ("phi3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "longrope, the family's only way"),
        ("phi4-mini", {"rope_parameters": {"partial_rotary_factor": 0.7}}, "rotates 11 of a head's 16 elements"),
        ("phi4-mini", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "rotates 24 of a head's 16 elements"),
    ],
)
def test_what_is_not_supported_is_one_sentence(
    family: str, change: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    Published(family, tmp_path).rewrite(**change)
    with pytest.raises(ModelError, match=sentence):
        open_checkpoint(str(tmp_path))
