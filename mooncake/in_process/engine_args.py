"""The settings of an engine in this process, as one value: ``mooncake.AsyncEngineArgs``. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mooncake.llm_absent import OF_LLM, form_says_counterparts
from mooncake.sampling import MAX_TOP_LOGPROBS

if TYPE_CHECKING:
    import torch

CHUNK_TOKENS = 1024  # four times a node's: nobody waits for tokens between the steps, and weights are read less often


@form_says_counterparts(OF_LLM)
@dataclass(frozen=True, slots=True)
class EngineArgs:
    """What ``LLM`` takes, by the same names; it says what each means. Raises TypeError for other names; of vLLM's, it
    says what stands for them. Values are checked when an engine is opened with them."""

    model: str = "smollm2"
    dtype: str | torch.dtype = "float32"
    kv_gb: float = 1.0
    block_tokens: int = 64
    chunk_tokens: int = CHUNK_TOKENS
    max_sequences: int = 64
    max_model_len: int = 0
    threads: int = 0
    kv_dtype: str = "auto"
    weights: str = "auto"
    key_scales: str = ""
    speculative_tokens: int = 0
    tbt_limit_ms: float = 0.0
    swap_gb: float = 0.25
    draft_model: str = ""
    adapters: Mapping[str, str] | None = None
    device: str = "cpu"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    generation_config: str = "auto"
    max_logprobs: int = MAX_TOP_LOGPROBS
    chat_template: str | Path | None = None


AsyncEngineArgs = EngineArgs  # by its name in vLLM
