"""A cluster that serves large language models, with prefill and decode on different nodes around one KV-cache pool.

``LLM`` and ``AsyncLLM`` run a model inside this process, ``Client`` talks to a cluster. Names are imported when they
are first used, so that ``import mooncake`` costs nothing and only the first two bring in torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mooncake import errors
    from mooncake.client import Client
    from mooncake.in_process.answers import CompletionOutput, RequestMetrics, RequestOutput
    from mooncake.in_process.async_llm import AsyncLLM, AsyncLLMEngine
    from mooncake.in_process.embeddings import EmbeddingRequestOutput, PoolingParams, ScoringRequestOutput
    from mooncake.in_process.engine_args import AsyncEngineArgs, EngineArgs
    from mooncake.in_process.inputs import LoRARequest, TextPrompt, TokensPrompt
    from mooncake.in_process.llm import LLM
    from mooncake.sampling import BeamSearch, Guide, GuideKind, RepetitionDetection, ThinkingBudget
    from mooncake.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams
    from mooncake.tls import Tls

    __version__: str

# gRPC writes lines of its own to stderr: of a connection that a peer ends, a certificate that it does not trust, a port
# that is taken. Those who call are told anyway. It reads this when it is imported, which is therefore not done before.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearch",
    "BeamSearchParams",
    "Client",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "Guide",
    "GuideKind",
    "LoRARequest",
    "PoolingParams",
    "RepetitionDetection",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "ThinkingBudget",
    "Tls",
    "TokensPrompt",
    "errors",
]

_HOMES = {
    "LLM": "mooncake.in_process.llm",
    "AsyncLLM": "mooncake.in_process.async_llm",
    "AsyncLLMEngine": "mooncake.in_process.async_llm",
    "AsyncEngineArgs": "mooncake.in_process.engine_args",
    "EngineArgs": "mooncake.in_process.engine_args",
    "Client": "mooncake.client",
    "CompletionOutput": "mooncake.in_process.answers",
    "RequestMetrics": "mooncake.in_process.answers",
    "RequestOutput": "mooncake.in_process.answers",
    "EmbeddingRequestOutput": "mooncake.in_process.embeddings",
    "PoolingParams": "mooncake.in_process.embeddings",
    "ScoringRequestOutput": "mooncake.in_process.embeddings",
    "LoRARequest": "mooncake.in_process.inputs",
    "TextPrompt": "mooncake.in_process.inputs",
    "TokensPrompt": "mooncake.in_process.inputs",
    "BeamSearchParams": "mooncake.sampling_params",
    "RequestOutputKind": "mooncake.sampling_params",
    "SamplingParams": "mooncake.sampling_params",
    "StructuredOutputsParams": "mooncake.sampling_params",
    "BeamSearch": "mooncake.sampling",
    "Guide": "mooncake.sampling",
    "GuideKind": "mooncake.sampling",
    "RepetitionDetection": "mooncake.sampling",
    "ThinkingBudget": "mooncake.sampling",
    "Tls": "mooncake.tls",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("mooncake-cluster")
    if name == "errors":
        return importlib.import_module("mooncake.errors")
    if not name.startswith("_"):
        absent = importlib.import_module("mooncake.llm_absent")
        if reason := absent.OF_IMPORTS.get(name):
            sentence = f"mooncake has no {name}, which is vLLM's: {reason}"
            if sys._getframe(1).f_globals.get("__name__") == "importlib._bootstrap":
                raise ImportError(sentence, name=name)  # `from mooncake import …` drops an AttributeError and its words
            raise AttributeError(sentence, name=name)
    raise AttributeError(f"module 'mooncake' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
