"""The class that computes each family but Llama's (``mooncake.model.llama``), by its name in config.json."""

from __future__ import annotations

from mooncake.model.decoder import Decoder
from mooncake.model.families.afmoe import Afmoe
from mooncake.model.families.cohere_moe import CohereMoe
from mooncake.model.families.deepseek import DeepSeek
from mooncake.model.families.dense_members import Apertus, Arcee, GraniteHybrid, HyperClova, NanoChat, Olmo
from mooncake.model.families.falcon_h1 import FalconH1
from mooncake.model.families.gated import Dense, Exaone4, Hunyuan, Olmo2
from mooncake.model.families.gemma import Gemma
from mooncake.model.families.gemma3n import Gemma3n
from mooncake.model.families.gemma4 import Gemma4
from mooncake.model.families.gpt import (
    Bloom,
    Falcon,
    Gpt,
    Gpt2,
    GptBigCode,
    GptJ,
    GptNeoX,
    Mpt,
    Nemotron,
    Opt,
    Rotating,
    StableLm,
)
from mooncake.model.families.gpt_oss import GptOss
from mooncake.model.families.hybrid import Qwen3Next
from mooncake.model.families.interleaved import Cohere, Glm
from mooncake.model.families.lfm2 import Lfm2
from mooncake.model.families.llama4 import Llama4
from mooncake.model.families.mamba import Bamba, GraniteMamba
from mooncake.model.families.moe import FlexOlmo, GraniteMoe, HunyuanMoe, MixtureOfExperts, Olmoe, Qwen3VlMoe
from mooncake.model.families.nemotron_h import NemotronH
from mooncake.model.families.routed import Ernie, GlmMoe, MiniMax
from mooncake.model_config import ModelConfig

DECODERS: dict[str, type[Decoder]] = {
    "gpt2": Gpt2,
    "gpt_bigcode": GptBigCode,
    "opt": Opt,
    "gpt_neox": GptNeoX,
    "bloom": Bloom,
    "mpt": Mpt,
    "starcoder2": Gpt,
    "gemma2": Gemma,
    "gemma3_text": Gemma,
    "qwen3_moe": MixtureOfExperts,
    "qwen3_vl_moe_text": Qwen3VlMoe,
    "mixtral": MixtureOfExperts,
    "granite": Dense,
    "hunyuan_v1_dense": Hunyuan,
    "olmo2": Olmo2,
    "olmo3": Olmo2,
    "exaone4": Exaone4,
    "deepseek_v2": DeepSeek,
    "deepseek_v3": DeepSeek,
    "kimi_k2": DeepSeek,
    "gemma": Gemma,
    "vaultgemma": Gemma,
    "gemma3n_text": Gemma3n,
    "gemma4_text": Gemma4,
    "gemma4_unified_text": Gemma4,
    "arcee": Arcee,
    "apertus": Apertus,
    "granitemoehybrid": GraniteHybrid,
    "olmo": Olmo,
    "nanochat": NanoChat,
    "hyperclovax": HyperClova,
    "glm4_moe_lite": DeepSeek,
    "minicpm3": DeepSeek,
    "youtu": DeepSeek,
    "mistral4": DeepSeek,
    "glm4_moe": GlmMoe,
    "solar_open": GlmMoe,
    "exaone_moe": GlmMoe,
    "llama4_text": Llama4,
    "afmoe": Afmoe,
    "hunyuan_v1_moe": HunyuanMoe,
    "hy_v3": GlmMoe,
    "gpt_oss": GptOss,
    "olmoe": Olmoe,
    "flex_olmo": FlexOlmo,
    "mellum": MixtureOfExperts,
    "granitemoe": GraniteMoe,
    "dots1": GlmMoe,
    "minimax_m2": MiniMax,
    "ernie4_5_moe": Ernie,
    "qwen2_moe": MixtureOfExperts,
    "glm": Glm,
    "glm4": Glm,
    "cohere": Cohere,
    "cohere2": Cohere,
    "cohere2_moe": CohereMoe,
    "gptj": GptJ,
    "falcon": Falcon,
    "phi": Rotating,
    "stablelm": StableLm,
    "nemotron": Nemotron,
    "jais2": Rotating,
    "qwen3_next": Qwen3Next,
    "qwen3_5_text": Qwen3Next,
    "qwen3_5_moe_text": Qwen3Next,
    **dict.fromkeys(("lfm2", "lfm2_moe"), Lfm2),
    "bamba": Bamba,
    "falcon_h1": FalconH1,
    "nemotron_h": NemotronH,
}


def decoder_of(config: ModelConfig) -> type[Decoder] | None:
    """None: the Llama family. Granite 4 has members with and without Mamba, under one name."""
    is_granite = config.architecture == "granitemoehybrid"
    return GraniteMamba if is_granite and config.mamba else DECODERS.get(config.architecture)
