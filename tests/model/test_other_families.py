"""The families whose weights are not Llama's: folders as publishers write them, against transformers' own models."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Dots1Config,
    Dots1ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from mooncake.checkpoint import Checkpoint, open_checkpoint
from mooncake.engine.engine import Engine, EngineConfig
from mooncake.engine.kv_cache import KVCache
from mooncake.engine.sequence import Sequence
from mooncake.errors import ModelError
from mooncake.hashing import Chain
from mooncake.kernels import choose_kernels, reference
from mooncake.model.load import load_model
from mooncake.model.weights import load_weights
from mooncake.types import SamplingParams

VOCAB = 97
NEW_TOKENS = 12
IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
EVEN = {"vocab_size": VOCAB, "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6, **IDS}
GATED = {**EVEN, "intermediate_size": 160, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}

LATENT = {
    **{**EVEN, "num_hidden_layers": 4},
    **{"intermediate_size": 160, "moe_intermediate_size": 48, "num_experts_per_tok": 3, "n_shared_experts": 2},
    **{"first_k_dense_replace": 1, "kv_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24},
    **{"v_head_dim": 20, "max_position_embeddings": 512, "initializer_range": 0.2},
}
GLM_MOE = {
    **GATED,
    **{"moe_intermediate_size": 48, "num_experts_per_tok": 3, "n_routed_experts": 6, "first_k_dense_replace": 1},
    "initializer_range": 0.2,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
}

FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=96, n_layer=3, n_head=6, n_positions=512, initializer_range=0.15, **IDS)
    ),
    "opt": lambda: OPTForCausalLM(
        OPTConfig(**EVEN, ffn_dim=160, word_embed_proj_dim=96, max_position_embeddings=512, init_std=0.15)
    ),
    "gpt2-with-a-head": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_embd=96,
            n_layer=3,
            n_head=6,
            n_positions=512,
            initializer_range=0.15,
            scale_attn_weights=False,
            tie_word_embeddings=False,
            **IDS,
        )
    ),
    "opt-with-a-head": lambda: OPTForCausalLM(
        OPTConfig(
            **EVEN,
            ffn_dim=160,
            word_embed_proj_dim=96,
            max_position_embeddings=512,
            init_std=0.15,
            tie_word_embeddings=False,
        )
    ),
    "gpt-neox": lambda: GPTNeoXForCausalLM(
        GPTNeoXConfig(**EVEN, intermediate_size=160, max_position_embeddings=512, initializer_range=0.15)
    ),
    "gpt-neox-in-turn": lambda: GPTNeoXForCausalLM(
        GPTNeoXConfig(
            **EVEN,
            intermediate_size=160,
            max_position_embeddings=512,
            use_parallel_residual=False,
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 1.0},
            initializer_range=0.15,
        )
    ),
    "starcoder2": lambda: Starcoder2ForCausalLM(
        Starcoder2Config(
            **EVEN,
            num_key_value_heads=2,
            intermediate_size=160,
            max_position_embeddings=512,
            sliding_window=20,
            initializer_range=0.15,
        )
    ),
    "granite": lambda: GraniteForCausalLM(
        GraniteConfig(
            **GATED,
            tie_word_embeddings=True,
            embedding_multiplier=3.0,
            attention_multiplier=0.15,
            residual_multiplier=0.4,
            logits_scaling=2.0,
            initializer_range=0.2,
        )
    ),
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**GATED, initializer_range=0.2)),
    "olmo3": lambda: Olmo3ForCausalLM(
        Olmo3Config(
            **GATED,
            sliding_window=20,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 5e3}},
            initializer_range=0.2,
        )
    ),
    "hunyuan": lambda: HunYuanDenseV1ForCausalLM(
        HunYuanDenseV1Config(
            **GATED,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 1.0, "alpha": 1000.0},
            initializer_range=0.2,
        )
    ),
    "exaone-4": lambda: Exaone4ForCausalLM(
        Exaone4Config(**GATED, sliding_window=20, sliding_window_pattern=3, initializer_range=0.2)
    ),
    "exaone-4-without-windows": lambda: Exaone4ForCausalLM(
        Exaone4Config(**GATED, sliding_window=None, layer_types=["full_attention"] * 3, initializer_range=0.2)
    ),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            **GATED,
            sliding_window=20,
            query_pre_attn_scalar=24,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
            initializer_range=0.2,
        )
    ),
    "gemma2-without-caps": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            **GATED,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
            sliding_window=33,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            initializer_range=0.2,
        )
    ),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **GATED,
            sliding_window=20,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            query_pre_attn_scalar=24,
            initializer_range=0.15,
        )
    ),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **GATED,
            moe_intermediate_size=48,
            num_experts=6,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            initializer_range=0.2,
        )
    ),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**GATED, num_local_experts=6, num_experts_per_tok=2, sliding_window=20, initializer_range=0.2)
    ),
    "deepseek-v2": lambda: DeepseekV2ForCausalLM(DeepseekV2Config(**LATENT, q_lora_rank=None, n_routed_experts=6)),
    "deepseek-v2-in-groups": lambda: DeepseekV2ForCausalLM(
        DeepseekV2Config(
            **LATENT,
            q_lora_rank=24,
            n_routed_experts=8,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
            routed_scaling_factor=3.0,
            rope_parameters=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        )
    ),
    "deepseek-v3": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **LATENT,
            q_lora_rank=24,
            n_routed_experts=8,
            n_group=4,
            topk_group=2,
            rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        )
    ),
    "glm-4.5": lambda: Glm4MoeForCausalLM(
        Glm4MoeConfig(**GLM_MOE, use_qk_norm=True, attention_bias=True, routed_scaling_factor=2.5)
    ),
    "glm-4.5-air": lambda: Glm4MoeForCausalLM(
        Glm4MoeConfig(
            **GLM_MOE,
            attention_bias=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        )
    ),
    "moonlight": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **LATENT, q_lora_rank=None, n_routed_experts=6, n_group=1, topk_group=1, routed_scaling_factor=2.446
        )
    ),
    "gpt-oss": lambda: GptOssForCausalLM(
        GptOssConfig(
            **GATED,
            num_local_experts=6,
            num_experts_per_tok=2,
            sliding_window=20,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 150_000.0,
                "factor": 8.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
            initializer_range=0.4,
        )
    ),
    "qwen2-moe": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            **GATED,
            moe_intermediate_size=48,
            shared_expert_intermediate_size=112,
            num_experts=6,
            num_experts_per_tok=2,
            initializer_range=0.2,
        )
    ),
    "olmoe": lambda: OlmoeForCausalLM(
        OlmoeConfig(**GATED, num_experts=6, num_experts_per_tok=2, initializer_range=0.2)
    ),
    "granite-moe": lambda: GraniteMoeForCausalLM(
        GraniteMoeConfig(
            **GATED,
            num_local_experts=6,
            num_experts_per_tok=2,
            embedding_multiplier=3.0,
            attention_multiplier=0.15,
            residual_multiplier=0.4,
            logits_scaling=2.0,
            initializer_range=0.2,
        )
    ),
    "dots1": lambda: Dots1ForCausalLM(
        Dots1Config(**GLM_MOE, n_shared_experts=1, routed_scaling_factor=2.5, norm_topk_prob=True)
    ),
    "dots1-without-norm": lambda: Dots1ForCausalLM(Dots1Config(**GLM_MOE, n_shared_experts=2, n_group=2, topk_group=1)),
    "ernie-4.5-moe": lambda: Ernie4_5_MoeForCausalLM(
        Ernie4_5_MoeConfig(
            **GATED,
            moe_intermediate_size=48,
            moe_num_experts=6,
            moe_k=3,
            moe_num_shared_experts=2,
            moe_layer_start_index=1,
            initializer_range=0.2,
        )
    ),
    "minimax-m2": lambda: MiniMaxM2ForCausalLM(
        MiniMaxM2Config(**GATED, num_local_experts=6, num_experts_per_tok=3, rotary_dim=8, initializer_range=0.2)
    ),
    "glm": lambda: GlmForCausalLM(GlmConfig(**GATED, attention_bias=False, initializer_range=0.2)),
    "glm4": lambda: Glm4ForCausalLM(Glm4Config(**GATED, partial_rotary_factor=0.75, initializer_range=0.2)),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**GATED, logit_scale=0.25, initializer_range=0.2)),
    "cohere-plus": lambda: CohereForCausalLM(CohereConfig(**GATED, use_qk_norm=True, initializer_range=0.2)),
    "cohere2": lambda: Cohere2ForCausalLM(
        Cohere2Config(
            **GATED,
            sliding_window=20,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            initializer_range=0.2,
        )
    ),
    "gptj": lambda: GPTJForCausalLM(
        GPTJConfig(
            vocab_size=VOCAB,
            n_embd=96,
            n_layer=3,
            n_head=6,
            n_positions=512,
            rotary_dim=8,
            initializer_range=0.15,
            **IDS,
        )
    ),
    "falcon-7b": lambda: FalconForCausalLM(FalconConfig(**EVEN, initializer_range=0.15)),
    "falcon-40b": lambda: FalconForCausalLM(
        FalconConfig(
            **EVEN,
            new_decoder_architecture=True,
            num_kv_heads=2,
            ffn_hidden_size=160,
            tie_word_embeddings=False,
            initializer_range=0.15,
        )
    ),
    "falcon2-11b": lambda: FalconForCausalLM(
        FalconConfig(
            **EVEN, new_decoder_architecture=True, num_ln_in_parallel_attn=1, num_kv_heads=2, initializer_range=0.15
        )
    ),
    "phi": lambda: PhiForCausalLM(
        PhiConfig(
            **EVEN,
            num_key_value_heads=2,
            intermediate_size=160,
            max_position_embeddings=512,
            partial_rotary_factor=0.5,
            initializer_range=0.15,
        )
    ),
    "stablelm": lambda: StableLmForCausalLM(
        StableLmConfig(
            **EVEN,
            num_key_value_heads=2,
            intermediate_size=160,
            max_position_embeddings=512,
            use_qkv_bias=True,
            initializer_range=0.15,
        )
    ),
    "stablelm-in-parallel": lambda: StableLmForCausalLM(
        StableLmConfig(
            **EVEN,
            num_key_value_heads=2,
            intermediate_size=160,
            max_position_embeddings=512,
            use_parallel_residual=True,
            partial_rotary_factor=1.0,
            initializer_range=0.15,
        )
    ),
    "nemotron": lambda: NemotronForCausalLM(NemotronConfig(**GATED, initializer_range=0.2)),
    "smollm3": lambda: SmolLM3ForCausalLM(
        SmolLM3Config(**GATED, no_rope_layers=[1, 0, 1], tie_word_embeddings=True, initializer_range=0.2)
    ),
    "seed-oss": lambda: SeedOssForCausalLM(SeedOssConfig(**GATED, initializer_range=0.2)),
    "ministral": lambda: MinistralForCausalLM(
        MinistralConfig(
            **GATED,
            sliding_window=20,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
            initializer_range=0.2,
        )
    ),
    "ernie-4.5": lambda: Ernie4_5ForCausalLM(Ernie4_5Config(**GATED, initializer_range=0.2)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**GATED, sliding_window=20, initializer_range=0.2)),
    "phi4-mini": lambda: Phi3ForCausalLM(
        Phi3Config(
            **GATED,
            tie_word_embeddings=True,
            sliding_window=4096,
            original_max_position_embeddings=128,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5],
                "long_factor": [1.0, 1.5, 2.5, 5.0, 9.0, 15.0],
            },
            initializer_range=0.2,
        )
    ),
}


class Published:
    """A random model of transformers', and the folder that its publisher would upload."""

    def __init__(self, family: str, folder: Path) -> None:
        torch.manual_seed(7)
        self.theirs = FAMILIES[family]().eval()
        with torch.no_grad():  # published models have neither zero biases nor all-one norms
            for name, parameter in (*self.theirs.named_parameters(), *self.theirs.named_buffers()):
                is_bias = name.endswith("e_score_correction_bias")
                if is_bias or (isinstance(parameter, torch.nn.Parameter) and is_flat(parameter)):
                    parameter.add_(torch.randn_like(parameter) * 0.3)
        self.theirs.save_pretrained(folder)
        self.folder = folder

    def rewrite(self, **changes: object) -> None:
        """Change config.json; None removes a key."""
        file = self.folder / "config.json"
        tree = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({key: value for key, value in tree.items() if value is not None}))

    @property
    def checkpoint(self) -> Checkpoint:
        return open_checkpoint(str(self.folder))

    @torch.no_grad()
    def greedy(self, prompt: list[int]) -> list[int]:
        tokens = list(prompt)
        for _ in range(NEW_TOKENS):
            tokens.append(int(self.theirs(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(prompt) :]


def is_flat(parameter: torch.Tensor) -> bool:
    return parameter.ndim == 1 or bool((parameter == 1).all())


@pytest.fixture(params=FAMILIES, scope="module")
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(request.param, tmp_path_factory.mktemp(request.param))


def answers(
    checkpoint: Checkpoint, prompts: list[list[int]], chunk_tokens: int, use_reference: bool
) -> list[list[int]]:
    """Greedy tokens through the engine: prompts in chunks, then all in one batch."""
    model = load_model(checkpoint, "float32", kernels=reference if use_reference else choose_kernels())
    layout = checkpoint.kv_layout(16, "float32")
    limit = checkpoint.config.max_model_len
    engine = Engine(model, KVCache(layout, 80), EngineConfig(16, chunk_tokens, 8, limit))
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
        tokens = np.array(prompt, np.uint32)
        engine.add(
            Sequence(str(index), tokens, len(tokens), sampling, Chain(bytes(32)), eos_ids=(), max_model_len=limit)
        )
    found: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for output in engine.step():
            found[int(output.request_id)].append(output.token.token_id)
    return found


@pytest.mark.parametrize("use_reference", [True, False], ids=["reference", "chosen"])
def test_tokens_are_theirs_one_for_one(published: Published, use_reference: bool) -> None:
    random = np.random.default_rng(4)
    prompts = [random.integers(2, VOCAB, length).tolist() for length in (75, 1, 30, 12, 5, 50, 3, 7)]
    found = answers(published.checkpoint, prompts, chunk_tokens=32, use_reference=use_reference)
    assert found == [published.greedy(prompt) for prompt in prompts]
    assert len({token for tokens in found for token in tokens}) >= 6, "a model that repeats itself proves nothing"


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
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    guessing = {"model.layers.4.eh_proj.weight": torch.ones(96, 192), "model.layers.4.enorm.weight": torch.ones(96)}
    save_file(load_file(file) | guessing, file)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 1}))
    assert answers(published.checkpoint, [[5, 6, 7]], 32, False) == [published.greedy([5, 6, 7])]
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 0, "num_mtp_layers": 0}))
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
    config = tmp_path / "config.json"
    lengths = {"max_position_embeddings": 24, "model_max_length": 200}
    config.write_text(json.dumps(json.loads(config.read_text()) | lengths))
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
        ("starcoder2", {"use_bias": False}, "leaves out the biases"),
        ("granite", {"residual_multiplier": 0.0}, "must be positive"),
        ("granite", {"mlp_bias": True}, "asks for mlp_bias"),
        ("olmo2", {"attention_bias": True}, "asks for attention_bias"),
        ("olmo3", {"rope_parameters": {"sliding_attention": YARN, "full_attention": YARN}}, "scales its positions"),
        ("hunyuan", {"rope_parameters": {"rope_type": "dynamic", "alpha": None}}, "by 'dynamic'"),
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
        ("deepseek-v3", {"rope_interleave": False}, "rope_interleave"),
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
        ("falcon-7b", {"alibi": True}, "asks for alibi or biases"),
        ("falcon-7b", {"multi_query": False}, "older form of Falcon"),
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
    Published(family, tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(ModelError, match=sentence):
        open_checkpoint(str(tmp_path))
