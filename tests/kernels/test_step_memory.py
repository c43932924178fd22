"""What a token takes while a GPU computes it: no more than ``sizing`` counts on, whatever the family.

In Triton's interpreter, where tensors are the host's and what is alive can be counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton", reason="triton is not installed")

from tiny_hybrid import write_hybrid
from tiny_mixtures import MIXTURES
from tiny_model import write_tiny_model

from mooncake.checkpoint import open_checkpoint
from mooncake.engine.backends.backend import BackendSpec, CacheSize, open_backend, plan_pages
from mooncake.kernels.gpu.triton_launch import INTERPRETED
from mooncake.model.batch import NoHook
from mooncake.model.gpu.gpu_model import GpuModel
from mooncake.precision import resolve_precision
from mooncake.sizing import token_bytes

FEW, MANY = 32, 96  # tokens

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not INTERPRETED, reason="what is alive on a GPU is the allocator's to say"),
]


class Alive(TorchDispatchMode):
    """Bytes of the tensors that were made since, at most at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most_bytes = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if (key := storage._cdata) not in given and key not in self._sizes and storage.nbytes():
                    self._sizes[key] = storage.nbytes()
                    weakref.finalize(storage, self._sizes.pop, key)
        self.most_bytes = max(self.most_bytes, sum(self._sizes.values()))
        return result


def mixture(name: str) -> Callable[[Path], Any]:
    family, settings = MIXTURES[name]
    return lambda folder: write_tiny_model(folder, family, **settings)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of tokens that are kept nowhere
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda folder: write_tiny_model(folder, head_dim=16, hidden_size=64), id="llama"),
        pytest.param(mixture("qwen3-moe"), id="mixture"),
        pytest.param(mixture("deepseek-v3"), id="latent"),
        pytest.param(lambda folder: write_hybrid("qwen3-next", folder), id="states"),
    ],
)
def test_a_token_takes_no_more_than_is_counted_on(write: Callable[[Path], Any], dtype: str, tmp_path: Path) -> None:
    write(tmp_path)
    checkpoint, precision = open_checkpoint(str(tmp_path)), resolve_precision(dtype, devices=("cuda",))
    groups, page = plan_pages(checkpoint, checkpoint.kv_layout(8, precision.kv_dtype), 128)
    size = CacheSize(page, 40, 128, max_sequences=4, groups=groups, max_step_tokens=MANY)
    backend = open_backend(BackendSpec(checkpoint, precision, size, "cuda"))
    model = backend.model
    assert isinstance(model, GpuModel)
    taken = []
    for tokens in (FEW, MANY):
        batch = model._batches.empty_step([0, tokens], tokens)
        for _ in range(2):  # the first step also makes what later ones find
            with Alive() as alive:
                model.forward(batch, backend.cache.tensor, NoHook())
        taken.append(alive.most_bytes)
    each = (taken[1] - taken[0]) / (MANY - FEW)
    assert 0 < each <= token_bytes(checkpoint.config, 4 if dtype == "float32" else 2)
