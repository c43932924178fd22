"""The arithmetic of a model: paged attention, cache writes, linear layers, fused norms.

``reference`` is the definition; ``cpu`` has the same functions in C++, built at first use. Models call whichever
``choose_kernels`` returns and do not know which it is.
"""

from __future__ import annotations

import functools
import logging
from typing import Protocol

import torch

from mooncake.kernels import reference
from mooncake.kernels.cpu import CpuKernels
from mooncake.kernels.cpu_build import load_library
from mooncake.kernels.reference import Bounds, Gate, Matrices, Matrix
from mooncake.native import BuildFailed
from mooncake.precision import Coding, cpu_features

log = logging.getLogger(__name__)


class Linear(Protocol):
    """A linear layer; see ``reference.Linear``."""

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor: ...

    def rows(self, indices: torch.Tensor) -> torch.Tensor: ...


class Experts(Protocol):
    """The experts of a layer; see ``reference.Experts``."""

    def __call__(self, hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor: ...


class Kernels(Protocol):
    """The functions of ``reference``, whose docstrings define them. A module is an implementation."""

    @property
    def device(self) -> torch.device:
        """Where they compute, and so where weights belong."""
        ...

    def linear(self, weight: Matrix, bias: torch.Tensor | None = None, coding: Coding = "") -> Linear: ...

    def experts(
        self,
        gate_up: Matrices,
        down: Matrices,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        bounds: Bounds | None = None,
        first: int = 0,
        gate: Gate = "silu",
        coding: Coding = "",
    ) -> Experts: ...

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...

    def add_rms_norm(
        self, residual: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor: ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor: ...

    def rope_write_kv(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        cache_layer: torch.Tensor,
        slots: torch.Tensor,
        query_norm: torch.Tensor | None = None,
        key_norm: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> torch.Tensor: ...

    def paged_attention(
        self,
        query: torch.Tensor,
        cache_layer: torch.Tensor,
        block_tables: torch.Tensor,
        query_starts: torch.Tensor,
        context_lens: torch.Tensor,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


class HostKernels(Kernels, Protocol):
    """Those of CPUs, which attend over parts of a context and at any positions, too, and move KV in the cache."""

    def copy_turned(
        self,
        cache_layer: torch.Tensor,
        sources: torch.Tensor,
        slots: torch.Tensor,
        shifts: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> None: ...

    def partial_attention(
        self,
        query: torch.Tensor,
        cache_layer: torch.Tensor,
        block_tables: torch.Tensor,
        query_starts: torch.Tensor,
        context_lens: torch.Tensor,
        positions: torch.Tensor,
        scale: float,
        softcap: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


@functools.cache
def choose_kernels() -> HostKernels:
    """The fastest kernels that work here. The first call may compile for some seconds."""
    try:
        kernels = CpuKernels(load_library())
    except BuildFailed as error:
        log.warning("using the slow torch kernels: %s", error)
        return reference
    warn_of_unused_units(kernels)
    return kernels


def warn_of_unused_units(kernels: CpuKernels) -> None:
    """An old system or compiler, or a sandbox, can keep the processor's matrix unit from us: nobody should wonder why
    bfloat16 is slow."""
    if "amx_bf16" in cpu_features() and not kernels.has_matrix_unit:
        log.warning(
            "the processor's matrix unit (AMX) is not used, so prompts in bfloat16 take longer: "
            "the compiler does not know it, or the system does not let this process have it"
        )
