"""Models over the paged cache: ``load_model`` reads one, ``CausalLM.forward`` runs a ragged batch through it."""

from mooncake.model.batch import ForwardBatch, LayerHook, NoHook
from mooncake.model.llama import CausalLM
from mooncake.model.load import load_model

__all__ = ["CausalLM", "ForwardBatch", "LayerHook", "NoHook", "load_model"]
