"""The settings of an engine in this process, as one value: ``mooncake.AsyncEngineArgs``. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mooncake.config import EngineSection
from mooncake.llm_absent import OF_LLM, form_says_counterparts
from mooncake.sampling import MAX_TOP_LOGPROBS
from mooncake.sizing import GPU_MEMORY_UTILIZATION

if TYPE_CHECKING:
    import torch

CHUNK_TIMES = 4  # a node's chunks: nobody waits for tokens between the steps, and weights are read less often
CHUNK_TOKENS = CHUNK_TIMES * EngineSection().chunk_tokens  # on CPUs


@form_says_counterparts(OF_LLM)
@dataclass(frozen=True, slots=True)
class EngineArgs:
    """What ``LLM`` takes, by the same names; it says what each means. Raises TypeError for other names; of vLLM's, it
    says what stands for them. Values are checked when an engine is opened with them."""

    model: str = "smollm2"
    dtype: str | torch.dtype = "float32"
    kv_gb: float = 0.0
    gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION
    block_tokens: int = 64
    chunk_tokens: int = -1
    max_sequences: int = 0
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

    @property
    def step_tokens(self) -> int:
        """``chunk_tokens``, or what follows from the device."""
        return CHUNK_TIMES * self._node.chunk_tokens if self.chunk_tokens == -1 else self.chunk_tokens

    @property
    def most_sequences(self) -> int:
        """``max_sequences``, or what follows from the device."""
        return self.max_sequences or self._node.max_sequences

    @property
    def _node(self) -> EngineSection:
        return EngineSection(device=self.device)


AsyncEngineArgs = EngineArgs  # by its name in vLLM
