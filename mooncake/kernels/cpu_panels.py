"""Weights as the CPU library multiplies them: packed into panels, single layers and mixtures of experts."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator, Sequence

import torch

from mooncake.kernels import reference
from mooncake.kernels.cpu_library import (
    CODED_KINDS,
    GROUPED_CODES,
    POINTER,
    ROW_UNIT,
    WEIGHT_KINDS,
    WIDE_CODES,
    Experts,
    PackedLinear,
    activation_unit,
    check,
)
from mooncake.kernels.cpu_threads import num_threads
from mooncake.kernels.grouped import GroupedCodes
from mooncake.kernels.reference import GATES, Bounds, Codes, Gate, Matrix
from mooncake.precision import Coding

_CHUNK_BYTES = 32 << 20  # weights are packed into memory taken in pieces of this size
_APART_BYTES = 1 << 20  # and those that may go before the others into such pieces


class PanelLinear:
    """Weights interleaved in panels of some outputs each (see packed.h), in huge pages.

    Each output is one sum in a fixed order: a token's result is bit-identical whichever and however many tokens are
    computed with it.

    ``is_gated``: ``weight`` is gates above ups; both are interleaved, for SwiGLU inside the product, and then only
    ``address`` is useful.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        memory: WeightMemory,
        weight: Matrix,
        bias: torch.Tensor | None,
        coding: Coding = "",
        is_gated: bool = False,
    ) -> None:
        self._linear, self._unpack_rows = library.mc_linear, library.mc_unpack_rows
        self._outputs, self._inputs = weight.shape
        self._library, self._memory = library, memory
        self._width = int(library.mc_panel_width())
        self._order = torch.arange(self._outputs)
        if is_gated:  # like source_row of packed.h
            self._order = self._order.view(2, -1, self._width // 2).transpose(0, 1).flatten()
        self._layer = PackedLinear(inputs=self._inputs, outputs=self._outputs, is_gated=is_gated, hadamard=1)
        self.address = ctypes.addressof(self._layer)
        self._kept: dict[str, torch.Tensor] = {}  # what the layer points to
        if bias is not None:
            self._keep("bias", bias.float())
        if isinstance(weight, GroupedCodes):
            self._pack_groups(weight)
        else:
            self._pack(weight, coding)

    @property
    def num_bytes(self) -> int:
        """Bytes that a product reads, except activations."""
        return sum(part.nbytes for part in self._kept.values())

    def _keep(self, name: str, values: torch.Tensor) -> None:
        """One number per output, in the order of the panels."""
        padded = torch.nn.functional.pad(values[self._order], (0, -self._outputs % self._width)).contiguous()
        self._kept[name] = padded
        setattr(self._layer, name, padded.data_ptr())

    def _take(self, panel_bytes: int) -> int:
        """Memory for the panels, at its address."""
        panels = self._memory.take(-(-self._outputs // self._width) * panel_bytes)
        self._layer.panels = panels.data_ptr()
        self._kept["panels"] = panels
        return panels.data_ptr()

    def _pack(self, weight: torch.Tensor | Codes, coding: Coding) -> None:
        layer, coding = self._layer, weight.coding if isinstance(weight, Codes) else coding
        if coding:
            source, scales, layer.hadamard = reference.coded(weight, coding)
            self._keep("scales", scales)
            self._keep("sums", source.sum(1, dtype=torch.int32))
            is_wide = coding == "int8" and weight.dtype is torch.bfloat16 and activation_unit(self._library)
            layer.kind = WIDE_CODES if is_wide else CODED_KINDS[coding]
        else:
            assert isinstance(weight, torch.Tensor)
            source, layer.kind = weight, WEIGHT_KINDS[weight.dtype]
        source = source.contiguous()  # packing reads it by address
        row_bytes = self._inputs * source.element_size()
        panels = self._take(self._width * (row_bytes + -row_bytes % ROW_UNIT))
        check(self._library.mc_pack(self.address, source.data_ptr(), panels, num_threads()))

    def _pack_groups(self, weight: GroupedCodes) -> None:
        layer, scales, offsets = self._layer, weight.scales.contiguous(), weight.offsets
        codes, offsets = weight.codes.contiguous(), None if offsets is None else offsets.contiguous()
        layer.kind, layer.group = WEIGHT_KINDS[weight.dtype], weight.group
        layer.code_bits, layer.has_offsets = 8 if weight.levels is None else 4, offsets is not None
        if weight.levels is not None:
            self._kept["levels"] = weight.levels
            layer.levels = weight.levels.data_ptr()
        if weight.meets_codes:
            layer.kind = GROUPED_CODES
            layer.middle = 128 if weight.levels is None else -int(weight.levels.min().clamp(max=0))
        if weight.meets_codes and weight.levels is not None:
            self._kept["bytes"] = (weight.levels + layer.middle).to(torch.uint8)
            layer.bytes = self._kept["bytes"].data_ptr()
        group_bytes = 4 * (1 + layer.has_offsets) + layer.group * layer.code_bits // 8
        panels = self._take(self._width * self._inputs // layer.group * group_bytes)
        given = [None if each is None else each.data_ptr() for each in (codes, scales, offsets)]
        check(self._library.mc_pack_groups(self.address, *given, panels, num_threads()))

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens, inputs = hidden.shape
        stride, adjacent = hidden.stride()
        assert hidden.dtype is torch.float32 and inputs == self._inputs and adjacent == 1
        output = hidden.new_empty((tokens, self._outputs))
        check(self._linear(self.address, hidden.data_ptr(), stride, output.data_ptr(), tokens, num_threads()))
        return output

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Float32 for all types of weights."""
        output = torch.empty((len(indices), self._inputs))
        check(self._unpack_rows(self.address, indices.data_ptr(), len(indices), output.data_ptr()))
        return output


class PanelExperts:
    """``reference.Experts`` over such layers, in one call."""

    def __init__(
        self,
        library: ctypes.CDLL,
        gate_up: Sequence[PanelLinear],
        down: Sequence[PanelLinear],
        bounds: Bounds | None,
        first: int,
        gate: Gate,
    ) -> None:
        self._layers = (gate_up, down)
        self._addresses = [(POINTER * len(layers))(*(layer.address for layer in layers)) for layers in self._layers]
        both = (ctypes.addressof(addresses) for addresses in self._addresses)
        alpha, limit = (bounds.alpha, bounds.limit) if bounds else (1.0, 0.0)
        self._experts = Experts(*both, first, len(gate_up), alpha, limit, GATES.index(gate))
        self._run = library.mc_experts

    def __call__(self, hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        hidden, chosen, shares = hidden.contiguous(), chosen.contiguous(), shares.contiguous()
        assert hidden.dtype is shares.dtype is torch.float32 and chosen.dtype is torch.int64
        output = torch.empty_like(hidden)
        status = self._run(
            ctypes.byref(self._experts),
            hidden.data_ptr(),
            chosen.data_ptr(),
            shares.data_ptr(),
            *chosen.shape,
            output.data_ptr(),
            num_threads(),
        )
        check(status)
        return output


class WeightMemory:
    """Memory for packed weights, in huge pages if the system gives them: a step reads all of it."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._chunk_bytes = _CHUNK_BYTES

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """What is taken meanwhile shares pieces with nothing else: they are free as soon as all of it is."""
        usual = self._chunk, self._chunk_bytes
        self._chunk, self._chunk_bytes = torch.empty(0, dtype=torch.uint8), _APART_BYTES
        try:
            yield
        finally:
            self._chunk, self._chunk_bytes = usual

    def take(self, num_bytes: int) -> torch.Tensor:
        """Bytes that live as long as the tensor, or any other tensor from the same piece."""
        rounded = num_bytes + -num_bytes % 4096
        if rounded > len(self._chunk):
            # private: most systems have no huge pages for shared memory
            area = mmap.mmap(-1, max(rounded, self._chunk_bytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                area.madvise(mmap.MADV_HUGEPAGE)
            self._chunk = torch.frombuffer(area, dtype=torch.uint8)
        taken, self._chunk = self._chunk[:num_bytes], self._chunk[rounded:]
        return taken
