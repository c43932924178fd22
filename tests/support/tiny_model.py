"""Tiny random models in Hugging Face folders, written by transformers itself: weights, configuration, tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": None,
}

LATENT: dict[str, Any] = {  # further settings of a "deepseek_v3"
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "initializer_range": 0.2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
}


def tiny_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A random model of ``family`` ("llama", "mistral", "qwen2", "qwen3") with norms and biases that matter."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(TINY | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE with a few merges and three control tokens, the first of the vocabulary."""
    control = [AddedToken(token, special=True) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY["vocab_size"],
        special_tokens=control,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog and the other dogs"] * 4, trainer)
    return tokenizer


def write_tiny_model(folder: Path, family: str = "llama", shards_of: str = "1GB", seed: int = 0, **changes: Any) -> Any:
    """Write the folder as a publisher would, and return transformers' own model."""
    model = tiny_model(family, seed, **changes)
    model.save_pretrained(folder, max_shard_size=shards_of)
    write_tokenizer(folder)
    return model


def write_tokenizer(folder: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer(), bos_token="<|endoftext|>", eos_token="<|im_end|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
